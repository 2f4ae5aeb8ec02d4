"""Convert a model between Hugging Face, Megatron-core and megafp8, and verify the result."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafp8.command.ending import run_tool  # noqa: E402
from megafp8.command.parser import ToolParser, positive, to_path  # noqa: E402

FORMATS = ("hf", "megatron", "megafp8")


def main() -> int:
    parser = ToolParser(__doc__ or "")
    parser.add_argument("--from", required=True, choices=FORMATS, dest="source", help="of --load")
    parser.add_argument("--to", required=True, choices=FORMATS, dest="target", help="of --save")
    parser.add_argument("--load", required=True, type=to_path, help="folder of the model")
    parser.add_argument("--save", required=True, type=to_path, help="folder to make")
    parser.add_argument(
        "--dtype",
        default="keep",
        choices=("keep", "fp32", "bf16", "fp16"),
        help="of the weights written; megafp8 itself stores fp32 masters",
    )
    parser.add_argument(
        "--fp8",
        default="none",
        choices=("none", "scales", "static", "dynamic", "blockwise"),
        help="with --to hf: scale state beside the weights, or weights baked into FP8",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=positive,
        metavar="N",
        help="padding of the vocabulary (128; a checkpoint's own is kept)",
    )
    parser.add_argument("--seq-length", type=positive, metavar="N", help="context in config.yaml")
    parser.add_argument("--max-shard-size", default="5GB", help="of one safetensors file")
    parser.add_argument(
        "--ignore-config-field", nargs="+", default=[], metavar="NAME", help="of config.json"
    )
    parser.add_argument(
        "--config", type=to_path, help="YAML of a Megatron model whose checkpoint has no args"
    )
    args = vars(parser.parse_args())
    args["ignore_config_fields"] = tuple(args.pop("ignore_config_field"))

    def work() -> list[str]:
        # Imported here: torch takes seconds, and --help needs none of it.
        from megafp8.convert.run import ConvertOptions, convert

        return convert(ConvertOptions(**args))

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
