"""Section `optimizer`: update rule and learning-rate schedule."""

from typing import Literal

from pydantic import Field

from megafp8.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)


class OptimizerConfig(Section):
    """Optimizer and schedule, under Megatron's names."""

    optimizer: Literal["adam", "sgd", "apex"] = Field(
        default="adam", description="update rule; apex is adam by NVIDIA apex's fused kernel"
    )
    lr: PositiveFloat = Field(description="highest learning rate")
    min_lr: NonNegativeFloat = Field(default=0.0, description="lowest learning rate")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        default="linear", description="shape of the decay"
    )
    lr_decay_iters: PositiveInt | None = Field(
        default=None, description="iterations until --min-lr (default: all)"
    )
    lr_warmup_iters: NonNegativeInt = Field(default=0, description="iterations of linear warm-up")
    lr_warmup_fraction: Probability | None = Field(
        default=None, description="warm-up as a part of --lr-decay-iters"
    )
    lr_wsd_decay_iters: PositiveInt | None = Field(
        default=None, description="iterations of the last phase of WSD"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = Field(
        default="exponential", description="shape of the last phase of WSD"
    )
    weight_decay: NonNegativeFloat = Field(default=0.01, description="decoupled weight decay")
    clip_grad: NonNegativeFloat = Field(default=1.0, description="largest gradient norm; 0 is off")
    adam_beta1: Probability = Field(default=0.9, description="decay of the first moment")
    adam_beta2: Probability = Field(default=0.999, description="decay of the second moment")
    adam_eps: PositiveFloat = Field(default=1e-8, description="epsilon of Adam")
