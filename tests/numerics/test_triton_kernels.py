"""The Triton kernels without a GPU: their values in the interpreter, and that they compile."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafp8.errors import PrecisionError
from megafp8.numerics.kernels import KERNELS, choose_kernels
from tests.support.limits import slow
from tests.support.oracles import needs_triton

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run_interpreted(arguments: list[str]) -> str:
    """Run Python with Triton's interpreter switched on and return what it prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@needs_triton
@pytest.mark.parametrize("cases", sorted(HERE.glob("triton_*cases.py")), ids=lambda p: p.stem)
def test_kernels_give_the_reference_values(cases: Path) -> None:
    found = run_interpreted(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)])
    assert " passed" in found and "skipped" not in found


COMPILE = """
import warnings
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megafp8.numerics.kernels import blocks, cast, fused, rows

POINTERS = {"scale": "*fp32", "codes": "*u8", "transposed": "*u8", "amax": "*u32", "mean": "*fp32",
            "rstd": "*fp32", "x": "*bf16", "grad": "*bf16", "weight": "*bf16", "bias": "*bf16",
            "epsilon": "fp32", "grid": "*fp32", "row_amax": "*u32", "column_amax": "*u32",
            "row_inverse": "*fp32", "column_inverse": "*fp32"}
FLAGS = {"E5M2": True, "CODES": True, "TRANSPOSED": True, "AMAX": True, "CENTERED": True,
         "BM": 64, "BK": 128, "BLOCK": 1024, "R": 1, "C": 128, "MX": False,
         "POWER_OF_2": True, "ROWS": True, "COLUMNS": True}
for kernel in (cast._cast_kernel, fused._swiglu_kernel, fused._dswiglu_kernel,
               fused._row_statistics_kernel, fused._normalize_kernel, blocks._block_kernel,
               rows._amax_kernel, rows._rows_kernel):
    constants = {name: FLAGS[name] for name in kernel.arg_names if name in FLAGS}
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32")
                 for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32),
                          options=dict(cast.LAUNCH))
    assert "cubin" in made.asm
    print(kernel.__name__)
# Every kind of block, as it is launched: codes or transposed codes.
for (rows_each, columns_each), (bm, bk) in blocks.TILES.items():
    kernel, along = blocks._block_kernel, rows_each > columns_each
    constants = {name: FLAGS[name] for name in kernel.arg_names if name in FLAGS}
    constants |= {"R": rows_each, "C": columns_each, "BM": bm, "BK": bk, "CODES": not along,
                  "TRANSPOSED": along, "MX": 32 in (rows_each, columns_each), "stride_k": 1}
    grid = {"grid": "*u8"} if constants["MX"] else {}
    signature = {name: "constexpr" if name in constants else {**POINTERS, **grid}.get(name, "i32")
                 for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", CAPABILITY, 32)
    made = triton.compile(source, target=target, options=dict(cast.LAUNCH))
    assert "cubin" in made.asm
    print("block", rows_each, columns_each)
"""


@needs_triton
@pytest.mark.parametrize(
    "capability",
    [slow(89), 90, slow(100)],
)
def test_kernels_compile_for_a_generation_with_fp8_units(tmp_path: Path, capability: int) -> None:
    """Ada, Hopper, Blackwell: down to machine code, which needs no device."""
    code = COMPILE.replace("CAPABILITY", str(capability))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    path = tmp_path / "compile_kernels.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, str(path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 13


def test_auto_takes_eager_on_a_cpu_and_says_why() -> None:
    choice = choose_kernels("auto", "cpu")
    assert choice.chosen == "eager" and not choice.fused
    assert "triton" in choice.reason
    assert choice.record() == {"asked": "auto", "chosen": "eager", "reason": choice.reason}


def test_triton_by_name_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(PrecisionError, match="--fp8-kernels triton: .*allowed here: auto, eager"):
        choose_kernels("triton", "cpu")


def test_eager_by_name_is_taken_anywhere() -> None:
    assert choose_kernels("eager", "cpu").chosen == "eager"
    assert KERNELS == ("auto", "triton", "eager")


def test_missing_triton_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_kernels("auto", "cpu").reason == "triton is not installed"


@pytest.mark.parametrize(("capability", "chosen"), [((8, 0), "eager"), ((9, 0), "triton")])
@needs_triton
def test_pretended_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice = choose_kernels("auto", "cuda")
    assert choice.chosen == chosen
    assert ("8.0" in choice.reason) == (chosen == "eager")
