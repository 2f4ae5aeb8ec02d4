"""Which linears a run wants in FP8: the policy file, and first and last layers in BF16.

A policy file is YAML with two lists of globs over module names, in Megatron's spelling
(`decoder.layers.0.mlp.linear_fc1`) or Hugging Face's (`model.layers.0.mlp.gate_proj`):

    include: ["decoder.layers.*"]      # only these are FP8 (default: all linears)
    exclude: ["*.linear_fc2"]          # these are not; exclude wins over include

`*` also crosses dots. A glob that matches nothing is an error, and so is a list that names only a
part of a fused layer, such as q_proj without k_proj and v_proj.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megafp8.config.names import suggestion
from megafp8.config.shape import LinearName, linear_names
from megafp8.config.text import RawText
from megafp8.config.yaml_reader import read_yaml
from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.run_config import RunConfig

# Modules that are never FP8 in this version; an exclude may name them, an include may not.
HIGH_PRECISION_NAMES = (
    "embedding.word_embeddings",
    "output_layer",
    "model.embed_tokens",
    "lm_head",
)


@dataclass(frozen=True)
class Policy:
    """The globs of a policy file."""

    path: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


def read_policy(path: str) -> Policy:
    """Read a policy file.

    Raises:
        ConfigurationError: Unreadable, another key than include and exclude, or no list of globs.
    """
    lists: dict[str, tuple[str, ...]] = {}
    for key, value in read_yaml(path).items():
        if key not in ("include", "exclude"):
            hint = suggestion(key, ["include", "exclude"])
            raise ConfigurationError(f"{path}, {key}: unknown key, allowed include, exclude{hint}")
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, RawText) and item.text for item in items):
            raise ConfigurationError(f"{path}, {key}: allowed a list of globs, not empty")
        lists[key] = tuple(item.text for item in items if isinstance(item, RawText))
    if not lists:
        raise ConfigurationError(f"{path}: found no rule, allowed include and exclude")
    return Policy(path, lists.get("include", ()), lists.get("exclude", ()))


def high_precision_reasons(config: RunConfig) -> dict[str, str]:
    """Return the linears that the user keeps out of FP8, each with the reason.

    Raises:
        ConfigurationError: A glob of the policy file matches nothing or splits a fused layer.
    """
    model, precision = config.model, config.precision
    names = linear_names(model.num_layers, model.swiglu)
    reasons: dict[str, str] = {}
    if precision.precision_policy is not None:
        policy = read_policy(precision.precision_policy)
        included = _select(policy.path, "include", policy.include, names)
        excluded = _select(policy.path, "exclude", policy.exclude, names)
        for item in names:
            if item.name in excluded:
                reasons[item.name] = f"excluded by {excluded[item.name]!r} of the policy file"
            elif policy.include and item.name not in included:
                reasons[item.name] = "not included by the policy file"
    if precision.first_last_layers_bf16:
        first = range(precision.num_layers_at_start_in_bf16)
        last = range(model.num_layers - precision.num_layers_at_end_in_bf16, model.num_layers)
        for item in names:
            if item.layer in first:
                reasons[item.name] = "first layers stay in BF16 (--first-last-layers-bf16)"
            elif item.layer in last:
                reasons[item.name] = "last layers stay in BF16 (--first-last-layers-bf16)"
    return reasons


def _select(
    path: str, key: str, globs: Sequence[str], names: Sequence[LinearName]
) -> dict[str, str]:
    """Return the linears that the globs of one list name together, each with one such glob."""
    parts: dict[str, set[str]] = {}
    chosen: dict[str, str] = {}
    for glob in globs:
        found = False
        for item in names:
            matched = {hf for hf in item.hf_names if fnmatchcase(hf, glob)}
            if fnmatchcase(item.name, glob):
                matched = set(item.hf_names)
            if matched:
                found = True
                chosen.setdefault(item.name, glob)
                parts.setdefault(item.name, set()).update(matched)
        if not found:
            _refuse_unmatched(path, key, glob)
    for item in names:
        missing = [hf for hf in item.hf_names if hf not in parts.get(item.name, set())]
        if item.name in chosen and missing:
            raise ConfigurationError(
                f"{path}, {key}: glob {chosen[item.name]!r} splits {item.name}, which holds "
                f"{', '.join(hf.rpartition('.')[2] for hf in item.hf_names)} as one; name "
                f"{', '.join(missing)} too, or none of them"
            )
    return chosen


def _refuse_unmatched(path: str, key: str, glob: str) -> None:
    high = [name for name in HIGH_PRECISION_NAMES if fnmatchcase(name, glob)]
    if high and key == "exclude":
        return
    if high:
        raise ConfigurationError(
            f"{path}, {key}: glob {glob!r} names {high[0]}, which stays in high precision in this "
            "version"
        )
    raise ConfigurationError(
        f"{path}, {key}: glob {glob!r} matches no linear; names are such as "
        "decoder.layers.0.self_attention.linear_qkv, .linear_proj, .mlp.linear_fc1, .linear_fc2 "
        "or model.layers.0.self_attn.q_proj, .mlp.down_proj"
    )
