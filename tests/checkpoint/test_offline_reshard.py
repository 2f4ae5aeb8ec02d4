"""The tool that changes a checkpoint's layout: nothing lost, or nothing written."""

import dataclasses
import io
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import megafp8.checkpoint.writer as writer
from megafp8.checkpoint import FORMAT_VERSION, find_checkpoint, load_tensors, read_record
from megafp8.checkpoint.files import is_being_read
from megafp8.checkpoint.inspect import inspect_checkpoint
from megafp8.checkpoint.inspect_text import inspection_text
from megafp8.checkpoint.offline import write_streaming
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint, target_run
from megafp8.checkpoint.tensors import dtype_of
from megafp8.convert.run import ConvertOptions, convert
from megafp8.errors import CheckpointError, ConfigurationError
from tests.checkpoint.made import copy_of, flip_a_bit, make_source, value

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "reshard_checkpoint.py"
SAMPLE = Path(__file__).parent / "samples" / "version_1" / "iter_0000003"
LAYOUTS = {
    "1": TargetLayout(),
    "tp2": TargetLayout(tensor_model_parallel_size=2),
    "pp4": TargetLayout(pipeline_model_parallel_size=4),
    "fsdp4": TargetLayout(fsdp_size=4),
    "hsdp": TargetLayout(fsdp_size=2, replicate_size=2),
    "tp2 fsdp8": TargetLayout(tensor_model_parallel_size=2, fsdp_size=8),
    "pp2 vpp2": TargetLayout(
        pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1
    ),
    "zbv": TargetLayout(pipeline_model_parallel_size=2, pipeline_schedule="zbv"),
    "many": TargetLayout(2, 4, 2, 2),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("tied"), tied=True)


def assert_same_tensors(left: Path, right: Path, but: str = "fp8_local.") -> None:
    one, other = TensorReader.open(left), TensorReader.open(right)
    assert one.names == other.names
    for name in one.names:
        if not name.startswith(but):
            a, b = one.read(name), other.read(name)
            assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back_is_bit_equal(source: Path, tmp_path: Path, name: str) -> None:
    there_and_back(source, tmp_path, LAYOUTS[name])


@pytest.mark.parametrize("name", ["pp4", "zbv"])
def test_tied_embeddings_there_and_back(tied: Path, tmp_path: Path, name: str) -> None:
    there_and_back(tied, tmp_path, LAYOUTS[name])


def there_and_back(source: Path, tmp_path: Path, target: TargetLayout) -> None:
    there = reshard_checkpoint(source, tmp_path / "there", target)
    assert find_checkpoint(tmp_path / "there") == there.path
    record, before = read_record(there.path), read_record(source)
    shards = sorted(file for file in record.files if file != ".metadata")
    assert len(shards) <= target.world_size and (len(shards) > 1) == (target.world_size > 1)
    assert set(shards) <= {f"__{rank}_0.distcp" for rank in range(target.world_size)}
    assert (record.iteration, record.state, record.data_position) == (
        before.iteration,
        before.state,
        before.data_position,
    )
    assert record.layout["world_size"] == target.world_size
    assert_same_tensors(source, there.path)
    back = reshard_checkpoint(tmp_path / "there", tmp_path / "back", TargetLayout(2, 2))
    assert_same_tensors(source, back.path)
    changed = [row for row in there.tensors if row.rule != "kept"]
    assert all(row.name.startswith("fp8_local.") for row in changed)
    assert all(row.crc_before == row.crc_after for row in there.tensors if row.rule == "kept")
    assert len(there.tensors) == len(record.tensors)
    # DCP itself reads it, without this package's reader.
    plain = {
        name: torch.zeros(entry.shape, dtype=dtype_of(entry))
        for name, entry in record.tensors.items()
    }
    assert load_tensors(there.path, plain) == []
    for entry, tensor in plain.items():
        if not entry.startswith("fp8_local."):
            assert torch.equal(tensor, value(entry, record.tensors[entry])), entry


def test_the_same_call_gives_the_same_files(source: Path, tmp_path: Path) -> None:
    target = LAYOUTS["tp2 fsdp8"]
    paths = [reshard_checkpoint(source, tmp_path / side, target).path for side in "ab"]
    first, second = (read_record(path) for path in paths)
    shards = [name for name in first.files if name != ".metadata"]
    assert [first.files[n] for n in shards] == [second.files[n] for n in shards]


def test_what_was_read_is_carried_over_and_shown(tmp_path: Path) -> None:
    """The run that goes on at the new layout compares its corpus with it."""
    source = make_source(tmp_path, tied=False)
    corpus = {"path": "/data/c", "documents": 3, "tokens": 40, "sha256": "ab" * 32}
    record = read_record(source)
    read = {"corpora": {"data_path": corpus}, "files": {}, "backend": "native"}
    record = dataclasses.replace(record, state={**record.state, "fingerprint": read})
    (source / "megafp8.json").write_text(record.to_json())
    path = reshard_checkpoint(source, tmp_path / "b", LAYOUTS["tp2"]).path
    assert read_record(path).state["fingerprint"] == read
    screen = Console(width=140, record=True, file=io.StringIO())
    screen.print(inspection_text(inspect_checkpoint(path)))
    assert "/data/c (3 documents, 40 tokens, sha256 abababab)" in screen.export_text()


def test_scale_state_of_ranks_moves_by_rule(source: Path, tmp_path: Path) -> None:
    report = reshard_checkpoint(source, tmp_path, TargetLayout(fsdp_size=4))
    row = next(r for r in report.tensors if r.name.endswith("linear_qkv.grad_output.amax_history"))
    assert row.rule == "dp 1 -> 4 copied, tp 2 -> 1 merged by element-wise maximum"
    assert (row.before.shape, row.after.shape) == ((1, 2, 8), (4, 1, 8))
    wanted = value(row.name, row.before).amax(1, keepdim=True).expand(4, 1, 8)
    assert torch.equal(TensorReader.open(report.path).read(row.name), wanted)


def test_other_stages_keep_each_layer_s_own_scales(source: Path, tmp_path: Path) -> None:
    """Layers have global numbers: pp 2 -> 4 renames nothing, also of the fused linears."""
    report = reshard_checkpoint(source, tmp_path, TargetLayout(2, 4))
    assert {row.rule for row in report.tensors} == {"kept"}
    assert_same_tensors(source, report.path, but="nothing")
    name = "fp8_local.decoder.layers.3.self_attention.linear_qkv.grad_output.scale"
    assert [row.crc_before == row.crc_after for row in report.tensors if row.name == name] == [True]


def test_a_folder_that_has_newer_ones(source: Path, tmp_path: Path) -> None:
    """`latest` then names the new one, and the report says what it named before."""
    copy_of(source, tmp_path)
    (tmp_path / source.name).rename(tmp_path / "iter_0000020")
    (tmp_path / "latest").write_text("iter_0000020\n")
    report = reshard_checkpoint(source, tmp_path, TargetLayout())
    assert find_checkpoint(tmp_path) == report.path
    (note,) = report.notes[-1:]
    assert note == f"{tmp_path / 'latest'} named iter_0000020 before, it names {source.name} now"


def test_a_checkpoint_of_format_version_1(tmp_path: Path) -> None:
    """The tools read it as a run does; what they write is of the newest form."""
    assert inspect_checkpoint(SAMPLE).problems == inspect_checkpoint(SAMPLE).flaws == []
    assert read_record(SAMPLE).format_version == 1
    report = reshard_checkpoint(SAMPLE, tmp_path / "new", TargetLayout(fsdp_size=2))
    assert read_record(report.path).format_version == FORMAT_VERSION
    assert_same_tensors(SAMPLE, report.path)
    lines = [
        convert(ConvertOptions("megafp8", "hf", path, tmp_path / name))[-1]
        for name, path in (("old", SAMPLE), ("new hf", report.path))
    ]
    assert lines[0] == lines[1] and lines[0].startswith("verified: all ")


def test_it_is_not_deleted_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = TensorReader.read

    def read(self: TensorReader, name: str) -> Tensor:
        seen.append(is_being_read(source))
        return original(self, name)

    monkeypatch.setattr(TensorReader, "read", read)
    reshard_checkpoint(source, tmp_path / "new", TargetLayout())
    count = len(seen)
    inspect_checkpoint(source)
    convert(ConvertOptions("megafp8", "hf", source, tmp_path / "hf"))
    assert count < len(seen) and all(seen) and not is_being_read(source)


def by_hand(name: str) -> Tensor:
    """Scale state whose numbers tell layer and linear: 10 * layer + 1 for fused q, k, v; 2 for fc1.

    Of two tensor-parallel ranks the second has seen more in every other iteration.
    """
    number = 10.0 * int(name.split(".")[3]) + (1.0 if "linear_qkv" in name else 2.0)
    if name.startswith("fp8."):
        return torch.tensor(number) if name.endswith("scale") else number + torch.arange(8.0)
    if name.endswith("scale"):
        return torch.tensor([[number, number - 0.5]])
    first = number + torch.arange(8.0)
    return torch.stack((first, first + torch.tensor([1.0, -1.0] * 4)))[None]


@pytest.mark.parametrize("name", ["1", "pp4", "pp2 vpp2", "zbv"])
def test_scales_stay_with_their_layers_and_fused_linears(
    source: Path, tmp_path: Path, name: str
) -> None:
    """Stages number their blocks from 0; names in a checkpoint count the model's layers."""
    reader = TensorReader.open(source)
    chosen = [
        n for n in reader.names if n.startswith("fp8") and ("linear_qkv" in n or "linear_fc1" in n)
    ]
    assert len(chosen) == 4 * 2 * 3 * 2

    def read(wanted: str) -> Tensor:
        return by_hand(wanted) if wanted in chosen else reader.read(wanted)

    holdings = [dict.fromkeys(reader.record.tensors)]
    made, _ = write_streaming(tmp_path / "made", reader.record, holdings, read)
    moved = TensorReader.open(reshard_checkpoint(made, tmp_path / "new", LAYOUTS[name]).path)
    for layer in range(4):
        for linear, digit in (("self_attention.linear_qkv", 1.0), ("mlp.linear_fc1", 2.0)):
            number, stem = 10.0 * layer + digit, f"decoder.layers.{layer}.{linear}"
            assert moved.read(f"fp8.{stem}.input.scale") == number
            window = moved.read(f"fp8.{stem}.input.amax_history").tolist()
            assert window == [number + step for step in range(8)]
            # Merged from two tensor-parallel ranks: 0+1, 1+0, 2+1, 3+0 ... and the scale of that.
            own = f"fp8_local.{stem}.grad_output"
            merged = [number + step + (step + 1) % 2 for step in range(8)]
            scale = torch.tensor(57344.0) / max(merged)
            assert moved.read(f"{own}.scale").tolist() == [[float(scale)]]
            assert moved.read(f"{own}.amax_history").tolist() == [[merged]]


# ------------------------------------------------------------------------------ refusals


def run_tool(*arguments: str | Path, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit_files() -> None:
        assert limit is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        preexec_fn=None if limit is None else limit_files,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_tool_reports_every_tensor(source: Path, tmp_path: Path) -> None:
    done = run_tool("--load", source.parent, "--save", tmp_path / "new", "--fsdp-size", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name in read_record(source).tensors:
        assert sum(line.split()[0] == name for line in lines) == 1, name
    assert "none lost" in lines[-2] and "2 ranks: tp 1 x pp 1" in lines[-1]
    with pytest.raises(CheckpointError, match="is there already"):
        reshard_checkpoint(source, tmp_path / "new", TargetLayout())
    assert_same_tensors(source, tmp_path / "new" / source.name)


def test_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    done = run_tool("--load", source, "--save", tmp_path / "new" / "x", limit=60_000)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "could not be written" in done.stderr and "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (TargetLayout(tensor_model_parallel_size=3), "tensor-model-parallel-size 1, 2"),
        (TargetLayout(pipeline_model_parallel_size=3), "pipeline-model-parallel-size 1, 2, 4"),
        (
            TargetLayout(fsdp_size=3),
            "sharded along the hidden size; allowed with the other sizes as they are (of 1 to 64): "
            "--fsdp-size 1, 2, 4, 8, 16, 32",
        ),
        (
            TargetLayout(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2),
            "interleaved needs at least 2",
        ),
    ],
)
def test_impossible_layouts_name_what_is_possible(
    source: Path, tmp_path: Path, target: TargetLayout, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        reshard_checkpoint(source, tmp_path / "new", target)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["__0_0.distcp", "__3_0.distcp", ".metadata"])
def test_damage_is_found_before_anything_is_written(
    source: Path, tmp_path: Path, file: str
) -> None:
    damaged = copy_of(source, tmp_path)
    flip_a_bit(damaged / file)
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        reshard_checkpoint(damaged, tmp_path / "new", TargetLayout())
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize("file", ["__1_0.distcp", "megafp8.json"])
def test_partial_checkpoints_are_refused(source: Path, tmp_path: Path, file: str) -> None:
    partial = copy_of(source, tmp_path)
    (partial / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        reshard_checkpoint(partial, tmp_path / "new", TargetLayout())
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": {}}, "holds no vocab_size, so the model's sizes are unknown"),
        ({"config": {"model": {"nope": 1}}}, "holds an unusable config: "),
    ],
)
def test_a_record_without_what_is_needed_is_named(
    source: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    record = dataclasses.replace(read_record(source), **change)
    good = copy_of(source, tmp_path)
    bad = good.with_name("iter_0000009")
    with pytest.raises(CheckpointError) as caught:
        target_run(record, TargetLayout(), bad)
    assert str(caught.value).startswith(f"{bad}/megafp8.json {message}")
    assert str(caught.value).endswith(f"; use --load {good} instead")


def test_a_lost_weight_is_refused(source: Path, tmp_path: Path) -> None:
    record = read_record(source)
    reader = TensorReader.open(source)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    rest = {key: entry for key, entry in record.tensors.items() if key != name}
    record = dataclasses.replace(record, tensors=rest)
    holdings = [dict.fromkeys(rest)]
    path, _ = write_streaming(tmp_path / "a", record, holdings, reader.read)
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        reshard_checkpoint(path, tmp_path / "new", TargetLayout())


def test_a_value_lost_on_the_way_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact = writer.compact

    def lossy(part: Tensor) -> Tensor:
        part = compact(part).clone()
        if part.shape == (32,):
            part[-1] = 0.0
        return part

    monkeypatch.setattr(writer, "compact", lossy)
    with pytest.raises(CheckpointError, match="not conserved: .*layernorm.weight"):
        reshard_checkpoint(source, tmp_path / "new", TargetLayout())
    assert list(tmp_path.iterdir()) == []
