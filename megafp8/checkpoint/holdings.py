"""Which part of which tensor each rank of a layout saves, as arithmetic: no rank is needed."""

import re
from collections.abc import Mapping

from megafp8.checkpoint.rank_scales import LOCAL_PREFIX
from megafp8.checkpoint.record import TensorEntry
from megafp8.checkpoint.writer import Box, Holding
from megafp8.config import Layout, ModelShape
from megafp8.config.layout import Place
from megafp8.config.shape import ParameterSpec
from megafp8.errors import CheckpointError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def plan_holdings(
    entries: Mapping[str, TensorEntry], shape: ModelShape, layout: Layout
) -> list[Holding]:
    """Return for each rank which part of which tensor it saves.

    Args:
        entries: all tensors of the checkpoint, as they are at this layout.
        shape: the model.
        layout: the ranks.

    Raises:
        CheckpointError: a weight of the model is missing, or has another shape.
    """
    specs = {spec.name: spec for spec in shape.parameters()}
    for name, spec in specs.items():
        found = entries[name].shape if name in entries else None
        if found != spec.shape:
            state = "is missing" if found is None else f"has shape {list(found)}"
            raise CheckpointError(
                f"{name} {state}, but the checkpoint's own configuration gives {list(spec.shape)}"
            )
    by_stage = [_stage_specs(entries, specs, shape, layout, s) for s in range(layout.num_stages)]
    holdings = []
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        holding: dict[str, Box | None] = {}
        for stage in layout.stage_indices(place["pp"]):
            for name, spec in by_stage[stage].items():
                holding[name] = _part(name, entries[name], spec, layout, place)
        holdings.append(holding)
    return holdings


def _stage_specs(
    entries: Mapping[str, TensorEntry],
    specs: Mapping[str, ParameterSpec],
    shape: ModelShape,
    layout: Layout,
    stage: int,
) -> dict[str, ParameterSpec | None]:
    """Return the names that a stage saves, each with the parameter that it is split as, if any."""
    held = shape.stage_parameters(layout, stage)
    own = {spec.name for spec in held if spec.copy_of is None}
    layers = layout.stage_layers(stage)
    chosen: dict[str, ParameterSpec | None] = {}
    for name, entry in sorted(entries.items()):
        spec, match = _parameter_of(name, specs), _LAYER.search(name)
        if spec is not None:
            if spec.name in own:
                chosen[name] = spec if entry.shape == spec.shape else None
        elif match is None or int(match.group(1)) in layers:
            chosen[name] = None  # scale state of a layer, or of no layer: whole on every rank
    return chosen


def _parameter_of(name: str, specs: Mapping[str, ParameterSpec]) -> ParameterSpec | None:
    """Return the parameter that a tensor is, or is optimizer state of."""
    if name.startswith("optimizer."):
        name = name.removeprefix("optimizer.").rpartition(".")[0]
    return specs.get(name)


def _part(
    name: str,
    entry: TensorEntry,
    spec: ParameterSpec | None,
    layout: Layout,
    place: Place,
) -> Box | None:
    if name.startswith(LOCAL_PREFIX):
        rest = entry.shape[2:]
        return Box((*layout.scale_place(place), *(0 for _ in rest)), (1, 1, *rest))
    return None if spec is None else parameter_box(spec, layout, place)


def parameter_box(spec: ParameterSpec, layout: Layout, place: Place) -> Box:
    """Return a rank's part of a parameter: split axis after axis, as `torch.chunk` does."""
    offsets, sizes = [0] * len(spec.shape), list(spec.shape)
    for axis, dim in spec.splits.items():
        length = -(-sizes[dim] // layout.size(axis))
        start = min(place[axis] * length, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(length, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))
