"""An update that needs whole matrices gets them from shards at any layout, and its part of them."""

import pytest
import torch

from tests.support.layouts import PARITY, PRECISIONS, SP, degrees, merge_stages, start_training
from tests.support.ranks import Ranks

FLAGS = (*PARITY, *PRECISIONS["fp32"], "--num-layers", "2")


def gathered(flags: tuple[str, ...]) -> dict[str, list[list[float]] | list[float]]:
    """Every parameter as `NamedShard.whole` finds it; the part of the whole is the shard again."""
    training = start_training(flags)
    found = {}
    for item in training.step.gradients.named_shards():
        whole = item.whole(item.shard)
        assert torch.equal(item.part(whole), item.shard), item.name
        assert item.part(whole + 1.0).shape == item.shard.shape, item.name
        found[item.name] = whole.tolist()
    return found


@pytest.mark.parametrize(
    ("ranks_used", "layout", "model"),
    [
        (4, degrees(2, 1, SP), ()),
        (4, degrees(1, 2), ()),
        (3, degrees(), ("--swiglu", "false", "--global-batch-size", "12")),
    ],
    ids=["tp2 x fsdp2", "pp2 x fsdp2", "fsdp3, uneven"],
)
def test_shards_become_the_parameters_of_one_rank(
    ranks: Ranks, ranks_used: int, layout: tuple[str, ...], model: tuple[str, ...]
) -> None:
    (alone,) = ranks.run(gathered, world_size=1, flags=(*FLAGS, *model, *degrees()))
    apart = ranks.run(gathered, world_size=ranks_used, flags=(*FLAGS, *model, *layout))
    assert merge_stages(apart) == alone
