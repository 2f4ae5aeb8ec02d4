"""Cross-field checks that need no world size, and refusals of what is not built yet.

Each check yields finished sentences; `RunConfig` raises the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megafp8.config.data import TOKENIZER_TYPES, WITHOUT_MODEL, tokenizer_refusal
from megafp8.config.messages import flag_name
from megafp8.config.precision_checks import precision_problems
from megafp8.config.user_buffers import user_buffer_problems
from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.sections import Sections


def problems(config: Sections) -> Iterator[str]:
    """Yield one sentence for each contradiction in a configuration."""
    yield from _not_built(config)
    yield from _model(config)
    yield from _tensor_parallel(config)
    yield from user_buffer_problems(config)
    yield from _pipeline(config)
    yield from precision_problems(config)
    yield from _training(config)
    yield from _optimizer(config)
    yield from _data(config)
    yield from _records(config)


def check_trainable(config: Sections) -> None:
    """Check what training needs and a dry run does not.

    Raises:
        ConfigurationError: No corpus, no tokenizer or one with a file that it does not read.
    """
    data = config.data
    if not data.has_source:
        raise ConfigurationError(
            "no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data"
        )
    kind = data.tokenizer_type
    if kind is None and not (data.mock_data and data.vocab_size is not None):
        raise ConfigurationError(
            f"--tokenizer-type is missing; allowed: {', '.join(TOKENIZER_TYPES)} (or --vocab-size "
            "alone with --mock-data)"
        )
    refusal = kind and tokenizer_refusal(kind, data.tokenizer_model, data.vocab_size)
    if refusal and kind not in WITHOUT_MODEL and data.mock_data:
        refusal += "; --mock-data needs none: --tokenizer-type NullTokenizer"
    if refusal:
        raise ConfigurationError(refusal)


def _not_built(config: Sections) -> Iterator[str]:
    """Flags of the interface whose work is still to come: refused, never ignored."""
    for asked, flag, instead in _unbuilt(config):
        if asked:
            yield f"{flag} is not built yet in this version: {instead}"


def _unbuilt(config: Sections) -> list[tuple[bool, str, str]]:
    """Rows of (asked for, flag, what there is instead)."""
    parallel, data, logging = config.parallel, config.data, config.logging
    attention = "attention crosses documents; --eod-mask-loss is there"
    experts = "there are no experts; allowed: 1"
    stats = logging.fp8_stats_interval is not None
    return [
        (stats, "--fp8-stats-interval", "metrics.jsonl is written every iteration"),
        (parallel.context_parallel_size > 1, "--context-parallel-size > 1", "allowed: 1"),
        (parallel.expert_model_parallel_size > 1, "--expert-model-parallel-size > 1", experts),
        (data.reset_position_ids, "--reset-position-ids", "positions run over the whole sample"),
        (data.reset_attention_mask, "--reset-attention-mask", attention),
        (logging.profile, "--profile", "no profiler is attached"),
    ]


def _model(config: Sections) -> Iterator[str]:
    model = config.model
    heads, hidden, rotary_dim = model.num_attention_heads, model.hidden_size, model.rotary_dim
    if model.kv_channels is None and hidden % heads:
        yield (
            f"hidden_size {hidden} is not divisible by num_attention_heads {heads}; "
            "change one or give --kv-channels"
        )
    if model.num_query_groups is not None and not model.group_query_attention:
        yield (
            f"--num-query-groups {model.num_query_groups} needs --group-query-attention; "
            "without it every head has its own keys and values"
        )
    if heads % model.query_groups:
        yield (
            f"num_attention_heads {heads} is not divisible by num_query_groups {model.query_groups}"
        )
    if model.swiglu and model.activation != "gelu":
        yield f"--activation {model.activation} contradicts --swiglu, which has its own; drop one"
    positions = model.position_embedding_type
    if positions == "learned_absolute" and model.max_position_embeddings is None:
        yield "--position-embedding-type learned_absolute needs --max-position-embeddings"
    if model.positions < model.seq_length:
        yield (
            f"max_position_embeddings {model.positions} < seq_length {model.seq_length}; "
            "allowed: at least the sequence length"
        )
    if positions == "rope" and (rotary_dim < 2 or rotary_dim % 2):
        yield (
            f"head size {model.head_dim} * rotary_percent {model.rotary_percent:g} gives "
            f"{rotary_dim} rotary channels; allowed: an even number"
        )
    if positions != "rope" and model.use_rope_scaling:
        yield f"--use-rope-scaling needs --position-embedding-type rope, found {positions}"
    if model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield (
            f"rope_low_freq_factor {model.rope_low_freq_factor:g} must be below "
            f"rope_high_freq_factor {model.rope_high_freq_factor:g}"
        )
    left, right = model.window_size or (0, 0)
    if left < 0 or right != 0:
        yield (
            f"--window-size {left},{right}: allowed LEFT,0 with LEFT >= 0 (attention is "
            "causal; without the flag a token sees all before it)"
        )


def _tensor_parallel(config: Sections) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    sizes = [
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.query_groups),
        ("ffn_hidden_size", model.ffn_size),
    ]
    if config.parallel.sequence_parallel:
        if tp == 1:
            yield (
                "--sequence-parallel needs --tensor-model-parallel-size > 1, found 1; "
                "switch it off with --no-sequence-parallel"
            )
        sizes.append(("with --sequence-parallel seq_length", model.seq_length))
    for name, size in sizes:
        if size % tp:
            yield f"{name} {size} is not divisible by tensor_model_parallel_size {tp}"


def _pipeline(config: Sections) -> Iterator[str]:
    parallel = config.parallel
    schedule, pp = parallel.schedule, parallel.pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if schedule == "interleaved" and per_chunk is None:
        yield "--pipeline-schedule interleaved needs --num-layers-per-virtual-pipeline-stage"
        return
    if schedule != "interleaved" and per_chunk is not None:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} contradicts --pipeline-schedule "
            f"{schedule}; allowed with it: interleaved"
        )
    if schedule in ("interleaved", "zbv") and pp == 1:
        yield f"the {schedule} schedule needs --pipeline-model-parallel-size > 1, found 1"
    if schedule == "zbv" and config.training.recompute_granularity is not None:
        yield (
            "--recompute-granularity does not work with --pipeline-schedule zbv: its backward "
            "pass is split in two and would recompute twice; use 1f1b or interleaved"
        )
    if parallel.use_distributed_optimizer and parallel.reshard_after_forward:
        yield (
            "--use-distributed-optimizer keeps parameters gathered, --reshard-after-forward frees "
            "them; give one of the two"
        )


def _training(config: Sections) -> Iterator[str]:
    training = config.training
    if training.train_iters is not None and training.train_samples is not None:
        yield (
            f"--train-iters {training.train_iters} contradicts --train-samples "
            f"{training.train_samples}; give exactly one"
        )
    if training.train_iters is None and training.train_samples is None:
        yield "give exactly one of --train-iters and --train-samples, found neither"
    if training.recompute_num_layers is not None and training.recompute_granularity != "full":
        yield (
            f"--recompute-num-layers {training.recompute_num_layers} needs "
            f"--recompute-granularity full, found {training.recompute_granularity or 'none'}"
        )
    if training.rampup_batch_size is None:
        return
    size, (start, increment, _) = training.global_batch_size, training.rampup_batch_size
    ramp = "--rampup-batch-size " + " ".join(map(str, training.rampup_batch_size))
    if size is None:
        yield f"{ramp} needs --global-batch-size, the size it ends at"
    elif start > size or (size - start) % increment:
        yield (
            f"{ramp}: does not end at --global-batch-size {size}: {size} - {start} must be a "
            f"multiple of {increment} and not negative"
        )


def _optimizer(config: Sections) -> Iterator[str]:
    optimizer, training = config.optimizer, config.training
    if optimizer.min_lr > optimizer.lr:
        yield f"min_lr {optimizer.min_lr:g} is above lr {optimizer.lr:g}"
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_fraction is not None:
        yield (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} contradicts --lr-warmup-fraction "
            f"{optimizer.lr_warmup_fraction:g}; give at most one"
        )
    length = optimizer.lr_decay_iters or training.train_iters
    name = "lr_decay_iters" if optimizer.lr_decay_iters else "train_iters"
    if length is not None and optimizer.lr_warmup_iters >= length:
        fits = "0" if length == 1 else f"0 to {length - 1}"
        yield (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} must be below {flag_name(name)} "
            f"{length}; give --lr-warmup-iters {fits}"
        )
    wsd = optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD" and wsd is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters"
    if wsd is not None and optimizer.lr_decay_style != "WSD":
        yield (
            f"--lr-wsd-decay-iters {wsd} needs --lr-decay-style WSD, found "
            f"{optimizer.lr_decay_style}"
        )
    if wsd is not None and length is not None and wsd > length:
        yield f"lr_wsd_decay_iters {wsd} is above {name} {length}"


def _data(config: Sections) -> Iterator[str]:
    data = config.data
    parts = [f"{split}_data_path" for split in ("train", "valid", "test")]
    flags = ", ".join(flag_name(name) for name in parts if getattr(data, name) is not None)
    whole = "--data-path" if data.data_path is not None else ""
    if whole and flags:
        yield f"--data-path contradicts {flags}; give one kind"
    if data.mock_data and (whole or flags):
        yield f"--mock-data contradicts {', '.join(filter(None, (whole, flags)))}"
    if flags and data.train_data_path is None:
        yield f"{flags} needs --train-data-path"
    if data.split is not None and flags:
        yield f"--split {data.split} divides --data-path; it contradicts {flags}"


def _records(config: Sections) -> Iterator[str]:
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.load is None:
        needing = ("finetune", "exit_on_missing_checkpoint", "use_checkpoint_args")
        for name in (*needing, "allow_changed_corpus", "new_tokens_from_mean"):
            if getattr(checkpoint, name):
                yield f"{flag_name(name)} needs --load"
    if logging.wandb_exp_name is not None and logging.wandb_project is None:
        yield "--wandb-exp-name needs --wandb-project"
