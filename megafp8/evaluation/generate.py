"""Text samples from a model in one process, without a key/value cache."""

import torch
from torch import Tensor

from megafp8.data.tokenizers import Tokenizer, lost_characters, most_lost
from megafp8.errors import DataError
from megafp8.log import get_logger
from megafp8.model import GPTStage, Model
from megafp8.parallel.rng import stream_seed

log = get_logger(__name__)


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

    The context is padded to `seq_length`: attention is causal, so what stands behind the last token
    changes nothing before it, and every step has one shape.

    Args:
        model: a whole model on one rank, not in training.
        tokenizer: the run's.
        prompt: text to continue; an empty one starts after the end-of-document token.
        seq_length: the model's context.
        max_new_tokens: tokens to add; fewer if the end-of-document token is drawn.
        temperature: 0 takes the most likely token.
        seed: of the draws.

    Returns:
        Prompt and continuation.

    Raises:
        DataError: the prompt is not of the tokenizer's ids, or holds bytes that are not UTF-8.
    """
    (stage,) = model.stages
    device = next(iter(model.parameters.values())).device
    generator = torch.Generator(device=device).manual_seed(stream_seed(seed, "generate"))
    try:
        ids = tokenizer.encode(prompt) or [tokenizer.eod]
    except UnicodeEncodeError as error:
        raise DataError(f"--prompt: not UTF-8 at character {error.start}") from None
    if lost := lost_characters(prompt, tokenizer.decode(ids)):
        log.warning("--prompt: characters that the model does not see: %s", most_lost(lost))
    for _ in range(max_new_tokens):
        logits = _next_logits(stage, ids[-seq_length:], seq_length, device)
        logits = logits[: tokenizer.vocab_size]  # a larger vocabulary's other ids have no text
        if temperature == 0:
            token = int(logits.argmax())
        else:
            # Largest first at 0: a tiny temperature may send the others to -inf, never to NaN.
            probabilities = ((logits - logits.max()).double() / temperature).softmax(-1)
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
