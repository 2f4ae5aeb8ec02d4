"""What FP8 costs around the GEMMs: ns per element of each step, against a bf16 copy of that size.

    python bench/quantize.py --tokens 2048 --in-features 1024 --out-features 1024 --threads 1

The last lines time the three products of a linear layer in BF16, and in FP8 with everything that
a training step does for them (amax, two casts, decoding; the weight is cast once).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafp8.numerics import (
    E4M3,
    E5M2,
    QuantizedTensor,
    compute_amax,
    decode,
    dgrad,
    fprop,
    quantize,
    wgrad,
)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Lower quartile: robust against other processes on the machine."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=4)[0]


def element_steps(x: torch.Tensor, repeats: int) -> None:
    scale = torch.tensor(448.0) / compute_amax(x)
    e4m3, e5m2 = quantize(x, scale, E4M3), quantize(x, scale, E5M2)
    fp32 = x.float()
    steps: dict[str, Callable[[], object]] = {
        "copy bf16": lambda: x.clone(),
        "amax bf16": lambda: compute_amax(x),
        "amax fp32": lambda: compute_amax(fp32),
        "quantize bf16 -> e4m3": lambda: quantize(x, scale, E4M3),
        "quantize bf16 -> e5m2": lambda: quantize(x, scale, E5M2),
        "  bare cast fp32 -> e4m3": lambda: fp32.to(E4M3.dtype),
        "  bare cast fp32 -> e5m2": lambda: fp32.to(E5M2.dtype),
        "  unchunked bf16 -> e4m3": lambda: (x.float() * scale).clamp(-448, 448).to(E4M3.dtype),
        "decode e4m3 -> bf16": lambda: decode(e4m3),
        "decode e5m2 -> bf16": lambda: decode(e5m2),
        "  bare cast e4m3 -> bf16": lambda: e4m3.to(torch.bfloat16),
        "  bare cast e5m2 -> bf16": lambda: e5m2.to(torch.bfloat16),
    }
    copy = seconds(steps["copy bf16"], repeats)
    print(f"{'step':28}{'ns/element':>12}{'x copy':>10}")
    for name, call in steps.items():
        took = seconds(call, repeats)
        print(f"{name:28}{took * 1e9 / x.numel():12.3f}{took / copy:10.1f}")


def linear_step(m: int, k: int, n: int, repeats: int) -> None:
    x, w, dy = (torch.randn(shape).bfloat16() for shape in ((m, k), (n, k), (m, n)))
    scale = torch.tensor(99.7)
    scale_inv = 1 / scale
    qw = QuantizedTensor(quantize(w, scale, E4M3), scale_inv, E4M3)

    def bf16() -> None:
        x @ w.t()
        dy @ w
        dy.t() @ x

    def fp8() -> None:
        compute_amax(x)
        qx = QuantizedTensor(quantize(x, scale, E4M3), scale_inv, E4M3)
        fprop(qx, qw)
        compute_amax(dy)
        qdy = QuantizedTensor(quantize(dy, scale, E5M2), scale_inv, E5M2)
        dgrad(qdy, qw)
        wgrad(qdy, qx)

    slow, fast = seconds(fp8, repeats), seconds(bf16, repeats)
    print(f"\nlinear {m} x {k} -> {n}: bf16 {fast * 1e3:.3f} ms, fp8 {slow * 1e3:.3f} ms")
    print(f"fp8 runs at {fast / slow:.2f} of the bf16 speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="rows (default: %(default)s)")
    parser.add_argument(
        "--in-features", type=int, default=1024, help="columns (default: %(default)s)"
    )
    parser.add_argument(
        "--out-features", type=int, default=1024, help="rows of the weight (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of the processor (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=21, help="repeats behind each median (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.tokens} x {args.in_features} elements, {args.threads} thread(s)")
    element_steps(torch.randn(args.tokens, args.in_features).bfloat16(), args.repeats)
    linear_step(args.tokens, args.in_features, args.out_features, args.repeats)


if __name__ == "__main__":
    main()
