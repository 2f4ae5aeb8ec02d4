"""What every test shares: one thread per process, fixed seeds, and skips that give their reason."""

import os

# Set before torch is imported: rank processes of the multi-process tests inherit it, and sums do
# not depend on how many cores the machine has.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("WANDB_MODE", "offline")

import random
import signal
import sys
from collections import Counter

import pytest

from tests.support.fixtures import each_cpu, ranks  # noqa: F401
from tests.support.oracles import triton  # noqa: F401


def pytest_configure() -> None:
    """Hear Ctrl-C also where a shell started the tests in the background.

    Such a shell has the signal ignored, programs that a test starts would inherit that, and the
    tests of how runs are interrupted would interrupt nothing.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
        for item in gpu_items:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with what was skipped, a line for each reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4} x {reason}")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Start each test from the same random state, whichever tests ran before it.

    Libraries are seeded only where they are loaded already: `config` tests check that torch and
    numpy are not imported.
    """
    random.seed(1234)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1234)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1234)
