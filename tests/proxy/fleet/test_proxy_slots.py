"""How the proxy asks the agents of targets for slots, and what becomes of a stream that gets
none.
"""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvrs.core.books import at_agents as slots
from kvrs.core.books.at_agents import AgentSlots
from kvrs.core.books.waiting import SlotBook
from kvrs.core.fleet.known import Agents
from kvrs.core.model.member import Health
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Slot, SlotAnswer, SlotRequest, SlotUpdate
from kvrs.proxy.fleet import leases as sender
from kvrs.proxy.fleet.leases import SlotSender
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Scripted
from kvrs_testkit.scripted_agent import ScriptedAgent
from kvrs_testkit.scripted_model import expected_ids, text_of
from kvrs_testkit.slot_shell import NotingShell
from kvrs_testkit.virtual_time import run_virtually, virtual_loop
from tests.proxy.conftest import ProxyClusterBuilder

PROMPT = list(range(40))
TOKENS = 8
REQUEST = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}

Answers = list[asyncio.Task[tuple[int, bytes]]]


async def victims(
    build: ProxyClusterBuilder, count: int = 1, **sections: Any
) -> tuple[ProxyCluster, Answers]:
    """Streams that have three tokens on d0; d1 comes up after them, so that all must go there. Its
    agent is `agent-n1`.
    """
    system = await build(
        **{"backup": {"mode": "remote"}, "policy": {"name": "always_migrate"}} | sections
    )
    await system.instances["d1"].kill()
    await system.until_health(d1="down")
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = [asyncio.create_task(system.complete(**REQUEST)) for _ in range(count)]
    await system.until_streams_hold(3, count=count)
    await system.instances["d1"].restart()
    await system.until_health(d1="up")
    return system, asked


async def all_exact(system: ProxyCluster, asked: Answers) -> bool:
    assert system.script.gate is not None
    system.script.gate.set()
    wanted = "".join(map(text_of, expected_ids(PROMPT, TOKENS)))
    answers = await asyncio.gather(*asked)
    return all(
        status == 200 and msgspec.json.decode(body)["choices"][0]["text"] == wanted
        for status, body in answers
    )


async def _truth(value: bool) -> bool:
    return value


def asked_of(agent: ScriptedAgent) -> list[tuple[str, int]]:
    return [(each.target, each.attempt) for update in agent.slot_updates for each in update.acquire]


def released_at(agent: ScriptedAgent) -> list[tuple[str, int]]:
    return [(each.target, each.attempt) for update in agent.slot_updates for each in update.release]


def tokens_at(instance: Scripted) -> list[int]:
    return [
        asked.kvrs.slot_token
        for asked in instance.completions
        if asked.kvrs is not None and asked.kvrs.sources
    ]


async def test_who_recovers_by_fetching_has_a_slot_of_the_targets_agent(
    build: ProxyClusterBuilder,
) -> None:
    """Asked for before the decode call, which names it, and given back with the first token, while
    the stream goes on.
    """
    system, asked = await victims(build)
    agent, target = system.agents["agent-n1"], system.instances["d1"]
    healthy = [update for each in system.agents.values() for update in each.slot_updates]
    system.script.gate_at = 5

    await system.instances["d0"].kill()
    await system.until_streams_hold(5)
    await system.until(lambda: _truth(released_at(agent) == [("d1", 2)]))

    assert healthy == [], "a stream that does not recover asks for nothing"
    assert asked_of(agent) == [("d1", 2)]
    assert tokens_at(target) == [1002]
    assert await all_exact(system, asked)
    assert system.agents["agent-n0"].slot_updates == []
    assert 'kvrs_slots_total{outcome="granted"} 1.0' in await system.metrics()


async def test_the_victims_of_one_event_ask_in_one_message(build: ProxyClusterBuilder) -> None:
    """Their decisions are made together; so is the one call to the agent before they can go on."""
    system, asked = await victims(build, 12)
    agent = system.agents["agent-n1"]

    await system.instances["d0"].kill()

    assert await all_exact(system, asked)
    assert max(len(update.acquire) for update in agent.slot_updates) == 12
    assert sum(bool(update.acquire) for update in agent.slot_updates) == 1
    assert len({update.owner for update in agent.slot_updates}) == 1


async def test_who_is_denied_asks_again_and_loses_nothing(build: ProxyClusterBuilder) -> None:
    """The proxy asks as often as it takes; the instance hears only of the attempt with a slot."""
    system, asked = await victims(build, 3)
    agent, target = system.agents["agent-n1"], system.instances["d1"]
    agent.slots_free = 1

    await system.instances["d0"].kill()
    await system.until(lambda: _truth(len(asked_of(agent)) > 8))
    called = len(target.completions)
    agent.slots_free = 1 << 30

    assert called == 1
    assert await all_exact(system, asked)
    assert len(tokens_at(target)) == 3
    rows = (await system.state())["recoveries"]
    assert {row["outcome"] for row in rows} == {"denied", "resumed"}
    assert sum(row["outcome"] == "resumed" for row in rows) == 3


async def test_an_agent_that_does_not_answer_stops_no_stream(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs, which is not known yet: the proxy's own book is enough, it is counted, and what may
    be held is given back.
    """
    monkeypatch.setattr(sender, "ANSWER_TIMEOUT_S", 0.02)
    system, asked = await victims(build, 2)
    agent, target = system.agents["agent-n1"], system.instances["d1"]
    agent.deaf = True

    await system.instances["d0"].kill()
    assert await all_exact(system, asked)
    agent.deaf = False
    await system.until(lambda: _truth(len(released_at(agent)) == 2))

    assert tokens_at(target) == [0, 0]
    assert 'kvrs_slots_total{outcome="local"} 2.0' in await system.metrics()


async def test_without_an_arbiter_each_proxy_takes_its_part(
    build: ProxyClusterBuilder,
) -> None:
    """So that all of them together still begin no more transfers than a target has slots."""
    system, asked = await victims(
        build,
        8,
        proxy={"peers": [{"id": "proxy-1", "peer_port": 1}]},
        policy={"name": "always_migrate", "slots_max": 4},
    )
    target = system.instances["d1"]
    await system.agents["agent-n1"].kill()
    await system.until_health(**{"agent-n1": "down"})

    async def denied_often() -> bool:
        lines = [
            line
            for line in (await system.metrics()).splitlines()
            if line.startswith('kvrs_slots_total{outcome="denied"}')
        ]
        return any(float(line.rpartition(" ")[2]) > 3 for line in lines)

    await system.instances["d0"].kill()
    await system.until(denied_often)
    begun = len(tokens_at(target))

    assert begun == 2
    assert await all_exact(system, asked)


async def test_without_agents_nothing_is_asked_or_counted(build: ProxyClusterBuilder) -> None:
    """One proxy needs no arbiter."""
    system, asked = await victims(build, backup={"mode": "off"})

    await system.instances["d0"].kill()

    assert await all_exact(system, asked)
    assert tokens_at(system.instances["d1"]) == [0]
    assert await system.count("kvrs_slots_total") == 0


async def test_slots_are_renewed_while_the_transfer_runs(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many in one message; one that the agent has ended is not spoken of again."""
    monkeypatch.setattr(slots, "LEASE_S", 0.15)
    system, asked = await victims(build, 3)
    agent = system.agents["agent-n1"]

    await system.instances[
        "d0"
    ].kill()  # The gate is closed: no first token comes of the transfers.
    await system.until(lambda: _truth(any(len(update.renew) == 3 for update in agent.slot_updates)))
    lost = agent.slot_updates[0].acquire[0].stream
    agent.slots_lost = {lost}
    await system.until(lambda: _truth(any(len(update.renew) == 2 for update in agent.slot_updates)))

    assert {update.lease_s for update in agent.slot_updates} == {0.15}
    assert 'kvrs_slots_total{outcome="lost"} 1.0' in await system.metrics()
    assert await all_exact(system, asked)
    assert lost not in {each.stream for update in agent.slot_updates for each in update.release}


async def test_a_proxy_that_ends_gives_its_slots_back(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others need not wait for its lease to run out."""
    monkeypatch.setattr(sender, "_CLOSE_TIMEOUT_S", 60.0)
    system, asked = await victims(build, 2)
    agent = system.agents["agent-n1"]
    await system.instances["d0"].kill()
    await system.until(lambda: _truth(len(tokens_at(system.instances["d1"])) == 2))

    await system.proxy.close()

    assert sorted(released_at(agent)) == [("d1", 2), ("d1", 2)]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


ASKED = SlotRequest(InstanceId("d1"), StreamId("s"), 2)


class PostingShell(NotingShell):
    """Sends what it is told to send."""

    slots: AgentSlots
    sender: SlotSender

    def post_slots(self, agent: InstanceId) -> None:
        self.sender.post_soon(agent)


def sender_to(agent: Any, book: SlotBook) -> PostingShell:
    """The shell of a proxy whose only agent, on the node of d1, is up."""
    book.acquire(ASKED.target, ASKED.stream, 0.0, 1.0)
    name = InstanceId("agent-n1")
    agents = Agents({name: NodeId("n1")})
    agents.known[name].health = Health.UP
    nodes = SimpleNamespace(known={"d1": SimpleNamespace(node="n1")})
    shell = PostingShell()
    slots = AgentSlots("me", book, agents, cast("Any", nodes), 30.0, 32, shell)
    shell.slots, shell.sender = slots, SlotSender(slots, {name: agent})
    return shell


async def test_the_last_words_of_a_proxy_are_waited_for() -> None:
    """Its connections are closed next."""
    told: list[SlotUpdate] = []

    class Agent:
        async def slots(self, update: SlotUpdate) -> SlotAnswer:
            await asyncio.sleep(0.01)
            told.append(update)
            return SlotAnswer([Slot(1) for _ in update.acquire])

    asking = sender_to(Agent(), book := SlotBook(1))
    await asking.sender.acquire(ASKED)

    book.release(ASKED.stream)
    asking.slots.release()
    await asking.sender.close()

    assert told[-1].release == told[0].acquire == [ASKED]


def test_an_agent_that_hangs_is_waited_for_a_quarter_of_a_second() -> None:
    """Then the proxy's own book is asked: a recovery does not wait longer."""

    class Agent:
        async def slots(self, update: SlotUpdate) -> SlotAnswer:
            await asyncio.Event().wait()
            raise AssertionError(update)

    async def acquire() -> tuple[int, float]:
        asking = sender_to(Agent(), SlotBook(1))
        token = await asking.sender.acquire(ASKED)
        waited_s = virtual_loop().time()
        await asking.sender.close()
        return token, waited_s

    assert run_virtually(acquire()) == (0, 0.25)


async def test_a_proxy_ends_though_an_agent_hangs(build: ProxyClusterBuilder) -> None:
    """It says its last word, waits a moment, and leaves nothing running."""
    system, asked = await victims(build)
    system.agents["agent-n1"].deaf = True
    await system.instances["d0"].kill()
    await system.until(lambda: _truth(len(tokens_at(system.instances["d1"])) == 1))

    await system.proxy.close()

    assert not [task for task in asyncio.all_tasks() if "SlotSender." in repr(task)]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_what_agents_say_of_slots_is_shown(build: ProxyClusterBuilder) -> None:
    """With the slots of all proxies."""
    system = await build(backup={"mode": "remote"})

    rows = (await system.state())["agents"]

    assert [row["slots"] for row in rows] == [{}, {}]


async def test_a_sender_without_slots_is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first request for a slot on renewals are looked for, until it is given back."""
    looks: list[float] = []

    def noted(_: AgentSlots, now_s: float) -> dict[InstanceId, SlotUpdate]:
        looks.append(now_s)
        return {}

    monkeypatch.setattr(AgentSlots, "renewals", noted)

    class Agent:
        async def slots(self, update: SlotUpdate) -> SlotAnswer:
            return SlotAnswer([Slot(1) for _ in update.acquire])

    asking = sender_to(Agent(), book := SlotBook(1))
    sending = asyncio.create_task(asking.sender.run())
    await asyncio.sleep(0.3)
    assert looks == []

    await asking.sender.acquire(ASKED)
    while not looks:
        await asyncio.sleep(0.01)
    book.release(ASKED.stream)
    asking.slots.release()
    await asyncio.sleep(0.3)
    count = len(looks)
    await asyncio.sleep(0.3)

    assert len(looks) == count
    sending.cancel()
    await asking.sender.close()
