"""Section `parallel`: how the model is spread over ranks."""

from typing import Literal, get_args

from pydantic import Field

from megafp8.config.base import PositiveFloat, PositiveInt, Section
from megafp8.config.paths import FilePath

Schedule = Literal["1f1b", "interleaved", "zbv", "gpipe"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


class ParallelConfig(Section):
    """Degrees of parallelism; what depends on the world size is in `Layout`."""

    tensor_model_parallel_size: PositiveInt = Field(
        default=1, description="ranks that split each linear"
    )
    sequence_parallel: bool = Field(
        default=False, description="split norms and dropout along the sequence over the same ranks"
    )
    pipeline_model_parallel_size: PositiveInt = Field(
        default=1, description="ranks that split the layers"
    )
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = Field(
        default=None, description="layers per model chunk; gives the interleaved schedule"
    )
    context_parallel_size: PositiveInt = Field(
        default=1, description="ranks that split each sequence; more than 1 is refused"
    )
    expert_model_parallel_size: PositiveInt = Field(
        default=1, description="ranks that split experts; more than 1 is refused"
    )
    distributed_backend: Literal["nccl", "gloo"] | None = Field(
        default=None, description="default: nccl with CUDA, else gloo, which trains on the CPU"
    )
    distributed_timeout_minutes: PositiveFloat = Field(
        default=10.0, description="of collectives, and before them of ranks without a sign of life"
    )
    use_distributed_optimizer: bool = Field(
        default=False,
        description="optimizer state is sharded anyway; this keeps parameters gathered between "
        "forward and backward (ZeRO-1/2)",
    )
    use_torch_fsdp2: bool = Field(
        default=False, description="accepted: parameters always go through FSDP2"
    )
    overlap_grad_reduce: bool = Field(
        default=False, description="accepted: FSDP2 decides what overlaps"
    )
    overlap_param_gather: bool = Field(
        default=False, description="accepted: FSDP2 decides what overlaps"
    )
    fsdp_size: PositiveInt | None = Field(
        default=None,
        description="ranks that shard parameters (default: all of data parallel); the rest "
        "replicates",
    )
    reshard_after_forward: bool | None = Field(
        default=None,
        description="free gathered parameters after the forward pass (default: off with a "
        "pipeline or --use-distributed-optimizer, else on)",
    )
    tp_comm_overlap: bool = Field(
        default=False,
        description="run tensor-parallel gathers and scatters under the GEMMs "
        "(TransformerEngine's user buffers)",
    )
    tp_comm_overlap_cfg: FilePath | None = Field(
        default=None, description="YAML file with settings by GEMM, for --tp-comm-overlap"
    )
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = Field(
        default="nccl", description="collectives that set up --tp-comm-overlap"
    )
    pipeline_schedule: Schedule | None = Field(
        default=None,
        description="default: interleaved with --num-layers-per-virtual-pipeline-stage, else 1f1b",
    )

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule that runs."""
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        return "1f1b" if self.num_layers_per_virtual_pipeline_stage is None else "interleaved"
