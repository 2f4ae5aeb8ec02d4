"""What each field of a configuration decides, for a run that goes on from a checkpoint.

A field is of the model's meaning (another value is another model), changes numbers (allowed, and
told with its effect), or has no effect on them. Every field stands in exactly one of the three
tables; one that is in none of them would be told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from megafp8.config.model import DERIVED
from megafp8.config.names import SECTIONS
from megafp8.config.precision_checks import FP8_ONLY

if TYPE_CHECKING:
    from megafp8.config.run_config import RunConfig

# What a field of the model section decides, where that is another property: "" where others, or the
# shapes of the tensors, tell.
_DECIDES = {
    **DERIVED,
    "group_query_attention": "query_groups",
    "max_position_embeddings": "",
    "rotary_percent": "rotary_dim",
    "disable_bias_linear": "",
    "untie_embeddings_and_output_weights": "tied_embeddings",
    "make_vocab_size_divisible_by": "",
}
# Field of the model section to what is compared.
MODEL: dict[str, str] = {
    field: _DECIDES.get(field, field)
    for field in (
        "num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels "
        "group_query_attention num_query_groups max_position_embeddings position_embedding_type "
        "rotary_base rotary_percent use_rope_scaling rope_scaling_factor rope_low_freq_factor "
        "rope_high_freq_factor rope_original_max_position_embeddings normalization norm_epsilon "
        "swiglu activation disable_bias_linear add_qkv_bias add_attention_output_bias "
        "add_mlp_bias untie_embeddings_and_output_weights window_size "
        "make_vocab_size_divisible_by qk_layernorm"
    ).split()
}

OTHER_SAMPLES = "the samples still to come are others: some text may come again, some never"
OTHER_VALIDATION = "validation and test losses are of other samples"
OTHER_IDS = "token ids may mean something else"
OTHER_PRECISION = "the precision is another"
OTHER_ROUNDING = "sums are rounded otherwise"
LEARNING_RATE = "the learning rate follows"
LOSS_SCALE = "the loss scale follows"

# Effect on a run that goes on to the fields that have it.
NUMBERS: dict[str, tuple[str, ...]] = {
    effect: tuple(fields.split())
    for effect, fields in {
        OTHER_SAMPLES: "seed seq_length data_path train_data_path split mock_data",
        OTHER_VALIDATION: "valid_data_path test_data_path",
        OTHER_IDS: "tokenizer_type tokenizer_model vocab_size",
        "the loss counts other tokens": "eod_mask_loss reset_position_ids reset_attention_mask",
        "iterations and evaluations take other numbers of samples": (
            "global_batch_size rampup_batch_size"
        ),
        LEARNING_RATE: (
            "lr min_lr lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_fraction "
            "lr_wsd_decay_iters lr_wsd_decay_style train_iters train_samples"
        ),
        "the updates are others": "optimizer weight_decay clip_grad adam_beta1 adam_beta2 adam_eps",
        "other elements are dropped": "hidden_dropout attention_dropout",
        OTHER_PRECISION: (
            "precision bf16 fp16 fp8_format fp8_recipe fp8_fake_quant fp8_wgrad fp8_attention "
            "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 "
            "precision_policy"
        ),
        "FP8 scales are found otherwise": (
            "fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_scale_cap "
            "fp8_power_of_2_scales fp8_reduce_amax fp8_amax_window fp8_nonfinite_amax "
            "fp8_weight_amax"
        ),
        "other traffic is rounded to FP8": (
            "fp8_tp_comm fp8_param_gather fp8_grad_reduce fp8_grad_error_feedback"
        ),
        LOSS_SCALE: "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        OTHER_ROUNDING: (
            "micro_batch_size tensor_model_parallel_size sequence_parallel "
            "pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
            "pipeline_schedule context_parallel_size expert_model_parallel_size fsdp_size "
            "tp_comm_overlap tp_comm_overlap_cfg deterministic_mode transformer_impl "
            "attention_backend te_fused_norms norm_impl fp8_kernels"
        ),
    }.items()
}

# Neither the next iteration's numbers nor those after it follow from these.
NO_EFFECT: tuple[str, ...] = (
    # Weights that are loaded are not drawn.
    "init_method_std",
    # When memory is taken and freed, and what runs meanwhile.
    *(
        "use_distributed_optimizer use_torch_fsdp2 overlap_grad_reduce overlap_param_gather "
        "reshard_after_forward recompute_granularity recompute_num_layers num_workers "
        "data_cache_path distributed_backend distributed_timeout_minutes "
        "tp_comm_bootstrap_backend"
    ).split(),
    # A permission: where it has an effect a run without it is refused.
    "fp8_emulate",
    # When a run stops, saves, evaluates, and what it writes.
    *(
        "exit_interval exit_duration_in_mins exit_signal_handler eval_interval eval_iters "
        "check_for_nan_in_loss_and_grad max_consecutive_bad_steps save load save_interval "
        "async_save keep_last ckpt_format no_save_optim no_load_optim no_load_rng finetune "
        "allow_changed_corpus new_tokens_from_mean exit_on_missing_checkpoint "
        "use_checkpoint_args run_dir log_interval log_throughput log_params_norm "
        "log_num_zeros_in_grad tensorboard_dir wandb_project wandb_exp_name fp8_stats_interval "
        "profile"
    ).split(),
)


def _fp8(config: RunConfig) -> bool:
    return config.precision.fp8


# Fields that say something only where a condition holds; they are compared where it holds for both.
CONDITIONS: dict[tuple[str, ...], Callable[[RunConfig], bool]] = {
    FP8_ONLY: _fp8,
    ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"): lambda config: (
        _fp8(config) and config.precision.first_last_layers_bf16
    ),
    NUMBERS[LOSS_SCALE]: lambda config: config.precision.fp16,
    ("adam_beta1", "adam_beta2", "adam_eps"): lambda config: config.optimizer.optimizer != "sgd",
    ("activation",): lambda config: not config.model.swiglu,
    tuple(name for name in MODEL if name.startswith("rope_")): (
        lambda config: config.model.use_rope_scaling
    ),
}

# What is compared where two values of a field may mean the same.
MEANT: dict[str, Callable[[RunConfig], Any]] = {
    "split": lambda config: config.data.split_weights,
    "fp8_format": lambda config: config.precision.fp8_format if _fp8(config) else None,
    "fp8_recipe": lambda config: config.precision.recipe.name,
    "fp8_power_of_2_scales": lambda config: config.precision.power_of_2_scales,
    "transformer_impl": lambda config: (
        "native" if config.model.transformer_impl == "local" else config.model.transformer_impl
    ),
    "pipeline_schedule": lambda config: config.parallel.schedule,
}

OWNER = {field: name for name, section in SECTIONS.items() for field in section.model_fields}


def model_differences(saved: RunConfig, config: RunConfig) -> Iterator[str]:
    """Yield one phrase for each thing in which the model of a checkpoint is another one."""
    told = set()
    for field, name in MODEL.items():
        if not name or name in told:
            continue
        told.add(name)
        before, now = getattr(saved.model, name), getattr(config.model, name)
        if before != now and _counts(field, saved, config):
            yield difference(name, before, now)


def setting_differences(
    saved: RunConfig, config: RunConfig, left_out: Collection[str] = ()
) -> Iterator[str]:
    """Yield one phrase for each effect of changed settings: `a was 1, now 2; ... (its effect)`.

    Args:
        saved: The configuration that a checkpoint was trained with.
        config: The one that goes on.
        left_out: Fields that are compared otherwise.
    """
    known = {*MODEL, *NO_EFFECT, *(field for fields in NUMBERS.values() for field in fields)}
    unknown = tuple(field for field in OWNER if field not in known)
    for effect, fields in {**NUMBERS, "the numbers may be others": unknown}.items():
        found = [
            difference(field, _raw(field, saved), _raw(field, config))
            for field in fields
            if field not in left_out
            and _raw(field, saved) != _raw(field, config)
            and _meant(field, saved) != _meant(field, config)
            and _counts(field, saved, config)
        ]
        if found:
            yield f"{'; '.join(found)} ({effect})"


def difference(name: str, before: Any, now: Any) -> str:
    """Return both values of a setting as a phrase."""
    return f"{name} was {before}, now {now}"


def _raw(field: str, config: RunConfig) -> Any:
    return getattr(getattr(config, OWNER[field]), field)


def _meant(field: str, config: RunConfig) -> Any:
    return MEANT[field](config) if field in MEANT else _raw(field, config)


def _counts(field: str, saved: RunConfig, config: RunConfig) -> bool:
    return all(
        holds(saved) and holds(config) for fields, holds in CONDITIONS.items() if field in fields
    )
