"""Weight gradients of TE's linears in the W slots of a zero-bubble schedule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.module._common import WeightGradStore

from megafp8.layers.parameters import accumulate_gradient
from megafp8.parallel.pipeline import DeferredWeightGradients


class DeferredWeightStore(WeightGradStore):
    """TE's store of delayed weight gradients, which hands them on to the schedule's queue.

    TE would leave a gradient in the module until `backward_dw` and write it over the one of the
    micro-batch before. Here each is added in fp32, as the native linear does.

    Args:
        deferred: queue of the stage.
        weight: gives the DTensor that takes the gradients; asked in each backward, since FSDP2 puts
            another one into the module than it was built with.
    """

    def __init__(self, deferred: DeferredWeightGradients, weight: Callable[[], Any]) -> None:
        super().__init__(delay_wgrad_compute=True)
        self._deferred, self._weight = deferred, weight

    def put(self, tensor_list: list[Any], func: Callable[..., tuple[Tensor, Any]]) -> None:
        """Queue `func(*tensor_list)`, whose first result is the gradient [n, k]."""
        weight = self._weight()

        @torch.no_grad()
        def accumulate() -> None:
            accumulate_gradient(weight, func(*tensor_list)[0])

        self._deferred.queue.append(accumulate)
