"""Networks of namespaces, on machines that support them."""

import pytest

from kvrs_testkit.networks import missing


@pytest.fixture(scope="session")
def possible() -> None:
    """Skip the test where no network can be made."""
    if (reason := missing()) is not None:
        pytest.skip(f"no network of namespaces: {reason}")
