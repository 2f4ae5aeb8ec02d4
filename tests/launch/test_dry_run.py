"""The dry run: numbers that can be checked by hand, for every preset."""

import re
from pathlib import Path

import pytest
import yaml

from megafp8.config import ModelShape, load_config
from megafp8.launch.dry_run import rank_groups
from megafp8.launch.main import main

CONFIGS = Path(__file__).resolve().parents[2] / "scripts" / "configs"
PRESETS = {"tiny": 4, "parity": 1, "gpt2_345m": 1, "llama3_8b": 8, "llama3_70b": 64}


def dry_run(
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str = "",
    environment: dict[str, str] | None = None,
) -> str:
    argv = ["--config", str(CONFIGS / f"{name}.yaml"), "--dry-run", *text.split()]
    code = main(argv, environment or {})
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def test_every_preset_file_is_known() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(PRESETS)


@pytest.mark.parametrize(("name", "world_size"), PRESETS.items())
def test_presets(capsys: pytest.CaptureFixture[str], name: str, world_size: int) -> None:
    text = dry_run(capsys, name, f"--world-size {world_size}")
    assert f"world size {world_size} = tp " in text
    config = load_config(["--config", str(CONFIGS / f"{name}.yaml")])
    assert config.model.hidden_dropout == config.model.attention_dropout == 0.0
    layers = config.model.num_layers
    assert f"= {layers}, num_layers {layers}" in text


def test_the_configuration_printed_reads_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = dry_run(capsys, "tiny", "--no-async-save")
    path = tmp_path / "config.yaml"
    path.write_text(text.split("# layout")[0])
    again = load_config(["--config", str(path)])
    assert again == load_config(["--config", str(CONFIGS / "tiny.yaml")])
    optimizer = yaml.safe_load(path.read_text())["optimizer"]
    assert (optimizer["lr"], optimizer["min_lr"]) == (8e-4, 8e-5)


def test_batch_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, "tiny")
    assert "global batch size 16 = micro batch 4 * data parallel 1 * 4 micro-batches" in text
    assert "tokens per step 16 * 256 = 4096" in text
    assert "layers built 2 + 2 = 4, num_layers 4" in text


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("", {}, 4),
        ("", {"WORLD_SIZE": "8"}, 8),
        ("--global-batch-size 32 --world-size 16", {"WORLD_SIZE": "8"}, 16),
        ("--global-batch-size 32 --world-size 16", {"WORLD_SIZE": "abc"}, 16),
        ("--fsdp-size 2", {}, 8),
    ],
)
def test_the_world_size_that_is_assumed(
    capsys: pytest.CaptureFixture[str], text: str, environment: dict[str, str], expected: int
) -> None:
    assert f"world size {expected} = " in dry_run(capsys, "tiny", text, environment)


def test_parameters_of_all_ranks_cover_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    for text, size in [
        ("", 1),
        ("--pipeline-model-parallel-size 2", 4),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zbv", 2),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
        ("--pipeline-model-parallel-size 4", 4),
    ]:
        config = load_config(["--config", str(CONFIGS / "parity.yaml"), *text.split()])
        shape, layout = ModelShape.from_config(config, 512), config.layout(size)
        groups = rank_groups(shape, layout)
        assert sum(group.parameters for group in groups) == shape.num_parameters == 722_048
        assert [rank for group in groups for rank in group.ranks] == list(range(size))
        printed = dry_run(capsys, "parity", f"{text} --world-size {size}")
        counts = re.findall(r"(\d+) parameters per rank", printed)
        assert [int(count) for count in counts] == [group.parameters for group in groups]


def test_counts_are_those_of_the_stages() -> None:
    text = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --fsdp-size 3"
    config = load_config(
        [
            "--config",
            str(CONFIGS / "gpt2_345m.yaml"),
            *text.split(),
            "--global-batch-size",
            "384",
        ]
    )
    shape, layout = ModelShape.from_config(config, 50257), config.layout(48)
    groups = rank_groups(shape, layout)
    for pp_rank, group in enumerate(groups):
        specs = shape.stage_parameters(layout, pp_rank)
        assert group.parameters == sum(spec.shard_numel(2, 1) for spec in specs)
        assert group.shard == sum(spec.shard_numel(2, 3) for spec in specs)
    # The output layer repeats the embedding on the last stage: 50304 / 2 rows of 1024.
    assert [group.tied_copy for group in groups] == [0] * 7 + [25152 * 1024]


def test_a_vocabulary_nobody_tells_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 16 "
        "--position-embedding-type rope --micro-batch-size 1 --train-iters 1 --lr 1 --dry-run"
    )
    assert main(argv.split(), {}) == 2
    assert "vocabulary size is unknown" in capsys.readouterr().err
    assert main([*argv.split(), "--tokenizer-type", "ByteTokenizer"], {}) == 0
    assert "vocabulary 257 padded to 384" in capsys.readouterr().out


def test_communication_is_compared_with_the_run_without_fp8(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The preset's gathers are halved; embedding and output layer are counted apart."""
    text = dry_run(capsys, "llama3_8b", "--world-size 8")
    rows = {
        line.split()[0]: line.split()[1:]
        for line in text.split("# communication\n")[1].splitlines()[1:]
    }
    assert rows["tp_linear_all_gather"][1] == "0.500"
    assert rows["fsdp_block_all_gather"][1] == rows["fsdp_other_all_gather"][1] == "1.000"
    wires = "--fp8-tp-comm all --fp8-param-gather --fp8-grad-reduce --world-size 8"
    text = dry_run(capsys, "llama3_8b", wires)
    rows = {
        line.split()[0]: line.split()[1:]
        for line in text.split("# communication\n")[1].splitlines()[1:]
    }
    # 32 blocks, gathered twice by each of 32 micro-batches: each of 4 FSDP ranks sends its quarter
    # to 3 others. Two norms a block are whole on both tensor-parallel ranks, in BF16.
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    norms = 32 * 2 * 4096 * 2 * 2
    assert int(rows["fsdp_block_all_gather"][0]) == 2 * 32 * 3 * (weights + norms)
    ratios = {kind: row[1] for kind, row in rows.items()}
    assert ratios["fsdp_block_all_gather"] == "0.500"
    assert ratios["fsdp_block_reduce_scatter"] == "0.254"
    assert ratios["tp_linear_reduce_scatter"] == "0.508"
    assert float(ratios["blocks"]) < float(ratios["all"]) < 0.5
    assert "nothing is sent between ranks" in dry_run(capsys, "parity")
