"""A helper that is cut off from the instance that it helps, on hosts of their own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest

from kvrs.ids import InstanceId
from kvrs.protocol.instance import ReloadState, SpeculationReport
from kvrs_engine.engine.random_model import (
    random_tokenizer,
    random_weights,
    write_model,
    write_tiny_model,
)
from kvrs_testkit.blocked_load import blocked_load
from kvrs_testkit.networks import Network
from kvrs_testkit.noted_prefill import note_prefill
from tests.networks.cluster_on_hosts import FRONTS, NODES, PROXIES, Clients, ClusterOnHosts

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("networks"),
    pytest.mark.nightly,
]

D1 = InstanceId("d1")
PROMPTS = [[3 + at * step % 500 for at in range(40)] for step in (3, 5, 7)]
TOKENS = 300


@pytest.fixture(scope="module")
def cluster(possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterOnHosts]:
    models, tokenizer = tmp_path_factory.mktemp("models"), random_tokenizer(0)
    write_tiny_model(models / "model", seed=0)
    note_prefill(models / "model")  # Which each start of an instance would measure.
    write_model(models / "draft", tokenizer, random_weights(1, tokenizer, layers=1))
    speculation = {"source": "draft", "draft": str(models / "draft")}
    with (
        Network(*NODES, *FRONTS.values()) as network,
        ClusterOnHosts(network, str(models / "model"), speculation=speculation) as running,
    ):
        names = [*(name for name, _ in NODES.values()), *(f"agent-{node}" for node in NODES)]
        running.start(*names)
        running.wait_ready(*names)
        running.start_front(PROXIES[0])
        yield running


@pytest.fixture
async def clients(cluster: ClusterOnHosts) -> AsyncIterator[Clients]:
    async with Clients(cluster) as opened:
        await opened.until_all_up(PROXIES[0])
        yield opened
        cluster.network.heal()


@asynccontextmanager
async def restarting(clients: Clients, draft_too: bool) -> AsyncIterator[None]:
    """d1 is started again, and its model does not come until the end, nor does its draft."""
    cluster = clients.cluster
    draft = Path(cluster.config.speculation.draft or "")
    cluster.kill("d1")
    with blocked_load(cluster), blocked_load(cluster, draft) if draft_too else nullcontext():
        cluster.start("d1")
        yield
        cluster.kill("d1")
    cluster.start("d1")
    cluster.wait_ready("d1")
    await clients.until_all_up(PROXIES[0])


async def report(clients: Clients) -> SpeculationReport:
    found = (await clients.load("d0")).speculation
    assert found is not None
    return found


@pytest.mark.parametrize("draft_too", [True, False], ids=["while its draft loads", "as it helps"])
async def test_streams_go_on_where_a_helper_is_cut_off(clients: Clients, draft_too: bool) -> None:
    """All packets are dropped silently: no connection ends by itself."""
    calm = await asyncio.gather(*clients.ask_all(PROXIES[0], PROMPTS, TOKENS))
    network = clients.cluster.network

    async def is_known() -> bool:
        found = await report(clients)
        if not draft_too:
            return found.helper == D1
        return D1 in found.reloads and found.reloads[D1].state is ReloadState.LOADING_DRAFT

    async def is_forgotten() -> bool:
        found = await report(clients)
        return found.helper is None and not found.reloads

    async with restarting(clients, draft_too):
        await clients.until(is_known)
        asked = clients.ask_all(PROXIES[0], PROMPTS, TOKENS)
        await clients.until_decoding(PROXIES[0], len(PROMPTS))
        network.sever(["n1"], ["n2"])
        await clients.until(is_forgotten)
        assert await asyncio.gather(*asked) == calm
        assert await asyncio.gather(*clients.ask_all(PROXIES[0], PROMPTS, TOKENS)) == calm
        network.heal()
        await clients.until(is_known)
