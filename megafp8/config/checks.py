"""Cross-field checks that need no world size, and refusals of what is not built yet.

Each check yields finished sentences; `RunConfig` raises the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megafp8.config.backend import attention_refusals, transformer_engine_refusal
from megafp8.config.idle_flags import idle_flags, spelled
from megafp8.config.layout import chunks_per_rank, ramp_sizes
from megafp8.config.recipes import recipes_that
from megafp8.config.user_buffers import user_buffer_problems
from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.run import RunConfig


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one sentence for each contradiction in a configuration."""
    yield from _not_built(config)
    yield from _model(config)
    yield from _tensor_parallel(config)
    yield from user_buffer_problems(config)
    yield from _pipeline(config)
    yield from _precision(config)
    yield from _fp8_wires(config)
    yield from _training(config)
    yield from _optimizer(config)
    yield from _data(config)
    yield from _records(config)


def check_trainable(config: RunConfig) -> None:
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
            "--tokenizer-type is missing; allowed: SentencePieceTokenizer, HuggingFaceTokenizer, "
            "ByteTokenizer, NullTokenizer (or --vocab-size alone with --mock-data)"
        )
    if kind in ("SentencePieceTokenizer", "HuggingFaceTokenizer") and data.tokenizer_model is None:
        hint = "; --mock-data needs none: --tokenizer-type NullTokenizer" if data.mock_data else ""
        raise ConfigurationError(f"--tokenizer-type {kind} needs --tokenizer-model PATH{hint}")
    if kind in ("ByteTokenizer", "NullTokenizer") and data.tokenizer_model is not None:
        raise ConfigurationError(
            f"--tokenizer-type {kind} takes no --tokenizer-model, found {data.tokenizer_model}"
        )


LATER = "is not built yet in this version"


def _not_built(config: RunConfig) -> Iterator[str]:
    """Flags of the interface whose work is still to come: refused, never ignored."""
    for asked, flag, instead in _unbuilt(config):
        if asked:
            yield f"{flag} {LATER}: {instead}"


def _unbuilt(config: RunConfig) -> list[tuple[bool, str, str]]:
    """Rows of (asked for, flag, what there is instead)."""
    parallel, data = config.parallel, config.data
    return [
        (
            config.logging.fp8_stats_interval is not None,
            "--fp8-stats-interval",
            "metrics.jsonl is written every iteration",
        ),
        (parallel.context_parallel_size > 1, "--context-parallel-size > 1", "allowed: 1"),
        (
            parallel.expert_model_parallel_size > 1,
            "--expert-model-parallel-size > 1",
            "there are no experts; allowed: 1",
        ),
        (data.reset_position_ids, "--reset-position-ids", "positions run over the whole sample"),
        (
            data.reset_attention_mask,
            "--reset-attention-mask",
            "attention crosses documents; --eod-mask-loss is there",
        ),
        (config.logging.profile, "--profile", "no profiler is attached"),
    ]


def _model(config: RunConfig) -> Iterator[str]:
    model = config.model
    heads, hidden = model.num_attention_heads, model.hidden_size
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
    if model.ffn_size < 1:
        yield f"hidden_size {hidden} with --swiglu gives no MLP width; give --ffn-hidden-size"
    if model.swiglu and model.activation != "gelu":
        yield f"--activation {model.activation} contradicts --swiglu, which has its own; drop one"
    if model.position_embedding_type == "learned_absolute":
        if model.max_position_embeddings is None:
            yield "--position-embedding-type learned_absolute needs --max-position-embeddings"
    if model.positions < model.seq_length:
        yield (
            f"max_position_embeddings {model.positions} < seq_length {model.seq_length}; "
            "allowed: at least the sequence length"
        )
    if model.position_embedding_type == "rope":
        if model.rotary_dim < 2 or model.rotary_dim % 2:
            yield (
                f"head size {model.head_dim} * rotary_percent {model.rotary_percent:g} gives "
                f"{model.rotary_dim} rotary channels; allowed: an even number"
            )
    elif model.use_rope_scaling:
        yield (
            "--use-rope-scaling needs --position-embedding-type rope, found "
            f"{model.position_embedding_type}"
        )
    if model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield (
            f"rope_low_freq_factor {model.rope_low_freq_factor:g} must be below "
            f"rope_high_freq_factor {model.rope_high_freq_factor:g}"
        )
    if model.window_size is not None:
        left, right = model.window_size
        if left < 0 or right != 0:
            yield (
                f"--window-size {left},{right}: allowed LEFT,0 with LEFT >= 0 (attention is "
                "causal; without the flag a token sees all before it)"
            )


def _tensor_parallel(config: RunConfig) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    sizes = [
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.query_groups),
        ("ffn_hidden_size", model.ffn_size),
        (
            f"vocabulary padded to --make-vocab-size-divisible-by "
            f"{model.make_vocab_size_divisible_by}:",
            config.known_padded_vocab_size,
        ),
    ]
    if config.parallel.sequence_parallel:
        if tp == 1:
            yield (
                "--sequence-parallel needs --tensor-model-parallel-size > 1, found 1; "
                "switch it off with --no-sequence-parallel"
            )
        sizes.append(("with --sequence-parallel seq_length", model.seq_length))
    for name, size in sizes:
        if size is not None and size % tp:
            yield f"{name} {size} is not divisible by tensor_model_parallel_size {tp}"


def _pipeline(config: RunConfig) -> Iterator[str]:
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
    try:
        chunks_per_rank(config.model, parallel)
    except ConfigurationError as error:
        yield str(error)
    if parallel.use_distributed_optimizer and parallel.reshard_after_forward:
        yield (
            "--use-distributed-optimizer keeps parameters gathered, --reshard-after-forward frees "
            "them; give one of the two"
        )


def _precision(config: RunConfig) -> Iterator[str]:
    precision = config.precision
    if precision.precision == "auto":
        yield from _auto_contradictions(config)
        yield from idle_flags(precision)
        return  # the rest is checked when a device has decided (config.hardware)
    if config.model.transformer_impl == "transformer_engine":
        refusal = transformer_engine_refusal(config)
        if refusal is not None:
            yield f"--transformer-impl transformer_engine: {refusal}"
    yield from attention_refusals(config)
    if precision.bf16 and precision.fp16:
        yield "--bf16 contradicts --fp16; give one of the two (--no-bf16 drops a preset's)"
    if precision.fp8 and precision.fp16:
        yield f"--fp8-format {precision.fp8_format} contradicts --fp16: FP8 needs --bf16; drop one"
    if precision.fp8 and not precision.bf16:
        yield f"--fp8-format {precision.fp8_format} needs --bf16; --fp8-format none drops FP8"
    if precision.fp8 and not precision.fp8_reduce_amax:
        if config.parallel.sequence_parallel and precision.fp8_tp_comm != "none":
            yield (
                "--no-fp8-reduce-amax gives tensor-parallel ranks different scales, but codes that "
                "--sequence-parallel gathers over them are decoded with one; found --fp8-tp-comm "
                f"{precision.fp8_tp_comm}, allowed with both: none"
            )
    yield from _recipe(config)
    if precision.loss_scale is not None and not precision.fp16:
        yield f"--loss-scale {precision.loss_scale:g} needs --fp16; bf16 and fp32 have none"
    if precision.initial_loss_scale < precision.min_loss_scale:
        yield (
            f"initial_loss_scale {precision.initial_loss_scale:g} is below min_loss_scale "
            f"{precision.min_loss_scale:g}"
        )
    if precision.first_last_layers_bf16:
        start = precision.num_layers_at_start_in_bf16
        end = precision.num_layers_at_end_in_bf16
        if start + end > config.model.num_layers:
            yield (
                f"num_layers_at_start_in_bf16 {start} + num_layers_at_end_in_bf16 {end} > "
                f"num_layers {config.model.num_layers}"
            )
    yield from idle_flags(precision)


def _auto_contradictions(config: RunConfig) -> Iterator[str]:
    precision = config.precision
    given = {
        "--bf16": precision.bf16,
        "--fp16": precision.fp16,
        f"--fp8-format {precision.fp8_format}": precision.fp8_format is not None,
        f"--fp8-recipe {precision.fp8_recipe}": "fp8_recipe" in precision.model_fields_set
        and precision.fp8_recipe != "auto",
    }
    for flag, found in given.items():
        if found:
            yield f"--precision auto contradicts {flag}: it chooses itself; drop one of the two"


def _recipe(config: RunConfig) -> Iterator[str]:
    """Flags that the chosen recipe has no use for: refused, never ignored."""
    precision = config.precision
    recipe = precision.recipe
    if recipe.e8m0 and precision.fp8_power_of_2_scales is False:
        yield (
            f"--no-fp8-power-of-2-scales contradicts --fp8-recipe {recipe.name}, whose scales are "
            "stored as exponents (E8M0)"
        )
    if recipe.wgrad_in_fp8 is not None and not precision.fp8_wgrad:
        yield (
            f"--no-fp8-wgrad is what --fp8-recipe {recipe.name} means; drop it, or give "
            f"--fp8-recipe {recipe.wgrad_in_fp8}"
        )
    pp = config.parallel.pipeline_model_parallel_size
    if precision.fp8_amax_window == "micro-batch" and recipe.stateful and pp > 1:
        yield (
            "--fp8-amax-window micro-batch needs --pipeline-model-parallel-size 1, found "
            f"{pp}: a schedule runs forwards of later micro-batches before the backward of an "
            "earlier one, so scales can only move between steps; allowed: step"
        )
    for field in recipe.unused_fields:
        value, default = getattr(precision, field), type(precision).model_fields[field].default
        if value != default:
            yield (
                f"{spelled(field, value)} is for --fp8-recipe "
                f"{recipes_that(lambda spec: spec.stateful)}; {recipe.name} finds "
                "its scales in each tensor and keeps none"
            )


def _fp8_wires(config: RunConfig) -> Iterator[str]:
    """FP8 on the wire."""
    precision = config.precision
    if precision.fp8_grad_error_feedback and not precision.fp8_grad_reduce:
        yield "--fp8-grad-error-feedback needs --fp8-grad-reduce, whose losses it carries over"
    if not (precision.fp8 and precision.fp8_param_gather):
        return
    if precision.fp8_weight_amax == "cast":
        yield (
            "--fp8-param-gather contradicts --fp8-weight-amax cast: shards are cast before they "
            "are gathered, so their common scale has to be known by then; allowed: updated"
        )
    if precision.fp8_amax_window == "micro-batch":
        yield (
            "--fp8-param-gather contradicts --fp8-amax-window micro-batch, which moves scales "
            "while gathered codes wait to be decoded with them; allowed: step"
        )
    if not precision.recipe.per_tensor:
        yield (
            f"--fp8-param-gather does not work with --fp8-recipe {precision.recipe.name}: the "
            "shards of a weight are cast apart, and its rows, columns or blocks span them; "
            f"allowed: {recipes_that(lambda spec: spec.per_tensor)}"
        )


def _training(config: RunConfig) -> Iterator[str]:
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
    size, micro = training.global_batch_size, training.micro_batch_size
    if size is not None and size % micro:
        yield (
            f"--global-batch-size {size} is not a multiple of --micro-batch-size {micro}; give "
            f"{micro}, {2 * micro}, ..., or another --micro-batch-size"
        )
    if training.rampup_batch_size is None:
        return
    start, increment, _ = training.rampup_batch_size
    ramp = "--rampup-batch-size " + " ".join(map(str, training.rampup_batch_size))
    if size is None:
        yield f"{ramp} needs --global-batch-size, the size it ends at"
    elif start > size or (size - start) % increment:
        yield (
            f"{ramp}: does not end at --global-batch-size {size}: {size} - {start} must be a "
            f"multiple of {increment} and not negative"
        )
    else:
        bad = [batch for batch in ramp_sizes(training) or () if batch % micro]
        if bad:
            yield f"{ramp}: batch size {bad[0]} is not divisible by micro batch {micro}"


def _optimizer(config: RunConfig) -> Iterator[str]:
    optimizer, training = config.optimizer, config.training
    if optimizer.min_lr > optimizer.lr:
        yield f"min_lr {optimizer.min_lr:g} is above lr {optimizer.lr:g}"
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_fraction is not None:
        yield (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} contradicts --lr-warmup-fraction "
            f"{optimizer.lr_warmup_fraction:g}; give at most one"
        )
    if optimizer.lr_warmup_fraction == 1:
        yield "lr_warmup_fraction 1 leaves no iteration for the decay; allowed: 0 <= it < 1"
    length = optimizer.lr_decay_iters or training.train_iters
    name = "lr_decay_iters" if optimizer.lr_decay_iters else "train_iters"
    if length is not None and optimizer.lr_warmup_iters >= length:
        flag = name.replace("_", "-")
        fits = "0" if length == 1 else f"0 to {length - 1}"
        yield (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} must be below --{flag} {length}; give "
            f"--lr-warmup-iters {fits}"
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


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    split_paths = [
        name
        for name in ("train_data_path", "valid_data_path", "test_data_path")
        if getattr(data, name) is not None
    ]
    split_flags = ["--" + name.replace("_", "-") for name in split_paths]
    if data.data_path is not None and split_paths:
        yield f"--data-path contradicts {', '.join(split_flags)}; give one kind"
    if data.mock_data and (data.data_path is not None or split_paths):
        yield "--mock-data contradicts " + ", ".join(
            (["--data-path"] if data.data_path is not None else []) + split_flags
        )
    if split_paths and data.train_data_path is None:
        yield f"{', '.join(split_flags)} needs --train-data-path"
    if data.split is not None and split_paths:
        yield f"--split {data.split} divides --data-path; it contradicts {', '.join(split_flags)}"
    if data.tokenizer_type == "NullTokenizer" and data.vocab_size is None:
        yield "--tokenizer-type NullTokenizer needs --vocab-size"


def _records(config: RunConfig) -> Iterator[str]:
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.load is None:
        needing = ("finetune", "exit_on_missing_checkpoint", "use_checkpoint_args")
        for name in (*needing, "allow_changed_corpus", "new_tokens_from_mean"):
            if getattr(checkpoint, name):
                yield f"--{name.replace('_', '-')} needs --load"
    if logging.wandb_exp_name is not None and logging.wandb_project is None:
        yield "--wandb-exp-name needs --wandb-project"
