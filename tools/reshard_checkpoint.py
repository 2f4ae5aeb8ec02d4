"""Write a checkpoint as the ranks of another layout would have saved it, in one process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafp8.command.ending import run_tool  # noqa: E402
from megafp8.command.parser import ToolParser, positive, to_path  # noqa: E402
from megafp8.config.parallel import SCHEDULES  # noqa: E402

SIZES = {
    "tensor-model-parallel-size": "ranks that split each linear",
    "pipeline-model-parallel-size": "ranks that split the layers",
    "fsdp-size": "ranks that shard parameters",
    "replicate-size": "copies of each set of shards",
}


def main() -> int:
    parser = ToolParser(__doc__ or "")
    load_help = "folder of checkpoints, or one of them"
    parser.add_argument("--load", required=True, type=to_path, help=load_help)
    parser.add_argument("--save", required=True, type=to_path, help="folder for the new checkpoint")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, default=1, metavar="N", help=text)
    parser.add_argument(
        "--num-layers-per-virtual-pipeline-stage",
        type=positive,
        metavar="N",
        help="layers per model chunk; gives the interleaved schedule",
    )
    parser.add_argument(
        "--pipeline-schedule",
        choices=SCHEDULES,
        help="which stages a rank holds depends on it",
    )
    args = vars(parser.parse_args())

    def work() -> list[str]:
        # Imported here: torch takes seconds, and --help needs none of it.
        from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint

        load, save = args.pop("load"), args.pop("save")
        return reshard_checkpoint(load, save, TargetLayout(**args)).lines()

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
