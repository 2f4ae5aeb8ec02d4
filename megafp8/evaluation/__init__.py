"""Validation loss and text samples."""

from megafp8.evaluation.generate import generate, load_model
from megafp8.evaluation.validate import validation_loss

__all__ = ["generate", "load_model", "validation_loss"]
