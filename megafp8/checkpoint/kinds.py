"""What a folder holds that is not what was wanted, by its names: the end of a refusal."""

from collections.abc import Sequence
from pathlib import Path

from megafp8.checkpoint.files import is_complete, iteration_of

_SHOWN = 3
_NAMES = {
    "megafp8": "a checkpoint of megafp8",
    "hf": "a model of Hugging Face",
    "megatron": "a checkpoint of Megatron",
}
_MEGATRON = ("latest_checkpointed_iteration.txt", "common.pt")


def kind_of_folder(folder: Path) -> str | None:
    """Return which program's model a folder holds by its names: megafp8, hf, megatron or None."""
    try:
        names = {path.name for path in Path(folder).iterdir()}
    except OSError:
        return None
    if is_complete(folder) or any(
        iteration_of(name) is not None and is_complete(Path(folder) / name) for name in names
    ):
        return "megafp8"
    if "config.json" in names and any(
        name.endswith((".safetensors", ".safetensors.index.json", ".bin")) for name in names
    ):
        return "hf"
    ranks = any(name.startswith("mp_rank_") for name in names)
    return "megatron" if ranks or names.intersection(_MEGATRON) else None


def other_program(folder: Path, wanted: str = "megafp8") -> str:
    """Return whose model a folder holds and how to convert it, as the end of a message.

    Empty where it holds nothing of another program than `wanted`.
    """
    kind = kind_of_folder(folder)
    if kind is None and _might_be_hf(folder):
        kind = "hf"
    if kind is None or kind == wanted:
        return ""
    tool = f"tools/convert_checkpoint.py --from {kind} --load {folder} --to {wanted}"
    return f": it is {_NAMES[kind]}; convert it: {tool} --save NEW_FOLDER"


def _might_be_hf(folder: Path) -> bool:
    """Tell whether a folder holds one half of such a model: its configuration or its weights."""
    folder = Path(folder)
    return (folder / "config.json").exists() or any(folder.glob("*.safetensors"))


def folders_that_do(folders: Sequence[Path]) -> str:
    """Return which folders to give instead, in words."""
    more = f" and {len(folders) - _SHOWN} more" if len(folders) > _SHOWN else ""
    shown = ", ".join(str(path) for path in folders[:_SHOWN])
    return f"folders in it do, give one of them: {shown}{more}"


def found_instead(folder: Path, wanted: str = "megafp8") -> str:
    """Return what a folder is instead of a checkpoint of `wanted`, as the end of a message.

    Args:
        folder: what the user gave.
        wanted: megafp8, hf or megatron.
    """
    folder = Path(folder)
    if not folder.exists():
        return ": no such folder"
    if not folder.is_dir():
        return ": it is a file, expected a folder"
    other = other_program(folder, wanted)
    if other:
        return other
    inside = sorted(
        path
        for pattern in ("*", "*/checkpoints")
        for path in folder.glob(pattern)
        if path.is_dir() and kind_of_folder(path) == wanted
    )
    return f"; {folders_that_do(inside)}" if inside else ""
