"""Counts the tensor-parallel traffic of TE's linears, which TE starts itself."""

import functools
from typing import Any

import torch.distributed as dist
from transformer_engine.pytorch.module import base as te_base
from transformer_engine.pytorch.module import layernorm_linear as te_layernorm_linear
from transformer_engine.pytorch.module import linear as te_linear

from megafp8.parallel.collectives import LINEAR_KINDS, CommGroup

_COUNTED: dict[dist.ProcessGroup, CommGroup] = {}
_COUNTING: set[Any] = set()  # the functions that count


def count_traffic(group: CommGroup) -> None:
    """Count what TE's linears send over `group` from now on.

    TE has no hook for it, so the three functions through which its linears communicate are wrapped
    in the modules that use them, once per process. Groups that were not named here pass through.
    The count is of the tensors that travel: codes where they are FP8.
    """
    if group.process_group is None or group.size == 1:
        return
    _COUNTED.clear()  # one grid at a time; a former one's groups are gone
    _COUNTED[group.process_group] = group
    for module in (te_base, te_linear, te_layernorm_linear):
        for name, wrap in _WRAPPERS.items():
            function = getattr(module, name, None)
            if function is not None and function not in _COUNTING:
                counting = wrap(function)
                _COUNTING.add(counting)
                setattr(module, name, counting)


def _payload(tensor: Any) -> Any:
    codes = getattr(tensor, "_data", None)
    return tensor if codes is None else codes


def _gather(function: Any) -> Any:
    @functools.wraps(function)
    def counted(inp: Any, process_group: Any, *args: Any, **kwargs: Any) -> Any:
        full, work = function(inp, process_group, *args, **kwargs)
        group = _COUNTED.get(process_group)
        if group is not None:
            group.traffic.gathered(LINEAR_KINDS[0], _payload(full), group.size)
        return full, work

    return counted


def _reduce_scatter(function: Any) -> Any:
    @functools.wraps(function)
    def counted(inp: Any, tp_group: Any, *args: Any, **kwargs: Any) -> Any:
        group = _COUNTED.get(tp_group)
        if group is not None:
            group.traffic.gathered(LINEAR_KINDS[1], inp, group.size)
        return function(inp, tp_group, *args, **kwargs)

    return counted


def _all_reduce(function: Any) -> Any:
    @functools.wraps(function)
    def counted(inp: Any, tp_group: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = _COUNTED.get(tp_group)
        if group is not None:
            group.traffic.reduced("tp_all_reduce", inp, group.size)
        return function(inp, tp_group, *args, **kwargs)

    return counted


_WRAPPERS = {
    "gather_along_first_dim": _gather,
    "reduce_scatter_along_first_dim": _reduce_scatter,
    "allreduce": _all_reduce,
}
