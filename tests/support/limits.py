"""How long tests wait for what should have come long before, and what is not run by default."""

import pytest

PATIENCE_S = 300.0  # a machine with other work may be ten times slower; only a hang gets here


def slow(*values: object) -> object:
    """A case of `parametrize` that only `-m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
