"""FP8 beside BF16 in one model: which layers are what, why, and the BF16 ones untouched."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.config.recipes import GEMM_MULTIPLE
from megafp8.errors import PrecisionError
from megafp8.launch.dry_run import preflight
from megafp8.layers.native.linear import NativeLinear
from tests.model.small import FP8, GPT2, LLAMA, Run, micro_batches, small_config, start_run


def linears(run: Run) -> dict[str, NativeLinear]:
    return {
        module.options.name: module
        for stage in run.model.stages
        for module in stage.modules()
        if isinstance(module, NativeLinear)
    }


def outputs_of(run: Run, name: str, batch: dict[str, Tensor]) -> Tensor:
    """What one linear of the model puts out in a forward pass."""
    seen: list[Tensor] = []
    handle = linears(run)[name].register_forward_hook(lambda m, args, y: seen.append(y.detach()))
    (stage,) = run.model.stages
    with torch.no_grad():
        stage(batch["tokens"], batch["position_ids"], batch["seed"])
    handle.remove()
    return seen[0]


@pytest.mark.usefixtures("one_rank")
def test_first_and_last_layers_are_those_of_a_bf16_model():
    mixed = start_run(small_config(**FP8, num_layers=4, first_last_layers_bf16=True))
    plain = start_run(small_config(bf16=True, num_layers=4))
    assert {name: module.precision for name, module in linears(mixed).items()} == {
        name: "bf16" if name.split(".")[2] in "03" else "fp8" for name in linears(plain)
    }
    reason = next(item.reason for item in mixed.plan.linears if item.layer == 3)
    assert "--first-last-layers-bf16" in reason
    batch = micro_batches(mixed, 0)[0]
    names = [name for name in linears(plain) if ".layers.0." in name]
    assert len(names) == 4
    for name in names:
        assert torch.equal(outputs_of(mixed, name, batch), outputs_of(plain, name, batch)), name
    fp8_name = names[0].replace(".0.", ".1.")
    assert not torch.equal(outputs_of(mixed, fp8_name, batch), outputs_of(plain, fp8_name, batch))


@pytest.mark.usefixtures("one_rank")
def test_policy_keeps_a_linear_in_bf16(tmp_path: Path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("exclude: ['*.linear_fc2']\n")
    mixed = start_run(small_config(**FP8, precision_policy=str(policy)))
    plain = start_run(small_config(bf16=True))
    kinds = {name: module.precision for name, module in linears(mixed).items()}
    assert {name for name, kind in kinds.items() if kind == "bf16"} == {
        "decoder.layers.0.mlp.linear_fc2",
        "decoder.layers.1.mlp.linear_fc2",
    }
    x = torch.randn(16, 2, 64).bfloat16()
    grad = torch.randn(16, 2, 32).bfloat16()
    results = []
    for run in (mixed, plain):
        module = linears(run)["decoder.layers.1.mlp.linear_fc2"]
        weight = module.weight.data.to_local().bfloat16()
        leaf = x.clone().requires_grad_(True)
        y = module.operands.fprop(leaf[:, 0], module.operands.weight(weight))
        y.backward(grad[:, 0])
        results.append((y.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert mixed.model.registry is not None and len(mixed.model.registry) == 6 * 3
    assert all(not result.skipped for result in mixed.train(range(2)))


def fitting(linear) -> bool:
    sizes = (linear.in_features, linear.out_features, linear.tokens)
    return all(size % GEMM_MULTIPLE == 0 for size in sizes)


def train_misfits(**changes):
    """Plan and losses of a model some of whose linears do not fit FP8's dimensions."""
    run = start_run(small_config(**{**FP8, **changes}))
    losses = [result.loss for result in run.train(range(2))]
    return run.plan, losses, {name: module.precision for name, module in linears(run).items()}


# FFN 24 and 40 as in a linear 32 -> 24; FFN 48 fits on one rank and is 24 on each of two.
@pytest.mark.parametrize(
    "size, changes, misfits",
    [
        (1, {"ffn_hidden_size": 24}, {"linear_fc2": "in features per rank 24"}),
        (
            1,
            {"ffn_hidden_size": 24, "swiglu": False},
            {
                "linear_fc1": "out features per rank 24",
                "linear_fc2": "in features per rank 24",
            },
        ),
        (2, {"ffn_hidden_size": 48}, {"linear_fc2": "in features per rank 24"}),
        (2, {"ffn_hidden_size": 48, "sequence_parallel": True}, {"linear_fc2": "per rank 24"}),
    ],
)
def test_linears_that_do_not_fit_are_bf16_with_the_reason(ranks, size, changes, misfits):
    answers = ranks.run(train_misfits, world_size=size, tensor_model_parallel_size=size, **changes)
    plan, losses, kinds = answers[0]
    for item in plan.linears:
        kind = item.name.rpartition(".")[2]
        assert item.precision == ("bf16" if kind in misfits else "fp8"), item
        assert misfits.get(kind, "") in item.reason
        assert fitting(item) == (item.precision == "fp8")
        assert kinds[item.name] == item.precision
    assert all(4.0 < loss < 5.2 for loss in losses)
    for other in answers[1:]:
        assert other[0] == plan and other[2] == kinds, "one policy on all ranks"
        assert other[1] == losses


@pytest.mark.parametrize(
    "changes, said",
    [
        # 4092 tokens on 4 ranks (1023 each) and 50 tokens: not one GEMM fits.
        (
            {"seq_length": 4092, "micro_batch_size": 1, "tensor_model_parallel_size": 4}
            | {"num_query_groups": 4, "sequence_parallel": True},
            "tokens of the GEMM 4092 not a multiple of 16",
        ),
        ({"seq_length": 25}, "tokens of the GEMM 50 not a multiple of 16"),
        ({"seq_length": 8, "micro_batch_size": 1}, "tokens of the GEMM 8 not a multiple of 16"),
    ],
)
def test_a_run_without_any_fp8_linear_is_refused_before_it_starts(changes, said):
    config = small_config(**{**FP8, **changes})
    with pytest.raises(PrecisionError) as raised:
        preflight(config, config.smallest_world_size)
    message = str(raised.value)
    assert said in message and "linear_qkv" in message and "\n" not in message


def test_eight_tokens_of_two_samples_on_two_ranks(ranks):
    """Sequence 8 at tp 2 with sequence parallelism: 4 local tokens a sample, 16 in the GEMM."""
    plan, losses, _ = ranks.run(
        train_misfits,
        world_size=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        seq_length=8,
    )[0]
    assert {item.tokens for item in plan.linears} == {16}
    assert plan.count("fp8") == 8 and all(4.0 < loss < 5.2 for loss in losses)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("style", [LLAMA, GPT2])
def test_fp8_loss_is_close_to_bf16(style):
    losses = []
    for precision in ({"bf16": True}, FP8):
        run = start_run(small_config(style, **precision, lr=1e-2))
        losses.append([result.loss for result in run.train(range(6))])
    for high, low in zip(*losses, strict=True):
        assert low == pytest.approx(high, rel=2e-2)
    assert losses[0] != losses[1]
