"""The engines that the contract suite runs over; those that are not at hand are skipped, with the
reason.
"""

from collections.abc import AsyncIterator, Iterator

import pytest

from kvrs.proxy.backends.cluster import new_engine_links, open_backends
from tests.backends.clusters import Cluster, VllmCluster, distserve, embedded
from tests.backends.conversations import BackendCluster


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param("distserve", marks=pytest.mark.distserve),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
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
async def system(cluster: Cluster) -> AsyncIterator[BackendCluster]:
    """The cluster as a proxy sees it, every instance up and met."""
    async with new_engine_links(cluster.config, cluster.secret) as links:
        system = BackendCluster(cluster, open_backends(cluster.config, links))
        await system.meet()
        yield system
