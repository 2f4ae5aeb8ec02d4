"""A linear that is switched between two steps, and an observer of casts: functions for ranks."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support.layouts import Curve, Training, start_training
from tests.support.te_cpu import pretend
from tests.support.te_runs import NATIVE, start_te

KINDS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
KINDS = (*KINDS, "mlp.linear_fc2")
LINEARS = [f"decoder.layers.{layer}.{kind}" for layer in (0, 1) for kind in KINDS]
FC1, PROJ = "decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.self_attention.linear_proj"
Digests = dict[str, str]
Legs = tuple[Curve, Digests, Curve, Digests]


def start_native(flags: tuple[str, ...], load: str | None = None) -> Training:
    return start_training((*flags, *NATIVE), load)


def switched_and_wanted(
    flags: tuple[str, ...], name: str, folder: Path, te: bool = False
) -> tuple[Legs, Legs]:
    """One run that is switched to BF16 and back; the same two legs by runs built for them."""
    start: Callable[..., Training] = start_te if te else start_native
    policy = folder / "policy.yaml"  # all ranks write the same
    policy.write_text(f"exclude: ['{name}']\n")
    one = start(flags)
    one.iterate(2)
    first = save(one, folder / "first", te)
    held = scales(one, name)
    one.model.set_precision(name, "bf16")
    found = (one.iterate(2), one.digests())
    assert scales(one, name) == held
    assert one.model.plan.precision(name) == "bf16" and one.plan.precision(name) == "fp8"
    second = save(one, folder / "second", te)
    one.model.set_precision(name, "fp8")
    assert one.model.plan is one.plan
    back = (one.iterate(2), one.digests())
    kept = start((*flags, "--precision-policy", str(policy)), load=first)
    wanted = (kept.iterate(2), kept.digests())
    whole = start(flags, load=second)
    return (*found, *back), (*wanted, whole.iterate(2), whole.digests())


def scales(training: Training, name: str) -> dict[str, Any]:
    """Scales and windows of a linear where this rank holds it."""
    registry = training.model.registry
    assert registry is not None
    kept = {key: value for key, value in registry.tensors().items() if f".{name}." in key}
    return {key: value.tolist() for key, value in kept.items()}


def save(training: Training, folder: Path, te: bool) -> str:
    with pretend.no_cuda() if te else nullcontext():
        return training.save(folder)


def assert_same(legs: tuple[Legs, Legs]) -> None:
    found, wanted = legs
    for mine, other in ((found[0], wanted[0]), (found[2], wanted[2])):
        assert mine.losses == other.losses and mine.grad_norms == other.grad_norms
        assert not any(mine.skipped)
        # What the linear sends follows its precision; the vector of all amaxes keeps its length.
        assert all(
            sent(a) == sent(b) for a, b in zip(mine.comm_bytes, other.comm_bytes, strict=True)
        )
    # Its own scales, and those of the attention core that follows it, are in no run of the plan.
    assert wanted[1].items() <= found[1].items() and found[3] == wanted[3]
    more = found[1].keys() - wanted[1].keys()
    assert all(
        key.startswith(("fp8.decoder.layers.1.", "registry.decoder.layers.1.")) for key in more
    )


def sent(comm: Any) -> dict[str, Any]:
    return {kind: counts for kind, counts in comm.items() if kind != "amax_all_reduce"}


def observed(
    flags: tuple[str, ...], te: bool = False
) -> tuple[list[float], list[float], dict[tuple[str, str], int], list[float]]:
    """Losses without and with an observer, how often it saw each operand, errors of casts."""
    seen: Counter[tuple[str, str]] = Counter()
    errors: list[float] = []

    def look(name: str, role: str, x: Tensor | None, cast: Any) -> None:
        seen[name, role] += 1
        if x is not None:
            values = x.detach().float()
            error = cast.dequantize().float().view(values.shape) - values
            errors.append(float(error.norm() / values.norm()))

    start = start_te if te else start_native
    plain = start(flags).iterate(1).losses
    training = start(flags)
    training.model.observe_casts(look)
    return plain, training.iterate(1).losses, dict(seen), errors
