"""Activation bytes that one block keeps for backward, by precision and recompute mode.

    python bench/memory.py [--hidden 1024] [--ffn 3584] [--heads 8] [--groups 2] [--seq 512]

Counts what autograd saves in the forward pass of one Llama-like block: every storage once, without
parameters. Nothing is timed, so the machine does not matter; the attention core is torch's SDPA,
whose flash kernels save the same tensors on CPU and GPU.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.model import BF16, KEY, RECIPES, BenchModel, Sizes
from megafp8.parallel import World, start, stop

MODES = (None, "selective", "full")


PRECISIONS = {"bf16": BF16} | {f"fp8 {name}": flags for name, flags in RECIPES.items()}
EAGER = ("--fp8-kernels", "eager")


def saved_bytes(call: Callable[[], Tensor], parameters: list[nn.Parameter]) -> int:
    """Run a forward pass and return the bytes of the storages that autograd keeps of it."""
    own = {_address(parameter) for parameter in parameters}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in own:
            kept[_address(tensor)] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    assert result.requires_grad, "nothing is differentiated"
    return sum(_plain(tensor).untyped_storage().nbytes() for tensor in kept.values())


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _address(tensor: Tensor) -> int:
    return _plain(tensor.detach()).untyped_storage().data_ptr()


def block_bytes(sizes: Sizes, world: World, flags: tuple[str, ...], mode: str | None) -> int:
    """Activation bytes of one block."""
    recompute = () if mode is None else ("--recompute-granularity", mode)
    block = BenchModel(sizes, (*flags, *EAGER, *recompute), world).block()
    x = torch.randn(sizes.seq, sizes.batch, sizes.hidden).bfloat16().requires_grad_(True)
    return saved_bytes(lambda: block.forward(x, KEY), list(block.parameters()))


def linear_bytes(sizes: Sizes, world: World, flags: tuple[str, ...]) -> int:
    """Activation bytes of the four linears of a block alone."""
    bench, total = BenchModel(sizes, (*flags, *EAGER), world), 0
    for name, (inner, _) in sizes.linears.items():
        linear = bench.linear(name)
        x = torch.randn(sizes.seq, sizes.batch, inner).bfloat16().requires_grad_(True)
        total += saved_bytes(lambda layer=linear, x=x: layer(x), list(linear.parameters()))
    return total


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default, text in (
        ("hidden", 1024, "channels of the block"),
        ("ffn", 3584, "channels inside the MLP"),
        ("heads", 8, "attention heads"),
        ("groups", 2, "query groups"),
        ("seq", 512, "tokens of a sequence"),
        ("batch", 1, "sequences"),
    ):
        shown = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, help=shown)
    sizes = Sizes(**vars(parser.parse_args()))
    world = start(0, 1, 0, "gloo")
    unit = sizes.tokens * sizes.hidden
    base: dict[str, int] = {}
    print(f"{sizes}")
    print("bytes a token and hidden channel (share of BF16 in the same mode)")
    print(
        "| | " + " | ".join(["linears", *(f"recompute {mode or 'none'}" for mode in MODES)]) + " |"
    )
    print("|---" * (len(MODES) + 2) + "|")
    for name, flags in PRECISIONS.items():
        cells = {"linears": linear_bytes(sizes, world, flags)}
        cells |= {str(mode): block_bytes(sizes, world, flags, mode) for mode in MODES}
        base = base or cells
        shown = [f"{cells[key] / unit:.2f} ({cells[key] / base[key]:.2f})" for key in cells]
        print(f"| {name} | " + " | ".join(shown) + " |")
    stop()


if __name__ == "__main__":
    main()
