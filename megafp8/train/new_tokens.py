"""Tokens that a run has and the checkpoint that it loads has not.

Their rows were padding: nobody trained them, and they are stored as zeros.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from megafp8.checkpoint import CheckpointRecord
from megafp8.config import RunConfig
from megafp8.config.shape import EMBEDDING, OUTPUT
from megafp8.errors import CheckpointError
from megafp8.log import get_logger

log = get_logger(__name__)

# Sums of fixed-point numbers are the same in any order, and so at any layout. 2**32 keeps more of a
# weight than the mean in fp32 does, and has room for 2**18 rows of weights below 2**13.
_UNIT = 2.0**-32
_ROWS_AT_ONCE = 4096


def check_rows(path: Path, record: CheckpointRecord, config: RunConfig, vocab_size: int) -> None:
    """Compare the rows of a checkpoint's vocabulary with the run's.

    Raises:
        CheckpointError: They differ in number; says which flag makes them equal.
    """
    entry = record.tensors.get(EMBEDDING)
    rows = config.model.padded_vocab_size(vocab_size)
    if entry is None or entry.shape[0] == rows:
        return
    stored = entry.shape[0]
    found = f"{path}: its vocabulary has {stored} rows, this run's {vocab_size} tokens {rows}"
    if vocab_size <= stored:
        raise CheckpointError(f"{found}; give --make-vocab-size-divisible-by {stored}")
    raise CheckpointError(
        f"{found}; tools/convert_checkpoint.py --from megafp8 --to megafp8 "
        f"--make-vocab-size-divisible-by {rows} makes room, without optimizer state; then give "
        f"--finetune and --make-vocab-size-divisible-by {rows}"
    )


def start_new_tokens(
    path: Path,
    record: CheckpointRecord,
    tensors: Mapping[str, Tensor],
    vocab_size: int,
    from_mean: bool,
) -> None:
    """Tell of new tokens, and start their rows at the mean of the others if asked.

    Args:
        path: Of the checkpoint, for messages.
        record: The checkpoint's; holds its number of tokens.
        tensors: Loaded tensors by name, of which the vocabulary's tables [padded vocab, h] change.
            All ranks that hold a part of one call it together.
        vocab_size: The run's number of tokens.
        from_mean: `--new-tokens-from-mean`.
    """
    trained = int(record.state.get("vocab_size", vocab_size))
    if vocab_size <= trained:
        return
    told = f"{path} has {trained} tokens, this run {vocab_size}: {vocab_size - trained} new ones"
    if not from_mean:
        log.warning(
            "%s start at rows of zeros, which nobody trained; --new-tokens-from-mean starts them "
            "at the mean of the others",
            told,
        )
        return
    log.info("%s start at the mean of the others' rows", told)
    for name in (EMBEDDING, OUTPUT):
        if name in tensors:
            table = tensors[name]
            assert isinstance(table, DTensor)
            _fill_with_mean(table, trained, vocab_size)


@torch.no_grad()
def _fill_with_mean(table: DTensor, trained: int, vocab_size: int) -> None:
    """Set rows [trained, vocab_size) of [padded vocab, h] to the mean of those before them.

    A collective call over the table's mesh.
    """
    mine = table.to_local()  # [rows, h], fp32
    chunks = table.__create_chunk_list__()
    assert len(chunks) <= 1, "a rank's rows of a vocabulary lie together"
    first = chunks[0].offsets[0] if chunks else 0
    last_trained, last = max(trained - first, 0), max(vocab_size - first, 0)
    sums = torch.zeros(mine.shape[1], dtype=torch.int64, device=mine.device)
    for rows in mine[:last_trained].split(_ROWS_AT_ONCE):
        sums += (rows.double() / _UNIT).round().to(torch.int64).sum(0)
    for axis, placement in enumerate(table.placements):
        if not isinstance(placement, Replicate):
            dist.all_reduce(sums, group=table.device_mesh.get_group(axis))
    mine[last_trained:last] = (sums.double() * _UNIT / trained).float()
