"""A checkpoint is one global view: what one layout saves, every other loads bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megafp8.checkpoint import load_tensors, read_record, save_checkpoint
from tests.checkpoint.sharded import (
    PARAMETERS,
    build,
    expected,
    load_layout,
    local_shapes,
    plain,
    record,
    reference,
    save_layout,
)
from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def tp2_fsdp2(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tp2_fsdp2")
    paths = ranks.run(save_layout, root=str(root), tp=2, fsdp=2)
    assert paths == [str(root / "iter_0000010")] * 4
    return root / "iter_0000010"


@pytest.mark.parametrize(
    ("tp", "fsdp", "replicate"),
    [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 2, 1), (1, 1, 1)],
)
def test_load_at_another_layout(
    ranks: Ranks, tp2_fsdp2: Path, tp: int, fsdp: int, replicate: int
) -> None:
    size = tp * fsdp * replicate
    arguments = {"directory": str(tp2_fsdp2), "tp": tp, "fsdp": fsdp, "replicate": replicate}
    assert ranks.run(load_layout, world_size=size, **arguments) == [[]] * size


def test_load_without_a_process_group(tp2_fsdp2: Path) -> None:
    assert not dist.is_initialized()
    names = [*PARAMETERS, *(f"optimizer.exp_avg.{name}" for name in PARAMETERS), *plain()]
    tensors = {name: torch.zeros_like(expected(name)) for name in names}
    assert load_tensors(tp2_fsdp2, tensors) == []
    assert [name for name in names if not torch.equal(tensors[name], expected(name))] == []


def test_one_process_saves_what_many_load(ranks: Ranks, tmp_path: Path) -> None:
    names = [*PARAMETERS, *(f"optimizer.exp_avg.{name}" for name in PARAMETERS), *plain()]
    path = save_checkpoint(tmp_path, 3, {name: expected(name) for name in names}, record(3))
    assert ranks.run(load_layout, directory=str(path), tp=2, fsdp=2) == [[]] * 4


def test_shards_are_uneven_and_empty(ranks: Ranks) -> None:
    """The layouts above test little if their shards are all alike."""
    shapes = ranks.run(local_shapes, tp=1, fsdp=4)
    assert [rank["norm.weight"][0] for rank in shapes] == [1, 1, 0, 0]
    shapes = ranks.run(local_shapes, tp=4, fsdp=1)
    assert {rank["fc1.weight"] for rank in shapes} == {(2, 3, 8)}
    assert [rank["qkv.weight"][0] for rank in shapes] == [3, 3, 3, 1]
    shapes = ranks.run(local_shapes, tp=2, fsdp=2)  # rank = fsdp * 2 + tp
    assert {rank["fc1.weight"] for rank in shapes} == {(2, 6, 4)}
    assert [rank["qkv.weight"][0] for rank in shapes] == [3, 3, 2, 2]
    assert [rank["tiny.weight"][0] for rank in shapes] == [1, 1, 0, 0]


UNEVEN: dict[str, tuple[int, ...]] = {"a": (4, 3), "b": (2,), "c": (7, 2), "d": (10, 4)}


def _uneven(blank: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(
            torch.full(shape, torch.nan) if blank else reference(name, shape), mesh, [Shard(0)]
        )
        for name, shape in UNEVEN.items()
    }


def save_uneven(root: str) -> None:
    save_checkpoint(Path(root), 1, _uneven(blank=False), record(1))


def load_uneven(directory: str) -> list[str]:
    tensors = _uneven(blank=True)
    load_tensors(Path(directory), tensors)
    return [
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor)
        and not torch.equal(tensor.full_tensor(), reference(name, UNEVEN[name]))
    ]


def test_three_ranks_with_empty_shards(ranks: Ranks, tmp_path: Path) -> None:
    """First dimensions of 4 (2, 2 and 0 rows), 2 (1, 1, 0), 7 and 10 over three ranks."""
    ranks.run(save_uneven, world_size=3, root=str(tmp_path))
    for size in (3, 2, 4, 1):
        path = str(tmp_path / "iter_0000001")
        assert ranks.run(load_uneven, world_size=size, directory=path) == [[]] * size


def _stage(pp: int, tp: int, blank: bool) -> dict[str, Tensor]:
    """Names of this pipeline stage only, on this stage's tp mesh."""
    mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
    stage = mesh.get_local_rank("pp")
    tensors: dict[str, Tensor] = {}
    for layer in range(4):
        if layer * pp // 4 != stage:
            continue
        name = f"decoder.layers.{layer}.weight"
        full = torch.full((8, 3), torch.nan) if blank else reference(name, (8, 3))
        tensors[name] = distribute_tensor(full, mesh["tp"], [Shard(0)])
        tensors[f"fp8.{name}.scale"] = torch.tensor(0.0 if blank else float(layer + 1))
    return tensors


def save_stages(root: str, pp: int, tp: int) -> list[str]:
    tensors = _stage(pp, tp, blank=False)
    save_checkpoint(Path(root), 2, tensors, record(2))
    return list(tensors)


def load_stages(directory: str, pp: int, tp: int) -> dict[str, list[float]]:
    tensors = _stage(pp, tp, blank=True)
    load_tensors(Path(directory), tensors)
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist()
        for name, t in tensors.items()
    }


def test_pipeline_stages_contribute_their_own_names(ranks: Ranks, tmp_path: Path) -> None:
    names = ranks.run(save_stages, root=str(tmp_path), pp=2, tp=2)
    assert set(names[0]).isdisjoint(names[3])
    path = tmp_path / "iter_0000002"
    assert set(read_record(path).tensors) == {*names[0], *names[3]}
    for pp, tp in ((1, 2), (4, 1), (2, 1), (1, 1)):
        loaded = ranks.run(load_stages, world_size=pp * tp, directory=str(path), pp=pp, tp=tp)
        found = {name: values for rank in loaded for name, values in rank.items()}
        assert len(found) == 8
        for layer in range(4):
            name = f"decoder.layers.{layer}.weight"
            assert found[name] == reference(name, (8, 3)).flatten().tolist()
            assert found[f"fp8.{name}.scale"] == [layer + 1.0]


def save_again(directory: str, root: str) -> None:
    """Load at tp 4 and save what was loaded, without a step."""
    tensors = build(4, 1, blank=True)
    load_tensors(Path(directory), tensors)
    save_checkpoint(Path(root), 10, tensors, record(10))


def test_load_and_save_again_holds_identical_tensors(
    ranks: Ranks, tp2_fsdp2: Path, tmp_path: Path
) -> None:
    ranks.run(save_again, directory=str(tp2_fsdp2), root=str(tmp_path))
    second = tmp_path / "iter_0000010"
    first_record, second_record = read_record(tp2_fsdp2), read_record(second)
    assert first_record.tensors == second_record.tensors
    stored = {name: torch.zeros_like(expected(name)) for name in second_record.tensors}
    load_tensors(second, stored)
    assert [name for name in stored if not torch.equal(stored[name], expected(name))] == []
    # Nothing is stored twice: torch's container takes about 1.2 kB per chunk, twice the chunks
    # cannot hide in that.
    sizes = [
        sum(entry.size for name, entry in r.files.items() if name.endswith(".distcp"))
        for r in (first_record, second_record)
    ]
    assert sizes[1] < 1.1 * sizes[0]


def test_replicas_are_stored_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_layout, world_size=2, root=str(tmp_path / "two"), tp=1, fsdp=1, replicate=2)
    ranks.run(save_layout, world_size=1, root=str(tmp_path / "one"), tp=1, fsdp=1)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / side).glob("iter_*/*.distcp"))
        for side in ("one", "two")
    ]
    assert abs(sizes[1] - sizes[0]) < 0.02 * sizes[0]


def save_and_load_one_tensor(root: str) -> tuple[list[int], list[float]]:
    tensors = {"a": torch.arange(3.0)}
    path = save_checkpoint(Path(root), 10, tensors, record(10))
    sizes = sorted(file.stat().st_size for file in path.glob("*.distcp"))
    tensors["a"].zero_()
    assert load_tensors(path, tensors) == []
    return sizes, tensors["a"].tolist()


def test_a_rank_may_have_nothing_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    """Of three ranks that hold the same tensor one writes it, the others' files are empty."""
    for sizes, values in ranks.run(save_and_load_one_tensor, world_size=3, root=str(tmp_path)):
        assert sizes[:2] == [0, 0] and sizes[2] > 0
        assert values == [0.0, 1.0, 2.0]
