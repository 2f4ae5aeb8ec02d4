"""Sections `checkpoint` and `logging`: what a run reads back and what it leaves behind."""

from typing import Literal

from pydantic import Field

from megafp8.config.base import NonNegativeInt, PositiveInt, Section
from megafp8.config.paths import FilePath


class CheckpointConfig(Section):
    """Saving and loading."""

    save: FilePath | None = Field(
        default=None, description="folder of checkpoints (default: in the run folder)"
    )
    load: FilePath | None = Field(
        default=None,
        description="folder with `latest`, or one iter_N folder; empty or missing: a fresh start",
    )
    save_interval: PositiveInt | None = Field(
        default=None, description="iterations between checkpoints; one more is made at the end"
    )
    async_save: bool = Field(
        default=False,
        description="training waits for a copy of the state in host memory, not for the disk",
    )
    keep_last: PositiveInt | None = Field(
        default=None, description="delete all but the newest N checkpoints (default: keep all)"
    )
    ckpt_format: Literal["torch_dist"] = Field(
        default="torch_dist", description="checkpoint format"
    )
    no_save_optim: bool = Field(default=False, description="leave optimizer state out")
    no_load_optim: bool = Field(default=False, description="do not load optimizer state")
    no_load_rng: bool = Field(
        default=False,
        description="accepted: random streams follow from seed and iteration, none is stored",
    )
    finetune: bool = Field(default=False, description="load weights alone and start at iteration 0")
    allow_changed_corpus: bool = Field(
        default=False,
        description="go on although a corpus has other contents than when --load was saved: the "
        "samples still to come are cut from it as it is now",
    )
    new_tokens_from_mean: bool = Field(
        default=False,
        description="tokens that --load's run had not start at the mean of its rows, not at zeros",
    )
    exit_on_missing_checkpoint: bool = Field(
        default=False, description="an empty --load is an error"
    )
    use_checkpoint_args: bool = Field(
        default=False,
        description="take the model's flags from --load; one that says otherwise is an error",
    )


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
