"""The TransformerEngine part of the check of a GPU machine, on the emulated extension."""

import torch
import torch.distributed as dist

from bench.gpu.check import TINY, backend_rows, scale_rows, settled
from bench.gpu.rows import Measurement, Row
from bench.gpu.speed import TE, Ceilings, Clock, compared, step_works, with_backends
from bench.model import BF16, RECIPES, BenchModel
from megafp8.parallel import World
from tests.support import te_cpu
from tests.support.ranks import Ranks


def world() -> World:
    return World(0, dist.get_world_size(), 0, torch.device("cpu"), "gloo")


def checked() -> tuple[list[Row], list[Measurement], list[Row]]:
    te_cpu.load()
    rows = backend_rows(TINY, world(), 50, settled(TINY, BF16, world()))
    clock, ceilings = Clock(torch.device("cpu"), 1), Ceilings(1e9, 1e9, None)
    variants = with_backends({"bf16": BF16})
    speed = compared(clock, ceilings, world(), rows, TINY, variants, step_works("tiny", TINY))
    native, other = (BenchModel(TINY, flags, world()) for flags in (RECIPES["delayed"], TE))
    assert other.registry is not None
    # One unit in the last place of one scale that nothing updates before it is compared.
    scale = other.registry.scale
    scale[-1] = torch.nextafter(scale[-1], torch.tensor(2.0))
    return rows, speed, scale_rows(native, other, 1)


def test_scales_outputs_and_speed(te_ranks: Ranks) -> None:
    ((rows, speed, spoilt),) = te_ranks.run(checked, world_size=1)
    found = {row.check: row for row in rows}
    equal = found["scales and histories, TE = native"]
    assert (equal.found, equal.verdict) == ("bit-equal over 50 steps", "ok")
    for product in ("y", "dx", "dw"):
        assert found[f"{product}, TE against native"].verdict == "ok"
        assert found[f"TransformerEngine: {product}, fp8 against bf16"].verdict == "ok"
    assert len(found) == 7, "nothing raised"
    assert [row.precision for row in speed] == ["bf16", "te fp8", "te fp8, fused norms"]
    assert all(row.milliseconds > 0 and row.speedup for row in speed)
    assert spoilt[0].verdict == "FAIL" and "1 of 24 tensors differ at step 0" in spoilt[0].found
