"""apex's fused norms over this project's parameters; importing this imports NVIDIA's apex.

The functions behind `FusedRMSNorm` and `FusedLayerNorm` are used: those modules own plain
parameters, ours are DTensors that FSDP2 swaps.
"""

from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
from torch import Tensor

from megafp8.layers.native.norm import Norm
from megafp8.layers.parameters import local


class ApexNorm(Norm):
    """The native norm's parameters and mathematics, with apex's kernels (statistics in fp32)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h] in the dtype of x, which is that of the parameters."""
        weight, shape = local(self.weight), (x.shape[-1],)
        if self.bias is None:
            return fused_rms_norm_affine(x, weight, shape, eps=self.epsilon)
        return fused_layer_norm_affine(x, weight, local(self.bias), shape, eps=self.epsilon)

    def extra_repr(self) -> str:
        """As the native norm, and whose kernel."""
        return f"{super().extra_repr()}, apex"
