"""One global norm that counts every parameter once, at any layout, from planted gradients."""

import math
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megafp8.train.measure import parameter_norm
from tests.model.small import (
    LLAMA,
    Run,
    kept_gradients,
    micro_batches,
    one_rank,  # noqa: F401
    small_config,
    start_run,
)

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
SHARDED = "decoder.layers.0.mlp.linear_fc2.weight"
NORM = "decoder.layers.1.input_layernorm.weight"
STYLE = {**LLAMA, "untie_embeddings_and_output_weights": False}


def plant(run: Run, embedding: bool) -> None:
    """Leave gradients on the parameters as a backward would.

    3 and 4 in the two tensor-parallel shards of a weight (both in the only one without tensor
    parallelism), 12 in a replicated norm, 84 in the tied embedding as 60 from the first stage and
    24 from the last (two parameters also where one rank holds both). Each is on one FSDP rank. With
    sequence parallelism the norm's is a partial sum.
    """
    layout, mesh = run.mesh.layout, run.mesh
    shard = mesh.dp_rank % layout.fsdp
    first, last = shard == 0, shard == layout.fsdp - 1
    values: dict[str, list[float]] = {}
    if first:
        values[SHARDED] = [3.0, 4.0] if layout.tp == 1 else [3.0 + mesh.tp_rank]
    if last:
        partial = 5.0 if mesh.tp_rank == 0 else 7.0
        values[NORM] = [partial if layout.sequence_parallel else 12.0]
    if first and mesh.tp_rank == 0 and embedding:
        values[EMBEDDING], values[OUTPUT] = [60.0], [24.0]
    for name, parameter in run.model.parameters.items():
        local = torch.zeros_like(parameter.data.to_local())
        numbers = values.get(name, [])
        local.view(-1)[: len(numbers)] = torch.tensor(numbers)
        parameter.grad = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def planted_norm(embedding: bool, **changes: Any) -> tuple[float, int, int]:
    """Norm, zeros among the gradients, and elements of the model."""
    run = start_run(small_config(STYLE, **changes))
    assert run.model.tied
    plant(run, embedding)
    run.step.gradients.collect()
    return (
        float(run.step.gradients.norm()),
        run.step.gradients.zeros(),
        sum(spec.numel for spec in run.model.specs.values()),
    )


TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, TP2_PP2),
    (4, {**TP2_PP2, "sequence_parallel": True}),
    (4, {**TP2_PP2, "num_layers": 4, "pipeline_schedule": "zbv"}),
    (2, {}),  # FSDP over both
    (2, {"fsdp_size": 1}),  # two replicas
    (4, {}),
    (4, {"fsdp_size": 2}),
    (4, {"tensor_model_parallel_size": 2}),
    (4, {"pipeline_model_parallel_size": 2, "fsdp_size": 1}),
]


def name_of(layout: object) -> str:
    return str(layout).replace("model_parallel_size", "mps")


@pytest.mark.parametrize("size, layout", LAYOUTS, ids=name_of)
def test_every_parameter_counts_once(ranks, size, layout):
    """sqrt(9 + 16 + 144 + 7056) = 85; 13 without the embedding."""
    for embedding, wanted, planted in ((True, 85.0, 4), (False, 13.0, 3)):
        answers = ranks.run(planted_norm, world_size=size, embedding=embedding, **layout)
        for norm, zeros, elements in answers:
            assert norm == pytest.approx(wanted, rel=1e-7)
            assert zeros == elements - planted


def random_norms(**changes: Any) -> tuple[float, float]:
    """Norms of gradients and of parameters, both drawn by the parameter's name."""
    run = start_run(small_config(STYLE, num_layers=4, **changes))
    for name, parameter in run.model.parameters.items():
        assert isinstance(parameter, DTensor)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        gradient = torch.randn(parameter.shape, generator=generator)
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
    run.step.gradients.collect()
    return float(run.step.gradients.norm()), parameter_norm(run.step)


def test_norms_have_the_same_bits_however_parameters_are_spread(ranks):
    (wanted,) = ranks.run(random_norms, world_size=1)
    for size, layout in (
        (2, {"pipeline_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
        (4, {"pipeline_model_parallel_size": 4}),
        (4, {"pipeline_model_parallel_size": 2, "fsdp_size": 1}),
    ):
        assert ranks.run(random_norms, world_size=size, **layout) == [wanted] * size, layout
    # Shards are summed in fp64, so that the fp32 factor of clipping is still the same.
    for norms in ranks.run(random_norms, world_size=4):
        assert norms == pytest.approx(wanted, rel=1e-14)


def clipped(clip_grad: float, **changes: Any):
    """One step on planted gradients of a loss over two tokens: what the optimizer is given."""
    run = start_run(small_config(STYLE, clip_grad=clip_grad, **changes))

    def backward(batches: Any, *rest: Any) -> Tensor:
        plant(run, True)
        return torch.zeros(())

    run.model.runner.train = backward
    counts = run.mesh.dp_rank == 0
    mask = torch.zeros(2, 16)
    mask[0, :2] = float(counts)
    with kept_gradients(run) as gradients:
        result = run.step.run([{"loss_mask": mask}], 1e-3, 1)
    filled = {name: value for name, value in gradients[0].items() if value.any()}
    return result, {name: value.abs().max().item() for name, value in filled.items()}


@pytest.mark.parametrize("size, layout", LAYOUTS[:6], ids=name_of)
def test_clipping_multiplies_all_gradients_alike(ranks, size, layout):
    found: dict[str, set[float]] = {}
    for result, gradients in ranks.run(clipped, world_size=size, clip_grad=1.0, **layout):
        assert result.grad_norm == pytest.approx(42.5, rel=1e-7) and result.tokens == 2
        for name, value in gradients.items():
            found.setdefault(name, set()).add(value)
    sharded = {3.0, 4.0} if layout.get("tensor_model_parallel_size", 1) == 2 else {4.0}
    # Both copies of the tied embedding get the sum of both ends.
    wanted = {SHARDED: sharded, NORM: {12.0}, EMBEDDING: {84.0}, OUTPUT: {84.0}}
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert sorted(found[name]) == pytest.approx(sorted(v / 85.0 for v in values), rel=1e-6)


@pytest.mark.parametrize("clip_grad", [0.0, 100.0])
def test_no_clipping_below_the_limit_or_without_one(ranks, clip_grad):
    for result, gradients in ranks.run(clipped, world_size=2, clip_grad=clip_grad):
        assert result.grad_norm == pytest.approx(42.5, rel=1e-7)
        assert set(gradients.values()) <= {2.0, 6.0, 42.0}


KINDS = {
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "add_attention_output_bias": True,
    "add_mlp_bias": True,
}


def replicated_gradients(**changes: Any) -> dict[str, Tensor]:
    """Complete gradients of the parameters that every tensor-parallel rank holds whole."""
    run = start_run(small_config(LLAMA, **KINDS, **changes))
    run.model.runner.train(micro_batches(run, 0))
    run.step.gradients.collect()
    return {
        entry.name: entry.shard.grad
        for entry in run.step.gradients.entries
        if run.model.specs[entry.name].tp_dim is None and entry.shard.grad is not None
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated_parameters_get_the_sum_over_tensor_parallel(ranks, sequence_parallel):
    """Norms and row biases see a part of the tokens, norms of queries a part of the heads."""
    (wanted,) = ranks.run(replicated_gradients, world_size=1)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    answers = ranks.run(replicated_gradients, world_size=2, **layout)
    assert sum("q_layernorm" in name for name in wanted) == 2
    assert sum(name.endswith("bias") for name in wanted) == 4
    for found in answers:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            error = (found[name] - value).norm() / value.norm()
            assert error < 1e-5, (name, float(error))
            assert torch.equal(found[name], answers[0][name]), name


@pytest.mark.usefixtures("one_rank")
def test_nonfinite_gradients_are_named():
    run = start_run(small_config())
    plant(run, True)
    gradient = run.model.parameters[NORM].grad
    assert isinstance(gradient, DTensor)
    gradient.to_local()[3] = math.inf
    run.step.gradients.collect()
    assert run.step.gradients.nonfinite_names() == [NORM]
    assert float(run.step.gradients.norm()) == math.inf
    gradient = run.step.gradients.entries[0].shard.grad
    assert gradient is not None
    gradient.view(-1)[0] = math.nan
    assert math.isnan(float(run.step.gradients.norm()))


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_without_gradient_gets_zeros():
    run = start_run(small_config())
    run.step.gradients.collect()
    for entry in run.step.gradients.entries:
        assert entry.shard.grad is not None and not entry.shard.grad.any()
    assert float(run.step.gradients.norm()) == 0.0


@pytest.mark.usefixtures("one_rank")
def test_decay_is_for_matrices():
    run = start_run(small_config(add_qkv_bias=True, add_mlp_bias=True, qk_layernorm=True))
    decayed = {item.name: item.decay for item in run.step.gradients.named_shards()}
    kinds = {spec.kind for spec in run.model.specs.values()}
    assert kinds == {"embedding", "output", "linear", "bias", "norm"}
    for spec in run.model.specs.values():
        assert decayed[spec.name] == (spec.kind in ("embedding", "output", "linear")), spec
