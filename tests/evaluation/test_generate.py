"""Sampling: a model that has learned a pattern continues it, from a checkpoint of any layout."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.checkpoint.whole_model import load_model
from megafp8.data.tokenizers import ByteTokenizer
from megafp8.errors import DataError
from megafp8.evaluation import generate
from megafp8.model.batch import to_tensors
from megafp8.train.state import TrainState
from tests.model.small import FP8, Run, assert_same_bytes, small_config, start_run, world
from tests.support.states import load_state, save_state

PATTERN = "hello, "
TOKENIZER = ByteTokenizer()
LENGTH = 16
VALUES: dict[str, Any] = {
    **FP8,
    "vocab_size": None,
    "tokenizer_type": "ByteTokenizer",
    "lr": 1e-2,
    "micro_batch_size": 7,
    "global_batch_size": 7,
    "hidden_dropout": 0.05,
    "num_query_groups": 4,
    "num_layers": 2,
}
pytestmark = pytest.mark.usefixtures("one_rank")


def pattern_batch(run: Run, iteration: int) -> list[dict[str, Tensor]]:
    """The pattern from each of its seven starts."""
    text = np.array(TOKENIZER.encode(PATTERN * 5))
    rows = np.stack([text[start : start + LENGTH + 1] for start in range(len(PATTERN))])
    batch = {
        "tokens": np.ascontiguousarray(rows[:, :-1]),
        "labels": np.ascontiguousarray(rows[:, 1:]),
        "loss_mask": np.ones((7, LENGTH), dtype=np.float32),
        "position_ids": np.tile(np.arange(LENGTH), (7, 1)),
    }
    return to_tensors([batch], run.mesh, 1234, iteration)


def save(run: Run, root: Path, iteration: int) -> Path:
    vocab = TOKENIZER.vocab_size
    return save_state(root, TrainState(iteration), run.step, vocab)


@pytest.fixture(scope="module")
def learned(one_rank, tmp_path_factory) -> Path:
    """A checkpoint of one rank that has learned the pattern in FP8."""
    run = start_run(small_config(**VALUES), TOKENIZER.vocab_size)
    for iteration in range(40):
        result = run.step.run(pattern_batch(run, iteration), 1e-2, iteration + 1)
        if result.loss < 0.05:
            break
    assert result.loss < 0.05, result
    return save(run, tmp_path_factory.mktemp("learned"), iteration + 1)


def reshard(path: str, root: str) -> str:
    """Load at TP 2 x PP 2 and save from there."""
    config = small_config(
        **VALUES,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        pipeline_schedule="gpipe",
    )
    run = start_run(config, TOKENIZER.vocab_size)
    load_state(Path(path), run.step)
    return str(save(run, Path(root), 77))


def test_greedy_sampling_continues_the_pattern(learned):
    model, _, shape, _ = load_model(learned, world())
    assert shape.seq_length == LENGTH and not any(stage.training for stage in model.stages)
    text = generate(model, TOKENIZER, "hello, hel", LENGTH, 20, temperature=0.0)
    assert text == "hello, hello, hello, hello, he"
    # A prompt longer than the context: its end counts.
    long = generate(model, TOKENIZER, PATTERN * 4, LENGTH, 7, temperature=0.0)
    assert long == PATTERN * 5


def test_checkpoint_of_four_ranks_is_sampled_in_one_process(ranks, learned, tmp_path):
    paths = ranks.run(reshard, path=str(learned), root=str(tmp_path))
    assert Path(paths[0]).name == "iter_0000077"
    models = [load_model(path, world())[0] for path in (learned, Path(paths[0]))]
    # In the compute dtype, without FP8: a sample needs no scales.
    assert all(model.registry is None for model in models)
    weights = [{n: p.data.to_local() for n, p in model.parameters.items()} for model in models]
    assert_same_bytes(weights[1], weights[0])
    text = generate(models[1], TOKENIZER, "hello", LENGTH, 9, temperature=0.0)
    assert text == "hello, hello, "


def test_draws_depend_on_the_seed_alone():
    """On an untrained model, where every byte is about as likely."""
    model = start_run(small_config(**VALUES), TOKENIZER.vocab_size).model
    model.set_training(False)

    def draw(seed: int) -> str:
        return generate(model, TOKENIZER, "a", LENGTH, 12, temperature=1.0, seed=seed)

    first = draw(1)
    torch.rand(3)
    assert draw(1) == first and len({draw(seed) for seed in range(1, 5)}) == 4
    cold = generate(model, TOKENIZER, "a", LENGTH, 4, temperature=1e-300)
    assert cold == generate(model, TOKENIZER, "a", LENGTH, 4, temperature=0.0)


def test_end_of_document_ends_the_text(monkeypatch):
    model = start_run(small_config(**VALUES), TOKENIZER.vocab_size).model
    model.set_training(False)
    # The package's name `generate` is the function.
    module = importlib.import_module("megafp8.evaluation.generate")
    seen: list[list[int]] = []

    def next_logits(stage: Any, ids: list[int], length: int, device: torch.device) -> Tensor:
        seen.append(list(ids))
        logits = torch.zeros(TOKENIZER.vocab_size)
        logits[TOKENIZER.eod if len(seen) == 4 else ord("x")] = 5.0
        return logits

    monkeypatch.setattr(module, "_next_logits", next_logits)
    assert generate(model, TOKENIZER, "ab", LENGTH, 50, temperature=0.0) == "abxxx"
    assert seen[0] == [97, 98] and len(seen) == 4
    seen.clear()
    generate(model, TOKENIZER, "", LENGTH, 1, temperature=0.0)
    assert seen == [[TOKENIZER.eod]], "an empty prompt starts a document"


def test_a_prompt_that_is_no_text_is_one_line():
    model = start_run(small_config(**VALUES), TOKENIZER.vocab_size).model
    with pytest.raises(DataError, match="--prompt: not UTF-8 at character 1"):
        generate(model, TOKENIZER, "a\udcff", LENGTH, 1)


def test_padding_behind_the_prompt_changes_nothing():
    from megafp8.evaluation.generate import _next_logits

    run = start_run(small_config(**{**VALUES, "bf16": False, "fp8_format": "none"}), 257)
    run.model.set_training(False)
    (stage,) = run.model.stages
    ids = TOKENIZER.encode("hello")
    with torch.no_grad():
        found = _next_logits(stage, ids, LENGTH, torch.device("cpu"))
        tokens = torch.full((1, LENGTH), 200)
        tokens[0, :5] = torch.tensor(ids)
        logits = stage(tokens, torch.arange(LENGTH)[None], torch.zeros(1, dtype=torch.int64))
    assert found.shape == (257,) and found.dtype == torch.float32
    assert torch.equal(found, logits[4, 0, :257])
