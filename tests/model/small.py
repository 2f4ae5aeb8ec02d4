"""Small runs for tests: a configuration in one call, one rank in this process, steps on any layout.

The defaults are 2 layers of hidden size 32 with 4 heads in 2 groups, FFN 64, 16 tokens, vocabulary
100: every linear keeps sizes that FP8 takes, also on 2 tensor-parallel ranks.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.config import ModelShape, RunConfig
from megafp8.config.names import SECTIONS
from megafp8.layers import LayerContext, ParameterFactory
from megafp8.model import Model, build_model
from megafp8.model.batch import to_tensors
from megafp8.numerics import ScaleRegistry
from megafp8.parallel import Mesh, World, build_mesh
from megafp8.precision import PrecisionPlan, build_plan, recipe_from_config
from megafp8.train.loss_scaler import build_loss_scaler
from megafp8.train.optimizer import optimizer_tensors
from megafp8.train.step import StepResult, TrainingStep

VOCAB = 100
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
GPT2 = {
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 16,
    "activation": "gelu-tanh",
    "group_query_attention": False,
    "num_query_groups": None,
}
FP8 = {"bf16": True, "fp8_format": "hybrid", "fp8_amax_history_len": 8}
DEFAULTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "seq_length": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "vocab_size": VOCAB,
    "num_workers": 0,
    "mock_data": True,
    "lr": 1e-3,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 20,
    "seed": 1234,
}
_OWNER = {field: name for name, section in SECTIONS.items() for field in section.model_fields}


def small_config(style: dict[str, Any] = LLAMA, **changes: Any) -> RunConfig:
    """The defaults in a style, with changes given by field name, whatever their section."""
    values: dict[str, dict[str, Any]] = {}
    for field, value in {**DEFAULTS, **style, **changes}.items():
        if value is not None:
            values.setdefault(_OWNER[field], {})[field] = value
    return RunConfig.from_dict(values)


def world() -> World:
    """This process in the default group that the test's harness has opened."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, rank, torch.device("cpu"), "gloo")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for as long as a test file runs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Run:
    """A built model with its training step."""

    config: RunConfig
    shape: ModelShape
    plan: PrecisionPlan
    mesh: Mesh
    model: Model
    step: TrainingStep

    def train(self, iterations: range, masks: np.ndarray | None = None) -> list[StepResult]:
        """Train on the generated batches of some 0-based iterations."""
        learning_rate, results = self.config.optimizer.lr, []
        for i in iterations:
            results.append(self.step.run(micro_batches(self, i, masks), learning_rate, i + 1))
            self.step.check_not_stuck(i + 1)
        return results

    def shards(self) -> dict[str, Tensor]:
        """Copies of this rank's master shards by name."""
        return {entry.name: entry.shard.clone() for entry in self.step.gradients.entries}

    def state(self) -> dict[str, Tensor]:
        """Copies of everything that a step changes: masters, optimizer state, scales, windows."""
        state = self.shards()
        state |= {
            key: value.clone() for key, value in optimizer_tensors(self.step.optimizer).items()
        }
        return state | registry_state(self.model.registry)


def registry_state(registry: ScaleRegistry | None) -> dict[str, Tensor]:
    """Copies of the whole scale state, the parts that no checkpoint holds included."""
    if registry is None:
        return {}
    names = ("pending_amax", "scale_inv", "nonfinite", "frozen_steps")
    state = {f"registry.{name}": getattr(registry, name).clone() for name in names}
    return state | registry.tensors()


def start_run(config: RunConfig, vocab_size: int = VOCAB, mesh: Mesh | None = None) -> Run:
    """Build model and step of a configuration on the ranks of the default group."""
    mesh = mesh or build_mesh(config.layout(dist.get_world_size()), world())
    shape = ModelShape.from_config(config, vocab_size)
    plan = build_plan(config, shape, mesh.layout)
    model = build_model(config, shape, plan, recipe_from_config(config), mesh)
    step = TrainingStep(config, model, mesh, build_loss_scaler(config.precision))
    return Run(config, shape, plan, mesh, model, step)


def global_batch(
    config: RunConfig, vocab_size: int, iteration: int, masks: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The global batch of an iteration: uniform tokens, [global batch, s] each."""
    size, length = config.training.global_batch_size, config.model.seq_length
    assert size is not None
    stream = np.random.default_rng(1000 + iteration).integers(0, vocab_size, (size, length + 1))
    if masks is None:
        masks = np.ones((size, length))
    return {
        "tokens": np.ascontiguousarray(stream[:, :-1]),
        "labels": np.ascontiguousarray(stream[:, 1:]),
        "loss_mask": masks.astype(np.float32),
        "position_ids": np.tile(np.arange(length), (size, 1)),
    }


def micro_batches(
    run: Run, iteration: int, masks: np.ndarray | None = None
) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of `global_batch`, by the loader's rule."""
    whole = global_batch(run.config, run.shape.vocab_size, iteration, masks)
    rows, dp = run.config.training.micro_batch_size, run.mesh.layout.dp
    starts = range(run.mesh.dp_rank * rows, len(whole["tokens"]), rows * dp)
    parts = [{key: value[s : s + rows] for key, value in whole.items()} for s in starts]
    return to_tensors(parts, run.mesh, run.config.training.seed, iteration)


def layer_context(config: RunConfig, vocab_size: int = VOCAB, **changes: Any) -> LayerContext:
    """What single layers are built from, without FSDP; a registry is finalized by the caller."""
    mesh = build_mesh(config.layout(dist.get_world_size()), world())
    shape = ModelShape.from_config(config, vocab_size)
    recipe = recipe_from_config(config)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    values: dict[str, Any] = {
        "mesh": mesh,
        "factory": ParameterFactory(
            shape.parameters(),
            mesh,
            config.training.seed,
            config.model.init_method_std,
            shape.num_layers,
            vocab_size,
        ),
        "registry": ScaleRegistry(recipe) if recipe is not None else None,
        "recipe": recipe,
        "compute_dtype": dtypes[config.precision.compute_dtype],
        "sequence_parallel": mesh.layout.sequence_parallel,
        "fp8_gather": config.precision.fp8_tp_comm != "none",
        "fp8_reduce": config.precision.fp8_tp_comm == "all",
        "fp8_param_gather": False,
        "cache_weights": True,
        "deferred": None,
    }
    return LayerContext(**{**values, **changes})


def randomize(parameters: dict[str, Any], std: float = 0.3, seed: int = 5) -> None:
    """Give every parameter random values of its own, biases and norms included, equal on all tp.

    For parameters that are whole on each rank (one rank); norms get 1 + noise.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters.items():
        local = parameter.data.to_local()
        noise = torch.randn(local.shape, generator=generator) * std
        local.copy_(1.0 + noise if "layernorm.weight" in name else noise)


@contextlib.contextmanager
def kept_gradients(run: Run) -> Iterator[list[dict[str, Tensor]]]:
    """Inside, each optimizer step first leaves copies of the gradients it is given."""
    found: list[dict[str, Tensor]] = []
    original: Callable[[], Any] = run.step.optimizer.step

    def keep_then_step() -> None:
        entries = run.step.gradients.entries
        found.append({e.name: e.shard.grad.clone() for e in entries if e.shard.grad is not None})
        original()

    run.step.optimizer.step = keep_then_step  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del run.step.optimizer.step


def assert_same_bytes(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Every tensor of `wanted` is in `found` with the same bytes, and nothing else is."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    for name, value in wanted.items():
        other = found[name]
        assert (other.shape, other.dtype) == (value.shape, value.dtype), name
        same = _bytes(other) == _bytes(value)
        if not bool(same.all()):
            index = int((~same).nonzero()[0]) // value.element_size()
            left, right = other.flatten()[index].item(), value.flatten()[index].item()
            raise AssertionError(f"{name}: element {index} is {left!r}, not {right!r}")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def ulps_apart(found: Tensor, wanted: Tensor) -> int:
    """Largest distance of two bf16 tensors in steps of the grid; zeros of both signs are equal."""

    def order(tensor: Tensor) -> Tensor:
        bits = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((order(found) - order(wanted)).abs().max())
