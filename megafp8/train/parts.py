"""What of a run is saved beside weights and moments: named parts, each knowing its own form.

A new part is handed to `TrainingStep.register` before anything is loaded. Neither saving nor
loading has to know it; a checkpoint without it, or with one that the run does not have, loads all
the same.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megafp8.checkpoint import CheckpointRecord
from megafp8.checkpoint.record import STATE_PREFIX
from megafp8.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Stored:
    """What a part finds in a checkpoint whose files have been read.

    Attributes:
        path: of the checkpoint, for messages.
        record: of the checkpoint.
        tensors: the part's own `targets`, filled where they are not absent.
        absent: names that the checkpoint lacks, of all parts; the same on all ranks.
    """

    path: Path
    record: CheckpointRecord
    tensors: Mapping[str, Tensor]
    absent: Collection[str]


class StatePart:
    """One part of a run's state; what is not overridden here is empty.

    Attributes:
        name: differs from those of other parts.
        with_weights: whether it goes with the weights, so that `--finetune` takes it, too.
    """

    name: str
    with_weights = False

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return its entries in the record's `state` or `data_position`, by this name."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by their names in a checkpoint; a collective call."""
        return {}

    def targets(self, path: Path, record: CheckpointRecord) -> dict[str, Tensor]:
        """Return tensors to load a checkpoint's into, by their names there."""
        return {}

    def take(self, stored: Stored) -> None:
        """Go on from a checkpoint, or say what it means that it lacks this; a collective call."""
        raise NotImplementedError


class Stateful(Protocol):
    """What has a state of numbers and tensors."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state by name: what JSON holds, and tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        ...


class NamedPart(StatePart):
    """A part under its own name: `state.<name>` in the record, tensors as `state.<name>.*`.

    A checkpoint without it, or without one of its tensors, leaves it as it is.

    Args:
        name: of the part.
        owner: has the state; what is no DTensor there has to be equal on all ranks.
        missing: the end of the warning where a checkpoint lacks it; empty for none.
    """

    def __init__(self, name: str, owner: Stateful, missing: str = "") -> None:
        self.name, self._owner, self._missing = name, owner, missing

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return all that is no tensor, under the part's name."""
        state = self._owner.state_dict().items()
        return {"state": {self.name: {k: v for k, v in state if not isinstance(v, Tensor)}}}

    def tensors(self) -> dict[str, Tensor]:
        """Return the owner's tensors."""
        state = self._owner.state_dict().items()
        return {self._prefix + key: v for key, v in state if isinstance(v, Tensor)}

    def targets(self, path: Path, record: CheckpointRecord) -> dict[str, Tensor]:
        """Return copies, so that half of a state changes nothing."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def take(self, stored: Stored) -> None:
        """Restore the owner's state if all of it is there."""
        numbers = stored.record.state.get(self.name)
        if numbers is None or not stored.tensors.keys().isdisjoint(stored.absent):
            if self._missing:
                log.warning("%s holds no %s: %s", stored.path, self.name, self._missing)
            return
        tensors = stored.tensors.items()
        self._owner.load_state_dict(
            numbers | {name.removeprefix(self._prefix): value for name, value in tensors}
        )

    @property
    def _prefix(self) -> str:
        return f"{STATE_PREFIX}{self.name}."
