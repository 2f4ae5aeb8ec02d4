"""Section `precision`: number formats, FP8 recipe, FP8 communication, loss scale."""

from typing import Literal

from pydantic import Field, field_validator

from megafp8.config.amax_algorithm import parse_amax_algorithm
from megafp8.config.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from megafp8.config.paths import FilePath
from megafp8.config.recipes import DEFAULT_RECIPE, RECIPES, RecipeName, RecipeSpec, recipes_that

_POWERS_OF_2 = recipes_that(lambda recipe: recipe.power_of_2_scales, " and ")


class PrecisionConfig(Section):
    """Precision of compute and communication; no flag at all means fp32."""

    precision: Literal["auto"] | None = Field(
        default=None,
        description="auto takes what the device does best: FP8 where it has FP8 units, else BF16, "
        "on older GPUs FP16 (docs/fp8.md); instead of --bf16, --fp16 and --fp8-format",
    )
    bf16: bool = Field(default=False, description="compute in bfloat16, masters in fp32")
    fp16: bool = Field(
        default=False, description="compute in float16 with a loss scale, masters in fp32"
    )
    fp8_format: Literal["none", "e4m3", "hybrid"] | None = Field(
        default=None,
        description="FP8 in the blocks' linears (needs --bf16): hybrid is E4M3 forward and E5M2 "
        "gradients, e4m3 is E4M3 in both; none turns a preset's FP8 off",
    )
    fp8_recipe: Literal["auto", RecipeName] = Field(
        default=DEFAULT_RECIPE,
        description="how scales are found: delayed from earlier steps, the others from the tensor "
        "itself, by tensor, row or block; auto takes mxfp8 on Blackwell (unless --fp8-format "
        "hybrid), else delayed",
    )
    fp8_margin: int = Field(default=0, ge=-32, le=32, description="divides scales by 2**margin")
    fp8_amax_history_len: PositiveInt = Field(
        default=1024,
        description="window of the amax history (Megatron's default is 1; this is TE's)",
    )
    fp8_amax_compute_algo: str = Field(
        default="max",
        description="max, most_recent, quantile:Q, trimmed_max:K or ema:B (Megatron's default is "
        "most_recent; this is TE's)",
    )
    fp8_scale_cap: float | None = Field(
        default=None,
        ge=2.0**-126,  # a scale's inverse has to be finite
        le=2.0**127,
        description="no scale of --fp8-recipe delayed goes above it",
    )
    fp8_power_of_2_scales: bool | None = Field(
        default=None,
        description=f"scales are rounded down to powers of two (default: {_POWERS_OF_2} alone)",
    )
    fp8_fake_quant: bool = Field(
        default=False,
        description="multiply decoded FP8 values as BF16 ones, to tell errors of the format from "
        "those of a kernel",
    )
    fp8_param_gather: bool = Field(
        default=False, description="FSDP gathers the weights of FP8 linears as FP8 codes"
    )
    first_last_layers_bf16: bool = Field(
        default=False, description="first and last layers stay in BF16"
    )
    num_layers_at_start_in_bf16: NonNegativeInt = Field(
        default=1, description="with --first-last-layers-bf16"
    )
    num_layers_at_end_in_bf16: NonNegativeInt = Field(
        default=1, description="with --first-last-layers-bf16"
    )
    fp8_wgrad: bool = Field(
        default=True, description="weight gradients from FP8 operands, else BF16"
    )
    precision_policy: FilePath | None = Field(
        default=None, description="YAML file with include and exclude globs over linears"
    )
    fp8_reduce_amax: bool = Field(
        default=True, description="ranks that share a tensor share its scale"
    )
    fp8_amax_window: Literal["step", "micro-batch"] = Field(
        default="step", description="what one entry of the amax history covers (TE: micro-batch)"
    )
    fp8_nonfinite_amax: Literal["skip", "freeze"] = Field(
        default="skip", description="whether a non-finite amax enters the history (TE: freeze)"
    )
    fp8_weight_amax: Literal["updated", "cast"] = Field(
        default="updated", description="when a weight's amax is taken (TE: cast)"
    )
    fp8_tp_comm: Literal["none", "all-gather", "all"] = Field(
        default="all-gather",
        description="which sequence-parallel traffic of FP8 linears is FP8; all has the "
        "reduce-scatters too",
    )
    fp8_attention: Literal["none", "dpa", "mha"] = Field(
        default="none",
        description="dpa: FP8 in the attention core, on TransformerEngine with delayed scaling "
        "(Hopper); mha (FP8 between projection and core too) is refused",
    )
    fp8_grad_reduce: bool = Field(
        default=False, description="reduce FSDP gradients of blocks in FP8, summed in fp32"
    )
    fp8_grad_error_feedback: bool = Field(
        default=False,
        description="with --fp8-grad-reduce: carry what a cast lost over to the next reduction "
        "(fp32, as large as the unsharded gradients of the blocks)",
    )
    fp8_kernels: Literal["auto", "triton", "eager"] = Field(
        default="auto",
        description="what quantizes in the native backend: fused Triton kernels or plain torch; "
        "auto takes Triton where it can run",
    )
    fp8_emulate: bool = Field(default=False, description="allow FP8 on a GPU without FP8 units")
    loss_scale: PositiveFloat | None = Field(
        default=None, description="fixed loss scale for --fp16"
    )
    initial_loss_scale: PositiveFloat = Field(
        default=2.0**32, description="start of the dynamic one"
    )
    min_loss_scale: PositiveFloat = Field(default=1.0, description="lower bound of the dynamic one")
    loss_scale_window: PositiveInt = Field(
        default=1000, description="good iterations before it doubles"
    )
    hysteresis: PositiveInt = Field(default=2, description="overflows before it halves")

    @field_validator("fp8_amax_compute_algo")
    @classmethod
    def _algorithm_is_known(cls, name: str) -> str:
        parse_amax_algorithm(name)
        return name

    @property
    def fp8(self) -> bool:
        """Whether linears run in FP8."""
        return self.fp8_format in ("e4m3", "hybrid")

    @property
    def compute_dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Type of activations and of gathered parameters."""
        assert self.precision is None, "--precision auto is decided by config.auto_precision first"
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def recipe(self) -> RecipeSpec:
        """The recipe that runs; `auto` is delayed where no device has decided otherwise."""
        return RECIPES[DEFAULT_RECIPE if self.fp8_recipe == "auto" else self.fp8_recipe]

    @property
    def power_of_2_scales(self) -> bool:
        """Whether scales are powers of two: as asked, else as the recipe has it."""
        if self.fp8_power_of_2_scales is not None:
            return self.fp8_power_of_2_scales
        return self.recipe.power_of_2_scales
