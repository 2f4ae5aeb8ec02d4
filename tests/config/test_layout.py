"""The grid of ranks: arithmetic with the equation in the message, and who holds which layers."""

import itertools

import pytest

from megafp8.config import RunConfig, load_config
from megafp8.errors import ConfigurationError


def load(text: str = "", layers: int = 8, micro: int = 2, batch: int | None = 16) -> RunConfig:
    argv = (
        f"--num-layers {layers} --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
        f"--seq-length 16 --position-embedding-type rope --micro-batch-size {micro} "
        f"--train-iters 10 --lr 1e-3 {text}"
    )
    if batch is not None:
        argv += f" --global-batch-size {batch}"
    return load_config(argv.split())


@pytest.mark.parametrize(
    ("text", "world_size", "options", "fragment"),
    [
        (
            "--tensor-model-parallel-size 2",
            3,
            {},
            "world size 3 != tp 2 * pp 1 * cp 1 * data parallel: 3 is not a multiple of 2",
        ),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            2,
            {},
            "world size 2 != tp 2 * pp 2 * cp 1 * data parallel: 2 is not a multiple of 4",
        ),
        (
            "--tensor-model-parallel-size 2",
            1,
            {},
            "start 2 processes or a multiple (torchrun --nproc-per-node 2), or lower these sizes",
        ),
        ("", 0, {}, "world size 0"),
        (
            "",
            3,
            {"micro": 4, "batch": 8},
            "8 is not a multiple of --micro-batch-size 4 * data parallel 3 = 12; give 12, 24, ...",
        ),
        (
            "",
            8,
            {"micro": 2, "batch": 8},
            "8 is not a multiple of --micro-batch-size 2 * data parallel 8 = 16; give 16, 32, ..., "
            "or another --micro-batch-size",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
            4,
            {"batch": 12},
            "12 / (2 * 1) = 6 micro-batches, not a multiple of pipeline_model_parallel_size 4",
        ),
        (
            "--pipeline-model-parallel-size 4",
            4,
            {"batch": 4},
            "4 / (2 * 1) = 2 micro-batches, fewer than pipeline_model_parallel_size 4",
        ),
        (
            "--rampup-batch-size 4 2 100",
            2,
            {"batch": 16},
            "--rampup-batch-size reaches batch size 6: global batch size 6 is not a mult",
        ),
        ("--fsdp-size 3", 4, {}, "data parallel 4 is not divisible by fsdp_size 3"),
        (
            "--fsdp-size 2 --use-distributed-optimizer",
            4,
            {},
            "shards over all of data parallel 4, but --fsdp-size is 2",
        ),
        (
            "--swiglu",
            64,
            {"batch": 128},
            "hidden_size 32 is not divisible by fsdp_size 64: with --swiglu linear_fc1 is sharded "
            "along the hidden size; set --fsdp-size to a divisor of both 32 and data parallel 64",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_equation(
    text: str, world_size: int, options: dict[str, int], fragment: str
) -> None:
    config = load(text, **options)
    with pytest.raises(ConfigurationError) as caught:
        config.layout(world_size)
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "text", "fragment"),
    [
        (
            10,
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            "num_layers 10 is not divisible by pipeline_model_parallel_size 2 * "
            "num_layers_per_virtual_pipeline_stage 2 = 4: floor division would build 8 layers",
        ),
        (
            80,
            "--pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 2",
            "would build 64 layers",
        ),
        (5, "--pipeline-model-parallel-size 2", "num_layers 5 is not divisible by"),
        (
            4,
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            "= 1 chunk per rank",
        ),
        (
            4,
            "--pipeline-schedule zbv --pipeline-model-parallel-size 4",
            "num_layers 4 is not divisible by pipeline_model_parallel_size 4 * 2 chunks of zbv = 8",
        ),
    ],
)
def test_uneven_layers_are_refused(layers: int, text: str, fragment: str) -> None:
    config = load(text, layers=layers)
    with pytest.raises(ConfigurationError) as caught:
        config.layout(config.smallest_world_size)
    assert fragment in str(caught.value)


def test_rank_order() -> None:
    config = load(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --fsdp-size 3",
        micro=1,
        batch=24,
    )
    layout = config.layout(24)
    assert (layout.dp, layout.fsdp, layout.replicate) == (6, 3, 2)
    expected = itertools.product(range(2), range(2), range(3), range(2))
    for rank, coordinates in enumerate(expected):
        place = layout.coordinates(rank)
        assert tuple(place[axis] for axis in ("pp", "replicate", "fsdp", "tp")) == coordinates


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("", [(0,), (1,)]),
        ("--pipeline-schedule gpipe", [(0,), (1,)]),
        ("--num-layers-per-virtual-pipeline-stage 2", [(0, 2), (1, 3)]),
        ("--num-layers-per-virtual-pipeline-stage 1", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("--pipeline-schedule zbv", [(0, 3), (1, 2)]),
    ],
)
def test_every_layer_is_held_once(text: str, stages: list[tuple[int, ...]]) -> None:
    layout = load(f"--pipeline-model-parallel-size 2 {text}").layout(2)
    assert [layout.stage_indices(rank) for rank in range(2)] == stages
    assert layout.vp == len(stages[0]) and layout.num_stages == 2 * layout.vp
    held = [layer for rank in stages for stage in rank for layer in layout.stage_layers(stage)]
    assert sorted(held) == list(range(8))


@pytest.mark.parametrize(
    ("text", "world_size", "expected"),
    [
        ("", 1, True),
        ("", 4, True),
        ("--pipeline-model-parallel-size 2", 2, False),
        ("--pipeline-model-parallel-size 2 --reshard-after-forward", 2, True),
        ("--use-distributed-optimizer", 4, False),
        ("--no-reshard-after-forward", 4, False),
    ],
)
def test_when_gathered_parameters_are_freed(text: str, world_size: int, expected: bool) -> None:
    assert load(text).layout(world_size).reshard_after_forward is expected


def test_the_batch_size_left_open_is_micro_times_data_parallel() -> None:
    config = load("--pipeline-schedule gpipe", batch=None)
    resolved = config.resolved(4)
    assert resolved.training.global_batch_size == 8
    assert config.training.global_batch_size is None, "the configuration itself is unchanged"
    assert resolved.layout(4).num_microbatches(8, 2) == 1
    assert load(batch=16).resolved(2) == load(batch=16)
    with pytest.raises(ConfigurationError, match="fewer than pipeline_model_parallel_size 2"):
        load("--pipeline-model-parallel-size 2", batch=None).resolved(2)


def test_smallest_world_size() -> None:
    text = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --fsdp-size 2"
    assert load(text).smallest_world_size == 8
    assert load(text).layout(8).dp == 2
