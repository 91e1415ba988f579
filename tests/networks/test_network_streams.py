"""Streams over a failing network: their tokens are those of an undisturbed run."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import pytest

from kvrs.ids import InstanceId
from kvrs.protocol.instance import SlotCounts
from kvrs_testkit.networks import Network
from tests.networks.cluster_on_hosts import (
    FRONTS,
    NODES,
    PAGES,
    PROXIES,
    Clients,
    ClusterOnHosts,
    Keyed,
)
from tests.networks.page_relay import UNDISTURBED, ChaosSettings, Relay

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("networks"),
    pytest.mark.nightly,
]

TOKENS, LONG_TOKENS = 200, 500
FEW_TOKENS = 40  # Behind pages that come at the begin of a stream.
LEASE_S = 3.0
STALL_S = 5.0
PROMPTS = [[random.Random(n).randrange(4, 512) for _ in range(100)] for n in range(6)]
# No decode instance has pages of these, so each of them is to be fetched.
UNSEEN = [[random.Random(f"{n} {at}").randrange(4, 512) for at in range(100)] for n in range(6)]


class NetworkCluster(NamedTuple):
    cluster: ClusterOnHosts
    pages: Relay  # Before the pages that prefill retains; undisturbed unless a test changes it.


@pytest.fixture(scope="module")
def system(possible: None, tiny_llama: str) -> Iterator[NetworkCluster]:
    # One recovery at a time into a target, always by fetching the pages that prefill retains.
    policy = {"name": "always_migrate", "slots_max": 1}
    with (
        Network(*NODES, *FRONTS.values()) as network,
        Relay(network, "n0", PAGES) as pages,
        ClusterOnHosts(
            network, tiny_llama, policy=policy, transfer={"lease_s": LEASE_S}
        ) as cluster,
    ):
        names = [*(name for name, _ in NODES.values()), *(f"agent-{node}" for node in NODES)]
        cluster.start(*names)
        cluster.wait_ready(*names)
        cluster.start_front(*PROXIES)
        yield NetworkCluster(cluster, pages)


@pytest.fixture
async def clients(system: NetworkCluster) -> AsyncIterator[Clients]:
    """All are up, before and after each test."""
    async with Clients(system.cluster) as opened:
        await opened.until_all_up(*PROXIES)
        yield opened
        system.pages.back = UNDISTURBED
        system.cluster.network.heal()
        await opened.until_all_up(*PROXIES)


_quiet: list[tuple[int, ...]] = []


async def quiet(clients: Clients, tokens: int = TOKENS) -> list[tuple[int, ...]]:
    """Each prompt's answer in an undisturbed run."""
    if not _quiet:
        _quiet.extend(await asyncio.gather(*clients.ask_all("proxy-0", PROMPTS, LONG_TOKENS)))
    return [answer[:tokens] for answer in _quiet]


async def test_streams_survive_a_link_that_is_cut(clients: Clients) -> None:
    """Between a proxy and a decode host all packets are dropped silently: no connection ends.
    When the link is back, the proxy fences its own attempts there, and none of the other
    proxy's.
    """
    wanted, network = await quiet(clients), clients.cluster.network
    other_wanted = (await quiet(clients, LONG_TOKENS))[4:]
    # One after the other, so that both have streams at each instance.
    await clients.until(lambda: _sees_load(clients, "proxy-1", 0))
    other = clients.ask_all("proxy-1", PROMPTS[4:], LONG_TOKENS)
    others = await clients.until_decoding("proxy-1", 2)
    asked = clients.ask_all("proxy-0", PROMPTS[:4], TOKENS)
    rows = await clients.until_decoding("proxy-0", 4)
    victims = {row["id"] for row in rows if row["decode"] == "d1"}

    network.sever(["f0"], ["n2"])
    await clients.until(lambda: _is(clients, "proxy-0", "d1", "down"))
    network.heal()
    await clients.until(lambda: _is(clients, "proxy-0", "d1", "up"))
    answers, other_answers = await asyncio.gather(*asked), await asyncio.gather(*other)
    recovered = {row["stream"] for row in (await clients.state("proxy-0"))["recoveries"]}

    assert (answers, other_answers) == (wanted[:4], other_wanted)
    assert (len(victims) > 0, recovered) == (True, victims)
    assert "d1" in {row["decode"] for row in others}
    assert [row["cause"] for row in (await clients.state("proxy-1"))["recoveries"]] == []


async def _sees_load(clients: Clients, proxy: str, streams: int) -> bool:
    """True if the proxy sees so many decoding streams of the other one."""
    rows = (await clients.state(proxy))["policy"]["instances"]
    return bool(sum(row["others_reported"] for row in rows if row["id"] != "p0") == streams)


async def _is(clients: Clients, proxy: str, name: str, health: str) -> bool:
    state = await clients.state(proxy)
    return any(
        (row["id"], row["health"]) == (name, health)
        for row in (*state["instances"], *state["agents"])
    )


async def test_stopped_processes_cost_no_stream(clients: Clients) -> None:
    """A proxy and an agent are stopped for 5 s: streams of the other proxy are not affected,
    and its own continue afterwards.
    """
    wanted = await quiet(clients)
    before = {name: len((await clients.state(name))["recoveries"]) for name in PROXIES}
    asked = clients.ask_all("proxy-0", PROMPTS[:3], TOKENS) + clients.ask_all(
        "proxy-1", PROMPTS[3:], TOKENS
    )
    for name in PROXIES:
        await clients.until_decoding(name, 3)

    for name in ("proxy-1", "agent-n2"):
        clients.cluster.signal(name, signal.SIGSTOP)
    await asyncio.sleep(STALL_S)
    for name in ("proxy-1", "agent-n2"):
        clients.cluster.signal(name, signal.SIGCONT)
    answers = await asyncio.gather(*asked)
    states = {name: await clients.state(name) for name in PROXIES}

    assert answers == wanted
    for name, state in states.items():
        assert len(state["recoveries"]) == before[name]
        assert {row["health"] for row in state["instances"]} == {"up"}
    assert "dead" not in {row["status"] for row in states["proxy-1"]["members"]}


async def test_damaged_pages_are_detected_and_change_no_token(
    system: NetworkCluster, clients: Clients
) -> None:
    """A third of the pieces that prefill sends has a wrong byte, or ends early: engines
    recompute them.
    """
    wanted = await quiet(clients, FEW_TOKENS)
    before = system.pages.seen.copy()

    system.pages.back = ChaosSettings(seed=5, damaged=0.3, cut=0.05)
    noticed = 0
    # The boundaries of pieces vary, and not every wrong byte is in a page.
    for _ in range(10):
        assert await asyncio.gather(*clients.ask_all("proxy-0", PROMPTS, FEW_TOKENS)) == wanted
        noticed = sum([(await clients.load(name)).damaged_pages for name in ("d0", "d1")])
        if noticed:
            break

    assert (system.pages.seen - before)["damaged"] > 0
    assert noticed > 0


async def _recoveries(clients: Clients, proxy: str, **wanted: str) -> Any:
    """Recoveries of a proxy with these values."""
    rows = (await clients.state(proxy))["recoveries"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


async def test_slots_of_a_proxy_whose_host_is_gone_go_to_the_other_one(
    system: NetworkCluster, clients: Clients
) -> None:
    """Its connections stay open. Its lease expires, the target fences its transfer, and the
    waiting attempt gets the slot.
    """
    cluster = system.cluster
    # One after the other, so that both have streams at each instance.
    await clients.until(lambda: _sees_load(clients, "proxy-1", 0))
    lost = clients.ask_all("proxy-0", UNSEEN[:3], LONG_TOKENS)
    victims = await _streams_at(clients, "proxy-0", "d0", of=3)
    await clients.until(lambda: _sees_load(clients, "proxy-1", 3))
    waiting = clients.ask_all("proxy-1", UNSEEN[3:], LONG_TOKENS)
    assert await _streams_at(clients, "proxy-1", "d0", of=3)
    expired = (await _slots(clients)).expired

    try:
        # The first proxy notices a death while the other one is stopped, and begins a slow
        # transfer.
        system.pages.back = ChaosSettings(seed=0, bytes_per_s=2000)
        cluster.signal("proxy-1", signal.SIGSTOP)
        cluster.signal("d0", signal.SIGSTOP)
        await clients.until(lambda: _holds_for(clients, victims))
        cluster.network.sever(["f0"], [*NODES, "f1"])
        cluster.kill("proxy-0")
        cluster.signal("proxy-1", signal.SIGCONT)
        await clients.until(lambda: _expired(clients, expired + 1))
        system.pages.back = UNDISTURBED
        answers = await asyncio.gather(*waiting)
        moved = await _recoveries(clients, "proxy-1", to="d1", outcome="resumed", **{"from": "d0"})
    finally:
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)
        for name in ("proxy-1", "d0"):
            cluster.signal(name, signal.SIGCONT)
        cluster.network.heal()
        cluster.kill("proxy-0")
        cluster.start_front("proxy-0")
    await clients.until_all_up(*PROXIES)
    wanted = await asyncio.gather(*clients.ask_all("proxy-0", UNSEEN[3:], LONG_TOKENS))

    assert answers == wanted
    assert moved
    assert "slot leases expired" in cluster.log("agent-n2")


async def _streams_at(clients: Clients, proxy: str, instance: str, of: int) -> set[str]:
    """The proxy's streams there, once so many of its streams have tokens."""
    rows = await clients.until_decoding(proxy, of)
    return {row["id"] for row in rows if row["decode"] == instance}


async def _slots(clients: Clients) -> SlotCounts:
    return (await clients.agent("n2")).slots.get(InstanceId("d1"), SlotCounts(0, 0, 0, 0, 0, 0))


async def _holds_for(clients: Clients, victims: set[str]) -> bool:
    """True if the slot is granted, and the first proxy recovers one of these streams."""
    running = await _recoveries(clients, "proxy-0", to="d1", outcome="running")
    return (await _slots(clients)).held == 1 and bool(victims & {row["stream"] for row in running})


async def _expired(clients: Clients, expired: int) -> bool:
    return (await _slots(clients)).expired >= expired


async def test_a_stream_continues_without_its_mirror_and_no_other_owner_is_guessed(
    clients: Clients,
) -> None:
    """Two proxies cannot reach each other: the owner serves the stream; the other one reports
    `mirror_unreachable`, and resumes it once the link is back.
    """
    wanted, network = await quiet(clients), clients.cluster.network
    network.sever(["f0"], ["f1"])
    await clients.until(lambda: _peer_is(clients, "down"))
    stream = Keyed(clients, PROMPTS[0], TOKENS)
    reading = asyncio.create_task(stream.read("proxy-0", events=10))
    await reading

    error = await stream.read("proxy-1")
    network.heal()
    await clients.until(lambda: _peer_is(clients, "up"))
    resumed = await stream.read("proxy-1")

    assert (error, resumed) == ("mirror_unreachable", None)
    assert tuple(stream.ids) == wanted[0]


async def test_a_stream_survives_the_link_to_its_mirror(clients: Clients) -> None:
    """It is running when the link is cut, and its client does not wait."""
    wanted, network = await quiet(clients), clients.cluster.network
    stream = Keyed(clients, PROMPTS[1], TOKENS)
    reading = asyncio.create_task(stream.read("proxy-0"))
    await clients.until_decoding("proxy-0", 1)

    network.sever(["f0"], ["f1"])
    await reading

    assert tuple(stream.ids) == wanted[1]


async def _peer_is(clients: Clients, health: str) -> bool:
    """True if each of the two proxies sees this health of the other."""
    rows = [row for name in PROXIES for row in (await clients.state(name))["proxies"]]
    return all(set(row["peers"].values()) == {health} for row in rows)
