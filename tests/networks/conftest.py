"""Networks of our own, where this machine lets us make them."""

import pytest

from tests.networks.network_house import missing


@pytest.fixture(scope="session")
def possible() -> None:
    """Whoever needs a network asks for this first."""
    if (why := missing()) is not None:
        pytest.skip(f"no network of our own: {why}")
