"""A converted model goes on training with the command that the conversion's report gives."""

import json
import re
from pathlib import Path

import pytest

from tests.convert.converted import run_convert
from tests.convert.hand_made import LAYERS, make_folder
from tests.support.launches import launched, train

MORE = ["--mock-data", "--train-iters", "2", "--global-batch-size", "2", "--seq-length", "16"]
FP8 = ["--bf16", "--fp8-format", "hybrid", "--fp8-amax-history-len", "2"]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("imported")
    return root / "ours", run_convert("hf", "megafp8", make_folder(root / "hf"), root / "ours")


@pytest.mark.parametrize("precision", [[], FP8], ids=["fp32", "fp8"])
def test_training_goes_on_from_it(
    tmp_path: Path, imported: tuple[Path, list[str]], precision: list[str]
) -> None:
    folder, lines = imported
    (note,) = [line for line in lines if line.startswith("note: ")]
    match = re.search(r"pretrain_gpt\.py (--config \S+) trains on", note)
    assert match is not None
    argv = [*match.group(1).split(), *MORE, *precision, "--run-dir", str(tmp_path)]
    train(1, argv, tmp_path / "logs")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    (resume,) = [event for event in events if event["event"] == "resume"]
    assert resume["action"] == "finetune"
    assert resume["checkpoint_before"] == str(folder / "iter_0000000")
    # All weights, and the scale state of three roles of four linears where there are any.
    assert resume["tensors"]["loaded"] == 3 + 6 * LAYERS
    assert resume["tensors"]["defaulted"] == (2 * 3 * 4 * LAYERS if precision else 0)


def test_without_finetune_it_is_refused(tmp_path: Path, imported: tuple[Path, list[str]]) -> None:
    """Never optimizer state that starts at zero without having been asked for."""
    argv = ["--config", str(imported[0] / "config.yaml"), *MORE, "--no-finetune"]
    with launched(1, [*argv, "--run-dir", str(tmp_path)], tmp_path / "logs") as run:
        assert run.wait() == [2], run.text()
    line = run.output(0).strip().splitlines()[-1]
    assert "iter_0000000 holds no optimizer state" in line and "--finetune" in line
