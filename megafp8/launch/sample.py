"""Samples text from a checkpoint in this one process."""

import logging
from pathlib import Path

import torch

from megafp8.checkpoint import find_checkpoint
from megafp8.checkpoint.whole_model import load_model
from megafp8.data.tokenizers import build_tokenizer
from megafp8.errors import CheckpointError, DataError
from megafp8.evaluation import generate
from megafp8.log import configure
from megafp8.parallel import start, stop


def sample_text(
    load: str | Path, prompt: str, max_new_tokens: int, temperature: float, seed: int
) -> str:
    """Continue `prompt` with the model of a checkpoint.

    Args:
        load: a folder of checkpoints or one of them (`--load`'s rules).
        prompt: text to continue.
        max_new_tokens: tokens to add at most.
        temperature: 0 takes the most likely token each time.
        seed: of the draws.

    Raises:
        CheckpointError: no complete checkpoint there, or a damaged one.
        DataError: the run's tokenizer is not there any more.
    """
    configure(0, level=logging.WARNING)
    checkpoint = find_checkpoint(Path(load))
    if checkpoint is None:
        raise CheckpointError(f"{load}: found no checkpoint to sample from")
    world = start(0, 1, 0)
    if world.device.type == "cpu":
        torch.set_num_threads(1)  # one token's work is too small to share: 5 s become 40 with two
    model, config, shape, _ = load_model(checkpoint, world)
    tokenizer = build_tokenizer(config.data)
    if tokenizer is None:
        raise DataError(f"{checkpoint}: the run has no tokenizer (--tokenizer-type)")
    text = generate(model, tokenizer, prompt, shape.seq_length, max_new_tokens, temperature, seed)
    stop()
    return text
