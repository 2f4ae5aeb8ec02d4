"""Training at every layout follows training on one rank: losses, gradient norms, precision plans.

Each layout runs by default, with as many iterations as the time allows; the marker `slow` has all
20 everywhere, and eight ranks. `tests/tools/parity.py` writes the same figures as a table.
"""

from collections.abc import Callable, Iterator

import pytest

from megafp8.config.cli import load_config
from megafp8.launch.dry_run import preflight
from tests.support.layouts import (
    BOUNDS,
    CASES,
    Curve,
    LayoutCase,
    deviations,
    reference_case,
    train_curve,
)
from tests.support.ranks import Ranks

ITERATIONS = {"fp32": 20, "bf16": 2, "fp8": 6}
# Four processes on two cores wait for one another in every tensor-parallel collective: 20
# iterations take 25 s where two ranks take 6.
COSTLY = {"tp4 + sp": 3}
SMALL = [case for case in CASES if case.world_size <= 4]
LARGE = [case for case in CASES if case.world_size > 4]
Reference = Callable[[str, LayoutCase], Curve]


def name_of(case: LayoutCase) -> str:
    return case.name.replace(" ", "")


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Reference:
    """20 iterations on one rank, run once for each precision and model."""
    known: dict[tuple[str, int], Curve] = {}

    def curve(precision: str, case: LayoutCase) -> Curve:
        key = precision, case.num_layers
        if key not in known:
            flags = reference_case(case).command(precision)
            known[key] = ranks.run(train_curve, world_size=1, flags=flags, iterations=20)[0]
        return known[key]

    return curve


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    pool = Ranks(size=8, timeout=300.0)
    yield pool
    pool.close()


def check(ranks: Ranks, case: LayoutCase, precision: str, iterations: int, wanted: Curve) -> None:
    curves = ranks.run(
        train_curve,
        world_size=case.world_size,
        timeout=300.0,
        flags=case.command(precision),
        iterations=min(iterations, case.iterations),
    )
    for curve in curves[1:]:  # what is reported is the same number on every rank
        assert (curve.losses, curve.grad_norms) == (curves[0].losses, curves[0].grad_norms)
    loss, norm = deviations(curves[0], wanted)
    loss_bound, norm_bound = BOUNDS[precision]
    assert loss <= loss_bound, (curves[0].losses, wanted.losses)
    assert norm <= norm_bound, (curves[0].grad_norms, wanted.grad_norms)


@pytest.mark.parametrize("precision", ["fp32", "fp8", "bf16"])
@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_layout_equals_one_rank(
    ranks: Ranks, reference: Reference, case: LayoutCase, precision: str
) -> None:
    iterations = ITERATIONS[precision] // COSTLY.get(case.name, 1) or 1
    check(ranks, case, precision, iterations, reference(precision, case))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_layout_equals_one_rank_over_20_iterations(
    ranks: Ranks, reference: Reference, case: LayoutCase, precision: str
) -> None:
    check(ranks, case, precision, 20, reference(precision, case))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("case", LARGE, ids=name_of)
def test_layout_of_eight_ranks_equals_one_rank(
    eight: Ranks, reference: Reference, case: LayoutCase, precision: str
) -> None:
    check(eight, case, precision, 20, reference(precision, case))


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_the_model_learns(reference: Reference, precision: str) -> None:
    """Equal curves of runs that learn nothing would prove little."""
    losses = reference(precision, SMALL[0]).losses
    assert losses[0] - losses[-1] >= 1.0, losses


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_precision_plans_are_equal(precision: str) -> None:
    for case in CASES:
        plans = []
        for each in (case, reference_case(case)):
            _, _, plan = preflight(load_config(list(each.command(precision))), each.world_size)
            plans.append([(item.name, item.precision, item.reason) for item in plan.linears])
        assert plans[0] == plans[1], case.name
        assert len(plans[0]) == 4 * case.num_layers
        assert {item[1] for item in plans[0]} == {precision}, case.name
