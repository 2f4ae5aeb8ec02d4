"""The plan: what is FP8, what is not and why, the same for every layout and rank."""

from pathlib import Path

import pytest

from megafp8.config import ModelShape, RunConfig, load_config
from megafp8.config.recipes import RECIPES
from megafp8.errors import ConfigurationError, PrecisionError
from megafp8.precision import PrecisionPlan, build_plan

CONFIGS = Path(__file__).resolve().parents[2] / "scripts" / "configs"


def preset(name: str, text: str = "") -> RunConfig:
    return load_config(["--config", str(CONFIGS / f"{name}.yaml"), *text.split()])


def plan_of(config: RunConfig, world_size: int) -> PrecisionPlan:
    assert config.known_vocab_size is not None
    shape = ModelShape.from_config(config, config.known_vocab_size)
    return build_plan(config, shape, config.layout(world_size))


def plain(text: str) -> RunConfig:
    """A model with one head of every size that the text does not change."""
    argv = dict(
        [
            ("--num-layers", "2"),
            ("--hidden-size", "32"),
            ("--num-attention-heads", "2"),
            ("--ffn-hidden-size", "64"),
            ("--seq-length", "16"),
            ("--position-embedding-type", "rope"),
            ("--micro-batch-size", "2"),
            ("--train-iters", "1"),
            ("--lr", "1e-3"),
            ("--vocab-size", "100"),
        ]
    )
    words = text.split()
    for flag in [word for word in words if word in argv]:
        del argv[flag]
    flat = [token for pair in argv.items() for token in pair]
    return load_config(["--bf16", "--fp8-format", "hybrid", *flat, *words])


LAYOUTS = [
    ("", 1),
    ("", 2),
    ("", 4),
    ("--fsdp-size 1", 4),
    ("--fsdp-size 2", 4),
    ("--tensor-model-parallel-size 2", 2),
    ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ("--tensor-model-parallel-size 2 --sequence-parallel", 4),
    ("--tensor-model-parallel-size 4", 4),
    ("--tensor-model-parallel-size 4 --sequence-parallel", 4),
    ("--pipeline-model-parallel-size 2", 2),
    ("--pipeline-model-parallel-size 4", 4),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule zbv", 2),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        4,
    ),
]


@pytest.mark.parametrize(("text", "world_size"), LAYOUTS)
def test_the_parity_preset_is_fp8_throughout_at_every_layout(text: str, world_size: int) -> None:
    plan = plan_of(preset("parity", text), world_size)
    alone = plan_of(preset("parity"), 1)
    assert plan.count("fp8") == len(plan.linears) == 16
    decisions = [(item.name, item.precision, item.reason) for item in plan.linears]
    assert decisions == [(item.name, item.precision, item.reason) for item in alone.linears]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "world_size", "linears"), [("tiny", 4, 16), ("llama3_8b", 8, 128)]
)
def test_presets_are_fp8_throughout_with_every_recipe(
    recipe: str, name: str, world_size: int, linears: int
) -> None:
    plan = plan_of(preset(name, f"--fp8-recipe {recipe}"), world_size)
    assert plan.count("fp8") == len(plan.linears) == linears
    assert all(f"recipe {recipe}" in item.reason for item in plan.linears)
    # Both presets have sequence parallelism, where columns of an operand span ranks.
    high = "rowwise" in recipe
    assert plan.weight_gradients.startswith("bf16 operands" if high else "FP8 operands")


@pytest.mark.parametrize(
    ("text", "world_size", "fragment"),
    [
        ("--fp8-recipe blockwise", 1, "tokens of one rank 32 not a multiple of 128, which blockwi"),
        # 64 tokens, but 16 on each of two ranks with micro-batches of one.
        (
            "--fp8-recipe mxfp8 --tensor-model-parallel-size 2 --sequence-parallel "
            "--micro-batch-size 1 --seq-length 32",
            2,
            "tokens of one rank 16 not a multiple of 32, which mxfp8's blocks need",
        ),
    ],
)
def test_blocks_have_to_fit_the_features_and_tokens_of_one_rank(
    text: str, world_size: int, fragment: str
) -> None:
    with pytest.raises(PrecisionError, match="no linear can be FP8") as caught:
        plan_of(plain(f"--hidden-size 64 --ffn-hidden-size 128 {text}"), world_size)
    assert fragment in str(caught.value)


def test_a_linear_that_blocks_do_not_fit_is_bf16_on_every_rank() -> None:
    plan = plan_of(plain("--fp8-recipe mxfp8 --ffn-hidden-size 48"), 1)
    found = {item.name.rpartition("linear_")[2]: item for item in plan.linears}
    assert {name for name, item in found.items() if item.precision == "bf16"} == {"fc1", "fc2"}
    assert "48 not a multiple of 32, which mxfp8's blocks need" in found["fc1"].reason


@pytest.mark.parametrize(
    ("name", "world_size", "linears"),
    [("tiny", 4, 16), ("gpt2_345m", 1, 96), ("llama3_8b", 8, 128), ("llama3_70b", 64, 320)],
)
def test_presets_are_fp8_throughout(name: str, world_size: int, linears: int) -> None:
    plan = plan_of(preset(name), world_size)
    assert plan.count("fp8") == len(plan.linears) == linears


def test_tiny_has_blocks_of_128_on_every_rank() -> None:
    config = preset("tiny")
    shape = ModelShape.from_config(config, 2048)
    for item in shape.linears(config.layout(4), config.training.micro_batch_size):
        sizes = (item.in_features, item.out_features, item.tokens, item.local_tokens)
        assert all(size % 128 == 0 for size in sizes), item


@pytest.mark.parametrize(
    ("text", "world_size", "bf16", "fragment"),
    [
        # 24 is no multiple of 16: both linears of the MLP fall back, attention does not.
        ("--ffn-hidden-size 24", 1, ("fc1", "fc2"), "per rank 24 not a multiple of 16"),
        # 32 / 4 = 8 columns of linear_proj per rank, 96 / 4 = 24 rows of linear_qkv.
        (
            "--num-attention-heads 4 --tensor-model-parallel-size 4",
            4,
            ("qkv", "proj"),
            "per rank",
        ),
        # One rank alone would fit; at tensor-parallel 2 its half does not.
        (
            "--ffn-hidden-size 48 --tensor-model-parallel-size 2",
            2,
            ("fc1", "fc2"),
            "per rank 24 not a multiple of 16",
        ),
        ("--num-attention-heads 2 --kv-channels 12", 1, ("qkv", "proj"), "per rank 24 not"),
    ],
)
def test_linears_that_do_not_fit_are_bf16_with_the_reason(
    text: str, world_size: int, bf16: tuple[str, ...], fragment: str
) -> None:
    plan = plan_of(plain(text), world_size)
    for item in plan.linears:
        expected = "bf16" if item.name.rpartition("linear_")[2] in bf16 else "fp8"
        assert item.precision == plan.precision(item.name) == expected, item
    reasons = [item.reason for item in plan.linears if item.precision == "bf16"]
    assert any(fragment in reason for reason in reasons), reasons
    assert "bf16: " in plan.render()


@pytest.mark.parametrize(
    ("text", "world_size", "fragment"),
    [
        ("--seq-length 17 --micro-batch-size 1", 1, "tokens of the GEMM 17 not a multiple of 16"),
        (
            "--seq-length 4092 --micro-batch-size 1 --num-attention-heads 4 "
            "--tensor-model-parallel-size 4 --sequence-parallel",
            4,
            "tokens of the GEMM 4092 not a multiple of 16",
        ),
        (
            "--seq-length 8 --micro-batch-size 1 --tensor-model-parallel-size 2 "
            "--sequence-parallel",
            2,
            "tokens of the GEMM 8 not a multiple of 16",
        ),
        ("--first-last-layers-bf16", 1, "first layers stay in BF16"),
    ],
)
def test_fp8_without_a_single_fp8_linear_is_an_error(
    text: str, world_size: int, fragment: str
) -> None:
    with pytest.raises(PrecisionError) as caught:
        plan_of(plain(text), world_size)
    message = str(caught.value)
    assert fragment in message and "decoder.layers.0.self_attention.linear_qkv" in message


def test_sequence_parallel_counts_tokens_after_the_gather() -> None:
    # 16 tokens in all, 8 on each rank before the gather.
    text = "--micro-batch-size 1 --tensor-model-parallel-size 2"
    plan = plan_of(plain(f"{text} --sequence-parallel"), 2)
    assert {item.tokens for item in plan.linears} == {16}
    assert plan.count("fp8") == 8


@pytest.mark.parametrize(
    ("flags", "precision", "reason"),
    [
        ("--bf16", "bf16", "--bf16"),
        ("--fp16", "fp16", "--fp16"),
        ("", "fp32", "no precision flag"),
        ("--bf16 --fp8-format none", "bf16", "--bf16"),
    ],
)
def test_without_fp8(flags: str, precision: str, reason: str) -> None:
    config = plain("")
    values = config.to_dict()
    values["precision"] = {}
    argv = []
    for fields in values.values():
        for name, value in fields.items():
            if not isinstance(value, bool):
                argv += [f"--{name.replace('_', '-')}", str(value)]
    plan = plan_of(load_config([*argv, *flags.split()]), 1)
    assert {(item.precision, item.reason) for item in plan.linears} == {(precision, reason)}
    assert "FP8" not in plan.weight_gradients


@pytest.mark.parametrize(
    ("text", "world_size", "fragment"),
    [
        ("", 1, "tensor-parallel size is 1"),
        ("--tensor-model-parallel-size 2", 2, "--fp8-tp-comm all-gather has nothing to gather"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            2,
            "all-gather of FP8 linears in FP8",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --fp8-tp-comm none",
            2,
            "all-gather and reduce-scatter in bf16",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --no-fp8-wgrad",
            2,
            "again in bf16 for weight gradients",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --fp8-tp-comm all",
            2,
            "(1 byte a value), reduce-scatter in FP8 (a scale every 256 values, summed in fp32)",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --fp8-tp-comm all --no-fp8-wgrad",
            2,
            "of output gradients in bf16; reduce-scatter in FP8",
        ),
        (
            "--tensor-model-parallel-size 2 --fp8-tp-comm all",
            2,
            "--fp8-tp-comm all has nothing to gather",
        ),
    ],
)
def test_what_tensor_parallel_traffic_comes_to(text: str, world_size: int, fragment: str) -> None:
    plan = plan_of(preset("parity", text), world_size)
    assert fragment in plan.tp_communication and fragment in plan.render()


@pytest.mark.parametrize(
    ("text", "world_size", "wanted"),
    [
        ("", 1, "nothing is sharded, fsdp size is 1"),
        (
            "--fp8-param-gather --fp8-grad-reduce",
            1,
            "nothing is sharded, fsdp size is 1; FP8 weights are cast from the fp32 masters "
            "(--fp8-param-gather); --fp8-grad-reduce has nothing to reduce",
        ),
        ("", 2, "parameters gathered in bf16; gradients reduced in fp32"),
        (
            "--fp8-format none --fp8-param-gather --fp8-grad-reduce",
            2,
            "parameters gathered in bf16; gradients reduced in fp32",
        ),
        (
            "--fp8-param-gather",
            2,
            "weights of FP8 linears gathered in FP8 (1 byte a value), others in bf16; gradients "
            "reduced in fp32",
        ),
        (
            "--fp8-grad-reduce --fp8-grad-error-feedback --fsdp-size 2",
            4,
            "parameters gathered in bf16; gradients of blocks reduced in FP8 (a scale every 256 "
            "values, summed in fp32, losses carried over), others in fp32, all-reduced over "
            "replicas in fp32",
        ),
    ],
)
def test_what_data_parallel_traffic_comes_to(text: str, world_size: int, wanted: str) -> None:
    plan = plan_of(preset("parity", text), world_size)
    assert plan.dp_communication == wanted == plan.as_dict()["dp_communication"]
    assert f"data-parallel traffic: {wanted}" in plan.render()


def test_what_stays_high_is_listed_with_reasons() -> None:
    plan = plan_of(preset("parity", "--pipeline-model-parallel-size 2"), 2)
    parts = {part.part: part for part in plan.high_precision}
    assert {"embedding", "norms", "attention core", "output_layer"} <= set(parts)
    assert parts["pipeline boundaries"].precision == "bf16"
    assert all(part.reason for part in plan.high_precision)


def test_a_policy_file_decides(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("exclude: ['model.layers.3.mlp.*']\n")
    plan = plan_of(preset("parity", f"--precision-policy {policy}"), 1)
    bf16 = [item.name for item in plan.linears if item.precision == "bf16"]
    assert bf16 == ["decoder.layers.3.mlp.linear_fc1", "decoder.layers.3.mlp.linear_fc2"]
    assert "layers 0-2" in plan.render() and "layers 3 " in plan.render()
    policy.write_text("exclude: ['*.linear_fc9']\n")
    for text in ("", "--fp8-format none"):
        with pytest.raises(ConfigurationError, match="matches no linear"):
            plan_of(preset("parity", f"--precision-policy {policy} {text}"), 1)


def test_unknown_names_are_refused() -> None:
    plan = plan_of(preset("parity"), 1)
    with pytest.raises(PrecisionError, match="no linear is named 'output_layer'.*linear_fc1"):
        plan.precision("output_layer")


def test_plain_values() -> None:
    plan = plan_of(preset("parity"), 1)
    values = plan.as_dict()
    assert len(values["linears"]) == 16
    assert values["linears"][0] == {
        "name": "decoder.layers.0.self_attention.linear_qkv",
        "layer": 0,
        "in_features": 128,
        "out_features": 256,
        "tokens": 128,
        "precision": "fp8",
        "reason": "--fp8-format hybrid, recipe delayed",
    }
