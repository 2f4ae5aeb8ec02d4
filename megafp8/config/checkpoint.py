"""Section `checkpoint`: saving and loading."""

from typing import Literal

from pydantic import Field

from megafp8.config.base import PositiveInt, Section
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
