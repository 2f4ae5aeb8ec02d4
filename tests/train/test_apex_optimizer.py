"""`--optimizer apex` on a stand-in with the constructor of NVIDIA's and plain arithmetic."""

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megafp8.config.optimizer import OptimizerConfig
from megafp8.errors import ConfigurationError
from megafp8.layers import apex
from megafp8.train.optimizer import (
    build_optimizer,
    check_optimizer,
    optimizer_tensors,
    take_step,
)
from megafp8.train.shards import NamedShard


class FusedAdam(torch.optim.Optimizer):
    """Parameters, group counter and `zero_grad` as in NVIDIA/apex (optimizers/fused_adam.py)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and bias_correction and not capturable
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def zero_grad(self) -> None:  # type: ignore[override]
        raise AssertionError("takes no set_to_none in some versions: not called")

    @torch.no_grad()
    def step(self, closure: Any = None, grads: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for shard in group["params"]:
                if shard.grad is None:
                    continue
                assert shard.numel() and shard.dtype == torch.float32
                state = self.state[shard]
                state["exp_avg"].lerp_(shard.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(shard.grad, shard.grad, value=1 - beta2)
                first = state["exp_avg"] / (1 - beta1 ** group["step"])
                second = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * shard
                shard.sub_(group["lr"] * update)


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    package, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)


def shards() -> list[NamedShard]:
    generator = torch.Generator().manual_seed(3)
    sizes = {"a.weight": (16, 8), "b.weight": (0, 8), "norm.weight": (8,)}
    return [
        NamedShard(name, torch.randn(size, generator=generator), name != "norm.weight")
        for name, size in sizes.items()
    ]


def train(kind: str, steps: int, load: dict[str, torch.Tensor] | None = None) -> Any:
    config = OptimizerConfig(optimizer=kind, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]
    parameters = shards()
    optimizer = build_optimizer(config, parameters)
    for name, value in optimizer_tensors(optimizer).items():
        if load is not None:
            value.copy_(load[name])
    generator = torch.Generator().manual_seed(4)
    for number in range(steps):
        for item in parameters:
            item.shard.grad = torch.randn(item.shard.shape, generator=generator)
        take_step(optimizer, 1e-2, skip=number == 1)
        assert all(item.shard.grad is None for item in parameters)
    return parameters, optimizer_tensors(optimizer)


def test_equals_torch(nvidia: None) -> None:
    (ours, our_state), (wanted, state) = train("apex", 5), train("adam", 5)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one.shard, other.shard, rtol=1e-5, atol=1e-7)
    assert our_state.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(our_state[name], value, rtol=1e-5, atol=1e-8)
    assert our_state["optimizer.a.weight.step"] == 4  # one of five steps was skipped


def test_state_moves_to_and_from_torch(nvidia: None) -> None:
    _, state = train("adam", 3)
    (ours, _), (wanted, _) = train("apex", 2, load=state), train("adam", 2, load=state)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one.shard, other.shard, rtol=1e-5, atol=1e-7)


def test_call_binds_to_the_real_constructor() -> None:
    """With the parameters of apex 0.1: the stand-in's; a wrong keyword would not bind."""
    source = inspect.getsource(apex.fused_adam)
    keywords = ("lr=lr", "betas=betas", "eps=eps", "adam_w_mode=True", "bias_correction=True")
    assert all(keyword in source for keyword in keywords)
    inspect.signature(FusedAdam).bind([], lr=1, betas=(0, 0), eps=0, adam_w_mode=True)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "apex is not installed; NVIDIA's is built from"),
        (("apex/__init__.py", "apex/lib.py"), "the installed package apex is PyPI's, which has"),
        (("apex/__init__.py", "apex/optimizers/__init__.py"), "without its CUDA extensions (amp_C"),
    ],
)
def test_other_packages_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[str, ...], said: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    usable, reason = apex.available()
    assert not usable and said in reason
    with pytest.raises(ConfigurationError, match="^--optimizer apex: ") as caught:
        check_optimizer(OptimizerConfig(optimizer="apex", lr=1.0))
    assert said in str(caught.value)
    check_optimizer(OptimizerConfig(optimizer="adam", lr=1.0))


def test_needs_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(apex.torch.cuda, "is_available", lambda: False)
    assert apex.available() == (False, "apex's optimizers need a CUDA device and torch sees none")
    monkeypatch.setattr(apex.torch.cuda, "is_available", lambda: True)
    assert apex.available() == (True, "NVIDIA apex")
