"""File systems that do not answer, found out before a rank reads from one, which may be for good.

A call into a file system whose server is gone returns when the server does. No signal and no time
limit reaches it. It is made in a thread, so that the process can say what it waits for and end.
"""

import os
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from megafp8.config import RunConfig
from megafp8.config.data import WITHOUT_MODEL
from megafp8.errors import DataError

ANSWER_SECONDS = 30.0
# What is read of folders and prefixes; none of them has to be there.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
)
_DATASET_SUFFIXES = (".idx", ".bin")


def check_files_answer(config: RunConfig, seconds: float = ANSWER_SECONDS) -> None:
    """Look at what a run reads, and at where it writes.

    Raises:
        DataError: some do not answer in time, or would not; names all of them. Whatever else is
            wrong with one, the code that reads it says.
    """
    check_answer(_paths(config), seconds)


def check_answer(paths: Mapping[str, list[Path]], seconds: float = ANSWER_SECONDS) -> None:
    """Look at paths, all at once.

    Args:
        paths: What is read for a flag, by the flag and its value.
        seconds: That a file system may take to answer.

    Raises:
        DataError: see `check_files_answer`.
    """
    looks = {name: _Look(some) for name, some in paths.items()}
    for look in looks.values():
        look.start()
    limit = time.monotonic() + seconds
    problems = []
    for name, look in looks.items():
        look.join(max(0.0, limit - time.monotonic()))
        if look.is_alive():
            problems.append(
                f"{name}: the file system has not answered for {seconds:g} s (look at its mount "
                "and its server)"
            )
        elif look.problem:
            problems.append(f"{name}: {look.problem}")
    if problems:
        raise DataError("; ".join(problems))


class _Look(threading.Thread):
    """Asks for what a reader of paths asks first."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(name="mounts", daemon=True)
        self.paths = paths
        self.problem = ""

    def run(self) -> None:
        for path in self.paths:
            try:
                mode = path.stat().st_mode
                if stat.S_ISDIR(mode):
                    with os.scandir(path) as entries:
                        next(entries, None)
                elif stat.S_ISREG(mode):
                    with path.open("rb") as file:
                        file.read(1)
                else:  # a reader of a pipe would wait for its other end
                    self.problem = f"{path} is neither a file nor a folder"
            except (OSError, ValueError):
                continue  # an answer, too


def _paths(config: RunConfig) -> dict[str, list[Path]]:
    data, paths = config.data, dict[str, list[Path]]()
    model = data.tokenizer_model
    if model is not None and data.tokenizer_type not in WITHOUT_MODEL:
        files = [Path(model) / name for name in _TOKENIZER_FILES]
        paths[f"--tokenizer-model {model}"] = [Path(model), *files]
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        flag = "--" + name.replace("_", "-")
        for prefix in getattr(data, name) or ():
            files = [Path(f"{prefix}{suffix}") for suffix in _DATASET_SUFFIXES]
            paths[f"{flag} {prefix}"] = files
    folders = {
        "--load": config.checkpoint.load,
        "--save": config.checkpoint.save,
        "--run-dir": config.logging.run_dir,
    }
    for flag, folder in folders.items():
        if folder is not None:
            paths[f"{flag} {folder}"] = [Path(folder)]
    return paths
