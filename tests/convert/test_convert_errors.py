"""What a conversion refuses: one line with the name, and nothing under the target's name."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megafp8.checkpoint.reader import TensorReader
from megafp8.command.ending import run_tool
from megafp8.convert import run, safetensors_files
from megafp8.convert.items import Item
from megafp8.convert.native import open_native
from megafp8.errors import CheckpointError
from tests.convert.converted import refused, run_convert
from tests.convert.hand_made import HIDDEN, VOCAB, make_folder, weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("target", "dtype"), [("megafp8", "keep"), ("hf", "bf16")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float, target: str, dtype: str) -> None:
    tensors = weights()
    tensors["model.norm.weight"][3:5] = value
    folder = make_folder(tmp_path / "in", tensors)
    refused(folder, "final_layernorm.weight holds 2 values that are not", target, dtype=dtype)


def test_weights_of_several_dtypes(tmp_path: Path) -> None:
    """fp32 holds all of them; a head of another dtype is still compared with a tied embedding."""
    tensors = {name: value.bfloat16() for name, value in weights().items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()
    tensors["model.layers.1.input_layernorm.weight"] = torch.ones(HIDDEN).half()
    folder = make_folder(tmp_path / "in", tensors, tie_word_embeddings=True)
    lines = run_convert("hf", "hf", folder, tmp_path / "whole")
    assert "note: weights are bfloat16, float16, float32: float32 holds them all" in lines
    assert any(line.startswith("note: lm_head.weight is the embedding") for line in lines)
    back = load_file(tmp_path / "whole/model.safetensors")
    assert all(torch.equal(value, tensors[name].float()) for name, value in back.items())
    tensors["lm_head.weight"][7, 7] += 1
    refused(make_folder(tmp_path / "other", tensors, tie_word_embeddings=True), "but lm_head")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:50].clone()
    refused(make_folder(tmp_path / "short", tensors, tie_word_embeddings=True), "but lm_head")


def test_a_folder_inside_the_source_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    with pytest.raises(CheckpointError, match="--save .*/in/out lies inside the source"):
        run_convert("hf", "megafp8", folder, folder / "out")
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(CheckpointError, match="lies inside the source"):
        run_convert("hf", "megafp8", folder, link / "deep" / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="loop.*: .*; nothing was left"):
        run_convert("hf", "megafp8", folder, tmp_path / "loop" / "out")


def test_a_folder_of_another_program_is_named(tmp_path: Path) -> None:
    hf = make_folder(tmp_path / "runs" / "hf", parents=True)
    ours = tmp_path / "runs" / "a" / "checkpoints"
    run_convert("hf", "megafp8", hf, ours)
    for source, folder, words in (
        ("megafp8", hf, "it is a model of Hugging Face; convert it: tools/.* --from hf --load"),
        ("megatron", hf, "it is a model of Hugging Face"),
        ("hf", ours, "it is a checkpoint of megafp8; convert it: tools/.* --from megafp8 --load"),
        ("hf", ours / "iter_0000000", "it is a checkpoint of megafp8"),
        ("megatron", ours, "it is a checkpoint of megafp8"),
        ("megafp8", tmp_path / "runs", f"folders in it do, give one of them: {ours}"),
        ("hf", tmp_path / "runs", f"folders in it do, give one of them: {hf}"),
        ("hf", hf / "config.json", "it is a file, expected a folder"),
        ("megafp8", tmp_path / "none", "none holds no checkpoint: no such folder"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            run_convert(source, "hf", folder, tmp_path / "out")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("lm_head.weight", None, "tie_word_embeddings is false and lm_head.weight is missing"),
        ("model.layers.1.mlp.up_proj.weight", None, "1 missing: model.layers.1.mlp.up_proj"),
        ("model.layers.0.mlp.router.weight", (4, 4), "1 unknown: model.layers.0.mlp.router"),
        ("model.norm.weight", (HIDDEN + 1,), "model.norm.weight has shape .*161.*, expected .*160"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, match: str
) -> None:
    tensors = weights()
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    refused(make_folder(tmp_path / "in", tensors), match)


def test_shards_and_their_index(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", shards=3)
    index = folder / "model.safetensors.index.json"
    whole = index.read_text()
    names = json.loads(whole)["weight_map"]
    index.write_text(json.dumps({"weight_map": {k: names[k] for k in list(names)[1:]}}))
    refused(folder, f"does not name {next(iter(names))}")
    other = {**names, "model.norm.weight": "model-00001-of-00003.safetensors"}
    index.write_text(json.dumps({"weight_map": other}))
    refused(folder, "lacks model.norm.weight, which|does not name model.norm.weight")
    index.write_text(json.dumps({"weight_map": {**names, "x": "../../etc/passwd"}}))
    refused(folder, "x is in '../../etc/passwd', no name of a file")
    index.write_text(json.dumps({"weight_map": {**names, "x": "a" * 5000}}))
    refused(folder, "x is in 'a{59}, no name of a file")
    twice = folder / "model-00003-of-00003.safetensors"
    kept = twice.read_bytes()
    save_file(load_file(twice) | {"model.norm.weight": weights()["model.norm.weight"]}, twice)
    index.write_text(whole)
    refused(folder, "does not name model.norm.weight of model-00003-of-00003")
    twice.write_bytes(kept)
    index.write_text("{")
    refused(folder, "index.json is not valid JSON")
    index.write_text(whole)
    shard = folder / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    refused(folder, "model-00002-of-00003.safetensors is no whole safetensors file")
    shard.write_bytes(b"\xff" * 40)
    refused(folder, "model-00002-of-00003.safetensors is no whole safetensors file")
    shard.unlink()
    refused(folder, "names files that are missing: model-00002-of-00003.safetensors")
    index.unlink()
    refused(folder, "holds neither model.safetensors nor model.safetensors.index.json")


def test_weights_in_one_file_and_in_shards_are_refused(tmp_path: Path) -> None:
    """transformers would read the file, other programs the shards: two models in one folder."""
    folder = make_folder(tmp_path / "in", shards=2)
    other = {name: value + 1 for name, value in weights().items()}
    save_file(other, folder / "model.safetensors")
    refused(
        folder,
        "holds both model.safetensors and model.safetensors.index.json, which names "
        "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors; allowed: one of them",
    )
    # An index of that one file says nothing else than the file.
    index = {"weight_map": dict.fromkeys(other, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    run_convert("hf", "hf", folder, tmp_path / "out")
    assert torch.equal(
        load_file(tmp_path / "out/model.safetensors")["model.norm.weight"],
        other["model.norm.weight"],
    )


def test_no_memory_for_a_tensor_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "in")
    # torch's own words for it, more than any machine has.
    monkeypatch.setattr(run, "_write", lambda *args: torch.empty(2**55, dtype=torch.uint8))
    refused(folder, f"in: not enough memory for one of its tensors .*{2**55} bytes.*was left$")
    monkeypatch.setattr(run, "_write", lambda *args: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        run_convert("hf", "megafp8", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_foreign_names_are_printed_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> list[str]:
        raise CheckpointError("in: 1 unknown: a\nb\x1b[31m\udcff")

    assert run_tool(refuse) == 2
    assert capsys.readouterr().err == "error: in: 1 unknown: a b\\x1b[31m\\udcff\n"
    assert run_tool(lambda: ["converted in/\udcff", "verified"]) == 0
    assert capsys.readouterr().out == "converted in/\\udcff\nverified\n"


def test_equal_head_of_a_tied_model_is_no_second_tensor(tmp_path: Path) -> None:
    tensors = weights()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = make_folder(tmp_path / "in", tensors, tie_word_embeddings=True)
    run_convert("hf", "hf", folder, tmp_path / "out")
    back = load_file(tmp_path / "out/model.safetensors")
    assert back.keys() == tensors.keys() - {"lm_head.weight"}


def test_sizes_that_transformers_refuses_of_a_llama_are_written_as_a_mistral(
    tmp_path: Path,
) -> None:
    """Same tensors, same arithmetic; LlamaConfig wants the hidden size divisible by the heads."""
    tensors = weights()
    for layer in range(2):
        for part, rows in (("q", 120), ("k", 40), ("v", 40)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            tensors[name] = tensors[name][:rows].clone()
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        tensors[name] = tensors[name][:, :120].clone()
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    folder = make_folder(tmp_path / "in", tensors, **heads)
    run_convert("hf", "hf", folder, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", None)
    back = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(value, tensors[name]) for name, value in back.items())


def test_an_untied_model_with_equal_tables_stays_untied(tmp_path: Path) -> None:
    tensors = weights()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = make_folder(tmp_path / "in", tensors)
    run_convert("hf", "megafp8", folder, tmp_path / "ours")
    run_convert("megafp8", "hf", tmp_path / "ours", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == tensors.keys()


def test_an_existing_folder_is_never_touched(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    (tmp_path / "out").mkdir()
    refused(folder, "out exists; give a new folder, nothing is overwritten")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("target", ["megafp8", "hf", "megatron"])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    folder = make_folder(tmp_path / "in")
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    refused(folder, "No space left on device", target=target)
    assert calls


def test_values_beyond_a_dtype_are_refused(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.norm.weight"][3] = 1e6
    folder = make_folder(tmp_path / "in", tensors)
    refused(folder, "beyond the range of torch.float16", target="hf", dtype="fp16")
    refused(folder, "--dtype bf16: megafp8 stores fp32 masters", dtype="bf16")


def test_a_write_that_changes_a_value_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "in")
    original = Item.write

    def flip(self: Item, put: Callable[[str, torch.Tensor], None]) -> None:
        norm = "model.norm.weight" in self.entries
        original(self, lambda name, tensor: put(name, tensor + 1 if norm else tensor))

    monkeypatch.setattr(Item, "write", flip)
    refused(folder, "1 of 15 parameters differ: decoder.final_layernorm.weight", target="hf")


def test_padding_is_zero_on_import_and_stripped_on_export(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    run_convert("hf", "megafp8", folder, tmp_path / "ours", make_vocab_size_divisible_by=64)
    view = open_native(tmp_path / "ours")
    table = view.read("embedding.word_embeddings.weight")
    assert table.shape == (128, HIDDEN) and not table[VOCAB:].any() and table[:VOCAB].any()
    again = run_convert(
        "megafp8", "megafp8", tmp_path / "ours", tmp_path / "less", make_vocab_size_divisible_by=4
    )
    assert "with" not in again[-2].rpartition("parameters")[2]
    run_convert("megafp8", "hf", tmp_path / "less", tmp_path / "out")
    back, source = load_file(tmp_path / "out/model.safetensors"), weights()
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], source[name]) for name in source)


def anonymous_memory() -> int:
    """Bytes of this process that are no pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = weights()
    for layer in range(2, 100):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace("layers.1.", f"layers.{layer}.")] = tensors[name].clone()
    make_folder(tmp_path / "in", tensors, num_hidden_layers=100)
    total = sum(value.nbytes for value in tensors.values())
    del tensors
    peaks: list[int] = []
    for owner in (safetensors_files.SafetensorsFolder, TensorReader):
        read = owner.read

        def sampled(self: Any, name: str, read: Any = read) -> torch.Tensor:
            peaks.append(anonymous_memory())
            return read(self, name)

        monkeypatch.setattr(owner, "read", sampled)
    before = anonymous_memory()
    run_convert("hf", "megafp8", tmp_path / "in", tmp_path / "ours")
    run_convert("megafp8", "hf", tmp_path / "ours", tmp_path / "out")
    assert total > 60e6 and len(peaks) > 2000
    assert max(peaks) - before < total / 3


def test_the_tool_s_exit_code(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", hidden_act="relu")
    flags = ("--from", "hf", "--to", "hf", "--load", str(folder), "--save", str(tmp_path / "out"))
    command = [sys.executable, str(ROOT / "tools/convert_checkpoint.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "hidden_act is 'relu'; allowed: silu" in line


def test_bin_files_are_named_in_the_refusal(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "found pytorch_model.bin; pickled weights are not read")
    save_file({"x": torch.ones(2, dtype=torch.int64)}, folder / "model.safetensors")
    refused(folder, "x is I64, allowed F32, BF16, F16$")
