"""Bytes as a rank sends them by the direct algorithm, and their sum over ranks."""

import pytest
import torch

from megafp8.parallel.traffic import DTYPES, KINDS, Traffic, dtype_name, summarize

WIDTH = len(KINDS) * len(DTYPES) + len(KINDS)


def counted(traffic: Traffic) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    return summarize(torch.tensor([traffic.drain()]))


@pytest.mark.parametrize(
    "dtype, width", [(torch.float32, 4), (torch.bfloat16, 2), (torch.uint8, 1)]
)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_formulas(dtype, width, size):
    traffic = Traffic()
    full = torch.zeros(24, 5, dtype=dtype)
    traffic.gathered("tp_linear_all_gather", full, size)
    traffic.gathered("tp_linear_reduce_scatter", full, size)
    traffic.reduced("dp_all_reduce", full, size)
    traffic.sent("pp_p2p", full)
    comm_bytes, calls = counted(traffic)
    name, total = dtype_name(dtype), 120 * width
    wanted = {
        "tp_linear_all_gather": total * (size - 1) // size,
        "tp_linear_reduce_scatter": total * (size - 1) // size,
        "dp_all_reduce": 2 * total * (size - 1) // size,
        "pp_p2p": total,
    }
    # A kind that sent nothing has calls and no bytes.
    assert comm_bytes == {kind: {name: value} for kind, value in wanted.items() if value}
    assert calls == dict.fromkeys(wanted, 1)


def test_drain_starts_again():
    traffic = Traffic()
    traffic.sent("pp_p2p", torch.zeros(3))
    traffic.sent("pp_p2p", torch.zeros(4, dtype=torch.bfloat16))
    assert counted(traffic) == ({"pp_p2p": {"float32": 12, "bfloat16": 8}}, {"pp_p2p": 2})
    assert traffic.drain() == [0] * WIDTH


def test_unknown_kinds_are_refused():
    with pytest.raises(AssertionError, match="tp_gather"):
        Traffic().sent("tp_gather", torch.zeros(1))


def test_ranks_are_summed_in_bytes_and_maximal_in_calls():
    rows = []
    for times in (1, 3):
        traffic = Traffic()
        for _ in range(times):
            traffic.sent("pp_p2p", torch.zeros(10))
        traffic.reduced("loss", torch.zeros(2, dtype=torch.float64), 2)
        rows.append(traffic.drain())
    comm_bytes, calls = summarize(torch.tensor(rows))
    assert comm_bytes == {"pp_p2p": {"float32": 160}, "loss": {"float64": 32}}
    assert calls == {"pp_p2p": 3, "loss": 1}
