"""Show what a checkpoint holds and whether all its files are good; compare it with another."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafp8.command.ending import run_tool  # noqa: E402
from megafp8.command.parser import ToolParser, to_path  # noqa: E402
from megafp8.errors import CheckpointError  # noqa: E402


def main() -> int:
    parser = ToolParser(__doc__ or "")
    parser.add_argument("checkpoint", type=to_path, help="folder of checkpoints, or one of them")
    parser.add_argument(
        "--diff",
        metavar="OTHER",
        type=to_path,
        help="another checkpoint; what changed from it to the first",
    )
    args = parser.parse_args()

    def work() -> list[str]:
        # Imported here: torch takes seconds, and --help needs none of it.
        from megafp8.checkpoint.inspect import compare_checkpoints, inspect_checkpoint, locate
        from megafp8.checkpoint.inspect_text import changes_text, console, inspection_text
        from megafp8.checkpoint.values import summary

        screen = console()
        # Both before the first is read, which may take minutes.
        for given in (args.checkpoint, args.diff):
            if given is not None:
                locate(given)
        found = inspect_checkpoint(args.checkpoint)
        screen.print(inspection_text(found, screen.options.ascii_only))
        problems, flaws = found.problems, found.flaws
        if args.diff is not None and not problems:
            other = inspect_checkpoint(args.diff)
            problems = other.problems
            flaws = flaws or other.flaws
            if not problems:
                changes = compare_checkpoints(other.directory, found.directory)
                screen.print(changes_text(changes, other, found))
        if problems:
            raise CheckpointError("; ".join(problems))
        if flaws:
            raise CheckpointError(f"values that no run can go on from: {summary(flaws)}")
        return []

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
