"""The grid of ranks that a world size gives, and which layers each of them holds.

Rank order: tensor parallel fastest, then FSDP, then its replicas, pipeline slowest:
`rank = ((pp_rank * replicate + replica) * fsdp + shard) * tp + tp_rank`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.model import ModelConfig
    from megafp8.config.parallel import ParallelConfig, Schedule
    from megafp8.config.training import TrainingConfig


@dataclass(frozen=True)
class RankCoordinates:
    """Place of one rank in the grid."""

    pp_rank: int
    replica: int
    shard: int
    tp_rank: int


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism that multiply to the world size.

    Attributes:
        world_size: processes; tp * pp * cp * dp.
        tp: ranks that split each linear.
        pp: pipeline ranks.
        cp: context-parallel ranks.
        dp: data-parallel ranks; replicate * fsdp.
        fsdp: ranks that shard parameters.
        replicate: copies of each set of shards.
        vp: model chunks (virtual stages) per pipeline rank.
        num_stages: pp * vp.
        layers_per_stage: transformer blocks of each stage.
        reshard_after_forward: whether gathered parameters are freed after the forward pass.
        sequence_parallel: whether norms and dropout are split along the sequence.
        schedule: pipeline schedule.
    """

    world_size: int
    tp: int
    pp: int
    cp: int
    dp: int
    fsdp: int
    replicate: int
    vp: int
    num_stages: int
    layers_per_stage: int
    reshard_after_forward: bool
    sequence_parallel: bool
    schedule: Schedule

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

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the place of a world rank."""
        assert 0 <= rank < self.world_size
        rank, tp_rank = divmod(rank, self.tp)
        rank, shard = divmod(rank, self.fsdp)
        pp_rank, replica = divmod(rank, self.replicate)
        return RankCoordinates(pp_rank, replica, shard, tp_rank)

    def num_microbatches(self, global_batch_size: int, micro_batch_size: int) -> int:
        """Return the micro-batches of one data-parallel rank.

        Raises:
            ConfigurationError: The batch does not split evenly, or does not suit the schedule.
        """
        unit = micro_batch_size * self.dp
        if global_batch_size < unit or global_batch_size % unit:
            raise ConfigurationError(
                f"global batch size {global_batch_size} is not a multiple of --micro-batch-size "
                f"{micro_batch_size} * data parallel {self.dp} = {unit}"
            )
        count = global_batch_size // unit
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
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    unit = tp * pp * cp
    if world_size < 1 or world_size % unit:
        start = f" (torchrun --nproc-per-node {unit})" if world_size == 1 else ""
        raise ConfigurationError(
            f"world size {world_size} != tp {tp} * pp {pp} * cp {cp} * data parallel: "
            f"{world_size} is not a multiple of {unit}; start {unit} processes or a multiple"
            f"{start}, or lower these sizes"
        )
    dp = world_size // unit
    fsdp = _fsdp_size(parallel, dp)
    vp = chunks_per_rank(model, parallel)
    reshard = parallel.reshard_after_forward
    if reshard is None:
        reshard = pp == 1 and not parallel.use_distributed_optimizer
    layout = Layout(
        world_size=world_size,
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        fsdp=fsdp,
        replicate=dp // fsdp,
        vp=vp,
        num_stages=pp * vp,
        layers_per_stage=model.num_layers // (pp * vp),
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
    if training.global_batch_size is None:
        layout.num_microbatches(training.micro_batch_size * layout.dp, training.micro_batch_size)
        return
    size, micro = training.global_batch_size, training.micro_batch_size
    unit = micro * layout.dp
    if size % unit:
        other = "" if size % layout.dp else ", or another --micro-batch-size"
        raise ConfigurationError(
            f"--global-batch-size {size} is not a multiple of --micro-batch-size {micro} * data "
            f"parallel {layout.dp} = {unit}; give {unit}, {2 * unit}, ...{other}"
        )
    layout.num_microbatches(size, micro)
    sizes = ramp_sizes(training)
    for size in sizes or ():
        try:
            layout.num_microbatches(size, micro)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"--rampup-batch-size reaches batch size {size}: {error}"
            ) from None
