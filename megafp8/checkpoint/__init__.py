"""Checkpoints: one global view of a run's tensors, written and read at any layout."""

from megafp8.checkpoint.background import Saver
from megafp8.checkpoint.find import find_checkpoint, read_record, verify_files
from megafp8.checkpoint.load import LoadReport, load_tensors, load_with_report
from megafp8.checkpoint.lock import FolderLock
from megafp8.checkpoint.record import FORMAT_VERSION, CheckpointRecord, FileEntry, TensorEntry
from megafp8.checkpoint.save import save_checkpoint

__all__ = [
    "FORMAT_VERSION",
    "CheckpointRecord",
    "FileEntry",
    "FolderLock",
    "LoadReport",
    "Saver",
    "TensorEntry",
    "find_checkpoint",
    "load_tensors",
    "load_with_report",
    "read_record",
    "save_checkpoint",
    "verify_files",
]
