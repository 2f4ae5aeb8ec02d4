"""Continue a prompt with the model of a checkpoint, in one process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafp8.command.ending import run_tool  # noqa: E402
from megafp8.command.parser import ToolParser, path_text, positive, to_path  # noqa: E402
from megafp8.config.data import TOKENIZER_TYPES  # noqa: E402


def main() -> int:
    parser = ToolParser(__doc__ or "")
    load_help = "folder of checkpoints, or one of them"
    parser.add_argument("--load", required=True, type=to_path, metavar="DIR", help=load_help)
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=100, metavar="N", help="tokens to add at most"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 takes the most likely token each time",
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the draws")
    parser.add_argument(
        "--tokenizer-type", choices=TOKENIZER_TYPES, help="instead of the run's tokenizer"
    )
    model_help = "its file or folder, instead of the run's"
    parser.add_argument("--tokenizer-model", type=path_text, metavar="PATH", help=model_help)
    args = parser.parse_args()
    if args.temperature < 0:
        parser.error(f"--temperature {args.temperature}: allowed 0 or a positive number")

    def work() -> list[str]:
        # Imported here: torch takes seconds, and --help needs none of it.
        from megafp8.launch.sample import sample_text

        text = sample_text(
            args.load,
            args.prompt,
            args.max_new_tokens,
            args.temperature,
            args.seed,
            args.tokenizer_type,
            args.tokenizer_model,
        )
        return [text]

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
