"""Whether a checkpoint is of the run that loads it.

Tensors of equal shapes do not make an equal model: heads, rotary base, epsilon or activation change
what they compute without changing a shape.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megafp8.checkpoint import CheckpointRecord
from megafp8.config import RunConfig
from megafp8.errors import CheckpointError, ConfigurationError
from megafp8.log import get_logger

log = get_logger(__name__)

# Fields and derived properties of the model section that decide what its tensors compute; dropout,
# initialisation and backend may change.
MEANING = (
    "num_layers",
    "hidden_size",
    "ffn_size",
    "num_attention_heads",
    "query_groups",
    "head_dim",
    "position_embedding_type",
    "rotary_base",
    "rotary_dim",
    "use_rope_scaling",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "window_size",
    "qk_layernorm",
    "tied_embeddings",
)
SCALING = (
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_position_embeddings",
)
# What moves the order of the data or the learning rate: allowed, but never unseen.
WATCHED = (
    ("training", "seed"),
    ("training", "global_batch_size"),
    ("training", "rampup_batch_size"),
    ("data", "tokenizer_type"),
    ("data", "tokenizer_model"),
    ("data", "vocab_size"),
    ("data", "data_path"),
    ("data", "train_data_path"),
    ("data", "split"),
    ("data", "mock_data"),
    ("model", "seq_length"),
    ("precision", "bf16"),
    ("precision", "fp16"),
    ("precision", "fp8_format"),
    ("optimizer", "lr"),
    ("optimizer", "min_lr"),
    ("optimizer", "lr_decay_style"),
    ("optimizer", "lr_decay_iters"),
    ("optimizer", "lr_warmup_iters"),
    ("optimizer", "lr_warmup_fraction"),
    ("optimizer", "lr_wsd_decay_iters"),
    ("optimizer", "lr_wsd_decay_style"),
    ("optimizer", "weight_decay"),
)
LENGTH = ("train_iters", "train_samples")


def check_same_run(path: Path, record: CheckpointRecord, config: RunConfig) -> None:
    """Compare a checkpoint's configuration with the one that loads it.

    Differences in data and schedule are logged in one line.

    Raises:
        CheckpointError: the checkpoint is of another model; each difference is named.
    """
    try:
        saved = RunConfig.from_dict(record.config)
    except ConfigurationError as error:
        raise CheckpointError(f"{path}: megafp8.json holds an unusable config: {error}") from None
    different = list(_model_differences(saved, config))
    if different:
        raise CheckpointError(f"{path} is of another model: {'; '.join(different)}")
    if config.checkpoint.finetune:
        return
    moved = list(_moved(saved, config))
    if moved:
        log.warning("%s was trained with other settings: %s", path, "; ".join(moved))


def _moved(saved: RunConfig, config: RunConfig) -> Iterator[str]:
    for section, field in WATCHED:
        before, now = (getattr(getattr(one, section), field) for one in (saved, config))
        if before != now:
            yield _difference(field, before, now)
    if not (_decays_to_the_end(saved) or _decays_to_the_end(config)):
        return
    for field in LENGTH:
        before, now = getattr(saved.training, field), getattr(config.training, field)
        if before != now:
            yield f"{_difference(field, before, now)} (the learning rate follows)"


def _decays_to_the_end(config: RunConfig) -> bool:
    """Whether the length of the run decides its learning rates."""
    optimizer = config.optimizer
    follows = optimizer.lr_decay_style != "constant" or optimizer.lr_warmup_fraction is not None
    return follows and optimizer.lr_decay_iters is None


def _model_differences(saved: RunConfig, config: RunConfig) -> Iterator[str]:
    names = MEANING + (SCALING if config.model.use_rope_scaling else ())
    names += () if config.model.swiglu else ("activation",)
    for name in names:
        before, now = getattr(saved.model, name), getattr(config.model, name)
        if before != now:
            yield _difference(name, before, now)


def _difference(name: str, before: Any, now: Any) -> str:
    return f"{name} was {before}, now {now}"
