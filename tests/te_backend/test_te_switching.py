"""TE's linears switched between two steps, and an observer of their casts."""

from pathlib import Path

import pytest

from tests.support.layouts import PARITY, degrees
from tests.support.ranks import Ranks
from tests.support.switching import FC1, LINEARS, assert_same, observed, switched_and_wanted
from tests.support.te_runs import SMALL


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_transformer_engine(te_ranks: Ranks, recipe: str, tmp_path: Path) -> None:
    flags = (*PARITY, *SMALL, *degrees(), "--fp8-recipe", recipe)
    (legs,) = te_ranks.run(
        switched_and_wanted, world_size=1, flags=flags, name=FC1, folder=tmp_path, te=True
    )
    assert_same(legs, FC1)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_observer_of_transformer_engine(te_ranks: Ranks, recipe: str) -> None:
    flags = (*PARITY, *SMALL, *degrees(), "--fp8-recipe", recipe)
    ((plain, watched, seen, errors),) = te_ranks.run(observed, world_size=1, flags=flags, te=True)
    assert plain == watched
    roles = ("input", "weight", "grad_output")
    assert seen == {(name, role): 4 for name in LINEARS for role in roles}
    assert len(errors) == sum(seen.values()) and all(0.0 < error < 0.1 for error in errors)
