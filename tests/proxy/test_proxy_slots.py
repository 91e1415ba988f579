"""How the proxy asks the agents of targets for slots, and what becomes of a stream that gets none."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Slot, SlotAnswer, SlotAsked, SlotUpdate
from kvrs.proxy import slots
from kvrs.proxy.agents import KnownAgent
from kvrs.proxy.instances import Health
from kvrs.proxy.slots import Slots
from tests.proxy.conftest import HouseBuilder
from tests.proxy.house import House
from tests.proxy.scripted import Scripted
from tests.proxy.scripted_agent import ScriptedAgent
from tests.proxy.scripted_model import expected_ids, text_of

PROMPT = list(range(40))
TOKENS = 8
ASKED = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}

Answers = list[asyncio.Task[tuple[int, bytes]]]


async def victims(build: HouseBuilder, count: int = 1, **sections: Any) -> tuple[House, Answers]:
    """Streams that have three tokens on d0; d1 comes up after them, so that all must go there. Its agent is `agent-n1`."""
    house = await build(**{"backup": {"mode": "remote"}, "policy": {"name": "always_migrate"}} | sections)
    await house.instances["d1"].kill()
    await house.until_health(d1="down")
    house.script.gate, house.script.gate_at = asyncio.Event(), 3
    asked = [asyncio.create_task(house.complete(**ASKED)) for _ in range(count)]
    await house.until_streams_hold(3, count=count)
    await house.instances["d1"].restart()
    await house.until_health(d1="up")
    return house, asked


async def all_exact(house: House, asked: Answers) -> bool:
    assert house.script.gate is not None
    house.script.gate.set()
    wanted = "".join(map(text_of, expected_ids(PROMPT, TOKENS)))
    answers = await asyncio.gather(*asked)
    return all(status == 200 and msgspec.json.decode(body)["choices"][0]["text"] == wanted for status, body in answers)


async def _truth(value: bool) -> bool:
    return value


def asked_of(agent: ScriptedAgent) -> list[tuple[str, int]]:
    return [(each.target, each.attempt) for update in agent.slot_updates for each in update.acquire]


def released_at(agent: ScriptedAgent) -> list[tuple[str, int]]:
    return [(each.target, each.attempt) for update in agent.slot_updates for each in update.release]


def tokens_at(instance: Scripted) -> list[int]:
    return [asked.kvrs.slot_token for asked in instance.completions if asked.kvrs is not None and asked.kvrs.sources]


async def test_who_recovers_by_fetching_has_a_slot_of_the_targets_agent(build: HouseBuilder) -> None:
    """Asked for before the decode call, which names it, and given back with the first token, while the stream goes on."""
    house, asked = await victims(build)
    agent, target = house.agents["agent-n1"], house.instances["d1"]
    healthy = [update for each in house.agents.values() for update in each.slot_updates]
    house.script.gate_at = 5

    await house.instances["d0"].kill()
    await house.until_streams_hold(5)
    await house.until(lambda: _truth(released_at(agent) == [("d1", 2)]))

    assert healthy == [], "a stream that does not recover asks for nothing"
    assert asked_of(agent) == [("d1", 2)]
    assert tokens_at(target) == [1002]
    assert await all_exact(house, asked)
    assert house.agents["agent-n0"].slot_updates == []
    assert 'kvrs_slots_total{outcome="granted"} 1.0' in await house.metrics()


async def test_the_victims_of_one_event_ask_in_one_message(build: HouseBuilder) -> None:
    """Their decisions are made together; so is the one call to the agent before they can go on."""
    house, asked = await victims(build, 12)
    agent = house.agents["agent-n1"]

    await house.instances["d0"].kill()

    assert await all_exact(house, asked)
    assert max(len(update.acquire) for update in agent.slot_updates) == 12
    assert sum(bool(update.acquire) for update in agent.slot_updates) == 1
    assert len({update.owner for update in agent.slot_updates}) == 1


async def test_who_is_denied_asks_again_and_loses_nothing(build: HouseBuilder) -> None:
    """As often as it takes; the instance hears only of the attempt that has a slot."""
    house, asked = await victims(build, 3)
    agent, target = house.agents["agent-n1"], house.instances["d1"]
    agent.slots_free = 1

    await house.instances["d0"].kill()
    await house.until(lambda: _truth(len(asked_of(agent)) > 8))
    called = len(target.completions)
    agent.slots_free = 1 << 30

    assert called == 1
    assert await all_exact(house, asked)
    assert len(tokens_at(target)) == 3
    rows = (await house.state())["recoveries"]
    assert {row["outcome"] for row in rows} == {"denied", "resumed"}
    assert sum(row["outcome"] == "resumed" for row in rows) == 3


async def test_an_agent_that_does_not_answer_stops_nobody(build: HouseBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs, and nobody knows yet: the proxy's own book is enough, it is counted, and what may be held is given back."""
    monkeypatch.setattr(slots, "_PATIENCE_S", 0.02)
    house, asked = await victims(build, 2)
    agent, target = house.agents["agent-n1"], house.instances["d1"]
    agent.deaf = True

    await house.instances["d0"].kill()
    assert await all_exact(house, asked)
    agent.deaf = False
    await house.until(lambda: _truth(len(released_at(agent)) == 2))

    assert tokens_at(target) == [0, 0]
    assert 'kvrs_slots_total{outcome="unarbitrated"} 2.0' in await house.metrics()


async def test_an_agent_that_is_down_is_not_asked(build: HouseBuilder) -> None:
    """Nobody waits for who is known to be gone."""
    house, asked = await victims(build)
    agent = house.agents["agent-n1"]
    await agent.kill()
    await house.until_health(**{"agent-n1": "down"})

    await house.instances["d0"].kill()

    assert await all_exact(house, asked)
    assert agent.slot_updates == []
    assert 'kvrs_slots_total{outcome="unarbitrated"} 1.0' in await house.metrics()


async def test_while_nobody_arbitrates_each_proxy_takes_its_part(build: HouseBuilder) -> None:
    """So that all of them together still begin no more transfers than a target has slots."""
    house, asked = await victims(
        build,
        8,
        proxy={"peers": [{"id": "proxy-1", "peer_port": 1}]},
        policy={"name": "always_migrate", "slots_max": 4},
    )
    target = house.instances["d1"]
    await house.agents["agent-n1"].kill()
    await house.until_health(**{"agent-n1": "down"})

    async def denied_often() -> bool:
        lines = [line for line in (await house.metrics()).splitlines() if line.startswith('kvrs_slots_total{outcome="denied"}')]
        return any(float(line.rpartition(" ")[2]) > 3 for line in lines)

    await house.instances["d0"].kill()
    await house.until(denied_often)
    begun = len(tokens_at(target))

    assert begun == 2
    assert await all_exact(house, asked)


async def test_without_agents_nothing_is_asked_or_counted(build: HouseBuilder) -> None:
    """One proxy needs nobody who arbitrates."""
    house, asked = await victims(build, backup={"mode": "off"})

    await house.instances["d0"].kill()

    assert await all_exact(house, asked)
    assert tokens_at(house.instances["d1"]) == [0]
    assert "kvrs_slots_total{" not in await house.metrics()


async def test_slots_are_renewed_while_the_transfer_runs(build: HouseBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many in one message; one that the agent has ended is not spoken of again."""
    monkeypatch.setattr(slots, "LEASE_S", 0.15)
    house, asked = await victims(build, 3)
    agent = house.agents["agent-n1"]

    await house.instances["d0"].kill()  # The gate is closed: no first token comes of the transfers.
    await house.until(lambda: _truth(any(len(update.renew) == 3 for update in agent.slot_updates)))
    lost = agent.slot_updates[0].acquire[0].stream
    agent.slots_lost = {lost}
    await house.until(lambda: _truth(any(len(update.renew) == 2 for update in agent.slot_updates)))

    assert {update.lease_s for update in agent.slot_updates} == {0.15}
    assert 'kvrs_slots_total{outcome="lost"} 1.0' in await house.metrics()
    assert await all_exact(house, asked)
    assert lost not in {each.stream for update in agent.slot_updates for each in update.release}


async def test_an_agent_that_is_back_hears_at_once_of_what_is_held(build: HouseBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed and remembers nothing; until it has heard of them, it would give the same slots to others."""
    monkeypatch.setattr(slots, "LEASE_S", 3600.0)
    house, asked = await victims(build, 3, transfer={"lease_s": 3600.0})
    agent = house.agents["agent-n1"]
    await house.instances["d0"].kill()  # The gate is closed: no first token comes of the transfers.
    await house.until(lambda: _truth(len(tokens_at(house.instances["d1"])) == 3))
    before = [update for update in agent.slot_updates if update.renew]

    await agent.kill()
    await house.until_health(**{"agent-n1": "down"})
    await agent.restart()
    await house.until(lambda: _truth(any(len(update.renew) == 3 for update in agent.slot_updates)))

    assert before == []
    assert await all_exact(house, asked)


async def test_a_transfer_that_breaks_gives_its_slot_back(build: HouseBuilder) -> None:
    """Whatever ends it: here its target dies."""
    house, asked = await victims(build, pairs=3)
    agent = house.agents["agent-n1"]
    await house.instances["d2"].kill()
    await house.until_health(d2="down")
    await house.instances["d0"].kill()
    await house.until(lambda: _truth(len(tokens_at(house.instances["d1"])) == 1))

    await house.instances["d2"].restart()
    await house.until_health(d2="up")
    await house.instances["d1"].kill()
    await house.until(lambda: _truth(len(released_at(agent)) == 1))

    assert released_at(agent) == asked_of(agent) == [("d1", 2)]
    assert await all_exact(house, asked)
    assert [target for target, _ in asked_of(house.agents["agent-n2"])] == ["d2"]


async def test_a_proxy_that_ends_gives_its_slots_back(build: HouseBuilder) -> None:
    """Others need not wait for its lease to run out."""
    house, asked = await victims(build, 2)
    agent = house.agents["agent-n1"]
    await house.instances["d0"].kill()
    await house.until(lambda: _truth(len(tokens_at(house.instances["d1"])) == 2))

    await house.proxy.close()

    assert sorted(released_at(agent)) == [("d1", 2), ("d1", 2)]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_the_last_words_of_a_proxy_are_waited_for() -> None:
    """Its connections are closed next."""
    told: list[SlotUpdate] = []

    class Agent:
        async def slots(self, update: SlotUpdate) -> SlotAnswer:
            await asyncio.sleep(0.01)
            told.append(update)
            return SlotAnswer([Slot(1) for _ in update.acquire])

    known = KnownAgent(InstanceId("agent-n1"), NodeId("n1"), cast("Any", Agent()), Health.UP)
    agents, nodes = SimpleNamespace(known={known.id: known}), SimpleNamespace(known={"d1": SimpleNamespace(node="n1")})
    asking = Slots("me", cast("Any", agents), cast("Any", nodes), 30.0, 32, lambda _: None)
    await asking.acquire(InstanceId("d1"), StreamId("s"), 0, 2)

    asking.release(StreamId("s"), 0, 2)
    await asking.close()

    assert told[-1].release == told[0].acquire == [SlotAsked(InstanceId("d1"), StreamId("s"), 2)]


async def test_a_proxy_ends_though_an_agent_hangs(build: HouseBuilder) -> None:
    """It says its last word, waits a moment, and leaves nothing running."""
    house, asked = await victims(build)
    house.agents["agent-n1"].deaf = True
    await house.instances["d0"].kill()
    await house.until(lambda: _truth(len(tokens_at(house.instances["d1"])) == 1))

    await house.proxy.close()

    assert not [task for task in asyncio.all_tasks() if "Slots." in repr(task)]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_what_agents_say_of_slots_is_shown(build: HouseBuilder) -> None:
    """With the slots of all proxies."""
    house = await build(backup={"mode": "remote"})

    rows = (await house.state())["agents"]

    assert [row["slots"] for row in rows] == [{}, {}]
