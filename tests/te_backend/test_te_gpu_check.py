"""The TransformerEngine part of the check of a GPU machine, on the emulated extension."""

import torch
import torch.distributed as dist

from megafp8.launch.gpu_backends import NATIVE, TE, TINY, _Setup, backend_rows, scale_rows
from megafp8.launch.gpu_rows import Row
from megafp8.parallel import World
from tests.support import te_cpu
from tests.support.ranks import Ranks


def world() -> World:
    return World(0, dist.get_world_size(), 0, torch.device("cpu"), "gloo")


def checked() -> tuple[list[Row], list[Row]]:
    te_cpu.load()
    rows = backend_rows(world(), TINY, 50)
    native, other = _Setup(NATIVE, TINY, world()), _Setup(TE, TINY, world())
    assert other.model.registry is not None
    # One unit in the last place of one scale that nothing updates before it is compared.
    scale = other.model.registry.scale
    scale[-1] = torch.nextafter(scale[-1], torch.tensor(2.0))
    return rows, scale_rows(native, other, 1)


def test_scales_outputs_and_speed(te_ranks: Ranks) -> None:
    ((rows, spoilt),) = te_ranks.run(checked, world_size=1)
    found = {row.check: row for row in rows}
    equal = found["scales and histories, TE = native"]
    assert (equal.found, equal.verdict) == ("bit-equal over 50 steps", "ok")
    for product in ("y", "dx", "dw"):
        assert found[f"{product}, TE against native"].verdict == "ok"
        assert found[f"{product} of mlp.linear_fc1, te fp8 against bf16"].verdict == "ok"
    for kind in ("te fp8", "te fp8, fused norms"):
        assert found[f"training step of one block, {kind}"].value
    assert spoilt[0].verdict == "FAIL" and "1 of 24 tensors differ at step 0" in spoilt[0].found
