"""What a folder looks like that is not what a tool wanted: the end of a refusal."""

from pathlib import Path

from megafp8.checkpoint.files import is_complete, iteration_of

_SHOWN = 3
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
    kind = kind_of_folder(folder)
    if kind is not None and kind != wanted:
        names = {"megafp8": "checkpoint of megafp8", "hf": "Hugging Face model"}
        what = names.get(kind, "Megatron checkpoint")
        return f": it is a {what}, which tools/convert_checkpoint.py --from {kind} takes"
    inside = sorted(
        path
        for pattern in ("*", "*/checkpoints")
        for path in folder.glob(pattern)
        if path.is_dir() and kind_of_folder(path) == wanted
    )
    if inside:
        more = f" and {len(inside) - _SHOWN} more" if len(inside) > _SHOWN else ""
        shown = ", ".join(str(path) for path in inside[:_SHOWN])
        return f"; folders in it do, give one of them: {shown}{more}"
    return ""
