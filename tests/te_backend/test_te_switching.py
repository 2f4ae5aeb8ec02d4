"""TE's linears switched between two steps, and an observer of their casts."""

import os
from pathlib import Path

import pytest

from tests.support.layouts import PARITY, degrees
from tests.support.ranks import Ranks
from tests.support.switching import (
    FC1,
    LINEARS,
    PROJ,
    Legs,
    assert_same,
    observed,
    switched_and_wanted,
)
from tests.support.te_runs import SMALL
from tests.te_backend.test_te_attention import EMULATE


def switched(flags: tuple[str, ...], name: str, folder: Path) -> tuple[Legs, Legs]:
    os.environ[EMULATE] = "1"
    return switched_and_wanted(flags, name, folder, te=True)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("--fp8-param-gather",), FC1),
        (("--fp8-recipe", "tensorwise"), FC1),
        (("--fp8-attention", "dpa"), PROJ),  # the FP8 core follows
    ],
    ids=["gather", "tensorwise", "attention"],
)
def test_switched_linear(
    te_ranks: Ranks, flags: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    flags = (*PARITY, *SMALL, *degrees(), *flags)
    (legs,) = te_ranks.run(switched, world_size=1, flags=flags, name=name, folder=tmp_path)
    assert_same(legs)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_observer_of_transformer_engine(te_ranks: Ranks, recipe: str) -> None:
    flags = (*PARITY, *SMALL, *degrees(), "--fp8-recipe", recipe)
    ((plain, watched, seen, errors),) = te_ranks.run(observed, world_size=1, flags=flags, te=True)
    assert plain == watched
    roles = ("input", "weight", "grad_output")
    assert seen == {(name, role): 4 for name in LINEARS for role in roles}
    assert len(errors) == sum(seen.values()) and all(0.0 < error < 0.1 for error in errors)
