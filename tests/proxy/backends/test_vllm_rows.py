"""vLLM servers whose rows in host memory the agent of their node serves."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvrs.errors import RequestError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.rows import params_key, unseal
from kvrs.proxy.backends.bodies import RowLoad
from kvrs.proxy.backends.vllm import VllmBackend
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import LONG, PROMPT, TOKENS, Builder, Servers, Vllms

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
        "row_tokens": 16,
        "weights": "",
        "unchecked_rows": 0,
        "holds_aborted": None,
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
    return opened(system.servers[name].bodies[at].get("kv_transfer_params"), name)


def opened(params: Any, name: str) -> Any:
    """Parameters with the agents that the tier of a server finds in them."""
    if params is None:
        return None
    agents = unseal(params["kvrs"], [params_key(SECRET, InstanceId(name))], time.time())
    return params | {"kvrs": {"agents": agents}}


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


async def test_what_a_server_is_told_is_right_at_no_other(vllms: Builder) -> None:
    """A client that sees the parameters cannot have another server keep rows, or ask agents."""
    system = await vllms(decoding_alone, backup=LOCAL)
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    await cut_in_mid_stream(system)

    params = system.servers["d1"].bodies[-1]["kv_transfer_params"]["kvrs"]
    with pytest.raises(RequestError, match="its mac matches no secret"):
        unseal(params, [params_key(SECRET, InstanceId("d0"))], time.time())


@pytest.mark.parametrize("loaded_tokens", [32, 0])
async def test_what_was_loaded_is_learned_from_the_servers_counters(
    vllms: Builder, loaded_tokens: int
) -> None:
    """The record has it, the link's rate is measured, and what another tier reads is not counted.
    Where nothing was found the server has computed all of it, which is booked as what it was: in
    the state, the metrics, the learned factors and the incidents.
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
    name = "kvrs_worker_kv_bytes_total"
    assert await system.count(name, worker="d1", kind="recovery") == 256 * loaded_tokens
    assert await system.count(name, worker="d1", kind="prefix") == 0
    state, name = await system.state(), "kvrs_recoveries_total"
    option = "restore" if loaded_tokens else "recompute"
    assert [row["option"] for row in state["recoveries"]] == [option]
    assert state["policy"]["spread"]["events"] > 0
    for each in ("restore", "recompute"):
        counted = await system.count(name, option=each, outcome="resumed")
        assert counted == (each == option)


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


async def test_refused_rows_are_counted(vllms: Builder) -> None:
    """By the agents, since their start."""
    system = await vllms(decoding_alone, backup=LOCAL)
    system.agents["agent-n0"].refused_rows = 3
    await serve(system, n0=[region("d0")])

    metric = "kvrs_agent_refused_rows_total"
    assert await system.count(metric, agent="agent-n0") == 3
    assert await system.count(metric, agent="agent-n1") == 0


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


async def restores_of(system: Vllms) -> dict[str, Any]:
    """Results of the tests of rows at decode instances, and the causes of failures."""
    found: dict[str, Any] = {}

    async def is_tested() -> bool:
        rows = {row["id"]: row["self_test"] for row in (await system.state())["instances"]}
        found.update(
            {name: (row["restores"], row["cause"]) for name, row in rows.items() if name[0] == "d"}
        )
        return all(restores is not None for restores, _ in found.values())

    await system.until(is_tested)
    return found


async def test_nothing_is_kept_of_requests_that_kvrs_does_not_recover(vllms: Builder) -> None:
    """Those that are passed on as they are, and those of its self-tests but for a test of rows."""

    def prepare(servers: Servers) -> None:
        decoding_alone(servers)
        for server in servers.values():
            server.passed, server.row_bytes = ("/v1/embeddings",), 256.0 * 32

    system = await vllms(prepare, backup=LOCAL, proxy={"self_test": True})
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    async def is_tested() -> bool:
        return all(row["self_test"]["done"] for row in (await system.state())["instances"])

    await system.until(is_tested)
    await restores_of(system)
    async with system.http.post(f"{system.url}/v1/embeddings", json={"input": "a"}) as answer:
        assert answer.status == 200

    bodies = [(name, body) for name in ("d0", "d1") for body in system.servers[name].bodies]
    assert bodies
    told = [
        opened(body["kv_transfer_params"], name)
        for name, body in bodies
        if "kv_transfer_params" in body
    ]
    # Each saves rows for the other, and loads those of the other.
    assert sorted(told, key=str) == [
        {"kvrs": {"agents": ["agent-n0"]}},
        {"kvrs": {"agents": ["agent-n1"]}},
        *[{"kvrs": {"agents": []}}] * 2,
    ]


async def test_a_self_test_loads_rows_of_another_server(vllms: Builder) -> None:
    """It begins when agents report them, and counts what the server has loaded. A server that
    loads none, or goes on with other tokens, is not restored at.
    """

    def prepare(servers: Servers) -> None:
        decoding_alone(servers)
        servers["d0"].row_bytes = servers["d1"].row_bytes = 256.0 * 32

    system = await vllms(prepare, backup=LOCAL, proxy={"self_test": True})
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    assert await restores_of(system) == {"d0": (True, ""), "d1": (True, "")}
    assert (system.servers["d0"].row_loads, system.servers["d1"].row_loads) == (1, 1)

    async def are_measured() -> bool:
        links = [(row["source"], row["target"]) for row in (await system.state())["links"]]
        return sorted(links) == [("n0", "n1"), ("n1", "n0")]

    await system.until(are_measured)  # The servers' next reports have the rates.


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"row_bytes": 0.0}, "loaded none of the rows that agent-n0 serves of d0"),
        (
            {"spoils_rows": True},
            "goes on with other tokens behind the rows that agent-n0 serves of d0",
        ),
    ],
)
async def test_a_server_that_restores_wrongly_is_not_restored_at(
    vllms: Builder, change: dict[str, Any], cause: str
) -> None:
    def prepare(servers: Servers) -> None:
        decoding_alone(servers)
        for server in servers.values():
            server.row_bytes = 256.0 * 32
        for name, value in change.items():
            setattr(servers["d1"], name, value)

    system = await vllms(prepare, backup=LOCAL, proxy={"self_test": True})
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    found = await restores_of(system)
    assert (found["d0"], found["d1"]) == ((True, ""), (False, cause))

    assert await cut_in_mid_stream(system) == expected_ids(LONG, TOKENS)
    assert await system.causes() == [("recompute", "d0", "d1")]


async def test_rows_of_a_prefill_instance_are_tested_and_its_hand_off_is_freed(
    vllms: Builder,
) -> None:
    """Its blocks would wait for a stream that does not exist."""

    def prepare(servers: Servers) -> None:
        with_tiers(servers)
        for server in servers.values():
            server.row_bytes = 256.0 * 32

    system = await vllms(prepare, backup=LOCAL, proxy={"self_test": True})
    await serve(system, n0=[region("p0")], n1=[region("d1")])

    async def has_restored() -> bool:
        rows = {row["id"]: row["self_test"] for row in (await system.state())["instances"]}
        return bool(rows["d1"]["restores"])

    await system.until(has_restored)
    assert system.servers["d1"].row_loads == 1
    assert system.shared.hand_offs == {}


@pytest.mark.parametrize(("gap", "restores"), [(0.1, True), (5.0, False)])
async def test_a_near_tie_behind_rows_is_no_wrong_token(
    vllms: Builder, gap: float, restores: bool
) -> None:
    """Two tokens that are about as likely change places by rounding; others do not."""

    def prepare(servers: Servers) -> None:
        decoding_alone(servers)
        for server in servers.values():
            server.row_bytes, server.tie_gap = 256.0 * 32, gap
        servers["d1"].spoils_rows = True

    system = await vllms(prepare, backup=LOCAL, proxy={"self_test": True})
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    found = await restores_of(system)

    assert found["d1"][0] is restores


async def test_a_test_of_rows_waits_until_the_counters_are_its_own(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters of a server with another open load are shared among both, and show nothing."""
    monkeypatch.setattr("kvrs.core.fleet.self_tests._LATER_S", 0.1)

    def prepare(servers: Servers) -> None:
        decoding_alone(servers)
        servers["d0"].row_bytes = servers["d1"].row_bytes = 256.0 * 32

    system = await vllms(prepare, backup=LOCAL, proxy={"self_test": True})
    backend = system.proxy.parts.driver.backends[InstanceId("d1")]
    assert isinstance(backend, VllmBackend)
    other = RowLoad(StreamId("other"), 1, 1, 32, (InstanceId("agent-n0"),), 2)
    backend._row_loads.begin(other, 4096, time.monotonic())
    await serve(system, n0=[region("d0")], n1=[region("d1")])

    async def is_put_off() -> bool:
        rows = {row["id"]: row["self_test"] for row in (await system.state())["instances"]}
        seen = rows["d1"]
        return (seen["restores"], seen["cause"]) == (None, "what it has loaded is not counted yet")

    with monkeypatch.context() as short:
        short.setattr("kvrs.proxy.watch.self_test.COUNTED_WITHIN_S", 0.3)
        await system.until(is_put_off)
    other.over_s = time.monotonic()

    assert await restores_of(system) == {"d0": (True, ""), "d1": (True, "")}


async def test_a_row_that_is_longer_than_any_prompt_is_not_tested(vllms: Builder) -> None:
    system = await vllms(decoding_alone, backup=LOCAL, proxy={"self_test": True})
    long = {"row_tokens": 1 << 20}
    await serve(system, n0=[region("d0") | long], n1=[region("d1") | long])

    found = await restores_of(system)

    assert found["d1"] == (False, "rows of 1048576 tokens; allowed for its model: 4083")


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
