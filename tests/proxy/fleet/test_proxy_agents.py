"""How the proxy has checkpoints kept: which agents are named to engines, what is held there, and
what people are told.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs.config.file import parse_config
from kvrs.core.books.leases import Leases
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability, CheckpointTarget, LeaseUpdate
from kvrs.proxy.server import Proxy
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import GEOMETRY, SECRET, Fault, Scripted
from kvrs_testkit.scripted_agent import CAPACITY_BYTES, ScriptedAgent
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.proxy.conftest import ProxyClusterBuilder

PROMPT = list(range(40))
TOKENS = 8
REQUEST = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
REMOTE = {"mode": "remote"}
NEVER_S = 3600.0


def text(count: int = TOKENS) -> str:
    return "".join(map(text_of, expected_ids(PROMPT, count)))


async def held_open(
    system: ProxyCluster, count: int = 1
) -> tuple[list[asyncio.Task[tuple[int, bytes]]], list[Any]]:
    """Streams that wait after three tokens, and their rows of the state."""
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = [asyncio.create_task(system.complete(**REQUEST)) for _ in range(count)]
    await system.until_streams_hold(3, count=count)
    return asked, (await system.state())["streams"]


async def finish(system: ProxyCluster, asked: list[asyncio.Task[tuple[int, bytes]]]) -> None:
    assert system.script.gate is not None
    system.script.gate.set()
    for status, body in await asyncio.gather(*asked):
        assert status == 200
        assert msgspec.json.decode(body)["choices"][0]["text"] == text()


async def row_of(system: ProxyCluster, agent: str) -> Any:
    return next(row for row in (await system.state())["agents"] if row["id"] == agent)


async def stream_of(system: ProxyCluster) -> Any:
    (row,) = (await system.state())["streams"]
    return row


def checkpoints_at(instance: Scripted) -> list[list[CheckpointTarget]]:
    return [asked.kvrs.checkpoints for asked in instance.completions if asked.kvrs is not None]


async def test_without_backup_no_agent_is_asked_for(build: ProxyClusterBuilder) -> None:
    """The default costs nothing, and says so."""
    system = await build()
    asked, (row,) = await held_open(system)

    assert (await system.state())["agents"] == []
    assert (row["protected"], row["unprotected"]) == ({}, "backup.mode is off")
    assert "kvrs_streams_unprotected 0.0" in await system.metrics()
    assert [c for one in system.instances.values() for c in checkpoints_at(one)] == [[], []]
    await finish(system, asked)


async def test_agents_are_watched_as_instances_are(build: ProxyClusterBuilder) -> None:
    """Up, killed, back with another life: each is shown, with what the agent says of itself."""
    system = await build(backup=REMOTE)
    agent = system.agents["agent-n0"]
    agent.reserved_bytes = 4711
    await system.until(
        lambda: _shows(system, "agent-n0", reserved_bytes=4711, checkpoints=0, held_bytes=0)
    )
    up, pid = await row_of(system, "agent-n0"), agent.pid

    await agent.kill()
    await system.until_health(**{"agent-n0": "down", "agent-n1": "up", "d0": "up"})
    down, metrics = await row_of(system, "agent-n0"), await system.metrics()
    await agent.restart()
    await system.until_health(**{"agent-n0": "up"})

    assert (up["node"], up["epoch"], up["pid"], up["capacity_bytes"]) == (
        "n0",
        1,
        pid,
        CAPACITY_BYTES,
    )
    assert up["url"] == f"http://127.0.0.1:{agent.port}"
    assert down["reason"]
    assert 'kvrs_agent_up{agent="agent-n0"} 0.0' in metrics
    assert 'kvrs_agent_up{agent="agent-n1"} 1.0' in metrics
    assert 'kvrs_agent_reserved_bytes{agent="agent-n0"} 0.0' in metrics
    again = await row_of(system, "agent-n0")
    assert (again["epoch"], again["pid"]) == (2, agent.pid)
    assert 'kvrs_agent_reserved_bytes{agent="agent-n0"} 4711.0' in await system.metrics()


async def test_an_agent_that_is_not_the_configured_one_is_refused(
    build: ProxyClusterBuilder,
) -> None:
    """Ports get mixed up: what another node's agent holds would not survive as it is thought to."""
    system = await build(backup=REMOTE)
    agent = system.agents["agent-n1"]

    await agent.kill()
    agent.node = "n7"
    await agent.restart()

    await system.until_health(**{"agent-n1": "refused"})
    assert "node is 'n7'" in (await row_of(system, "agent-n1"))["reason"]


async def test_an_agent_without_a_port_is_named(build: ProxyClusterBuilder) -> None:
    """A proxy that is started alone needs all addresses; only where agents run those of agents."""
    cluster = {"nodes": [{"id": "n0", "instances": [{"id": "b0", "role": "both", "port": 1}]}]}
    proxy = Proxy(parse_config({"cluster": cluster, "backup": {"mode": "local"}}), SECRET)

    with pytest.raises(ConfigError, match="the agent of node 'n0' has no port"):
        await proxy.start()


async def test_both_calls_of_a_stream_name_its_agents(build: ProxyClusterBuilder) -> None:
    """Prefill sends the prompt's pages, decode its own, with room for all that the stream may come
    to.
    """
    system = await build(backup=REMOTE)

    asked, (row,) = await held_open(system)

    (prefill,), (decode,) = (
        checkpoints_at(system.instances[row[stage]]) for stage in ("prefill", "decode")
    )
    (other,) = {"agent-n0", "agent-n1"} - {f"agent-n{row['decode'][1]}"}
    assert [checkpoint.agent for checkpoint in prefill] == [other]
    assert prefill == decode
    pages = -(-(len(PROMPT) + TOKENS) // GEOMETRY.page_size_tokens)
    assert prefill[0].reserved_bytes == pages * GEOMETRY.page_bytes
    await finish(system, asked)


async def test_an_engine_that_sends_no_checkpoints_is_told_of_none(
    build: ProxyClusterBuilder,
) -> None:
    """A plain engine refuses what it does not know; the operator sees that its streams are not
    protected.
    """

    def prepare(instances: dict[str, Scripted]) -> None:
        for instance in instances.values():
            instance.capabilities = [
                each for each in Capability if each is not Capability.CHECKPOINT
            ]

    system = await build(backup=REMOTE, prepare=prepare)
    asked, (row,) = await held_open(system)

    assert [c for one in system.instances.values() for c in checkpoints_at(one)] == [[], []]
    assert row["protected"] in ({}, dict.fromkeys(row["protected"], 0))
    assert row["unprotected"]
    assert "kvrs_streams_unprotected 1.0" in await system.metrics()
    await finish(system, asked)


async def test_what_an_agent_holds_is_shown(build: ProxyClusterBuilder) -> None:
    """Pages are shown by agent as they grow, and how far engines are behind."""
    system = await build(backup=REMOTE)
    system.instances["d0"].checkpoint_lag_pages = 3
    system.instances["d0"].damaged_pages = 2
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)

    agent.pages[row["id"]] = 2
    await system.until(lambda: _protected(system, {agent.id: 2}))
    agent.pages[row["id"]] = 3
    agent.pages["of another proxy"] = 7
    await system.until(lambda: _protected(system, {agent.id: 3}))

    metrics = await system.metrics()
    assert "kvrs_streams_unprotected 0.0" in metrics
    assert 'kvrs_checkpoint_lag_pages{worker="d0"} 3.0' in metrics
    assert 'kvrs_damaged_pages_total{worker="d0"} 2.0' in metrics
    assert (await stream_of(system))["unprotected"] is None
    await finish(system, asked)


async def test_reservations_are_renewed_and_given_back_at_once(build: ProxyClusterBuilder) -> None:
    """In batches, as at instances; but room in an agent is scarce, so an end is told without
    waiting for a renewal.
    """
    system = await build(backup=REMOTE, transfer={"lease_s": 1.5})
    asked, rows = await held_open(system, count=4)
    streams = {row["id"] for row in rows}
    agents = system.agents.values()

    await system.until(lambda: _truth(set().union(*(agent.renewed for agent in agents)) == streams))
    await finish(system, asked)
    await system.until(
        lambda: _truth(set().union(*(agent.released for agent in agents)) == streams)
    )

    assert all(agent_of(system, row).renewed >= {row["id"]} for row in rows)
    for agent in agents:
        ended_first = [
            update for update in agent.lease_updates if update.release and not update.renew
        ]
        assert ended_first or not agent.released, "no renewal was waited for"
        assert len(agent.lease_updates) < 20


def test_who_is_back_before_its_release_was_told_is_not_released() -> None:
    """One plan drops an agent, the next returns to it: the release would end the new reservation
    and shut its writer out.
    """
    agent, stream = InstanceId("agent-n0"), StreamId("s")
    leases = Leases(30.0, lambda: None)
    leases.hold(agent, stream)
    leases.release(agent, stream)
    leases.hold(agent, stream)

    batches = leases.batches(renew=True)

    assert batches == {agent: LeaseUpdate(30.0, renew=[stream], release=[])}


async def test_a_release_waits_for_no_renewal(build: ProxyClusterBuilder) -> None:
    """With leases of an hour no renewal comes within a test, yet what has ended is given back."""
    system = await build(backup=REMOTE, transfer={"lease_s": NEVER_S})
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)

    await finish(system, asked)
    await system.until(lambda: _truth(agent.released == {row["id"]}))

    assert agent.renewed == set()


async def test_a_stream_that_found_no_room_is_unprotected(build: ProxyClusterBuilder) -> None:
    """The agent said so; nothing is renewed there, and the stream is no worse off else."""
    system = await build(backup=REMOTE, transfer={"lease_s": 0.3})
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)

    agent.denied = [row["id"], "of another proxy"]
    await system.until(lambda: _unprotected(system, f"{agent.id} has no room"))

    assert (await stream_of(system))["protected"] == {}
    assert "kvrs_streams_unprotected 1.0" in await system.metrics()
    seen = len(agent.lease_updates)
    await asyncio.sleep(0.25)
    assert not any(row["id"] in update.renew for update in agent.lease_updates[seen + 1 :])
    await finish(system, asked)


async def test_a_reservation_that_ran_out_is_no_protection(build: ProxyClusterBuilder) -> None:
    """The agent no longer knows the stream: it was held, and is not; until it is again."""
    system = await build(backup=REMOTE, transfer={"lease_s": 0.3})
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)
    agent.pages[row["id"]] = 2
    await system.until(lambda: _protected(system, {agent.id: 2}))

    agent.forgotten.add(row["id"])
    await system.until(
        lambda: _unprotected(system, f"{agent.id} has dropped the pages of the stream")
    )
    agent.forgotten.clear()
    agent.pages[row["id"]] = 1
    await system.until(lambda: _protected(system, {agent.id: 1}))

    await finish(system, asked)


async def test_a_stream_that_was_not_offered_yet_is_not_lost(build: ProxyClusterBuilder) -> None:
    """The engine makes the reservation with its first full page: until then the agent knows
    nothing, and nothing is amiss.
    """
    system = await build(backup=REMOTE, transfer={"lease_s": 0.3})
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)
    agent.forgotten.add(row["id"])

    await system.until(
        lambda: _truth(len([u for u in agent.lease_updates if row["id"] in u.renew]) >= 3)
    )

    shown = await stream_of(system)
    assert (shown["protected"], shown["unprotected"]) == ({agent.id: 0}, None)
    await finish(system, asked)


async def test_a_lost_agent_protects_nothing_until_it_is_back(build: ProxyClusterBuilder) -> None:
    """The stream goes on untouched; what the agent saved of its memory counts again when it says
    so.
    """
    system = await build(backup=REMOTE, transfer={"lease_s": 0.3})
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)
    agent.pages[row["id"]] = 2
    await system.until(lambda: _protected(system, {agent.id: 2}))

    await agent.kill()
    await system.until(lambda: _unprotected(system, f"{agent.id} is down"))
    agent.lease_updates.clear()
    await agent.restart()
    await system.until(lambda: _protected(system, {agent.id: 2}))
    await system.until(lambda: _truth(row["id"] in agent.renewed))

    assert (await system.state())["recoveries"] == []
    await finish(system, asked)


async def test_a_recovery_restores_from_the_agent(build: ProxyClusterBuilder) -> None:
    """Its pages are named as a source, in the order of the history, under the agent's epoch."""
    system = await build(backup=REMOTE, policy={"name": "always_restore"})
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)
    agent.pages[row["id"]] = 2
    await system.until(lambda: _protected(system, {agent.id: 2}))

    await system.instances[row["decode"]].kill()
    await system.until(lambda: _recovered(system))
    await finish(system, asked)

    (recovery,) = (await system.state())["recoveries"]
    assert recovery["option"] == "restore"
    resumed = system.instances[recovery["to"]].completions[-1]
    assert resumed.kvrs is not None
    assert [
        (source.id, source.first_page, source.generation) for source in resumed.kvrs.sources
    ] == [(agent.id, 0, 1)]
    # It is on the node that serves now, and would die with it.
    assert agent.id == f"agent-n{recovery['to'][1]}"
    assert agent.id not in [checkpoint.agent for checkpoint in resumed.kvrs.checkpoints]


async def test_what_a_recovery_restores_from_is_kept_until_it_has_resumed(
    build: ProxyClusterBuilder,
) -> None:
    """The recovery may fail and need it again; then the agent that the plan dropped is let go."""
    system = await build(
        backup=REMOTE, policy={"name": "always_restore"}, transfer={"lease_s": NEVER_S}
    )
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)
    agent.pages[row["id"]] = 2
    await system.until(lambda: _protected(system, {agent.id: 2}))

    await system.instances[row["decode"]].kill()
    await system.until(lambda: _recovered(system))
    await asyncio.sleep(0.2)
    released_before = set(agent.released)
    assert system.script.gate is not None
    system.script.gate_at = 4
    system.script.gate.set()
    system.script.gate = asyncio.Event()
    await system.until(lambda: _truth(row["id"] in agent.released))
    await finish(system, asked)

    assert released_before == set()


async def test_an_agent_that_has_nothing_of_a_living_stream_is_not_told_of_its_end(
    build: ProxyClusterBuilder,
) -> None:
    """It would fence every attempt, and a second recovery may have its place just there."""
    system = await build(backup=REMOTE, transfer={"lease_s": NEVER_S})
    asked, (row,) = await held_open(system)
    dropped = agent_of(system, row)

    await system.instances[row["decode"]].kill()
    await system.until(lambda: _recovered(system))
    await finish(system, asked)
    others = [agent for agent in system.agents.values() if agent is not dropped]
    await system.until(lambda: _truth(any(row["id"] in agent.released for agent in others)))

    assert row["id"] not in dropped.released


async def test_a_failed_attempt_on_a_live_instance_keeps_its_checkpoints(
    build: ProxyClusterBuilder,
) -> None:
    """The reservation belongs to the stream, not to an attempt."""
    system = await build(pairs=1, backup={"mode": "local"})
    system.script.faults = {1: Fault.RESET}
    asked, (row,) = await held_open(system)
    agent = agent_of(system, row)

    assert row["attempt"] == 2
    assert agent.released == set()
    assert {checkpoints[0].agent for checkpoints in checkpoints_at(system.instances["d0"])} == {
        "agent-n0"
    }
    await finish(system, asked)
    await system.until(lambda: _truth(agent.released == {row["id"]}))


def agent_of(system: ProxyCluster, row: Any) -> ScriptedAgent:
    """The agent that keeps checkpoints of a stream."""
    (name,) = row["protected"]
    return system.agents[name]


async def _shows(system: ProxyCluster, agent: str, **wanted: object) -> bool:
    row = await row_of(system, agent)
    return all(row[key] == value for key, value in wanted.items())


async def _protected(system: ProxyCluster, wanted: dict[str, int]) -> bool:
    row = await stream_of(system)
    return bool(row["protected"] == wanted and row["unprotected"] is None)


async def _unprotected(system: ProxyCluster, reason: str) -> bool:
    return bool((await stream_of(system))["unprotected"] == reason)


async def _recovered(system: ProxyCluster) -> bool:
    return bool((await system.state())["recoveries"])


async def _truth(value: bool) -> bool:
    return value
