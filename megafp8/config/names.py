"""Names that users write, and the fields they stand for.

A field `some_name` is `--some-name` on the command line and `some_name` in YAML. Every boolean
also has its negative, `--no-some-name`; fields that are negative by name (`no_save_optim`) keep
Megatron's word and have no further one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from megafp8.config.base import Section
from megafp8.config.data import DataConfig
from megafp8.config.model import ModelConfig
from megafp8.config.optimizer import OptimizerConfig
from megafp8.config.parallel import ParallelConfig
from megafp8.config.precision import PrecisionConfig
from megafp8.config.records import CheckpointConfig, LoggingConfig
from megafp8.config.text import field_kind
from megafp8.config.training import TrainingConfig

if TYPE_CHECKING:
    from megafp8.config.run import RunConfig

SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}

# Switches that are on by default and which Megatron's users know by their negative alone.
NEGATIVE_FIRST = ("fp8_wgrad", "check_for_nan_in_loss_and_grad")


@dataclass(frozen=True)
class Target:
    """The field that a name stands for."""

    section: str
    field: str
    annotation: Any
    negated: bool

    @property
    def is_bool(self) -> bool:
        """Whether the field is a switch."""
        return field_kind(self.annotation)[0] is bool


@cache
def targets() -> dict[str, Target]:
    """Return every name, with underscores, and its field."""
    table: dict[str, Target] = {}
    for section, model in SECTIONS.items():
        for field, info in model.model_fields.items():
            annotation = info.annotation
            table[field] = Target(section, field, annotation, negated=False)
            if field_kind(annotation)[0] is bool and not field.startswith("no_"):
                table[f"no_{field}"] = Target(section, field, annotation, negated=True)
    return table


def suggestion(name: str, known: list[str]) -> str:
    """Return `; did you mean ...?` for the nearest names, or nothing."""
    longer = [item for item in known if item.startswith(name)] if len(name) > 2 else []
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    nearest = list(dict.fromkeys(longer[:3] + close))[:4]
    return f"; did you mean {', '.join(nearest)}?" if nearest else ""


def to_user_keys(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return a configuration as nested YAML-ready values under the users' names."""
    result: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        values: dict[str, Any] = {}
        for field, value in getattr(config, section):
            if value is None:
                continue
            if field in NEGATIVE_FIRST:
                values[f"no_{field}"] = not value
            else:
                values[field] = list(value) if isinstance(value, tuple) else value
        result[section] = values
    return result
