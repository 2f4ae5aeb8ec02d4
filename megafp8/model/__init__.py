"""The GPT: blocks, stages and how a rank builds its part."""

from megafp8.model.build import Model, build_model
from megafp8.model.gpt import GPTStage

__all__ = ["GPTStage", "Model", "build_model"]
