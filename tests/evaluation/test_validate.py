"""Validation loss: a mean over tokens, without dropout, over the same samples each time."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.data.gpt_dataset import MockGPTDataset
from megafp8.data.loader import BatchLoader
from megafp8.evaluation import validation_loss
from tests.model import plain_gpt
from tests.model.plain_gpt import Sizes
from tests.model.small import GPT2, VOCAB, small_config, start_run

ITERATIONS, BATCH = 2, 4
SIZES = Sizes(2, 4, 4, 8, VOCAB, llama=False)


class MaskedDataset(MockGPTDataset):
    """The first `number % 5 * 4` tokens of a sample do not count; with `nothing`, none does."""

    nothing = False

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        sample = super().__getitem__(number)
        sample["loss_mask"][: 16 if self.nothing else number % 5 * 4] = 0.0
        return sample


def validated(nothing: bool = False, **changes: Any):
    """Loss twice, the parameters, and whether training mode came back."""
    run = start_run(small_config(GPT2, hidden_dropout=0.5, attention_dropout=0.5, **changes))
    dataset = MaskedDataset(16, VOCAB, 7, split="valid")
    dataset.nothing = nothing
    loader = BatchLoader(dataset, 16, 2, run.mesh.dp_rank, run.mesh.layout.dp)
    losses = [validation_loss(run.model, loader, run.mesh, ITERATIONS, BATCH) for _ in range(2)]
    parameters = {n: p.data.full_tensor() for n, p in run.model.parameters.items()}
    return losses, parameters, all(stage.training for stage in run.model.stages)


def wanted_loss(parameters: dict[str, torch.Tensor]) -> float:
    dataset = MaskedDataset(16, VOCAB, 7, split="valid")
    samples = [dataset[number] for number in range(ITERATIONS * BATCH)]
    tokens, labels, masks = (
        torch.from_numpy(np.stack([sample[key] for sample in samples]))
        for key in ("tokens", "labels", "loss_mask")
    )
    # Rows of 16, 12, 8, 4, 0, 16, 12, 8 counted tokens: a mean of means would differ.
    assert masks.sum() == 76
    return float(plain_gpt.loss_sum(tokens, labels, masks, parameters, SIZES) / masks.sum())


@pytest.mark.parametrize(
    "size, changes",
    [(1, {}), (2, {}), (2, {"tensor_model_parallel_size": 2}),
     (2, {"pipeline_model_parallel_size": 2})],
)  # fmt: skip
def test_mean_over_unmasked_tokens(ranks, size, changes):
    answers = ranks.run(validated, world_size=size, **changes)
    parameters: dict[str, torch.Tensor] = {}
    for _, mine, _ in answers:
        parameters |= mine
    parameters.pop("output_layer.weight")  # the tied copy
    wanted = wanted_loss(parameters)
    for losses, _, training in answers:
        assert losses == pytest.approx([wanted, wanted], rel=1e-6)
        assert losses[0] == losses[1] and training


def test_no_counted_token_gives_nan(ranks):
    ((losses, _, _),) = ranks.run(validated, world_size=1, nothing=True)
    assert all(math.isnan(loss) for loss in losses)


def test_training_mode_and_recording_come_back_after_an_error(one_rank):
    run = start_run(small_config(bf16=True, fp8_format="hybrid", fp8_amax_history_len=4))

    class Broken:
        def batch(self, consumed: int, size: int) -> list:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        validation_loss(run.model, Broken(), run.mesh, 1, 8)  # type: ignore[arg-type]
    assert all(stage.training for stage in run.model.stages)
    assert run.model.registry is not None and run.model.registry.recording
