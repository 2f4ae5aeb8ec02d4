"""Section `model`: the network's sizes and variants, under Megatron's names."""

from typing import Annotated, Literal

from pydantic import Field

from megafp8.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Probability, Section

# Fields that may be left out, and the property that says what they are then.
DERIVED = {
    "ffn_hidden_size": "ffn_size",
    "kv_channels": "head_dim",
    "num_query_groups": "query_groups",
    "max_position_embeddings": "positions",
    "add_qkv_bias": "qkv_bias",
    "add_attention_output_bias": "attention_output_bias",
    "add_mlp_bias": "mlp_bias",
}


class ModelConfig(Section):
    """Sizes and variants of the GPT model; what is left open is derived by the properties."""

    num_layers: PositiveInt = Field(le=10_000, description="transformer blocks")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_attention_heads: PositiveInt = Field(description="query heads")
    ffn_hidden_size: PositiveInt | None = Field(
        default=None,
        description="width of the MLP (default 4 * hidden-size; with --swiglu 8/3 * hidden-size "
        "rounded down to a multiple of 64)",
    )
    kv_channels: PositiveInt | None = Field(
        default=None, description="size of one head (default hidden-size / num-attention-heads)"
    )
    group_query_attention: bool = Field(
        default=False, description="fewer key/value heads than query heads"
    )
    num_query_groups: PositiveInt | None = Field(
        default=None, description="key/value heads with --group-query-attention (default 1)"
    )
    seq_length: PositiveInt = Field(description="tokens per sample")
    max_position_embeddings: PositiveInt | None = Field(
        default=None, description="rows of the position table; needed for learned_absolute"
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = Field(
        default="learned_absolute", description="how positions enter"
    )
    rotary_base: PositiveFloat = Field(default=10000.0, description="rope base")
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="part of each head that rope turns"
    )
    use_rope_scaling: bool = Field(
        default=False, description="Llama 3.1's scaling of rope frequencies"
    )
    rope_scaling_factor: PositiveFloat = Field(
        default=8.0, description="factor of --use-rope-scaling"
    )
    rope_low_freq_factor: PositiveFloat = Field(default=1.0, description="of --use-rope-scaling")
    rope_high_freq_factor: PositiveFloat = Field(default=4.0, description="of --use-rope-scaling")
    rope_original_max_position_embeddings: PositiveInt = Field(
        default=8192, description="of --use-rope-scaling: length the model was first trained on"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = Field(
        default="LayerNorm", description="kind of norm"
    )
    norm_impl: Literal["native", "apex"] = Field(
        default="native", description="kernels of the norms; apex is NVIDIA's, on CUDA"
    )
    norm_epsilon: PositiveFloat = Field(default=1e-5, description="epsilon of the norms")
    swiglu: bool = Field(default=False, description="gated SiLU in the MLP")
    activation: Literal["gelu", "gelu-tanh"] = Field(
        default="gelu", description="activation of the MLP without --swiglu"
    )
    disable_bias_linear: bool = Field(default=False, description="no biases in linears")
    add_qkv_bias: bool | None = Field(
        default=None, description="bias of linear_qkv (default: unless --disable-bias-linear)"
    )
    add_attention_output_bias: bool | None = Field(
        default=None, description="bias of linear_proj (default: unless --disable-bias-linear)"
    )
    add_mlp_bias: bool | None = Field(
        default=None, description="biases of the MLP (default: unless --disable-bias-linear)"
    )
    untie_embeddings_and_output_weights: bool = Field(
        default=False, description="a separate matrix for the output layer"
    )
    window_size: tuple[int, int] | None = Field(
        default=None,
        strict=False,
        description="sliding window LEFT,0: a token sees itself and LEFT tokens before it",
    )
    make_vocab_size_divisible_by: PositiveInt = Field(
        default=128,
        description="the vocabulary is padded to a multiple of this alone (Megatron multiplies it "
        "by the tensor-parallel size; here the padded size is the same at every size)",
    )
    hidden_dropout: Probability = Field(default=0.1, description="dropout after attention and MLP")
    attention_dropout: Probability = Field(default=0.1, description="dropout of attention weights")
    init_method_std: PositiveFloat = Field(default=0.02, description="std of the initial weights")
    qk_layernorm: bool = Field(default=False, description="norms on queries and keys")
    transformer_impl: Literal["auto", "native", "local", "transformer_engine"] = Field(
        default="auto",
        description="backend of the layers; `local` means native (Megatron's default is "
        "transformer_engine)",
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = Field(
        default="auto",
        description="attention core: flash, fused or unfused of TransformerEngine, or torch's SDPA "
        "(local); auto is TransformerEngine's choice among its three, SDPA on the native backend",
    )
    te_fused_norms: bool = Field(
        default=True,
        description="with TransformerEngine: its LayerNormLinear for a norm and the linear after "
        "it (in FP8 the norm's fp32 result is cast, without it the BF16 rounding of that)",
    )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads; as many as query heads without group-query attention."""
        if not self.group_query_attention:
            return self.num_attention_heads
        return self.num_query_groups or 1

    @property
    def ffn_size(self) -> int:
        """Width of the MLP; one of the two halves where it is gated."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return 8 * self.hidden_size // 3 // 64 * 64
        return 4 * self.hidden_size

    @property
    def positions(self) -> int:
        """Longest sequence the model can take."""
        return self.max_position_embeddings or self.seq_length

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that rope turns."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def qkv_bias(self) -> bool:
        """Whether linear_qkv has a bias."""
        return not self.disable_bias_linear if self.add_qkv_bias is None else self.add_qkv_bias

    @property
    def attention_output_bias(self) -> bool:
        """Whether linear_proj has a bias."""
        if self.add_attention_output_bias is None:
            return not self.disable_bias_linear
        return self.add_attention_output_bias

    @property
    def mlp_bias(self) -> bool:
        """Whether linear_fc1 and linear_fc2 have biases."""
        return not self.disable_bias_linear if self.add_mlp_bias is None else self.add_mlp_bias

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer is the word embedding."""
        return not self.untie_embeddings_and_output_weights

    @property
    def window_left(self) -> int | None:
        """Tokens before its own that a token sees; None where there is no window."""
        return None if self.window_size is None else self.window_size[0]

    def padded_vocab_size(self, vocab_size: NonNegativeInt) -> int:
        """Return `vocab_size` rounded up to a multiple of make_vocab_size_divisible_by."""
        multiple = self.make_vocab_size_divisible_by
        return -(-vocab_size // multiple) * multiple
