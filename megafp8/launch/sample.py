"""Samples text from a checkpoint in this one process."""

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from megafp8.checkpoint.find import find_to_read
from megafp8.checkpoint.kinds import found_instead
from megafp8.checkpoint.whole_model import load_model
from megafp8.config.data import TOKENIZER_TYPES, WITHOUT_MODEL, DataConfig
from megafp8.config.shape import ModelShape
from megafp8.data.tokenizers import Tokenizer, build_tokenizer
from megafp8.errors import CheckpointError, DataError
from megafp8.evaluation import generate
from megafp8.log import configure, get_logger
from megafp8.parallel import start, stop

log = get_logger(__name__)


def sample_text(
    load: str | Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    tokenizer_type: str | None = None,
    tokenizer_model: str | None = None,
) -> str:
    """Continue `prompt` with the model of a checkpoint.

    Args:
        load: a folder of checkpoints or one of them (`--load`'s rules).
        prompt: text to continue.
        max_new_tokens: tokens to add at most.
        temperature: 0 takes the most likely token each time.
        seed: of the draws.
        tokenizer_type: instead of the run's, of which then nothing is taken.
        tokenizer_model: file or folder, instead of the run's.

    Raises:
        CheckpointError: no complete checkpoint there, or a damaged one.
        DataError: the tokenizer is not there (any more), the run had none and none is given, it
            reads no file and one is given, or it has more ids than the model.
    """
    configure(0, level=logging.WARNING)
    with ExitStack() as held:  # a run that saves there may delete its older ones meanwhile
        checkpoint = find_to_read(Path(load), held)
        if checkpoint is None:
            raise CheckpointError(f"{load} holds no checkpoint{found_instead(Path(load))}")
        world = start(0, 1, 0)
        if world.device.type == "cpu":
            torch.set_num_threads(1)  # a token's work is too small to share: 5 s become 40 with two
        model, config, shape, _ = load_model(checkpoint, world)
    data = with_tokenizer(config.data, tokenizer_type, tokenizer_model, shape.vocab_size)
    tokenizer = build_tokenizer(data)
    if tokenizer is None:
        raise DataError(
            f"{checkpoint}: the run has no tokenizer; give --tokenizer-type (and "
            f"--tokenizer-model): {', '.join(TOKENIZER_TYPES)}"
        )
    for note in tokenizer.notes:
        log.warning("%s", note)
    if tokenizer_type is not None or tokenizer_model is not None:
        _compare_sizes(f"--tokenizer-type {data.tokenizer_type}", tokenizer, shape, checkpoint)
    text = generate(model, tokenizer, prompt, shape.seq_length, max_new_tokens, temperature, seed)
    stop()
    return text


def _compare_sizes(given: str, tokenizer: Tokenizer, shape: ModelShape, checkpoint: Path) -> None:
    """Refuse a tokenizer with more ids than the model; tell of one with fewer.

    Fewer are no proof of a wrong one: a vocabulary that was rounded up before training, by
    `--vocab-size` or in another program, has rows that no tokenizer names.
    """
    if tokenizer.vocab_size > shape.vocab_size:
        raise DataError(
            f"{given} has {tokenizer.vocab_size} ids, more than the {shape.vocab_size} of "
            f"{checkpoint}; give the tokenizer it was trained with"
        )
    if tokenizer.vocab_size < shape.vocab_size:
        log.warning(
            "%s has %d ids, fewer than the %d of %s: ids from %d on are never drawn; unless its "
            "vocabulary was padded, this is not the tokenizer it was trained with",
            given,
            tokenizer.vocab_size,
            shape.vocab_size,
            checkpoint,
            tokenizer.vocab_size,
        )


def with_tokenizer(
    data: DataConfig, kind: str | None, model: str | None, vocab_size: int
) -> DataConfig:
    """Return the data section with another tokenizer.

    Args:
        data: of the run.
        kind: `--tokenizer-type`; None keeps the run's.
        model: `--tokenizer-model`; None keeps the run's, where the type is the run's too.
        vocab_size: ids of the model, the end of a document among them.
    """
    values: dict[str, str | int | None] = {}
    if kind is not None and kind != data.tokenizer_type:
        values = {"tokenizer_type": kind, "tokenizer_model": None}
        if kind == "NullTokenizer":
            values["vocab_size"] = vocab_size - 1  # it adds one for the end of a document
    if model is not None:
        values["tokenizer_model"] = model
    elif kind is None and data.tokenizer_type in WITHOUT_MODEL:
        values["tokenizer_model"] = None  # a run's, which earlier versions took and did not read
    return data.model_copy(update=values)
