"""The engines that the contract suite runs over; those that are not at hand are skipped, with the reason."""

from collections.abc import AsyncIterator, Iterator

import pytest

from kvrs.protocol.secrets import http_token
from kvrs.proxy.backends.cluster import new_engine_session, open_backends
from tests.backends.clusters import Cluster, VllmCluster, distserve, embedded
from tests.backends.talks import House


@pytest.fixture(scope="session", params=["embedded", "distserve", "vllm"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    match request.param:
        case "embedded":
            with embedded() as ours:
                yield ours
        case "distserve":
            with distserve() as servers:
                yield servers
        case _:
            yield VllmCluster(request.getfixturevalue("vllm_servers"))


@pytest.fixture
async def house(cluster: Cluster) -> AsyncIterator[House]:
    """The cluster as a proxy sees it, every instance up and met."""
    async with new_engine_session(cluster.config, http_token(cluster.secret)) as session:
        house = House(cluster, open_backends(cluster.config, session))
        await house.meet()
        yield house
