"""The entry point: exit codes, who prints, one line, no torch before it is needed."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from megafp8.errors import CheckpointError, DataError, TrainingError
from megafp8.launch.main import main
from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PARITY = ["--config", str(ROOT / "scripts" / "configs" / "parity.yaml")]
PREFIX = "pretrain_gpt.py: error: "


def ranks(rank: int, size: int = 2, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), **more}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """Replace training by a list of what it was called with."""
    calls: list[tuple[object, object]] = []
    module = types.ModuleType("megafp8.train.pretrain")
    module.run = lambda config, launch, *more: calls.append((config, launch))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megafp8.train.pretrain", module)
    return calls


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(config: object, launch: object, signals: object, choice: object) -> None:
        raise error

    module = types.ModuleType("megafp8.train.pretrain")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megafp8.train.pretrain", module)


def test_training_gets_the_resolved_run(runs: list, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*PARITY, "--use-mcore-models", "--overlap-grad-reduce"]
    assert main(argv, ranks(0, SLURM_NTASKS="8")) == 0
    ((config, launch),) = runs
    assert config.training.global_batch_size == 16
    assert (launch.rank, launch.world_size) == (0, 2)
    err = capsys.readouterr().err
    assert "SLURM_NTASKS=8 is ignored" in err
    assert "--use-mcore-models has no effect: " in err
    assert "--overlap-grad-reduce has no effect: " in err


def test_other_ranks_are_silent(runs: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PARITY, "--use-mcore-models"], ranks(1)) == 0
    assert main([*PARITY, "--nope"], ranks(1)) == 2
    assert main([*PARITY, "--tensor-model-parallel-size", "4"], ranks(1)) == 2
    assert main([*PARITY, "--dry-run"], ranks(1)) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "") and len(runs) == 1


@pytest.mark.parametrize(
    ("argv", "environment", "fragment"),
    [
        (["--nope"], {}, "--nope: unknown option"),
        (["--micro-batch-size", "0"], {}, "--micro-batch-size: found 0"),
        (["--tensor-model-parallel-size", "2"], ranks(0, 3), "world size 3 != tp 2"),
        (
            ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
            ranks(0, 2),
            "world size 2 != tp 2 * pp 2",
        ),
        (["--tensor-model-parallel-size", "2"], {}, "world size 1 != tp 2"),
        ([], {"WORLD_SIZE": "abc", "RANK": "0"}, "WORLD_SIZE: found 'abc'"),
        ([], {"WORLD_SIZE": "2"}, "RANK is missing"),
        ([], ranks(0, 3), "size 16 is not a multiple of --micro-batch-size 2 * data parallel 3"),
        (["--no-mock-data"], {}, "no data: give --data-path"),
        (["--precision-policy", "/nowhere"], {}, "/nowhere: cannot be read"),
        (["--dry-run", "--world-size", "3", "--fsdp-size", "2"], {}, "data parallel 3"),
        (["--tokenizer-type", "ByteTokenizer", "--seq-length", "63"], {}, "no linear can be FP8"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    argv: list[str],
    environment: dict[str, str],
    fragment: str,
    runs: list,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PARITY, *argv], environment) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(PREFIX)
    assert captured.err.count("\n") == 1 and fragment in captured.err
    assert not runs, "training must not start"


def test_the_rank_whose_own_fault_it_is_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PARITY, ranks(5)) == 2
    assert "RANK: found 5" in capsys.readouterr().err
    missing = ["--config", "/nowhere.yaml"]
    # The first rank of another node: the file may be missing there alone.
    assert main(missing, {**ranks(1), "LOCAL_RANK": "0"}) == 2
    assert "/nowhere.yaml: cannot be read" in capsys.readouterr().err
    assert main(missing, ranks(1)) == 2
    assert capsys.readouterr().err == ""


def test_under_torchrun_a_silent_rank_leaves_time_for_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("megafp8.launch.main.time.sleep", waits.append)
    torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    assert main([*PARITY, "--nope"], ranks(0, **torchrun)) == 2
    assert waits == [] and capsys.readouterr().err.startswith(PREFIX + "--nope")
    # Still alive after the wait: rank 0 did not fail, so the error is this rank's own.
    assert main([*PARITY, "--nope"], ranks(1, **torchrun)) == 2
    assert waits == [5.0] and capsys.readouterr().err.startswith(PREFIX + "rank 1: --nope")


def test_torchrun_shows_the_line_once() -> None:
    script = str(ROOT / "pretrain_gpt.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script,
    ]
    result = subprocess.run(
        [*command, "--nope"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith(PREFIX)]
    assert len(lines) == 1 and lines[0].startswith(PREFIX + "--nope")


def test_exit_codes_of_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in [
        (DataError("corpus\nis short"), 2),
        (CheckpointError("damaged"), 2),
        (TrainingError("loss is nan"), 1),
    ]:
        fail_with(monkeypatch, error)
        assert main(PARITY, {}) == code
        text = " ".join(str(error).split())
        assert capsys.readouterr().err.splitlines()[-1] == PREFIX + text
        assert main(PARITY, ranks(1)) == code
        assert capsys.readouterr().err == ""
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main(PARITY, {}) == 130
    capsys.readouterr()


def test_bugs_show_a_traceback_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ZeroDivisionError("oops"))
    assert main(PARITY, ranks(1)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert lines[-1] == "[rank 1] ZeroDivisionError: oops"


@pytest.mark.parametrize("optimize", [[], ["-O"]])
@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--nope"], 2),
        ([*PARITY, "--lr", "x"], 2),
        ([*PARITY, "--tensor-model-parallel-size", "2"], 2),
        ([*PARITY, "--dry-run", "--world-size", "4"], 0),
    ],
)
def test_nothing_heavy_is_imported_before_training(
    argv: list[str], code: int, optimize: list[str]
) -> None:
    script = (
        "import sys; from megafp8.launch.main import main; code = main(sys.argv[1:], {});"
        "print('heavy', sorted({'torch', 'numpy', 'tyro'} & set(sys.modules)), code)"
    )
    result = subprocess.run(
        [sys.executable, *optimize, "-c", script, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == f"heavy [] {code}"
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == (0 if code == 0 else 1)


def test_the_script_itself_and_a_closed_pipe() -> None:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py")]
    result = subprocess.run(
        [*command, "--nope"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 2 and result.stderr.startswith(PREFIX + "--nope")
    piped = subprocess.run(
        ["bash", "-c", f"{' '.join(command)} --help | head -1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert piped.stdout.startswith("usage:") and piped.stderr == ""
