"""Megatron-core's checkpoints against Megatron-core itself, if it is installed."""

import os
import pickle
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megafp8.convert.megatron_legacy import LegacyTensors, legacy_folders
from megafp8.convert.safe_pickle import load_pickled
from megafp8.errors import CheckpointError
from tests.convert.converted import VOCAB, logits, run_convert
from tests.convert.megatron_models import STYLES, load_dist, save_dist, save_legacy
from tests.support.oracles import need
from tests.support.ranks import Ranks

need("megatron")


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """Both styles, saved by Megatron-core: tp 2 stacked with args, tp 1 by layer without."""
    root, found = tmp_path_factory.mktemp("megatron"), {}
    for style, tp, layered in (("llama", 2, False), ("gpt", 1, True)):
        folder = root / style
        results = ranks.run(
            save_dist,
            world_size=tp,
            folder=str(folder),
            style=style,
            tp=tp,
            layered=layered,
            with_args=not layered,
        )
        found[style] = (folder, results[0])
    return found


def our_logits(ranks: Ranks, folder: Path, tp: int = 1) -> Tensor:
    results = ranks.run(logits, world_size=tp, folder=str(folder), tp=tp, pp=1)
    assert results[0] is not None
    return results[0]


def agree(found: Tensor, wanted: Tensor) -> None:
    assert wanted.std() > 0.3
    assert (found - wanted[..., :VOCAB]).abs().max() < 1e-4


def gpt_yaml(path: Path) -> Path:
    """The gpt style as a configuration of ours."""
    args = STYLES["gpt"]
    model: dict[str, Any] = {
        "num_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "ffn_hidden_size": args["ffn_hidden_size"],
        "num_attention_heads": args["num_attention_heads"],
        "seq_length": args["seq_length"],
        "max_position_embeddings": args["max_position_embeddings"],
        "position_embedding_type": "learned_absolute",
    }
    training = {"micro_batch_size": 1, "train_iters": 1}
    data = {"vocab_size": VOCAB, "mock_data": True}
    sections = {"model": model, "data": data, "optimizer": {"lr": 0.1}, "training": training}
    path.write_text(yaml.safe_dump(sections))
    return path


def test_llama_of_two_ranks_with_args(
    ranks: Ranks, saved: dict[str, tuple[Path, Tensor]], tmp_path: Path
) -> None:
    folder, wanted = saved["llama"]
    run_convert("megatron", "megafp8", folder, tmp_path / "ours")
    agree(our_logits(ranks, tmp_path / "ours", tp=2), wanted)


def test_gpt_by_layer_without_args(
    ranks: Ranks, saved: dict[str, tuple[Path, Tensor]], tmp_path: Path
) -> None:
    folder, wanted = saved["gpt"]
    with pytest.raises(CheckpointError, match="holds no args; describe the model with --config"):
        run_convert("megatron", "megafp8", folder, tmp_path / "none")
    config = gpt_yaml(tmp_path / "gpt.yaml")
    run_convert("megatron", "megafp8", folder, tmp_path / "ours", config=config)
    agree(our_logits(ranks, tmp_path / "ours"), wanted)


@pytest.mark.parametrize(("style", "tp"), [("llama", 2), ("gpt", 1)])
def test_megatron_loads_ours(
    ranks: Ranks, saved: dict[str, tuple[Path, Tensor]], tmp_path: Path, style: str, tp: int
) -> None:
    folder, wanted = saved[style]
    config = gpt_yaml(tmp_path / "gpt.yaml") if style == "gpt" else None
    first = run_convert("megatron", "megafp8", folder, tmp_path / "ours", config=config)
    last = run_convert("megafp8", "megatron", tmp_path / "ours", tmp_path / "theirs")
    assert first[-1] == last[-1]
    assert (tmp_path / "theirs/latest_checkpointed_iteration.txt").read_text() == "release"
    path = str(tmp_path / "theirs/release")
    results = ranks.run(load_dist, world_size=tp, folder=path, style=style, tp=tp)
    agree(results[0][..., :VOCAB], wanted)


@pytest.mark.parametrize(("style", "tp", "pp"), [("llama", 2, 2), ("gpt", 1, 2)])
def test_pickled_files_of_each_rank(
    ranks: Ranks,
    saved: dict[str, tuple[Path, Tensor]],
    tmp_path: Path,
    style: str,
    tp: int,
    pp: int,
) -> None:
    folder = tmp_path / "legacy"
    ranks.run(save_legacy, world_size=tp * pp, folder=str(folder), style=style, tp=tp, pp=pp)
    run_convert("megatron", "megafp8", folder, tmp_path / "ours")
    agree(our_logits(ranks, tmp_path / "ours"), saved[style][1])
    doomed = sorted(folder.iterdir())[-1]
    (doomed / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=f"{doomed.name}/model_optim_rng.pt is missing"):
        run_convert("megatron", "megafp8", folder, tmp_path / "partial")
    assert not (tmp_path / "partial").exists()
    doomed.rmdir()
    with pytest.raises(CheckpointError, match="model_parallel_size"):
        run_convert("megatron", "megafp8", folder, tmp_path / "partial")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoder_first_pipeline_num_layers", 1),
        ("decoder_last_pipeline_num_layers", 1),
        ("pipeline_model_parallel_layout", "Et|t*2L"),
        ("account_for_loss_in_pipeline_split", True),
    ],
)
def test_uneven_stages_are_refused_by_their_setting(tmp_path: Path, name: str, value: Any) -> None:
    for stage in ("000", "001"):
        (tmp_path / f"mp_rank_00_{stage}").mkdir()
    args = {"pipeline_model_parallel_size": 2, name: value}
    model = {"swiglu": False, "num_layers": 3}
    with pytest.raises(CheckpointError, match=re.escape(f"args.{name} is {value!r}: its pipeline")):
        LegacyTensors(tmp_path, legacy_folders(tmp_path), args, model)
    args[name] = None
    with pytest.raises(CheckpointError, match=r"model_optim_rng.pt is missing"):
        LegacyTensors(tmp_path, legacy_folders(tmp_path), args, model)


class Run:
    """A pickle that runs a command when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch hostile_was_here",))


def test_a_hostile_pickle_is_refused(
    saved: dict[str, tuple[Path, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"args": Run()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="posix.system, which is no data"):
        load_pickled(tmp_path / "evil.pt")
    folder = tmp_path / "dist"
    shutil.copytree(saved["llama"][0], folder)
    shutil.copy(tmp_path / "evil.pt", folder / "common.pt")
    with pytest.raises(CheckpointError, match="posix.system"):
        run_convert("megatron", "megafp8", folder, tmp_path / "ours")
    shutil.copy(saved["llama"][0] / "common.pt", folder / "common.pt")
    (folder / ".metadata").write_bytes(pickle.dumps(Run()))
    with pytest.raises(CheckpointError, match="posix.system"):
        run_convert("megatron", "megafp8", folder, tmp_path / "ours")
    assert not (tmp_path / "hostile_was_here").exists() and not (tmp_path / "ours").exists()


def test_settings_that_are_not_built_are_refused(
    saved: dict[str, tuple[Path, Tensor]], tmp_path: Path
) -> None:
    folder = tmp_path / "dist"
    shutil.copytree(saved["llama"][0], folder)
    for name, value in (("num_experts", 8), ("squared_relu", True), ("mtp_num_layers", 1)):
        torch.save({"args": Namespace(**{**STYLES["llama"], name: value})}, folder / "common.pt")
        with pytest.raises(CheckpointError, match=f"args.{name} is {value}; allowed"):
            run_convert("megatron", "megafp8", folder, tmp_path / "ours")
    args = {k: v for k, v in STYLES["llama"].items() if k != "hidden_size"}
    torch.save({"args": Namespace(**args)}, folder / "common.pt")
    with pytest.raises(CheckpointError, match="args lack hidden_size"):
        run_convert("megatron", "megafp8", folder, tmp_path / "ours")
