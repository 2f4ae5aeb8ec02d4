"""Megatron's older checkpoints: one pickled file for each tensor- and pipeline-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.convert.dcp_reader import is_empty, is_plain
from megafp8.convert.megatron_names import LAYERS, canonical
from megafp8.convert.safe_pickle import load_pickled
from megafp8.convert.safetensors_files import Described
from megafp8.convert.view import listed
from megafp8.errors import CheckpointError

EXTRA_STATE = "_extra_state"
FILE_NAME = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
# Dimension that tensor parallelism splits, by module and kind; the rest is equal on all ranks.
_SPLIT = {
    ("word_embeddings", "weight"): 0,
    ("output_layer", "weight"): 0,
    ("linear_qkv", "weight"): 0,
    ("linear_qkv", "bias"): 0,
    ("linear_proj", "weight"): 1,
    ("linear_fc1", "weight"): 0,
    ("linear_fc1", "bias"): 0,
    ("linear_fc2", "weight"): 1,
}

# Settings that give the pipeline's stages different numbers of layers.
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "standalone_embedding_stage",
)


def notes_of(optimizer: Collection[str], extra: Collection[str]) -> list[str]:
    """What of a checkpoint stays behind, a sentence each.

    Args:
        optimizer: tensors or files of optimizer state.
        extra: modules' extra state that holds anything.
    """
    notes = []
    if optimizer:
        notes.append(f"optimizer state is not converted: left out {listed(optimizer)}")
    if extra:
        notes.append(
            f"FP8 state of TransformerEngine is not converted, scales start anew: left out "
            f"{listed(extra)}"
        )
    return notes


def legacy_folders(folder: Path) -> list[Path]:
    """The folders of the ranks, sorted; empty if the checkpoint is not of this form."""
    found = [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found)


class LegacyTensors:
    """Tensors merged over the ranks' files, which stay mapped and are read when asked for.

    Args:
        folder: the checkpoint.
        ranks: from `legacy_folders`.
        args: stored settings of the first rank.
        model: our section `model`.

    Raises:
        CheckpointError: a rank's file is missing, damaged or does not fit the others.
    """

    def __init__(
        self, folder: Path, ranks: Sequence[Path], args: Mapping[str, Any], model: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self.swiglu = bool(model["swiglu"])
        grid = {_coordinates(path): path for path in ranks}
        tp = 1 + max(rank for rank, _ in grid)
        pp = 1 + max(stage for _, stage in grid)
        for name, found in (("tensor", tp), ("pipeline", pp)):
            wanted = args.get(f"{name}_model_parallel_size", found)
            if wanted != found or len(grid) != tp * pp:
                raise CheckpointError(
                    f"{folder}: {len(grid)} folders mp_rank_* (tensor parallel {tp}, pipeline "
                    f"{pp}), but args say {name}_model_parallel_size {wanted}"
                )
        _refuse_uneven_stages(folder, args, pp)
        self._parts: dict[str, list[Tensor]] = {}
        self._optimizer: set[str] = set()
        self._extra: set[str] = set()
        for stage in range(pp):
            for rank in range(tp):
                path = grid[rank, stage] / FILE_NAME
                for name, tensor in self._named(path, stage, pp, int(model["num_layers"])):
                    tied_copy = name == "output_layer.weight" and not model.get(
                        "untie_embeddings_and_output_weights"
                    )
                    if not tied_copy:
                        self._parts.setdefault(name, []).append(tensor)
        self.entries = {
            name: self._describe(name, parts, tp) for name, parts in self._parts.items()
        }
        self.notes = notes_of(self._optimizer, self._extra)

    def _named(self, path: Path, stage: int, pp: int, layers: int) -> list[tuple[str, Tensor]]:
        """One file's tensors under canonical names with global layer numbers."""
        state = load_pickled(path)
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} holds {type(state).__name__}, expected a dict")
        chunks = [state["model"]] if "model" in state else []
        while f"model{len(chunks)}" in state:
            chunks.append(state[f"model{len(chunks)}"])
        if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
            raise CheckpointError(f"{path} holds no model, found {', '.join(map(str, state))[:80]}")
        beside = [other.name for other in path.parent.glob("*optim*") if other != path]
        self._optimizer.update(f"{path.parent.name}/{name}" for name in beside)
        if state.get("optimizer") is not None:
            self._optimizer.add(f"{path.parent.name}/{path.name}")
        each = layers // (pp * len(chunks))
        found = []
        for chunk, tensors in enumerate(chunks):
            first = (chunk * pp + stage) * each
            for key, tensor in tensors.items():
                if EXTRA_STATE in str(key):
                    if not is_empty(tensor):
                        self._extra.add(_global_name(str(key), first))
                    continue
                if str(key).endswith("inv_freq"):
                    continue
                if str(key).startswith("language_model.") or not isinstance(tensor, Tensor):
                    raise CheckpointError(
                        f"{path}: {key} is not Megatron-core's (use_mcore_models); convert the "
                        "checkpoint with Megatron's own tools first"
                    )
                if not is_plain(tensor):
                    raise CheckpointError(f"{path}: {key} is no dense tensor")
                found.append((_global_name(str(key), first), tensor.detach()))
        return found

    def _describe(self, name: str, parts: Sequence[Tensor], tp: int) -> Described:
        shape, dim = list(parts[0].shape), split_dim(name)
        if any(part.shape != parts[0].shape or part.dtype != parts[0].dtype for part in parts):
            raise CheckpointError(f"{self.folder}: ranks hold {name} in different shapes")
        if len(parts) != tp:
            raise CheckpointError(f"{self.folder}: {len(parts)} of {tp} ranks hold {name}")
        if dim is not None and dim < len(shape):  # else it does not fit, and is refused for that
            shape[dim] *= tp
        return Described(tuple(shape), parts[0].dtype)

    def read(self, name: str) -> Tensor:
        """One tensor, merged over tensor-parallel ranks.

        Raises:
            CheckpointError: ranks hold different values of what they share.
        """
        parts, dim = self._parts[name], split_dim(name)
        if dim is None:
            if not all(torch.equal(part, parts[0]) for part in parts):
                raise CheckpointError(f"{self.folder}: ranks hold different values of {name}")
            return parts[0].clone()
        if self.swiglu and "linear_fc1" in name:
            # Each rank has its gate rows, then its up rows.
            halves = [part.unflatten(0, (2, -1)) for part in parts]
            return torch.cat(halves, dim=1).flatten(0, 1)
        return torch.cat(parts, dim=dim)


def split_dim(name: str) -> int | None:
    """Dimension of a tensor that tensor parallelism splits."""
    module, _, kind = name.rpartition(".")
    return _SPLIT.get((module.rpartition(".")[2], kind))


def _refuse_uneven_stages(folder: Path, args: Mapping[str, Any], pp: int) -> None:
    """Layers are numbered within a stage's file: their global numbers need equal stages.

    Raises:
        CheckpointError: a setting says that stages differ, by its name.
    """
    for name in _UNEVEN if pp > 1 else ():
        value = args.get(name)
        if value is not None and value is not False:
            raise CheckpointError(
                f"{folder}: args.{name} is {value!r:.60}: its pipeline stages hold different "
                "numbers of layers; save it with --ckpt-format torch_dist or without a pipeline"
            )


def _coordinates(path: Path) -> tuple[int, int]:
    match = _FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match.group(1)), int(match.group(2) or 0)


def _global_name(key: str, first: int) -> str:
    key = canonical(key.removeprefix("module."))
    match = re.match(rf"{re.escape(LAYERS)}(\d+)\.(.*)", key)
    if match is None:
        return key
    return f"{LAYERS}{first + int(match.group(1))}.{match.group(2)}"
