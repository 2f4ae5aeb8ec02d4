"""Megatron's older checkpoints: one pickled file for each tensor- and pipeline-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.config.shape import OUTPUT, linear_names
from megafp8.convert.dcp_reader import is_empty
from megafp8.convert.megatron_names import EXTRA_STATE, LAYERS, canonical, notes_of
from megafp8.convert.routes import Described
from megafp8.convert.safe_pickle import load_pickled
from megafp8.errors import CheckpointError

FILE_NAME = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
# Modules that tensor parallelism splits, and how; the rest is equal on all ranks.
_MODES = {item.name.rpartition(".")[2]: item.mode for item in linear_names(1, True)}
_MODES |= {"word_embeddings": "column", "output_layer": "column"}
# Settings that give the pipeline's stages different numbers of layers.
_UNEVEN = (
    "pipeline_model_parallel_layout decoder_first_pipeline_num_layers "
    "decoder_last_pipeline_num_layers num_layers_in_first_pipeline_stage "
    "num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split standalone_embedding_stage"
)


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
        grid = {_coordinates(path): path / FILE_NAME for path in ranks}
        tp, pp = (1 + max(numbers) for numbers in zip(*grid, strict=True))
        for name, found in (("tensor", tp), ("pipeline", pp)):
            wanted = args.get(f"{name}_model_parallel_size", found)
            if wanted != found or len(grid) != tp * pp:
                raise CheckpointError(
                    f"{folder}: {len(grid)} folders mp_rank_* (tensor parallel {tp}, pipeline "
                    f"{pp}), but args say {name}_model_parallel_size {wanted}"
                )
        _refuse_uneven_stages(folder, args, pp)
        tied = not model.get("untie_embeddings_and_output_weights")
        self._parts: dict[str, list[Tensor]] = {}
        self._optimizer: set[str] = set()
        self._extra: set[str] = set()
        for (_, stage), path in sorted(grid.items(), key=lambda item: item[0][::-1]):
            for name, tensor in self._named(path, stage, pp, int(model["num_layers"])):
                if not (tied and name == OUTPUT):  # the last stage's copy of the embedding
                    self._parts.setdefault(name, []).append(tensor)
        self.entries = {
            name: self._describe(name, parts, tp) for name, parts in self._parts.items()
        }
        self.notes = notes_of(self._optimizer, self._extra)

    def _named(self, path: Path, stage: int, pp: int, layers: int) -> Iterator[tuple[str, Tensor]]:
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
        beside += [path.name] if state.get("optimizer") is not None else []
        self._optimizer.update(f"{path.parent.name}/{name}" for name in beside)
        each = layers // (pp * len(chunks))
        for chunk, tensors in enumerate(chunks):
            for key, tensor in ((str(key), value) for key, value in tensors.items()):
                name = _global_name(key, (chunk * pp + stage) * each)
                if EXTRA_STATE in key:
                    self._extra.update([] if is_empty(tensor) else [name])
                elif key.startswith("language_model.") or not isinstance(tensor, Tensor):
                    raise CheckpointError(
                        f"{path}: {key} is not Megatron-core's (use_mcore_models); convert the "
                        "checkpoint with Megatron's own tools first"
                    )
                elif not key.endswith("inv_freq"):
                    yield name, tensor.detach()

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
    mode = _MODES.get(module.rpartition(".")[2])
    if mode == "row":
        return 1 if kind == "weight" else None
    return 0 if mode == "column" and kind in ("weight", "bias") else None


def _refuse_uneven_stages(folder: Path, args: Mapping[str, Any], pp: int) -> None:
    """Layers are numbered within a stage's file: their global numbers need equal stages."""
    for name in _UNEVEN.split() if pp > 1 else ():
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
