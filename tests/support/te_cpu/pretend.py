"""Makes TE's Python see a Hopper GPU, and puts every "cuda" tensor on the CPU."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FACTORIES = (
    "empty zeros ones full tensor arange rand randn empty_like zeros_like ones_like full_like "
    "as_tensor eye empty_strided linspace"
).split()


def _names_cuda(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return str(device).startswith("cuda")
    return type(device) is int


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(
                torch.device("cpu") if isinstance(a, (str, torch.device)) and _names_cuda(a) else a
                for a in args
            )
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a factory: the function mode is not active inside autograd's backward."""

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return wrapped


def _backward(
    self: Tensor,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)


def cuda(capability: tuple[int, int] = (9, 0)) -> None:
    """Patch torch in this process, for good."""
    properties = types.SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        name="pretended GPU",
        total_memory=1 << 37,
    )
    patches: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "synchronize": lambda *args, **kwargs: None,
        "get_device_capability": lambda *args, **kwargs: capability,
        "get_device_properties": lambda *args, **kwargs: properties,
        "get_device_name": lambda *args, **kwargs: properties.name,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    for name, function in patches.items():
        setattr(torch.cuda, name, function)
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # A property, not a case of the mode below: a block that is recomputed runs inside backward.
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.backward = _backward  # type: ignore[method-assign]
    _CudaIsCpu().__enter__()


@contextmanager
def no_cuda() -> Iterator[None]:
    """Show no CUDA device inside: torch's checkpoint writer would open a stream on it."""
    former = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = former
