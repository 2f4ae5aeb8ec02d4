"""Whole models against a GPT in plain torch: logits, loss, every gradient, three AdamW steps."""

import pytest
import torch
from torch import Tensor

from tests.model import plain_gpt
from tests.model.plain_gpt import Sizes
from tests.model.small import (
    GPT2,
    LLAMA,
    VOCAB,
    Run,
    global_batch,
    micro_batches,
    randomize,
    small_config,
    start_run,
)

# Llama with a head size of its own, biases on q, k and v, another rotary base, a sliding window.
VARIANT = {**LLAMA, "kv_channels": 16, "rotary_base": 500000.0, "add_qkv_bias": True}
STYLES: dict[str, tuple[dict, Sizes]] = {
    "gpt2": (GPT2, Sizes(2, 4, 4, 8, VOCAB, llama=False)),
    "llama": (LLAMA, Sizes(2, 4, 2, 8, VOCAB, llama=True)),
    "llama variant": (
        {**VARIANT, "window_size": (6, 0), "norm_epsilon": 1e-6},
        Sizes(2, 4, 2, 16, VOCAB, True, 500000.0, 1e-6, window=6),
    ),
}


def whole_parameters(run: Run) -> dict[str, Tensor]:
    """Global values by name, without the copy of a tied embedding."""
    return {
        name: parameter.data.full_tensor().clone()
        for name, parameter in run.model.parameters.items()
        if name in run.model.specs
    }


def randomized_run(style: dict, **changes) -> Run:
    run = start_run(small_config(style, **changes))
    randomize(run.model.parameters, std=0.1)
    for name, parameter in run.model.parameters.items():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            parameter.data.to_local()[VOCAB:] = 0.0
    run.model.copy_tied_embedding()
    return run


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("style", STYLES)
def test_logits(style):
    changes, sizes = STYLES[style]
    run = randomized_run(changes)
    batch = micro_batches(run, 0)[0]
    (stage,) = run.model.stages
    with torch.no_grad():
        local = stage(batch["tokens"], batch["position_ids"], batch["seed"])
    found = stage.full_logits(local).transpose(0, 1)  # [b, s, vocab]
    wanted = plain_gpt.logits(batch["tokens"], whole_parameters(run), sizes)
    assert wanted.std() > 0.5, "logits of some size"
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("style", STYLES)
def test_loss_and_every_gradient(style):
    changes, sizes = STYLES[style]
    run = randomized_run(changes)
    batches = micro_batches(run, 0)
    total = run.model.runner.train(batches)
    parameters = {k: v.requires_grad_(True) for k, v in whole_parameters(run).items()}
    wanted = sum(
        plain_gpt.loss_sum(b["tokens"], b["labels"], b["loss_mask"], parameters, sizes)
        for b in batches
    )
    wanted.backward()
    assert float(total) == pytest.approx(float(wanted.detach()), rel=1e-6)
    run.step.gradients.collect()
    found = {entry.name: entry.shard.grad for entry in run.step.gradients.entries}
    assert run.model.tied == (style == "gpt2")
    for name, parameter in parameters.items():
        error = (found[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-4, name


@pytest.mark.usefixtures("one_rank")
def test_training_is_adamw_on_the_mean_loss():
    """Three steps of the whole machinery against torch.optim.AdamW with clipping, in fp32."""
    changes, sizes = STYLES["gpt2"]
    run = start_run(small_config(changes, clip_grad=0.5, weight_decay=0.1, lr=1e-2))
    parameters = {k: v.requires_grad_(True) for k, v in whole_parameters(run).items()}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    assert run.config.optimizer.adam_beta1 == 0.9 and run.config.optimizer.adam_beta2 == 0.999
    for iteration, result in enumerate(run.train(range(3))):
        batch = {
            key: torch.from_numpy(value)
            for key, value in global_batch(run.config, VOCAB, iteration).items()
        }
        mean = (
            plain_gpt.loss_sum(
                batch["tokens"], batch["labels"], batch["loss_mask"], parameters, sizes
            )
            / batch["loss_mask"].sum()
        )
        optimizer.zero_grad()
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        optimizer.step()
        assert norm > 0.5, "clipping takes part"
        assert result.loss == pytest.approx(float(mean.detach()), rel=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert not result.skipped and result.tokens == 128
    after = whole_parameters(run)
    for name, parameter in parameters.items():
        # Adam divides gradients near its epsilon by themselves: those move by rounding.
        assert torch.allclose(after[name], parameter, atol=3e-4), name
        assert (after[name] - parameter).abs().mean() < 2e-6, name


def gathered_logits(sequence_parallel: bool):
    """Logits at tp 2 with the parameters that made them."""
    run = start_run(
        small_config(LLAMA, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    )
    batch = micro_batches(run, 0)[0]
    (stage,) = run.model.stages
    with torch.no_grad():
        local = stage(batch["tokens"], batch["position_ids"], batch["seed"])
    assert local.shape == (16, 2, 64)
    return batch["tokens"], stage.full_logits(local).transpose(0, 1), whole_parameters(run)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_gathered_over_tensor_parallel(ranks, sequence_parallel):
    answers = ranks.run(gathered_logits, world_size=2, sequence_parallel=sequence_parallel)
    tokens, found, parameters = answers[0]
    wanted = plain_gpt.logits(tokens, parameters, STYLES["llama"][1])
    assert found.shape == (2, 16, VOCAB)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert torch.equal(found, answers[1][1])
