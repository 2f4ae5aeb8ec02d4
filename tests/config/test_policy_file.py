"""Policy files: which linears stay out of FP8, in both spellings, and what is refused."""

from pathlib import Path

import pytest

from megafp8.config import RunConfig, load_config
from megafp8.config.policy import high_precision_reasons
from megafp8.errors import ConfigurationError


def config(tmp_path: Path, text: str | None, flags: str = "--swiglu") -> RunConfig:
    argv = (
        "--num-layers 3 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 "
        "--seq-length 16 --position-embedding-type rope --micro-batch-size 1 --train-iters 1 "
        f"--lr 1e-3 --bf16 --fp8-format hybrid {flags}"
    ).split()
    if text is not None:
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        argv += ["--precision-policy", str(path)]
    return load_config(argv)


def kept(tmp_path: Path, text: str | None, flags: str = "--swiglu") -> set[str]:
    names = high_precision_reasons(config(tmp_path, text, flags))
    return {name.removeprefix("decoder.layers.") for name in names}


def error(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        high_precision_reasons(config(tmp_path, text))
    assert "policy.yaml" in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


ALL = {
    f"{layer}.{name}"
    for layer in range(3)
    for name in (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exclude: ['*.linear_fc2']", {f"{layer}.mlp.linear_fc2" for layer in range(3)}),
        ("exclude: ['*.mlp.down_proj']", {f"{layer}.mlp.linear_fc2" for layer in range(3)}),
        ("exclude: 'model.layers.1.self_attn.o_proj'", {"1.self_attention.linear_proj"}),
        ("exclude: ['decoder.layers.2.*']", {name for name in ALL if name.startswith("2")}),
        ("exclude: ['model.layers.2.*']", {name for name in ALL if name.startswith("2")}),
        ("include: ['decoder.layers.[01].*']", {name for name in ALL if name.startswith("2")}),
        (
            "include: ['*']\nexclude: ['*.0.*.q_proj', '*.0.*.k_proj', '*.0.*.v_proj']",
            {"0.self_attention.linear_qkv"},
        ),
        ("exclude: ['*.1.mlp.gate_proj', '*.1.mlp.up_proj']", {"1.mlp.linear_fc1"}),
        ("exclude: ['lm_head', 'embedding.*', '*.0.mlp.linear_fc1']", {"0.mlp.linear_fc1"}),
    ],
)
def test_selection(tmp_path: Path, text: str, expected: set[str]) -> None:
    assert kept(tmp_path, text) == expected


def test_without_swiglu_up_proj_is_the_whole_layer(tmp_path: Path) -> None:
    assert kept(tmp_path, "exclude: ['*.0.mlp.up_proj']", "") == {"0.mlp.linear_fc1"}


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("exclude: ['*.linear_fc3']", ("exclude", "'*.linear_fc3' matches no linear")),
        ("exclude: ['*.linear_fc2', '*.gate']", ("'*.gate' matches no linear",)),
        ("include: ['decoder.layers.3.*']", ("include", "matches no linear")),
        (
            "exclude: ['*.1.self_attn.q_proj']",
            (
                "splits decoder.layers.1.self_attention.linear_qkv",
                "q_proj, k_proj, v_proj as one",
                "model.layers.1.self_attn.k_proj, model.layers.1.self_attn.v_proj",
            ),
        ),
        ("include: ['*.gate_proj']", ("splits decoder.layers.0.mlp.linear_fc1",)),
        ("include: ['lm_head']", ("lm_head, which stays in high precision",)),
        ("exlude: ['*']", ("exlude: unknown key", "did you mean exclude")),
        ("exclude: []", ("not empty",)),
        ("exclude: {a: b}", ("a list of globs",)),
        ("# nothing", ("found no rule",)),
    ],
)
def test_refused(tmp_path: Path, text: str, fragments: tuple[str, ...]) -> None:
    message = error(tmp_path, text)
    for fragment in fragments:
        assert fragment in message, message


def test_a_missing_policy_file_is_refused(tmp_path: Path) -> None:
    run = config(tmp_path, None, "--precision-policy /nowhere/p.yaml")
    with pytest.raises(ConfigurationError, match="/nowhere/p.yaml: cannot be read"):
        high_precision_reasons(run)


def test_first_and_last_layers(tmp_path: Path) -> None:
    assert kept(tmp_path, None) == set()
    assert kept(tmp_path, None, "--first-last-layers-bf16") == {
        name for name in ALL if name[0] in "02"
    }
    flags = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2"
    assert kept(tmp_path, None, f"{flags} --num-layers-at-end-in-bf16 0") == {
        name for name in ALL if name[0] in "01"
    }
    reasons = high_precision_reasons(
        config(tmp_path, "exclude: ['*.1.mlp.down_proj']", "--first-last-layers-bf16")
    )
    assert "first layers" in reasons["decoder.layers.0.mlp.linear_fc2"]
    assert "last layers" in reasons["decoder.layers.2.mlp.linear_fc2"]
    assert "'*.1.mlp.down_proj'" in reasons["decoder.layers.1.mlp.linear_fc2"]
