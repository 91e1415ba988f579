"""Resuming a stream at another proxy after the death of its proxy, or of the client's
connection.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from kvrs.protocol.instance import Capability
from kvrs.proxy.mirror import book, replication
from kvrs.proxy.mirror.headers import ResumeRequest
from kvrs_testkit.multi_proxy_cluster import (
    MultiProxyCluster,
    Reader,
    open_proxy_group,
    record_key,
)
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.scripted import Scripted
from kvrs_testkit.scripted_model import expected_ids, text_of

TOKENS = 8
WANTED = "".join(map(text_of, expected_ids([1, 2, 3], TOKENS)))

GroupBuilder = Callable[..., Awaitable[MultiProxyCluster]]


@pytest.fixture
async def group() -> AsyncIterator[GroupBuilder]:
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> MultiProxyCluster:
            return await stack.enter_async_context(open_proxy_group(**settings))

        yield make


def text_in(reader: Reader) -> str:
    choices = [msgspec.json.decode(event)["choices"] for event in reader.events]
    return "".join(
        each[0].get("text") or each[0].get("delta", {}).get("content") or ""
        for each in choices
        if each
    )


def plain(instances: dict[str, Scripted]) -> None:
    """Engines that take a history for a new prompt."""
    for one in instances.values():
        one.capabilities = [each for each in Capability if each is not Capability.EXACT_RESUME]


def gate_at(group: MultiProxyCluster, position: int) -> asyncio.Event:
    gate = group.system.script.gate = asyncio.Event()
    group.system.script.gate_at = position
    return gate


async def until_mirrored(group: MultiProxyCluster, events: int) -> None:
    """Wait until the mirror, proxy 1, has so many events of the stream."""
    async with asyncio.timeout(WITHIN_S):
        while (
            record_key("k") not in group.book(1).records
            or len(group.book(1).records[record_key("k")].events) < events
        ):
            await asyncio.sleep(0.005)


async def test_a_stream_is_resumed_at_another_proxy_after_a_kill(group: GroupBuilder) -> None:
    """Nothing is lost, repeated or different, the head included; engines get the next owner
    epoch.
    """
    here = await group()
    gate, reader = gate_at(here, 4), here.reader(stream_options={"include_usage": True})
    await reader.read(0, tokens=4)
    await until_mirrored(here, 1)  # The head comes with the first event.

    await here.kill(0)
    gate.set()
    assert await reader.read(1) == 200

    assert (text_in(reader), reader.done) == (WANTED, True)
    assert len({event[: event.index(b',"choices"')] for event in reader.events}) == 1
    assert msgspec.json.decode(reader.events[-1])["usage"]["completion_tokens"] == TOKENS
    bodies = [body["kvrs"] for one in here.system.instances.values() for body in one.bodies]
    assert {(body["owner_epoch"], body["attempt"]) for body in bodies} == {(0, 1), (1, 1)}


async def test_what_was_cached_for_the_prompt_goes_with_the_record(group: GroupBuilder) -> None:
    """The next proxy's engines have the prompt in their caches, from the first attempt."""
    here = await group()
    gate, reader = gate_at(here, 4), here.reader(stream_options={"include_usage": True})
    for instance in here.system.instances.values():
        instance.cached_tokens = 2
    await reader.read(0, tokens=4)
    await until_mirrored(here, 4)

    await here.kill(0)
    for instance in here.system.instances.values():
        instance.cached_tokens = 9
    gate.set()
    assert await reader.read(1) == 200

    usage = msgspec.json.decode(reader.events[-1])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_without_last_event_id_the_whole_stream_is_replayed(group: GroupBuilder) -> None:
    """The client may have discarded its part; a finished answer is replayed too, without an
    engine.
    """
    here = await group()
    reader = here.reader()
    await reader.read(0)
    await here.kill(0)
    asked = sum(len(one.bodies) for one in here.system.instances.values())

    again = here.reader()
    assert await again.read(1) == 200

    assert (again.events, again.done) == (reader.events, True)
    assert sum(len(one.bodies) for one in here.system.instances.values()) == asked


async def test_an_answer_in_one_piece_is_resumed_too(group: GroupBuilder) -> None:
    """With `stream: false` the engines stream to the proxy all the same."""
    here = await group()
    gate = gate_at(here, 4)
    fields, headers = (
        {"prompt": [1, 2, 3], "max_tokens": TOKENS, "temperature": 0},
        {"Idempotency-Key": "k"},
    )
    asking = asyncio.create_task(
        here.http.post(f"{here.url(0)}/v1/completions", json=fields, headers=headers)
    )
    await until_mirrored(here, 4)

    await here.kill(0)
    gate.set()
    await asyncio.gather(asking, return_exceptions=True)
    async with here.http.post(
        f"{here.url(1)}/v1/completions", json=fields, headers=headers
    ) as response:
        answer = msgspec.json.decode(await response.read())

    assert answer["choices"][0]["text"] == WANTED


@pytest.mark.parametrize("mirror", ["async", "sync"])
async def test_a_chat_is_resumed_after_its_role(group: GroupBuilder, mirror: str) -> None:
    """The first event has no token, and comes once."""
    here = await group(proxy={"mirror": mirror})
    whole = here.reader(
        "whole",
        prompt=None,
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=TOKENS,
    )
    await whole.read(0)
    gate = gate_at(here, 0)
    reader = here.reader(
        "cut",
        prompt=None,
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=TOKENS,
    )
    await reader.read(0, tokens=1)
    assert reader.last is not None
    assert reader.last.endswith(":0")

    await here.kill(0)
    gate.set()
    await reader.read_all(1)

    assert text_in(reader) == text_in(whole)
    assert sum(b'"role"' in event for event in reader.events) == 1


async def test_another_body_is_refused_and_the_stream_goes_on(group: GroupBuilder) -> None:
    """A key belongs to one request; another body gets nothing of its answer."""
    here = await group()
    reader = here.reader()
    await reader.read(0)
    other = here.reader(max_tokens=TOKENS + 1)

    assert await other.read(1) == 422

    assert other.errors == ["idempotency_mismatch"]


async def test_only_one_of_simultaneous_resumes_succeeds(group: GroupBuilder) -> None:
    """The others get 409."""
    here = await group(count=3)
    gate, reader = gate_at(here, 4), here.reader()
    await reader.read(0, tokens=4)
    await here.kill(0)

    twins = [here.reader() for _ in range(4)]
    for twin in twins:
        twin.last, twin.events = reader.last, list(reader.events)
    asking = [asyncio.create_task(twin.read(1 + n % 2)) for n, twin in enumerate(twins)]
    while sum(task.done() for task in asking) < 3:
        await asyncio.sleep(0.005)
    gate.set()
    statuses = await asyncio.gather(*asking)

    assert sorted(statuses) == [200, 409, 409, 409]
    assert text_in(twins[statuses.index(200)]) == WANTED


async def test_an_unknown_stream_is_an_error(group: GroupBuilder) -> None:
    """404 if all proxies answered, 503 if one did not; a request without a position starts a new
    stream.
    """
    here = await group()
    reader = here.reader()
    reader.last = "ab12:3"

    assert await reader.read(0) == 404
    await here.kill(1)
    assert await reader.read(0) == 503
    reader.last = None
    assert await reader.read(0) == 200

    assert (reader.errors, text_in(reader)) == (["unknown_stream", "mirror_unreachable"], WANTED)


async def test_when_all_proxies_were_killed_a_resume_is_an_error(group: GroupBuilder) -> None:
    """Records are in memory: the client is told, and nothing is guessed."""
    here = await group()
    reader = here.reader()
    await reader.read(0, tokens=3)
    events = list(reader.events)
    for number in range(len(here.proxies)):
        await here.kill(number)
    for number in range(len(here.proxies)):
        await here.start(number)
    await here.know_each_other()

    status = await reader.read(0)

    assert status == 404
    assert reader.events == events


async def test_a_stream_is_resumed_at_its_own_proxy(group: GroupBuilder) -> None:
    """After a broken connection; with a peer and without one."""
    for count in (1, 2):
        here = await group(count=count)
        gate, reader = gate_at(here, 4), here.reader(f"k{count}")
        await reader.read(0, tokens=4)

        gate.set()
        await reader.read_all(0)

        assert text_in(reader) == WANTED


async def test_a_client_of_a_superseded_stream_gets_an_error(
    group: GroupBuilder,
) -> None:
    """A superseded owner ends its stream at once, with a code of its own."""
    here = await group()
    gate, first = gate_at(here, 4), here.reader()
    reading = asyncio.create_task(first.read(0))
    while len(first.events) < 4:
        await asyncio.sleep(0.005)
    await until_mirrored(here, 4)
    second = here.reader()
    second.last, second.events = first.last, list(first.events)
    going_on = asyncio.create_task(second.read(1))

    async with asyncio.timeout(WITHIN_S):
        await reading
    gate.set()
    await going_on

    assert (first.errors, first.done) == (["superseded"], False)
    assert text_in(second) == WANTED


async def test_a_half_open_connection_is_superseded_at_the_same_proxy(
    group: GroupBuilder,
) -> None:
    """The former stream ends, and does not affect its successor."""
    here = await group()
    gate, first = gate_at(here, 4), here.reader()
    reading = asyncio.create_task(first.read(0))
    while len(first.events) < 4:
        await asyncio.sleep(0.005)
    second = here.reader()
    second.last, second.events = first.last, list(first.events)
    going_on = asyncio.create_task(second.read(0))
    async with asyncio.timeout(WITHIN_S):
        await reading
        while not (await _state(here, 0))["streams"]:
            await asyncio.sleep(0.005)
    gate.set()
    async with asyncio.timeout(WITHIN_S):
        await going_on

    assert (first.errors, second.done, text_in(second)) == (["superseded"], True, WANTED)


async def test_what_a_proxy_has_beyond_the_mirror_is_found_with_its_state(
    group: GroupBuilder, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that were sent and a finish that is there: else they would be sent again."""
    for module, name in ((replication, "_GATHER_S"), (replication, "_GATHER_EXACT_S")):
        monkeypatch.setattr(module, name, 60.0)
    monkeypatch.setattr(book, "_ACK_VALID_S", 60.0)
    here = await group(prepare=plain, model=model)
    gate_at(here, 4)
    reader = here.reader()
    reading = asyncio.create_task(reader.read(0))
    while len(reader.events) < 4:
        await asyncio.sleep(0.005)
    key = record_key("k")
    keyed, mirrored = here.mirror(0).streams[key], len(here.book(1).records[key].events)

    asked = ResumeRequest((key,), keyed.record.header.digest)
    found = await here.mirror(0).find(asked)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)

    assert mirrored < 4
    assert found is not None
    assert len(found.events) == 4
    assert found.state.text_sent == keyed.journal.text_sent == len(text_in(reader))


async def test_kv_of_a_stream_is_kept_when_its_client_leaves(group: GroupBuilder) -> None:
    """A resume needs it: nothing is released, and leases that are not renewed expire."""
    here = await group(count=1, transfer={"lease_s": 0.3})
    gate_at(here, 4)
    reader = here.reader()
    await reader.read(0, tokens=4)
    while (await _state(here, 0))["streams"]:
        await asyncio.sleep(0.005)

    await asyncio.sleep(0.4)

    updates = [update for one in here.system.instances.values() for update in one.lease_updates]
    assert [name for update in updates for name in update.release] == []


async def _state(group: MultiProxyCluster, proxy: int) -> Any:
    async with group.http.get(
        f"http://127.0.0.1:{group.proxy(proxy).admin_port}/kvrs/v1/state"
    ) as response:
        return msgspec.json.decode(await response.read())


async def test_tokens_beyond_the_mirror_are_regenerated_and_dropped(group: GroupBuilder) -> None:
    """The client had more than the mirror: exact engines generate the same again."""
    here = await group()
    gate, reader = gate_at(here, 6), here.reader()
    await reader.read(0, tokens=6)
    mirror = here.mirror(1)

    await here.kill(0)
    del mirror.book.records[record_key("k")].events[2:]
    gate.set()
    await reader.read_all(1)

    assert text_in(reader) == WANTED


async def test_a_resume_that_cannot_be_exact_is_an_error(group: GroupBuilder, model: str) -> None:
    """A plain engine draws other random numbers."""
    here = await group(prepare=plain, model=model)
    gate_at(here, 6)
    reader = here.reader(temperature=1, seed=3)
    await reader.read(0, tokens=6)
    mirror = here.mirror(1)

    await here.kill(0)
    del mirror.book.records[record_key("k")].events[2:]

    assert await reader.read(1) == 409
    assert reader.errors == ["inexact"]


@pytest.mark.parametrize(("stop", "status"), [("#", 200), ("##", 409)])
async def test_text_held_back_for_a_stop_string_is_not_lost(
    group: GroupBuilder, model: str, stop: str, status: int
) -> None:
    """A plain engine that makes tokens again holds other characters back, so that text of dropped
    events might be lost; for a single character none holds any back.
    """
    here = await group(prepare=plain, model=model)
    gate, reader = gate_at(here, 6), here.reader(stop=[stop])
    await reader.read(0, tokens=6)
    await until_mirrored(here, 6)

    await here.kill(0)
    record = here.book(1).records[record_key("k")]
    del record.events[2:]
    text = "".join(map(text_of, expected_ids([1, 2, 3], 2)))
    record.state = msgspec.structs.replace(record.state, text_sent=len(text))
    gate.set()

    assert await reader.read(1) == status
    assert reader.errors == ([] if status == 200 else ["inexact"])


async def test_with_sync_the_client_never_has_more_than_the_mirror(group: GroupBuilder) -> None:
    """No token is sent before a peer has it."""
    here = await group(proxy={"mirror": "sync"})
    gate_at(here, 6)
    reader = here.reader()
    mirror = here.mirror(1)
    reading = asyncio.create_task(reader.read(0))

    while len(reader.events) < 6:
        record = mirror.book.records.get(record_key("k"))
        assert len(reader.events) <= (0 if record is None else len(record.events))
        await asyncio.sleep(0)
    reading.cancel()


async def test_a_dead_mirror_is_replaced_and_gets_the_whole_record(group: GroupBuilder) -> None:
    """After any kills, one after the other, while one proxy with the record is left."""
    here = await group(count=3)
    gate, reader = gate_at(here, 4), here.reader()
    reading = asyncio.create_task(reader.read(0))
    while len(reader.events) < 4:
        await asyncio.sleep(0.005)
    owner = here.mirror(0)
    first = owner.book.records[record_key("k")].peer
    assert first is not None

    await here.kill(int(first[-1]))
    other = 3 - int(first[-1])
    mirror = here.mirror(other)
    async with asyncio.timeout(WITHIN_S):
        while (
            record_key("k") not in mirror.book.records
            or len(mirror.book.records[record_key("k")].events) < 4
        ):
            await asyncio.sleep(0.005)
    await here.kill(0)
    await reading
    gate.set()
    await reader.read(other)

    assert (text_in(reader), reader.done) == (WANTED, True)


async def test_a_draining_proxy_hands_its_streams_over(group: GroupBuilder) -> None:
    """On SIGTERM keyed streams end with a code of their own and are resumed elsewhere; others run
    to their end.
    """
    here = await group(proxy={"drain_s": WITHIN_S})
    gate, reader = gate_at(here, 4), here.reader()
    reading = asyncio.create_task(reader.read(0))
    plain = asyncio.create_task(here.http.post(f"{here.url(0)}/v1/completions", json=reader.fields))
    while len(reader.events) < 4 or sum(one.running for one in here.system.instances.values()) < 2:
        await asyncio.sleep(0.005)

    draining = asyncio.create_task(here.proxy(0).drain())
    async with asyncio.timeout(WITHIN_S):
        await reading
    ready = await here.http.get(f"{here.url(0)}/readyz")
    refused = await here.reader("other").read(0)
    gate.set()
    status = await reader.read(1)
    response = await plain
    await draining

    assert (reader.errors, status, text_in(reader)) == (["handed_over"], 200, WANTED)
    assert (ready.status, refused, response.status) == (503, 503, 200)
    assert msgspec.json.decode(await response.read())["choices"][0]["text"] == WANTED


@pytest.mark.parametrize(
    ("headers", "fields", "param", "says"),
    [
        ({"Idempotency-Key": ""}, {}, "Idempotency-Key", "got 0 characters"),
        ({"Idempotency-Key": "x" * 256}, {}, "Idempotency-Key", "got 256 characters"),
        ({"Last-Event-ID": "ab:1"}, {}, "Last-Event-ID", "needs the Idempotency-Key"),
        (
            {"Idempotency-Key": "k", "Last-Event-ID": "ab"},
            {"stream": True},
            "Last-Event-ID",
            "allowed: the id of a streamed event, STREAM:NUMBER",
        ),
        (
            {"Idempotency-Key": "k", "Last-Event-ID": "ab:1"},
            {},
            "Last-Event-ID",
            "needs stream=true",
        ),
        ({"Idempotency-Key": "k"}, {"n": 2}, "n", "got 2"),
        ({"Idempotency-Key": "k"}, {"prompt": ["a", "b"]}, "prompt", "allows one prompt"),
    ],
)
async def test_a_key_that_cannot_be_honoured_is_rejected(
    group: GroupBuilder, headers: dict[str, str], fields: dict[str, Any], param: str, says: str
) -> None:
    """No header is ignored silently."""
    here = await group(count=1)
    asked = {"prompt": [1], "max_tokens": 2, "temperature": 0} | fields

    async with here.http.post(
        f"{here.url(0)}/v1/completions", json=asked, headers=headers
    ) as response:
        error = msgspec.json.decode(await response.read())["error"]

    assert (response.status, error["param"]) == (400, param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        (
            {
                "prompt": [1, 2, 3],
                "logprobs": 1,
                "return_token_ids": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            6,
        ),
        ({"prompt": [1, 2, 3], "temperature": 1, "seed": 5, "max_tokens": 30}, 20),
        ({"prompt": [1, 2, 3], "stop": ["zzz", text_of(expected_ids([1, 2, 3], 8)[-1])]}, 6),
        (
            {
                "prompt": None,
                "messages": [{"role": "user", "content": "play thought/tokens."}],
                "logprobs": True,
                "max_tokens": 24,
            },
            7,
        ),
    ],
)
async def test_a_client_that_has_a_part_of_an_event_gets_the_rest_of_it(
    group: GroupBuilder, model: str, fields: dict[str, Any], tokens: int
) -> None:
    """Tokens that came in small events are regenerated in large ones with other boundaries, without
    a visible difference in text, ids and logprobs.
    """
    here = await group(model=model)
    whole = here.reader("whole", **fields)
    await whole.read(0)
    for n, pieces in enumerate((3, 4, 30)):
        gate = gate_at(here, tokens)
        reader = here.reader(f"cut{n}", **fields)
        reading = asyncio.create_task(reader.read(0, tokens=tokens))
        await reading
        mirror = here.mirror(1)
        await here.kill(0)
        del mirror.book.records[record_key(reader.key)].events[2:]
        here.system.script.tokens_per_event = pieces
        gate.set()

        await reader.read_all(1)

        assert joined(reader) == joined(whole)
        assert all(has == counted for has, counted in counts(reader))
        assert reader.errors == []
        here.system.script.tokens_per_event, here.system.script.gate = 1, None
        await here.start(0)
        await here.know_each_other()


def counts(reader: Reader) -> Iterator[tuple[int, int]]:
    """At each event with token ids and counts: the ids so far, and what it says of them."""
    has = 0
    for event in map(msgspec.json.decode, reader.events):
        for choice in event["choices"]:
            has += len(choice.get("token_ids", ()))
            if "usage" in event and "token_ids" in choice:
                yield has, event["usage"]["completion_tokens"]


def joined(reader: Reader) -> dict[str, Any]:
    """The events of one choice, joined."""
    joined_fields: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        match value:
            case None:
                pass
            case dict():
                for inner, each in value.items():
                    add(f"{name}.{inner}", each)
            case _:
                joined_fields[name] = (
                    joined_fields[name] + value if name in joined_fields else value
                )

    for event in reader.events:
        for choice in msgspec.json.decode(event)["choices"]:
            for name, value in choice.items():
                if name != "index":
                    add(name, value)
    return joined_fields
