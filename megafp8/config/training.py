"""Section `training`: batch, length of the run, evaluation, recompute."""

from typing import Literal

from pydantic import Field

from megafp8.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section


class TrainingConfig(Section):
    """How much is trained on, and what happens on the way."""

    micro_batch_size: PositiveInt = Field(description="samples per forward pass on one rank")
    global_batch_size: PositiveInt | None = Field(
        default=None,
        description="samples per update (default micro-batch-size * data-parallel size)",
    )
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = Field(
        default=None,
        strict=False,
        description="START INCREMENT SAMPLES: grow the batch from START to --global-batch-size",
    )
    train_iters: PositiveInt | None = Field(default=None, description="updates in all")
    train_samples: PositiveInt | None = Field(default=None, description="samples in all")
    exit_interval: PositiveInt | None = Field(
        default=None, description="save and stop at an iteration divisible by this"
    )
    exit_duration_in_mins: PositiveFloat | None = Field(
        default=None, description="save and stop so many minutes after the start of the program"
    )
    exit_signal_handler: bool = Field(
        default=True,
        description="save and stop on SIGTERM or SIGUSR1 to any rank, with exit code 75 "
        "(Megatron's default is off)",
    )
    seed: int = Field(
        default=1234, ge=0, lt=2**63, description="of weights, data order and dropout"
    )
    deterministic_mode: bool = Field(default=False, description="bit-equal reruns")
    eval_interval: PositiveInt | None = Field(
        default=None,
        description="iterations between evaluations (default: never; Megatron's is 1000)",
    )
    eval_iters: NonNegativeInt = Field(default=100, description="global batches per evaluation")
    recompute_granularity: Literal["full", "selective"] | None = Field(
        default=None, description="recompute whole blocks, or attention alone, in the backward pass"
    )
    recompute_num_layers: PositiveInt | None = Field(
        default=None, description="blocks per stage that `full` recomputes (default: all)"
    )
    check_for_nan_in_loss_and_grad: bool = Field(
        default=True,
        description="stop after --max-consecutive-bad-steps non-finite steps in a row; each such "
        "step is skipped either way",
    )
    max_consecutive_bad_steps: PositiveInt = Field(
        default=4, description="non-finite steps in a row that are skipped before the run stops"
    )
