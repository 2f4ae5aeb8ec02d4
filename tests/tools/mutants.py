"""Plants mistakes in a copy of the tree, one at a time, and tells which ones no test notices.

    python tests/tools/mutants.py                        all (an hour on two cores)
    python tests/tools/mutants.py --only scale lock      those whose name or file holds a word

`tests/tools/mutant_table/` has the mistakes and the tests that have to notice each. Those tests
are first run without any mistake. Exit code 1: a mutant survives that should not, or does not
survive although the table gives a reason; 2: the tests fail by themselves, or the table is stale.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Imported once, for all runs of tests, which are forked from here.
import numpy  # noqa: F401
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.tools.mutant_table import MUTANTS, Mutant  # noqa: E402

# A mutant that waits for ever is noticed, too.
LIMIT_S = 900
_LEFT_OUT = (".*", "__pycache__", "runs", "*.egg-info")


def copy_tree(target: Path) -> None:
    """Copy what tests need; what was installed for them is linked."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    if (ROOT / ".venv").exists():
        (target / ".venv").symlink_to(ROOT / ".venv")


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[str, str]:
    """Run tests of a tree up to the first failure: ("passed" | "failed" | "broken", last line)."""
    output = tree.parent / "output.txt"
    child = os.fork()
    if child == 0:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(_pytest_in(tree, tests))
    limit = time.monotonic() + LIMIT_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "failed", f"no end within {LIMIT_S} s"
        time.sleep(0.2)
    lines = output.read_text(errors="replace").strip().splitlines() or [""]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    code = os.waitstatus_to_exitcode(ended[1])
    # A mutant may break an import, which pytest calls an interruption.
    failed = code == 1 or (code == 2 and bool(failures))
    outcome = "passed" if code == 0 else "failed" if failed else "broken"
    return outcome, (failures or lines)[-1]


def _pytest_in(tree: Path, tests: Sequence[str]) -> int:
    """Run pytest in this process, which has imported nothing of the project but the table."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path != str(ROOT))]
    # Bytecode: a file that is changed twice in a second would be taken for its former self.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(tree)
    paths = [f"tests/{name}" for name in tests]
    try:
        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *paths]))
    finally:
        sys.stdout.flush()


def plant(tree: Path, mutant: Mutant) -> str:
    """Change the copy; return the file's former text."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    found = text.count(mutant.before)
    if found != 1:
        raise SystemExit(f"{mutant.name}: its text occurs {found} times in {mutant.file}")
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    return text


def selected(words: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose name or file holds one of the words."""
    return [m for m in MUTANTS if not words or any(w in m.name or w in m.file for w in words)]


def main() -> int:
    """Plant them all and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="in name or file")
    mutants = selected(parser.parse_args().only)
    unexpected = 0
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        outcome, line = run_tests(tree, sorted({test for m in mutants for test in m.tests}))
        if outcome != "passed":
            print(f"without any mutant the tests {outcome}: {line}", file=sys.stderr)
            return 2
        for number, mutant in enumerate(mutants, 1):
            former, began = plant(tree, mutant), time.monotonic()
            outcome, line = run_tests(tree, mutant.tests)
            (tree / mutant.file).write_text(former, encoding="utf-8")
            if outcome == "broken":
                print(f"{mutant.name}: its tests cannot be run: {line}", file=sys.stderr)
                return 2
            survived = outcome == "passed"
            unexpected += survived != bool(mutant.survives)
            verdict = "SURVIVED" if survived else "killed"
            reason = mutant.survives if survived else line
            place = f"{number:3}/{len(mutants)} {verdict:8} {time.monotonic() - began:4.0f} s"
            print(f"{place}  {mutant.name}: {reason}", flush=True)
    print(f"{len(mutants)} mutants, {unexpected} not as the table says")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
