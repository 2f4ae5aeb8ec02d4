"""Fixtures that need processes. `tests/conftest.py` takes them in with

from tests.support.fixtures import ranks  # noqa: F401
"""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to four gloo ranks, forked when first used and kept for the session."""
    pool = Ranks(size=4)
    yield pool
    pool.close()
