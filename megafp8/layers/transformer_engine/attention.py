"""TE's DotProductAttention as the attention core, in BF16 or FP8.

TE takes flash-attn, cuDNN's fused attention or its own unfused one, whichever suits the inputs
(`--attention-backend` narrows it). In FP8 all six tensors of the two products have scales of their
own, in the same registry as the linears'.
"""

from contextlib import nullcontext
from typing import Any

import transformer_engine.pytorch as te
from torch import Tensor

from megafp8.errors import PrecisionError
from megafp8.layers.backend import CoreOptions, LayerContext
from megafp8.layers.dropout import MicroBatchKey
from megafp8.layers.native.attention_core import dropout_site
from megafp8.layers.transformer_engine.registry_quantizers import RegistryQuantizers, Slots
from megafp8.parallel.rng import default_generator_seeded

# TE's slots (META_* of cpp_extensions/fused_attn.py of 2.20): three per product forward, two
# backward, most of them unused.
SLOTS: Slots = {
    "scaling_fwd": (None, None, "qkv", "output", None, None, None, None, "softmax"),
    "scaling_bwd": ("grad_qkv", None, None, "grad_output", None, "grad_softmax"),
}


class TeCore(RegistryQuantizers, te.DotProductAttention):
    """Causal attention; see `Backend.attention_core` for the shapes.

    Args:
        context: what the layers of the stage share.
        options: of this core.
        recipe: TE's recipe of the run; None without FP8.
    """

    def __init__(self, context: LayerContext, options: CoreOptions, recipe: Any) -> None:
        tp, left = context.mesh.tp, options.window_left
        super().__init__(
            options.num_heads,
            options.head_dim,
            num_gqa_groups=options.num_groups,
            attention_dropout=options.dropout,
            qkv_format="sbhd",
            attn_mask_type="causal",
            window_size=None if left is None else (left, 0),
            tp_size=tp.size,
            tp_group=tp.process_group,
            name=options.name,
        )
        self.options = options
        self.attach(options.name, context, options.fp8, recipe, SLOTS)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key: MicroBatchKey) -> Tensor:
        """Attend; dropout on the weights follows the key and is off outside training.

        TE's cores draw from the default generator, which is seeded from the key for the forward and
        put back: recompute draws the same mask, and backward keeps it or its generator's state.

        Raises:
            PrecisionError: no core of TE's takes these inputs.
        """
        if self.training != key.training:
            self.train(key.training)
        seeded: Any = nullcontext()
        if self.options.dropout > 0.0 and key.training:
            seeded = default_generator_seeded(key.local(dropout_site(self.options)), q.device)
        try:
            with self.precision_context(), seeded:
                return super().forward(q, k, v)
        except ValueError as error:
            if "No dot product attention backend" not in str(error):
                raise
            kind = "in FP8" if self.precision == "fp8" else f"in {q.dtype}"
            raise PrecisionError(
                f"{self.options.name}: TransformerEngine has no attention core {kind} for q "
                f"{list(q.shape)}, k {list(k.shape)} here (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says "
                "why); take --attention-backend local without --fp8-attention"
            ) from None

    def extra_repr(self) -> str:
        """Name and precision."""
        fp8 = self.precision == "fp8"
        return f"{self.options.name}, {'fp8 delayed' if fp8 else 'high precision'}"
