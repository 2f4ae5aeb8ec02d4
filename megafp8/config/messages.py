"""One-line sentences for pydantic's findings: where, what, found, allowed."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megafp8.errors import ConfigurationError

_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "missing": "a value",
}


def flag_name(field: str) -> str:
    """Return the command line's spelling of a field."""
    return "--" + field.replace("_", "-")


def sentence(error: ValidationError, where: Mapping[tuple[str, str], str]) -> str:
    """Return one line for a validation error, with all that is wrong.

    Missing values are named together, and alone: what else is wrong is told first.

    Args:
        error: What pydantic found.
        where: Where each (section, field) was given; others are named `section.field`.
    """
    findings = error.errors(include_url=False)
    missing = [item for item in findings if item["type"] == "missing" and len(item["loc"]) == 2]
    if missing and len(missing) == len(findings):
        flags = ", ".join(flag_name(str(item["loc"][1])) for item in missing)
        verb = "is" if len(missing) == 1 else "are"
        return f"{flags} {verb} required and missing; give them here or in the file of --config"
    others = (_describe(item, where) for item in findings if item not in missing)
    return "; ".join(dict.fromkeys(others))


def _describe(item: Any, where: Mapping[tuple[str, str], str]) -> str:
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ConfigurationError):
        return str(cause)
    names = [str(part) for part in item["loc"]]
    place = where.get((names[0], names[1])) if len(names) > 1 else None
    place = place or ".".join(names[:2])
    if item["type"] == "extra_forbidden":
        return f"{place}: unknown name"
    return f"{place}: found {shown(item['input'])}, allowed {_allowed(item, cause)}"


def _allowed(item: Any, cause: Exception | None) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if cause is not None:
        return str(cause)
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "").replace(" or ", ", ")
    comparisons = {
        "greater_than_equal": (">=", "ge"),
        "greater_than": (">", "gt"),
        "less_than_equal": ("<=", "le"),
        "less_than": ("<", "lt"),
    }
    if kind in comparisons:
        sign, key = comparisons[kind]
        return f"{sign} {context[key]:g}"
    if kind in ("missing", "too_long") and len(item["loc"]) > 2:
        return "another number of values"
    return _TYPES.get(kind) or str(item["msg"])


def shown(value: Any) -> str:
    """Return a value as an error message shows it: one short line."""
    text = repr(value) if isinstance(value, str) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
