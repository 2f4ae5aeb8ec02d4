"""`auto` from the command line to the records, on pretended devices, and that ranks must agree."""

from pathlib import Path

import pytest
import torch
import yaml

from megafp8.config.auto_precision import Hardware, PrecisionChoice
from megafp8.errors import LaunchError, PrecisionError
from megafp8.launch import device
from megafp8.launch.main import main
from megafp8.train.pretrain import check_same_choice
from tests.support.ranks import Ranks

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--vocab-size 100 --num-workers 0"
).split()


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Pretended GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), "fp16 True"), ((8, 0), "bf16 True ("), ((9, 0), "fp8_recipe delayed")],
)
def test_dry_run_says_what_this_machine_takes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    capability: tuple[int, int],
    expected: str,
) -> None:
    pretend(monkeypatch, capability)
    assert main([*FLAGS, "--precision", "auto", "--dry-run"], {}) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("--precision auto: ")]
    assert expected in line and "Pretended GPU" in line
    assert f"compute capability {capability[0]}.{capability[1]}" in line


def test_run_on_a_cpu_records_what_was_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert main([*FLAGS, "--precision", "auto", "--run-dir", str(tmp_path)], {}) == 0
    manifest = yaml.safe_load((tmp_path / "manifest.yaml").read_text())
    assert manifest["precision_choice"]["asked"] == ["--precision auto"]
    assert manifest["precision_choice"]["taken"] == {"bf16": True}
    assert manifest["compute_dtype"] == "bf16"
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert stored["precision"]["bf16"] is True and "precision" not in stored["precision"]


def test_contradiction_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--precision", "auto", "--bf16"], {}) == 2
    assert "--precision auto contradicts --bf16" in capsys.readouterr().err


def test_a_rank_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.model.small import small_config

    pretend(monkeypatch, (9, 0))
    config = small_config(precision="auto")
    assert device.detect(config, 0) == Hardware("cuda", "Pretended GPU", (9, 0))
    with pytest.raises(LaunchError, match="local rank 1 has no GPU"):
        device.detect(config, 1)
    on_cpu = small_config(precision="auto", distributed_backend="gloo")
    assert device.detect(on_cpu, 0).kind == "cpu"


def disagree() -> str:
    import torch.distributed as dist

    taken = {"fp8_recipe": "mxfp8" if dist.get_rank() else "delayed"}
    name = "new" if dist.get_rank() else "old"
    check_same_choice(PrecisionChoice(("--fp8-recipe auto",), "any", {"fp8_recipe": "delayed"}, ""))
    try:
        check_same_choice(PrecisionChoice(("--fp8-recipe auto",), name, taken, ""))
    except PrecisionError as error:
        return str(error)
    return ""


def test_ranks_that_would_differ_all_stop(ranks: Ranks) -> None:
    first, second = ranks.run(disagree, world_size=2)
    assert first == second
    assert "on rank 0 (old)" in first and "on rank 1 (new)" in first and "by name" in first
