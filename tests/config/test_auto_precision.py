"""What `auto` takes on pretended devices."""

from pathlib import Path

import pytest

from megafp8.config import RunConfig, load_config
from megafp8.config.auto_precision import Hardware, choose_recipe, for_hardware
from megafp8.errors import ConfigurationError

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 4 --lr 1e-3 --mock-data "
    "--vocab-size 100"
).split()
CPU = Hardware("cpu", "cpu")
PRESETS = Path(__file__).resolve().parents[2] / "scripts" / "configs"


def gpu(major: int, minor: int) -> Hardware:
    return Hardware("cuda", "a GPU", (major, minor))


def config(*flags: str) -> RunConfig:
    return load_config([*FLAGS, *flags])


@pytest.mark.parametrize(
    ("hardware", "compute", "fp8"),
    [
        (CPU, "bf16", None),
        (gpu(6, 0), "fp32", None),
        (gpu(7, 0), "fp16", None),
        (gpu(7, 5), "fp16", None),
        (gpu(8, 0), "bf16", None),
        (gpu(8, 6), "bf16", None),
        (gpu(8, 9), "bf16", ("hybrid", "delayed")),
        (gpu(9, 0), "bf16", ("hybrid", "delayed")),
        (gpu(10, 0), "bf16", ("e4m3", "mxfp8")),
        (gpu(12, 0), "bf16", ("hybrid", "delayed")),
        (Hardware("rocm", "MI300"), "bf16", None),
    ],
)
def test_precision_auto(hardware: Hardware, compute: str, fp8: tuple[str, str] | None) -> None:
    asked = config("--precision", "auto")
    resolved, choice = for_hardware(asked, hardware)
    assert asked.precision.precision == "auto", "what the user said is not rewritten"
    assert resolved.precision.compute_dtype == compute
    found = (resolved.precision.fp8_format, resolved.precision.recipe.name)
    assert (found if resolved.precision.fp8 else None) == fp8
    assert choice is not None and choice.asked == ("--precision auto",)
    record = choice.record()
    assert record["device"] == str(hardware) and record["reason"]
    assert all(getattr(resolved.precision, k, True) == v for k, v in record["taken"].items())
    assert RunConfig.from_dict(resolved.model_dump()) == resolved, "it stands by itself"


@pytest.mark.parametrize(
    ("hardware", "recipe"),
    [(CPU, "delayed"), (gpu(8, 0), "delayed"), (gpu(9, 0), "delayed"), (gpu(10, 0), "mxfp8")],
)
def test_recipe_of_a_device(hardware: Hardware, recipe: str) -> None:
    assert choose_recipe(hardware)[0] == recipe


def test_recipe_auto_keeps_the_format_that_was_asked_for() -> None:
    flags = ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "auto")
    for hardware in (CPU, gpu(9, 0), gpu(10, 0)):
        resolved, choice = for_hardware(config(*flags), hardware)
        assert resolved.precision.fp8_recipe == "delayed"
        assert choice is not None and choice.asked == ("--fp8-recipe auto",)
    assert "hybrid is asked for" in choice.reason


@pytest.mark.parametrize("flags", [("--bf16",), ("--bf16", "--fp8-format", "hybrid"), ()])
def test_nothing_is_decided_that_was_not_left_open(flags: tuple[str, ...]) -> None:
    asked = config(*flags)
    for hardware in (CPU, gpu(10, 0)):
        resolved, choice = for_hardware(asked, hardware)
        assert resolved is asked and choice is None


@pytest.mark.parametrize(
    "flags",
    [("--bf16",), ("--fp16",), ("--fp8-format", "hybrid"), ("--fp8-format", "none"),
     ("--fp8-recipe", "delayed")],
)  # fmt: skip
def test_auto_beside_a_precision_is_a_contradiction(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match=f"--precision auto contradicts {' '.join(flags)}"):
        config("--precision", "auto", *flags)


def test_what_auto_takes_is_checked_with_the_other_flags() -> None:
    asked = config("--precision", "auto", "--loss-scale", "128")
    assert for_hardware(asked, gpu(7, 0))[0].precision.loss_scale == 128
    with pytest.raises(ConfigurationError, match=r"bf16 True .*a GPU.*: --loss-scale 128 needs"):
        for_hardware(asked, gpu(8, 0))


@pytest.mark.parametrize("preset", ["tiny", "parity", "llama3_8b", "llama3_70b", "gpt2_345m"])
def test_auto_on_the_command_line_takes_the_place_of_a_preset_s_choice(preset: str) -> None:
    path = str(PRESETS / f"{preset}.yaml")
    asked = load_config(["--config", path, "--precision", "auto"])
    assert not asked.precision.bf16 and asked.precision.fp8_format is None
    assert for_hardware(asked, gpu(9, 0))[0].precision.fp8_format == "hybrid"
    with pytest.raises(ConfigurationError, match="--precision auto contradicts --bf16"):
        load_config(["--config", path, "--precision", "auto", "--bf16"])
