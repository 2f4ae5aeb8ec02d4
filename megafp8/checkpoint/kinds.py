"""What a folder holds that is not what was wanted, by its names: the end of a refusal."""

import re
from collections.abc import Collection, Sequence
from fnmatch import filter as matching
from pathlib import Path

from megafp8.checkpoint.files import is_complete, iteration_of

_SHOWN = 3
# Where a folder may lie in the one that was given: runs, and the cache of downloaded models.
_HUB = ("snapshots/*", "models--*/snapshots/*")
_BELOW = {"megafp8": ("*", "*/checkpoints"), "megatron": ("*", "*/checkpoints"), "hf": ("*", *_HUB)}
_NAMES = {
    "megafp8": "a checkpoint of megafp8",
    "hf": "a model of Hugging Face",
    "megatron": "a checkpoint of Megatron",
}
_MEGATRON = ("latest_checkpointed_iteration.txt", "common.pt")
_MEGATRON_RANK = re.compile(r"mp_rank_\d+(_\d+)*")
# What another program's folder is called, what to do with it, and patterns of names: a folder is of
# the first row of which one group is there whole.
_EXPORT = "write it as a Hugging Face folder with that program, and convert this"
_FOREIGN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "an adapter (PEFT, LoRA) without its base model",
        "merge the two, save the whole as a Hugging Face folder, and convert this",
        ("adapter_config.json", "adapter_model.*"),
    ),
    (
        "a checkpoint of DeepSpeed",
        "its zero_to_fp32.py makes the weights of a Hugging Face folder; convert this",
        ("global_step*", "zero_to_fp32.py", "*_model_states.pt", "*_optim_states.pt"),
    ),
    (
        "a checkpoint of NeMo",
        _EXPORT,
        ("*.nemo", "model_weights model_config.yaml", "weights context"),
    ),
    ("a checkpoint of nanotron", _EXPORT, ("checkpoint_metadata.json",)),
    ("a pickled checkpoint (.ckpt, as Lightning's are)", _EXPORT, ("*.ckpt",)),
    ("a checkpoint of JAX (Orbax)", _EXPORT, ("_CHECKPOINT_METADATA",)),
    ("a model in Meta's own files", _EXPORT, ("consolidated*.pth",)),
    ("a model in Mistral's own files", _EXPORT, ("params.json consolidated*.safetensors",)),
    (
        "a model for llama.cpp (GGUF), mostly quantised",
        "take the Hugging Face folder that it was made from",
        ("*.gguf",),
    ),
    ("a checkpoint of Accelerate's FSDP", _EXPORT, ("pytorch_model_fsdp*",)),
    (
        "a checkpoint of torch.distributed.checkpoint (FSDP, torchtitan), or half of another",
        f"copy it again, whole, or {_EXPORT}",
        (".metadata *.distcp",),
    ),
)


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
        name.endswith((".safetensors", ".safetensors.index.json", ".bin"))
        and not name.startswith("adapter_")
        for name in names
    ):
        return "hf"
    ranks = any(_MEGATRON_RANK.fullmatch(name) for name in names)
    return "megatron" if ranks or names.intersection(_MEGATRON) else None


def foreign_program(folder: Path) -> str:
    """Return what the folder of a program that is not converted is, as the end of a message.

    Empty where none is recognised by the names in it.
    """
    try:
        names = [path.name for path in Path(folder).iterdir()]
    except OSError:
        return ""
    for what, do, groups in _FOREIGN:
        if any(_all_there(group.split(), names) for group in groups):
            return f": it is {what}; {do}"
    return ""


def _all_there(patterns: Sequence[str], names: Collection[str]) -> bool:
    return all(matching(names, pattern) for pattern in patterns)


def other_program(folder: Path, wanted: str = "megafp8") -> str:
    """Return whose model a folder holds and how to convert it, as the end of a message.

    Empty where it holds nothing of another program than `wanted`.
    """
    kind = kind_of_folder(folder)
    if kind is None:
        foreign = foreign_program(folder)
        if foreign:
            return foreign
        downloaded = _below(folder, "hf", _HUB)
        kind = "hf" if downloaded or _might_be_hf(folder) else None
        folder = downloaded[0] if downloaded else folder
    if kind is None or kind == wanted:
        return ""
    tool = f"tools/convert_checkpoint.py --from {kind} --load {folder} --to {wanted}"
    return f": it is {_NAMES[kind]}; convert it: {tool} --save NEW_FOLDER"


def _below(folder: Path, wanted: str, patterns: Sequence[str]) -> list[Path]:
    """Return the folders of a kind among those that patterns find in a folder."""
    paths = {path for pattern in patterns for path in Path(folder).glob(pattern)}
    return sorted(path for path in paths if path.is_dir() and kind_of_folder(path) == wanted)


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
    inside = _below(folder, wanted, _BELOW[wanted])
    return f"; {folders_that_do(inside)}" if inside else ""
