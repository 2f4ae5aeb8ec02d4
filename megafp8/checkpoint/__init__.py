"""Checkpoints: one global view of a run's tensors, written and read at any layout."""

from megafp8.checkpoint.load import find_checkpoint, load_tensors, read_record, verify_files
from megafp8.checkpoint.record import FORMAT_VERSION, CheckpointRecord, FileEntry, TensorEntry
from megafp8.checkpoint.save import save_checkpoint

__all__ = [
    "FORMAT_VERSION",
    "CheckpointRecord",
    "FileEntry",
    "TensorEntry",
    "find_checkpoint",
    "load_tensors",
    "read_record",
    "save_checkpoint",
    "verify_files",
]
