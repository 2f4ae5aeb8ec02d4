"""References that tests compare with: without them a test is skipped, or fails where CI is set."""

import importlib.util
import os
import platform

import pytest


def need(package: str) -> None:
    """Skip or fail unless a package of scripts/test.sh can be found; also at module level."""
    if importlib.util.find_spec(package) is None:
        absent(f"{package} is not installed; scripts/test.sh installs it")


def absent(reason: str) -> None:
    """Skip a test, or fail where CI is set: there a comparison that is left out is a fault."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (CI is set)", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture
def triton() -> None:
    """Triton, which there is for one kind of machine."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("triton is not made for this kind of machine")
    need("triton")


needs_triton = pytest.mark.usefixtures("triton")
