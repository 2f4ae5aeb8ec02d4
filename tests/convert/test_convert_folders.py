"""Folders that are no whole model of Hugging Face, or more than one: said by names, none made."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megafp8.checkpoint.find import find_checkpoint
from megafp8.checkpoint.kinds import found_instead
from megafp8.errors import CheckpointError
from tests.convert.converted import refused, run_convert
from tests.convert.hand_made import make_folder


def add_adapter(folder: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.ones(4, 160)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def test_an_adapter_beside_the_weights(tmp_path: Path) -> None:
    """transformers would attach it: another model than the one that was converted."""
    folder = make_folder(tmp_path / "in")
    add_adapter(folder)
    refused(folder, "holds adapter_config.json, adapter_model.safetensors beside the weights")
    (folder / "adapter_model.safetensors").unlink()
    refused(folder, "it holds adapter_config.json beside the weights, .* merge the two, or")
    (folder / "adapter_config.json").unlink()
    run_convert("hf", "hf", folder, tmp_path / "out")


@pytest.mark.parametrize("config", [True, False])
def test_an_adapter_alone(tmp_path: Path, config: bool) -> None:
    folder = make_folder(tmp_path / "in")
    add_adapter(folder)
    (folder / "model.safetensors").unlink()
    if not config:
        (folder / "config.json").unlink()
    words = "it is an adapter .* without its base model; merge the two, save the whole"
    refused(folder, words)
    with pytest.raises(CheckpointError, match=words):
        find_checkpoint(folder)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", shards=2)
    names = ["config.json", "model-00002-of-00002.safetensors", "tokenizer.json"]
    (folder / "tokenizer.json").write_text("{}")
    for count, name in enumerate(names, 1):
        (folder / name).unlink()
        (folder / name).symlink_to("../../blobs/none")
        more = f", and so are {count - 1} more" if count > 1 else ""
        refused(folder, rf"in: config.json is a link to a file .* \(../../blobs/none\){more}: down")
    (folder / "config.json").unlink()
    (folder / "config.json").write_text((make_folder(tmp_path / "x") / "config.json").read_text())
    refused(folder, "in: model-00002-of-00002.safetensors is a link to a file that is missing")
    single = make_folder(tmp_path / "single")
    (single / "model.safetensors").rename(tmp_path / "blob")
    (single / "model.safetensors").symlink_to(tmp_path / "blob")
    run_convert("hf", "hf", single, tmp_path / "done")  # as a complete download is
    (tmp_path / "blob").unlink()
    refused(single, "single: model.safetensors is a link to a file that is missing")


def test_pointers_of_git_lfs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    (folder / "model.safetensors").write_text(text)
    refused(folder, "in: model.safetensors: a pointer of Git LFS in place of the file; run git lfs")
    (folder / "tokenizer.json").write_text(text)
    refused(folder, "in: model.safetensors, tokenizer.json: a pointer of Git LFS")


def test_other_files_are_said_to_be_left_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", shards=2)
    for name in ("consolidated.safetensors", "README.md", ".gitattributes", "merges.txt"):
        (folder / name).write_text("")
    lines = run_convert("hf", "hf", folder, tmp_path / "out")
    assert "note: 2 other files are left out: README.md, consolidated.safetensors" in lines


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "found no weights$"),
        (
            ["model-00001-of-00002.safetensors"],
            "of-00002.safetensors: copy .*.index.json",
        ),
        (["consolidated.safetensors"], "consolidated.safetensors: rename it to model.safetensors"),
        (
            ["consolidated.safetensors", "params.json"],
            "it is a model in Mistral's own files",
        ),
        (["pytorch_model.bin"], "found pytorch_model.bin; pickled weights are not read"),
        (
            ["a.pth", "b.pt", "c.bin", "d.ckpt"],
            r"found a.pth, b.pt, c.bin and 1 more: it is a",
        ),
        (["model-Q4_K_M.gguf"], "found model-Q4_K_M.gguf: it is a model for llama.cpp"),
        (["tf_model.h5"], "found tf_model.h5, another format: save it as safetensors"),
    ],
)
def test_weights_of_other_names(tmp_path: Path, files: list[str], words: str) -> None:
    folder = make_folder(tmp_path / "in")
    (folder / "model.safetensors").unlink()
    for name in files:
        (folder / name).write_bytes(b"")
    refused(folder, f"holds neither model.safetensors nor model.safetensors.index.json, .*{words}")


def test_all_missing_shards_are_named_at_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", shards=3)
    for number in (1, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()
    refused(folder, "names files that are missing: model-00001-of-00003.*, model-00003-of-00003")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["global_step5/mp_rank_00_model_states.pt", "latest"], "DeepSpeed; its zero_to_fp32.py"),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
        (["model.nemo"], "NeMo"),
        (["model_config.yaml", "model_weights/common"], "NeMo"),
        (["weights/common.pt", "context/model.yaml"], "NeMo"),
        (["checkpoint_metadata.json", "model_config.json"], "nanotron"),
        (["epoch=1-step=10.ckpt"], "Lightning"),
        (["_CHECKPOINT_METADATA", "params/x"], "Orbax"),
        (["consolidated.00.pth", "params.json", "tokenizer.model"], "Meta's own files"),
        (["m.gguf"], "GGUF"),
        ([".metadata", "__0_0.distcp"], "FSDP, torchtitan.*copy it again, whole, or write it"),
        (["pytorch_model_fsdp_0/.metadata"], "Accelerate's FSDP"),
    ],
)
@pytest.mark.parametrize("wanted", ["megafp8", "hf", "megatron"])
def test_folders_of_programs_that_are_not_converted(
    tmp_path: Path, files: list[str], words: str, wanted: str
) -> None:
    folder = tmp_path / "in"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("global_step5" if name == "latest" else "")
    with pytest.raises(CheckpointError, match=f": it is .*{words}") as caught:
        run_convert(wanted, "hf", folder, tmp_path / "out")
    assert "tools/convert_checkpoint.py" not in str(caught.value)
    if wanted == "megafp8":
        with pytest.raises(CheckpointError, match=f": it is .*{words}"):
            find_checkpoint(folder)


def test_the_cache_of_downloaded_models(tmp_path: Path) -> None:
    """Its roots name the folder that holds the model, whose files are links to blobs."""
    root = tmp_path / "hub" / "models--org--name"
    model = make_folder(root / "snapshots" / "1f2e", parents=True)
    (root / "blobs").mkdir()
    for number, path in enumerate(list(model.iterdir())):
        path.rename(root / f"blobs/{number}")
        path.symlink_to(f"../../blobs/{number}")
    for given in (root, tmp_path / "hub", root / "snapshots"):
        refused(given, f"{given} holds no config.json; folders in it do, .*: {model}$")
    run_convert("hf", "hf", model, tmp_path / "out")
    with pytest.raises(CheckpointError, match=f"convert it: .* --from hf --load {model} --to"):
        find_checkpoint(root)
    assert found_instead(tmp_path) == ""
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"
