"""Contradictions between fields, and features that do not exist yet."""

import pytest

from megafp8.config import RunConfig, load_config
from megafp8.config.checks import check_trainable
from megafp8.config.transformer_engine import attention_refusals
from megafp8.errors import ConfigurationError

VALUES = {
    "num-layers": "4",
    "hidden-size": "32",
    "num-attention-heads": "4",
    "ffn-hidden-size": "64",
    "seq-length": "16",
    "position-embedding-type": "rope",
    "micro-batch-size": "2",
    "global-batch-size": "8",
    "train-iters": "10",
    "lr": "1e-3",
}


def load(text: str) -> RunConfig:
    """Load the base values with some replaced; `!name` drops one."""
    words, values = text.split(), dict(VALUES)
    for word in words:
        values.pop(word.lstrip("-!"), None)
    argv = [token for name, value in values.items() for token in (f"--{name}", value)]
    return load_config(argv + [word for word in words if not word.startswith("!")])


def error(text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("--context-parallel-size 2", "--context-parallel-size > 1 is not built yet"),
        ("--expert-model-parallel-size 2", "not built yet"),
        ("--reset-position-ids", "--reset-position-ids is not built yet"),
        ("--reset-attention-mask", "--reset-attention-mask is not built yet"),
        ("--profile", "--profile is not built yet"),
        ("--fp8-stats-interval 10", "--fp8-stats-interval is not built yet"),
        ("--data-path 0.3 a 0.7 b", "a blend is not built yet"),
    ],
)
def test_what_is_not_built_yet_is_refused_with_a_sentence(text: str, fragment: str) -> None:
    assert fragment in error(text)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("--num-attention-heads 5", "hidden_size 32 is not divisible by num_attention_heads 5"),
        ("--num-query-groups 2", "--num-query-groups 2 needs --group-query-attention"),
        ("--group-query-attention --num-query-groups 3", "4 is not divisible by num_query_groups"),
        ("--swiglu --activation gelu-tanh", "--activation gelu-tanh contradicts --swiglu"),
        ("--position-embedding-type learned_absolute", "needs --max-position-embeddings"),
        ("--max-position-embeddings 8", "max_position_embeddings 8 < seq_length 16"),
        ("--rotary-percent 0.4", "gives 3 rotary channels"),
        ("--position-embedding-type none --use-rope-scaling", "--use-rope-scaling needs"),
        ("--window-size 4,1", "--window-size 4,1"),
        ("--window-size -1,0", "--window-size -1,0"),
        ("--tensor-model-parallel-size 3", "num_attention_heads 4 is not divisible by tensor_mo"),
        (
            "--group-query-attention --tensor-model-parallel-size 2",
            "num_query_groups 1 is not divisible by tensor_model_parallel_size 2",
        ),
        ("--ffn-hidden-size 66 --tensor-model-parallel-size 4", "ffn_hidden_size 66 is not"),
        (
            "--seq-length 17 --tensor-model-parallel-size 2 --sequence-parallel",
            "seq_length 17 is not divisible by tensor_model_parallel_size 2",
        ),
        ("--sequence-parallel", "--sequence-parallel needs --tensor-model-parallel-size > 1"),
        ("--pipeline-schedule interleaved", "needs --num-layers-per-virtual-pipeline-stage"),
        (
            "--pipeline-schedule zbv --num-layers-per-virtual-pipeline-stage 1",
            "contradicts --pipeline-schedule zbv",
        ),
        ("--pipeline-schedule zbv", "zbv schedule needs --pipeline-model-parallel-size > 1"),
        ("--num-layers-per-virtual-pipeline-stage 1", "needs --pipeline-model-parallel-size > 1"),
        (
            "--pipeline-schedule zbv --pipeline-model-parallel-size 2 --recompute-granularity full",
            "--recompute-granularity does not work with --pipeline-schedule zbv",
        ),
        ("--use-distributed-optimizer --reshard-after-forward", "give one of the two"),
        ("--bf16 --fp16", "--bf16 contradicts --fp16"),
        ("--fp16 --fp8-format hybrid", "FP8 needs --bf16"),
        ("--fp8-format hybrid", "--fp8-format hybrid needs --bf16"),
        ("--loss-scale 2 --bf16", "--loss-scale 2 needs --fp16"),
        (
            "--fp8-recipe mxfp8 --no-fp8-power-of-2-scales",
            "--no-fp8-power-of-2-scales contradicts --fp8-recipe mxfp8",
        ),
        ("--fp8-recipe rowwise_with_gw_hp --no-fp8-wgrad", "--no-fp8-wgrad is what --fp8-recipe"),
        (
            "--fp8-amax-window micro-batch --pipeline-model-parallel-size 2",
            "--fp8-amax-window micro-batch needs --pipeline-model-parallel-size 1, found 2: a sch",
        ),
        ("--fp8-recipe mxfp8 --fp8-margin 1", "--fp8-margin 1 is for --fp8-recipe delayed; mxfp8"),
        ("--fp8-recipe tensorwise --fp8-amax-history-len 8", "--fp8-amax-history-len 8 is for"),
        (
            "--fp8-recipe rowwise --fp8-amax-compute-algo ema:0.5",
            "--fp8-amax-compute-algo ema:0.5 is for --fp8-recipe delayed; rowwise finds its scales",
        ),
        ("--fp8-recipe blockwise --fp8-scale-cap 8", "--fp8-scale-cap 8.0 is for --fp8-recipe del"),
        ("--fp8-recipe tensorwise --no-fp8-reduce-amax", "--no-fp8-reduce-amax is for --fp8-re"),
        (
            "--fp8-recipe tensorwise --fp8-amax-window micro-batch",
            "--fp8-amax-window micro-batch",
        ),
        ("--fp8-recipe tensorwise --fp8-nonfinite-amax freeze", "--fp8-nonfinite-amax freeze is f"),
        ("--fp8-recipe tensorwise --fp8-weight-amax cast", "--fp8-weight-amax cast is for"),
        ("--first-last-layers-bf16 --num-layers-at-end-in-bf16 4", "> num_layers 4"),
        ("--train-samples 80", "--train-iters 10 contradicts --train-samples 80"),
        ("!train-iters", "exactly one of --train-iters and --train-samples, found neither"),
        ("--recompute-num-layers 1", "needs --recompute-granularity full, found none"),
        ("--micro-batch-size 0", "--micro-batch-size: found 0, allowed >= 1"),
        ("--rampup-batch-size 4 2 10 !global-batch-size", "needs --global-batch-size"),
        ("--rampup-batch-size 4 3 10", "does not end at --global-batch-size 8: 8 - 4 must be"),
        ("--rampup-batch-size 16 2 10", "does not end at --global-batch-size 8"),
        ("--min-lr 1", "min_lr 1 is above lr 0.001"),
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "contradicts --lr-warmup-fraction"),
        ("--lr-warmup-fraction 1", "--lr-warmup-fraction: found 1.0, allowed < 1"),
        (
            "--lr-warmup-iters 10",
            "--lr-warmup-iters 10 must be below --train-iters 10; give --lr-warmup-iters 0 to 9",
        ),
        ("--lr-decay-iters 5 --lr-warmup-iters 5", "below --lr-decay-iters 5; give --lr-warmup-it"),
        ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
        ("--lr-wsd-decay-iters 3", "needs --lr-decay-style WSD, found linear"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "lr_wsd_decay_iters 11 is above"),
        ("--data-path a --train-data-path b", "--data-path contradicts --train-data-path"),
        ("--mock-data --data-path a", "--mock-data contradicts --data-path"),
        ("--valid-data-path a", "needs --train-data-path"),
        ("--train-data-path a --split 1,1", "contradicts --train-data-path"),
        ("--finetune", "--finetune needs --load"),
        ("--new-tokens-from-mean", "--new-tokens-from-mean needs --load"),
        ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint needs --load"),
        ("--allow-changed-corpus", "--allow-changed-corpus needs --load"),
        ("--wandb-exp-name a", "--wandb-exp-name needs --wandb-project"),
        (
            "--transformer-impl transformer_engine --bf16 --fp8-format hybrid --no-fp8-wgrad",
            "--transformer-impl transformer_engine: --no-fp8-wgrad: TransformerEngine has no",
        ),
        (
            "--transformer-impl transformer_engine --bf16 --fp8-format hybrid --fp8-tp-comm none "
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "--fp8-tp-comm none: TransformerEngine gathers FP8 operands as FP8",
        ),
        ("--fp8-attention dpa", "--fp8-attention dpa needs --transformer-impl transformer_engine"),
        (
            "--transformer-impl native --bf16 --fp8-format hybrid --fp8-attention dpa",
            "found native: the native core has no FP8; allowed with it: none",
        ),
        (
            "--transformer-impl transformer_engine --bf16 --fp8-attention dpa",
            "--fp8-attention dpa needs --fp8-format hybrid",
        ),
        (
            "--transformer-impl transformer_engine --bf16 --fp8-format hybrid --fp8-attention mha",
            "--fp8-attention mha lets linear_qkv hand on FP8",
        ),
        (
            "--transformer-impl transformer_engine --bf16 --fp8-format hybrid --fp8-attention dpa "
            "--attention-backend local",
            "--fp8-attention dpa contradicts --attention-backend local",
        ),
        ("--attention-backend flash", "--attention-backend flash is a core of TransformerEngine's"),
        (
            "--transformer-impl native --attention-backend unfused",
            "needs --transformer-impl transformer_engine, found native; allowed with it: auto, loc",
        ),
        (
            "--transformer-impl transformer_engine --attention-backend fused",
            "--attention-backend fused computes in 16 bits and needs --bf16 or --fp16",
        ),
        (
            "--transformer-impl transformer_engine --bf16 --fp8-format hybrid --fp8-param-gather "
            "--fp8-recipe tensorwise",
            "--fp8-param-gather with --fp8-recipe tensorwise: TransformerEngine finds the scales",
        ),
        (
            "--transformer-impl transformer_engine --bf16 --fp8-format hybrid --fp8-tp-comm all "
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "--fp8-tp-comm all: TransformerEngine reduces in BF16",
        ),
        ("--bf16 --fp8-param-gather", "--fp8-param-gather needs --fp8-format hybrid"),
        ("--bf16 --fp8-grad-reduce", "--fp8-grad-reduce needs --fp8-format hybrid"),
        ("--bf16 --fp8-tp-comm all", "--fp8-tp-comm all needs --fp8-format hybrid"),
        (
            "--bf16 --fp8-format hybrid --fp8-grad-error-feedback",
            "--fp8-grad-error-feedback needs --fp8-grad-reduce",
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-param-gather --fp8-weight-amax cast",
            "--fp8-param-gather contradicts --fp8-weight-amax cast",
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-param-gather --fp8-amax-window micro-batch",
            "--fp8-param-gather contradicts --fp8-amax-window micro-batch",
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-param-gather --fp8-recipe rowwise",
            "--fp8-param-gather does not work with --fp8-recipe rowwise",
        ),
    ],
)
def test_contradictions(text: str, fragment: str) -> None:
    assert fragment in error(text)


@pytest.mark.parametrize(
    "flag",
    [
        "--fp8-recipe mxfp8",
        "--fp8-recipe auto",
        "--fp8-margin 2",
        "--fp8-amax-history-len 16",
        "--fp8-amax-compute-algo most_recent",
        "--fp8-scale-cap 8.0",
        "--fp8-power-of-2-scales",
        "--fp8-fake-quant",
        "--fp8-param-gather",
        "--first-last-layers-bf16",
        "--no-fp8-wgrad",
        "--no-fp8-reduce-amax",
        "--fp8-amax-window micro-batch",
        "--fp8-nonfinite-amax freeze",
        "--fp8-weight-amax cast",
        "--fp8-tp-comm none",
        "--fp8-grad-reduce",
        "--fp8-kernels eager",
        # With their default values, too.
        "--fp8-recipe delayed",
        "--fp8-margin 0",
        "--fp8-tp-comm all-gather",
    ],
)
def test_fp8_flags_need_fp8(flag: str) -> None:
    for base in ("", "--bf16 ", "--fp16 "):
        assert f"{flag} needs --fp8-format hybrid or e4m3, found neither" in error(base + flag)
    load(f"--bf16 --fp8-format none {flag}")


def test_counts_of_bf16_layers_need_their_flag() -> None:
    found = error("--bf16 --fp8-format hybrid --num-layers-at-end-in-bf16 2")
    assert "--num-layers-at-end-in-bf16 2 needs --first-last-layers-bf16" in found


@pytest.mark.parametrize("cap", ["1e-45", "1e39", "0"])
def test_scale_cap_keeps_inverses_finite(cap: str) -> None:
    found = error(f"--bf16 --fp8-format hybrid --fp8-scale-cap {cap}")
    assert "--fp8-scale-cap: found" in found and "allowed" in found


def test_trimmed_max_fits_an_index() -> None:
    found = error(f"--bf16 --fp8-format hybrid --fp8-amax-compute-algo trimmed_max:{10**30}")
    assert "trimmed_max:K with an integer K >= 0 and below 2**31" in found


def test_gathered_codes_need_one_scale() -> None:
    flags = "--bf16 --fp8-format hybrid --no-fp8-reduce-amax --tensor-model-parallel-size 2"
    found = error(f"{flags} --sequence-parallel")
    assert "found --fp8-tp-comm all-gather, allowed with both: none" in found


@pytest.mark.parametrize(
    "text",
    [
        "--transformer-impl local",
        "--transformer-impl native",
        "--transformer-impl transformer_engine",
        "--transformer-impl transformer_engine --bf16 --fp8-format hybrid",
        "--bf16 --fp8-format hybrid --fp8-recipe auto",
        "--bf16 --fp8-format none",
        "--bf16 --fp8-format none --fp8-tp-comm all --fp8-param-gather --fp8-grad-reduce",
        "--bf16 --fp8-format hybrid --fp8-param-gather --fp8-recipe tensorwise",
        "--bf16 --fp8-format hybrid --fp8-tp-comm all --fp8-param-gather --fp8-grad-reduce "
        "--fp8-grad-error-feedback",
        "--transformer-impl transformer_engine --bf16 --fp8-format hybrid --fp8-grad-reduce "
        "--fp8-param-gather",
        "--fp16 --loss-scale 128",
        "--optimizer sgd",
        "--eod-mask-loss --keep-last 2 --window-size 0,0",
        "--bf16 --fp8-format hybrid --no-fp8-reduce-amax",
        "--bf16 --fp8-format hybrid --no-fp8-reduce-amax --fp8-param-gather",
        "--bf16 --fp8-format hybrid --no-fp8-reduce-amax --tensor-model-parallel-size 2",
        "--bf16 --fp8-format hybrid --no-fp8-reduce-amax --tensor-model-parallel-size 2 "
        "--sequence-parallel --fp8-tp-comm none",
        "--bf16 --fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 0",
        "--bf16 --fp8-format none --fp8-recipe mxfp8 --no-fp8-wgrad --first-last-layers-bf16",
        "--precision auto --fp8-tp-comm all --fp8-param-gather --fp8-grad-reduce",
        "--bf16 --fp8-emulate",
        "--bf16 --no-fp8-param-gather --fp8-wgrad",
        "--recompute-granularity selective",
        "--recompute-granularity full --recompute-num-layers 1",
        "--lr-decay-style WSD --lr-wsd-decay-iters 3",
        "--train-samples 80 !train-iters",
        "--rampup-batch-size 4 2 10",
        "!global-batch-size",
    ],
)
def test_allowed(text: str) -> None:
    load(text)


def test_derived_model_values() -> None:
    model = load("").model
    assert (model.head_dim, model.query_groups, model.positions) == (8, 4, 16)
    assert model.qkv_bias and model.attention_output_bias and model.mlp_bias
    assert model.tied_embeddings
    assert load("--hidden-size 4096 --swiglu !ffn-hidden-size").model.ffn_size == 10880
    assert load("!ffn-hidden-size").model.ffn_size == 128
    assert load("--kv-channels 10 --group-query-attention").model.query_groups == 1
    separate = load("--disable-bias-linear --add-qkv-bias").model
    assert separate.qkv_bias and not separate.mlp_bias and not separate.attention_output_bias
    assert not load("--add-mlp-bias false").model.mlp_bias
    assert load("").model.padded_vocab_size(129) == 256


def test_derived_precision_values() -> None:
    assert load("").precision.compute_dtype == "fp32"
    assert load("--fp16").precision.compute_dtype == "fp16"
    fp8 = load("--bf16 --fp8-format hybrid --fp8-recipe auto").precision
    assert fp8.fp8 and fp8.compute_dtype == "bf16" and fp8.recipe.name == "delayed"
    assert fp8.fp8_recipe == "auto", "validation rewrites nothing"
    assert not load("--bf16 --fp8-format none").precision.fp8


def test_what_training_needs_and_a_dry_run_does_not() -> None:
    for text, fragment in [
        ("", "no data"),
        ("--mock-data", "--tokenizer-type is missing"),
        ("--mock-data --tokenizer-type NullTokenizer", "NullTokenizer needs --vocab-size$"),
        ("--data-path a --vocab-size 10", "--tokenizer-type is missing"),
        (
            "--data-path a --tokenizer-type SentencePieceTokenizer",
            "needs --tokenizer-model PATH$",
        ),
        (
            "--mock-data --tokenizer-type SentencePieceTokenizer",
            "--mock-data needs none: --tokenizer-type NullTokenizer",
        ),
    ]:
        with pytest.raises(ConfigurationError, match=fragment):
            check_trainable(load(text))
    check_trainable(load("--mock-data --vocab-size 10"))
    check_trainable(load("--mock-data --tokenizer-type NullTokenizer --vocab-size 10"))
    check_trainable(load("--data-path a --tokenizer-type ByteTokenizer"))


def test_typed_values_from_python_are_checked_strictly() -> None:
    values = {
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "seq_length": 16,
            "position_embedding_type": "rope",
        },
        "optimizer": {"lr": 1},
        "training": {"micro_batch_size": 1, "train_iters": 1},
    }
    assert RunConfig.from_dict(values).optimizer.lr == 1.0
    for section, field, value, fragment in [
        ("model", "num_layers", True, "model.num_layers: found True, allowed an integer"),
        ("model", "num_layers", "4", "allowed an integer"),
        ("model", "colour", 1, "model.colour: unknown name"),
        ("optimizer", "lr", float("nan"), "optimizer.lr: found nan, allowed"),
        ("optimizer", "optimizer", "lion", "allowed adam, sgd"),
    ]:
        bad = {name: dict(fields) for name, fields in values.items()}
        bad[section][field] = value
        with pytest.raises(ConfigurationError) as caught:
            RunConfig.from_dict(bad)
        assert fragment in str(caught.value)
    # Of a record that another version wrote, all at once.
    strange = {**values, "model": {**values["model"], "colour": 1, "smell": 2}, "taste": {}}
    strange["training"] = {**values["training"], "train_iters": -1}
    with pytest.raises(ConfigurationError) as caught:
        RunConfig.from_dict(strange)
    found = str(caught.value).split("; ")
    assert {"model.colour: unknown name", "model.smell: unknown name"} < set(found)
    assert "taste: unknown name" in found and any("train_iters: found -1" in one for one in found)


def test_fp8_attention_needs_delayed_scaling() -> None:
    """Said whatever recipes there are: cuDNN has no other on Hopper."""
    config = load("--transformer-impl transformer_engine --bf16 --fp8-format hybrid")
    changes = {"fp8_recipe": "tensorwise", "fp8_attention": "dpa"}
    precision = config.precision.model_copy(update=changes)
    (said,) = attention_refusals(config.model_copy(update={"precision": precision}))
    assert said.startswith("--fp8-attention dpa needs --fp8-recipe delayed, found tensorwise")
    assert not list(attention_refusals(config))
