"""The folders of a run: found usable before the first step, by rank 0, for all ranks."""

import os
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import yaml

from megafp8.checkpoint import FolderLock, find_checkpoint
from megafp8.checkpoint.agree import on_first_rank
from megafp8.checkpoint.find import find_to_read
from megafp8.checkpoint.save import check_latest
from megafp8.config import RunConfig
from megafp8.config.auto_precision import PrecisionChoice
from megafp8.errors import CheckpointError
from megafp8.log import get_logger
from megafp8.precision import PrecisionPlan, build_manifest, write_manifest

log = get_logger(__name__)


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(frozen=True)
class HeldFolders:
    """What a run reads and writes, kept from other jobs.

    Attributes:
        run_dir: the run folder.
        source: the checkpoint that `--load` means; None starts fresh.
        release_source: no longer keeps `source` from being deleted, once it is loaded.
        check_ours: raises a CheckpointError, on rank 0, once the folder of the checkpoints is
            another job's all the same.
    """

    run_dir: Path
    source: Path | None
    release_source: Callable[[], None]
    check_ours: Callable[[], None]


@contextmanager
def hold_folders(config: RunConfig) -> Generator[HeldFolders, None, None]:
    """Find the folders of a run usable and keep other jobs out; a collective call.

    Raises:
        CheckpointError: on all ranks; one cannot be written, there is nothing usable to load
            although something should be, or another job that lives saves there.
    """
    with ExitStack() as held:
        source = checkpoint_to_load(config, held)
        run_dir = open_run_dir(config)
        with hold_save_dir(config, run_dir) as check_ours:
            yield HeldFolders(run_dir, source, held.close, check_ours)


def checkpoint_to_load(config: RunConfig, held: ExitStack) -> Path | None:
    """The checkpoint that `--load` means, by the rules of `find_checkpoint`; a collective call.

    Rank 0 decides: another rank may see a shared file system later and must not take another one.

    Args:
        config: the run.
        held: keeps it, on rank 0, from a `--keep-last` of the job that saves there. Building the
            model takes longer than such a job's next saves.

    Raises:
        CheckpointError: on all ranks; nothing usable there although something should be.
    """
    load = config.checkpoint.load
    if load is None:
        return None
    found = on_first_rank("--load", lambda: find_to_read(Path(load), held), None)
    if found is None and config.checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"--load {load}: found no checkpoint there, and --exit-on-missing-checkpoint is given"
        )
    if found is None and config.checkpoint.finetune:
        raise CheckpointError(
            f"--load {load}: found no checkpoint there, and --finetune has nothing to start from"
        )
    if found is None:
        found_there = "holds no checkpoint" if Path(load).is_dir() else "does not exist"
        log.warning("--load %s %s: training starts fresh", load, found_there)
    return found


def open_run_dir(config: RunConfig) -> Path:
    """Make the run folder, named by rank 0 where no name was given; a collective call.

    Raises:
        CheckpointError: on all ranks; it cannot be made or written.
    """
    given = config.logging.run_dir

    def make() -> Path:
        folder = Path(given or f"runs/{datetime.now(timezone.utc):%Y%m%d-%H%M%S}")
        _probe(folder)
        return folder

    return on_first_rank(f"--run-dir {given or 'runs/...'}", make, None)


def _save_dir(config: RunConfig, run_dir: Path) -> Path:
    return Path(config.checkpoint.save or run_dir / "checkpoints")


@contextmanager
def hold_save_dir(config: RunConfig, run_dir: Path) -> Generator[Callable[[], None], None, None]:
    """Make the folder of the checkpoints and keep other jobs out; a collective call.

    Yields:
        What raises a CheckpointError, on rank 0, once the folder is another job's all the same.

    Raises:
        CheckpointError: on all ranks; it cannot be written, or another job that lives has it.
    """
    folder = _save_dir(config, run_dir)
    lock: list[FolderLock] = []

    def acquire() -> None:
        _probe(folder)
        taken = FolderLock(folder)
        with _in_words(folder):
            taken.acquire()
        lock.append(taken)

    def check() -> None:
        for taken in lock:
            taken.check()

    on_first_rank(f"saving to {folder}", acquire, None)
    try:
        yield check
    finally:
        for taken in lock:
            taken.release()


def open_save_dir(config: RunConfig, run_dir: Path, fresh: bool) -> Path:
    """Check the folder of the checkpoints; a collective call.

    Args:
        config: the run.
        run_dir: of the run; checkpoints go there unless --save says otherwise.
        fresh: no checkpoint was loaded. Then a folder that holds some is of another run, whose
            checkpoints this one would replace or mix with its own.

    Raises:
        CheckpointError: on all ranks; it cannot be written, or is another run's.
    """
    folder = _save_dir(config, run_dir)

    def make() -> Path:
        _probe(folder)
        check_latest(folder)
        other = find_checkpoint(folder, to_load=False) if fresh else None
        if other is not None:
            raise CheckpointError(
                f"found {other.name} of another run there, and this one starts fresh; give --load "
                f"{folder} to continue it, or another --run-dir or --save"
            )
        return folder

    return on_first_rank(f"saving to {folder}", make, None)


def write_records(
    config: RunConfig,
    plan: PrecisionPlan,
    run_dir: Path,
    device: torch.device,
    backend: Mapping[str, Any],
    choice: PrecisionChoice | None = None,
) -> str:
    """Write `config.yaml` and the manifest on rank 0; a collective call.

    Args:
        config: the run.
        plan: its precision plan.
        run_dir: where to.
        device: where it runs.
        backend: which backend makes the layers, and why.
        choice: what `auto` came to, if it was asked for.

    Returns:
        The manifest's sha256, on all ranks.
    """

    def write() -> str:
        text = yaml.safe_dump(config.to_dict(), sort_keys=False)
        (run_dir / "config.yaml").write_text(text, encoding="utf-8")
        extra = {} if choice is None else {"precision_choice": choice.record()}
        content = build_manifest(
            config, plan, device=device_name(device), backend=backend, extra=extra
        )
        return write_manifest(run_dir, content)

    return on_first_rank(f"writing to {run_dir}", write, None)


def _probe(folder: Path) -> None:
    """Make a folder and write a file into it, so that a bad one is known before training.

    Raises:
        CheckpointError: it cannot be made or written, or is a file.
    """
    with _in_words(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Without a name: another job may do the same at this moment.
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def _in_words(folder: Path) -> Generator[None, None, None]:
    """Say what is wrong with a folder where the system names a number."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        raise CheckpointError(f"{file} is a file, expected a folder; give another") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{folder} cannot be written: {reason}") from error
