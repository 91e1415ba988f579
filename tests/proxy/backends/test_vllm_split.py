"""vLLM servers with a kvrs connector: the front of a history is computed by a request of its own,
while the back comes from an agent.
"""

import asyncio
from array import array
from typing import Any

import pytest

from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import KvrsParams, LinkReport, SourceRange
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.vllm_front import decode_behind, front_of
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_vllm import PAGE
from kvrs_testkit.vllm_cluster import TOKENS, Builder, Servers, Vllms
from tests.proxy.backends.connectors import (
    connector_of,
    cut_in_mid_stream,
    equip,
    until_capable,
)

BACKUP = {"mode": "remote"}
# To compute it takes 0.25 s by the table; its 125 pages are as soon fetched.
PROMPT = [index % 200 for index in range(2005)]
BYTES_PER_S = 2.2e6
FRONTS = range(PAGE - len(PROMPT), 0)  # Positions at which one may end.
D1 = InstanceId("d1")


def with_links(servers: Servers) -> None:
    equip(servers)
    for server in servers.values():
        assert server.kvrs is not None
        server.kvrs.links = [LinkReport(NodeId(node), BYTES_PER_S) for node in ("n0", "n1")]
        server.kvrs.deadline_s = 0.3


def calls_of(system: Vllms, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The fronts that a server has got, and its other requests."""
    bodies = system.servers[name].bodies
    fronts = [body for body in bodies if body["max_tokens"] == 1 and not body["stream"]]
    return fronts, [body for body in bodies if body not in fronts]


async def test_the_front_is_computed_while_the_back_is_fetched(vllms: Builder) -> None:
    """With the prompt's beginning under the same salt, and nothing else of the client's fields."""
    system = await vllms(with_links, backup=BACKUP)

    ids = await cut_in_mid_stream(
        system, 125, PROMPT, model="tiny", cache_salt="mine", stop=["none"]
    )

    assert ids == expected_ids(PROMPT, TOKENS)
    assert await system.causes() == [("split", "d0", "d1")]
    ((front,), (behind,)) = calls_of(system, "d1")
    history = PROMPT + ids[:3]
    own, params = sorted(connector_of(system, "d1").taken, key=lambda each: len(each.sources))
    (source,) = params.sources
    tokens = source.first_page * PAGE
    assert 0 < tokens < len(PROMPT)
    assert source.first_page + source.pages == 125
    assert front == {
        "model": "tiny",
        "cache_salt": "mine",
        "prompt": history[:tokens],
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "kv_transfer_params": front["kv_transfer_params"],
    }
    assert (behind["prompt"], behind["cache_salt"]) == (history, "mine")
    assert (own.stream, own.attempt) == (params.stream, params.attempt)
    assert (own.sources, own.checkpoints) == ([], [])
    assert system.shared.violations == []

    async def is_counted() -> bool:
        (row,) = (await system.state())["recoveries"]
        return bool(row["loaded_tokens"] == source.pages * PAGE)

    await system.until(is_counted)


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.HANG, Fault.EMPTY, Fault.ERROR])
async def test_a_stream_goes_on_without_a_front_that_fails(
    vllms: Builder, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no failure of the attempt, whose history is computed then."""
    system = await vllms(with_links, backup=BACKUP)
    system.shared.faults = dict.fromkeys(FRONTS, fault)

    assert await cut_in_mid_stream(system, 125, PROMPT) == expected_ids(PROMPT, TOKENS)

    assert await system.causes() == [("split", "d0", "d1")]
    (fetch,) = connector_of(system, "d1").fetches
    assert (fetch.loaded_tokens, fetch.computed_tokens) == (0, len(PROMPT) + 3)
    assert [len(calls) for calls in calls_of(system, "d1")] == [1, 1]
    is_told = "the front of a history was not computed" in caplog.messages
    assert is_told is (fault is Fault.RESET)


async def test_the_death_of_the_server_is_that_of_its_split(vllms: Builder) -> None:
    """The stream is recovered once more, at another server."""
    system = await vllms(with_links, backup=BACKUP)
    system.shared.faults = dict.fromkeys(FRONTS, Fault.HANG)
    connector_of(system, "d1").deadline_s = 60.0
    cut = asyncio.create_task(cut_in_mid_stream(system, 125, PROMPT))

    async def is_split() -> bool:
        return [len(calls) for calls in calls_of(system, "d1")] == [1, 1]

    await system.until(is_split)
    await system.servers["d0"].restart()
    await system.until_health(d0="up")
    await system.servers["d1"].kill()

    assert await cut == expected_ids(PROMPT, TOKENS)
    assert [(one, other) for _, one, other in await system.causes()] == [
        ("d0", "d1"),
        ("d1", "d0"),
    ]


async def test_without_a_prefix_cache_nothing_is_split(vllms: Builder) -> None:
    def prepare(servers: Servers) -> None:
        with_links(servers)
        for server in servers.values():
            server.prefix_caching = False

    system = await vllms(prepare, backup=BACKUP)
    await until_capable(system, "d1", ["pull_pages", "checkpoint", "fence"])

    assert await cut_in_mid_stream(system, 125, PROMPT) == expected_ids(PROMPT, TOKENS)

    ((option, *_),) = await system.causes()
    assert option != "split"
    assert calls_of(system, "d1")[0] == []


# The call of a front, and what becomes of it.


def decode_of(first_page: int, fields: dict[str, Any], ids: list[int] | None = None) -> Call:
    params = KvrsParams(StreamId("s"), 2, 1, owner_epoch=3, token_ids=ids)
    params.sources = [SourceRange(InstanceId("agent"), first_page, 2, 7)]
    return Call("/v1/x", fields | {"kvrs": params, "model": "m", "stop": ["x"]})


@pytest.mark.parametrize("of_chat", [False, True])
def test_a_front_has_the_ids_of_the_history(of_chat: bool) -> None:
    """A chat that has produced nothing is sent as messages, with its ids for the engine beside."""
    history = list(range(50))
    fields: dict[str, Any] = {"messages": []} if of_chat else {"prompt": array("I", history)}

    found = front_of(decode_of(2, fields, history if of_chat else None), PAGE)

    assert found is not None
    front, params = found
    assert front.path == "/v1/completions"
    assert [*front.fields.pop("prompt")] == history[: 2 * PAGE]
    assert front.fields == {"model": "m", "max_tokens": 1, "temperature": 0, "stream": False}
    assert params == KvrsParams(StreamId("s"), 2, 1, owner_epoch=3)


@pytest.mark.parametrize(
    "call",
    [
        decode_of(0, {"prompt": array("I", range(50))}),
        decode_of(2, {"prompt": "text"}),
        decode_of(2, {"messages": []}),
        Call("/v1/completions", {"prompt": array("I", range(50))}),
        Call("/v1/completions", {"prompt": "x", "kvrs": KvrsParams(StreamId("s"), 2, 1)}),
    ],
    ids=["no front", "text", "messages", "no parameters", "no sources"],
)
def test_a_call_without_a_front_has_none(call: Call) -> None:
    assert front_of(call, PAGE) is None


async def test_a_front_ends_with_its_decode_call() -> None:
    """When its answer is whole, when it fails, and when the client leaves."""

    async def decode(how: str) -> None:
        await asyncio.sleep(0.01)
        if how == "fails":
            raise UpstreamError("lost")
        if how == "is cancelled":
            await asyncio.Event().wait()

    for how in ("ends", "fails", "is cancelled"):
        ended: list[str] = []

        async def front(ended: list[str] = ended) -> bytes:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("front")
            return b""

        task = asyncio.create_task(decode_behind(front, decode(how), D1))
        await asyncio.sleep(0.005)
        assert not ended
        if how == "is cancelled":
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)

        assert ended == ["front"]
        wanted = {
            "ends": type(None),
            "fails": UpstreamError,
            "is cancelled": asyncio.CancelledError,
        }
        assert type(outcome) is wanted[how]


async def test_a_bug_in_a_front_is_not_hidden() -> None:
    async def front() -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await decode_behind(front, asyncio.sleep(0.01), D1)


async def test_a_decode_call_that_fails_at_once_begins_no_front() -> None:
    async def decode() -> None:
        raise UpstreamError("refused")

    async def front() -> bytes:
        raise AssertionError

    with pytest.raises(UpstreamError, match="refused"):
        await decode_behind(front, decode(), D1)
