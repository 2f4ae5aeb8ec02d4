"""Text samples from a checkpoint, in one process and without a key/value cache."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint import load_tensors, read_record
from megafp8.config import ModelShape, RunConfig
from megafp8.data.tokenizers import Tokenizer
from megafp8.model import GPTStage, Model, build_model
from megafp8.parallel import Mesh, World, build_mesh
from megafp8.parallel.rng import stream_seed
from megafp8.precision import build_plan, recipe_from_config

# Sections that a single process takes from the checkpoint unchanged; the rest is made for one rank.
KEPT_SECTIONS = ("model", "precision", "data", "optimizer")


def single_process_config(saved: dict[str, Any]) -> RunConfig:
    """The run of a checkpoint as one process without parallelism or dropout.

    Args:
        saved: `config` of the checkpoint's record.
    """
    values = {name: dict(saved[name]) for name in KEPT_SECTIONS}
    values["model"] |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    training = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1}
    values["training"] = training | {"seed": saved["training"]["seed"]}
    return RunConfig.from_dict(values)


def load_model(checkpoint: Path, world: World) -> tuple[Model, RunConfig, ModelShape, Mesh]:
    """Build the model of a checkpoint in this one process and load weights and scales.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or not of its own configuration.
    """
    record = read_record(checkpoint)
    config = single_process_config(record.config)
    mesh = build_mesh(config.layout(1), world)
    shape = ModelShape.from_config(config, int(record.state["vocab_size"]))
    plan = build_plan(config, shape, mesh.layout)
    model = build_model(config, shape, plan, recipe_from_config(config), mesh)
    tensors: dict[str, Tensor] = {
        name: parameter.data for name, parameter in model.parameters.items() if name in model.specs
    }
    scales: dict[str, Tensor] = {}
    if model.registry is not None:
        for key, value in model.registry.tensors().items():
            found = record.tensors.get(key)
            shape_of = found.shape if found is not None else tuple(value.shape)
            scales[key] = torch.zeros(shape_of)
    missing = load_tensors(
        checkpoint, tensors | scales, lambda name: name.startswith(("fp8.", "optimizer."))
    )
    model.copy_tied_embedding()
    if model.registry is not None:
        model.registry.load({k: v for k, v in scales.items() if k not in set(missing)})
    model.set_training(False)
    return model, config, shape, mesh


@torch.no_grad()
def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    seq_length: int,
    max_new_tokens: int,
    temperature: float = 0.8,
    seed: int = 1234,
) -> str:
    """Continue a prompt.

    The context is padded to `seq_length`, so that FP8 linears see the token count they were planned
    for; attention is causal, hence padding behind the last token changes nothing before it.

    Args:
        model: from `load_model`.
        tokenizer: the run's.
        prompt: text to continue; an empty one starts after the end-of-document token.
        seq_length: the model's context.
        max_new_tokens: tokens to add; fewer if the end-of-document token is drawn.
        temperature: 0 takes the most likely token.
        seed: of the draws.

    Returns:
        Prompt and continuation.
    """
    (stage,) = model.stages
    device = next(iter(model.parameters.values())).device
    generator = torch.Generator(device=device).manual_seed(stream_seed(seed, "generate"))
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    for _ in range(max_new_tokens):
        logits = _next_logits(stage, ids[-seq_length:], seq_length, device)
        if temperature == 0:
            token = int(logits.argmax())
        else:
            probabilities = (logits / temperature).softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token == tokenizer.eod:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def _next_logits(stage: GPTStage, ids: list[int], length: int, device: torch.device) -> Tensor:
    """fp32 [vocab]: logits after the last of `ids`."""
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    tokens[0, : len(ids)] = torch.tensor(ids, device=device)
    positions = torch.arange(length, device=device)[None]
    local = stage(tokens, positions, torch.zeros(1, dtype=torch.int64))  # [s, 1, padded_vocab]
    return stage.full_logits(local)[len(ids) - 1, 0].float()
