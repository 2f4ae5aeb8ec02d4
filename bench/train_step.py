"""Training-step speed on this machine against plain PyTorch, ratios from one run.

    OMP_NUM_THREADS=1 python bench/train_step.py [--rounds 15]

Four models of one shape (4 layers, hidden 256, 8 heads, SwiGLU 768, seq 256, batch 8, vocabulary
8192, one process) take turns, a step each, so that a drift of the machine's speed hits all alike:

    plain     the simplest PyTorch model below: fp32 parameters, bf16 autocast, AdamW(foreach)
    bf16      megafp8 in BF16
    fp8       megafp8 in FP8 (hybrid delayed scaling, every linear of the blocks)
    torchao   the plain model with torchao's float8 linears, emulated (what it has for devices
              without FP8 units), if torchao is installed

Printed: how this CPU multiplies BF16, median step time, tokens/s, and ratios of tokens/s as medians
over the rounds, of which there are fewer, but 3, where they would take longer than two minutes.
`ONEDNN_MAX_CPU_ISA=AVX512_CORE` before the command shows a CPU without BF16 units on one that has
them.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.model import BF16, RECIPES, BenchModel, Sizes
from megafp8.numerics import cpu_products
from megafp8.parallel import World, start

SECONDS, FEWEST_ROUNDS = 120.0, 3
LAYERS, HIDDEN, HEADS, FFN, SEQ, BATCH, VOCAB = 4, 256, 8, 768, 256, 8, 8192


class PlainBlock(nn.Module):
    """Pre-norm block: RMSNorm, rotary attention, SwiGLU on halves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.fc1 = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.fc2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, HIDDEN))
        gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as in Hugging Face's Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PlainGPT(nn.Module):
    """Embedding, blocks, norm, vocabulary projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)
        dim = HIDDEN // HEADS
        angles = torch.outer(torch.arange(SEQ), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
        table = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", table.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", table.sin().bfloat16(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> logits [b, s, v]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))


def batch(index: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one step, the same for all models."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain_step(model: nn.Module) -> Callable[[int], float]:
    """One step of plain PyTorch, as a function of the step's number; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step(index: int) -> float:
        tokens, labels = batch(index)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def megafp8_step(flags: tuple[str, ...], world: World) -> Callable[[int], float]:
    """One step of megafp8 through the classes that `pretrain_gpt.py` uses."""
    sizes = Sizes(HIDDEN, FFN, HEADS, HEADS, SEQ, BATCH, layers=LAYERS, vocab=VOCAB)
    bench = BenchModel(sizes, flags, world)

    def step(index: int) -> float:
        return bench.step.run([bench.micro_batch(*batch(index))], 1e-3, index + 1).loss

    return step


def torchao_step() -> Callable[[int], float] | None:
    """The plain model with torchao's float8 linears; None if torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return None
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = PlainGPT()
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: name != "output",
    )
    return plain_step(model)


def main() -> None:
    """Time all models in turn and print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=15,
        help="at most; a step of each model, medians over them are shown (default: %(default)s)",
    )
    rounds = parser.parse_args().rounds
    world = start(0, 1, 0, backend="gloo")  # the plain model is on the CPU too
    steps: dict[str, Callable[[int], float] | None] = {
        "plain": plain_step(PlainGPT()),
        "bf16": megafp8_step(BF16, world),
        "fp8": megafp8_step(RECIPES["delayed"], world),
        "torchao": torchao_step(),
    }
    running = {name: step for name, step in steps.items() if step is not None}
    times: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, float] = {}

    def play_round(index: int) -> None:
        for name, step in running.items():
            began = time.perf_counter()
            losses[name] = step(index)
            times[name].append(time.perf_counter() - began)

    for index in range(2):  # they warm caches up
        play_round(index)
    fitting = int(SECONDS / sum(values[-1] for values in times.values()))
    rounds = min(rounds, max(fitting, FEWEST_ROUNDS))
    for values in times.values():
        values.clear()
    for index in range(2, rounds + 2):
        play_round(index)
    tokens = BATCH * SEQ
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"threads {torch.get_num_threads()}, torch {torch.__version__}, rounds {rounds}")
    products = cpu_products()
    print(f"BF16 is multiplied in {products.chosen.upper()}: {products.reason}")
    for name, seconds in median.items():
        print(
            f"{name:8} {seconds * 1e3:8.1f} ms  {tokens / seconds:9.0f} tokens/s  "
            f"loss {losses[name]:.4f}"
        )
    ratios = [("bf16", "plain"), ("fp8", "plain"), ("fp8", "bf16")]
    ratios += [("torchao", "plain"), ("fp8", "torchao")]
    for ours, baseline in ratios:
        if ours in median and baseline in median:
            pairs = [b / a for a, b in zip(times[ours], times[baseline], strict=True)]
            print(f"{ours}/{baseline} tokens/s: {statistics.median(pairs):.3f}")


if __name__ == "__main__":
    main()
