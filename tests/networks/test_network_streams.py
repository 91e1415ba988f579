"""Streams over a network that fails: their tokens are those of a run in which nothing happens."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import pytest

from kvrs.ids import InstanceId
from kvrs.protocol.instance import SlotCounts
from tests.networks.cluster_on_hosts import AGENT, FRONTS, GOSSIP, NODES, PAGES, PROXIES, Clients, ClusterOnHosts, Keyed
from tests.networks.network_house import Network
from tests.networks.weather_relay import FAIR, Relay, Weather

TOKENS, LONG_TOKENS = 200, 500
LEASE_S = 3.0
STALL_S = 5.0
PROMPTS = [[random.Random(n).randrange(4, 512) for _ in range(100)] for n in range(6)]


class House(NamedTuple):
    cluster: ClusterOnHosts
    pages: Relay  # Before what prefill retains. In fair weather, unless a test says otherwise.


@pytest.fixture(scope="module")
def house(possible: None) -> Iterator[House]:
    # One recovery at a time into a target, and always by fetching what prefill retains.
    policy = {"name": "always_migrate", "slots_max": 1}
    with (
        Network(*NODES, *FRONTS.values()) as network,
        Relay(network, "n0", "tcp", PAGES) as pages,
        ClusterOnHosts(network, policy=policy, transfer={"lease_s": LEASE_S}) as cluster,
    ):
        names = [*(name for name, _ in NODES.values()), *(f"agent-{node}" for node in NODES)]
        cluster.start(*names)
        cluster.wait_ready(*names)
        cluster.start_front(*PROXIES)
        yield House(cluster, pages)


@pytest.fixture
async def clients(house: House) -> AsyncIterator[Clients]:
    """All is well, before and after."""
    async with Clients(house.cluster) as opened:
        await opened.until_all_up(*PROXIES)
        yield opened
        house.pages.back = FAIR
        house.cluster.network.heal()
        await opened.until_all_up(*PROXIES)


_quiet: list[tuple[int, ...]] = []


async def quiet(clients: Clients, tokens: int = TOKENS) -> list[tuple[int, ...]]:
    """What each prompt's answer is when nothing happens."""
    if not _quiet:
        _quiet.extend(await asyncio.gather(*clients.ask_all("proxy-0", PROMPTS, LONG_TOKENS)))
    return [answer[:tokens] for answer in _quiet]


async def test_streams_survive_a_link_that_is_cut(clients: Clients) -> None:
    """Between a proxy and a decode host nothing passes any more, and nobody is told: no connection ends. When the link is back,
    the proxy ends there what was its own, and nothing of the other proxy's.
    """
    wanted, network = await quiet(clients), clients.cluster.network
    other_wanted = (await quiet(clients, LONG_TOKENS))[4:]
    asked = clients.ask_all("proxy-0", PROMPTS[:4], TOKENS)
    other = clients.ask_all("proxy-1", PROMPTS[4:], LONG_TOKENS)
    rows = await clients.until_decoding("proxy-0", 4)
    others = await clients.until_decoding("proxy-1", 2)
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


async def _is(clients: Clients, proxy: str, name: str, health: str) -> bool:
    state = await clients.state(proxy)
    return any((row["id"], row["health"]) == (name, health) for row in (*state["instances"], *state["agents"]))


async def test_nobody_is_lost_on_one_word(clients: Clients) -> None:
    """A proxy that cannot reach an agent of which all others hear; and one that hears no gossip at all, and holds everybody dead:
    both have the reports of the instances themselves, so no stream is touched.
    """
    wanted, network = await quiet(clients, LONG_TOKENS), clients.cluster.network
    before = {name: len((await clients.state(name))["recoveries"]) for name in PROXIES}
    asked = clients.ask_all("proxy-0", PROMPTS[:3], LONG_TOKENS) + clients.ask_all("proxy-1", PROMPTS[3:], LONG_TOKENS)
    for name in PROXIES:
        await clients.until_decoding(name, 3)

    network.block("f0", "n1", f"tcp dport {AGENT}")
    for host in (*NODES, "f0"):
        network.block(host, "f1", f"meta l4proto {{ tcp, udp }} th dport {GOSSIP}")
        network.block(host, "f1", f"meta l4proto {{ tcp, udp }} th sport {GOSSIP}")
    await clients.until(lambda: _is(clients, "proxy-0", "agent-n1", "down"))
    await clients.until(lambda: _holds_dead(clients, "proxy-1", {*NODES, "proxy-0"}))
    states = {name: await clients.state(name) for name in PROXIES}
    answers = await asyncio.gather(*asked)

    assert answers == wanted
    assert {row["id"]: row["status"] for row in states["proxy-0"]["members"]}["n1"] == "alive"
    for name, state in states.items():
        assert {row["health"] for row in state["instances"]} == {"up"}
        assert len((await clients.state(name))["recoveries"]) == before[name]


async def _holds_dead(clients: Clients, proxy: str, wanted: set[str]) -> bool:
    members = (await clients.state(proxy))["members"]
    return {row["id"] for row in members if row["status"] == "dead"} == wanted


async def test_processes_that_slept_cost_no_stream(clients: Clients) -> None:
    """A proxy and an agent are stopped for 5 s: the other proxy's streams notice nothing, and the own ones go on after it."""
    wanted = await quiet(clients)
    before = {name: len((await clients.state(name))["recoveries"]) for name in PROXIES}
    asked = clients.ask_all("proxy-0", PROMPTS[:3], TOKENS) + clients.ask_all("proxy-1", PROMPTS[3:], TOKENS)
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


async def test_damaged_pages_are_noticed_and_change_no_token(house: House, clients: Clients) -> None:
    """A third of what prefill sends has a wrong byte, or ends early: engines compute what they cannot believe."""
    wanted = await quiet(clients)
    before = house.pages.seen.copy()

    house.pages.back = Weather(seed=5, damaged=0.3, cut=0.05)
    noticed = 0
    for _ in range(10):  # Where a packet begins is chance, and not every wrong byte is one of a page.
        assert await asyncio.gather(*clients.ask_all("proxy-0", PROMPTS, TOKENS)) == wanted
        noticed = sum([(await clients.load(name)).damaged_pages for name in ("d0", "d1")])
        if noticed:
            break

    assert (house.pages.seen - before)["damaged"] > 0
    assert noticed > 0


async def _row(clients: Clients, proxy: str, **wanted: str) -> Any:
    """The recoveries of a proxy that are so."""
    rows = (await clients.state(proxy))["recoveries"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


async def test_slots_of_a_proxy_whose_host_is_gone_go_to_the_other_one(house: House, clients: Clients) -> None:
    """Nobody closes its connections. Its lease runs out, the target ends its transfer, and whoever waits gets the slot."""
    wanted, cluster = await quiet(clients), house.cluster
    lost = clients.ask_all("proxy-0", PROMPTS[:3], TOKENS)
    waiting = clients.ask_all("proxy-1", PROMPTS[3:], TOKENS)
    for name in PROXIES:
        assert any(row["decode"] == "d0" for row in await clients.until_decoding(name, 3))
    expired = (await _slots(clients)).expired

    # The first proxy notices a death that the other one sleeps through, and begins a transfer that takes its time.
    house.pages.back = Weather(seed=0, bytes_per_s=2000)
    cluster.signal("proxy-1", signal.SIGSTOP)
    cluster.signal("d0", signal.SIGSTOP)
    await clients.until(lambda: _holds(clients, 1))
    cluster.network.sever(["f0"], [*NODES, "f1"])
    cluster.kill("proxy-0")
    cluster.signal("proxy-1", signal.SIGCONT)
    await clients.until(lambda: _expired(clients, expired + 1))
    house.pages.back = FAIR
    answers = await asyncio.gather(*waiting)
    moved = await _row(clients, "proxy-1", to="d1", outcome="resumed", **{"from": "d0"})
    for task in lost:
        task.cancel()
    await asyncio.gather(*lost, return_exceptions=True)
    cluster.signal("d0", signal.SIGCONT)
    cluster.network.heal()
    cluster.start_front("proxy-0")

    assert answers == wanted[3:]
    assert moved
    assert "slots ended by themselves" in cluster.log("agent-n2")


async def _slots(clients: Clients) -> SlotCounts:
    return (await clients.agent("n2")).slots.get(InstanceId("d1"), SlotCounts(0, 0, 0, 0, 0, 0))


async def _holds(clients: Clients, held: int) -> bool:
    return (await _slots(clients)).held == held


async def _expired(clients: Clients, expired: int) -> bool:
    return (await _slots(clients)).expired >= expired


async def test_a_stream_goes_on_without_its_mirror_and_nobody_guesses_who_has_it(clients: Clients) -> None:
    """Two proxies that cannot reach each other: the one that has the stream serves it; the other one, which cannot ask, says so,
    and continues it as soon as it can.
    """
    wanted, network = await quiet(clients), clients.cluster.network
    network.sever(["f0"], ["f1"])
    await clients.until(lambda: _peer_is(clients, "down"))
    stream = Keyed(clients, PROMPTS[0], TOKENS)
    reading = asyncio.create_task(stream.read("proxy-0", events=10))
    await reading

    refused = await stream.read("proxy-1")
    network.heal()
    await clients.until(lambda: _peer_is(clients, "up"))
    resumed = await stream.read("proxy-1")

    assert (refused, resumed) == ("mirror_unreachable", None)
    assert tuple(stream.ids) == wanted[0]


async def test_a_stream_outlives_the_link_to_its_mirror(clients: Clients) -> None:
    """It is open when the link is cut, and its client is kept waiting by nothing."""
    wanted, network = await quiet(clients), clients.cluster.network
    stream = Keyed(clients, PROMPTS[1], TOKENS)
    reading = asyncio.create_task(stream.read("proxy-0"))
    await clients.until_decoding("proxy-0", 1)

    network.sever(["f0"], ["f1"])
    await reading

    assert tuple(stream.ids) == wanted[1]


async def _peer_is(clients: Clients, health: str) -> bool:
    """For each of the two proxies the other one."""
    rows = [row for name in PROXIES for row in (await clients.state(name))["proxies"]]
    return all(set(row["peers"].values()) == {health} for row in rows)
