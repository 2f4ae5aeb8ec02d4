"""Whether the FP8 scale state of a checkpoint is whole and what a run would have saved.

Loading heals much of what is wrong here: scales are chosen anew from their windows, and what is
missing starts anew. A tool that hands scales on, or calls a checkpoint good, must not pass it by.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from torch import Tensor

from megafp8.checkpoint.files import RECORD_NAME
from megafp8.checkpoint.rank_scales import LOCAL_PREFIX, SHARED_PREFIX, move_ranks
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.record import CheckpointRecord, TensorEntry
from megafp8.checkpoint.values import flaw
from megafp8.config import ModelShape, RunConfig
from megafp8.errors import ConfigurationError, PrecisionError
from megafp8.numerics import Recipe
from megafp8.numerics.recipe import CORE_ROLES, ROLES, Role
from megafp8.numerics.windows import fitting_scale, same_scale
from megafp8.precision import build_plan, recipe_from_config

SCALE, WINDOW = "scale", "amax_history"


class _Tensor(NamedTuple):
    """One FP8 tensor of a run: where its scale and its window are stored, `prefix` in front."""

    prefix: str
    module: str
    role: str

    def name(self, kind: str) -> str:
        return f"{self.prefix}{self.module}.{self.role}.{kind}"


# What is stored of each: SCALE and WINDOW to its entry in the record.
_States = Mapping[_Tensor, Mapping[str, TensorEntry]]


def recorded_recipe(record: CheckpointRecord) -> Recipe | None:
    """Return the recipe whose state a checkpoint holds; None without delayed scaling."""
    try:
        recipe = recipe_from_config(RunConfig.from_dict(record.config))
    except (ConfigurationError, PrecisionError):
        return None
    return recipe if recipe is not None and recipe.stateful else None


class RankState:
    """Scale state that differs between the ranks of a checkpoint, moved to other ranks.

    Args:
        reader: of the checkpoint.
    """

    def __init__(self, reader: TensorReader) -> None:
        self._reader, self._recipe = reader, recorded_recipe(reader.record)

    def moved(self, name: str, tensor: Tensor, dp: int, tp: int) -> Tensor:
        """Return a tensor on dp x tp ranks: a scale is chosen anew for its merged window.

        Args:
            name: starts with LOCAL_PREFIX.
            tensor: its value, [dp before, tp before, ...].
            dp: data-parallel ranks now.
            tp: tensor-parallel ranks now.

        Returns:
            [dp, tp, ...].
        """
        moved, stem = move_ranks(name, tensor, dp, tp), name.removesuffix(SCALE)
        role, window = stem.rstrip(".").rpartition(".")[2], f"{stem}{WINDOW}"
        same = moved.shape == tensor.shape
        if (
            same
            or stem == name
            or self._recipe is None
            or window not in self._reader.record.tensors
        ):
            return moved
        merged = move_ranks(window, self._reader.read(window), dp, tp)
        return fitting_scale(moved, merged, cast(Role, role), self._recipe)


def scale_problems(reader: TensorReader) -> list[str]:
    """Return one sentence for each FP8 tensor whose scale state is damaged, naming tensor and file.

    Cases: another shape or dtype; a scale without its window, or a window without its scale; no
    state of a tensor that is FP8 by the recorded plan; state of what the model does not have; a
    scale that its own window does not give by the recorded recipe. Values that are no scale or no
    amax are told by `flaw`.

    Args:
        reader: of a checkpoint whose files are good.
    """
    record, path = reader.record, reader.directory / RECORD_NAME
    states, found = _read_names(record, path)
    recipe = recorded_recipe(record)
    found += list(_bad_shapes(states, path)) + list(_halves(states, recipe, path))
    if recipe is not None:
        found += list(_not_of_the_run(states, record, path))
    return found or ([] if recipe is None else list(_stale(states, recipe, reader)))


def _read_names(record: CheckpointRecord, path: Path) -> tuple[_States, list[str]]:
    states: dict[_Tensor, dict[str, TensorEntry]] = defaultdict(dict)
    strange = []
    for name, entry in record.tensors.items():
        for prefix in (SHARED_PREFIX, LOCAL_PREFIX):
            if name.startswith(prefix):
                stem, _, kind = name.removeprefix(prefix).rpartition(".")
                module, _, role = stem.rpartition(".")
                if kind in (SCALE, WINDOW) and module:
                    states[_Tensor(prefix, module, role)][kind] = entry
                else:
                    strange.append(f"{path} lists {name}, which is no scale and no amax history")
    return states, strange


def _bad_shapes(states: _States, path: Path) -> Iterator[str]:
    for tensor, kinds in states.items():
        ranks = ["dp", "tp"] if tensor.prefix == LOCAL_PREFIX else []
        for kind, entry in kinds.items():
            expected = ranks + ["H"] * (kind == WINDOW)
            if len(entry.shape) != len(expected) or not math.prod(entry.shape):
                wanted = f"[{', '.join(expected)}]"
            elif entry.dtype != "float32":
                wanted = "float32"
            elif kind == WINDOW and SCALE in kinds and entry.shape[:-1] != kinds[SCALE].shape:
                wanted = f"{list(kinds[SCALE].shape)} in front as its scale has"
            else:
                continue
            found = f"{entry.dtype}{list(entry.shape)}"
            yield f"{path} lists {tensor.name(kind)} as {found}, expected {wanted}"


def _halves(states: _States, recipe: Recipe | None, path: Path) -> Iterator[str]:
    for tensor, kinds in states.items():
        # Of a model that was converted a scale may be all that is known.
        for kind in (SCALE, WINDOW) if recipe is not None else (SCALE,):
            if kind not in kinds:
                other = WINDOW if kind == SCALE else SCALE
                yield f"{path} lists no {tensor.name(kind)} beside its {other}"


def _not_of_the_run(states: _States, record: CheckpointRecord, path: Path) -> Iterator[str]:
    """State of tensors that the recorded run does not have, and none of those that it has."""
    config = RunConfig.from_dict(record.config)
    try:
        shape = ModelShape.from_config(config, int(record.state["vocab_size"]))
    except (ConfigurationError, KeyError, TypeError, ValueError):
        return  # told by whoever needs the sizes
    roles: dict[str, tuple[Role, ...]] = {
        spec.name.removesuffix(".weight"): ROLES
        for spec in shape.parameters()
        if spec.kind == "linear"
    } | {_core(layer): CORE_ROLES for layer in range(shape.num_layers)}
    there: dict[str, set[str]] = defaultdict(set)
    for tensor in states:
        there[tensor.module].add(tensor.role)
        if tensor.role not in roles.get(tensor.module, ()):
            yield (
                f"{path} lists {tensor.name(next(iter(states[tensor])))}, of which this model has "
                "no FP8 tensor"
            )
    planned = _planned(config, shape, record)
    if not there and planned and "source_dtype" not in record.state:  # a converted model has none
        yield f"{path} lists no FP8 scale state, and its run has {len(planned)} FP8 modules"
        return
    prefix = LOCAL_PREFIX if all(t.prefix == LOCAL_PREFIX for t in states) else SHARED_PREFIX
    # At another layout, before a change of it, other sizes decided: for all layers alike.
    kinds = {_kind(module) for module in there}
    for module in sorted(planned - there.keys()):
        if _kind(module) in kinds:
            yield f"{path} lists no {prefix}{module}.*, an FP8 module by its plan"
    for module, found in there.items():
        for role in roles.get(module, ()):
            if role not in found:
                yield f"{path} lists no {prefix}{module}.{role}.{SCALE}, nor its {WINDOW}"


def _core(layer: int) -> str:
    return f"decoder.layers.{layer}.self_attention.core_attention"


def _kind(module: str) -> str:
    return ".".join(module.split(".")[3:])  # after decoder.layers.N


def _planned(config: RunConfig, shape: ModelShape, record: CheckpointRecord) -> set[str]:
    """Modules with scale state by the recorded plan; empty where the record alone does not tell."""
    if config.precision.precision_policy is not None:
        return set()  # a file that others may have changed since
    try:
        plan = build_plan(config, shape, config.layout(int(record.layout["world_size"])))
    except (ConfigurationError, PrecisionError, KeyError, TypeError, ValueError):
        return set()
    linears = {linear.name for linear in plan.linears if linear.precision == "fp8"}
    return linears | {_core(n) for n in range(shape.num_layers) if plan.core_is_fp8(n)}


def _stale(states: _States, recipe: Recipe, reader: TensorReader) -> Iterator[str]:
    """Scales that are not those of their windows, as far as windows tell."""
    for tensor in states:
        names = tensor.name(SCALE), tensor.name(WINDOW)
        scale, window = (reader.read(name) for name in names)
        if any(flaw(name, value) for name, value in zip(names, (scale, window), strict=True)):
            continue
        fitting = fitting_scale(scale, window, cast(Role, tensor.role), recipe)
        wrong = ~same_scale(scale, fitting)
        if bool(wrong.any()):
            found, wanted = (float(value[wrong].reshape(-1)[0]) for value in (scale, fitting))
            yield (
                f"{reader.file_of(names[0])} holds {names[0]} {found:.6g}, and its {WINDOW} gives "
                f"{wanted:.6g} by the recorded recipe"
            )
