"""`--tp-comm-overlap`: what it needs, and its YAML file."""

from pathlib import Path

import pytest

from megafp8.config import RunConfig, load_config
from megafp8.config.user_buffers import METHODS, read_user_buffers, user_buffer_options
from megafp8.errors import ConfigurationError

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--position-embedding-type rope --micro-batch-size 2 --train-iters 1 --lr 1e-3 --bf16 "
    "--transformer-impl transformer_engine --tensor-model-parallel-size 2 --sequence-parallel "
    "--fp8-format hybrid"
)
OVERLAP = f"{BASE} --tp-comm-overlap"


def load(text: str, *more: str) -> RunConfig:
    return load_config([*text.split(), *more])


def error(text: str, *more: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text, *more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_options() -> None:
    config = load(OVERLAP)
    options = user_buffer_options(config, 6, 2)
    assert options is not None
    assert (options.tokens, options.hidden_size, options.bootstrap_backend) == (256, 64, "nccl")
    assert options.fp8 and options.high_precision and options.settings == {}
    assert not options.scatters_dgrad("qkv") and not options.scatters_dgrad("fc1")
    assert user_buffer_options(load(BASE), 8, 0) is None
    only = user_buffer_options(load(OVERLAP, "--tp-comm-bootstrap-backend", "gloo"), 8, 0)
    assert only is not None and only.bootstrap_backend == "gloo" and not only.high_precision


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("--transformer-impl transformer_engine", "", "needs --transformer-impl transformer_eng"),
        ("transformer_engine", "native", "user buffers it uses; found native"),
        (" --tensor-model-parallel-size 2 --sequence-parallel", "", "tensor-model-parallel-size >"),
        (" --sequence-parallel", "", "--tp-comm-overlap needs --sequence-parallel"),
        ("--bf16", "--bf16 --distributed-backend gloo", "nccl, found gloo"),
        ("--bf16 ", "", "--tp-comm-overlap needs --bf16"),
        ("hybrid", "hybrid --fp8-recipe blockwise", "user buffers gather no blocks; allowed: del"),
        (
            "128 --position-embedding-type rope --micro-batch-size 2",
            "64 --position-embedding-type rope --micro-batch-size 2 --fp8-recipe mxfp8",
            "to be a multiple of 128, found 64",
        ),
        (
            "--bf16",
            "--bf16 --pipeline-schedule zbv --pipeline-model-parallel-size 2",
            "--tp-comm-overlap with --pipeline-schedule zbv",
        ),
    ],
)
def test_what_it_needs(old: str, new: str, said: str) -> None:
    assert old in OVERLAP
    assert said in error(OVERLAP.replace(old, new, 1))


def test_file_without_the_switch() -> None:
    assert error(BASE, "--tp-comm-overlap-cfg", "a.yaml") == (
        "--tp-comm-overlap-cfg needs --tp-comm-overlap"
    )


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ub.yaml"
    path.write_text(text)
    return str(path)


def test_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "qkv_fprop: {method: ring_exchange, num_sm: 1, set_sm_margin: 0, aggregate: true}\n"
        "fc2_fprop: {method: pipeline, num_splits: 4, is_reduce_scatter: 1, fp8_buf: 0}\n"
        "fc1_dgrad: {method: pipeline, comm_priority: -5}\n",
    )
    assert read_user_buffers(path) == {
        "qkv_fprop": {
            "method": "ring_exchange",
            "num_sm": 1,
            "set_sm_margin": False,
            "aggregate": True,
        },
        "fc2_fprop": {
            "method": "pipeline",
            "num_splits": 4,
            "is_reduce_scatter": True,
            "fp8_buf": False,
        },
        "fc1_dgrad": {"method": "pipeline", "comm_priority": -5},
    }
    options = user_buffer_options(load(OVERLAP, "--tp-comm-overlap-cfg", path), 8, 0)
    assert options is not None
    assert options.scatters_dgrad("fc1") and not options.scatters_dgrad("qkv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qkv_forward: {num_sm: 1}", "qkv_forward: unknown GEMM, allowed qkv_fprop, "),
        ("fc3_fprop: {num_sm: 1}", "did you mean fc2_fprop"),
        ("qkv_fprop: {num_sms: 1}", "qkv_fprop.num_sms: unknown key, allowed method, "),
        ("qkv_fprop: 3", "qkv_fprop: allowed a mapping"),
        ("qkv_fprop: {num_sm: [1]}", "qkv_fprop.num_sm: allowed one value"),
        ("qkv_fprop: {num_sm: 0}", "line 1, qkv_fprop.num_sm: found 0, allowed 1 or more"),
        ("qkv_fprop: {num_sm: many}", "qkv_fprop.num_sm: found 'many'"),
        ("qkv_fprop: {use_ce: maybe}", "qkv_fprop.use_ce: found 'maybe', allowed true or false"),
        ("qkv_fprop: {method: pipeline}", "'pipeline', allowed for qkv_fprop: ring_exchange"),
        ("fc2_wgrad: {method: bulk}", "found 'bulk', allowed for fc2_wgrad: external"),
        ("qkv_fprop: {is_reduce_scatter: true}", "found True, it is an all-gather"),
        ("proj_fprop: {is_reduce_scatter: false}", "found False, it is a reduce-scatter"),
        ("proj_fprop: {fp8_buf: true}", "proj_fprop.fp8_buf: found true, allowed false: sums"),
        (
            "qkv_dgrad: {method: ring_exchange}\nqkv_wgrad: {num_sm: 8}",
            "qkv_wgrad: contradicts qkv_dgrad.method ring_exchange",
        ),
        ("- a", "found no mapping at the top"),
        ("qkv_fprop: {num_sm: 1, num_sm: 2}", "given twice"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    found = error(OVERLAP, "--tp-comm-overlap-cfg", path)
    assert "ub.yaml" in found and said in found


def test_missing_file(tmp_path: Path) -> None:
    assert "none.yaml: cannot be read" in error(
        OVERLAP, "--tp-comm-overlap-cfg", str(tmp_path / "none.yaml")
    )


def test_every_gemm_has_its_methods() -> None:
    assert len(METHODS) == 12 and all(METHODS.values())
