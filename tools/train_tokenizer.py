"""Train a tokenizer on JSONL or text files; the same input gives the same tokenizer."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafp8.command.ending import run_tool  # noqa: E402
from megafp8.command.parser import ToolParser, positive, to_path  # noqa: E402
from megafp8.data.train_tokenizer import (  # noqa: E402
    DEFAULT_MAX_BYTES,
    MINIMUM_VOCAB_SIZE,
    TYPES,
    train_tokenizer,
)


def main() -> int:
    parser = ToolParser(__doc__ or "")
    parser.add_input_arguments()
    output_help = "folder for the tokenizer"
    parser.add_argument("--output", required=True, type=to_path, metavar="DIR", help=output_help)
    parser.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help=f"ids, special ones included, {MINIMUM_VOCAB_SIZE} or more",
    )
    parser.add_argument(
        "--type",
        required=True,
        choices=TYPES,
        help="sentencepiece: tokenizer.model; bpe: byte-level tokenizer.json",
    )
    parser.add_argument(
        "--max-bytes",
        type=positive,
        default=DEFAULT_MAX_BYTES,
        metavar="N",
        help="bytes of text to train on at most, sampled evenly",
    )
    args = parser.parse_args()
    return run_tool(
        lambda: train_tokenizer(
            args.input,
            args.output,
            args.vocab_size,
            args.type,
            globs=args.glob,
            exclude=args.exclude,
            json_keys=args.json_keys,
            max_bytes=args.max_bytes,
            skip_bad_records=args.skip_bad_records,
        ).lines()
    )


if __name__ == "__main__":
    sys.exit(main())
