"""Training on TransformerEngine's Python: functions for ranks, as in `tests.support.layouts`."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from tests.support import te_cpu
from tests.support.layouts import Curve, Training, start_training
from tests.support.te_cpu import pretend

TE = ("--transformer-impl", "transformer_engine")
NATIVE = ("--transformer-impl", "native")
# Two blocks and half the batch: enough for every linear, layout and reduction.
SMALL = ("--num-layers", "2", "--global-batch-size", "8")


def start_te(flags: Sequence[str], load: str | None = None, native_gemm: bool = False) -> Training:
    """As `start_training`, with TE's linears."""
    te_cpu.load(native_gemm)
    training = start_training((*flags, *TE), load)
    assert training.model.backend.chosen == "transformer_engine"
    return training


def te_curve(flags: Sequence[str], iterations: int, native_gemm: bool = False) -> Curve:
    """Train from the start and return the curve."""
    return start_te(flags, native_gemm=native_gemm).iterate(iterations)


@dataclass
class Trained:
    """What a run leaves on one rank: its curve and the digests of all its tensors."""

    curve: Curve
    before: dict[str, str]
    after: dict[str, str]
    saved: str


def train(
    flags: Sequence[str],
    iterations: int,
    te: bool = False,
    load: str | None = None,
    save: str | None = None,
    native_gemm: bool = False,
) -> Trained:
    """Train on either backend, from a checkpoint or not, and perhaps save."""
    if te:
        training = start_te(flags, load, native_gemm)
    else:
        training = start_training((*flags, *NATIVE), load)
    before = training.digests()
    curve = training.iterate(iterations)
    saved = ""
    if save is not None:
        with pretend.no_cuda() if te else nullcontext():
            saved = training.save(save)
    return Trained(curve, before, training.digests(), saved)
