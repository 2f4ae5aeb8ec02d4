"""Steps that must not count: non-finite gradients on one rank, overflows of FP16, a run that stops.

The faults are planted where a real one would arise: in one element of one gradient on one rank,
after the backward or inside it.
"""

import contextlib
import io
import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import megafp8.train.pretrain as run_module
from megafp8.checkpoint import read_record
from megafp8.errors import TrainingError
from megafp8.launch.main import main
from megafp8.parallel.pipeline import PipelineRunner
from megafp8.parallel.watch import Watch
from tests.model.small import (
    FP8,
    GPT2,
    LLAMA,
    Run,
    assert_same_bytes,
    one_rank,  # noqa: F401
    small_config,
    start_run,
    world,
)

LAYOUTS = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}
# Held by rank 1 at every layout, the last stage's included.
VICTIM = "decoder.layers.1.mlp.linear_fc1.weight"


@contextlib.contextmanager
def fault(where: str, value: float, rank: int = 1) -> Iterator[None]:
    """Inside, the backward leaves `value` in one gradient element on one rank.

    Args:
        where: "after" plants it in the finished gradient of `VICTIM`, "inside" in the gradient
            that flows into the linear, so that FP8's amax of it is non-finite too.
    """
    original = PipelineRunner.train

    def train(self: PipelineRunner, batches: Any, *rest: Any) -> Tensor:
        mine = torch.distributed.get_rank() == rank
        handles = []
        if mine and where == "inside":
            module = next(
                module
                for stage in self.modules
                for name, module in stage.named_modules()
                if f"{name}.weight" == VICTIM
            )
            handles.append(module.register_forward_hook(poison))
        total = original(self, batches, *rest)
        for handle in handles:
            handle.remove()
        if mine and where == "after":
            parameters = {n: p for stage in self.modules for n, p in stage.named_parameters()}
            parameters[VICTIM].grad.to_local().view(-1)[7] = value
        return total

    def poison(module: Any, args: Any, output: Tensor) -> None:
        def plant(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[3] = value
            return gradient

        output.register_hook(plant)

    with mock.patch.object(PipelineRunner, "train", train):
        yield


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Messages of the package's logger."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megafp8")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def bad_third_step(where: str, value: float, **changes: Any):
    """State before and after a bad step 3, its result and messages, then steps 4 and 5."""
    run = start_run(small_config(LLAMA, **{**FP8, **changes}))
    run.train(range(2))
    before = run.state()
    with fault(where, value), logged() as lines:
        result = run.train(range(2, 3))[0]
    after = run.state()
    following = run.train(range(3, 5))
    moved = sum(not torch.equal(after[name], value) for name, value in run.shards().items())
    return before, after, result, lines, following, moved, run.step.bad_steps_in_a_row


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "where, value, clip_grad",
    [
        ("after", math.nan, 1.0),
        ("after", math.inf, 0.0),
        ("inside", math.nan, 0.0),
        ("inside", math.inf, 1.0),
    ],
)
def test_a_bad_step_is_skipped_everywhere(ranks, layout, where, value, clip_grad):
    answers = ranks.run(
        bad_third_step,
        world_size=2,
        where=where,
        value=value,
        clip_grad=clip_grad,
        **LAYOUTS[layout],
    )
    for before, after, result, _, following, moved, in_a_row in answers:
        assert result.skipped and not math.isfinite(result.grad_norm)
        assert any(".step" in name for name in before) and any("exp_avg" in name for name in before)
        assert any("amax_history" in name for name in before)
        assert_same_bytes(after, before)
        assert all(not step.skipped and 4.0 < step.loss < 5.2 for step in following)
        assert moved == len([name for name in after if name.endswith("weight")]) and in_a_row == 0
    message = answers[0][3][0]
    assert "iteration 3" in message and "step skipped on all ranks" in message
    if where == "after":
        assert f"{VICTIM} on rank 1" in message and "rank 0" not in message
    elif math.isinf(value):
        # The cast makes it the largest E5M2 number: only the amax tells.
        assert f"{VICTIM.removesuffix('.weight')} (FP8 grad_output) on rank 1" in message
    else:
        assert "on rank 1" in message


def test_a_bad_step_leaves_the_rest_of_the_run_alone(ranks):
    """After the skip, training goes on from the same state with the next data."""
    skipped = ranks.run(bad_third_step, world_size=2, where="after", value=math.nan)
    left_out = ranks.run(without_third_step, world_size=2)
    for found, wanted in zip(skipped, left_out, strict=True):
        assert found[4] == wanted


def without_third_step() -> list:
    run = start_run(small_config(LLAMA, **FP8))
    run.train(range(2))
    return run.train(range(3, 5))


def bad_steps(limit: int, check: bool) -> tuple[list[bool], str]:
    """Whether each step was skipped, until the error, and its text."""
    run = start_run(
        small_config(max_consecutive_bad_steps=limit, check_for_nan_in_loss_and_grad=check)
    )
    seen = []
    try:
        with fault("after", math.nan), logged():
            for iteration in range(6):
                seen.append(run.train(range(iteration, iteration + 1))[0].skipped)
    except TrainingError as error:
        assert error.exit_code == 1
        return seen, str(error)
    return seen, ""


def test_the_limit_of_bad_steps_in_a_row(ranks):
    for seen, message in ranks.run(bad_steps, world_size=2, limit=4, check=True):
        assert seen == [True] * 3  # the fourth stops
        assert "iteration 4" in message and "4 steps in a row" in message
    for seen, message in ranks.run(bad_steps, world_size=2, limit=4, check=False):
        assert seen == [True] * 6 and message == ""


# ------------------------------------------------------------------------------ the whole run


def run_with_faults(folder: str, bad: list[int], total: int) -> tuple[int, str]:
    """`pretrain_gpt.py` with NaN planted at 1-based iterations: exit code and stderr."""
    flags = {
        "num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "ffn-hidden-size": 64,
        "seq-length": 16, "vocab-size": 100, "position-embedding-type": "rope",
        "normalization": "RMSNorm", "hidden-dropout": 0.0, "attention-dropout": 0.0,
        "micro-batch-size": 2, "global-batch-size": 8, "lr": 1e-3, "seed": 1234,
        "train-iters": total, "save-interval": 2, "log-interval": 1, "num-workers": 0,
        "fp8-format": "hybrid", "fp8-amax-history-len": 8, "run-dir": folder,
    }  # fmt: skip
    argv = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    argv += ["--mock-data", "--bf16", "--swiglu", "--disable-bias-linear"]
    me = world()
    environment = {"RANK": str(me.rank), "WORLD_SIZE": str(me.size), "LOCAL_RANK": str(me.rank)}
    iteration = 0
    original = PipelineRunner.train

    def train(self: PipelineRunner, batches: Any, *rest: Any) -> Tensor:
        nonlocal iteration
        iteration += 1
        total = original(self, batches, *rest)
        if iteration in bad and me.rank == 1:
            parameters = {n: p for stage in self.modules for n, p in stage.named_parameters()}
            parameters[VICTIM].grad.to_local().view(-1)[7] = math.nan
        return total

    logger = logging.getLogger("megafp8")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    stderr = io.StringIO()
    try:
        with (
            mock.patch.object(PipelineRunner, "train", train),
            # These ranks have met already.
            mock.patch.object(
                run_module, "watch_over", lambda rank, size, asked: Watch(rank, size)
            ),
            mock.patch.object(run_module, "start", lambda *args: me),
            mock.patch.object(run_module, "stop", torch.distributed.barrier),
            contextlib.redirect_stderr(stderr),
        ):
            code = main(argv, environment)
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    print(stderr.getvalue(), file=sys.stderr)
    return code, stderr.getvalue()


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def audited(folder: Path, event: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def test_counters_data_position_and_the_stop(ranks, tmp_path):
    """Bad at 3, and at 5 to 9 with a limit of 4: the run ends at 8 with exit code 1."""
    answers = ranks.run(
        run_with_faults, world_size=2, folder=str(tmp_path), bad=[3, 5, 6, 7, 8, 9], total=12
    )
    assert [code for code, _ in answers] == [1, 1]
    stderr = answers[0][1]
    assert f"{VICTIM} on rank 1" in stderr and "Traceback" not in stderr
    assert (
        "iteration 8: 4 steps in a row had non-finite gradients, this one in "
        f"{VICTIM} on rank 1; the run stops" in stderr
    )
    assert answers[1][1] == ""
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows] == list(range(1, 9))
    assert [row["skipped"] for row in rows] == [i in (3, 5, 6, 7, 8) for i in range(1, 9)]
    assert [row["consumed_samples"] for row in rows] == [8 * i for i in range(1, 9)]
    assert all(math.isfinite(row["loss"]) for row in rows)
    skips, (stop,) = audited(tmp_path, "skip"), audited(tmp_path, "stop")
    assert [row["iteration"] for row in skips] == [3, 5, 6, 7, 8]
    assert all(VICTIM in row["reason"] and row["level"] == "warning" for row in skips)
    assert (stop["iteration"], stop["level"], stop["action"]) == (8, "error", "exit")
    assert stop["data_position"] == {"consumed_samples": 64} and VICTIM in stop["reason"]
    assert stop["checkpoint_before"].endswith("iter_0000006")
    # Saved at 2, 4 and 6; the stop wrote nothing, and what 6 holds are the weights of 4.
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.glob("iter_*")) == [f"iter_{i:07d}" for i in (2, 4, 6)]
    assert (root / "latest").read_text().strip() == "iter_0000006"
    record = read_record(root / "iter_0000006")
    assert record.state["skipped_iterations"] == 3
    assert record.data_position["consumed_samples"] == 48
    tensors = [
        ranks.run(stored_tensors, world_size=1, path=str(root / f"iter_{i:07d}"))[0] for i in (4, 6)
    ]
    assert all(value.isfinite().all() for value in tensors[1].values())
    assert_same_bytes(tensors[1], tensors[0])


def stored_tensors(path: str) -> dict[str, Tensor]:
    from megafp8.checkpoint import load_tensors

    record = read_record(Path(path))
    tensors = {name: torch.empty(entry.shape) for name, entry in record.tensors.items()}
    load_tensors(Path(path), tensors, lambda name: False)
    return tensors


def test_a_single_bad_step_does_not_end_the_run(ranks, tmp_path):
    answers = ranks.run(run_with_faults, world_size=2, folder=str(tmp_path), bad=[3], total=4)
    assert [code for code, _ in answers] == [0, 0]
    rows = metrics(tmp_path)
    assert [row["skipped"] for row in rows] == [False, False, True, False]
    assert read_record(tmp_path / "checkpoints" / "iter_0000004").state["skipped_iterations"] == 1


# ------------------------------------------------------------------------------ fp32 and fp16


def fp16_run(**changes: Any) -> Run:
    values = {"fp16": True, "initial_loss_scale": 2.0**10, "lr": 1e-2, **changes}
    return start_run(small_config(GPT2, **values))


@pytest.mark.usefixtures("one_rank")
def test_fp16_is_close_to_fp32():
    high = start_run(small_config(GPT2, lr=1e-2)).train(range(6))
    low = fp16_run().train(range(6))
    assert high[-1].loss < high[0].loss
    for one, other in zip(high, low, strict=True):
        assert not other.skipped
        assert other.loss == pytest.approx(one.loss, rel=2e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)


@pytest.mark.usefixtures("one_rank")
def test_fp16_overflow_halves_the_scale_and_harms_nothing():
    run = fp16_run(initial_loss_scale=2.0**26, hysteresis=1, loss_scale_window=2)
    before, scales, skipped = run.state(), [], []
    for iteration in range(40):
        result = run.train(range(iteration, iteration + 1))[0]
        scales.append(run.step.loss_scaler.scale)
        skipped.append(result.skipped)
        assert 3.5 < result.loss < 5.2, "the reported loss is unscaled"
        if len(skipped) == 1:
            assert_same_bytes(run.state(), before)
        if not result.skipped:
            break
    count = skipped.count(True)
    assert 3 < count < 20 and not skipped[-1]
    assert scales[:count] == [2.0 ** (26 - i) for i in range(1, count + 1)]
    # More than max_consecutive_bad_steps: this is how the scale is found, not a fault.
    assert run.step.bad_steps_in_a_row == 0
    found = scales[-1]
    following = run.train(range(40, 41))[0]
    assert following.skipped or run.step.loss_scaler.scale == 2 * found, "doubles after two"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_a_constant_loss_scale_cancels(scale):
    run = fp16_run(loss_scale=scale, initial_loss_scale=None)
    plain = start_run(small_config(GPT2, lr=1e-2)).train(range(2))
    found = run.train(range(2))
    assert run.step.loss_scaler.scale == scale
    for one, other in zip(plain, found, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)


@pytest.mark.usefixtures("one_rank")
def test_fp16_stops_where_no_smaller_scale_can_help():
    """At the lowest scale, or with a constant one, an overflow is a bad step like any other."""
    lowest = {"initial_loss_scale": 2.0**40, "min_loss_scale": 2.0**40}
    for changes in (lowest, {"loss_scale": 2.0**40, "initial_loss_scale": None}):
        run = fp16_run(**changes, max_consecutive_bad_steps=3)
        with pytest.raises(TrainingError, match="iteration 3: 3 steps in a row"):
            run.train(range(5))


def fp16_on_two_stages() -> list[float]:
    run = fp16_run(pipeline_model_parallel_size=2)
    return [result.loss for result in run.train(range(3))]


def test_fp16_boundaries_are_fp16(ranks):
    """The boundary tensors are asserted to be of the compute dtype when they are sent."""
    single = [result.loss for result in ranks.run(fp16_alone, world_size=1)[0]]
    for losses in ranks.run(fp16_on_two_stages, world_size=2):
        assert losses == pytest.approx(single, rel=1e-3)


def fp16_alone() -> list:
    return fp16_run().train(range(3))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fp32_learns(optimizer):
    run = start_run(small_config(optimizer=optimizer, lr=3e-2 if optimizer == "adam" else 1.0))
    same = [run.step.run(batches, run.config.optimizer.lr, 1) for batches in [first(run)] * 8]
    assert same[-1].loss < same[0].loss - 1.0
    assert all(not result.skipped for result in same)


def first(run: Run) -> list[dict[str, Tensor]]:
    from tests.model.small import micro_batches

    return micro_batches(run, 0)
