"""Training on TransformerEngine's linears against native ones, at every kind of layout."""

import pytest

from tests.support.layouts import BOUNDS, PARITY, PRECISIONS, SP, degrees, deviations
from tests.support.limits import slow
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL, te_curve, train

LAYOUTS = {
    "1 rank": (1, degrees()),
    "tp2 + sp": (2, degrees(2, 1, SP)),
    "tp2": (2, degrees(2)),
    "pp2": (2, degrees(1, 2)),
    "fsdp2": (2, degrees()),
    "fsdp2 resharded": (2, degrees(1, 1, "--reshard-after-forward=true")),
    "tp2 x fsdp2": (4, degrees(2, 1, SP)),
}
ITERATIONS = {"fp32": 3, "bf16": 3, "fp8": 4}
QUICK = [("fp8", layout) for layout in LAYOUTS if layout not in ("tp2", "fsdp2 resharded")]
# A layout asks the same of every precision, but for what FP8 gathers.
EVERYWHERE = [
    pytest.param(
        layout,
        precision,
        marks=[] if layout == "tp2 + sp" or (precision, layout) in QUICK else pytest.mark.slow,
    )
    for layout in LAYOUTS
    for precision in PRECISIONS
]


@pytest.mark.parametrize(("layout", "precision"), EVERYWHERE)
def test_losses_equal_native(ranks: Ranks, te_ranks: Ranks, layout: str, precision: str) -> None:
    size, flags = LAYOUTS[layout]
    command = (*PARITY, *SMALL, *PRECISIONS[precision], *flags)
    iterations = ITERATIONS[precision]
    wanted = ranks.run(train, world_size=size, flags=command, iterations=iterations)[0].curve
    found = te_ranks.run(te_curve, world_size=size, flags=command, iterations=iterations)[0]
    assert len(found.losses) == iterations and not any(found.skipped)
    loss, norm = deviations(found, wanted)
    bound = 1e-3 if precision != "fp8" else BOUNDS["fp8"][0]
    assert loss <= bound and norm <= max(bound, BOUNDS[precision][1])
    assert found.losses[-1] < found.losses[0]
    # The same bytes of every kind and dtype travel, FP8 gathers as bytes among them.
    assert found.comm_bytes == wanted.comm_bytes
    assert found.comm_calls == wanted.comm_calls
    if precision == "fp8":
        assert [calls.get("amax_all_reduce", 0) for calls in found.comm_calls] == (
            [1 if size > 1 and not layout.startswith("pp2") else 0] * iterations
        )


@pytest.mark.parametrize("precision", [slow("fp32"), "fp8"])
def test_zero_bubble_schedule(ranks: Ranks, te_ranks: Ranks, precision: str) -> None:
    """Weight gradients in the W slots, biases outside of TE: within the bounds of one backward."""
    sizes = ("--num-layers", "4", "--global-batch-size", "8", "--disable-bias-linear=false")
    command = (*PARITY, *sizes, *PRECISIONS[precision], *degrees(1, 2, "--pipeline-schedule=zbv"))
    wanted = ranks.run(train, world_size=2, flags=command, iterations=3)[0].curve
    found = te_ranks.run(te_curve, world_size=2, flags=command, iterations=3)[0]
    loss, norm = deviations(found, wanted)
    bound = 1e-3 if precision != "fp8" else BOUNDS["fp8"][0]
    assert loss <= bound and norm <= max(bound, BOUNDS[precision][1])
    assert found.comm_calls == wanted.comm_calls


@pytest.mark.parametrize("how", ["true", slow("false")])
def test_gathered_codes_are_multiplied_as_they_are(ranks: Ranks, te_ranks: Ranks, how: str) -> None:
    """FSDP gathers FP8, whether weights are kept gathered or not; gradients are reduced in FP8."""
    wires = ("--fp8-param-gather", "--fp8-grad-reduce", f"--reshard-after-forward={how}")
    command = (*PARITY, *SMALL, *degrees(), *wires)
    wanted = ranks.run(train, world_size=2, flags=command, iterations=4)[0].curve
    found = te_ranks.run(te_curve, world_size=2, flags=command, iterations=4)[0]
    loss, norm = deviations(found, wanted)
    assert loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1]
    assert found.comm_bytes == wanted.comm_bytes and found.comm_calls == wanted.comm_calls
    assert set(found.comm_bytes[-1]["fsdp_block_all_gather"]) == {"uint8"}


def test_model_with_biases_and_layer_norm(ranks: Ranks, te_ranks: Ranks) -> None:
    """Biases: column-parallel ones ride on TE's GEMM, row-parallel ones follow the reduction."""
    gpt2 = (
        "--swiglu=false",
        "--disable-bias-linear=false",
        "--normalization=LayerNorm",
        "--untie-embeddings-and-output-weights=false",
        "--qk-layernorm",
    )
    for precision in ("fp32", "fp8"):
        command = (*PARITY, *SMALL, *PRECISIONS[precision], *gpt2, *degrees(2, 1, SP))
        wanted = ranks.run(train, world_size=2, flags=command, iterations=3)[0].curve
        found = te_ranks.run(te_curve, world_size=2, flags=command, iterations=3)[0]
        loss, norm = deviations(found, wanted)
        bound = 1e-3 if precision == "fp32" else BOUNDS["fp8"][0]
        assert loss <= bound and norm <= bound


@pytest.mark.parametrize("reshard", ["true", slow("false")])
def test_recompute_and_resharding_change_nothing(te_ranks: Ranks, reshard: str) -> None:
    """A recomputed block casts with the scales of its first forward, also inside FSDP2."""
    command = (*PARITY, *SMALL, *degrees(), f"--reshard-after-forward={reshard}")
    plain = te_ranks.run(train, world_size=2, flags=command, iterations=4, te=True)
    again = te_ranks.run(
        train,
        world_size=2,
        flags=(*command, "--recompute-granularity", "full"),
        iterations=4,
        te=True,
    )
    assert [rank.curve.losses for rank in again] == [rank.curve.losses for rank in plain]
    assert [rank.after for rank in again] == [rank.after for rank in plain]
