"""The grid of ranks that a world size gives, and which layers each of them holds.

The axes of the grid and their order are the table in `axes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megafp8.config.axes import (
    AXES,
    DEGREES,
    RANK_ORDER,
    axes_of,
    given_sizes,
    product,
    scale_axes,
)
from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.model import ModelConfig
    from megafp8.config.parallel import ParallelConfig, Schedule
    from megafp8.config.training import TrainingConfig

# Place of a rank: its coordinate on each axis.
Place = Mapping[str, int]


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, which multiply to the world size, and what each pipeline rank holds.

    Attributes:
        layers_per_stage: transformer blocks of each stage.
        sizes: ranks along each axis; 1 for those that are left out.
        vp: model chunks (virtual stages) per pipeline rank.
        reshard_after_forward: whether gathered parameters are freed after the forward pass.
        sequence_parallel: whether norms and dropout are split along the sequence.
        schedule: pipeline schedule.
    """

    layers_per_stage: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    vp: int = 1
    reshard_after_forward: bool = False
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"

    @property
    def tp(self) -> int:
        """Ranks that split each linear."""
        return self.size("tp")

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self.size("pp")

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return self.size("cp")

    @property
    def fsdp(self) -> int:
        """Ranks that shard parameters."""
        return self.size("fsdp")

    @property
    def replicate(self) -> int:
        """Copies of each set of shards."""
        return self.size("replicate")

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those that split a batch."""
        return self.count(axes_of("dp"))

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.count(RANK_ORDER)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.pp * self.vp

    @property
    def grid(self) -> tuple[str, ...]:
        """Axes along which ranks have groups, slowest first."""
        alone = {axis.name for axis in AXES if axis.alone}
        return tuple(name for name in RANK_ORDER if name in alone or self.size(name) > 1)

    @property
    def degrees(self) -> dict[str, int]:
        """Sizes by name as texts and records give them: of the grid's axes, and `vp`."""
        known = {name: self.size(name) for name in self.grid} | {"vp": self.vp}
        return {name: known[name] for name in DEGREES if name in known}

    @property
    def scale_ranks(self) -> tuple[int, int]:
        """Ranks of a stage as [dp, tp], in which scales of each rank's own are stored."""
        return self.count(scale_axes(0)), self.count(scale_axes(1))

    def size(self, axis: str) -> int:
        """Return the ranks along an axis."""
        return self.sizes.get(axis, 1)

    def count(self, axes: Collection[str]) -> int:
        """Return the ranks that differ in `axes` alone."""
        return math.prod(self.size(axis) for axis in axes)

    def coordinates(self, rank: int) -> Place:
        """Return the place of a world rank."""
        assert 0 <= rank < self.world_size
        place = {}
        for axis in reversed(RANK_ORDER):
            rank, place[axis] = divmod(rank, self.size(axis))
        return place

    def index(self, place: Place, axes: Collection[str]) -> int:
        """Return the number of a place among the ranks that differ in `axes` alone."""
        number = 0
        for axis in RANK_ORDER:
            if axis in axes:
                number = number * self.size(axis) + place[axis]
        return number

    def scale_place(self, place: Place) -> tuple[int, int]:
        """Return where in [dp, tp] the scales of a rank are."""
        return self.index(place, scale_axes(0)), self.index(place, scale_axes(1))

    def groups(self, axes: Collection[str]) -> list[list[int]]:
        """Return the ranks that differ in `axes` alone, one list per value of the others."""
        others = [axis for axis in RANK_ORDER if axis not in axes]
        found: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(self.index(self.coordinates(rank), others), []).append(rank)
        return list(found.values())

    def stage_layers(self, stage_index: int) -> range:
        """Return the global numbers of the blocks of a stage."""
        assert 0 <= stage_index < self.num_stages
        first = stage_index * self.layers_per_stage
        return range(first, first + self.layers_per_stage)

    def stage_indices(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank; zbv folds them, so both ends are on rank 0."""
        assert 0 <= pp_rank < self.pp
        if self.schedule == "zbv":
            return pp_rank, 2 * self.pp - 1 - pp_rank
        return tuple(pp_rank + chunk * self.pp for chunk in range(self.vp))

    def uneven(self, batch_size: int, micro_batch_size: int) -> str | None:
        """Return why a batch does not split into whole micro-batches; None where it does."""
        unit = micro_batch_size * self.dp
        if batch_size > 0 and batch_size % unit == 0:
            return None
        return (
            f"{batch_size} is not a multiple of --micro-batch-size {micro_batch_size} * data "
            f"parallel {self.dp} = {unit}"
        )

    def num_microbatches(self, global_batch_size: int, micro_batch_size: int) -> int:
        """Return the micro-batches of one data-parallel rank.

        Raises:
            ConfigurationError: The batch does not split evenly, or does not suit the schedule.
        """
        uneven = self.uneven(global_batch_size, micro_batch_size)
        if uneven is not None:
            raise ConfigurationError(f"global batch size {uneven}")
        count = global_batch_size // (micro_batch_size * self.dp)
        equation = f"{global_batch_size} / ({micro_batch_size} * {self.dp}) = {count} micro-batches"
        if self.schedule == "interleaved" and count % self.pp:
            raise ConfigurationError(
                f"{equation}, not a multiple of pipeline_model_parallel_size {self.pp}, which the "
                "interleaved schedule needs"
            )
        if self.pp > 1 and self.schedule == "1f1b" and count < self.pp:
            raise ConfigurationError(
                f"{equation}, fewer than pipeline_model_parallel_size {self.pp}; the 1f1b "
                "schedule needs at least one for each stage (gpipe takes fewer)"
            )
        return count


def build_layout(
    model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig, world_size: int
) -> Layout:
    """Fit the degrees of parallelism and the batch to a world size.

    Raises:
        ConfigurationError: With the equation that does not hold.
    """
    sizes = given_sizes(parallel)
    unit = math.prod(sizes.values())
    if world_size < 1 or world_size % unit:
        start = f" (torchrun --nproc-per-node {unit})" if world_size == 1 else ""
        raise ConfigurationError(
            f"world size {world_size} != {product(sizes)} * data parallel: "
            f"{world_size} is not a multiple of {unit}; start {unit} processes or a multiple"
            f"{start}, or lower these sizes"
        )
    dp = world_size // unit
    fsdp = _fsdp_size(parallel, dp)
    vp = chunks_per_rank(model, parallel)
    reshard = parallel.reshard_after_forward
    if reshard is None:
        reshard = sizes["pp"] == 1 and not parallel.use_distributed_optimizer
    layout = Layout(
        layers_per_stage=model.num_layers // (sizes["pp"] * vp),
        sizes=sizes | {"fsdp": fsdp, "replicate": dp // fsdp},
        vp=vp,
        reshard_after_forward=reshard,
        sequence_parallel=parallel.sequence_parallel,
        schedule=parallel.schedule,
    )
    _check_batches(training, layout)
    unsharded = shard_problem(model, fsdp)
    if unsharded is not None:
        raise ConfigurationError(
            f"{unsharded}; set --fsdp-size to a divisor of both {model.hidden_size} and data "
            f"parallel {dp}"
        )
    recompute = training.recompute_num_layers
    if recompute is not None and recompute > layout.layers_per_stage:
        raise ConfigurationError(
            f"--recompute-num-layers {recompute} is more than the {layout.layers_per_stage} layers "
            f"of a stage ({model.num_layers} layers over {layout.num_stages} stages)"
        )
    return layout


def shard_problem(model: ModelConfig, fsdp_size: int) -> str | None:
    """Return why the weights cannot be sharded over so many ranks; None where they can."""
    if model.swiglu and model.hidden_size % fsdp_size:
        return (
            f"hidden_size {model.hidden_size} is not divisible by fsdp_size {fsdp_size}: with "
            "--swiglu linear_fc1 is sharded along the hidden size"
        )
    return None


def chunks_per_rank(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the model chunks per pipeline rank.

    Raises:
        ConfigurationError: The layers do not split evenly over the stages.
    """
    layers, pp = model.num_layers, parallel.pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if parallel.schedule == "interleaved":
        assert per_chunk is not None, "checked by RunConfig"
        unit = pp * per_chunk
        if layers % unit:
            raise ConfigurationError(
                f"num_layers {layers} is not divisible by pipeline_model_parallel_size {pp} * "
                f"num_layers_per_virtual_pipeline_stage {per_chunk} = {unit}: floor division "
                f"would build {layers // unit * unit} layers"
            )
        if layers == unit:
            raise ConfigurationError(
                f"num_layers {layers} / (pipeline_model_parallel_size {pp} * "
                f"num_layers_per_virtual_pipeline_stage {per_chunk}) = 1 chunk per rank; "
                "interleaved needs at least 2, one chunk is --pipeline-schedule 1f1b"
            )
        return layers // unit
    chunks = 2 if parallel.schedule == "zbv" else 1
    if layers % (pp * chunks):
        zbv = f" * 2 chunks of zbv = {pp * chunks}" if chunks == 2 else ""
        raise ConfigurationError(
            f"num_layers {layers} is not divisible by pipeline_model_parallel_size {pp}{zbv}"
        )
    return chunks


def full_batch_size(training: TrainingConfig, dp: int) -> int:
    """Return the samples of an update, after a ramp; by default a micro-batch on each dp rank."""
    return training.global_batch_size or training.micro_batch_size * dp


def ramp_sizes(training: TrainingConfig) -> range | None:
    """Return the batch sizes of the ramp-up, smallest first; None without one."""
    if training.rampup_batch_size is None or training.global_batch_size is None:
        return None
    start, increment, _ = training.rampup_batch_size
    return range(start, training.global_batch_size + 1, increment)


def _fsdp_size(parallel: ParallelConfig, dp: int) -> int:
    size = parallel.fsdp_size or dp
    if dp % size:
        raise ConfigurationError(
            f"data parallel {dp} is not divisible by fsdp_size {size}; allowed: divisors of {dp}"
        )
    if parallel.use_distributed_optimizer and size != dp:
        raise ConfigurationError(
            f"--use-distributed-optimizer shards over all of data parallel {dp}, but --fsdp-size "
            f"is {size}; give one of the two"
        )
    return size


def _check_batches(training: TrainingConfig, layout: Layout) -> None:
    micro, unit = training.micro_batch_size, training.micro_batch_size * layout.dp
    size = full_batch_size(training, layout.dp)
    uneven = layout.uneven(size, micro)
    if uneven is not None:
        other = "" if size % layout.dp else ", or another --micro-batch-size"
        raise ConfigurationError(
            f"--global-batch-size {uneven}; give {unit}, {2 * unit}, ...{other}"
        )
    layout.num_microbatches(size, micro)
    for size in ramp_sizes(training) or ():
        try:
            layout.num_microbatches(size, micro)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"--rampup-batch-size reaches batch size {size}: {error}"
            ) from None
