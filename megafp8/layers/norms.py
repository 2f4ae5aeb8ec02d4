"""Norms that stand alone, in both backends: native, or apex's kernels (`--norm-impl`)."""

from megafp8.layers.backend import LayerContext
from megafp8.layers.native.norm import Norm


def make_norm(context: LayerContext, name: str, kind: str, epsilon: float) -> Norm:
    """LayerNorm or RMSNorm over the last dim, replicated over tp."""
    if context.norm_impl == "apex":
        # Imported here: it imports apex.
        from megafp8.layers.apex.norm import ApexNorm

        return ApexNorm(context, name, kind, epsilon)
    return Norm(context, name, kind, epsilon)
