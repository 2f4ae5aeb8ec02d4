"""Finding a checkpoint in a folder, and whether its files are those that its record names."""

import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from megafp8.checkpoint.files import (
    LATEST_NAME,
    METADATA_NAME,
    RECORD_NAME,
    crc32_of,
    is_complete,
    is_temporary,
    iteration_name,
    iteration_of,
    reading,
    replaced_iteration,
)
from megafp8.checkpoint.kinds import folders_that_do, other_program
from megafp8.checkpoint.record import CheckpointRecord, FileEntry
from megafp8.errors import CheckpointError
from megafp8.log import get_logger

_logger = get_logger(__name__)

_FINDS = 10  # a checkpoint that is deleted once it is found again and again is no coincidence


def find_checkpoint(load_dir: Path, *, to_load: bool = True) -> Path | None:
    """Return the checkpoint that `--load` means, None where training starts fresh.

    Touches only the file system, no collective. On a folder that another job may be writing, let
    one rank ask and tell the others.

    Args:
        load_dir: A folder of checkpoints (what `latest` names is taken, else the newest complete
            one), or `.../iter_0000010` for exactly that one.
        to_load: False where it is asked whether a folder is free to save into.

    Returns:
        A complete checkpoint's directory; None if the folder is missing or holds no checkpoint.

    Raises:
        CheckpointError: `load_dir` is a file, names an iteration that is missing or partial, or
            holds checkpoints of which none is complete, something else than checkpoints that it
            was probably given for (another program's model, a run folder), or cannot be read.
    """
    load_dir = Path(load_dir).absolute()
    try:
        return _find(load_dir, to_load)
    except OSError as error:
        where = error.filename or load_dir
        raise CheckpointError(
            f"{where!s:.300} cannot be read: {error.strerror or error}"
        ) from error


def find_to_read(load_dir: Path, held: ExitStack) -> Path | None:
    """`find_checkpoint`, and keep what is found from a run's `--keep-last`.

    A run that saves there may delete it between the two; then the newer one is found.

    Args:
        load_dir: as in `find_checkpoint`.
        held: keeps it until it is closed.
    """
    found = None
    for _ in range(_FINDS):
        found = find_checkpoint(load_dir)
        if found is None:
            return None
        with ExitStack() as attempt:
            if attempt.enter_context(reading(found)) and is_complete(found):
                held.enter_context(attempt.pop_all())
                return found
    return found  # whoever reads it says what is missing


def _find(load_dir: Path, to_load: bool) -> Path | None:
    if load_dir.exists() and not load_dir.is_dir():
        folder = load_dir.parent  # `latest` lies beside checkpoints, other files in one
        usable = is_complete(folder) or _survey(folder)[1]
        advised = f"; give its folder: {folder}" if usable else ""
        raise CheckpointError(f"{load_dir} is a file, expected a directory{advised}")
    if is_complete(load_dir):
        return load_dir
    if iteration_of(load_dir.name) is not None:
        state = f"is partial (no {RECORD_NAME})" if load_dir.is_dir() else "does not exist"
        raise CheckpointError(f"{load_dir} {state}{advice(load_dir)}")
    if not load_dir.is_dir():
        return None
    partial, complete = _survey(load_dir)
    if partial and not complete:
        # A run with `--keep-last 1` may have replaced its only one while the folder was listed.
        partial, complete = _survey(load_dir)
    for path in partial if to_load else ():
        _logger.warning("checkpoint %s is partial (no %s): skipped", path, RECORD_NAME)
    named, state = _read_latest(load_dir)
    if complete:
        wanted = iteration_of(named or "")
        if wanted in complete:
            return complete[wanted]
        newest = complete[max(complete)]
        _logger.warning(
            "%s %s: taking %s, the newest complete checkpoint",
            load_dir / LATEST_NAME,
            state,
            newest,
        )
        return newest
    if to_load and not partial:
        _refuse_what_is_meant_otherwise(load_dir)
    if named is not None or any(iteration_of(path.name) is not None for path in partial):
        found = ", ".join(path.name for path in partial) or f"{LATEST_NAME}, which {state}"
        do = "give another --load, or an empty directory to start fresh"
        if not to_load:
            do = "give another --save, or remove what is partial there"
        raise CheckpointError(f"{load_dir} holds no usable checkpoint, found {found}; {do}")
    return None


def _refuse_what_is_meant_otherwise(folder: Path) -> None:
    """Starting fresh would be wrong where a folder holds a model that is not found by our names."""
    within = folder / "checkpoints"
    shards = next(folder.glob("*.distcp"), None) or folder / METADATA_NAME
    reason = other_program(folder)
    if not reason and shards.exists():
        reason = f", found {shards.name} and no {RECORD_NAME}; copy it again, whole"
    elif not reason and within.is_dir() and _survey(within)[1]:
        reason = f"; {folders_that_do([within])}"
    if reason:
        raise CheckpointError(f"{folder} holds no checkpoint{reason}")


def _survey(load_dir: Path) -> tuple[list[Path], dict[int, Path]]:
    """Return a folder's partial checkpoints, and its complete ones by iteration."""
    partial: list[Path] = []
    complete: dict[int, Path] = {}
    for path in sorted(load_dir.iterdir()):
        iteration, former = iteration_of(path.name), replaced_iteration(path.name)
        if is_temporary(path.name) or (iteration is not None and not is_complete(path)):
            partial.append(path)
        elif former is not None and is_complete(path):
            # A save of the same iteration may have been killed between its two renames.
            if not path.with_name(iteration_name(former)).exists():
                complete[former] = path
        elif iteration is not None:
            complete[iteration] = path
    return partial, complete


def _read_latest(load_dir: Path) -> tuple[str | None, str]:
    """Return what `latest` names, None if there is none, and its state in words."""
    path = load_dir / LATEST_NAME
    if not os.path.lexists(path):
        return None, "is missing"
    if path.is_symlink() and path.is_dir():  # a hand-made one, as other programs write it
        target = path.resolve()
        name = target.name if target.parent == load_dir.resolve() else str(target)
    elif not path.is_file():
        return "", "is no file"
    else:
        name = path.read_text(encoding="utf-8", errors="replace").strip()
    return name, f"names {name!r}, which is no complete checkpoint"


def advice(directory: Path) -> str:
    """Return which checkpoint to load instead of a bad one, as the end of a message."""
    directory = Path(directory).absolute()
    parent = directory.parent
    if not parent.is_dir():
        return ""
    try:
        _, complete = _survey(parent)
    except OSError:  # what is wrong with the others must not hide what is wrong with this one
        return ""
    for _, path in sorted(complete.items(), reverse=True):
        if path != directory:
            with suppress(CheckpointError):
                verify_files(path, _read_record(path), checksums=False)
                return f"; use --load {path} instead"
    return f"; no other complete checkpoint in {parent}"


def read_record(directory: Path) -> CheckpointRecord:
    """Read a checkpoint's `megafp8.json`.

    Raises:
        CheckpointError: it is missing, damaged or of a newer format.
    """
    try:
        return _read_record(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{advice(directory)}") from error


def _read_record(directory: Path) -> CheckpointRecord:
    path = Path(directory) / RECORD_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} is no complete checkpoint: no {RECORD_NAME}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return CheckpointRecord.from_json(text, path)


def file_problem(
    directory: Path, name: str, entry: FileEntry, *, checksum: bool = True
) -> str | None:
    """Return what is wrong with a checkpoint's file; None if nothing is.

    Args:
        directory: The checkpoint.
        name: Of the file.
        entry: What its record says of it.
        checksum: Read it and compare CRC-32, not its size alone.
    """
    path = Path(directory) / name
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"is no file, expected one of {entry.size} bytes"
        if status.st_size != entry.size:
            return f"has {status.st_size} bytes, expected {entry.size}"
        if checksum and (found := crc32_of(path)) != entry.crc32:
            return f"is damaged: crc32 {found}, expected {entry.crc32}"
    except FileNotFoundError:
        return f"is missing, expected {entry.size} bytes"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def foreign_files(directory: Path, record: CheckpointRecord) -> list[str]:
    """Return the names of shards in a checkpoint's folder that its record does not name."""
    return sorted({path.name for path in Path(directory).glob("*.distcp")} - set(record.files))


def verify_files(directory: Path, record: CheckpointRecord, *, checksums: bool = True) -> None:
    """Compare a checkpoint's files with its record.

    Args:
        directory: The checkpoint.
        record: Its record.
        checksums: Read the files and compare CRC-32 too, not sizes alone.

    Raises:
        CheckpointError: a file is missing, has another size or other bytes; names it.
    """
    for name, entry in record.files.items():
        problem = file_problem(directory, name, entry, checksum=False)
        if problem is not None:
            raise CheckpointError(f"{Path(directory) / name} {problem}")
    foreign = foreign_files(directory, record)
    if foreign:
        raise CheckpointError(
            f"{Path(directory) / foreign[0]} is no file of this checkpoint: {RECORD_NAME} does not "
            "name it"
        )
    for name in sorted(record.files) if checksums else ():
        verify_file(directory, record, name)


def verify_file(directory: Path, record: CheckpointRecord, name: str) -> None:
    """Compare one file's bytes with a checkpoint's record.

    Raises:
        CheckpointError: as `verify_files`.
    """
    if name not in record.files:
        raise CheckpointError(f"{Path(directory) / RECORD_NAME} is damaged: it lacks {name}")
    problem = file_problem(directory, name, record.files[name])
    if problem is not None:
        raise CheckpointError(f"{Path(directory) / name} {problem}")
