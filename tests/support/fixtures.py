"""Fixtures of several folders. `tests/conftest.py` takes them in with

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


@pytest.fixture(params=["bf16", "fp32"])
def each_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU with BF16 units, and one without: how it multiplies BF16."""
    # Imported here: tests of `config` check that torch is not.
    from megafp8.numerics import products

    chosen = products.Bf16Products(request.param, "for this test")
    monkeypatch.setattr(products, "cpu_products", lambda: chosen)
    return request.param
