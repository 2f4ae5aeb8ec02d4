"""The FP16 loss scale; the golden sequence comes from Megatron's DynamicGradScaler (0.16.1)."""

import pytest

from megafp8.config.precision import PrecisionConfig
from megafp8.errors import ConfigurationError
from megafp8.train.loss_scaler import ConstantLossScaler, DynamicLossScaler, build_loss_scaler

OVERFLOWS = "0010101000000111110000"
SCALES = [
    65536, 65536, 65536, 65536, 32768, 32768, 16384, 16384, 16384, 32768, 32768, 32768, 65536,
    65536, 32768, 16384, 8192, 8192, 8192, 8192, 16384, 16384,
]  # fmt: skip


def scaler():
    return DynamicLossScaler(2.0**16, min_scale=2.0**13, window=3, hysteresis=2)


def test_scale_follows_megatrons_sequence():
    dynamic, seen = scaler(), []
    for overflow in OVERFLOWS:
        dynamic.update(overflow == "1")
        seen.append(dynamic.scale)
    assert seen == SCALES


@pytest.mark.parametrize("stop", range(len(OVERFLOWS)))
def test_a_resumed_scaler_continues_the_sequence(stop):
    first, second = scaler(), scaler()
    for overflow in OVERFLOWS[:stop]:
        first.update(overflow == "1")
    second.load_state_dict(first.state_dict())
    for overflow, expected in zip(OVERFLOWS[stop:], SCALES[stop:], strict=True):
        second.update(overflow == "1")
        assert second.scale == expected


def test_a_constant_scale_ignores_overflows():
    constant = ConstantLossScaler(128.0)
    constant.update(True)
    constant.load_state_dict({"scale": 2.0})
    assert constant.scale == 128.0 and constant.state_dict() == {}


def test_an_empty_state_keeps_the_start_values():
    dynamic = scaler()
    dynamic.load_state_dict({})
    assert dynamic.state_dict() == {
        "scale": 65536.0,
        "growth_tracker": 0,
        "hysteresis_tracker": 2,
    }


def test_the_configuration_chooses_the_scaler():
    dynamic = build_loss_scaler(PrecisionConfig(fp16=True))
    assert isinstance(dynamic, DynamicLossScaler)
    assert (dynamic.scale, dynamic.min_scale) == (2.0**32, 1.0)
    assert (dynamic.window, dynamic.hysteresis) == (1000, 2)
    constant = build_loss_scaler(PrecisionConfig(fp16=True, loss_scale=64.0))
    assert isinstance(constant, ConstantLossScaler) and constant.scale == 64.0
    assert build_loss_scaler(PrecisionConfig(bf16=True)).scale == 1.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"min_scale": 4.0}, "--min-loss-scale 4"),
        ({"min_scale": 0.0}, "--min-loss-scale 0"),
        ({"window": 0}, "--loss-scale-window 0"),
        ({"hysteresis": 0}, "--hysteresis 0"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    settings = {"initial_scale": 2.0, "min_scale": 1.0, "window": 2, "hysteresis": 2}
    with pytest.raises(ConfigurationError, match=message):
        DynamicLossScaler(**{**settings, **changes})
