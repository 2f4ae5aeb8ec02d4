"""The optimizer over this rank's fp32 master shards.

FSDP2 keeps every parameter as a DTensor. Adam and SGD see none of that: they work on the local fp32
tensors behind them, so updates are element-wise on plain tensors, one fused kernel does all of
them, and an uneven layout that leaves a rank without rows is a tensor of zero rows. An update that
needs whole matrices gathers them (`NamedShard.whole`) and takes its part (`NamedShard.part`).

A further optimizer is a name in `OptimizerConfig.optimizer` and an entry in `_BUILDERS`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megafp8.config.optimizer import OptimizerConfig
from megafp8.errors import ConfigurationError
from megafp8.layers import apex
from megafp8.train.shards import NamedShard

SGD_MOMENTUM = 0.9  # Megatron's --sgd-momentum default


Groups = list[dict[str, Any]]
_Builder = Callable[[OptimizerConfig, Groups, Sequence[NamedShard]], torch.optim.Optimizer]


def check_optimizer(config: OptimizerConfig) -> None:
    """Check before anything is started that the optimizer is there.

    Raises:
        ConfigurationError: apex is asked for and cannot be used, with the reason.
    """
    if config.optimizer == "apex":
        usable, reason = apex.available()
        if not usable:
            raise ConfigurationError(f"--optimizer apex: {reason}; torch's fused one: adam")


def build_optimizer(
    config: OptimizerConfig, parameters: Sequence[NamedShard]
) -> torch.optim.Optimizer:
    """Build the optimizer with its state in place, all zero.

    The state is made here and not in the first step, so that a checkpoint can be loaded before any
    step and one written after a first, skipped step is complete.

    Args:
        config: Section `optimizer`; its `lr` is the start value, see `take_step`.
        parameters: Shards in an order that is the same in every run of the same layout.

    Returns:
        One with two groups, decayed and not. The shards themselves are its parameters.
    """
    _check_shards(parameters)
    groups = [
        {
            "params": [(item.name, item.shard) for item in parameters if item.decay is decay],
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return _BUILDERS[config.optimizer](config, groups, parameters)


def _adam(
    config: OptimizerConfig, groups: Groups, parameters: Sequence[NamedShard]
) -> torch.optim.Optimizer:
    # Fused on CPU as well: 2.9 ms a step against 20 (foreach) and 10 (plain) for 5.2M parameters in
    # 41 tensors on one core of a Xeon, torch 2.13.
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for item in parameters:
        optimizer.state[item.shard] = {
            # On the shard's device, since the fused kernel reads it there. fp32 counts steps
            # exactly up to 2**24 = 16.7M.
            "step": torch.zeros((), dtype=torch.float32, device=item.shard.device),
            "exp_avg": torch.zeros_like(item.shard),
            "exp_avg_sq": torch.zeros_like(item.shard),
        }
    return optimizer


def _apex(
    config: OptimizerConfig, groups: Groups, parameters: Sequence[NamedShard]
) -> torch.optim.Optimizer:
    betas = config.adam_beta1, config.adam_beta2
    return apex.fused_adam(groups, config.lr, betas, config.adam_eps)


def _sgd(
    config: OptimizerConfig, groups: Groups, parameters: Sequence[NamedShard]
) -> torch.optim.Optimizer:
    """The first step would copy the gradient; from zero it is momentum * 0 + gradient, the same."""
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=SGD_MOMENTUM, fused=True)
    for item in parameters:
        optimizer.state[item.shard] = {"momentum_buffer": torch.zeros_like(item.shard)}
    return optimizer


# By `OptimizerConfig.optimizer`. State is made under the names that torch looks up.
_BUILDERS: dict[str, _Builder] = {"adam": _adam, "sgd": _sgd, "apex": _apex}


def _check_shards(parameters: Sequence[NamedShard]) -> None:
    names = [item.name for item in parameters]
    assert len(set(names)) == len(names), "a parameter is given twice"
    for item in parameters:
        assert item.shard.dtype == torch.float32, f"{item.name}: master is {item.shard.dtype}"
        # The fused kernels walk parameter, gradient and state as flat memory of one layout.
        assert item.shard.is_contiguous(), f"{item.name}: shard is not contiguous"
        assert item.shard.is_leaf, f"{item.name}: shard carries a graph"


@torch.no_grad()
def take_step(optimizer: torch.optim.Optimizer, learning_rate: float, *, skip: bool) -> None:
    """Apply the shards' gradients and drop them.

    Args:
        optimizer: From `build_optimizer`.
        learning_rate: Rate of this step; set on every group, also where the step is skipped.
        skip: Leave parameters, moments and step counters bit-equal to before. It has to be the same
            on every rank, or the replicas drift apart.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if not skip:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state as named tensors.

    They are the live tensors and not copies, so a loader that writes in place needs nothing else.

    Args:
        optimizer: From `build_optimizer`.
        names: Parameters to return, by canonical name; all by default.

    Returns:
        `optimizer.<name>.exp_avg`, `.exp_avg_sq` (fp32, the shard's shape) and `.step` (fp32
        scalar) for Adam, `optimizer.<name>.momentum_buffer` for SGD.
    """
    shards = {
        name: shard
        for group in optimizer.param_groups
        for name, shard in zip(group["param_names"], group["params"], strict=True)
    }
    return {
        f"optimizer.{name}.{key}": value
        for name in (shards if names is None else names)
        for key, value in optimizer.state[shards[name]].items()
    }
