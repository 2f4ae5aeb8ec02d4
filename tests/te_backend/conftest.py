from collections.abc import Iterator

import pytest

from tests.support import te_cpu
from tests.support.oracles import absent
from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def te_ranks() -> Iterator[Ranks]:
    """Gloo ranks of their own: the double patches torch in each of them for good."""
    reason = te_cpu.missing()
    if reason is not None:
        absent(reason)
    pool = Ranks(size=4)
    yield pool
    pool.close()
