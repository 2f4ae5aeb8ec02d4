"""Which backend a run takes, without TransformerEngine and with versions that do not do."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.config.cli import load_config
from megafp8.errors import PrecisionError
from megafp8.layers import transformer_engine
from megafp8.layers.choice import BackendChoice, add_kernels, add_products, choose_backend
from megafp8.layers.transformer_engine import availability
from megafp8.numerics.kernels import EAGER
from tests.model.small import small_config
from tests.support.layouts import PARITY, ROOT
from tests.support.ranks import Ranks
from tests.support.te_runs import TE, start_te


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None, cuda: bool = True) -> None:
    """Pretend that a version is installed (its import fails) and that there is a GPU."""
    monkeypatch.setattr(availability, "version", lambda: version)
    monkeypatch.setattr(availability.torch.cuda, "is_available", lambda: cuda)

    def broken() -> Any:
        raise AssertionError("Could not find `transformer-engine`.")

    monkeypatch.setattr(availability, "import_te", broken)


@pytest.mark.parametrize(
    ("version", "cuda", "said"),
    [
        (None, True, "the package transformer_engine is not installed; install it with: pip"),
        ("2.19.1", True, "TransformerEngine 2.19.1 is installed, 2.20 or later is needed; install"),
        ("1.13.0", True, "TransformerEngine 1.13.0 is installed, 2.20 or later is needed"),
        ("unknown", True, "TransformerEngine unknown is installed, 2.20 or later is needed"),
        ("2.20.2", False, "TransformerEngine needs a CUDA device and torch sees none"),
        ("2.100.0", True, "TransformerEngine 2.100.0 cannot be imported (Could not find `trans"),
    ],
)
def test_unavailable(
    monkeypatch: pytest.MonkeyPatch, version: str | None, cuda: bool, said: str
) -> None:
    installed(monkeypatch, version, cuda)
    able, reason = transformer_engine.available()
    assert not able and reason.startswith(said) and "\n" not in reason
    with pytest.raises(PrecisionError, match="^--transformer-impl transformer_engine: ") as caught:
        choose_backend(load_config([*PARITY, *TE]))
    assert said in str(caught.value)
    choice = choose_backend(load_config(list(PARITY)))
    assert choice.chosen == "native" and choice.reason == f"auto takes native: {reason}"
    assert choice.record() == {"asked": "auto", "chosen": "native", "reason": choice.reason}


@pytest.mark.parametrize("impl", ["native", "local"])
def test_native_asks_for_nothing(monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    monkeypatch.setattr(availability, "version", lambda: 1 / 0)
    choice = choose_backend(load_config([*PARITY, "--transformer-impl", impl]))
    assert (choice.chosen, choice.reason) == ("native", f"--transformer-impl {impl}")


def test_auto_takes_native_for_what_te_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        availability, "available", lambda recipe: (True, "TransformerEngine 2.20.2")
    )
    choice = choose_backend(load_config([*PARITY, "--no-fp8-wgrad"]))
    assert choice.chosen == "native" and "--no-fp8-wgrad" in choice.reason


def test_the_package_itself_imports_no_te() -> None:
    code = (
        "import sys, megafp8.layers.transformer_engine, megafp8.model, megafp8.train.pretrain;"
        "print([name for name in sys.modules if name.split('.')[0] == 'transformer_engine'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_command_line_without_te(tmp_path: Path) -> None:
    """One line, exit code 2, before data are touched."""
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *PARITY, *TE, "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if importlib.util.find_spec("torch") and availability.torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = [text for text in done.stderr.splitlines() if "error" in text]
    assert "pretrain_gpt.py: error: --transformer-impl transformer_engine: " in line
    assert "is not installed; install it with: pip" in line or "needs a CUDA device" in line


def chosen() -> dict[str, Any]:
    training = start_te(PARITY)
    from megafp8.layers.choice import choose_backend

    automatic = choose_backend(load_config(list(PARITY)))
    return {"asked": training.model.backend.record(), "auto": automatic.record()}


def test_records_of_a_te_run(te_ranks: Ranks) -> None:
    (found,) = te_ranks.run(chosen, world_size=1)
    asked, automatic = found["asked"], found["auto"]
    assert asked["chosen"] == automatic["chosen"] == "transformer_engine"
    assert asked["version"] == "2.20.2"
    assert automatic["reason"].startswith("auto takes it where it can be used: TransformerEngine")
    for name, value in availability.PINNED.items():
        assert asked["environment"][name] == value
    assert asked["environment"]["NVTE_TORCH_COMPILE"] == "0"


def test_record_is_plain() -> None:
    choice = BackendChoice("auto", "native", "because", {"version": None})
    assert choice.record() == {
        "asked": "auto",
        "chosen": "native",
        "reason": "because",
        "version": None,
    }


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_kernels_are_of_the_native_backend(recipe: str) -> None:
    config = small_config(bf16=True, fp8_format="e4m3", fp8_recipe=recipe, fp8_kernels="triton")
    device = torch.device("cpu")
    te = BackendChoice("transformer_engine", "transformer_engine", "asked for")
    with pytest.raises(PrecisionError, match="--fp8-kernels triton: kernels of the native backend"):
        add_kernels(te, config, device)
    native = BackendChoice("native", "native", "asked for")
    with pytest.raises(PrecisionError, match="--fp8-kernels triton: .*allowed here: auto, eager"):
        add_kernels(native, config, device)
    plain = small_config(bf16=True, fp8_format="e4m3", fp8_recipe=recipe)
    assert add_kernels(te, plain, device) == (te, EAGER)
    recorded, kernels = add_kernels(native, plain, device)
    assert recorded.details["fp8_kernels"] == kernels.record() and kernels.chosen == "eager"


def test_a_run_in_bf16_on_a_cpu_records_how_it_multiplies(each_cpu: str) -> None:
    native = BackendChoice("auto", "native", "for this test")
    made = add_products(native, torch.bfloat16, torch.device("cpu")).record()
    assert made["bf16_products"] == {"chosen": each_cpu, "reason": "for this test"}
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cuda")):
        assert add_products(native, dtype, torch.device(device)) == native
