"""Builds this rank's stages: parameters drawn, sharded by FSDP2 block by block, registry made."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megafp8.config import ModelShape, ParameterSpec, RunConfig
from megafp8.config.user_buffers import UserBufferOptions, user_buffer_options
from megafp8.errors import ConfigurationError, PrecisionError
from megafp8.layers import LayerContext, ParameterFactory
from megafp8.layers.choice import (
    BackendChoice,
    add_kernels,
    add_products,
    choose_backend,
    make_backend,
)
from megafp8.layers.parameters import local
from megafp8.layers.rope import Rope, RopeScaling
from megafp8.model.gpt import GPTStage
from megafp8.numerics import CastObserver, Recipe, ScaleRegistry, writes_fp32
from megafp8.parallel.fsdp import (
    Fp8ReduceScatter,
    Fp8Wires,
    shard_module,
    take_fp32_gradients,
)
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pipeline import DeferredWeightGradients, PipelineRunner
from megafp8.precision import Precision, PrecisionPlan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Model:
    """This rank's part of the model.

    Attributes:
        stages: its stage modules, in the order of `layout.stage_indices`.
        runner: runs micro-batches through them.
        registry: scale state of its FP8 tensors; None without FP8.
        specs: global description of every parameter, by canonical name.
        parameters: this rank's parameters by canonical name; the last stage's copy of a tied
            embedding is under "output_layer.weight".
        copies: the same of those that repeat another one.
        backend: which backend made the layers, and why.
        scope: `Backend.scope`, for calling single layers.
        fp8_reductions: FP8 reductions of the blocks' gradients, which may hold residuals.
        plan: the precision of every linear of the whole model at present.
        user_buffers: of `--tp-comm-overlap`; None without.
    """

    stages: list[GPTStage]
    runner: PipelineRunner
    registry: ScaleRegistry | None
    specs: dict[str, ParameterSpec]
    parameters: dict[str, nn.Parameter]
    copies: dict[str, ParameterSpec]
    backend: BackendChoice
    scope: Callable[[], AbstractContextManager[Any]]
    fp8_reductions: list[Fp8ReduceScatter]
    plan: PrecisionPlan
    user_buffers: UserBufferOptions | None = None

    @property
    def tied(self) -> bool:
        """Whether embedding and output layer share values."""
        return bool(self.copies)

    def spec(self, name: str) -> ParameterSpec:
        """Return the description of one of `parameters`."""
        return self.copies[name] if name in self.copies else self.specs[name]

    @torch.no_grad()
    def copy_tied_embedding(self) -> None:
        """Where this rank holds both ends of a tied embedding, the output layer follows."""
        for name, spec in self.copies.items():
            if spec.copy_of in self.parameters and name in self.parameters:
                local(self.parameters[name]).copy_(local(self.parameters[spec.copy_of]))

    def set_precision(
        self, name: str, precision: Precision, reason: str = "switched between two steps"
    ) -> None:
        """Switch a linear to FP8 or to the compute dtype, on whichever stage holds it.

        Call it on all ranks alike, between two training steps. No rank waits for another, and a
        call that changes nothing does nothing. What follows the linear: its gathers and reductions
        over tp and FSDP, the fused MLP around it, its attention core, and `plan`. What its weight
        gradients, moments and masters are does not depend on it.

        While it is not FP8 its tensors keep scales and windows. Back in FP8 it goes on with the
        stored scales, which are also those that a run resumed from a checkpoint would find: one
        rule, the same bits, and no look at the masters. Delayed scales lag one step in any case;
        after a long while in between the first step may saturate more, and its amaxes enter the
        windows. (Without state, scales are those of the tensors.)

        Args:
            name: canonical module name.
            precision: "fp8" or the compute dtype, as "bf16".
            reason: why, for the plan.

        Raises:
            PrecisionError: no linear has that name, it was not built with FP8, another precision
                is asked for, or user buffers are there for FP8 alone. The same on all ranks.
        """
        plan = self.plan.switched(name, precision, reason)
        if plan is self.plan:
            return
        if precision != "fp8" and self.user_buffers and not self.user_buffers.high_precision:
            raise PrecisionError(
                f"{name}: --tp-comm-overlap has made user buffers for FP8 alone, since all linears "
                "of the plan were FP8; keep one in high precision, or drop --tp-comm-overlap"
            )
        self.plan = plan
        blocks: Any = (b for stage in self.stages for b in stage.decoder.layers.values())
        for block in blocks:
            if name.startswith(f"{block.prefix}."):
                block.switch(name, plan)

    def observe_casts(self, observer: CastObserver | None) -> None:
        """Call `observer(name, role, x, cast)` each time an FP8 linear of this rank casts.

        `x` is the tensor in high precision, [tokens, features] or the weight [out, in] of this
        rank, and `cast` the same in FP8; both are to be read at once and not kept. Called in
        evaluation, too (`registry.recording` is False then), and under recompute twice. By default
        there is none, which costs nothing.

        - Native: each cast, a `QuantizedTensor`. A weight that stays gathered is cast once a step,
          else in forward and in backward. Recipes with scales for rows or blocks cast along
          features and along tokens: `cast.block` tells them apart.
        - `x` is None where only the codes exist: SwiGLU and its gradient in the fused MLP (the
          input of linear_fc2, the output gradient of linear_fc1), and a weight gathered as codes.
        - TransformerEngine casts inside its modules. Each operand is cast once more for the
          observer, by TE's quantizer, once a forward or backward; the input of a linear with a
          folded norm is the native norm's. Such casts make collectives where scales are shared in
          the cast (tensorwise with sequence parallelism): all ranks observe, or none.
        """
        if self.registry is not None:
            self.registry.observer = observer

    def set_training(self, training: bool) -> None:
        """Switch dropout on or off."""
        for stage in self.stages:
            stage.train(training)


def build_model(
    config: RunConfig, shape: ModelShape, plan: PrecisionPlan, recipe: Recipe | None, mesh: Mesh
) -> Model:
    """Build this rank's stages; a collective call on all ranks.

    Args:
        config: the run.
        shape: sizes, with the vocabulary known.
        plan: which linears are FP8.
        recipe: how; None without FP8.
        mesh: the grid.

    Raises:
        PrecisionError: the backend that is asked for cannot be used here.
        ConfigurationError: the parameters built, summed over pipeline ranks, are not the model's.
    """
    layout, device = mesh.layout, mesh.world.device
    dtype = DTYPES[config.precision.compute_dtype]
    registry = ScaleRegistry(recipe) if recipe is not None else None
    rope = _rope(config, device)
    choice = add_products(choose_backend(config), dtype, device)
    choice, kernels = add_kernels(choice, config, device)
    fp8_linears = plan.count("fp8")
    overlap = user_buffer_options(config, fp8_linears, len(plan.linears) - fp8_linears)
    backend = make_backend(choice, config, recipe, mesh, overlap)
    reductions: list[Fp8ReduceScatter] = []
    fp32_wgrad = _fp32_weight_gradients(recipe, choice, mesh)
    specs = {spec.name: spec for spec in shape.parameters()}
    copies = {spec.name: spec for spec in shape.copies()}
    held = specs | copies

    def shard(module: nn.Module, prefix: str, kind: str) -> None:
        fp8 = _fp8_wires(config, module) if kind == "block" else None
        reduction = shard_module(module, prefix, held, mesh, kind, dtype, fp8)
        if reduction is not None:
            reductions.append(reduction)
        if fp32_wgrad:
            take_fp32_gradients(module)

    stages, queues = [], []
    for index in layout.stage_indices(mesh.pp_rank):
        queue = DeferredWeightGradients() if layout.schedule == "zbv" else None
        context = _layer_context(config, shape, mesh, registry, queue)
        context = replace(context, kernels=kernels, fp32_wgrad=fp32_wgrad)
        stages.append(
            GPTStage(context, backend, config, plan, layout, index, shape.vocab_size, rope, shard)
        )
        queues.append(queue)
    if registry is not None:
        registry.finalize(device)
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    _check_built(shape, parameters, mesh)
    waiting = [queue for queue in queues if queue is not None] or None
    boundary = _boundary(config, shape, mesh)
    runner = PipelineRunner(stages, mesh, layout.schedule, boundary, dtype, waiting)
    return Model(
        stages=stages,
        runner=runner,
        registry=registry,
        specs=specs,
        copies=copies,
        parameters=parameters,
        backend=choice,
        scope=backend.scope,
        fp8_reductions=reductions,
        plan=plan,
        user_buffers=overlap,
    )


def _boundary(config: RunConfig, shape: ModelShape, mesh: Mesh) -> tuple[int, int, int]:
    """[s(/tp), b, h], what pipeline stages hand on."""
    split = mesh.layout.tp if mesh.layout.sequence_parallel else 1
    return shape.seq_length // split, config.training.micro_batch_size, shape.hidden_size


def _fp32_weight_gradients(recipe: Recipe | None, choice: BackendChoice, mesh: Mesh) -> bool:
    """Where the GEMM can write fp32, weight gradients are not rounded before they are summed."""
    return (
        recipe is not None and choice.chosen == "native" and writes_fp32(recipe, mesh.world.device)
    )


def _layer_context(
    config: RunConfig,
    shape: ModelShape,
    mesh: Mesh,
    registry: ScaleRegistry | None,
    queue: DeferredWeightGradients | None,
) -> LayerContext:
    """What the layers of one stage share."""
    layout = mesh.layout
    factory = ParameterFactory(
        shape.parameters(),
        mesh,
        config.training.seed,
        config.model.init_method_std,
        shape.num_layers,
        shape.vocab_size,
    )
    return LayerContext(
        mesh=mesh,
        factory=factory,
        registry=registry,
        recipe=registry.recipe if registry is not None else None,
        compute_dtype=DTYPES[config.precision.compute_dtype],
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        fp8_gather=config.precision.fp8_tp_comm != "none",
        fp8_reduce=config.precision.fp8_tp_comm == "all",
        fp8_param_gather=config.precision.fp8_param_gather,
        cache_weights=not layout.reshard_after_forward or layout.fsdp == 1,
        deferred=queue,
        norm_impl=config.model.norm_impl,
    )


def _fp8_wires(config: RunConfig, block: nn.Module) -> Fp8Wires:
    """What of a block's FSDP traffic is FP8; nothing in runs without FP8."""
    precision = config.precision
    if not precision.fp8:
        return Fp8Wires()
    casts = {name: getattr(m, "weight_cast", None) for name, m in block.named_modules()}
    return Fp8Wires(
        grad_reduce=precision.fp8_grad_reduce,
        error_feedback=precision.fp8_grad_error_feedback,
        weights={f"{name}.weight": cast for name, cast in casts.items() if cast is not None},
    )


def _rope(config: RunConfig, device: torch.device) -> Rope | None:
    model = config.model
    if model.position_embedding_type != "rope":
        return None
    scaling = None
    if model.use_rope_scaling:
        scaling = RopeScaling(
            model.rope_scaling_factor,
            model.rope_low_freq_factor,
            model.rope_high_freq_factor,
            model.rope_original_max_position_embeddings,
        )
    return Rope(model.rotary_dim, model.seq_length, model.rotary_base, scaling, device)


def _check_built(shape: ModelShape, parameters: dict[str, nn.Parameter], mesh: Mesh) -> None:
    """Every parameter of the model is built exactly once over the pipeline ranks."""
    copies = {spec.name for spec in shape.copies()}
    mine = sum(p.numel() for name, p in parameters.items() if name not in copies)
    total = torch.tensor([mine], dtype=torch.int64, device=mesh.world.device)
    if mesh.pp.process_group is not None and mesh.pp.size > 1:
        torch.distributed.all_reduce(total, group=mesh.pp.process_group)
    wanted = sum(spec.numel for spec in shape.parameters())
    if int(total) != wanted:
        raise ConfigurationError(
            f"model: built {int(total)} parameters over {mesh.pp.size} pipeline ranks, but "
            f"{shape.num_layers} layers need {wanted}"
        )
