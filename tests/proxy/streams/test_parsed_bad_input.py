"""Bad output of engines with parsers, with and without a death, in three APIs: that API's error,
bounded memory, and a neighbour stream that gets all of its own.
"""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from experiments.parsed_deaths.asked import APIS, Asked
from experiments.parsed_deaths.oracle import CHAT, MESSAGES, RESPONSES, Answer, read
from experiments.parsed_deaths.world import Cluster, Death, open_cluster
from kvrs_testkit.engine_streams import Recording, recordings
from kvrs_testkit.engine_streams.playing import Player
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.sse import events_of

BASE = recordings("vllm")["vllm-tools-hermes"]
PROMPT = [5, 6, 7]
BEFORE = [{"reasoning": "Three files"}, {"reasoning": ", really."}, {"content": "I tidy"}]
# What clients get of an output that no API can express, and of one that did not come again.
UNDECODABLE = {
    CHAT: "undecodable server_error",
    MESSAGES: "api_error",
    RESPONSES: "server_error failed",
}
INEXACT = UNDECODABLE | {CHAT: "inexact server_error", MESSAGES: "overloaded_error"}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster("vllm") as opened:
        yield opened


def piece(arguments: Any, name: str | None = None, index: Any = 0) -> dict[str, Any]:
    begins = {} if name is None else {"id": f"call-{index}", "type": "function"}
    return {"index": index, **begins, "function": {"name": name, "arguments": arguments}}


def called(*pieces: Any) -> list[dict[str, Any]]:
    return [{"tool_calls": [each]} for each in pieces]


WHOLE = called(piece("", "f"), piece('{"q":'), piece(' "abc'), piece('"}'))


def made(*deltas: Any, finish: str = "tool_calls", ids: list[int] | None = None) -> Recording:
    """An output with one id an event."""
    ids = ids or list(range(300, 301 + len(deltas)))
    choices = [{"index": 0, "delta": each, "finish_reason": None} for each in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    events = [
        {"choices": [choice | {"token_ids": [token]}]}
        for choice, token in zip(choices, ids, strict=True)
    ]
    events[0]["prompt_token_ids"] = BASE.prompt_ids  # type: ignore[assignment]
    return msgspec.structs.replace(
        BASE,
        ids=ids,
        texts=[""] * len(ids),
        covered=list(range(1, len(ids) + 1)),
        events=[msgspec.Raw(json.dumps(each, separators=(",", ":")).encode()) for each in events],
    )


async def neighbour(cluster: Cluster) -> list[int]:
    """The ids of a completion that runs beside, of which nothing is parsed."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True}
    async with cluster.http.post(
        f"{cluster.url}/v1/completions", json=body | {"return_token_ids": True}
    ) as response:
        *events, done, _ = events_of(await response.read())
    assert done == b"data: [DONE]"
    choices = [json.loads(each[6:])["choices"][0] for each in events]
    return [token for choice in choices for token in choice["token_ids"]]


async def answer_of(
    cluster: Cluster, api: str, first: Recording, then: Recording | None = None, cut: int = 0
) -> Answer:
    """The answer of a stream beside a neighbour. The first server plays `first`, and dies behind
    `cut` events if that is given; the others play `then`.
    """
    death = Death(at_byte=_bytes_of(first, cut) if cut else None)
    for name, server in cluster.servers.items():
        server.recording = first if then is None or name == "d0" else then
        server.death = death
        server.bodies.clear()  # Their number is in the id of each event.
    body = Asked(BASE.name, api, is_stream=True, is_seeded=False).body()

    async def ask() -> tuple[int, bytes]:
        async with cluster.http.post(cluster.url + api, json=body) as response:
            return response.status, await response.read()

    async def beside() -> list[int]:
        while not death.served:
            await asyncio.sleep(0.001)
        return await neighbour(cluster)

    (status, got), ids = await asyncio.gather(ask(), beside())

    assert death.first == "d0"
    assert ids == expected_ids(PROMPT, 40)
    health = {name: value for name, value in (await cluster.health()).items() if name != "d0"}
    assert set(health.values()) == {"up"}
    assert not cluster.proxy.parts.driver.streams
    return read(api, is_stream=True, status=status, body=got, ended="")


def _bytes_of(recording: Recording, events: int) -> int:
    played = list(Player(recording).events(model="tiny", returns_ids=True, number=1))
    return sum(len(each.data) for each in played[:events])


MALFORMED = [
    pytest.param({"tool_calls": [7]}, id="a number for a call"),
    pytest.param({"tool_calls": [{"index": "a"}]}, id="a word for an index"),
    pytest.param({"tool_calls": [piece({"q": 1})]}, id="an object for arguments"),
    pytest.param({"tool_calls": [{"index": 0, "function": []}]}, id="a list for a function"),
    pytest.param({"tool_calls": "x"}, id="text for calls"),
    pytest.param({"reasoning": 7}, id="a number for a thought"),
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("bad", MALFORMED)
async def test_a_malformed_piece_ends_the_stream_with_an_error(
    cluster: Cluster, api: str, bad: Any
) -> None:
    """Behind a begun call, which is not shown as complete; no other instance is tried."""
    answer = await answer_of(cluster, api, made(*BEFORE, *WHOLE[:2], bad, *WHOLE[2:]))

    assert (answer.broken, answer.finish) == ([], None)
    assert answer.error == UNDECODABLE[api]
    assert not any(call.is_closed for call in answer.calls)


@pytest.mark.parametrize("api", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("cut", [0, 5])
async def test_a_call_that_never_closes_is_an_error(cluster: Cluster, api: str, cut: int) -> None:
    """Chats have what the engine says; the other APIs say that a call is complete, or not."""
    answer = await answer_of(cluster, api, made(*BEFORE, *WHOLE[:3]), cut=cut)

    assert (answer.broken, answer.finish) == ([], None)
    assert answer.error == UNDECODABLE[api]
    assert [call.is_closed for call in answer.calls] == [False]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_cut", [False, True])
async def test_ten_megabytes_of_arguments_take_bounded_memory(
    cluster: Cluster, api: str, is_cut: bool
) -> None:
    """Chats pass them on, and no death continues them; the other APIs end at 8 MiB."""
    pieces = [piece("x" * (1 << 18)) for _ in range(40)]
    recording = made(*called(piece('{"q": "', "f"), *pieces, piece('"}')))
    tracemalloc.start()

    answer = await answer_of(cluster, api, recording, cut=38 if is_cut else 0)

    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.broken == []
    if api == CHAT:
        assert answer.error == ("inexact server_error" if is_cut else None)
    else:
        assert answer.error == UNDECODABLE[api]
    assert answer.error is None or not any(call.is_closed for call in answer.calls)
    assert most_bytes < 150 << 20  # Those of the servers and the client too, 10 MB each time.


CHANGED = [
    pytest.param([*BEFORE[:1], {"reasoning": ", not."}, *BEFORE[2:], *WHOLE], id="thought"),
    pytest.param([{"content": "Three files"}, *BEFORE[1:], *WHOLE], id="thought is content"),
    pytest.param([*BEFORE, *called(piece("", "g")), *WHOLE[1:]], id="name"),
    pytest.param([*BEFORE, WHOLE[0], *called(piece('{"p":')), *WHOLE[2:]], id="arguments"),
    pytest.param([*BEFORE, *called(piece("", "f", 1)), *WHOLE[1:]], id="index"),
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("changed", CHANGED)
async def test_a_parser_that_changes_its_mind_ends_the_stream(
    cluster: Cluster, api: str, changed: list[Any]
) -> None:
    """The ids are equal; the client gets nothing of the other texts."""
    first = made(*BEFORE, *WHOLE)

    answer = await answer_of(cluster, api, first, made(*changed), cut=6)

    assert (answer.broken, answer.finish) == ([], None)
    assert answer.error == INEXACT[api]
    assert (answer.thought, answer.content) == ("Three files, really.", "I tidy")
    assert [(call.arguments, call.is_closed) for call in answer.calls] == [('{"q": "abc', False)]


@pytest.mark.parametrize("api", APIS)
async def test_other_ids_for_equal_texts_end_the_stream(cluster: Cluster, api: str) -> None:
    """The rest would follow from other tokens."""
    first = made(*BEFORE, *WHOLE)
    ids = [*first.ids[:4], 299, *first.ids[5:]]

    answer = await answer_of(cluster, api, first, made(*BEFORE, *WHOLE, ids=ids), cut=6)

    assert (answer.broken, answer.finish, answer.error) == ([], None, INEXACT[api])


@pytest.mark.parametrize("api", APIS)
async def test_equal_texts_in_other_pieces_are_continued(cluster: Cluster, api: str) -> None:
    """Parsers depend on how tokens are packed into events."""
    first = made(*BEFORE, *WHOLE)
    packed = [{"reasoning": "Three"}, {"reasoning": " files, really."}, *BEFORE[2:]]
    pieces = called(piece('{"q"', "f"), piece(': "a'), piece("bc"), piece('"}'))

    calm = await answer_of(cluster, api, first)
    answer = await answer_of(cluster, api, first, made(*packed, *pieces), cut=6)

    assert answer.parts == calm.parts
    assert (answer.finish, answer.error, answer.broken) == (calm.finish, None, [])
