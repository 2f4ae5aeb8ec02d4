"""Text from the command line or a YAML file to the type its field asks for.

One set of rules for both sources, decided by the field and not by the look of the text: `off` is
never a boolean, `12:30:00` never 45000, `1e-4` is a number although it has no dot, `010` is
refused instead of being read as 8 or 10.
"""

import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from megafp8.config.messages import shown
from megafp8.config.paths import FilePath, expand_path
from megafp8.errors import ConfigurationError

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_TRUE = ("true", "True", "TRUE")
_FALSE = ("false", "False", "FALSE")


@dataclass(frozen=True)
class RawText:
    """A value as it was typed.

    Attributes:
        text: the characters.
        where: place for error messages, such as `--lr` or `run.yaml line 3, optimizer.lr`.
        quoted: whether YAML quotes mark it as text and nothing else.
        switch: a flag given without a value.
    """

    text: str
    where: str
    quoted: bool = False
    switch: bool = False


RawValue = RawText | list[RawText]


def field_kind(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a field's plain type and its arguments, without `Annotated` and `None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return field_kind(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        kept = [item for item in get_args(annotation) if item is not type(None)]
        assert len(kept) == 1, f"a field of several types: {annotation}"
        return field_kind(kept[0])
    if origin is Literal:
        return Literal, get_args(annotation)
    return origin or annotation, get_args(annotation)


def convert(value: RawValue, annotation: Any) -> Any:
    """Return typed text as the value that a field of this annotation takes.

    Raises:
        ConfigurationError: Where it was given, what was found and what is allowed.
    """
    kind, arguments = field_kind(annotation)
    if kind is tuple:
        return _convert_tuple(value, arguments)
    if isinstance(value, list):
        if len(value) == 1:
            return _convert_one(value[0], kind, arguments)
        place = value[0].where if value else "list"
        raise ConfigurationError(f"{place}: found {len(value)} values, allowed one")
    return _convert_one(value, kind, arguments)


def parse_bool(raw: RawText) -> bool:
    """Read true or false; a switch without a value is true.

    Raises:
        ConfigurationError: Anything else, `off`, `no` and `0` included.
    """
    if raw.switch or (raw.text in _TRUE and not raw.quoted):
        return True
    if raw.text in _FALSE and not raw.quoted:
        return False
    raise _error(raw, "true or false")


def _convert_one(raw: RawText, kind: Any, arguments: tuple[Any, ...]) -> Any:
    if kind is bool:
        return parse_bool(raw)
    if raw.switch:
        raise ConfigurationError(
            f"{raw.where}: found no value, allowed {_described(kind, arguments)}"
        )
    if raw.text == "" and raw.where.startswith("--"):
        raise ConfigurationError(
            f"{raw.where}: found nothing (an empty shell variable?), allowed "
            f"{_described(kind, arguments)}; leave the flag out for its default"
        )
    if not raw.quoted and raw.text in ("null", "Null", "NULL", "~", ""):
        raise ConfigurationError(
            f"{raw.where}: found null, allowed {_described(kind, arguments)}; "
            "leave the key out for its default"
        )
    if kind is Literal:
        if raw.text not in arguments:
            raise _error(raw, ", ".join(map(str, arguments)))
        return raw.text
    converters: dict[Any, Callable[[RawText], Any]] = {
        int: _integer,
        float: _number,
        FilePath: _path,
    }
    return converters[kind](raw) if kind in converters else raw.text


def _convert_tuple(value: RawValue, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    items = [value] if isinstance(value, RawText) else list(value)
    if any(item.switch for item in items):
        raise ConfigurationError(f"{items[0].where}: found no value, allowed a list")
    if arguments[-1] is Ellipsis:
        kind = field_kind(arguments[0])
        return tuple(_convert_one(item, *kind) for item in items)
    if len(items) == 1 and "," in items[0].text:
        # Megatron writes --window-size 128,0 and also (128,0).
        one = items[0]
        parts = one.text.strip("()").split(",")
        items = [RawText(part.strip(), one.where, one.quoted) for part in parts]
    if len(items) != len(arguments):
        place = items[0].where if items else "list"
        raise ConfigurationError(f"{place}: found {len(items)} values, allowed {len(arguments)}")
    return tuple(
        _convert_one(item, *field_kind(argument))
        for item, argument in zip(items, arguments, strict=True)
    )


def _integer(raw: RawText) -> int:
    if raw.quoted or not _INTEGER.fullmatch(raw.text):
        raise _error(raw, "an integer in decimal digits, such as 10000 (not 1e4, 010 or 1_000)")
    return int(raw.text)


def _number(raw: RawText) -> float:
    digits = any(character.isdigit() for character in re.split("[eE]", raw.text)[0])
    if raw.quoted or not digits or not _NUMBER.fullmatch(raw.text):
        raise _error(raw, "a finite number such as 0.1 or 1e-4")
    value = float(raw.text)
    if not math.isfinite(value):
        raise _error(raw, "a finite number such as 0.1 or 1e-4")
    return value


def _path(raw: RawText) -> str:
    try:
        return expand_path(raw.text)
    except ValueError as error:
        raise _error(raw, str(error)) from None


def _described(kind: Any, arguments: tuple[Any, ...]) -> str:
    if kind is Literal:
        return ", ".join(map(str, arguments))
    names = {int: "an integer", float: "a number", bool: "true or false", FilePath: "a path"}
    return names.get(kind, "text")


def _error(raw: RawText, allowed: str) -> ConfigurationError:
    quotes = " in quotes, which make it text" if raw.quoted else ""
    return ConfigurationError(f"{raw.where}: found {shown(raw.text)}{quotes}, allowed {allowed}")
