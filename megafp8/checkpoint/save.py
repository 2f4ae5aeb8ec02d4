"""Writing a checkpoint so that a kill at any instant leaves the last good one in place.

The order: shards and DCP's index into `tmp_iter_N.<token>/`, the record with all checksums last
inside it, a rename to `iter_N`, then `latest`. Everything is on permanent storage before the next
step starts. Readers never look into `tmp_*`, and take `iter_N` only with its record inside.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from megafp8.checkpoint.agree import on_all_ranks, on_first_rank, rank_and_size
from megafp8.checkpoint.files import (
    LATEST_NAME,
    METADATA_NAME,
    RECORD_NAME,
    is_complete,
    is_temporary,
    is_unfinished_latest,
    iteration_name,
    iteration_of,
    remove_directory,
    replaced_iteration,
    set_aside,
    sync_directory,
    unread,
    write_atomically,
)
from megafp8.checkpoint.record import CheckpointRecord, FileEntry, TensorEntry
from megafp8.checkpoint.snapshot import Staged, merge_entries, stage
from megafp8.checkpoint.writer import Box, ShardFile, plan_shards, write_index
from megafp8.errors import CheckpointError
from megafp8.log import get_logger

_logger = get_logger(__name__)


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, Tensor],
    record: CheckpointRecord,
    group: dist.ProcessGroup | None = None,
    keep_last: int | None = None,
) -> Path:
    """Save tensors under their canonical names; all ranks of `group` call it together.

    Args:
        root: Folder of the checkpoints (`--save`), on a file system that all ranks share.
        iteration: Completed iterations; names the directory. An iteration that is there already
            is replaced.
        tensors: Canonical name to tensor. Ranks may hold different names (pipeline stages). A
            DTensor is one global tensor of which each rank writes its shard; a plain tensor is
            taken as equal on all ranks that hold the name, and written by one of them.
        record: What else to say in `megafp8.json`; `tensors` and `files` are filled in here. The
            first rank's record is written.
        group: Ranks that take part; None for the default group, or for this process alone where
            there is none.
        keep_last: Delete older complete checkpoints but this many, counting this one; None keeps
            all. Checkpoints of later iterations are left alone.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on every rank, if any rank failed; what was there before is untouched
            and `latest` still names it.
    """
    return write_checkpoint(root, iteration, lambda: stage(tensors, None), record, group, keep_last)


def write_checkpoint(
    root: Path,
    iteration: int,
    staged: Callable[[], Staged],
    record: CheckpointRecord,
    group: dist.ProcessGroup | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write what `staged` returns, as `save_checkpoint` says; it may raise on some ranks alone."""
    assert record.iteration == iteration, (record.iteration, iteration)
    assert keep_last is None or keep_last >= 1, keep_last
    root = Path(root).absolute()
    final = root / iteration_name(iteration)
    step = f"saving {final}"
    rank, _ = rank_and_size(group)
    mine: list[Staged] = []

    def describe() -> tuple[dict[str, TensorEntry], list[tuple[str, Box | None]]]:
        mine.append(staged())
        return mine[0].entries, mine[0].parts

    described = on_all_ranks(step, describe, group)
    entries = merge_entries([found for found, _ in described], step)
    plans, metadata = plan_shards(entries, [parts for _, parts in described])
    temporary = Path(on_first_rank(step, lambda: str(make_temporary(root, final.name)), group))
    try:
        indices = [item.index for item in plans[rank]]
        written = on_all_ranks(
            step, lambda: _write_shard(temporary, rank, indices, mine[0].data), group
        )
        if None in written:
            raise KeyboardInterrupt  # of any rank: it ends them all

        def finish() -> None:
            shards = [shard for shard in written if shard is not None]
            places = {index: place for shard in shards for index, place in shard.places.items()}
            files = {shard.name: shard.entry for shard in shards}
            files[METADATA_NAME] = write_index(temporary, metadata, places)
            full = dataclasses.replace(record, tensors=entries, files=dict(sorted(files.items())))
            commit(temporary, final, full)
            _tidy(final, keep_last)

        on_first_rank(step, finish, group)
    except CheckpointError:
        # Every rank has reported by now, so none is still writing.
        if rank == 0:
            _remove_unfinished(temporary)
        raise
    return final


def _remove_unfinished(temporary: Path) -> None:
    """Delete what a failed save wrote; the disk that failed it may fail this, too."""
    try:
        if temporary.exists():
            remove_directory(temporary)
    except OSError as error:
        _logger.warning("%s is left for the next save to delete: %s", temporary, error)


def make_temporary(root: Path, name: str) -> Path:
    """Make the directory in `root` that `commit` will turn into the checkpoint `name`."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f"tmp_{name}.{os.urandom(4).hex()}"
    temporary.mkdir()
    return temporary


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A file that a rank has written, and where its parts are."""

    name: str
    entry: FileEntry
    places: dict[MetadataIndex, _StorageInfo]


def _write_shard(
    temporary: Path,
    rank: int,
    indices: Sequence[MetadataIndex],
    data: Mapping[MetadataIndex, Tensor],
) -> _Shard | None:
    """Write a rank's file; None if Ctrl-C came, which others in their collectives have to hear."""
    file = ShardFile(temporary, rank)
    try:
        for index in indices:
            file.append(index, data[index])
        return _Shard(file.name, file.finish(), file.places)
    except KeyboardInterrupt:
        return None
    finally:
        with suppress(OSError):  # of a full disk again, and that has been told
            file.close()


def commit(temporary: Path, final: Path, record: CheckpointRecord) -> None:
    """Turn a directory with all shards into the checkpoint that `latest` names.

    Raises:
        CheckpointError: a file is not here as it was written.
        OSError: from the file system.
    """
    for name, entry in record.files.items():
        seen = (temporary / name).stat().st_size if (temporary / name).exists() else None
        if seen != entry.size:
            raise CheckpointError(
                f"{name} has {entry.size} bytes on the rank that wrote it and"
                f" {'is missing' if seen is None else f'has {seen}'} on the first rank:"
                " --save must lie on a file system that all ranks share"
            )
    assert METADATA_NAME in record.files, sorted(record.files)
    check_latest(final.parent)
    sync_directory(temporary)
    write_atomically(temporary / RECORD_NAME, record.to_json())
    _replace(temporary, final)
    sync_directory(final.parent)
    write_atomically(final.parent / LATEST_NAME, final.name + "\n")


def check_latest(root: Path) -> None:
    """Find `latest` replaceable, before a checkpoint has its name and nothing may fail any more.

    Raises:
        CheckpointError: it is a directory.
    """
    path = root / LATEST_NAME
    if path.is_dir() and not path.is_symlink():
        raise CheckpointError(f"{path} is a directory, expected a file; remove or rename it")


def _replace(temporary: Path, final: Path) -> None:
    """Give a finished directory its final name; what bears that name is set aside for `_tidy`."""
    if not os.path.lexists(final):
        os.rename(temporary, final)
        return
    # A directory cannot be renamed over a filled one. A kill between the two renames leaves only
    # `old_*`, which `find_checkpoint` takes for the missing iteration.
    former = final.with_name(f"old_{final.name}.{os.urandom(4).hex()}")
    os.rename(final, former)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(former, final)
        raise


def _delete(path: Path) -> None:
    """Delete what `_tidy` may, unless it is a checkpoint that another process is loading."""
    if iteration_of(path.name) is not None:
        # Asked just now, since deleting others takes seconds, and under the lock until the name is
        # gone. Not longer: NFS keeps a file that is open, and with it the directory.
        with unread(path) as free:
            if not free:
                _logger.info("%s is being loaded by another process: kept for now", path)
                return
            path = set_aside(path)
    remove_directory(path)


def _tidy(final: Path, keep_last: int | None) -> None:
    """Delete what interrupted or repeated saves left behind, and checkpoints beyond `keep_last`.

    The new checkpoint is safe by now: a file that cannot be deleted is a warning.
    """
    doomed: list[Path] = []
    older: list[tuple[int, Path]] = []
    current = iteration_of(final.name)
    assert current is not None
    try:
        for path in sorted(final.parent.iterdir()):
            iteration, replaced = iteration_of(path.name), replaced_iteration(path.name)
            if (
                replaced is not None
                and is_complete(path)
                and not os.path.lexists(path.with_name(iteration_name(replaced)))
            ):
                # The only copy of an iteration whose second save was killed: give it its name back.
                iteration, replaced = replaced, None
                path = path.rename(path.with_name(iteration_name(iteration)))
            left = is_temporary(path.name) or is_unfinished_latest(path.name)
            if left or replaced is not None:
                doomed.append(path)
            elif iteration is not None and iteration < current and is_complete(path):
                older.append((iteration, path))
        if keep_last is not None:
            older.sort(reverse=True)
            doomed += [path for _, path in older[keep_last - 1 :]]
    except OSError as error:
        _logger.warning("old checkpoints in %s could not be listed: %s", final.parent, error)
    for path in doomed:
        try:
            _delete(path)
        except OSError as error:  # the others still have to go: the disk would fill
            _logger.warning("%s could not be deleted: %s", path, error)
