"""Where the GEMM writes fp32, weight gradients reach FSDP2 in fp32 without a rounding to bf16."""

import pytest
import torch

from megafp8.model import build
from tests.model.small import FP8, GPT2, LLAMA, kept_gradients, small_config, start_run

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("micro_batch_size", [8, 2])
@pytest.mark.parametrize("style", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_fp32_gradients(
    monkeypatch: pytest.MonkeyPatch, style: dict, micro_batch_size: int, recompute: str | None
) -> None:
    kept = []
    changes = {"micro_batch_size": micro_batch_size, "recompute_granularity": recompute}
    for hardware in (True, False):
        monkeypatch.setattr(build, "writes_fp32", lambda *_, found=hardware: found)
        run = start_run(small_config(style, **FP8, **changes))
        with kept_gradients(run) as found:
            losses = [result.loss for result in run.train(range(2))]
        kept.append(found[0])
        assert losses[1] < losses[0] + 1
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    exact, rounded = kept[0][name], kept[1][name]
    assert exact.dtype == rounded.dtype == torch.float32
    assert (exact - rounded).norm() < 2.0**-8 * rounded.norm()
    if micro_batch_size == 8:  # one micro-batch: the gradient itself, not a sum of some
        assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())
    for other in kept[0].keys() - {name}:
        assert kept[0][other].dtype == torch.float32


def test_fp32_gradients_after_a_weight_is_gathered_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "writes_fp32", lambda *_: True)
    run = start_run(small_config(GPT2, **FP8, fp8_param_gather=True, micro_batch_size=8))
    name = "decoder.layers.0.mlp.linear_fc1"
    run.train(range(1))
    for precision in ("bf16", "fp8"):
        run.model.set_precision(name, precision)
        with kept_gradients(run) as found:
            run.train(range(1))
        gradient = found[0][f"{name}.weight"]
        rounded = torch.equal(gradient, gradient.bfloat16().float())
        assert rounded == (precision == "bf16")
