"""Section `logging`: what a run leaves behind beside checkpoints."""

from pydantic import Field

from megafp8.config.base import NonNegativeInt, PositiveInt, Section
from megafp8.config.paths import FilePath


class LoggingConfig(Section):
    """The run folder and what is logged."""

    run_dir: FilePath | None = Field(
        default=None, description="run folder (default: made under runs/)"
    )
    log_interval: PositiveInt = Field(
        default=100,
        description="iterations between log lines; the first and the last print one too",
    )
    log_throughput: bool = Field(default=False, description="add TFLOP/s to the log line")
    log_params_norm: bool = Field(default=False, description="add the norm of the parameters")
    log_num_zeros_in_grad: bool = Field(default=False, description="add the zeros among gradients")
    tensorboard_dir: FilePath | None = Field(
        default=None, description="TensorBoard folder (default: in the run folder)"
    )
    wandb_project: str | None = Field(default=None, description="Weights & Biases project")
    wandb_exp_name: str | None = Field(default=None, description="Weights & Biases run name")
    fp8_stats_interval: NonNegativeInt | None = Field(
        default=None,
        description="iterations between rows of FP8 statistics (refused: not built yet)",
    )
    profile: bool = Field(
        default=False, description="record a profiler trace (refused: not built yet)"
    )
