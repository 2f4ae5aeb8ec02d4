"""Delayed scaling: golden rows, Transformer Engine's rule derived again, the registry's state."""

import random

import numpy as np
import pytest
import torch

from megafp8.errors import CheckpointError, PrecisionError
from megafp8.numerics import E4M3, E5M2, Recipe, ScaleRegistry, compute_amax
from tests.support import reference

INF, NAN = float("inf"), float("nan")
FP32_MAX = float(np.finfo(np.float32).max)


def registry(names=("a",), role="input", **fields) -> ScaleRegistry:
    made = ScaleRegistry(Recipe(**fields))
    for name in names:
        made.register(name, role)
    made.finalize("cpu")
    return made


def step(made: ScaleRegistry, *amaxes: float, reduce_amax=None) -> None:
    for index, amax in enumerate(amaxes):
        made.record(index, compute_amax(torch.tensor([amax]), made.recipe.drops_nan))
    made.update(reduce_amax)


def fp32(*values: float) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).tolist()


# Transformer Engine 2.20.2, fused update, E4M3, margin 0, H = 4: (amax, scale, newest three, scale
# with most_recent).
GOLDEN = [
    (2.0, 224.0, [0, 0, 2], 224.0),
    (8.0, 56.0, [0, 2, 8], 56.0),
    (0.0, 56.0, [0, 2, 8], 56.0),
    (0.5, 56.0, [2, 8, 0.5], 896.0),
    (INF, 56.0, [8, 0.5, INF], 896.0),
    (1.0, 56.0, [0.5, INF, 1], 448.0),
    (1.0, 56.0, [INF, 1, 1], 448.0),
    (1.0, 56.0, [1, 1, 1], 448.0),
    (1.0, 448.0, [1, 1, 1], 448.0),
    (NAN, 448.0, [1, 1, 1], 448.0),  # fmaxf drops NaN: 0 is staged
    (4.0, 112.0, [1, 1, 4], 112.0),
    (1e-40, 112.0, [1, 4, 1e-40], FP32_MAX),
]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_golden_rows_with_freeze(algorithm: str) -> None:
    made = registry(amax_history_len=4, nonfinite_amax="freeze", amax_compute_algo=algorithm)
    for amax, scale_max, newest, scale_recent in GOLDEN:
        step(made, amax)
        scale = scale_max if algorithm == "max" else scale_recent
        assert made.scale.tolist() == fp32(scale), amax
        assert made.amax_history[1:, 0].tolist() == fp32(*newest), amax
        assert made.scale_inv.tolist() == [1 / np.float32(scale)]


def test_golden_rows_with_skip() -> None:
    made = registry(amax_history_len=4)
    for row, (amax, scale, _, _) in enumerate(GOLDEN, start=1):
        step(made, amax)
        assert made.scale.tolist() == fp32(448.0 if row == 8 else scale), row
    assert made.nonfinite.tolist() == [2]
    assert made.frozen_steps.tolist() == [2]
    assert made.amax_history.isfinite().all()


def test_margin() -> None:
    made = registry(amax_history_len=4, margin=1)
    step(made, 2.0)
    assert made.scale.tolist() == [112.0]


def test_oracle_vectors_of_the_python_implementation() -> None:
    """What TE's `_default_sf_compute` gives for this window, previous scale 2, margin 1."""
    made = registry("abcd", amax_history_len=3, margin=1, nonfinite_amax="freeze")
    made.scale.fill_(2.0)
    window = torch.tensor([[3, 1e-45, 0, INF], [1, 0, 0, 2], [5, 0, 0, 1]])
    made.amax_history.copy_(window)
    made.update()
    assert made.scale.tolist() == fp32(44.8, FP32_MAX, 2.0, 2.0)


def te_fused_step(staged, history, scale, fp8_max, margin, algorithm):
    """TE's fused kernel from its contract: numpy, row 0 is the staging slot. Changes `history`."""
    history[0] = staged
    amax = history.max(axis=0) if algorithm == "max" else history[0]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        new = (np.float32(fp8_max) / amax) / np.float32(2**margin)
    new = np.where(amax > 0, new, scale)
    new = np.where(np.isfinite(amax), new, scale)
    new = np.where(np.isinf(new), np.float32(FP32_MAX), new)
    rolls = staged != 0
    history[:, rolls] = np.roll(history[:, rolls], -1, axis=0)
    history[0] = 0
    return new.astype(np.float32)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2, -1])
def test_fifty_steps_equal_transformer_engine(algorithm: str, margin: int) -> None:
    generator, n, h = random.Random(7), 9, 6
    fields = {"margin": margin, "amax_history_len": h, "amax_compute_algo": algorithm}
    made = registry([f"m{i}" for i in range(n)], nonfinite_amax="freeze", **fields)
    history, scale = np.zeros((h, n), np.float32), np.ones(n, np.float32)
    for iteration in range(50):
        draws = [
            generator.choice([0.0, 2.0 ** generator.uniform(-160, 127), generator.random(), 3.0])
            for _ in range(n)
        ]
        if iteration % 11 == 10:
            draws[generator.randrange(n)] = INF
        staged = np.array(draws, np.float32)
        staged_tensor = torch.tensor(staged)
        for index in range(n):
            made.record(index, staged_tensor[index])
        made.update()
        used = staged != 0
        previous = scale
        scale = te_fused_step(staged, history, scale, 448.0, margin, algorithm)
        # An unused slot keeps its scale. (TE's kernel looks at its H - 1 stored entries again.)
        scale = np.where(used, scale, previous)
        np.testing.assert_array_equal(made.scale.numpy(), scale, err_msg=str(iteration))
        np.testing.assert_array_equal(made.amax_history[1:].numpy(), history[1:])


def test_freeze_enters_the_largest_amax_beside_a_nan() -> None:
    """TE's amax kernels use fmaxf: a NaN hides no other value of its tensor or micro-batch."""
    x = torch.tensor([[1.0, NAN], [-4.0, 2.0]])
    for mode, entry in (("freeze", 4.0), ("skip", 0.0)):
        made = registry(amax_history_len=2, nonfinite_amax=mode)
        for micro_batch in (x, torch.tensor([NAN])):
            made.record(0, compute_amax(micro_batch, made.recipe.drops_nan))
        made.update()
        assert made.amax_history[:, 0].tolist() == [0.0, entry]
        assert made.scale.tolist() == [448 / entry if entry else 1.0]
        assert made.nonfinite.tolist() == [int(mode == "skip")]


@pytest.mark.parametrize("mode", ["skip", "freeze"])
def test_random_steps_equal_the_plain_python_reference(mode: str) -> None:
    generator = random.Random(3)
    made = registry(["m"], role="grad_output", amax_history_len=5, margin=1, nonfinite_amax=mode)
    plain = reference.DelayedScaling(E5M2, 5, margin=1, skip=mode == "skip")
    for _ in range(200):
        micro_batches = [
            float(
                np.float32(generator.choice([0.0, INF, NAN] + [generator.lognormvariate(0, 9)] * 9))
            )
            for _ in range(3)
        ]
        for amax in micro_batches:
            made.record(0, compute_amax(torch.tensor([amax]), made.recipe.drops_nan))
        made.update()
        plain.update(micro_batches)
        assert made.scale.item() == plain.scale
        window = [0.0] * (5 - len(plain.window)) + plain.window
        assert made.amax_history[:, 0].tolist() == fp32(*window)


def test_nothing_recorded_keeps_everything() -> None:
    made = registry("ab")
    made.update()
    assert made.scale.tolist() == [1.0, 1.0] and made.scale_inv.tolist() == [1.0, 1.0]
    assert not made.amax_history.any() and not made.nonfinite.any()


def test_outlier_moves_the_next_scale() -> None:
    made = registry()
    step(made, 1.0)
    assert made.scale.item() == 448.0
    step(made, 100.0)
    assert made.scale.item() == np.float32(4.48)


def test_one_entry_per_step_is_the_maximum_of_its_micro_batches() -> None:
    made = registry("ab", amax_history_len=8)
    for amaxes in ([1.0, 3.0, 2.0, 3.0], [0.5], [4.0, 0.25]):
        for amax in amaxes:
            made.record(0, torch.tensor(amax))
        made.update()
    assert made.amax_history[:, 0].tolist() == [0, 0, 0, 0, 0, 3, 0.5, 4]
    assert not made.amax_history[:, 1].any()


def test_nan_and_inf_survive_recording_and_a_max_reduction() -> None:
    seen = []

    def reduce_amax(flat: torch.Tensor) -> None:
        seen.append(flat.clone())
        flat.copy_(torch.maximum(flat, torch.tensor([INF, 5.0, 0.0])))

    made = registry("abc")
    for amax in (2.0, NAN, 3.0):
        made.record(2, torch.tensor(amax))
    step(made, 1.0, 2.0, reduce_amax=reduce_amax)
    assert len(seen) == 1 and seen[0].tolist() == [1.0, 2.0, INF]
    assert seen[0].dtype == torch.float32
    assert made.nonfinite.tolist() == [1, 0, 1]
    assert made.scale.tolist() == fp32(1.0, 448 / 5, 1.0)
    assert made.amax_history[-1].tolist() == [0.0, 5.0, 0.0]


def test_frozen_steps_count_kept_scales() -> None:
    made = registry(amax_history_len=3, nonfinite_amax="freeze")
    for amax in (1.0, INF, 1.0, 1.0, 1.0):
        step(made, amax)
    assert made.nonfinite.tolist() == [1]
    assert made.frozen_steps.tolist() == [3]  # inf stays for three updates


def test_views_stay_valid_and_scale_inv_follows() -> None:
    made = registry("ab")
    scale, scale_inv = made.scale_of(1), made.scale_inv_of(1)
    addresses = [t.data_ptr() for t in (made.scale, made.scale_inv, made.amax_history)]
    for amax in (1.0, 3.0):
        step(made, 1.0, amax)
        assert scale.item() == made.scale[1].item() == np.float32(448 / np.float32(amax))
        assert scale_inv.item() == np.float32(1) / np.float32(scale.item())
    made.load({name: t * 2 for name, t in made.tensors().items()})
    assert scale.item() == made.scale[1].item() == 2 * np.float32(448 / np.float32(3))
    assert addresses == [t.data_ptr() for t in (made.scale, made.scale_inv, made.amax_history)]
    assert scale.dim() == 0


def test_version_follows_updates_and_loads() -> None:
    made = registry()
    made.update()
    assert made.version == 1
    made.drop_pending()  # the weights of the next step record their amax again
    assert made.version == 2
    made.load({})
    assert made.version == 3


def test_paused_and_dropped_steps_leave_no_trace() -> None:
    made = registry()
    with pytest.raises(KeyError), made.paused():
        made.record(0, torch.tensor(9.0))
        with made.paused():
            pass
        assert not made.recording
        raise KeyError
    assert made.recording and not made.pending_amax.any()
    made.record(0, torch.tensor(NAN))
    made.drop_pending()
    step(made, 2.0)
    assert made.scale.item() == 224.0 and not made.nonfinite.any()


def test_registration_errors() -> None:
    made = ScaleRegistry(Recipe())
    assert [made.register("a", "input"), made.register("a", "weight")] == [0, 1]
    with pytest.raises(PrecisionError, match="a: role 'input' is registered twice"):
        made.register("a", "input")
    with pytest.raises(PrecisionError, match="role 'logits' is not one of input, weight"):
        made.register("a", "logits")  # type: ignore[arg-type]
    made.register("a", "grad_output")
    made.finalize("cpu")
    assert made.keys == [("a", "input"), ("a", "weight"), ("a", "grad_output")]
    assert made.index_of("a", "grad_output") == 2 and made.format_of(2) == E5M2
    step(made, 1.0, 1.0, 1.0)
    assert made.scale.tolist() == [448.0, 448.0, 57344.0]


def test_an_empty_registry_works() -> None:
    made = registry(())
    made.update(lambda flat: None)
    assert made.tensors() == {} and made.load({}) == 0


def test_save_and_load_are_bit_equal() -> None:
    made = registry("ab", amax_history_len=4)
    for iteration in range(6):
        step(made, 0.1 + iteration, 1 / (3.0 + iteration))
    saved = made.tensors()
    assert sorted(saved) == [
        "fp8.a.input.amax_history",
        "fp8.a.input.scale",
        "fp8.b.input.amax_history",
        "fp8.b.input.scale",
    ]
    assert saved["fp8.a.input.scale"].shape == () and saved["fp8.a.input.amax_history"].shape == (
        4,
    )
    other = registry("ba", amax_history_len=4)  # another order of registration
    assert other.load(saved) == 0
    again = other.tensors()
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    assert torch.equal(other.scale_inv, 1 / other.scale)
    saved_before = {name: t.clone() for name, t in saved.items()}
    step(made, 9.0, 9.0)  # the saved form is a copy
    assert all(torch.equal(saved[name], saved_before[name]) for name in saved)
    for either in (made, other):
        either.load(saved)
        step(either, 2.0, 2.0)
    assert torch.equal(made.scale, other.scale.flip(0))


@pytest.mark.parametrize(("length", "kept"), [(2, [4, 5]), (3, [3, 4, 5]), (6, [0, 1, 2, 3, 4, 5])])
def test_another_window_length_keeps_the_newest_entries(length: int, kept: list[int]) -> None:
    made = registry(amax_history_len=length)
    state = {
        "fp8.a.input.scale": torch.tensor(3.0),
        "fp8.a.input.amax_history": torch.tensor([0.0, 1, 2, 3, 4, 5]),
    }
    assert made.load(state) == 0
    assert made.amax_history[:, 0].tolist() == kept
    assert made.scale.item() == 3.0


def test_missing_entries_start_anew_and_are_counted() -> None:
    made = registry("abc", amax_history_len=2)
    step(made, 1.0, 1.0, 1.0)
    state = made.tensors()
    del state["fp8.b.input.scale"], state["fp8.c.input.amax_history"]
    made.record(0, torch.tensor(5.0))
    assert made.load({**state, "model.weight": torch.zeros(3)}) == 2
    assert made.scale.tolist() == [448.0, 1.0, 1.0]
    assert made.amax_history.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert not made.pending_amax.any()


def test_foreign_windows_lose_holes_and_what_skip_does_not_hold() -> None:
    window = torch.tensor([1.0, 0.0, INF, NAN, 2.0])
    state = {"fp8.a.input.scale": torch.ones(1), "fp8.a.input.amax_history": window}
    for mode, kept in (("skip", [0, 0, 1, 2]), ("freeze", [1, INF, INF, 2])):
        made = registry(amax_history_len=4, nonfinite_amax=mode)
        made.load(state)
        assert made.amax_history[:, 0].tolist() == kept


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-42, INF, NAN, [1.0, 2.0]])
def test_damaged_scales_are_refused(scale) -> None:
    made = registry()
    state = {"fp8.a.input.scale": torch.tensor(scale), "fp8.a.input.amax_history": torch.ones(4)}
    with pytest.raises(CheckpointError, match=r"fp8\.a\.input\.scale is"):
        made.load(state)
    with pytest.raises(CheckpointError, match=r"amax_history has shape \[2, 2\]"):
        made.load(
            {"fp8.a.input.scale": torch.ones(()), "fp8.a.input.amax_history": torch.ones(2, 2)}
        )
    assert made.scale.item() == 1.0


def rescaled(
    window: list[float], scale: float, before: dict, now: dict, role: str = "grad_output"
) -> float:
    """A scale that was chosen under one recipe, after a load by another."""
    made = registry(role=role, **now)
    entries, stored = torch.tensor(window), torch.tensor(scale)
    name = f"fp8.a.{role}"
    made.load({f"{name}.scale": stored, f"{name}.amax_history": entries})
    made.rescale(Recipe(**before))
    return made.scale.item()


FROZEN: dict = {"nonfinite_amax": "freeze", "amax_history_len": 4}
BOTH_E4M3: dict = {"gradient_format": E4M3}


@pytest.mark.parametrize(
    ("window", "scale", "before", "now", "wanted"),
    [
        ([1.0, 2.0], 28672.0, {}, {}, 28672.0),
        ([1.0, 2.0], 28672.0, {}, BOTH_E4M3, 224.0),
        ([1.0, 2.0], 28672.0, {}, {"margin": 2}, 7168.0),
        ([4.0, 2.0], 14336.0, {}, {"amax_history_len": 1}, 28672.0),
        ([4.0, 2.0], 14336.0, {}, {"amax_compute_algo": "most_recent"}, 28672.0),
        ([3.0], 57344 / 3, {}, {"power_of_2_scales": True}, 16384.0),
        ([1.0], 57344.0, {}, {"scale_cap": 100.0}, 100.0),
        # An inf that froze the scale: the window does not tell, so it is moved between the rules.
        ([INF, 2.0], 96.0, FROZEN, FROZEN, 96.0),
        ([INF, 2.0], 96.0, FROZEN, {**FROZEN, **BOTH_E4M3}, 0.75),
        ([INF, 2.0], 96.0, FROZEN, {**FROZEN, "margin": 1}, 48.0),
        ([INF, 2.0], 96.0, {**FROZEN, "margin": 1}, FROZEN, 192.0),
        ([INF, 2.0], 96.0, FROZEN, {**FROZEN, "scale_cap": 50.0}, 50.0),
        ([INF, 2.0], 96.0, FROZEN, {**FROZEN, "power_of_2_scales": True}, 64.0),
        # It thaws where the new window or rule holds no inf.
        ([INF, 2.0], 96.0, FROZEN, {**FROZEN, "amax_history_len": 1}, 28672.0),
        ([2.0, INF], 96.0, FROZEN, {}, 28672.0),
        ([INF], 96.0, FROZEN, BOTH_E4M3, 0.75),
        # No amax yet: every rule starts with 1.0, and one from elsewhere may know more.
        ([0.0, 0.0], 1.0, {}, {**BOTH_E4M3, "margin": 3}, 1.0),
        ([INF, 0.0], 1.0, FROZEN, {**FROZEN, **BOTH_E4M3}, 1.0),
        ([0.0], 256.0, {}, BOTH_E4M3, 2.0),
        ([0.0], 256.0, {}, {}, 256.0),
    ],
)
def test_a_load_by_another_rule(window, scale, before, now, wanted) -> None:
    assert rescaled(window, scale, before, now) == np.float32(wanted)


def test_first_scales_of_weights_follow_the_rule_and_leave_no_entry() -> None:
    made = ScaleRegistry(Recipe(margin=1, scale_cap=1000.0, amax_history_len=2))
    names = "abcd"
    indices = torch.tensor([made.register(name, "weight") for name in names])
    made.finalize("cpu")
    made.record(3, torch.tensor(2.0))
    made.update()
    version, view = made.version, made.scale_of(0)
    made.take_current(indices, torch.tensor([7.0, 1e-3, INF, 100.0]))
    assert made.scale.tolist() == [32.0, 1000.0, 1.0, 112.0]  # the last one has a window
    assert view.item() == 32.0 and made.version == version + 1
    assert made.scale_inv.tolist() == (1 / made.scale).tolist()
    assert made.amax_history[-1].tolist() == [0.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize("nonfinite", ["skip", "freeze"])
def test_held_tensors_keep_scale_and_window(nonfinite: str) -> None:
    made = registry(("a", "b"), amax_history_len=4, nonfinite_amax=nonfinite)
    step(made, 2.0, 2.0)
    made.hold("a", True)
    step(made, INF, 8.0)
    assert made.scale.tolist() == fp32(224.0, 56.0) and made.nonfinite.tolist() == [0, 0]
    assert made.amax_history[-2:].tolist() == [[0.0, 2.0], [2.0, 8.0]]
    made.hold("elsewhere", True)  # another rank's
    made.hold("a", False)
    step(made, 4.0, 4.0)
    assert made.scale.tolist() == fp32(112.0, 56.0)
    assert made.amax_history[-2:].tolist() == [[2.0, 8.0], [4.0, 4.0]]
