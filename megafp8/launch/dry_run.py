"""What a command line would run: configuration, precision plan, layers and parameters per rank.

All of it is arithmetic; neither torch nor a corpus is touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from megafp8.config.auto_precision import PrecisionChoice
from megafp8.config.axes import AXES, GIVEN, axes_of, product
from megafp8.config.cli import Command
from megafp8.config.layout import Layout
from megafp8.config.run_config import RunConfig
from megafp8.config.shape import ModelShape
from megafp8.errors import ConfigurationError
from megafp8.launch.step_traffic import communication_text
from megafp8.precision.plan import PrecisionPlan, build_plan, number_ranges
from megafp8.precision.recipe import recipe_fields


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one pipeline position; they hold equal numbers of parameters.

    Attributes:
        ranks: world ranks, in order.
        stages: stages that each of them holds.
        layers: blocks of those stages.
        parameters: elements of one tensor-parallel rank, before FSDP.
        shard: elements of FSDP shard 0, the largest.
        tied_copy: elements among `parameters` that repeat the word embedding.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    parameters: int
    shard: int
    tied_copy: int


def preflight(config: RunConfig, world_size: int) -> tuple[RunConfig, ModelShape, PrecisionPlan]:
    """Run every check that needs no process group.

    Returns:
        The configuration with the batch size filled in, the model's sizes, the precision plan.

    Raises:
        MegaFP8Error: One line for the first thing that does not fit.
    """
    resolved = config.resolved(world_size)
    shape = ModelShape.from_config(resolved, vocabulary(resolved))
    plan = build_plan(resolved, shape, resolved.layout(world_size))
    return resolved, shape, plan


def vocabulary(config: RunConfig) -> int:
    """Return the tokens before padding, from the flags or, if it is named, from the tokenizer.

    Raises:
        ConfigurationError: Neither tells.
        DataError: The tokenizer cannot be read, or contradicts --vocab-size.
    """
    if config.data.tokenizer_model is not None:
        # Reading a tokenizer needs its library; flags alone do not.
        from megafp8.data.tokenizers import resolve_vocab_size

        return resolve_vocab_size(config.data)
    size = config.known_vocab_size
    if size is None:
        raise ConfigurationError(
            "the vocabulary size is unknown: give --vocab-size, or --tokenizer-type with "
            "--tokenizer-model"
        )
    return size


def rank_groups(shape: ModelShape, layout: Layout) -> tuple[RankGroup, ...]:
    """Return what each pipeline position holds."""
    groups = []
    for ranks in layout.groups(axes_of("stage")):
        stages = layout.stage_indices(layout.coordinates(ranks[0])["pp"])
        specs = [spec for stage in stages for spec in shape.stage_parameters(layout, stage)]
        # The output layer of a tied model is a copy, and on a stage of its own.
        copies = [spec for spec in specs if spec.copy_of is not None]
        groups.append(
            RankGroup(
                ranks=tuple(ranks),
                stages=stages,
                layers=tuple(layer for stage in stages for layer in layout.stage_layers(stage)),
                parameters=sum(spec.shard_numel(layout.tp, 1) for spec in specs),
                shard=sum(spec.shard_numel(layout.tp, layout.fsdp) for spec in specs),
                tied_copy=sum(spec.shard_numel(layout.tp, 1) for spec in copies),
            )
        )
    return tuple(groups)


def choose_world_size(command: Command, environment_size: int | None) -> int:
    """Return --world-size, else WORLD_SIZE, else the smallest that fits."""
    return command.world_size or environment_size or command.config.smallest_world_size


def describe(config: RunConfig, world_size: int, choice: PrecisionChoice | None = None) -> str:
    """Return the whole report.

    Args:
        config: the run, with `auto` decided.
        world_size: processes.
        choice: what `auto` came to on this machine.

    Raises:
        MegaFP8Error: One line for the first thing that does not fit.
    """
    resolved, shape, plan = preflight(config, world_size)
    layout = resolved.layout(world_size)
    content = yaml.safe_dump(resolved.to_dict(), sort_keys=False, width=100)
    decided = f"{choice}\n" if choice is not None else ""
    parts = [
        "# resolved configuration\n" + content.rstrip(),
        "# layout\n" + _layout_text(resolved, layout),
        "# precision\n" + decided + plan.render() + _recipe_text(resolved),
        "# layers and parameters\n" + _parameter_text(shape, layout),
        "# communication\n" + communication_text(resolved, shape, plan, layout),
    ]
    return "\n\n".join(parts) + "\n"


def _layout_text(config: RunConfig, layout: Layout) -> str:
    training = config.training
    size, micro = training.global_batch_size, training.micro_batch_size
    assert size is not None, "resolved above"
    count = layout.num_microbatches(size, micro)
    seq = config.model.seq_length
    given = [axis.name for axis in GIVEN]
    split = [axis.name for axis in AXES if axis not in GIVEN]
    reshard = "freed after the forward pass" if layout.reshard_after_forward else "kept gathered"
    return "\n".join(
        [
            f"world size {layout.world_size} = {_product(layout, given)} * "
            f"dp {layout.dp} ({_product(layout, split)})",
            f"schedule {layout.schedule}: {layout.num_stages} stages of {layout.layers_per_stage} "
            f"layers, {layout.vp} per rank; gathered parameters are {reshard}",
            f"global batch size {size} = micro batch {micro} * data parallel {layout.dp} * "
            f"{count} micro-batches",
            f"tokens per step {size} * {seq} = {size * seq}",
        ]
    )


def _product(layout: Layout, axes: list[str]) -> str:
    return product({axis: layout.size(axis) for axis in axes})


def _recipe_text(config: RunConfig) -> str:
    fields = recipe_fields(config)
    if not fields:
        return ""
    return "\n  recipe: " + ", ".join(f"{name} {value}" for name, value in fields.items())


def _parameter_text(shape: ModelShape, layout: Layout) -> str:
    groups = rank_groups(shape, layout)
    counts = [len(group.layers) for group in groups]
    lines = [
        f"layers built {' + '.join(map(str, counts))} = {sum(counts)}, "
        f"num_layers {shape.num_layers}",
        f"parameters {shape.num_parameters} "
        f"(vocabulary {shape.vocab_size} padded to {shape.padded_vocab_size})",
    ]
    for group in groups:
        last = group.ranks[-1]
        ranks = f"ranks {group.ranks[0]}-{last}" if len(group.ranks) > 1 else f"rank {last}"
        copy = f", {group.tied_copy} of them a copy of the embedding" if group.tied_copy else ""
        stages = ",".join(map(str, group.stages))
        lines.append(
            f"  {ranks}: stages {stages}, layers {number_ranges(group.layers)}, "
            f"{group.parameters} parameters per rank{copy}, {group.shard} in its largest FSDP shard"
        )
    return "\n".join(lines)
