"""What a Hugging Face folder holds by the names in it, before any of its files is read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from fnmatch import filter as matching
from pathlib import Path

from megafp8.checkpoint.kinds import foreign_program, found_instead
from megafp8.convert.carried import CONFIG_NAME, NAMES
from megafp8.convert.safetensors_files import INDEX_NAME, SCALES_NAME, SINGLE_NAME
from megafp8.convert.view import listed
from megafp8.errors import CheckpointError

_POINTER = b"version https://git-lfs.github.com/spec/"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
# Suffixes of files of weights, and what keeps them from being read; the first one found is told.
_FORMS = (
    (
        (".safetensors",),
        f": rename it to {SINGLE_NAME} if its tensors bear transformers' names",
    ),
    ((".bin", ".pt", ".pth", ".ckpt"), "; pickled weights are not read: save them as safetensors"),
    ((".gguf", ".h5", ".msgpack", ".npz", ".onnx"), ", another format: save it as safetensors"),
)


def refuse_half_a_model(folder: Path) -> None:
    """Refuse a folder that is not one whole model.

    Args:
        folder: what the user gave; it may not exist.

    Raises:
        CheckpointError: a file is missing or a link that leads nowhere, by name; the folder is
            something else, by what it is; or it holds an adapter beside the weights.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if CONFIG_NAME not in names:
        raise CheckpointError(
            f"--load {folder} holds no {CONFIG_NAME}{found_instead(folder, 'hf')}"
        )
    problems = [*_not_downloaded(folder, names)]
    adapter = sorted(names.intersection(ADAPTER))
    if not names & {SINGLE_NAME, INDEX_NAME}:
        found = _weights(folder, names)
        problems.append(f"it holds neither {SINGLE_NAME} nor {INDEX_NAME}, found {found}")
    elif adapter:
        problems.append(
            f"it holds {', '.join(adapter)} beside the weights, and transformers attaches such an "
            "adapter: merge the two, or convert a folder without it"
        )
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")


def left_out(folder: Path, taken: Collection[str]) -> list[str]:
    """The names of a folder's other files: neither `taken`, nor carried along, nor hidden."""
    known = {*taken, CONFIG_NAME, INDEX_NAME, SCALES_NAME, *NAMES}
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted(path.name for path in files if path.name not in known and path.name[0] != ".")


def _not_downloaded(folder: Path, names: Collection[str]) -> Iterator[str]:
    """Say which files of a model are there by name alone: links that lead nowhere, pointers."""
    ours = [name for name in names if name.endswith(".safetensors")]
    files = [name for name in sorted({*ours, CONFIG_NAME, INDEX_NAME, *NAMES}) if name in names]
    links = [name for name in files if not (folder / name).exists()]
    if links:
        target = os.readlink(folder / links[0])
        more = f", and so are {len(links) - 1} more" if links[1:] else ""
        yield (
            f"{links[0]} is a link to a file that is missing ({target}){more}: download the model "
            "again, or copy it with the files behind its links"
        )
    pointers = [name for name in files if name not in links and _is_pointer(folder / name)]
    if pointers:
        yield (
            f"{listed(pointers)}: a pointer of Git LFS in place of the file; run git lfs pull there"
        )


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def _weights(folder: Path, names: set[str]) -> str:
    """Name the files of weights of other names, with what to do about them."""
    found, do = matching(names, "model-*-of-*.safetensors"), f": copy {INDEX_NAME}, too"
    for suffixes, advice in () if found else _FORMS:
        found, do = [name for name in names - {*ADAPTER} if name.endswith(suffixes)], advice
        if found:
            break
    foreign = foreign_program(folder)
    if not found:
        return f"no weights{foreign}"
    return f"{listed(found)}{foreign or do}"
