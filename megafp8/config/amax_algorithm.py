"""The grammar of `--fp8-amax-compute-algo`, for flags and what computes it; needs no pydantic."""

import math


def parse_amax_algorithm(text: str) -> tuple[str, float]:
    """Split the name of an algorithm into its kind and its parameter (0 where it has none).

    Raises:
        ValueError: With what is allowed, for anything else.
    """
    kind, _, argument = text.partition(":")
    if text in ("max", "most_recent"):
        return text, 0.0
    try:
        value = float(argument)
    except ValueError:
        value = math.nan  # in none of the ranges below
    whole = argument.isdecimal() and argument.isascii()
    if (
        (kind == "quantile" and 0 <= value <= 1)
        or (kind == "trimmed_max" and whole and value < 2**31)
        or (kind == "ema" and 0 <= value < 1)
    ):
        return kind, value
    raise ValueError(
        "max, most_recent, quantile:Q with 0 <= Q <= 1, trimmed_max:K with an integer K >= 0 "
        "and below 2**31, or ema:B with 0 <= B < 1"
    )
