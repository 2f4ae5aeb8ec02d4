"""`--tp-comm-overlap` on TransformerEngine's own Python, with buffers that only note how made."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.config.user_buffers import METHODS, UserBufferOptions
from megafp8.errors import ConfigurationError
from megafp8.layers import LinearOptions
from tests.model.small import FP8, GPT2, layer_context, small_config
from tests.support import te_cpu
from tests.support.layouts import PARITY, ROOT, degrees
from tests.support.limits import PATIENCE_S
from tests.support.ranks import Ranks
from tests.support.te_runs import TE

OPTIONS = UserBufferOptions(
    tokens=64, hidden_size=32, bootstrap_backend="gloo", fp8=True, high_precision=True
)
SCATTERED = {"qkv_dgrad": {"method": "ring_exchange", "num_sm": 3}}
LAYERS = {
    "qkv": ("decoder.layers.0.self_attention.linear_qkv", "column"),
    "proj": ("decoder.layers.0.self_attention.linear_proj", "row"),
    "fc1": ("decoder.layers.0.mlp.linear_fc1", "column"),
    "fc2": ("decoder.layers.0.mlp.linear_fc2", "row"),
}


class _Buffer:
    """Stands for the extension's CommOverlap and CommOverlapP2P."""

    def __init__(
        self, shape: Any, dtype: Any, helper: Any, tp_size: int, *args: Any, **kwargs: Any
    ):
        self.shape, self.dtype, self.tp_size, self.kwargs = shape, dtype, tp_size, kwargs

    def is_fp8_ubuf(self) -> bool:
        return self.dtype == torch.uint8


class _Ring(_Buffer):
    pass


def with_buffers() -> Any:
    """Load the double and give its extension buffers without memory."""
    te_cpu.load()
    import transformer_engine_torch as extension

    extension.CommOverlap, extension.CommOverlapP2P = _Buffer, _Ring
    extension.CommOverlapHelper = lambda *groups: groups
    extension.device_supports_multicast = lambda: True
    extension.ubuf_built_with_mpi = lambda: False
    extension.get_stream_priority_range = lambda: (0, -5)
    from megafp8.layers.transformer_engine import user_buffers

    return user_buffers


def made(options: UserBufferOptions) -> dict[str, dict[str, Any]]:
    """What TE has made, by "<GEMM> <precision>"."""
    user_buffers = with_buffers()
    from transformer_engine.pytorch.module import base

    user_buffers.initialize(replace(options, settings={}), 2)  # a former model's
    user_buffers.initialize(options, 2)
    assert base.is_ub_initialized()
    found = {
        f"{name} {mode.value}": {
            "ring": type(buffer) is _Ring,
            "shape": buffer.shape,
            "dtype": str(buffer.dtype),
            "sms": buffer.kwargs["num_comm_sm"],
        }
        for (name, mode), buffer in base._ub_communicators.items()
    }
    user_buffers.destroy()
    user_buffers.destroy()  # there is nothing left
    assert not base.is_ub_initialized()
    return found


def test_buffers_of_both_precisions(te_ranks: Ranks) -> None:
    found, other = te_ranks.run(made, world_size=2, options=OPTIONS)
    assert found == other and len(found) == 2 * len(METHODS)
    for name, buffer in found.items():
        gemm, mode = name.split()
        assert buffer["shape"] == [64, 32]
        gathers = gemm not in ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")
        # Sums are never FP8.
        wanted = "torch.uint8" if mode == "fp8" and gathers else "torch.bfloat16"
        assert buffer["dtype"] == wanted, name
    only = te_ranks.run(made, world_size=2, options=replace(OPTIONS, high_precision=False))[0]
    assert set(only) == {f"{gemm} fp8" for gemm in METHODS}


def test_settings_reach_both_precisions(te_ranks: Ranks) -> None:
    """Stock TE fails on a scattered dgrad with two precisions."""
    settings = {**SCATTERED, "proj_fprop": {"method": "ring_exchange", "num_sm": 5}}
    found = te_ranks.run(made, world_size=2, options=replace(OPTIONS, settings=settings))[0]
    for mode in ("fp8", "none"):
        assert found[f"qkv_dgrad {mode}"] == {
            "ring": True,
            "shape": [64, 32],
            "dtype": "torch.bfloat16",
            "sms": 3,
        }
        assert found[f"proj_fprop {mode}"]["ring"] and found[f"proj_fprop {mode}"]["sms"] == 5
        assert not found[f"fc1_dgrad {mode}"]["ring"]


def twice_in_stock_te() -> str:
    with_buffers()
    import transformer_engine.pytorch as te

    modes = [te.UserBufferQuantizationMode.FP8, te.UserBufferQuantizationMode.NONE]
    try:
        te.initialize_ub(
            shape=[64, 32],
            tp_size=2,
            quantization_modes=modes,
            ub_cfgs=SCATTERED,
            bootstrap_backend="gloo",
        )
    except ValueError as error:
        return str(error)
    finally:
        te.destroy_ub()
    return ""


def test_stock_te_moves_a_dgrad_twice(te_ranks: Ranks) -> None:
    assert "not in list" in te_ranks.run(twice_in_stock_te, world_size=2)[0]


def linears(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    user_buffers = with_buffers()
    from megafp8.layers.transformer_engine.backend import TeOptions, TransformerEngineBackend

    config = small_config(
        GPT2, **FP8, tensor_model_parallel_size=2, sequence_parallel=True, disable_bias_linear=True
    )
    found = {}
    for overlap in (None, replace(OPTIONS, settings=settings)):
        context = layer_context(config)
        backend = TransformerEngineBackend(
            context.recipe, context.mesh, TeOptions(user_buffers=overlap)
        )
        for layer, (name, mode) in LAYERS.items():
            linear: Any = backend.linear(context, LinearOptions(name, mode, True, False))
            state = {key: value for key, value in vars(linear).items() if key.startswith("ub_")}
            found[layer if overlap else f"{layer} without"] = state
    user_buffers.destroy()
    return found


@pytest.mark.parametrize("settings", [{}, SCATTERED], ids=["bulk", "scattered"])
def test_switches_of_the_linears(te_ranks: Ranks, settings: dict[str, Any]) -> None:
    found = te_ranks.run(linears, world_size=2, settings=settings)[0]
    for layer in LAYERS:
        without = found[f"{layer} without"]
        assert without.pop("ub_name") is None and not any(without.values()) and len(without) == 6
        state = found[layer]
        assert state.pop("ub_name") == layer
        on = {key.removeprefix("ub_") for key, value in state.items() if value}
        if layer in ("proj", "fc2"):
            assert on == {"overlap_rs_fprop", "overlap_ag_dgrad"}
        elif settings and layer == "qkv":
            assert on == {"overlap_ag_fprop", "overlap_rs_dgrad"}
        else:
            assert on == {"overlap_ag_fprop", "bulk_dgrad", "bulk_wgrad"}


def on_two_nodes() -> str:
    user_buffers = with_buffers()
    former = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        user_buffers.initialize(OPTIONS, 2)
    except ConfigurationError as error:
        return str(error)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        if former is not None:
            os.environ["LOCAL_WORLD_SIZE"] = former
    return ""


def test_ranks_of_several_nodes_are_refused(te_ranks: Ranks) -> None:
    said = te_ranks.run(on_two_nodes, world_size=2)
    assert said[0] == said[1] and said[0].startswith(
        "--tp-comm-overlap: 2 tensor-parallel ranks do not divide the 1 ranks of a node"
    )


@pytest.mark.gpu
def test_overlap_changes_no_loss(tmp_path: Path) -> None:
    """Two GPUs: the same losses with and without, within what another order of sums gives."""
    pytest.importorskip("transformer_engine", reason="needs TransformerEngine")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    losses = []
    for extra in ((), ("--tp-comm-overlap",)):
        run = tmp_path / ("overlap" if extra else "plain")
        flags = (*PARITY, *TE, *degrees(2, 1, "--sequence-parallel"), "--train-iters", "5", *extra)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        subprocess.run(
            [*command, "pretrain_gpt.py", *flags, "--run-dir", str(run)],
            cwd=ROOT,
            check=True,
            env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            timeout=PATIENCE_S,
        )
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    plain, overlapped = losses
    assert len(plain) == len(overlapped) == 5
    for ours, theirs in zip(overlapped, plain, strict=True):
        assert abs(ours / theirs - 1) < 1e-3
