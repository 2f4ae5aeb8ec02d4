"""The sections of a configuration side by side, before anything is asked of them together."""

from __future__ import annotations

from pydantic import Field

from megafp8.config.base import Section
from megafp8.config.checkpoint import CheckpointConfig
from megafp8.config.data import DataConfig
from megafp8.config.logging import LoggingConfig
from megafp8.config.model import ModelConfig
from megafp8.config.optimizer import OptimizerConfig
from megafp8.config.parallel import ParallelConfig
from megafp8.config.precision import PrecisionConfig
from megafp8.config.training import TrainingConfig


class Sections(Section):
    """What `RunConfig` consists of: the checks that it makes see this of it.

    Attributes:
        accepted_flags: Megatron's flags that were given and have no effect here, as typed.
    """

    model: ModelConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    optimizer: OptimizerConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    accepted_flags: tuple[str, ...] = Field(default=(), strict=False)
