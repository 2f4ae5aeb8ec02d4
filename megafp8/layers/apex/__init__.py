"""NVIDIA apex: fused Adam over local fp32 shards, fused norms (`norm.py`); its only importer.

PyPI has another project of that name (a toolkit for Pyramid). It is told apart by what it lacks:
the folders `optimizers` and `normalization`, and the compiled modules.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch

INSTALL = "NVIDIA's is built from github.com/NVIDIA/apex with its CUDA extensions (docs/install.md)"

_KINDS = {"optimizers": "optimizers", "normalization": "norms"}


def available() -> tuple[bool, str]:
    """Say whether apex's fused optimizers can be used here, with the reason."""
    return _available("optimizers", "amp_C")


def norms_available() -> tuple[bool, str]:
    """Say whether apex's fused norms can be used here, with the reason."""
    return _available("normalization", "fused_layer_norm_cuda")


def _available(part: str, extension: str) -> tuple[bool, str]:
    spec = importlib.util.find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        return False, f"apex is not installed; {INSTALL}"
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    if not any((folder / part).is_dir() for folder in folders):
        return False, (
            "the installed package apex is PyPI's, which has nothing to do with NVIDIA's: "
            f"pip uninstall apex; {INSTALL}"
        )
    if importlib.util.find_spec(extension) is None:
        return False, f"apex is installed without its CUDA extensions ({extension}); {INSTALL}"
    if not torch.cuda.is_available():
        return False, f"apex's {_KINDS[part]} need a CUDA device and torch sees none"
    return True, "NVIDIA apex"


def fused_adam(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW by apex's multi-tensor kernel, with the state of torch's: a step count per parameter.

    Args:
        groups: parameter groups with named fp32 shards and `weight_decay`.
        lr: learning rate.
        betas: of the moments.
        eps: added to the denominator.
    """
    from apex.optimizers import FusedAdam

    class _FusedAdam(FusedAdam):
        """Keeps the counter that checkpoints hold; apex counts per group."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for shard in group["params"]:
                    if shard.numel() == 0:  # a rank without rows launches nothing for them
                        shard.grad = None
                # On the CPU, so that reading it waits for no device.
                group["step"] = int(self.state[group["params"][0]]["step"])
            super().step(closure)
            for group in self.param_groups:
                for shard in group["params"]:
                    self.state[shard]["step"] += 1

        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for shard in group["params"]:
                    shard.grad = None

    optimizer = _FusedAdam(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=betas,
        eps=eps,
        adam_w_mode=True,
        bias_correction=True,
    )
    for group in optimizer.param_groups:
        for shard in group["params"]:
            optimizer.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
    return optimizer
