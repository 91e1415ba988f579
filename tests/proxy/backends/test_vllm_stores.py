"""vLLM servers that share a store of KV by themselves: kvrs sends the history again, with the same
salt, and believes the store only behind its own test of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvrs_testkit.scripted_model import Arithmetic, expected_ids
from kvrs_testkit.scripted_store import Blocks, StoreClient
from kvrs_testkit.vllm_cluster import LONG, TOKENS, Builder, Servers, Vllms
from tests.proxy.backends.test_vllm_rows import cut_in_mid_stream

pytestmark = pytest.mark.network

TESTED = {"self_test": True}
EXPECTED = expected_ids(LONG, TOKENS)


def sharing(change: Callable[[Servers], None] = lambda _: None) -> Callable[[Servers], None]:
    """Two decode servers on two nodes with one store, and no agents."""

    def prepare(servers: Servers) -> None:
        del servers["p0"]
        blocks: Blocks = {}
        for server in servers.values():
            server.connector, server.store = False, StoreClient(blocks)
        change(servers)

    return prepare


def store_of(servers: Servers, name: str) -> StoreClient:
    store = servers[name].store
    assert store is not None
    return store


def changed(**changes: Any) -> Callable[[Servers], None]:
    """The store as `d1` uses it."""

    def change(servers: Servers) -> None:
        for name, value in changes.items():
            setattr(store_of(servers, "d1"), name, value)

    return change


async def told(system: Vllms, name: str) -> Any:
    rows = {row["id"]: row["self_test"] for row in (await system.state())["instances"]}
    return rows[name]


async def until_tested(system: Vllms, *names: str) -> None:
    """Their stores have passed or failed."""

    async def are_tested() -> bool:
        rows = [await told(system, name) for name in names]
        return all(row and row["restores"] is not None for row in rows)

    await system.until(are_tested)


def salts(system: Vllms, name: str) -> list[str | None]:
    """The salts of the calls of clients' streams."""
    return [
        body.get("cache_salt")
        for body in system.servers[name].bodies
        if body["prompt"][: len(LONG)] == LONG
    ]


async def test_a_cut_stream_goes_on_behind_what_its_dead_server_had_stored(vllms: Builder) -> None:
    """The call names no agent and has the salt of the client. The server's counters say what it
    has loaded, and the rate is that of the store.
    """
    system = await vllms(sharing(), proxy=TESTED)
    await until_tested(system, "d0", "d1")
    before = store_of(system.servers, "d1").hits

    async def is_counted() -> bool:
        rows = (await system.state())["recoveries"]
        return [(row["loaded_tokens"], row["computed_tokens"]) for row in rows] == [(32, 11)]

    assert await cut_in_mid_stream(system, is_counted) == EXPECTED

    assert await system.causes() == [("restore", "d0", "d1")]
    assert [row["source"] for row in (await system.state())["recoveries"]] == [":store"]
    assert store_of(system.servers, "d1").hits - before == 32
    assert salts(system, "d1") == [None]
    assert "kv_transfer_params" not in system.servers["d1"].bodies[-1]
    row = await told(system, "d1")
    assert (row["restores"], row["cause"]) == (True, "")
    assert row["store"] == {
        "kind": "mooncake",
        "restores": True,
        "share": 1.0,
        "is_wrong": False,
        "with": ["d0"],
    }
    links = {(row["source"], row["target"]): row for row in (await system.state())["links"]}
    assert links[":store", "n1"]["measured"]
    assert system.shared.violations == []


async def test_streams_are_protected_up_to_what_is_stored(vllms: Builder) -> None:
    system = await vllms(sharing(), proxy=TESTED)
    await until_tested(system, "d0", "d1")
    system.shared.prompt_tokens, system.shared.gate_at = len(LONG), 3
    system.shared.gate = asyncio.Event()

    asked = asyncio.create_task(system.ids(LONG))
    await system.until_streams_hold(3)
    (row,) = (await system.state())["streams"]
    system.shared.gate.set()

    assert await asked == EXPECTED
    assert (row["protected"], row["unprotected"]) == ({":store": 2}, None)


@pytest.mark.parametrize(
    ("changes", "cause", "is_wrong"),
    [
        ({"saves": False}, "loaded none of what its store (mooncake) has of d1", False),
        ({"spoils": True}, "goes on with other tokens behind what its store", True),
        ({"weights": "other"}, "goes on with other tokens behind what its store", True),
        ({"fails": True}, "sent an error event", False),
    ],
    ids=["hits are none", "wrong tokens", "other weights", "it cannot load"],
)
async def test_a_store_that_fails_its_test_restores_nothing_and_is_named(
    vllms: Builder, changes: dict[str, Any], cause: str, is_wrong: bool
) -> None:
    """Streams are computed, and where tokens were wrong they find nothing in the store: the server
    would load it by itself.
    """
    system = await vllms(sharing(changed(**changes)), proxy=TESTED)
    await until_tested(system, "d0", "d1")
    failing = "d0" if "saves" in changes else "d1"

    row = await told(system, failing)
    assert row["restores"] is False
    assert row["cause"].startswith(cause)
    assert (row["store"]["restores"], row["store"]["is_wrong"]) == (False, is_wrong)
    if failing == "d1":
        assert await cut_in_mid_stream(system) == EXPECTED
        assert {option for option, *_ in await system.causes()} == {"recompute"}
        assert (salts(system, "d1")[-1] is not None) is (is_wrong or "fails" in changes)


async def test_no_restarted_server_loads_what_it_has_not_been_tested_with(vllms: Builder) -> None:
    """Blocks from before the restart are wrong, new ones right. A stream that comes before the test
    is computed under a salt of its own; the test looks at the older blocks too.
    """
    system = await vllms(sharing(), proxy=TESTED)
    await until_tested(system, "d0", "d1")
    system.shared.prompt_tokens, system.shared.gate_at = len(LONG), 3
    first = system.shared.gate = asyncio.Event()
    asked = asyncio.create_task(system.ids(LONG))
    await system.until_streams_hold(3)
    store_of(system.servers, "d1").spoils_older = True
    await system.servers["d1"].kill()
    await system.until_health(d1="down")
    await system.servers["d1"].start()
    await system.until_health(d1="up")

    await system.servers["d0"].kill()
    system.shared.gate = None
    first.set()

    assert await asked == EXPECTED
    assert await system.causes() == [("recompute", "d0", "d1")]
    assert salts(system, "d1")[-1] is not None
    await system.servers["d0"].start()

    async def is_wrong() -> bool:
        row = await told(system, "d1")
        return bool(row["store"] and row["store"]["is_wrong"])

    await system.until(is_wrong)
    assert (await told(system, "d1"))["cause"].endswith("from before")


async def test_a_load_that_fails_is_tried_again_without_the_store(vllms: Builder) -> None:
    """Mooncake goes on for seconds to promise what was in the memory of a dead server, and vLLM
    ends requests that then cannot load it. The server is not to blame.
    """
    system = await vllms(sharing(), proxy=TESTED)
    await until_tested(system, "d0", "d1")
    store_of(system.servers, "d1").fails = True

    assert await cut_in_mid_stream(system) == EXPECTED

    assert await system.causes() == [("restore", "d0", "d1"), ("recompute", ":store", "d1")]
    assert [salt is None for salt in salts(system, "d1")] == [True, False]
    rows = {row["id"]: row for row in (await system.state())["instances"]}
    assert rows["d1"]["answers"]["failures_in_a_row"] == 0


async def test_a_store_of_an_unknown_kind_is_seen_by_what_was_loaded_from_it(
    vllms: Builder,
) -> None:
    """It is tested then. Times of loads are those up to the tokens."""

    def unknown(servers: Servers) -> None:
        for name in ("d0", "d1"):
            store_of(servers, name).series = ""

    system = await vllms(sharing(unknown), proxy=TESTED)
    assert (await told(system, "d0"))["store"] is None
    for name in ("d0", "d1"):
        store_of(system.servers, name).hits += 16

    await until_tested(system, "d0", "d1")

    assert (await told(system, "d0"))["store"]["kind"] == "other"

    async def are_measured() -> bool:
        rows = (await system.state())["links"]
        measured = {row["target"] for row in rows if row["source"] == ":store"}
        return measured == {"n0", "n1"}

    await system.until(are_measured)


async def test_without_self_tests_a_store_is_not_believed(vllms: Builder) -> None:
    system = await vllms(sharing())

    assert await cut_in_mid_stream(system) == EXPECTED

    assert await system.causes() == [("recompute", "d0", "d1")]


async def test_servers_of_two_models_that_share_a_store_are_found_out(vllms: Builder) -> None:
    """Also where their own tokens have shown already that one does not go on like the other."""

    def other(servers: Servers) -> None:
        store_of(servers, "d1").weights = "other"
        servers["d0"].arithmetic, servers["d1"].arithmetic = Arithmetic(), Arithmetic(1)

    system = await vllms(sharing(other), proxy=TESTED)
    await until_tested(system, "d0", "d1")

    for name, holder in (("d0", "d1"), ("d1", "d0")):
        row = await told(system, name)
        assert (row["restores"], row["store"]["is_wrong"]) == (False, True)
        assert row["cause"].endswith(f"behind what its store (mooncake) has of {holder}")


async def test_no_test_of_a_store_counts_what_other_requests_load(vllms: Builder) -> None:
    """It is put off, and streams are computed meanwhile."""

    def busy(servers: Servers) -> None:
        for server in servers.values():
            server.store = BusyStore(store_of(servers, server.id).blocks)

    system = await vllms(sharing(busy), proxy=TESTED)

    async def is_put_off() -> bool:
        rows = [await told(system, name) for name in ("d0", "d1")]
        return "what it has loaded is not counted yet" in [row["cause"] for row in rows if row]

    await system.until(is_put_off)
    assert [(await told(system, name))["restores"] for name in ("d0", "d1")] == [None, None]


class BusyStore(StoreClient):
    """One that other requests ask for three times as much, of which it has a third."""

    def load(self, salt: str | None, history: Sequence[int]) -> tuple[int, bool]:
        self.queries += 3 * len(history)
        self.hits += len(history)
        return super().load(salt, history)
