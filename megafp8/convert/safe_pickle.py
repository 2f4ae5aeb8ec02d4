"""Megatron's pickled files, read without running anything that they name.

torch's weights-only unpickler builds tensors and plain containers and refuses all other names.
Megatron stores its settings as an `argparse.Namespace`, and enums, random states and its own
classes beside them: names of these few modules become objects that keep what they are given and
do nothing. No class of the interpreter or of Megatron is handed to the file.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megafp8.convert.dcp_reader import reason_of
from megafp8.errors import CheckpointError

# What such files name besides tensors; the fourth is TransformerEngine's extra state.
_INERT_NAMES = (
    "argparse.Namespace",
    "_codecs.encode",
    "datetime.timedelta",
    "_io.BytesIO",
    "signal.Signals",
    "types.SimpleNamespace",
)
_INERT_MODULES = ("megatron.", "numpy.", "pathlib.", "transformer_engine.")


class Inert:
    """Stands in for a class that a file names; keeps its state, does nothing."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_pickled(path: Path) -> Any:
    """Read a file of `torch.save`; tensors are mapped from it and not read.

    Raises:
        CheckpointError: it is missing, damaged, of the form before torch 1.6, or names anything
            else than data.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        refused = sorted(
            name
            for name in names
            if name not in _INERT_NAMES and not name.startswith(_INERT_MODULES)
        )
        if refused:
            raise CheckpointError(
                f"{path} names {', '.join(refused[:5])}, which is no data; nothing of it was used"
            )
        # A class of its own for each name and file: what a file sets on it goes away with it.
        stand_ins: list[Any] = [(type("Inert", (Inert,), {}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:  # damaged bytes raise nearly any type
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from None


def settings_of(value: Any, path: Path) -> dict[str, Any]:
    """The fields of a stored `argparse.Namespace`.

    Raises:
        CheckpointError: it is something else.
    """
    # A process that has imported Megatron-core has told torch to build real ones.
    fields = vars(value) if isinstance(value, Namespace) else value
    fields = value.state if isinstance(value, Inert) else fields
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise CheckpointError(f"{path}: args is {type(value).__name__}, expected a Namespace")
    return fields
