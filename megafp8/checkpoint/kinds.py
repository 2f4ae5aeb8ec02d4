"""What a folder holds that is not what was wanted, by its names: the end of a refusal."""

import re
from collections.abc import Sequence
from fnmatch import filter as matching
from pathlib import Path

from megafp8.checkpoint.files import is_complete, iteration_of

# Where a folder may lie in the one that was given: runs, and the cache of downloaded models.
_HUB = ("snapshots/*", "models--*/snapshots/*")
_RUNS = ("*", "*/checkpoints")
_BELOW = {"megafp8": _RUNS, "megatron": _RUNS, "hf": ("*", *_HUB)}
_NAMES = {
    "megafp8": "a checkpoint of megafp8",
    "hf": "a model of Hugging Face",
    "megatron": "a checkpoint of Megatron",
}
_MEGATRON = re.compile(r"latest_checkpointed_iteration\.txt|common\.pt|mp_rank_\d+(_\d+)*")
_WEIGHTS = re.compile(r"(?!adapter_).*\.(safetensors|safetensors\.index\.json|bin)", re.DOTALL)
# Patterns of which one group is there whole, what the folder is then, and what to do with it.
_EXPORT = "write it as a Hugging Face folder with that program, and convert this"
_MERGE = "merge the two, save the whole as a Hugging Face folder, and convert this"
_ZERO = "its zero_to_fp32.py makes the weights of a Hugging Face folder; convert this"
_GGUF = "take the Hugging Face folder that it was made from"
_DCP = "a checkpoint of torch.distributed.checkpoint (FSDP, torchtitan), or half of another"
_FOREIGN = (
    ("adapter_config.json", "an adapter (PEFT, LoRA) without its base model", _MERGE),
    ("adapter_model.*", "an adapter (PEFT, LoRA) without its base model", _MERGE),
    ("global_step*", "a checkpoint of DeepSpeed", _ZERO),
    ("zero_to_fp32.py", "a checkpoint of DeepSpeed", _ZERO),
    ("*_model_states.pt", "a checkpoint of DeepSpeed", _ZERO),
    ("*_optim_states.pt", "a checkpoint of DeepSpeed", _ZERO),
    ("*.nemo", "a checkpoint of NeMo", _EXPORT),
    ("model_weights model_config.yaml", "a checkpoint of NeMo", _EXPORT),
    ("weights context", "a checkpoint of NeMo", _EXPORT),
    ("checkpoint_metadata.json", "a checkpoint of nanotron", _EXPORT),
    ("*.ckpt", "a pickled checkpoint (.ckpt, as Lightning's are)", _EXPORT),
    ("_CHECKPOINT_METADATA", "a checkpoint of JAX (Orbax)", _EXPORT),
    ("consolidated*.pth", "a model in Meta's own files", _EXPORT),
    ("params.json consolidated*.safetensors", "a model in Mistral's own files", _EXPORT),
    ("*.gguf", "a model for llama.cpp (GGUF), mostly quantised", _GGUF),
    ("pytorch_model_fsdp*", "a checkpoint of Accelerate's FSDP", _EXPORT),
    (".metadata *.distcp", _DCP, f"copy it again, whole, or {_EXPORT}"),
)


def _names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def kind_of_folder(folder: Path) -> str | None:
    """Return which program's model a folder holds by its names: megafp8, hf, megatron or None."""
    names = _names_in(folder)
    iterations = (folder / name for name in names if iteration_of(name) is not None)
    if is_complete(folder) or any(is_complete(path) for path in iterations):
        return "megafp8"
    if "config.json" in names and any(_WEIGHTS.fullmatch(name) for name in names):
        return "hf"
    return "megatron" if any(_MEGATRON.fullmatch(name) for name in names) else None


def foreign_program(folder: Path) -> str:
    """Return what the folder of a program that is not converted is, as the end of a message.

    Empty where none is recognised by the names in it.
    """
    names = _names_in(folder)
    for patterns, what, do in _FOREIGN:
        if all(matching(names, pattern) for pattern in patterns.split()):
            return f": it is {what}; {do}"
    return ""


def other_program(folder: Path, wanted: str = "megafp8") -> str:
    """Return whose model a folder holds and how to convert it, as the end of a message.

    Empty where it holds nothing of another program than `wanted`.
    """
    kind = kind_of_folder(folder)
    if kind is None:
        foreign, models = foreign_program(folder), _below(folder, "hf", _HUB)
        half = (folder / "config.json").exists() or any(folder.glob("*.safetensors"))
        if foreign or not (models or half):
            return foreign
        kind, folder = "hf", (models or [folder])[0]
    if kind == wanted:
        return ""
    tool = f"tools/convert_checkpoint.py --from {kind} --load {folder} --to {wanted}"
    return f": it is {_NAMES[kind]}; convert it: {tool} --save NEW_FOLDER"


def _below(folder: Path, wanted: str, patterns: Sequence[str]) -> list[Path]:
    """Return the folders of a kind among those that patterns find in a folder."""
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_dir() and kind_of_folder(path) == wanted)


def folders_that_do(folders: Sequence[Path]) -> str:
    """Return which folders to give instead, in words; three of them by name."""
    more = f" and {len(folders) - 3} more" if len(folders) > 3 else ""
    shown = ", ".join(str(path) for path in folders[:3])
    return f"folders in it do, give one of them: {shown}{more}"


def found_instead(folder: Path, wanted: str = "megafp8") -> str:
    """Return what a folder is instead of a checkpoint of `wanted`, as the end of a message.

    Args:
        folder: what the user gave.
        wanted: megafp8, hf or megatron.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return ": it is a file, expected a folder" if folder.exists() else ": no such folder"
    inside = _below(folder, wanted, _BELOW[wanted])
    other = other_program(folder, wanted)
    return other or (f"; {folders_that_do(inside)}" if inside else "")
