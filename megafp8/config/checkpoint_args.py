"""`--use-checkpoint-args`: the model section of a run, taken from the checkpoint that it loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megafp8.config.messages import flag_name, shown
from megafp8.config.model import DERIVED, ModelConfig
from megafp8.config.run_config import RunConfig
from megafp8.errors import ConfigurationError

# Path of the checkpoint that a `--load` means, and the configuration it was saved with.
SavedRun = Callable[[str], tuple[str, Mapping[str, Any]]]

# These say nothing about what the weights mean: the run's own value wins where it gives one.
FREE = ("seq_length", "hidden_dropout", "attention_dropout", "init_method_std")
# And this one depends on the machine.
NEVER_TAKEN = ("transformer_impl",)


def take_model(
    saved: Mapping[str, Any], given: Mapping[str, tuple[Any, str]], checkpoint: str
) -> dict[str, Any]:
    """Return the model section of a run that takes it from a checkpoint.

    Args:
        saved: The configuration in the checkpoint's record.
        given: Field of the model section to the value that this run gives and where it gives it.
        checkpoint: Its path, for messages.

    Raises:
        ConfigurationError: A value that was given contradicts the checkpoint; names both.
    """
    try:
        model = RunConfig.from_dict(saved).model
    except ConfigurationError as error:
        raise ConfigurationError(f"{checkpoint} holds an unusable config: {error}") from None
    values = {field: value for field, (value, _) in given.items()}
    for field in ModelConfig.model_fields:
        if field in NEVER_TAKEN or (field in FREE and field in given):
            continue
        before = getattr(model, field)
        if field in given:
            now, where = given[field]
            # 4 * hidden_size said aloud is no other model.
            effective = getattr(model, DERIVED.get(field, field))
            if _plain(now) not in (_plain(before), _plain(effective)):
                raise ConfigurationError(
                    f"{where} {shown(now)} contradicts {flag_name(field)} {shown(effective)} of "
                    f"{checkpoint}; drop it, or drop --use-checkpoint-args"
                )
        values[field] = before
    return values


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
