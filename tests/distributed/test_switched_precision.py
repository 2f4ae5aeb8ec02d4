"""A linear switched between two steps trains on as one of that precision, bit for bit.

In BF16 as in a run whose policy keeps it there, and back in FP8 as in a run that was FP8 all along;
both start from the switched run's own checkpoints.
"""

from pathlib import Path

import pytest

from megafp8.errors import PrecisionError
from tests.support.layouts import PARITY, SP, degrees
from tests.support.limits import slow
from tests.support.ranks import Ranks
from tests.support.switching import (
    FC1,
    LINEARS,
    PROJ,
    assert_same,
    observed,
    start_native,
    switched_and_wanted,
)
from tests.support.te_runs import SMALL

GATHER = ("--fp8-param-gather",)
TENSORWISE, MXFP8 = ("--fp8-recipe", "tensorwise"), ("--fp8-recipe", "mxfp8")
TP2, PP2, FSDP2 = degrees(2, 1, SP, "--fp8-tp-comm", "all"), degrees(1, 2), degrees()


@pytest.mark.parametrize(
    ("size", "flags", "name"),
    [
        pytest.param(1, degrees(), FC1, id="one"),
        pytest.param(1, (*degrees(), *MXFP8), PROJ, id="one-mxfp8"),
        pytest.param(2, TP2, FC1, id="tp2"),
        slow(2, (*TP2, *TENSORWISE), PROJ),
        pytest.param(2, PP2, FC1, id="pp2"),
        pytest.param(2, (*FSDP2, *GATHER), FC1, id="fsdp2-gather"),
        pytest.param(2, (*FSDP2, *GATHER, *TENSORWISE), PROJ, id="fsdp2-gather-tensorwise"),
    ],
)
def test_native(ranks: Ranks, size: int, flags: tuple[str, ...], name: str, tmp_path: Path) -> None:
    flags = (*PARITY, *SMALL, *flags)
    for legs in ranks.run(
        switched_and_wanted, world_size=size, flags=flags, name=name, folder=tmp_path
    ):
        assert_same(legs)


def refusals(flags: tuple[str, ...]) -> list[str]:
    training, said = start_native(flags), []
    for name, precision in (
        ("decoder.layers.0.mlp.linear_fc1", "fp8"),
        (FC1, "fp32"),
        ("decoder.layers.1.mlp.linear_fc3", "bf16"),
    ):
        with pytest.raises(PrecisionError) as raised:
            training.model.set_precision(name, precision)  # type: ignore[arg-type]
        said.append(str(raised.value))
    training.model.set_precision("decoder.layers.0.mlp.linear_fc1", "bf16")  # as it is
    assert training.model.plan is training.plan
    return said


REFUSALS = ("no FP8 scales", "allowed 'fp8', 'bf16'", "no linear is named")


def test_refusals_are_the_same_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Also where the linear is another stage's: no rank goes on without the others."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("exclude: ['decoder.layers.0.*']\n")
    flags = (*PARITY, *SMALL, *PP2, "--precision-policy", str(policy))
    first, second = ranks.run(refusals, world_size=2, flags=flags)
    assert first == second
    for text, part in zip(first, REFUSALS, strict=True):
        assert part in text


# ------------------------------------------------------------------------------- the observer


@pytest.mark.parametrize(
    ("flags", "casts"),
    [
        # Four micro-batches; a weight that stays gathered is cast once a step.
        (("--reshard-after-forward", "false"), {"input": 4, "weight": 1, "grad_output": 4}),
        (MXFP8, {"input": 8, "weight": 2, "grad_output": 8}),
    ],
)
def test_observer_sees_each_cast(
    ranks: Ranks, flags: tuple[str, ...], casts: dict[str, int]
) -> None:
    flags = (*PARITY, *SMALL, *degrees(), *flags)
    ((plain, watched, seen, errors),) = ranks.run(observed, world_size=1, flags=flags)
    assert plain == watched
    assert seen == {(name, role): count for name in LINEARS for role, count in casts.items()}
    assert len(errors) == sum(seen.values()) and all(0.0 < error < 0.1 for error in errors)
