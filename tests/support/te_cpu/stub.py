"""Enough of `transformer_engine_torch` that TE's Python imports beside a CPU build of torch."""

import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

NAME = "transformer_engine_torch"


class _LenientMeta(enum.EnumMeta):
    """Members that other TE versions had or will have resolve to distinct numbers."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        return 1000 + sum(map(ord, name))


class _LenientEnum(enum.IntEnum, metaclass=_LenientMeta):
    pass


def _enum(name: str, members: dict[str, int] | str) -> Any:
    if isinstance(members, str):
        members = {member: index for index, member in enumerate(members.split())}
    return _LenientEnum(name, members, module=NAME)


# Values as in the compiled extension of 2.20.2.
ENUMS: dict[str, dict[str, int] | str] = {
    "DType": {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "NVTE_Fused_Attn_Backend": {
        "NVTE_No_Backend": -1,
        "NVTE_F16_arbitrary_seqlen": 1,
        "NVTE_FP8": 2,
    },
}


class _AnyAttribute(type):
    """Metaclass: any attribute exists, as a number of its own, so enum look-ups work."""

    _numbers: dict[str, int]

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(cls._numbers)
        cls._numbers[name] = value
        setattr(cls, name, value)
        return value


class _Extension(types.ModuleType):
    """Makes up what is asked for: classes by capital letter, functions that raise when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if name[0].isupper():
            made = _AnyAttribute(name, (), {"__module__": self.__name__, "_numbers": {}})
        else:
            made = _absent(name)
        setattr(self, name, made)
        return made


def _absent(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{NAME}.{name} is not emulated")

    return refuse


def install() -> types.ModuleType:
    """Put the stand-in where TE will look for its extension."""
    # TE's package then imports without its CUDA libraries.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    extension = _Extension(NAME)
    for name, members in ENUMS.items():
        setattr(extension, name, _enum(name, members))
    no_backend = extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    values: dict[str, Any] = {
        "get_cudnn_version": lambda: 92400,
        "get_cublasLt_version": lambda: 130100,
        "get_fused_attn_backend": lambda *args, **kwargs: no_backend,
    }
    for name, value in values.items():
        setattr(extension, name, value)
    sys.modules[NAME] = extension
    return extension


class _ImportOnly(_Extension):
    """Stand-in for triton, onnx and onnxscript, which TE only uses while it is imported."""

    __path__: list[str] = []
    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = MagicMock(name=f"{self.__name__}.{name}")
        if name in ("jit", "heuristics"):  # decorators, bare or called
            made = _bare_or_called
        elif name == "autotune":
            made = lambda *args, **kwargs: lambda function: function  # noqa: E731
        setattr(self, name, made)
        return made


def _bare_or_called(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args and callable(args[0]) else lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        wanted = ("triton", "onnx", "onnxscript")
        self.roots = [name for name in wanted if importlib.util.find_spec(name) is None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _ImportOnly(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_te(extension: types.ModuleType) -> types.ModuleType:
    """Import `transformer_engine.pytorch` on top of the stand-in and return it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own `from . import pytorch` fails and is swallowed
        import transformer_engine  # noqa: F401
        import transformer_engine.common as common

        sys.modules[NAME] = extension
        common.load_framework_extension = lambda framework: None
        finder = _Finder()
        sys.meta_path.append(finder)
        try:
            return importlib.import_module("transformer_engine.pytorch")
        finally:  # leave no false triton behind for torch to find
            sys.meta_path.remove(finder)
            for name in [n for n in sys.modules if n.split(".")[0] in finder.roots]:
                del sys.modules[name]
