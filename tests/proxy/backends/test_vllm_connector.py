"""vLLM servers with a kvrs connector in them: what it adds, and that its end is not theirs."""

from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import LoadReport, Role, assumed_instance
from kvrs.proxy.backends.vllm_connector import VllmConnector
from kvrs_testkit.scripted_connector import ScriptedConnector
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import LONG, TOKENS, Builder, Servers, Vllms
from tests.proxy.backends.connectors import (
    connector_of,
    cut_in_mid_stream,
    equip,
    last_of,
    row_of,
    until_capable,
)

pytestmark = pytest.mark.network

DIFFERS = "restores no checkpoints of others: other fingerprint"
BACKUP = {"mode": "remote"}
OF_VLLM = ["prefix_cache"]
OF_BOTH = [*OF_VLLM, "pull_pages", "split", "checkpoint", "fence"]


async def test_a_stream_that_is_cut_is_restored_from_an_agent(vllms: Builder) -> None:
    """The other server gets the history as its prompt, and its connector the name of the agent."""
    system = await vllms(equip, policy={"name": "always_restore"}, backup=BACKUP)

    ids = await cut_in_mid_stream(system, pages=2)

    params = last_of(system, "d1")
    assert ids == expected_ids(LONG, TOKENS)
    assert [(each.id, each.first_page, each.pages) for each in params.sources] == [
        ("agent-n1", 0, 2)
    ]
    assert params.slot_token > 0
    assert params.prompt_tokens == len(LONG)
    assert await system.causes() == [("restore", "d0", "d1")]

    async def is_counted() -> bool:
        (row,) = (await system.state())["recoveries"]
        return (row["loaded_tokens"], row["computed_tokens"]) == (2 * 16, len(LONG) + 3 - 2 * 16)

    await system.until(is_counted)
    again = system.servers["d1"].bodies[-1]
    assert again["prompt"] == LONG + ids[:3]
    assert [*again["kv_transfer_params"]] == ["kvrs"]
    assert system.shared.violations == []


async def test_prefill_and_decode_save_to_the_agent_of_the_plan(vllms: Builder) -> None:
    """The parameters of NIXL's hand-off stay as they are."""
    system = await vllms(equip, backup=BACKUP)

    assert await system.ids(LONG) == expected_ids(LONG, TOKENS)

    for name in ("p0", "d0"):
        assert [each.agent for each in last_of(system, name).checkpoints] == ["agent-n1"]
    assert system.servers["d0"].pulled == 1
    assert "remote_block_ids" in system.servers["d0"].bodies[-1]["kv_transfer_params"]


async def test_a_connector_that_is_not_reached_leaves_a_plain_vllm(vllms: Builder) -> None:
    """Its reason stands in the state; the server takes streams, without parameters of kvrs."""
    system = await vllms(equip, backup=BACKUP)
    await until_capable(system, "d0", OF_BOTH)

    await connector_of(system, "d0").kill()
    await until_capable(system, "d0", OF_VLLM)

    row = await row_of(system, "d0")
    assert row["health"] == "up"
    assert "connection" in row["connector"]["off_reason"]
    assert await system.ids(LONG) == expected_ids(LONG, TOKENS)
    assert "kvrs" not in system.servers["d0"].bodies[-1]["kv_transfer_params"]

    await connector_of(system, "d0").start()
    await until_capable(system, "d0", OF_BOTH)
    assert (await row_of(system, "d0"))["connector"]["off_reason"] is None
    assert not system.servers["d0"].calls.count("POST /kvrs/v1/fence")


async def test_a_connector_that_is_off_is_not_used(vllms: Builder) -> None:
    system = await vllms(equip, backup=BACKUP)

    connector_of(system, "d0").off_reason = "an unknown layout"
    await until_capable(system, "d0", OF_VLLM)

    assert (await row_of(system, "d0"))["connector"]["off_reason"] == "an unknown layout"


async def test_a_connector_with_another_geometry_is_not_used(vllms: Builder) -> None:
    def prepare(servers: Servers) -> None:
        equip(servers)
        kvrs = servers["d0"].kvrs
        assert kvrs is not None
        kvrs.geometry = kvrs.geometry.__class__(2, 4, 8, 4, 16)

    system = await vllms(prepare, backup=BACKUP)

    async def is_refused() -> bool:
        connector = (await row_of(system, "d0"))["connector"]
        return connector is not None and "dtype_bytes=4" in (connector["off_reason"] or "")

    await system.until(is_refused)
    await until_capable(system, "d0", OF_VLLM)


async def test_a_server_without_a_connector_is_used_beside_others(vllms: Builder) -> None:
    system = await vllms(lambda servers: equip(servers, "d0"), backup=BACKUP)

    assert await system.ids(LONG) == expected_ids(LONG, TOKENS)

    assert (await row_of(system, "d1"))["connector"] is None
    assert system.shared.violations == []


async def test_a_server_that_was_cut_off_is_fenced_by_its_connector(vllms: Builder) -> None:
    """The process ran on: it is used again in a higher epoch."""
    system = await vllms(equip, backup=BACKUP, proxy={"token_gap_s": 1.0})
    before = connector_of(system, "d0").epoch

    system.servers["d0"].freeze()
    await system.until_health(d0="down")
    system.servers["d0"].thaw()
    await system.until_health(d0="up")

    assert len(connector_of(system, "d0").fences) == 1
    assert (await row_of(system, "d0"))["epoch"] == before + 1


class LateConnector(ScriptedConnector):
    """It answers when the test starts it once more."""

    async def start(self) -> None:
        await super().start()
        await self.kill()


async def test_a_connector_that_first_answers_late_fences_as_well(vllms: Builder) -> None:
    """Its capabilities come to the server that was met before, which is no other process by it."""

    def prepare(servers: Servers) -> None:
        equip(servers)
        servers["d0"].kvrs = LateConnector("d0", servers["d0"].node)

    system = await vllms(prepare, backup=BACKUP, proxy={"token_gap_s": 1.0})
    await until_capable(system, "d0", OF_VLLM)
    before = (await row_of(system, "d0"))["epoch"]

    await ScriptedConnector.start(connector_of(system, "d0"))
    await until_capable(system, "d0", OF_BOTH)
    assert (await row_of(system, "d0"))["epoch"] == before

    system.servers["d0"].freeze()
    await system.until_health(d0="down")
    system.servers["d0"].thaw()
    await system.until_health(d0="up")
    assert len(connector_of(system, "d0").fences) == 1
    assert (await row_of(system, "d0"))["epoch"] == before + 1


async def test_a_restore_that_loads_nothing_says_why(vllms: Builder) -> None:
    def prepare(servers: Servers) -> None:
        equip(servers)
        kvrs = servers["d1"].kvrs
        assert kvrs is not None
        kvrs.loads = False

    system = await vllms(prepare, policy={"name": "always_restore"}, backup=BACKUP)

    assert await cut_in_mid_stream(system, pages=2) == expected_ids(LONG, TOKENS)

    async def is_told() -> bool:
        (row,) = (await system.state())["recoveries"]
        return (row["loaded_tokens"], row["fetch_fault"]) == (0, "nothing came")

    await system.until(is_told)


async def test_the_room_of_a_connector_is_known_as_its_server_is_met() -> None:
    """The first report comes after the first placements."""
    server = assumed_instance(
        InstanceId("d0"), NodeId("n0"), Role.DECODE, KvGeometry(2, 4, 8, 2, 9)
    )
    own = msgspec.structs.replace(server, fetch_pages_max=7)
    peer: Any = AsyncMock()
    peer.info.return_value, peer.load.return_value = own, LoadReport(1, 0, 0, 0, 0.0, [])

    joined = await VllmConnector(peer, b"key").join(server)

    assert (server.fetch_pages_max, joined.fetch_pages_max) == (None, 7)


@pytest.mark.parametrize("late", [False, True])
async def test_no_more_is_restored_than_a_connector_has_room_for(
    vllms: Builder, late: bool
) -> None:
    """The rest of the history is computed."""

    def prepare(servers: Servers) -> None:
        equip(servers)
        kind = LateConnector if late else ScriptedConnector
        kvrs = servers["d1"].kvrs = kind("d1", servers["d1"].node)
        kvrs.staging_pages = 1

    system = await vllms(prepare, policy={"name": "always_restore"}, backup=BACKUP)
    if late:
        await until_capable(system, "d1", OF_VLLM)
        await ScriptedConnector.start(connector_of(system, "d1"))
    await until_capable(system, "d1", OF_BOTH)

    assert await cut_in_mid_stream(system, pages=2) == expected_ids(LONG, TOKENS)

    (source,) = last_of(system, "d1").sources
    assert (source.first_page, source.pages) == (0, 1)
    assert (await row_of(system, "d1"))["connector"]["staging_pages"] == 1


async def test_decode_instances_alone_serve_and_restore(vllms: Builder) -> None:
    """Without NIXL in them: there is no hand-off."""

    def prepare(servers: Servers) -> None:
        equip(servers)
        del servers["p0"]
        for server in servers.values():
            server.connector = False

    system = await vllms(prepare, policy={"name": "always_restore"}, backup=BACKUP)

    # Nothing is missing: neither to /readyz, nor to the alert KvrsRoleDown.
    assert await ready(system) == "ready\n"
    assert 'kvrs_worker_streams{role="decode"' in (metrics := await system.metrics())
    assert 'role="prefill"' not in metrics
    assert await cut_in_mid_stream(system, pages=2) == expected_ids(LONG, TOKENS)
    assert await system.causes() == [("restore", "d0", "d1")]
    await system.servers["d1"].kill()
    await system.until_health(d1="down")
    assert await ready(system) == "no decode instance is up\n"


async def ready(system: Vllms) -> str:
    async with system.http.get(f"http://127.0.0.1:{system.proxy.port}/readyz") as response:
        return await response.text()


async def test_counts_of_connectors_are_metrics(vllms: Builder) -> None:
    """Workers have them that have a connector; gauges go with the worker."""
    system = await vllms(lambda servers: equip(servers, "d0", "d1"), backup=BACKUP)
    kvrs = connector_of(system, "d0")
    kvrs.pages_saved, kvrs.pages_loaded, kvrs.pages_damaged = 9, 5, 2

    async def has(*lines: str) -> bool:
        metrics = (await system.metrics()).splitlines()
        return all(f"kvrs_connector_{line}" in metrics for line in lines)

    at = '{worker="d0"}'
    await system.until(
        lambda: has(
            f"pages_saved_total{at} 9.0",
            f"pages_loaded_total{at} 5.0",
            f"pages_damaged_total{at} 2.0",
            f"pinned_blocks{at} 0.0",
            f"off{at} 0.0",
        )
    )
    assert 'kvrs_connector_off{worker="p0"}' not in await system.metrics()
    kvrs.off_reason = "no memory"
    await system.until(lambda: has(f"off{at} 1.0", f"pages_saved_total{at} 9.0"))

    await system.servers["d0"].kill()
    await system.until_health(d0="down")

    assert 'kvrs_connector_off{worker="d0"}' not in await system.metrics()
    assert await has(f"pages_saved_total{at} 9.0", 'off{worker="d1"} 0.0')


TESTED = {"self_test": True}


async def self_test_of(system: Vllms, name: str, *, restores: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_tested() -> bool:
        found.update((await row_of(system, name))["self_test"] or {})
        return found.get("restores") is restores

    await system.until(is_tested)
    return found


async def test_a_restore_that_loads_and_goes_on_rightly_is_seen(vllms: Builder) -> None:
    """Pages that another server has saved at an agent; what was kept there is given back."""
    system = await vllms(equip, backup=BACKUP, proxy=TESTED)

    for name in ("d0", "d1"):
        found = await self_test_of(system, name, restores=True)
        assert {"pull_pages", "split"} <= {*found["capabilities"]}
        tests = [each for each in connector_of(system, name).taken if each.sources]
        assert [source.pages for each in tests for source in each.sources] == [2]
    agents = system.agents.values()
    assert len({stream for each in agents for stream in each.released}) == 2
    assert (await row_of(system, "p0"))["self_test"]["restores"] is None


async def test_a_stream_that_is_saved_for_a_test_goes_on_until_its_pages_are_there(
    vllms: Builder,
) -> None:
    """An instance forgets pages of a stream that has ended."""

    def prepare(servers: Servers) -> None:
        equip(servers)
        servers["p0"].kvrs = None
        for name in ("d0", "d1"):
            kvrs = servers[name].kvrs
            assert kvrs is not None
            kvrs.saves_behind_tokens = 100

    system = await vllms(prepare, backup=BACKUP, proxy=TESTED)

    await self_test_of(system, "d0", restores=True)
    await self_test_of(system, "d1", restores=True)


@pytest.mark.parametrize("fault", ["nothing is loaded", "what is loaded is wrong"])
async def test_a_restore_that_fails_its_test_is_not_chosen(vllms: Builder, fault: str) -> None:
    """By the connector's own count, and by the tokens: counters of vLLM show neither. The reason is
    in the state, and streams are recovered otherwise.
    """

    def prepare(servers: Servers) -> None:
        equip(servers)
        kvrs = servers["d1"].kvrs
        assert kvrs is not None
        kvrs.loads_rightly = False
        kvrs.loads = fault != "nothing is loaded"

    system = await vllms(prepare, policy={"name": "always_restore"}, backup=BACKUP, proxy=TESTED)
    found = await self_test_of(system, "d1", restores=False)
    assert {"pull_pages", "split"}.isdisjoint(found["capabilities"])
    assert ("(nothing came)" if fault == "nothing is loaded" else "other tokens") in found["cause"]

    assert await cut_in_mid_stream(system, pages=2) == expected_ids(LONG, TOKENS)

    ((option, *names),) = await system.causes()
    assert option != "restore"
    assert names == ["d0", "d1"]


@pytest.mark.parametrize("last", ["connectors", "agents"])
async def test_what_comes_later_is_tested_then(vllms: Builder, last: str) -> None:
    def prepare(servers: Servers) -> None:
        equip(servers)
        for server in servers.values():
            assert server.kvrs is not None
            server.kvrs.off_reason = "not yet"

    system = await vllms(prepare, backup=BACKUP, proxy=TESTED)
    assert not any(connector_of(system, name).taken for name in system.servers)
    if last == "agents":
        for agent in system.agents.values():
            await agent.kill()
        await system.until_health(**dict.fromkeys(system.agents, "down"))

    for name in system.servers:
        connector_of(system, name).off_reason = None
        await until_capable(system, name, OF_BOTH)
    if last == "agents":
        assert (await row_of(system, "d1"))["self_test"]["restores"] is None
        await system.agents["agent-n0"].restart()

    await self_test_of(system, "d1", restores=True)


async def test_a_process_that_comes_after_one_that_failed_restores_nothing_before_its_test(
    vllms: Builder,
) -> None:
    def prepare(servers: Servers) -> None:
        equip(servers)
        kvrs = servers["d1"].kvrs
        assert kvrs is not None
        kvrs.loads = False

    system = await vllms(prepare, policy={"name": "always_restore"}, backup=BACKUP, proxy=TESTED)
    await self_test_of(system, "d1", restores=False)

    await system.servers["d1"].kill()
    await system.until_health(d1="down")
    await system.servers["d1"].restart()
    await system.until_health(d1="up")
    assert await cut_in_mid_stream(system, pages=2) == expected_ids(LONG, TOKENS)

    ((option, *_),) = await system.causes()
    assert option != "restore"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("fingerprint", ["weights", "other weights"])
async def test_checkpoints_are_restored_where_the_fingerprint_is_theirs(
    vllms: Builder, fingerprint: str, is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A server with another one, as by another dtype, is used; state and log name those that it
    differs from. A connector may be reached only after its server was met.
    """

    def prepare(servers: Servers) -> None:
        equip(servers)
        kvrs = servers["d1"].kvrs
        assert kvrs is not None
        kvrs.fingerprint = fingerprint

    system = await vllms(prepare, policy={"name": "always_restore"}, backup=BACKUP)
    if is_late:
        server, kvrs = system.servers["d1"], connector_of(system, "d1")
        await server.kill()
        await system.until_health(d1="down")
        server.kvrs = None
        await server.restart()
        await system.until_health(d1="up")
        caplog.clear()
        server.kvrs = kvrs
        await kvrs.start()
    await until_capable(system, "d1", OF_BOTH)
    rows = {name: await row_of(system, name) for name in ("d0", "d1", "p0")}

    assert await cut_in_mid_stream(system, pages=2) == expected_ids(LONG, TOKENS)

    is_other = fingerprint != "weights"
    assert {name: row["connector"]["differs_from"] for name, row in rows.items()} == {
        "d0": ["d1"] * is_other,
        "d1": ["p0", "d0"] * is_other,
        "p0": ["d1"] * is_other,
    }
    assert (DIFFERS in caplog.messages) is is_other
    ((option, *names),) = await system.causes()
    assert (option == "restore") is not is_other
    assert names == ["d0", "d1"]
