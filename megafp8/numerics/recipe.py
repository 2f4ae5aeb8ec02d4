"""The FP8 recipes: frozen choices, and the functions that pick an amax from a window.

Every algorithm looks at filled entries only. An unfilled entry of a window is 0, and a filled one
never is: a tensor whose amax is 0 leaves no entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megafp8.config.amax_algorithm import parse_amax_algorithm
from megafp8.config.recipes import DEFAULT_RECIPE, RECIPES, RecipeName, RecipeSpec
from megafp8.errors import PrecisionError
from megafp8.numerics.formats import E4M3, E5M2, Fp8Format

Role = Literal[
    "input", "weight", "grad_output", "qkv", "output", "softmax", "grad_qkv", "grad_softmax"
]
# Of a linear, and of an attention core: q, k and v share a scale, and so do their gradients.
ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")
CORE_ROLES: tuple[Role, ...] = (
    "qkv",
    "output",
    "softmax",
    "grad_qkv",
    "grad_output",
    "grad_softmax",
)
ALL_ROLES: tuple[Role, ...] = tuple(dict.fromkeys(ROLES + CORE_ROLES))

# [H, N] window, newest last -> [N]; a column without any entry gives 0 or NaN ("keep the scale").
AmaxAlgorithm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How scales are found, and the formats; the defaults are delayed scaling.

    Attributes:
        name: of a row in `config.recipes`. The fields from `margin` to `weight_amax` are of recipes
            with state alone.
        power_of_2_scales: scales are rounded down to powers of two.
        scale_cap: no scale above it.
        margin: the scale is divided by `2**margin`.
        amax_history_len: entries of the window, one per optimizer step.
        amax_compute_algo: `max`, `most_recent`, `quantile:Q` (linear interpolation),
            `trimmed_max:K` (the maximum without the K largest entries; at least one stays) or
            `ema:B` (`e = B*e + (1-B)*amax`, from the oldest entry to the newest).
        nonfinite_amax: `skip` leaves a non-finite amax out of the window; `freeze` lets inf in,
            which keeps the scale until it leaves again, and looks past NaN: the entry is the
            largest of the other values (Transformer Engine's way: its amax kernels use fmaxf).
        weight_amax: `updated` records a weight's amax right after the optimizer step, `cast` when
            the weight is cast, one step later. The first scale is that of the masters, or 1.0.
        forward_format: format of inputs and weights.
        gradient_format: format of output gradients.
        fp8_wgrad: False computes the weight gradient from high-precision operands.
        fake_quant: GEMMs take the FP8 operands decoded to BF16, on every device.
    """

    name: RecipeName = DEFAULT_RECIPE
    power_of_2_scales: bool = False
    scale_cap: float | None = None

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    nonfinite_amax: Literal["skip", "freeze"] = "skip"
    weight_amax: Literal["updated", "cast"] = "updated"
    forward_format: Fp8Format = E4M3
    gradient_format: Fp8Format = E5M2
    fp8_wgrad: bool = True
    fake_quant: bool = False

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            PrecisionError: naming the field, what was found and what is allowed.
        """
        if not _is_int(self.margin) or not -64 <= self.margin <= 64:
            raise PrecisionError(f"margin {self.margin!r} is not an integer in -64..64")
        if not _is_int(self.amax_history_len) or self.amax_history_len < 1:
            raise PrecisionError(
                f"amax_history_len {self.amax_history_len!r} is not a positive integer"
            )
        for field, allowed in _CHOICES.items():
            found = getattr(self, field)
            if found not in allowed:
                raise PrecisionError(f"{field} {found!r} is not one of {', '.join(allowed)}")
        if self.forward_format == E5M2:
            raise PrecisionError(
                "forward_format e5m2 is not supported: no GEMM takes two e5m2 operands; use e4m3"
            )
        if self.scale_cap is not None and not 2.0**-126 <= self.scale_cap <= 2.0**127:
            raise PrecisionError(
                f"scale_cap {self.scale_cap!r} is not a number in 2**-126..2**127, whose inverse "
                "is finite in fp32"
            )
        if self.spec.e8m0 and not self.power_of_2_scales:
            raise PrecisionError(f"recipe {self.name} has power-of-two scales (E8M0); found False")
        amax_algorithm(self.amax_compute_algo)

    @property
    def spec(self) -> RecipeSpec:
        """What holds for every recipe of this name."""
        return RECIPES[self.name]

    @property
    def stateful(self) -> bool:
        """Whether scales come from earlier steps; else from the tensor that is cast."""
        return self.spec.stateful

    @property
    def drops_nan(self) -> bool:
        """Whether an amax is that of the values that are not NaN, else NaN if any is."""
        return self.stateful and self.nonfinite_amax == "freeze"

    def format(self, role: Role) -> Fp8Format:
        """Return the format in which tensors of this role are stored."""
        if role not in ALL_ROLES:
            raise PrecisionError(f"role {role!r} is not one of {', '.join(ALL_ROLES)}")
        return self.gradient_format if role.startswith("grad_") else self.forward_format


_CHOICES: dict[str, tuple[str, ...]] = {
    "name": tuple(RECIPES),
    "nonfinite_amax": ("skip", "freeze"),
    "weight_amax": ("updated", "cast"),
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def amax_algorithm(text: str) -> AmaxAlgorithm:
    """Turn the name of an algorithm into a function from a window to the chosen amax.

    Raises:
        PrecisionError: for an unknown name or a parameter out of range.
    """
    try:
        kind, parameter = parse_amax_algorithm(text)
    except ValueError as error:
        raise PrecisionError(f"amax_compute_algo {text!r}: allowed {error}") from None
    if kind == "quantile":
        return lambda history: _quantile(history, parameter)
    if kind == "trimmed_max":
        return lambda history: _trimmed_max(history, int(parameter))
    if kind == "ema":
        return lambda history: _ema(history, parameter)
    return _max if kind == "max" else _most_recent


def _max(history: Tensor) -> Tensor:
    return history.amax(dim=0)


def _most_recent(history: Tensor) -> Tensor:
    return history[-1]


def _sorted_entries(history: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns in ascending order (unfilled zeros first) and their filled counts."""
    return history.sort(dim=0).values, (history > 0).sum(dim=0)


def _quantile(history: Tensor, q: float) -> Tensor:
    # Own arithmetic: torch.quantile refuses more than 2**24 elements and knows no unfilled ones.
    entries, filled = _sorted_entries(history)
    position = (filled - 1).clamp(min=0) * q
    low = position.floor()
    first = history.shape[0] - filled.clamp(min=1)  # row of the smallest filled entry
    below = entries.gather(0, (first + low.long())[None])[0]  # [H, N] rows by column -> [N]
    above = entries.gather(0, (first + position.ceil().long())[None])[0]
    return torch.lerp(below, above, (position - low).to(entries.dtype))


def _trimmed_max(history: Tensor, k: int) -> Tensor:
    entries, filled = _sorted_entries(history)
    # One entry is left even of a window shorter than k.
    dropped = (filled - 1).clamp(min=0, max=k)
    # [1, N] row indices, one a column
    return entries.gather(0, (history.shape[0] - 1 - dropped)[None])[0]


def _ema(history: Tensor, b: float) -> Tensor:
    filled = history > 0
    rank = filled.cumsum(dim=0)  # 1 for the oldest entry
    weight = torch.pow(b, (rank[-1] - rank).to(history.dtype))
    # The oldest entry is where the average starts, so weights add up to 1.
    weight = torch.where(rank == 1, weight, weight * (1.0 - b))
    return torch.where(filled, weight * history, 0.0).sum(dim=0)
