"""Validation loss and text samples."""

from megafp8.evaluation.generate import generate
from megafp8.evaluation.validate import validation_loss

__all__ = ["generate", "validation_loss"]
