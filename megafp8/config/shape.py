"""Names and sizes of parameters and linears, as arithmetic: no tensor is made.

Letters in comments: h hidden size, f MLP width, d head size, q query heads, g query groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megafp8.config.axes import axes_of
from megafp8.config.layout import Layout, Place
from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.run_config import RunConfig

ParameterKind = Literal["embedding", "position", "linear", "bias", "norm", "norm_bias", "output"]
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter under its canonical name.

    Attributes:
        name: canonical (Megatron) name with the global, 0-based layer number.
        shape: global shape, the same at every layout.
        tp_dim: dimension that tensor parallelism splits; None if every rank holds all of it.
        layer: block it belongs to; None outside the blocks.
        kind: what it is, for initialisation and weight decay.
        fsdp_dim: dimension that FSDP splits.
        per_head: whether each tensor-parallel rank uses all of it, for its own heads alone.
        copy_of: the parameter whose values it repeats on another stage; its gradient is a part of
            that one's, and it has no entry of its own in norms and checkpoints.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    layer: int | None
    kind: ParameterKind
    fsdp_dim: int = 0
    per_head: bool = False
    copy_of: str | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def splits(self) -> dict[str, int]:
        """Dimension that each axis splits, in this order; ranks along others hold the same."""
        tp = {} if self.tp_dim is None else {"tp": self.tp_dim}
        return tp | {"fsdp": self.fsdp_dim}

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to biases and norms, as in Megatron."""
        return self.kind not in ("bias", "norm", "norm_bias")

    def counts_at(self, place: Place) -> bool:
        """Say whether sums over all ranks take this parameter's part from the rank at `place`.

        They take each part once: from the first of the ranks that hold the same, and not from a
        copy.
        """
        same = [axis for axis in axes_of("stage") if axis not in self.splits]
        return self.copy_of is None and not any(place[axis] for axis in same)

    def partial_over_tp(self, sequence_parallel: bool) -> bool:
        """Say whether gradients of tensor-parallel ranks are partial sums, for training to add.

        They are where ranks hold the same and have seen other heads, or other tokens. FSDP2 adds
        gradients over the data-parallel ranks, whatever the parameter.
        """
        return self.tp_dim is None and (self.per_head or sequence_parallel)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of one tensor-parallel rank's part."""
        return tuple(
            size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape)
        )

    def shard_numel(self, tp: int, fsdp: int) -> int:
        """Elements that FSDP shard 0, the largest, holds."""
        shape = list(self.local_shape(tp))
        shape[self.fsdp_dim] = -(-shape[self.fsdp_dim] // fsdp)
        return math.prod(shape)


@dataclass(frozen=True)
class LinearSpec:
    """One linear of a block as a rank computes it.

    Attributes:
        name: canonical module name, e.g. decoder.layers.0.self_attention.linear_qkv.
        layer: block number.
        in_features: of one rank.
        out_features: of one rank.
        tokens: rows of the GEMM, after the sequence-parallel gather.
        local_tokens: rows that the rank holds before the gather.
        hf_names: the modules it stands for in Hugging Face's Llama spelling.
        mode: column (output split over tp) or row (input split).
    """

    name: str
    layer: int
    in_features: int
    out_features: int
    tokens: int
    local_tokens: int
    hf_names: tuple[str, ...]
    mode: Literal["column", "row"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes from which every parameter and linear follows."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn_size: int
    seq_length: int
    max_positions: int
    learned_positions: bool
    vocab_size: int
    padded_vocab_size: int
    swiglu: bool
    layernorm_bias: bool
    qk_layernorm: bool
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    tied: bool

    @classmethod
    def from_config(cls, config: RunConfig, vocab_size: int) -> ModelShape:
        """Derive the sizes.

        Args:
            config: The run.
            vocab_size: Tokens of the tokenizer, before padding.

        Raises:
            ConfigurationError: The padded vocabulary does not split over tensor parallel.
        """
        model, tp = config.model, config.parallel.tensor_model_parallel_size
        padded = model.padded_vocab_size(vocab_size)
        if padded % tp:
            raise ConfigurationError(
                f"vocabulary {vocab_size} padded to {padded} (--make-vocab-size-divisible-by "
                f"{model.make_vocab_size_divisible_by}) is not divisible by "
                f"tensor_model_parallel_size {tp}"
            )
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_heads=model.num_attention_heads,
            num_groups=model.query_groups,
            head_dim=model.head_dim,
            ffn_size=model.ffn_size,
            seq_length=model.seq_length,
            max_positions=model.positions,
            learned_positions=model.position_embedding_type == "learned_absolute",
            vocab_size=vocab_size,
            padded_vocab_size=padded,
            swiglu=model.swiglu,
            layernorm_bias=model.normalization == "LayerNorm",
            qk_layernorm=model.qk_layernorm,
            qkv_bias=model.qkv_bias,
            attention_output_bias=model.attention_output_bias,
            mlp_bias=model.mlp_bias,
            tied=model.tied_embeddings,
        )

    @property
    def qkv_size(self) -> int:
        """Rows of linear_qkv: g groups of q/g query heads, one key and one value head."""
        return self.num_groups * (self.num_heads // self.num_groups + 2) * self.head_dim

    @property
    def attention_size(self) -> int:
        """Columns of linear_proj: all query heads."""
        return self.num_heads * self.head_dim

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Return every parameter once, in the order of the forward pass."""
        return tuple(self._parameters())

    def stage_parameters(self, layout: Layout, stage_index: int) -> tuple[ParameterSpec, ...]:
        """Return the parameters of a stage.

        With several stages the last one holds the `copies`, too.
        """
        layers = layout.stage_layers(stage_index)
        first, last = stage_index == 0, stage_index == layout.num_stages - 1
        chosen = []
        for spec in self.parameters():
            if spec.layer is not None:
                wanted = spec.layer in layers
            else:
                wanted = first if spec.name.startswith("embedding.") else last
            if wanted:
                chosen.append(spec)
        return tuple(chosen) + (self.copies() if last and not first else ())

    def copies(self) -> tuple[ParameterSpec, ...]:
        """Return what is held beside `parameters`: a tied embedding, under the output's name."""
        if not self.tied:
            return ()
        return (ParameterSpec(OUTPUT, self._vocab_shape, 0, None, "output", copy_of=EMBEDDING),)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; a tied embedding counts once."""
        return sum(spec.numel for spec in self.parameters())

    @property
    def _vocab_shape(self) -> tuple[int, int]:
        return self.padded_vocab_size, self.hidden_size

    def _norm(
        self, name: str, size: int, layer: int | None, per_head: bool = False
    ) -> Iterator[ParameterSpec]:
        weight = ParameterSpec(f"{name}.weight", (size,), None, layer, "norm", per_head=per_head)
        yield weight
        if self.layernorm_bias:
            yield replace(weight, name=f"{name}.bias", kind="norm_bias")

    def _parameters(self) -> Iterator[ParameterSpec]:
        h = self.hidden_size
        yield ParameterSpec(EMBEDDING, self._vocab_shape, 0, None, "embedding")
        if self.learned_positions:
            shape = (self.max_positions, h)
            name = "embedding.position_embeddings.weight"
            yield ParameterSpec(name, shape, None, None, "position")
        for layer in range(self.num_layers):
            yield from self._block(layer)
        yield from self._norm("decoder.final_layernorm", h, None)
        if not self.tied:
            yield ParameterSpec(OUTPUT, self._vocab_shape, 0, None, "output")

    def _block(self, layer: int) -> Iterator[ParameterSpec]:
        h, prefix = self.hidden_size, f"decoder.layers.{layer}"
        attention, mlp = f"{prefix}.self_attention", f"{prefix}.mlp"
        # [2, f, h] and not [2f, h]: gate and up keep their halves at every tensor-parallel size.
        gated = (2, self.ffn_size) if self.swiglu else (self.ffn_size,)
        yield from self._norm(f"{prefix}.input_layernorm", h, layer)
        yield from self._linear(
            f"{attention}.linear_qkv", (self.qkv_size, h), 0, layer, self.qkv_bias, 0
        )
        if self.qk_layernorm:
            yield from self._norm(f"{attention}.q_layernorm", self.head_dim, layer, True)
            yield from self._norm(f"{attention}.k_layernorm", self.head_dim, layer, True)
        yield from self._linear(
            f"{attention}.linear_proj",
            (h, self.attention_size),
            1,
            layer,
            self.attention_output_bias,
            None,
        )
        yield from self._norm(f"{prefix}.pre_mlp_layernorm", h, layer)
        split = len(gated) - 1
        # FSDP splits the fused one along h: gate and up stay whole on every rank.
        fsdp_dim = 2 if self.swiglu else 0
        yield from self._linear(
            f"{mlp}.linear_fc1", (*gated, h), split, layer, self.mlp_bias, split, fsdp_dim
        )
        yield from self._linear(
            f"{mlp}.linear_fc2", (h, self.ffn_size), 1, layer, self.mlp_bias, None
        )

    @staticmethod
    def _linear(
        name: str,
        shape: tuple[int, ...],
        tp_dim: int,
        layer: int,
        bias: bool,
        bias_tp_dim: int | None,
        fsdp_dim: int = 0,
    ) -> Iterator[ParameterSpec]:
        yield ParameterSpec(f"{name}.weight", shape, tp_dim, layer, "linear", fsdp_dim)
        if bias:
            # A bias spans the outputs: all dimensions of the weight but the last.
            yield ParameterSpec(f"{name}.bias", shape[:-1], bias_tp_dim, layer, "bias")

    def linears(self, layout: Layout, micro_batch_size: int) -> tuple[LinearSpec, ...]:
        """Return the linears of all blocks as one rank of `layout` computes them."""
        tokens = self.seq_length * micro_batch_size // layout.cp
        local = tokens // layout.tp if layout.sequence_parallel else tokens
        return tuple(
            LinearSpec(
                name=names.name,
                layer=names.layer,
                in_features=size_in // layout.tp if names.mode == "row" else size_in,
                out_features=size_out // layout.tp if names.mode == "column" else size_out,
                tokens=tokens,
                local_tokens=local,
                hf_names=names.hf_names,
                mode=names.mode,
            )
            for names in linear_names(self.num_layers, self.swiglu)
            for size_in, size_out in (self._features(names.name.rpartition(".")[2]),)
        )

    def _features(self, module: str) -> tuple[int, int]:
        """Global input and output features of a linear."""
        fc1_size = self.ffn_size * (2 if self.swiglu else 1)
        return {
            "linear_qkv": (self.hidden_size, self.qkv_size),
            "linear_proj": (self.attention_size, self.hidden_size),
            "linear_fc1": (self.hidden_size, fc1_size),
            "linear_fc2": (self.ffn_size, self.hidden_size),
        }[module]


@dataclass(frozen=True)
class LinearName:
    """A linear's names, known before the vocabulary and the layout are."""

    name: str
    layer: int
    hf_names: tuple[str, ...]
    mode: Literal["column", "row"]


def linear_names(num_layers: int, swiglu: bool) -> tuple[LinearName, ...]:
    """Return the linears of all blocks, four each, in the order of the forward pass."""
    up = ("mlp.gate_proj", "mlp.up_proj") if swiglu else ("mlp.up_proj",)
    kinds: tuple[tuple[str, tuple[str, ...], Literal["column", "row"]], ...] = (
        (
            "self_attention.linear_qkv",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "column",
        ),
        ("self_attention.linear_proj", ("self_attn.o_proj",), "row"),
        ("mlp.linear_fc1", up, "column"),
        ("mlp.linear_fc2", ("mlp.down_proj",), "row"),
    )
    return tuple(
        LinearName(
            name=f"decoder.layers.{layer}.{name}",
            layer=layer,
            hf_names=tuple(f"model.layers.{layer}.{hf}" for hf in hf_names),
            mode=mode,
        )
        for layer in range(num_layers)
        for name, hf_names, mode in kinds
    )
