"""Tensors into one DCP file, each made when its turn comes and dropped after it is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megafp8.checkpoint.agree import describe_dcp
from megafp8.checkpoint.convert.safetensors_files import Described
from megafp8.errors import CheckpointError


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Return no path: DCP would pickle that of the temporary directory."""
        return StorageMeta()


class _Planner(DefaultSavePlanner):
    """Plans with tensors that hold no values, and asks for each when it is to be written."""

    def __init__(self, produce: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._produce = produce
        self._failure: Exception | None = None

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the values of one tensor; DCP calls it once for each, in the file's order."""
        return self._produce(index.fqn).contiguous()


def write_dcp(
    directory: Path, entries: Mapping[str, Described], produce: Callable[[str], Tensor]
) -> None:
    """Write `.metadata` and one shard into an existing directory.

    Args:
        directory: where to.
        entries: name -> shape and dtype of every tensor.
        produce: name -> the tensor.

    Raises:
        CheckpointError: what `produce` raised, or the file could not be written.
    """
    blank = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in entries.items()
    }
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(
                blank,
                storage_writer=_Writer(directory, sync_files=True, overwrite=False),
                planner=_Planner(produce),
                no_dist=True,
            )
    except CheckpointException as failure:
        raise CheckpointError(f"writing {directory}: {describe_dcp(failure, 1)}") from failure
