"""vLLM servers whose rows in host memory the agent of their node serves."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import LONG, PROMPT, TOKENS, Builder, Servers, Vllms
from tests.proxy.backends.connectors import equip

pytestmark = pytest.mark.network

SPACE, OTHER = "0123456789abcdef", "fedcba9876543210"
LOCAL = {"mode": "local"}


def with_tiers(servers: Servers) -> None:
    for server in servers.values():
        server.has_tier = True


def decoding_alone(servers: Servers) -> None:
    """Both on one node, without NIXL."""
    with_tiers(servers)
    del servers["p0"]
    for server in servers.values():
        server.connector = False


def region(engine: str, namespace: str = SPACE, *, is_alive: bool = True) -> dict[str, Any]:
    return {
        "engine": engine,
        "namespace": namespace,
        "is_alive": is_alive,
        "rows": 1000,
        "row_bytes": 65536,
    }


async def serve(system: Vllms, **regions: list[dict[str, Any]]) -> None:
    """The agents of these nodes report these regions, and the proxy has heard it."""
    for node, found in regions.items():
        system.agents[f"agent-{node}"].regions = found

    async def is_heard() -> bool:
        rows = {row["id"]: row["regions"] for row in (await system.state())["agents"]}
        return all(rows[f"agent-{node}"] == found for node, found in regions.items())

    await system.until(is_heard)


async def cut_in_mid_stream(
    system: Vllms, holds: Callable[[], Awaitable[bool]] | None = None
) -> list[int]:
    """The decode instance of a stream is killed after three tokens. `holds` is to become true
    before the sixth.
    """
    system.shared.prompt_tokens, system.shared.gate_at = len(LONG), 3
    first, second = asyncio.Event(), asyncio.Event()
    system.shared.gate = first
    asked = asyncio.create_task(system.ids(LONG))
    await system.until_streams_hold(3)
    await system.servers["d0"].kill()
    system.shared.gate, system.shared.gate_at = second, 5
    first.set()
    if holds is not None:
        await system.until(holds)
    second.set()
    return await asked


def params_of(system: Vllms, name: str, at: int = -1) -> Any:
    return system.servers[name].bodies[at].get("kv_transfer_params")


async def test_a_cut_stream_is_restored_from_the_agent_of_the_dead_servers_node(
    vllms: Builder,
) -> None:
    """Its first call has rows of it kept; the one that resumes it names the agent, by its id."""
    system = await vllms(decoding_alone, backup=LOCAL)
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    assert await cut_in_mid_stream(system) == expected_ids(LONG, TOKENS)

    assert params_of(system, "d0") == {"kvrs": {"agents": []}}
    assert params_of(system, "d1") == {"kvrs": {"agents": ["agent-n0"]}}
    assert await system.causes() == [("restore", "d0", "d1")]
    assert system.shared.violations == []


@pytest.mark.parametrize("loaded_tokens", [32, 0])
async def test_what_was_loaded_is_learned_from_the_servers_counters(
    vllms: Builder, loaded_tokens: int
) -> None:
    """The record has it, the link's rate is measured, and what another tier reads is not counted.
    Where nothing was found the server has computed all of it.
    """

    def prepare(servers: Servers) -> None:
        decoding_alone(servers)
        servers["d1"].row_bytes = 256.0 * loaded_tokens

    system = await vllms(prepare, backup=LOCAL)
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    async def is_counted() -> bool:
        wanted = loaded_tokens, len(LONG) + 3 - loaded_tokens
        rows = (await system.state())["recoveries"]
        return wanted in [(row["loaded_tokens"], row["computed_tokens"]) for row in rows]

    await cut_in_mid_stream(system, is_counted)

    links = {(row["source"], row["target"]): row for row in (await system.state())["links"]}
    assert links["n0", "n1"]["measured"] is (loaded_tokens > 0)
    count = await system.count("kvrs_worker_kv_bytes_total", worker="d1", kind="recovery")
    assert count == 256 * loaded_tokens


async def test_an_agents_rows_protect_streams(vllms: Builder) -> None:
    """Also one that is shorter than a block."""
    system = await vllms(decoding_alone, backup=LOCAL)
    await serve(system, n0=[region("d0")], n1=[region("d1")])
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 3

    asked = asyncio.create_task(system.ids(PROMPT))
    await system.until_streams_hold(3)
    (row,) = (await system.state())["streams"]
    system.shared.gate.set()
    await asked

    assert (row["protected"], row["unprotected"]) == ({"agent-n0": 0}, None)
    assert await system.count("kvrs_agent_regions", agent="agent-n0", engine="alive") == 1
    assert await system.count("kvrs_agent_regions", agent="agent-n0", engine="dead") == 0


async def test_decode_servers_whose_rows_no_agent_serves_are_counted(vllms: Builder) -> None:
    """A prefill server computes prompts alone."""
    system = await vllms(with_tiers, backup=LOCAL)
    await serve(system, n0=[region("d0")])

    metric = "kvrs_worker_unprotected"
    found = [await system.count(metric, worker=each) for each in ("p0", "d0", "d1")]

    assert found == [0, 0, 1]


async def test_parameters_of_a_hand_off_stay(vllms: Builder) -> None:
    """Both instances keep rows, and decode pulls the prompt by NIXL."""
    system = await vllms(with_tiers, backup=LOCAL)
    await serve(system, n0=[region("p0"), region("d0")])

    assert await system.ids(LONG) == expected_ids(LONG, TOKENS)

    asked, pulled = params_of(system, "p0"), params_of(system, "d0")
    assert (asked["do_remote_decode"], asked["kvrs"]) == (True, {"agents": []})
    assert (pulled["do_remote_prefill"], pulled["kvrs"]) == (True, {"agents": []})
    assert system.servers["d0"].pulled == 1


async def test_a_port_of_the_connector_in_the_file_does_not_matter(vllms: Builder) -> None:
    """Nothing answers there: the servers have been started with the tier in its place."""

    def prepare(servers: Servers) -> None:
        decoding_alone(servers)
        equip(servers)
        for server in servers.values():
            assert server.kvrs is not None
            server.kvrs.off_reason = "not started"

    system = await vllms(prepare, backup=LOCAL)
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    assert await cut_in_mid_stream(system) == expected_ids(LONG, TOKENS)

    assert params_of(system, "d1") == {"kvrs": {"agents": ["agent-n0"]}}


@pytest.mark.parametrize("backup", [LOCAL, {"mode": "off"}])
async def test_servers_whose_rows_no_agent_serves_get_no_parameters(
    vllms: Builder, backup: dict[str, Any]
) -> None:
    """Nor do those that are not to be protected."""
    system = await vllms(decoding_alone, wait=backup is LOCAL, backup=backup)
    await system.until_health(d0="up", d1="up")
    if backup is LOCAL:
        await serve(system, n0=[region("d1"), region("p0")], n1=[])

    assert await cut_in_mid_stream(system) == expected_ids(LONG, TOKENS)

    assert (params_of(system, "d0"), params_of(system, "d1")) == (None, None)
    assert await system.causes() == [("recompute", "d0", "d1")]


async def test_nothing_is_kept_of_requests_that_kvrs_does_not_recover(vllms: Builder) -> None:
    """Those of its self-tests, and those that are passed on as they are."""

    def prepare(servers: Servers) -> None:
        decoding_alone(servers)
        for server in servers.values():
            server.passed = ("/v1/embeddings",)

    system = await vllms(prepare, backup=LOCAL, proxy={"self_test": True})
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    async def is_tested() -> bool:
        return all(row["self_test"]["done"] for row in (await system.state())["instances"])

    await system.until(is_tested)
    async with system.http.post(f"{system.url}/v1/embeddings", json={"input": "a"}) as answer:
        assert answer.status == 200

    bodies = [body for name in ("d0", "d1") for body in system.servers[name].bodies]
    assert bodies
    assert [body["kv_transfer_params"] for body in bodies if "kv_transfer_params" in body] == []


async def test_rows_of_other_weights_are_not_loaded(vllms: Builder) -> None:
    system = await vllms(decoding_alone, backup=LOCAL)
    await serve(system, n0=[region("d0")], n1=[region("d1", OTHER)])

    assert await cut_in_mid_stream(system) == expected_ids(LONG, TOKENS)

    assert await system.causes() == [("recompute", "d0", "d1")]
    assert params_of(system, "d1") == {"kvrs": {"agents": []}}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param([{"engine": "d0"}], id="fields are missing"),
        pytest.param([region("d0", "0123")], id="no namespace"),
        pytest.param([region("d0") | {"rows": -1}], id="a negative number"),
        pytest.param([region(f"d{each}") for each in range(65)], id="too many"),
        pytest.param(7, id="no list"),
    ],
)
async def test_a_report_that_is_none_ends_the_use_of_the_agent_alone(
    vllms: Builder, broken: Any
) -> None:
    """Streams go on, and the agent is used again when it reports as it should."""
    system = await vllms(decoding_alone, backup=LOCAL)
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    system.agents["agent-n0"].regions = broken
    await system.until_health(**{"agent-n0": "down"})
    assert await cut_in_mid_stream(system) == expected_ids(LONG, TOKENS)
    assert await system.causes() == [("recompute", "d0", "d1")]

    system.agents["agent-n0"].regions = []
    await system.until_health(**{"agent-n0": "up"})
