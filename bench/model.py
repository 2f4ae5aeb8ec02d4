"""A Llama-like model of plain sizes, built on one rank by the classes of `pretrain_gpt.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megafp8.config import load_config
from megafp8.launch.dry_run import preflight
from megafp8.layers.dropout import MicroBatchKey
from megafp8.model import build_model
from megafp8.model.batch import to_tensors
from megafp8.numerics import Recipe
from megafp8.parallel import World, build_mesh
from megafp8.precision import recipe_from_config
from megafp8.train.loss_scaler import build_loss_scaler
from megafp8.train.step import TrainingStep

KEY = MicroBatchKey(0, 0, False, True)
NATIVE = ("--transformer-impl", "native")
BF16 = (*NATIVE, "--fp8-format", "none")
# Every recipe, in the formats in which its GPU runs it.
RECIPES = {
    name: (*NATIVE, "--fp8-format", fp8_format, "--fp8-recipe", name)
    for name, fp8_format in (
        ("delayed", "hybrid"),
        ("tensorwise", "hybrid"),
        ("rowwise", "e4m3"),
        ("rowwise_with_gw_hp", "e4m3"),
        ("blockwise", "e4m3"),
        ("mxfp8", "e4m3"),
    )
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama-like model.

    Attributes:
        hidden: hidden size.
        ffn: width of the SwiGLU MLP.
        heads: attention heads.
        groups: heads of keys and values.
        seq: tokens of a sample.
        batch: samples.
        layers: blocks.
        vocab: tokens of the vocabulary.
    """

    hidden: int
    ffn: int
    heads: int
    groups: int
    seq: int
    batch: int
    layers: int = 1
    vocab: int = 256

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq * self.batch

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) features of the linears of a block."""
        qkv = (self.heads + 2 * self.groups) * self.hidden // self.heads
        return {
            "linear_qkv": (self.hidden, qkv),
            "linear_proj": (self.hidden, self.hidden),
            "linear_fc1": (self.hidden, 2 * self.ffn),
            "linear_fc2": (self.ffn, self.hidden),
        }

    @property
    def block_flops(self) -> float:
        """Of one block, forward and backward: 6 a weight and token; causal attention's two."""
        weights = sum(a * b for a, b in self.linears.values())
        attention = 6.0 * self.tokens * self.seq * self.hidden  # 12 without the causal mask
        return 6.0 * self.tokens * weights + attention

    @property
    def model_flops(self) -> float:
        """Of a training step, the output layer included."""
        return self.layers * self.block_flops + 6.0 * self.tokens * self.hidden * self.vocab

    @property
    def flags(self) -> list[str]:
        """The command line of such a model."""
        return f"""
            --num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn}
            --num-attention-heads {self.heads} --group-query-attention
            --num-query-groups {self.groups} --seq-length {self.seq} --vocab-size {self.vocab}
            --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
            --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
            --micro-batch-size {self.batch} --mock-data --train-iters 1000 --lr 1e-3 --bf16
        """.split()


def recipe_of(sizes: Sizes, flags: Sequence[str]) -> Recipe | None:
    """The recipe that flags ask for; None without FP8."""
    return recipe_from_config(load_config([*sizes.flags, *flags]))


class BenchModel:
    """A model with its training step.

    Args:
        sizes: of the model.
        flags: what the command line says beside the sizes.
        world: one process, inside a process group.
    """

    def __init__(self, sizes: Sizes, flags: Sequence[str], world: World) -> None:
        self.sizes, self.device = sizes, world.device
        config, shape, plan = preflight(load_config([*sizes.flags, *flags]), 1)
        self.mesh = build_mesh(config.layout(1), world)
        self.model = build_model(config, shape, plan, recipe_from_config(config), self.mesh)
        self.registry = self.model.registry
        self.step = TrainingStep(config, self.model, self.mesh, build_loss_scaler(config.precision))

    def micro_batch(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """A micro-batch of token ids, int64 [b, s] each, as training gets it."""
        arrays = {
            "tokens": tokens.contiguous().numpy(),
            "labels": labels.contiguous().numpy(),
            "loss_mask": torch.ones(tokens.shape).numpy(),
            "position_ids": torch.arange(tokens.shape[1]).repeat(len(tokens), 1).numpy(),
        }
        return to_tensors([arrays], self.mesh, 0, 0)[0]

    def drawn_batch(self) -> dict[str, Tensor]:
        """A micro-batch of drawn tokens, the same for all models of these sizes."""
        shape = (self.sizes.batch, self.sizes.seq + 1)
        generator = torch.Generator().manual_seed(0)
        stream = torch.randint(self.sizes.vocab, shape, generator=generator)
        return self.micro_batch(stream[:, :-1], stream[:, 1:])

    def block(self) -> Any:
        """Block 0 as it is between the micro-batches of a step: with its parameters gathered.

        Its `forward` then runs it without FSDP2's hooks.
        """
        block = self.model.stages[0].decoder.layers["0"]
        block.unshard()
        return block

    def linear(self, name: str) -> Any:
        """A linear of block 0, by its last name, with its weight gathered."""
        block = self.block()
        return getattr(block.mlp if "fc" in name else block.self_attention, name)

    def start_fsdp(self) -> None:
        """Let FSDP2 do what it does in the first forward pass; scales have seen it afterwards."""
        batch = self.drawn_batch()
        with torch.no_grad():
            self.model.stages[0](batch.pop("tokens"), **batch)
