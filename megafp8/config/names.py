"""Names that users write, and the fields they stand for.

A field `some_name` is `--some-name` on the command line and `some_name` in YAML. Every boolean
also has its negative, `--no-some-name`; fields that are negative by name (`no_save_optim`) keep
Megatron's word and have no further one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from megafp8.config.base import Section
from megafp8.config.sections import Sections
from megafp8.config.text import field_kind

SECTIONS: dict[str, type[Section]] = {
    name: cast(type[Section], field.annotation)
    for name, field in Sections.model_fields.items()
    if name != "accepted_flags"
}

# Switches that are on by default and which Megatron's users know by their negative alone.
NEGATIVE_FIRST = ("fp8_wgrad", "check_for_nan_in_loss_and_grad")

# What people write for a flag: their own abbreviations and other programs' names.
_OTHER_NAMES = {
    "tensor-model-parallel-size": "tp tp-size tensor-parallel tensor-parallel-size",
    "pipeline-model-parallel-size": "pp pp-size pipeline-parallel pipeline-parallel-size",
    "num-layers-per-virtual-pipeline-stage": "vp vpp vp-size vpp-size",
    "fsdp-size": "dp dp-size fsdp data-parallel data-parallel-size",
    "replicate-size": "dp dp-size data-parallel data-parallel-size hsdp",
    "context-parallel-size": "cp cp-size",
    "expert-model-parallel-size": "ep ep-size",
    "sequence-parallel": "sp",
    "pipeline-schedule": "schedule",
    "micro-batch-size": "mbs bs batch-size",
    "global-batch-size": "gbs bs batch-size grad-accum gradient-accumulation-steps",
    "seq-length": "seq seq-len seqlen sequence-length max-seq-len context-length block-size",
    "train-iters": "iters iterations steps train-steps max-steps max-iters num-steps epochs",
    "train-samples": "samples epochs",
    "lr": "learning-rate max-lr",
    "min-lr": "lr-min",
    "lr-decay-style": "lr-schedule lr-scheduler scheduler",
    "lr-decay-iters": "lr-decay lr-decay-steps decay-iters",
    "lr-warmup-iters": "warmup lr-warmup lr-warmup-steps warmup-iters warmup-steps",
    "weight-decay": "wd",
    "clip-grad": "grad-clip max-grad-norm clip gradient-clipping",
    "adam-beta1": "beta1",
    "adam-beta2": "beta2",
    "adam-eps": "eps epsilon",
    "num-layers": "layers n-layers n-layer nl",
    "hidden-size": "hidden dim d-model n-embd hs",
    "num-attention-heads": "heads n-heads n-head num-heads nh",
    "num-query-groups": "kv-heads num-kv-heads num-key-value-heads",
    "ffn-hidden-size": "ffn intermediate-size",
    "rotary-base": "rope-theta",
    "bf16": "dtype amp",
    "fp16": "dtype amp half",
    "fp8-format": "fp8 dtype",
    "fp8-recipe": "recipe",
    "load": "resume resume-from ckpt checkpoint",
    "save": "save-dir ckpt-dir checkpoint-dir",
    "save-interval": "save-every save-steps",
    "eval-interval": "eval-every eval-steps",
    "log-interval": "log-every logging-steps",
    "run-dir": "out out-dir output output-dir",
    "data-path": "data dataset data-dir",
    "recompute-granularity": "ac recompute activation-checkpointing gradient-checkpointing",
}


def _by_other_name() -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for name, others in _OTHER_NAMES.items():
        for other in others.split():
            table.setdefault(other, []).append(name)
    return table


ALSO_CALLED = _by_other_name()


@dataclass(frozen=True)
class Target:
    """The field that a name stands for."""

    section: str
    field: str
    annotation: Any
    negated: bool

    @property
    def is_bool(self) -> bool:
        """Whether the field is a switch."""
        return field_kind(self.annotation)[0] is bool


@cache
def targets() -> dict[str, Target]:
    """Return every name, with underscores, and its field."""
    table: dict[str, Target] = {}
    for section, model in SECTIONS.items():
        for field, info in model.model_fields.items():
            annotation = info.annotation
            table[field] = Target(section, field, annotation, negated=False)
            if field_kind(annotation)[0] is bool and not field.startswith("no_"):
                table[f"no_{field}"] = Target(section, field, annotation, negated=True)
    return table


def suggestion(name: str, known: list[str]) -> str:
    """Return `; did you mean ...?` for what a name usually stands for, else the nearest, if any.

    Args:
        name: as it was given, an option or a key.
        known: names that there are, spelled alike.
    """
    plain = {item.lstrip("-").replace("_", "-"): item for item in known}
    meant = ALSO_CALLED.get(name.lstrip("-").replace("_", "-").lower(), ())
    usual = [plain[word] for word in meant if word in plain]
    if usual:
        return f"; did you mean {', '.join(usual)}?"
    longer = [item for item in known if item.startswith(name)] if len(name) > 2 else []
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    nearest = list(dict.fromkeys(longer[:3] + close))[:4]
    return f"; did you mean {', '.join(nearest)}?" if nearest else ""


def to_user_keys(config: Sections) -> dict[str, dict[str, Any]]:
    """Return a configuration as nested YAML-ready values under the users' names."""
    result: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        values: dict[str, Any] = {}
        for field, value in getattr(config, section):
            if value is None:
                continue
            if field in NEGATIVE_FIRST:
                values[f"no_{field}"] = not value
            else:
                values[field] = list(value) if isinstance(value, tuple) else value
        result[section] = values
    return result
