"""How bench/checkpoint.py ends when a rank does not."""

import importlib.util
import queue
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "bench" / "checkpoint.py"
    spec = importlib.util.spec_from_file_location("bench_checkpoint", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_rank_that_died_ends_it_with_the_exit_codes(bench: ModuleType) -> None:
    ranks = [SimpleNamespace(exitcode=code) for code in (None, -9, 0)]
    with pytest.raises(SystemExit, match=r"a rank died, exit codes by rank: \[None, -9, 0\]"):
        bench.wait_for_rows(queue.Queue(), ranks, 60)


def test_ranks_that_hang_end_it_in_time(bench: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no result after 0 s"):
        bench.wait_for_rows(queue.Queue(), [SimpleNamespace(exitcode=None)], 0)


def test_rows_are_taken_even_if_the_rank_has_ended(bench: ModuleType) -> None:
    done: queue.Queue[list[dict[str, float]]] = queue.Queue()
    done.put([{"save": 1.0}])
    assert bench.wait_for_rows(done, [SimpleNamespace(exitcode=0)], 60) == [{"save": 1.0}]
