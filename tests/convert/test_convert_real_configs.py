"""Configurations of published models: converted, or refused for what changes the function."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.converted import all_logits, refused, run_convert, tokens
from tests.convert.real_configs import CONVERTED, REFUSED, Config, weights_of
from tests.support.oracles import need
from tests.support.ranks import Ranks


def make(folder: Path, config: Config) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights_of(config), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> the folder of ours, beside `hf`, what it was made from."""
    found = {}
    for name, config in CONVERTED.items():
        root = tmp_path_factory.mktemp("real")
        lines = run_convert("hf", "megafp8", make(root / "hf", config), root / "ours")
        assert any(line.startswith("verified: all") for line in lines), name
        found[name] = root / "ours"
    return found


def test_they_come_back_bit_equal(converted: dict[str, Path], tmp_path: Path) -> None:
    for number, (name, ours) in enumerate(converted.items()):
        back = tmp_path / str(number)
        run_convert("megafp8", "hf", ours, back)
        before, after = weights_of(CONVERTED[name]), load_file(back / "model.safetensors")
        assert before.keys() == after.keys(), name
        assert all(torch.equal(value, after[key]) for key, value in before.items()), name


def transformers_logits(folder: Path, transformers: Any) -> torch.Tensor:
    """fp32 [b, s, vocab] as transformers computes them from the folder."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        return model.eval()(tokens()).logits


def test_logits_are_the_models(ranks: Ranks, converted: dict[str, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        need("transformers")
        import transformers

    folders = {name: str(ours) for name, ours in converted.items()}
    (found,) = ranks.run(all_logits, world_size=1, folders=folders, tp=1, pp=1)
    for name, ours in converted.items():
        expected = transformers_logits(ours.parent / "hf", transformers)
        assert expected.std() > 0.5, name
        assert (found[name] - expected).abs().max() < 1e-4, name


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_function_is_refused(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    refused(make(tmp_path / "hf", config), reason)
