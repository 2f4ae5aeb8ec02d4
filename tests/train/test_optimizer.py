"""The optimizer over local shards: values, empty shards, skipped steps, exact state."""

import copy

import pytest
import torch

from megafp8.config.optimizer import OptimizerConfig
from megafp8.train.optimizer import (
    build_optimizer,
    optimizer_tensors,
    take_step,
)
from megafp8.train.shards import NamedShard

SHAPES = {
    "decoder.layers.0.mlp.linear_fc1.weight": (2, 6, 4),
    "decoder.layers.0.mlp.linear_fc1.bias": (2, 6),
    "decoder.final_layernorm.weight": (4,),
    "output_layer.weight": (0, 4),
}
PLAIN = ("decoder.layers.0.mlp.linear_fc1.bias", "decoder.final_layernorm.weight")  # no decay
EXACT = 1.0009765625  # 1 + 2**-10: exact in fp32, 1.0 in bf16


def config(**changes):
    values = {"lr": 0.1, "weight_decay": 0.25, "adam_beta2": 0.95, "adam_eps": 1e-5}
    return OptimizerConfig(**{**values, **changes})


def shards(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        NamedShard(name, torch.randn(shape, generator=generator), name not in PLAIN)
        for name, shape in SHAPES.items()
    ]


def set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for item in parameters:
        item.shard.grad = torch.randn(item.shard.shape, generator=generator)


def train(optimizer, parameters, steps):
    for step in steps:
        set_gradients(parameters, step)
        take_step(optimizer, 0.01 * (step + 1), skip=False)


def snapshot(optimizer, parameters):
    values = {item.name: item.shard for item in parameters} | optimizer_tensors(optimizer)
    return {name: value.clone() for name, value in values.items()}


def assert_bit_equal(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value.view(torch.int32), second[name].view(torch.int32)), name


def test_decay_goes_to_the_shards_that_say_so():
    optimizer = build_optimizer(config(), shards())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert optimizer.param_groups[1]["param_names"] == list(SHAPES)[1:3]


def test_adam_follows_the_formula():
    parameters = shards()
    optimizer = build_optimizer(config(), parameters)
    name = next(iter(SHAPES))
    weight = parameters[0].shard.double().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 4):
        set_gradients(parameters, step)
        gradient = parameters[0].shard.grad.double()
        take_step(optimizer, 0.02, skip=False)
        weight *= 1 - 0.02 * 0.25
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        denominator = (second / (1 - 0.95**step)).sqrt() + 1e-5
        weight -= 0.02 * (first / (1 - 0.9**step)) / denominator
    torch.testing.assert_close(parameters[0].shard.double(), weight, rtol=1e-6, atol=1e-6)
    moment = optimizer_tensors(optimizer)[f"optimizer.{name}.exp_avg"].double()
    torch.testing.assert_close(moment, first, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_state_made_beforehand_changes_no_step(kind):
    """torch makes the state in the first step; ours is there before and must give the same."""
    ours, theirs = shards(), shards()
    optimizer = build_optimizer(config(optimizer=kind), ours)
    reference = build_optimizer(config(optimizer=kind), theirs)
    reference.state.clear()
    train(optimizer, ours, range(3))
    train(reference, theirs, range(3))
    assert_bit_equal(snapshot(optimizer, ours), snapshot(reference, theirs))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_skipped_step_leaves_everything_bit_equal(kind):
    parameters = shards()
    optimizer = build_optimizer(config(optimizer=kind), parameters)
    for steps in ([], [0, 1]):  # before the first step as well
        train(optimizer, parameters, steps)
        before = snapshot(optimizer, parameters)
        set_gradients(parameters, 9)
        parameters[0].shard.grad[0, 0, 0] = float("nan")
        take_step(optimizer, 0.5, skip=True)
        assert_bit_equal(before, snapshot(optimizer, parameters))
        assert all(item.shard.grad is None for item in parameters)
        assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_a_step_that_is_not_skipped_changes_every_parameter():
    parameters = shards()
    optimizer = build_optimizer(config(), parameters)
    before = snapshot(optimizer, parameters)
    train(optimizer, parameters, [0])
    after = snapshot(optimizer, parameters)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    empty = {name for name in before if before[name].numel() == 0}
    assert changed == before.keys() - empty and len(empty) == 3


def test_state_names_and_start_values():
    optimizer = build_optimizer(config(), shards())
    tensors = optimizer_tensors(optimizer)
    assert set(tensors) == {
        f"optimizer.{name}.{key}" for name in SHAPES for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert all(value.dtype == torch.float32 and not value.any() for value in tensors.values())
    one = optimizer_tensors(optimizer, ["output_layer.weight"])
    assert one["optimizer.output_layer.weight.exp_avg"].shape == (0, 4)
    assert len(one) == 3
    momentum = optimizer_tensors(build_optimizer(config(optimizer="sgd"), shards()))
    assert set(momentum) == {f"optimizer.{name}.momentum_buffer" for name in SHAPES}


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_loaded_state_is_exact_and_continues_bit_equal(kind):
    first, second = shards(), shards(seed=1)
    source = build_optimizer(config(optimizer=kind), first)
    target = build_optimizer(config(optimizer=kind), second)
    train(source, first, range(2))
    key = "exp_avg" if kind == "adam" else "momentum_buffer"
    optimizer_tensors(source)[f"optimizer.decoder.final_layernorm.weight.{key}"].fill_(EXACT)
    saved = copy.deepcopy(optimizer_tensors(source))

    with torch.no_grad():  # as a checkpoint is loaded: in place
        for name, tensor in optimizer_tensors(target).items():
            tensor.copy_(saved[name])
    for old, new in zip(first, second, strict=True):
        new.shard.copy_(old.shard)
    assert_bit_equal(snapshot(source, first), snapshot(target, second))
    loaded = optimizer_tensors(target)
    assert (loaded[f"optimizer.decoder.final_layernorm.weight.{key}"] == EXACT).all()

    train(source, first, range(2, 4))
    train(target, second, range(2, 4))
    assert_bit_equal(snapshot(source, first), snapshot(target, second))


@pytest.mark.parametrize(
    "shard, message",
    [
        (torch.zeros(2, 2, dtype=torch.bfloat16), "master is torch.bfloat16"),
        (torch.zeros(2, 3).t(), "not contiguous"),
        (torch.zeros(2, requires_grad=True) * 2, "carries a graph"),
    ],
)
def test_shards_that_the_fused_kernel_would_misread_are_programmer_errors(shard, message):
    with pytest.raises(AssertionError, match=message):
        build_optimizer(config(), [NamedShard("w", shard, True)])
