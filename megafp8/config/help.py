"""The text of `--help`, made from the fields themselves."""

import textwrap
from typing import Any, Literal

from pydantic.fields import FieldInfo

from megafp8.config.cli import CONTROL_OPTIONS
from megafp8.config.messages import flag_name
from megafp8.config.names import NEGATIVE_FIRST, SECTIONS
from megafp8.config.paths import FilePath
from megafp8.config.text import field_kind

_WIDTH = 96
_COLUMN = 30

_INTRODUCTION = """\
usage: [torchrun --nproc-per-node N] pretrain_gpt.py [--config FILE.yaml] [--flag value ...]

Pretrains a GPT model in FP8, BF16, FP16 or FP32. Flags bear Megatron's names; a YAML file has the
same names with underscores under the sections below. Order: defaults < YAML < flags.
Names are written in full. A switch is --name, --no-name, --name true or --name false.
A ~ at the beginning of a path is a home folder; shell variables in it are refused.
"""


def help_text() -> str:
    """Return the whole help."""
    lines = [_INTRODUCTION, "control:"]
    for name, description in CONTROL_OPTIONS.items():
        value = {"--config": " FILE.yaml", "--world-size": " N"}.get(name, "")
        lines.append(_entry(name + value, description))
    for section, model in SECTIONS.items():
        lines.append(f"\n{section}:")
        for field, info in model.model_fields.items():
            lines.append(_entry(_usage(field, info), _description(field, info)))
    return "\n".join(lines) + "\n"


def _usage(field: str, info: FieldInfo) -> str:
    kind, arguments = field_kind(info.annotation)
    flag = flag_name(field)
    if kind is bool:
        return flag.replace("--", "--no-", 1) if field in NEGATIVE_FIRST else flag
    return f"{flag} {_metavar(kind, arguments)}"


def _metavar(kind: Any, arguments: tuple[Any, ...]) -> str:
    if kind is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if kind is tuple:
        return "PATH ..." if arguments[-1] is Ellipsis else " ".join("N" * len(arguments))
    return {int: "N", float: "X", FilePath: "PATH"}.get(kind, "TEXT")


def _description(field: str, info: FieldInfo) -> str:
    text = info.description or ""
    if field in NEGATIVE_FIRST:
        return f"switch off: {text}"
    if info.is_required():
        return f"{text} (required)"
    if info.default is None or info.default is False:
        return text
    if info.default is True:
        return f"{text} (default on)"
    return f"{text} (default {_shown(info.default)})"


def _shown(default: Any) -> Any:
    if not isinstance(default, float):
        return default
    return int(default) if default.is_integer() else f"{default:g}"


def _entry(usage: str, description: str) -> str:
    indent = " " * _COLUMN
    wrapped = textwrap.wrap(
        description, _WIDTH, initial_indent=indent, subsequent_indent=indent
    ) or [""]
    head = f"  {usage}"
    if len(head) < _COLUMN:
        return "\n".join([head + wrapped[0][len(head) :], *wrapped[1:]])
    return "\n".join([head, *wrapped])
