"""The GPT: blocks, stages and how a rank builds its part."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megafp8.model.build import Model, build_model
    from megafp8.model.gpt import GPTStage

# Loaded when asked for: layers and numerics run where pydantic and PyYAML are missing.
_HOMES = {
    "Model": "megafp8.model.build",
    "build_model": "megafp8.model.build",
    "GPTStage": "megafp8.model.gpt",
}

__all__ = [
    "GPTStage",
    "Model",
    "build_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
