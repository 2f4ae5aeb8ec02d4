"""The state of delayed scaling: one object per rank for all FP8 tensors of its stages.

Per tensor: `scale`, `scale_inv`, a window of amaxes (newest last) and the amax of the current step.
The scale of step t comes from amaxes known before t; the first step uses 1.0, except for weights,
whose fp32 masters are known (`take_current`).

    scale_new = (fp8_max / amax) / 2**margin        fp32 division

    chosen amax 0, inf or NaN           keep the scale
    scale_new inf (tiny amax)           largest finite fp32
    pending 0 (unused in this step)     no entry
    pending inf or NaN                  `skip`: counted, no entry; `freeze`: see `Recipe`

A scale is its window under a rule (formats, margin, cap, algorithm): a run that loads windows under
another rule chooses its scales anew (`rescale`).

With a recipe that finds its scales in the tensor itself there is no state: such a registry only
remembers what a step's tensors reached, so that a non-finite one is seen and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from megafp8.errors import CheckpointError, PrecisionError
from megafp8.numerics.formats import Fp8Format
from megafp8.numerics.recipe import ALL_ROLES, Recipe, Role
from megafp8.numerics.scales import next_scale
from megafp8.numerics.windows import held_entries, moved_scale, same_scale, window_scale

Cast = TypeVar("Cast")
# Sees (module name, role, the high-precision tensor if there is one, its cast).
CastObserver = Callable[[str, Role, Tensor | None, Any], None]


class ScaleRegistry:
    """Scales and amax windows of N tensors, updated together.

    Use: `register` every tensor, `finalize` once, then per step `record` (any number of times) and
    one `update`. Layers keep indices. Nothing here waits for a device, except `tensors` and `load`.

    Attributes (after `finalize`; all fp32 on the device unless said otherwise):
        keys: list of (module name, role), in order of registration.
        scale, scale_inv: [N]; written in place, so that views stay valid.
        amax_history: [H, N], newest last, 0 = unfilled.
        pending_amax: [N]; with `skip` it may hold NaN until the next update.
        nonfinite: int64 [N], updates that saw a non-finite amax.
        frozen_steps: int64 [N], updates that kept the scale because of a non-finite amax.
        version: incremented whenever scales may have changed; keys a cache of casts.
        observer: told of each cast by those who cast; None (then nothing is done) by default.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.keys: list[tuple[str, Role]] = []
        self.recording = True
        self.version = 0
        self.observer: CastObserver | None = None
        self._held: Tensor | None = None  # bool [N]
        self._index: dict[tuple[str, Role], int] = {}
        self._finalized = False

    def __len__(self) -> int:
        return len(self.keys)

    def register(self, module_name: str, role: Role) -> int:
        """Add one tensor and return its index.

        Raises:
            PrecisionError: for an unknown role or a name registered twice.
        """
        assert not self._finalized, "register() after finalize()"
        if role not in ALL_ROLES:
            raise PrecisionError(
                f"{module_name}: role {role!r} is not one of {', '.join(ALL_ROLES)}"
            )
        key = (module_name, role)
        if key in self._index:
            raise PrecisionError(f"{module_name}: role {role!r} is registered twice")
        self._index[key] = len(self.keys)
        self.keys.append(key)
        return self._index[key]

    def finalize(self, device: torch.device | str) -> None:
        """Allocate the state: scale 1.0, empty windows."""
        assert not self._finalized, "finalize() called twice"
        n = len(self.keys)
        # Without state the window has no rows, and all code below works on [0, N].
        h = self.recipe.amax_history_len if self.recipe.stateful else 0
        self.scale = torch.ones(n, dtype=torch.float32, device=device)
        self.scale_inv = torch.ones_like(self.scale)
        self.pending_amax = torch.zeros_like(self.scale)
        self.amax_history = torch.zeros(h, n, dtype=torch.float32, device=device)
        self.nonfinite = torch.zeros(n, dtype=torch.int64, device=device)
        self.frozen_steps = torch.zeros_like(self.nonfinite)
        self._fp8_max = torch.tensor(
            [self.recipe.format(role).max for _, role in self.keys], dtype=torch.float32
        ).to(device)
        # 0-dim views, made once: indexing a tensor costs 2 us, a list 0.03 us.
        self._scale_views = self.scale.unbind()
        self._scale_inv_views = self.scale_inv.unbind()
        self._pending_views = self.pending_amax.unbind()
        self._finalized = True

    def index_of(self, module_name: str, role: Role) -> int:
        """Return the index of a registered tensor; KeyError if there is none."""
        return self._index[(module_name, role)]

    def format_of(self, index: int) -> Fp8Format:
        """Return the FP8 format of tensor `index`."""
        return self.recipe.format(self.keys[index][1])

    def scale_of(self, index: int) -> Tensor:
        """Return the current scale of tensor `index`: a 0-dim view that follows updates."""
        return self._scale_views[index]

    def scale_inv_of(self, index: int) -> Tensor:
        """Return 1 / scale of tensor `index`: a 0-dim view that follows updates.

        A tensor that is kept over an update has to clone it, or be cast anew (see `version`).
        """
        return self._scale_inv_views[index]

    def pending_of(self, index: int) -> Tensor:
        """Return what this step has recorded of tensor `index`: a 0-dim view, >= 0 or NaN.

        A kernel takes its maximum there in place, under the conditions of `record`.
        """
        return self._pending_views[index]

    def record(self, index: int, amax: Tensor) -> None:
        """Take the maximum of `amax` and what this step has seen; no-op while paused.

        On the device, without a host sync. NaN wins over any number; a recipe that drops it does
        so where the amax is computed.
        """
        if self.recording:
            pending = self._pending_views[index]
            torch.maximum(pending, amax, out=pending)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside (evaluation, probes)."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def observed(self, index: int, x: Tensor | None, cast: Cast) -> Cast:
        """Show a cast of tensor `index` to the observer, if there is one, and return it."""
        if self.observer is not None:
            self.observer(*self.keys[index], x, cast)
        return cast

    def hold(self, module_name: str, held: bool) -> None:
        """Keep the windows and scales of a module as they are, or let them move again.

        For a module that runs in high precision for a while. Its tensors stay registered and stay
        in checkpoints; whatever is recorded of them makes no entry.
        """
        mine = torch.tensor([module == module_name for module, _ in self.keys], dtype=torch.bool)
        mine = mine.to(self.scale.device)
        before = torch.zeros_like(mine) if self._held is None else self._held
        now = before | mine if held else before & ~mine
        # None, not a mask of zeros: a run that never switches makes no further kernel. The wait for
        # the device that tells is between two steps.
        self._held = now if bool(now.any()) else None

    def drop_pending(self) -> None:
        """Forget what this step recorded: a skipped step changes no scale.

        Kept casts of weights become stale all the same, since with `weight_amax="cast"` the next
        step has to record the amax of its weights again.
        """
        self.pending_amax.zero_()
        self.version += 1

    @torch.no_grad()
    def take_current(self, indices: Tensor, amax: Tensor) -> None:
        """Set scales of weights from amaxes of now: those of their masters, whoever casts them.

        With delayed scaling only those whose window is empty still: their first scale. No entry is
        made, for a window counts updates.

        Args:
            indices: int64 [n] of weights.
            amax: fp32 [n], the same on all ranks that share their scales. 0 and inf give the scale
                of before with delayed scaling, otherwise 1.0.
        """
        recipe, scale = self.recipe, self.scale[indices]
        power_of_2, cap = recipe.power_of_2_scales, recipe.scale_cap
        before = scale if recipe.stateful else torch.ones_like(scale)
        new = next_scale(amax, before, self._fp8_max[indices], recipe.margin, power_of_2, cap)
        # [N] -> [n]: tensors with an entry have a scale of their own past already
        filled = (self.amax_history > 0).any(dim=0)[indices]
        self.scale[indices] = torch.where(filled, scale, new)
        torch.reciprocal(self.scale, out=self.scale_inv)
        self.version += 1

    @torch.no_grad()
    def restore(self, scale: Tensor, amax_history: Tensor) -> None:
        """Put back copies of `scale` and `amax_history`, as of before some updates."""
        self.scale.copy_(scale)
        self.amax_history.copy_(amax_history)
        torch.reciprocal(self.scale, out=self.scale_inv)
        self.version += 1

    @torch.no_grad()
    def update(self, reduce_amax: Callable[[Tensor], None] | None = None) -> None:
        """Move this step's amaxes into the windows and choose new scales.

        Args:
            reduce_amax: reduces one flat fp32 [N] vector to its maximum over the ranks that share
                the tensors, in place. NaN is inf there, since a MAX reduction may lose NaN. Not
                called without state.
        """
        if not self.recipe.stateful:
            self.nonfinite += ~self.pending_amax.isfinite()
            self.pending_amax.zero_()
            self.version += 1
            return
        if self._held is not None:
            self.pending_amax.masked_fill_(self._held, 0.0)
        skip = self.recipe.nonfinite_amax == "skip"
        amax = torch.nan_to_num(self.pending_amax, nan=torch.inf, posinf=torch.inf)
        # One vector for all tensors of the rank: the number of collectives does not grow with
        # layers.
        if reduce_amax is not None:
            reduce_amax(amax)
        bad = amax.isinf()
        enters = (amax > 0) & ~bad if skip else amax > 0
        # [H, N]: the oldest entry leaves, the new one is last
        rolled = torch.cat((self.amax_history[1:], amax[None]))
        # By tensor: one that was not used, or not finite, keeps its whole window.
        self.amax_history.copy_(torch.where(enters, rolled, self.amax_history))
        new, chosen = window_scale(self.amax_history, self.scale, self._fp8_max, self.recipe)
        self.scale.copy_(new)
        torch.reciprocal(self.scale, out=self.scale_inv)
        self.nonfinite += bad
        self.frozen_steps += (bad & skip) | ~chosen.isfinite()
        self.pending_amax.zero_()
        self.version += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return the canonical checkpoint form, as copies.

        `fp8.<module>.<role>.scale` is fp32 0-dim, `fp8.<module>.<role>.amax_history` fp32 [H].
        """
        state: dict[str, Tensor] = {}
        if not self.recipe.stateful:
            return state
        windows = self.amax_history.t().contiguous()  # [N, H]: a window is a run of memory
        for index, (module_name, role) in enumerate(self.keys):
            state[f"fp8.{module_name}.{role}.scale"] = self.scale[index].clone()
            state[f"fp8.{module_name}.{role}.amax_history"] = windows[index].clone()
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> int:
        """Take over scales and windows; other names in `state` are left alone.

        A window of another length keeps its newest entries. A tensor without both of its entries
        starts anew: scale 1.0, empty window. Scales stay those of the rule that chose them until
        `rescale`.

        Returns:
            How many tensors started anew; 0 without state, where only kept casts become stale.

        Raises:
            CheckpointError: for an entry of the wrong shape, a scale that is not positive, or a
                window with a negative entry.
        """
        if not self.recipe.stateful:
            self.drop_pending()
            return 0
        scale = torch.ones(len(self.keys), dtype=torch.float32)
        history = torch.zeros(self.amax_history.shape, dtype=torch.float32)
        started_anew = 0
        for index, (module_name, role) in enumerate(self.keys):
            prefix = f"fp8.{module_name}.{role}"
            saved_scale = state.get(f"{prefix}.scale")
            saved_window = state.get(f"{prefix}.amax_history")
            if saved_scale is None or saved_window is None:
                started_anew += 1
                continue
            scale[index] = _checked_scale(prefix, saved_scale)
            entries = self._entries(prefix, saved_window)
            if entries.numel():
                history[-entries.numel() :, index] = entries
        self.scale.copy_(scale)
        self.amax_history.copy_(history)
        torch.reciprocal(self.scale, out=self.scale_inv)
        self.pending_amax.zero_()
        self.version += 1
        return started_anew

    @torch.no_grad()
    def rescale(self, before: Recipe | None = None) -> int:
        """Choose all scales anew from their windows by this recipe: after loading another's.

        They are then what a run of this recipe had come to with these windows, the same bits where
        the rule is the same. Where a window does not tell (empty, or frozen by an inf), the scale
        is moved between the rules (`moved_scale`).

        Args:
            before: recipe that chose them; None for the same rule.

        Returns:
            How many scales are others now, beyond rounding.
        """
        if not self.recipe.stateful:
            return 0
        stored = self.scale.clone()
        # First by the ratio of the two rules, for windows that do not tell; the others follow from
        # theirs.
        kept = moved_scale(stored, self.keys, before or self.recipe, self.recipe)
        new, _ = window_scale(self.amax_history, kept, self._fp8_max, self.recipe)
        self.scale.copy_(new)
        torch.reciprocal(self.scale, out=self.scale_inv)
        self.version += 1
        return int((~same_scale(new, stored)).sum())

    def _entries(self, prefix: str, window: Tensor) -> Tensor:
        """Return the newest filled entries of a saved window that this recipe would hold."""
        if window.dim() != 1:
            raise CheckpointError(
                f"{prefix}.amax_history has shape {list(window.shape)}; one axis is expected"
            )
        if bool((window < 0).any()):
            raise CheckpointError(
                f"{prefix}.amax_history holds {float(window.min()):g}; a largest absolute value "
                "is not negative"
            )
        return held_entries(window, self.recipe)


def _checked_scale(prefix: str, scale: Tensor) -> float:
    # Of a tensor of another size no element is the scale: NaN fails the test below.
    value = float(scale.reshape(-1)[0]) if scale.numel() == 1 else float("nan")
    # Smaller ones than this have no finite reciprocal in fp32.
    if not 2.0**-126 <= value < float("inf"):
        raise CheckpointError(
            f"{prefix}.scale is {scale.tolist()}; one positive finite number is expected"
        )
    return value
