"""`--tp-comm-overlap`: TransformerEngine's user buffers run tensor-parallel traffic under GEMMs.

`--tp-comm-overlap-cfg FILE.yaml` tunes them, one mapping per GEMM, as Megatron's file does:

    qkv_fprop: {method: ring_exchange, num_sm: 1, set_sm_margin: false}
    proj_fprop: {method: pipeline, num_sm: 24, num_splits: 4, set_sm_margin: true}

A GEMM that is left out has TransformerEngine's default. What TransformerEngine would take without a
word and then do something else with, or fail on in the middle of a start, is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megafp8.config.names import suggestion
from megafp8.config.recipes import recipes_that
from megafp8.config.text import RawText, convert, parse_bool
from megafp8.config.yaml_reader import Tree, read_yaml
from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.sections import Sections

LAYERS = ("qkv", "proj", "fc1", "fc2")
_BULK_OR_SCATTER = ("bulk", "ring_exchange", "pipeline")
# GEMM -> overlap methods that it has (initialize_ub of TransformerEngine 2.20, module/base.py).
# A column-parallel dgrad gathers x for wgrad (bulk) or scatters its own result (the others).
METHODS: dict[str, tuple[str, ...]] = {
    "qkv_fprop": ("ring_exchange",),
    "qkv_dgrad": _BULK_OR_SCATTER,
    "qkv_wgrad": ("bulk",),
    "proj_fprop": ("pipeline", "ring_exchange"),
    "proj_dgrad": ("ring_exchange",),
    "proj_wgrad": ("external",),
    "fc1_fprop": ("ring_exchange",),
    "fc1_dgrad": _BULK_OR_SCATTER,
    "fc1_wgrad": ("bulk",),
    "fc2_fprop": ("pipeline", "ring_exchange"),
    "fc2_dgrad": ("ring_exchange",),
    "fc2_wgrad": ("external",),
}
KEYS: dict[str, type] = {
    "method": str,
    "is_reduce_scatter": bool,
    "num_sm": int,
    "cga_size": int,
    "set_sm_margin": bool,
    "num_splits": int,
    "aggregate": bool,
    "atomic_gemm": bool,
    "use_ce": bool,
    "fp8_buf": bool,
    "comm_priority": int,
    "gemm_priority": int,
    "pipeline_rs_overlap_first_gemm": bool,
}
_MAY_BE_NEGATIVE = ("comm_priority", "gemm_priority")

Settings = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class UserBufferOptions:
    """What the buffers are made from.

    Attributes:
        tokens: rows of a buffer, sequence length * micro batch.
        hidden_size: its columns.
        bootstrap_backend: of the collectives that set the buffers up.
        settings: by GEMM; empty for TransformerEngine's defaults.
        fp8: whether FP8 linears use them.
        high_precision: whether linears in BF16 use them.
    """

    tokens: int
    hidden_size: int
    bootstrap_backend: str
    settings: Settings = field(default_factory=dict)
    fp8: bool = False
    high_precision: bool = True

    def scatters_dgrad(self, layer: str) -> bool:
        """Whether the input gradient of `qkv` or `fc1` is scattered under its own GEMM."""
        return _scatters(self.settings, f"{layer}_dgrad")


def _scatters(settings: Settings, gemm: str) -> bool:
    return settings.get(gemm, {}).get("method", "bulk") != "bulk"


def read_user_buffers(path: str) -> Settings:
    """Read and check `--tp-comm-overlap-cfg`.

    Raises:
        ConfigurationError: One line for an unknown GEMM, key, method or value, or a contradiction.
    """
    settings = {gemm: _settings(path, gemm, tree) for gemm, tree in read_yaml(path).items()}
    for gemm, values in settings.items():
        scatter = gemm in ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad") or (
            gemm in ("qkv_dgrad", "fc1_dgrad") and _scatters(settings, gemm)
        )
        if values.get("is_reduce_scatter", scatter) != scatter:
            kind = "a reduce-scatter" if scatter else "an all-gather"
            raise ConfigurationError(
                f"{path}, {gemm}.is_reduce_scatter: found {not scatter}, it is {kind}"
            )
        if scatter and values.get("fp8_buf", False):
            raise ConfigurationError(
                f"{path}, {gemm}.fp8_buf: found true, allowed false: sums travel in BF16, since "
                "nothing keeps a scale for outputs"
            )
        wgrad = gemm.replace("dgrad", "wgrad")
        if gemm in ("qkv_dgrad", "fc1_dgrad") and scatter and wgrad in settings:
            raise ConfigurationError(
                f"{path}, {wgrad}: contradicts {gemm}.method {values['method']}, which leaves "
                f"{wgrad} nothing to overlap; drop one"
            )
    return settings


def _settings(path: str, gemm: str, tree: Tree) -> dict[str, Any]:
    if gemm not in METHODS:
        raise ConfigurationError(
            f"{path}, {gemm}: unknown GEMM, allowed {', '.join(METHODS)}"
            f"{suggestion(gemm, list(METHODS))}"
        )
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}, {gemm}: allowed a mapping such as {{num_sm: 8}}")
    values: dict[str, Any] = {}
    for key, raw in tree.items():
        if key not in KEYS:
            raise ConfigurationError(
                f"{path}, {gemm}.{key}: unknown key, allowed {', '.join(KEYS)}"
                f"{suggestion(key, list(KEYS))}"
            )
        if not isinstance(raw, RawText):
            raise ConfigurationError(f"{path}, {gemm}.{key}: allowed one value")
        values[key] = _value(gemm, key, raw)
    return values


def _value(gemm: str, key: str, raw: RawText) -> Any:
    if KEYS[key] is bool:  # Megatron's files have 0 and 1
        return raw.text == "1" if raw.text in ("0", "1") and not raw.quoted else parse_bool(raw)
    if KEYS[key] is int:
        number = convert(raw, int)
        if number < 1 and key not in _MAY_BE_NEGATIVE:
            raise ConfigurationError(f"{raw.where}: found {number}, allowed 1 or more")
        return number
    if raw.text not in METHODS[gemm]:
        raise ConfigurationError(
            f"{raw.where}: found {raw.text!r}, allowed for {gemm}: {', '.join(METHODS[gemm])}"
        )
    return raw.text


def user_buffer_problems(config: Sections) -> Iterator[str]:
    """Yield a sentence for each thing that keeps `--tp-comm-overlap` from working."""
    parallel, model, precision = config.parallel, config.model, config.precision
    if not parallel.tp_comm_overlap:
        if parallel.tp_comm_overlap_cfg is not None:
            yield "--tp-comm-overlap-cfg needs --tp-comm-overlap"
        return
    flag, tp = "--tp-comm-overlap", parallel.tensor_model_parallel_size
    if model.transformer_impl != "transformer_engine":
        yield (
            f"{flag} needs --transformer-impl transformer_engine, whose user buffers it uses; "
            f"found {model.transformer_impl}"
        )
    if tp == 1:
        yield f"{flag} needs --tensor-model-parallel-size > 1, found 1: there is no such traffic"
    if not parallel.sequence_parallel:
        yield f"{flag} needs --sequence-parallel: it overlaps gathers and scatters of tokens"
    if parallel.schedule == "zbv":
        yield (
            f"{flag} with --pipeline-schedule zbv: it runs weight gradients with the input "
            "gradients, zbv keeps them for later; allowed: 1f1b, interleaved, gpipe"
        )
    if parallel.distributed_backend == "gloo":
        yield f"{flag} needs GPUs and --distributed-backend nccl, found gloo"
    if not precision.bf16:
        yield f"{flag} needs --bf16: its buffers are BF16 and FP8"
    theirs = precision.recipe.transformer_engine if precision.fp8 else None
    rows = model.seq_length * config.training.micro_batch_size // tp
    if theirs is not None and not theirs.user_buffer_rows:
        gathered = recipes_that(
            lambda spec: spec.transformer_engine and spec.transformer_engine.user_buffer_rows
        )
        yield (
            f"{flag} with --fp8-recipe {precision.recipe.name}: TransformerEngine's user buffers "
            f"gather no blocks; allowed: {gathered}"
        )
    elif theirs is not None and rows % theirs.user_buffer_rows:
        yield (
            f"{flag} with --fp8-recipe {precision.recipe.name} needs seq_length * micro_batch_size "
            f"/ tensor parallel size to be a multiple of {theirs.user_buffer_rows}, found {rows}"
        )
    if parallel.tp_comm_overlap_cfg is not None:
        read_user_buffers(parallel.tp_comm_overlap_cfg)


def user_buffer_options(
    config: Sections, fp8_linears: int, other_linears: int
) -> UserBufferOptions | None:
    """Return what the buffers are made from, given the plan's linears; None without overlap."""
    parallel = config.parallel
    if not parallel.tp_comm_overlap:
        return None
    path = parallel.tp_comm_overlap_cfg
    return UserBufferOptions(
        tokens=config.model.seq_length
        * config.training.micro_batch_size
        // parallel.context_parallel_size,
        hidden_size=config.model.hidden_size,
        bootstrap_backend=parallel.tp_comm_bootstrap_backend,
        settings={} if path is None else read_user_buffers(path),
        fp8=fp8_linears > 0,
        high_precision=other_linears > 0,
    )
