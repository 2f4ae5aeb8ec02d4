"""Layers and a small GPT from plain sizes, for machines that have torch and little else.

The modules are the ones that train; what the configuration would tell them comes from `Sizes`, so
that neither pydantic nor PyYAML is needed. Parameters are drawn on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from megafp8.config.layout import Layout
from megafp8.config.shape import ModelShape, ParameterSpec
from megafp8.layers import LayerContext
from megafp8.layers.dropout import MicroBatchKey
from megafp8.layers.native import NativeBackend
from megafp8.layers.rope import Rope
from megafp8.model.block import Block
from megafp8.model.gpt import GPTStage
from megafp8.numerics import E4M3, Recipe, ScaleRegistry, writes_fp32
from megafp8.numerics.kernels import KernelChoice
from megafp8.parallel.fsdp import begin_micro_batch, shard_module, take_fp32_gradients
from megafp8.parallel.mesh import Mesh

KEY = MicroBatchKey(0, 0, False, True)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama-like model.

    Attributes:
        hidden: hidden size.
        ffn: width of the SwiGLU MLP.
        heads: attention heads.
        groups: heads of keys and values.
        seq: tokens of a sample.
        batch: samples.
        layers: blocks.
        vocab: tokens of the vocabulary.
    """

    hidden: int
    ffn: int
    heads: int
    groups: int
    seq: int
    batch: int
    layers: int = 1
    vocab: int = 256

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq * self.batch

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) features of the linears of a block."""
        qkv = (self.heads + 2 * self.groups) * self.head_dim
        return {
            "linear_qkv": (self.hidden, qkv),
            "linear_proj": (self.hidden, self.hidden),
            "linear_fc1": (self.hidden, 2 * self.ffn),
            "linear_fc2": (self.ffn, self.hidden),
        }

    @property
    def block_flops(self) -> float:
        """Of one block, forward and backward: 6 a weight and token; causal attention's two."""
        weights = sum(a * b for a, b in self.linears.values())
        attention = 6.0 * self.tokens * self.seq * self.hidden  # 12 without the causal mask
        return 6.0 * self.tokens * weights + attention

    @property
    def model_flops(self) -> float:
        """Of a training step, the output layer included."""
        return self.layers * self.block_flops + 6.0 * self.tokens * self.hidden * self.vocab


def single_layout() -> Layout:
    """The layout of one rank, with parameters kept gathered."""
    return Layout(layers_per_stage=1)


def model_shape(sizes: Sizes) -> ModelShape:
    """Sizes as the parameter names know them."""
    return ModelShape(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        num_groups=sizes.groups,
        head_dim=sizes.head_dim,
        ffn_size=sizes.ffn,
        seq_length=sizes.seq,
        max_positions=sizes.seq,
        learned_positions=False,
        vocab_size=sizes.vocab,
        padded_vocab_size=sizes.vocab,
        swiglu=True,
        layernorm_bias=False,
        qk_layernorm=False,
        qkv_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        tied=False,
    )


class _DeviceFactory:
    """Makes parameters as `ParameterFactory` does, with values drawn on the device."""

    def __init__(self, specs: tuple[ParameterSpec, ...], mesh: Mesh, dtype: torch.dtype) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.mesh, self.dtype = mesh, dtype

    def __call__(self, name: str) -> nn.Parameter:
        spec = self.specs[name]
        values = torch.empty(spec.shape, dtype=self.dtype, device=self.mesh.world.device)
        values = values.fill_(1.0) if spec.kind == "norm" else values.normal_(std=0.02)
        tensor = DTensor.from_local(values, self.mesh.tp_mesh, [Replicate()], run_check=False)
        return nn.Parameter(tensor)


def recipes() -> dict[str, Recipe]:
    """Every recipe, in the formats in which its GPU runs it."""
    e4m3: dict[str, Any] = {"gradient_format": E4M3}
    return {
        "delayed": Recipe(),
        "tensorwise": Recipe(name="tensorwise"),
        "rowwise": Recipe(name="rowwise", **e4m3),
        "rowwise_with_gw_hp": Recipe(name="rowwise_with_gw_hp", fp8_wgrad=False, **e4m3),
        "blockwise": Recipe(name="blockwise", power_of_2_scales=True, **e4m3),
        "mxfp8": Recipe(name="mxfp8", power_of_2_scales=True, **e4m3),
    }


def light_context(
    sizes: Sizes, mesh: Mesh, recipe: Recipe | None, kernels: KernelChoice, dtype: torch.dtype
) -> LayerContext:
    """What layers share; parameters have `dtype`, fp32 where FSDP gathers them, else bf16."""
    factory: Any = _DeviceFactory(model_shape(sizes).parameters(), mesh, dtype)
    return LayerContext(
        mesh=mesh,
        factory=factory,
        registry=None if recipe is None else ScaleRegistry(recipe),
        recipe=recipe,
        compute_dtype=torch.bfloat16,
        sequence_parallel=False,
        fp8_gather=True,
        fp8_reduce=False,
        fp8_param_gather=False,
        cache_weights=True,
        deferred=None,
        kernels=kernels,
    )


def _light_config(sizes: Sizes, recompute: str | None) -> Any:
    """The fields of a `RunConfig` that blocks and stages read."""
    model = SimpleNamespace(
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        num_attention_heads=sizes.heads,
        query_groups=sizes.groups,
        head_dim=sizes.head_dim,
        qkv_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_layernorm=False,
        window_left=None,
        swiglu=True,
        activation="gelu",
        tied_embeddings=False,
    )
    training = SimpleNamespace(recompute_granularity=recompute, recompute_num_layers=None)
    return SimpleNamespace(model=model, training=training)


def _light_plan(fp8: bool) -> Any:
    precision = "fp8" if fp8 else "bf16"
    return SimpleNamespace(precision=lambda name: precision, core_is_fp8=lambda layer: False)


def _rope(sizes: Sizes, device: torch.device) -> Rope:
    return Rope(sizes.head_dim, sizes.seq, 10000.0, None, device)


def light_block(
    sizes: Sizes,
    mesh: Mesh,
    recipe: Recipe | None,
    kernels: KernelChoice,
    recompute: str | None = None,
) -> tuple[Block, ScaleRegistry | None]:
    """One block with BF16 parameters, and its scale state."""
    context = light_context(sizes, mesh, recipe, kernels, torch.bfloat16)
    rope = _rope(sizes, mesh.world.device)
    block = Block(
        context,
        NativeBackend(),
        _light_config(sizes, recompute),
        _light_plan(recipe is not None),
        0,
        rope,
        recompute == "full",
    )
    if context.registry is not None:
        context.registry.finalize(mesh.world.device)
    return block, context.registry


class LightTraining:
    """A whole GPT with fp32 masters under FSDP2, AdamW and one scale update a step."""

    def __init__(
        self, sizes: Sizes, mesh: Mesh, recipe: Recipe | None, kernels: KernelChoice
    ) -> None:
        context = light_context(sizes, mesh, recipe, kernels, torch.float32)
        fp32_wgrad = recipe is not None and writes_fp32(recipe, mesh.world.device)
        context = replace(context, fp32_wgrad=fp32_wgrad)
        layout = mesh.layout
        assert layout.layers_per_stage == sizes.layers, "the mesh is of another depth"

        def shard(module: nn.Module, prefix: str, kind: str) -> None:
            shard_module(module, prefix, context.factory.specs, mesh, kind, torch.bfloat16)
            if fp32_wgrad:
                take_fp32_gradients(module)

        self.stage = GPTStage(
            context,
            NativeBackend(),
            _light_config(sizes, None),
            _light_plan(recipe is not None),
            layout,
            0,
            sizes.vocab,
            _rope(sizes, mesh.world.device),
            shard,
        )
        self.registry = context.registry
        if self.registry is not None:
            self.registry.finalize(mesh.world.device)
        self.sizes, self.device = sizes, mesh.world.device
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=1e-4)

    def step(self) -> Tensor:
        """One iteration on random tokens; returns the mean loss on the device."""
        sizes, device = self.sizes, self.device
        shape = (sizes.batch, sizes.seq + 1)
        stream = torch.randint(sizes.vocab, shape, device=device)
        positions = torch.arange(sizes.seq, device=device).expand(sizes.batch, -1)
        begin_micro_batch(self.stage, last=True, keep_gathered=True)
        loss = self.stage(
            stream[:, :-1],
            positions,
            torch.zeros(1, dtype=torch.int64),
            stream[:, 1:],
            torch.ones(sizes.batch, sizes.seq, device=device),
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.registry is not None:
            self.registry.update()
        return loss.detach() / sizes.tokens
