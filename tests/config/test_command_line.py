"""The command line: exact names, each once, nothing swallowed; and Megatron's other flags."""

from pathlib import Path

import pytest

from megafp8.config import RunConfig, load_config
from megafp8.config.checks import _unbuilt, check_trainable
from megafp8.config.cli import parse_command
from megafp8.config.data import DataConfig
from megafp8.config.help import help_text
from megafp8.config.megatron_flags import ACCEPTED, ACCEPTED_VALUES, REFUSED, accepted_reason
from megafp8.config.names import ALSO_CALLED, SECTIONS, targets
from megafp8.errors import ConfigurationError

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 8 --train-iters 10 "
    "--lr 1e-3"
).split()


def load(text: str) -> RunConfig:
    return load_config(BASE + text.split())


def error(text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("--lr-warm 5", ("--lr-warm: unknown option", "--lr-warmup-iters")),
        ("--fp8", ("--fp8: unknown option", "--fp8-format")),
        ("--fp8 hybrid", ("--fp8: unknown option", "--fp8-format")),
        ("--use-fp8=False", ("--use-fp8: unknown option",)),
        ("--sed 3", ("--sed: unknown option", "--seed")),
        ("-seed 3", ("-seed: unknown option", "--seed")),
        ("--clip_grad 1", ("--clip_grad: unknown option", "--clip-grad")),
        ("--lr 1e-4", ("--lr: given twice",)),
        ("--bf16 --bf16", ("--bf16: given twice",)),
        ("--bf16 --no-bf16", ("--no-bf16: contradicts --bf16",)),
        ("-- --unknown 3", ("bare --",)),
        ("--seed 1 2", ("--seed: found 2 values",)),
        ("--seed", ("--seed: found no value", "integer")),
        ("--seed -1", ("--seed: found -1", ">= 0")),
        ("--run-dir=", ("--run-dir: found nothing",)),
        ("--lr-decay-style sine", ("--lr-decay-style", "'sine'", "cosine", "WSD")),
        ("--tokenizer-type GPT2BPETokenizer", ("--tokenizer-type", "SentencePieceTokenizer")),
        ("--adam-beta2 1", ("--adam-beta2: found 1", "< 1")),
        ("--no-lr 3", ("--no-lr: unknown option",)),
        ("--save-optim", ("--save-optim: unknown option", "--no-save-optim")),
        ("--rampup-batch-size 1 2", ("--rampup-batch-size: found 2 values, allowed 3",)),
        ("--rampup-batch-size 0 2 3", ("--rampup-batch-size: found 0", ">= 1")),
        ("--split 1,a", ("--split: found '1,a'", "969,30,1")),
        ("--split 0,0,0", ("--split", "969,30,1")),
        ("--fp8-amax-compute-algo mean", ("--fp8-amax-compute-algo", "most_recent")),
        ("--fp8-amax-compute-algo quantile:2", ("quantile:Q",)),
        ("--fp8-amax-compute-algo trimmed_max:1.5", ("trimmed_max:K",)),
        ("--fp8-amax-history-len 0", ("--fp8-amax-history-len: found 0", ">= 1")),
        ("--world-size 4", ("--world-size is for --dry-run",)),
    ],
)
def test_refused(text: str, fragments: tuple[str, ...]) -> None:
    message = error(text)
    for fragment in fragments:
        assert fragment in message, message


def test_words_before_any_option_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'train' before any option"):
        load_config(["train", *BASE])
    with pytest.raises(ConfigurationError, match=r"before any.*did you mean --config a\.yaml\?"):
        load_config(["a.yaml", *BASE])
    with pytest.raises(ConfigurationError, match="-config: unknown option.*did you mean --config"):
        load_config(["-config", "a.yaml", *BASE])


def test_empty_values_and_names_like_no_other() -> None:
    with pytest.raises(ConfigurationError, match="--save: found nothing .*leave the flag out"):
        load_config([*BASE, "--save", ""])
    with pytest.raises(ConfigurationError, match="--zig: unknown.*; --zag: unknown option"):
        load("--zig 1 --zag 2")
    with pytest.raises(ConfigurationError, match="--zigzag: unknown option; --help lists"):
        load_config([*BASE, "--zigzag", "1"])


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--tp", "--tensor-model-parallel-size"),
        ("-tp", "--tensor-model-parallel-size"),
        ("--pp_size", "--pipeline-model-parallel-size"),
        ("--dp", "--fsdp-size"),
        ("--vpp", "--num-layers-per-virtual-pipeline-stage"),
        ("--mbs", "--micro-batch-size"),
        ("--gbs", "--global-batch-size"),
        ("--batch-size", "--micro-batch-size, --global-batch-size"),
        ("--learning-rate", "--lr"),
        ("--lr-warmup-steps", "--lr-warmup-iters"),
        ("--lr-schedule", "--lr-decay-style"),
        ("--max-steps", "--train-iters"),
        ("--wd", "--weight-decay"),
        ("--seq-len", "--seq-length"),
        ("--fp8", "--fp8-format"),
        ("--resume", "--load"),
    ],
)
def test_what_people_call_a_flag(given: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_config([*BASE, given, "2"])
    assert str(raised.value).endswith(f"; did you mean {meant}?")


def test_other_names_lead_to_flags_and_are_none() -> None:
    known = {name.replace("_", "-") for name in targets()}
    tools = {"replicate-size"}  # of tools/reshard_checkpoint.py
    assert {name for names in ALSO_CALLED.values() for name in names} <= known | tools
    assert not known & set(ALSO_CALLED)


@pytest.mark.parametrize("kind", ["ByteTokenizer", "NullTokenizer"])
def test_a_tokenizer_without_a_file_takes_none(kind: str) -> None:
    data = DataConfig(mock_data=True, tokenizer_type=kind, tokenizer_model="x", vocab_size=300)
    config = load_config(BASE).model_copy(update={"data": data})
    with pytest.raises(ConfigurationError, match=f"{kind} takes no --tokenizer-model, found x"):
        check_trainable(config)
    check_trainable(
        config.model_copy(update={"data": data.model_copy(update={"tokenizer_model": None})})
    )


@pytest.mark.parametrize("given", [["--config"], ["--config", ""], ["--config="]])
def test_a_config_without_its_file(given: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="--config: found no value, allowed the path of"):
        load_config([*BASE, *given])


@pytest.mark.parametrize("text", ["False", "false", "FALSE"])
def test_false_is_false(text: str) -> None:
    for flag in (f"--deterministic-mode {text}", f"--deterministic-mode={text}"):
        assert load(flag).training.deterministic_mode is False
    assert load("--no-deterministic-mode").training.deterministic_mode is False


@pytest.mark.parametrize("text", ["0", "no", "off", "n", "1", "yes"])
def test_other_booleans_are_refused_with_the_right_spelling(text: str) -> None:
    message = error(f"--sequence-parallel {text}")
    assert "--no-sequence-parallel" in message and "true or false" in message
    assert "--no-save-optim" in error(f"--no-save-optim {text}")


def test_negative_flags() -> None:
    config = load("--no-check-for-nan-in-loss-and-grad --no-save-optim --no-load-rng")
    assert not config.training.check_for_nan_in_loss_and_grad
    assert config.checkpoint.no_save_optim and config.checkpoint.no_load_rng
    assert not config.checkpoint.no_load_optim
    fp8 = "--bf16 --fp8-format hybrid"
    assert load(f"{fp8} --fp8-reduce-amax false").precision.fp8_reduce_amax is False


def test_values_of_every_kind() -> None:
    config = load("--weight-decay 1e-1 --window-size 8,0 --split 95,5 --data-path a --clip-grad 0")
    assert config.optimizer.weight_decay == 0.1 and config.optimizer.clip_grad == 0.0
    assert config.model.window_size == (8, 0) and config.model.window_left == 8
    assert load("--window-size 8 0").model.window_size == (8, 0)
    assert load("--window-size (8,0)").model.window_size == (8, 0)
    assert config.data.split_weights == (95.0, 5.0, 0.0)
    assert config.data.data_path == ("a",)


def test_required_values_are_named_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(["--hidden-size", "32"])
    message = str(caught.value)
    for flag in ("--num-layers", "--num-attention-heads", "--seq-length", "--lr"):
        assert flag in message
    assert "--micro-batch-size" in message and "missing" in message


def test_configuration_is_frozen() -> None:
    config = load("")
    with pytest.raises(ValueError, match="frozen"):
        config.optimizer.lr = 1.0  # type: ignore[misc]


def test_defaults_of_the_amax_history_are_those_of_te_and_help_says_so() -> None:
    precision = load("").precision
    assert (precision.fp8_amax_history_len, precision.fp8_amax_compute_algo) == (1024, "max")
    text = help_text()
    assert "Megatron's default is 1;" in text and "most_recent; this is TE's" in " ".join(
        text.split()
    )


def test_help_names_every_flag() -> None:
    text = help_text()
    for section, model in SECTIONS.items():
        assert f"\n{section}:" in text
        for field in model.model_fields:
            assert field.replace("_", "-") in text, field
            assert model.model_fields[field].description, field


def test_help_says_where_a_default_is_not_megatrons() -> None:
    for section, field, default in [
        ("training", "exit_signal_handler", "Megatron's default is off"),
        ("training", "eval_interval", "Megatron's is 1000"),
        ("model", "transformer_impl", "Megatron's default is transformer_engine"),
    ]:
        assert default in (SECTIONS[section].model_fields[field].description or "")


def test_help_says_what_is_refused() -> None:
    config = load("")
    for _, flag, _ in _unbuilt(config):
        name = flag.split()[0]
        target = targets()[name[2:].replace("-", "_")]
        text = SECTIONS[target.section].model_fields[target.field].description or ""
        assert "refused" in text, name
    assert "a blend is refused" in help_text()
    assert "(default 4294967296)" in help_text() and "(default 1e-05)" in help_text()


def test_no_field_name_is_used_twice() -> None:
    fields = [field for model in SECTIONS.values() for field in model.model_fields]
    assert len(fields) == len(set(fields))
    assert not set(targets()) & {"config", "dry_run", "world_size", "help"}


@pytest.mark.parametrize("flag", sorted(ACCEPTED))
def test_accepted_flags_are_recorded(flag: str) -> None:
    config = load(f"{flag} 3 --seed 5")
    assert config.accepted_flags == (f"{flag} 3",)
    assert accepted_reason(config.accepted_flags[0])
    assert config.training.seed == 5


def test_flags_with_one_accepted_value() -> None:
    for flag, (value, _) in ACCEPTED_VALUES.items():
        assert load(f"{flag} {value}").accepted_flags == (f"{flag} {value}",)
        assert f"allowed {value}" in error(f"{flag} other")
        assert f"allowed {value}" in error(flag)


@pytest.mark.parametrize("flag", [*sorted(REFUSED), "--moe-router-topk", "--retro-x"])
def test_refused_flags_say_why(flag: str) -> None:
    assert f"Megatron's {flag} is not offered: " in error(f"{flag} 1")


def test_lists_of_megatron_flags_do_not_overlap_with_ours() -> None:
    known = {"--" + name.replace("_", "-") for name in targets()}
    listed = [*ACCEPTED, *ACCEPTED_VALUES, *REFUSED]
    assert len(listed) == len(set(listed)) and not known & set(listed)


def test_fp8_interval_is_refused_with_its_sentence() -> None:
    assert "ignored since Transformer Engine 1.8" in error("--fp8-interval 1")


def test_megatron_flags_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {use_mcore_models: true}\nlogging: {timing_log_level: 2}\n")
    config = load_config(["--config", str(path), *BASE])
    assert config.accepted_flags == ("--use-mcore-models", "--timing-log-level 2")
    path.write_text("precision: {fp8_interval: 1}\n")
    with pytest.raises(ConfigurationError, match="precision.fp8_interval: Megatron's"):
        load_config(["--config", str(path), *BASE])
    path.write_text("model: {use_mcore_models: false}\n")
    with pytest.raises(ConfigurationError, match="unknown key"):
        load_config(["--config", str(path), *BASE])


def test_control_options() -> None:
    command = parse_command([*BASE, "--dry-run", "--world-size", "8"])
    assert command.dry_run and command.world_size == 8
    assert not parse_command([*BASE, "--dry-run", "false"]).dry_run
    with pytest.raises(ConfigurationError, match="--world-size: found 0"):
        parse_command([*BASE, "--dry-run", "--world-size", "0"])


def test_resolved_values_read_back_to_an_equal_configuration(tmp_path: Path) -> None:
    import yaml

    config = load(
        "--bf16 --fp8-format hybrid --fp8-amax-compute-algo quantile:0.99 --no-save-optim "
        "--no-check-for-nan-in-loss-and-grad --rampup-batch-size 4 2 100 --run-dir 010 "
        "--adam-eps 1e-12 --window-size 4,0"
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config(["--config", str(path)]) == config
