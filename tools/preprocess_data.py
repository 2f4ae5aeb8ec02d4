"""Encode JSONL or text files into Megatron's .bin/.idx: <output-prefix>_<key>_document."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafp8.command.ending import run_tool  # noqa: E402
from megafp8.command.parser import ToolParser, path_text, positive  # noqa: E402
from megafp8.config.data import TOKENIZER_TYPES  # noqa: E402
from megafp8.data.preprocess import PreprocessOptions, preprocess  # noqa: E402


def main() -> int:
    parser = ToolParser(__doc__ or "")
    parser.add_input_arguments()
    parser.add_argument(
        "--output-prefix",
        required=True,
        type=path_text,
        metavar="PREFIX",
        help="beginning of the output paths",
    )
    parser.add_argument(
        "--tokenizer-type", required=True, choices=TOKENIZER_TYPES, help="kind of tokenizer"
    )
    model_help = "model file, or the folder that holds it"
    parser.add_argument("--tokenizer-model", type=path_text, metavar="PATH", help=model_help)
    parser.add_argument(
        "--vocab-size", type=positive, metavar="N", help="ordinary ids of NullTokenizer"
    )
    parser.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="processes; same output for any"
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document id"
    )
    args = parser.parse_args()
    options = PreprocessOptions(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_size=args.vocab_size,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        skip_bad_records=args.skip_bad_records,
    )
    return run_tool(
        lambda: preprocess(
            args.input,
            args.output_prefix,
            options,
            workers=args.workers,
            globs=args.glob,
            exclude=args.exclude,
        ).lines()
    )


if __name__ == "__main__":
    sys.exit(main())
