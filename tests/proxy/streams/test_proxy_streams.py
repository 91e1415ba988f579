"""A client sees the same bytes of a stream, whatever happens behind the proxy."""

import asyncio
import re

import msgspec
import pytest

from kvrs.protocol.openai.requests import CompletionRequest
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import BREAKS, Fault, Script
from kvrs_testkit.scripted_model import expected_ids, text_of
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder

PROMPT = [5, 6, 7]
TOKENS = 6


def normal(body: bytes) -> bytes:
    """A stream without what differs between any two streams: its id, its time, and which instance
    was first.
    """
    body = re.sub(rb'"id":"cmpl-[0-9a-f]{32}"', b'"id":"cmpl-"', body)
    return re.sub(rb'"created":\d+', b'"created":0', body)


def heads(body: bytes) -> set[bytes]:
    return set(re.findall(rb'data: (\{"id":"[^"]*","created":\d+,"model":"[^"]*"),"choices"', body))


async def stream(system: ProxyCluster, **fields: object) -> bytes:
    asked = {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, body = await system.complete(**(asked | fields))
    assert status == 200, body
    return body


@pytest.mark.parametrize("fault", [*BREAKS, Fault.UNAVAILABLE, Fault.CONFLICT])
async def test_every_cut_point_gives_the_same_bytes(
    build: ProxyClusterBuilder, fault: Fault
) -> None:
    """The bytes of a stream do not show that there was a recovery."""
    system = await build()
    undisturbed = await stream(system)

    for position in range(TOKENS):
        system.script.faults = {position: fault}
        disturbed = await stream(system)

        assert normal(disturbed) == normal(undisturbed), position
        assert len(heads(disturbed)) == 1, "id, time and model stay the same across the seam"
        assert not system.script.faults, "the fault happened"


async def test_undisturbed_bytes_are_the_engine_s_without_ids(build: ProxyClusterBuilder) -> None:
    """The healthy path passes bytes on."""
    system = await build(pairs=1)

    body = await stream(system)

    events = events_of(body)
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [msgspec.json.decode(event[6:]) for event in events[:-2]]
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == [
        text_of(i) for i in expected_ids(PROMPT, TOKENS)
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (
        TOKENS - 1
    ) + ["length"]
    assert all("token_ids" not in chunk["choices"][0] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": TOKENS,
        "total_tokens": 3 + TOKENS,
    }


async def test_a_postponed_report_is_made_in_the_next_turn_of_the_loop(
    build: ProxyClusterBuilder,
) -> None:
    """Its decisions do not wait for the next event."""
    control = (await build(pairs=1)).proxy.parts.driver.control
    made: list[float] = []

    control.postpone(made.append, 1.0)
    assert made == []
    await asyncio.sleep(0)

    assert made == [1.0]


async def test_ids_are_passed_on_to_a_client_that_asks(build: ProxyClusterBuilder) -> None:
    """`return_token_ids` survives a recovery without a gap or a repetition."""
    system = await build()
    system.script.faults = {2: Fault.RESET, 4: Fault.ERROR}

    body = await stream(system, return_token_ids=True, stream_options=None)

    chunks = [msgspec.json.decode(event[6:]) for event in events_of(body)[:-2]]
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == expected_ids(
        PROMPT, TOKENS
    )


@pytest.mark.parametrize("fault", BREAKS)
async def test_a_break_after_the_finish_is_completed_by_the_proxy(
    build: ProxyClusterBuilder, fault: Fault
) -> None:
    """All text was delivered: only the formal end is missing, and needs no engine."""
    system = await build(pairs=1)
    undisturbed = await stream(system)
    system.script.finish_faults = [fault]

    assert normal(await stream(system)) == normal(undisturbed)
    assert len(system.instances["d0"].completions) == 2, "no second attempt"


@pytest.mark.parametrize("fault", BREAKS)
@pytest.mark.parametrize("has_tokenizer", [False, True])
async def test_a_break_between_the_last_token_and_its_finish_loses_no_text(
    build: ProxyClusterBuilder, fault: Fault, has_tokenizer: bool, model: str
) -> None:
    """Text that was held back comes from the proxy's own text machine, or else from an attempt that
    adds nothing but the end.
    """
    system = await build(model=model if has_tokenizer else None)
    system.script.separate_finish = True
    asked = {"prompt": "play stops.", "stop": ["three STOP fourteen"], "max_tokens": 13}
    undisturbed = await stream(system, **asked)
    system.script.finish_faults = [fault]

    assert normal(await stream(system, **asked)) == normal(undisturbed)
    decodes = sum(len(system.instances[name].completions) for name in ("d0", "d1"))
    assert decodes == (2 if has_tokenizer else 3)
    assert len((await system.state())["recoveries"]) == (0 if has_tokenizer else 1)


async def test_events_of_several_tokens_are_counted_by_ids(build: ProxyClusterBuilder) -> None:
    """A chunk is not a token."""
    system = await build()
    system.script.tokens_per_event = 4
    system.script.faults = {4: Fault.RESET}

    body = await stream(system)

    usage = msgspec.json.decode(events_of(body)[-3][6:])["usage"]
    assert usage["completion_tokens"] == TOKENS
    texts = "".join(text_of(i) for i in expected_ids(PROMPT, TOKENS))
    assert (
        "".join(
            c["choices"][0]["text"]
            for c in map(msgspec.json.decode, _payloads(body))
            if c["choices"]
        )
        == texts
    )


EACH_USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("tokens_per_event", [1, 2])
async def test_every_event_counts_all_tokens_that_the_client_has(
    build: ProxyClusterBuilder, tokens_per_event: int
) -> None:
    """Also those of the attempts before; the last event alone has its own form."""
    system = await build()
    system.script.tokens_per_event = tokens_per_event
    for faults in ({}, {2: Fault.RESET, 4: Fault.ERROR}):
        system.script.faults = dict(faults)

        body = await stream(system, stream_options=EACH_USAGE, return_token_ids=True)

        *events, last = map(msgspec.json.decode, _payloads(body))
        had = 0
        for event in events:
            had += len(event["choices"][0]["token_ids"])
            counts = event["usage"]
            assert (counts["prompt_tokens"], counts["completion_tokens"]) == (len(PROMPT), had)
            assert counts["total_tokens"] == len(PROMPT) + had
        assert (had, last["choices"]) == (TOKENS, [])
        assert last["usage"]["completion_tokens"] == TOKENS
        assert body.count(b'"usage"') == len(events) + 1
        assert not system.script.faults


async def test_the_counts_of_an_event_are_those_of_its_choice(build: ProxyClusterBuilder) -> None:
    """Those at the end are of all choices; an echo has no tokens of the output."""
    system = await build(pairs=1)

    body = await stream(system, prompt="ab", n=2, echo=True, stream_options=EACH_USAGE)

    *events, last = map(msgspec.json.decode, _payloads(body))
    for index in range(2):
        counts = [
            event["usage"]["completion_tokens"]
            for event in events
            if event["choices"][0]["index"] == index
        ]
        assert counts == [*range(TOKENS + 1)]
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}
    assert last["usage"]["completion_tokens"] == 2 * TOKENS


async def test_an_early_stop_survives_a_recovery(build: ProxyClusterBuilder) -> None:
    """The finish reason is the engine's own."""
    system = await build()
    system.script.stop_after = 4
    system.script.faults = {3: Fault.CUT}

    body = await stream(system)

    assert body.count(b'"finish_reason":"stop"') == 1
    assert b'"completion_tokens":4' in body


async def test_a_text_prompt_is_tokenised_once_and_continued_by_ids(
    build: ProxyClusterBuilder,
) -> None:
    """Text goes to prefill; every later call carries ids."""
    system = await build()
    system.script.faults = {2: Fault.RESET}

    await stream(system, prompt="héllo")

    prompt = list("héllo".encode())
    decodes = [r for i in ("d0", "d1") for r in system.instances[i].completions]
    decodes.sort(key=lambda request: request.kvrs.attempt if request.kvrs else 0)
    prompts = [request.prompt for request in decodes if isinstance(request, CompletionRequest)]
    assert prompts == [prompt, prompt + expected_ids(prompt, 2)]
    assert [request.kvrs.prompt_tokens for request in decodes if request.kvrs] == [len(prompt)] * 2


async def test_several_breaks_in_one_stream_lose_nothing(build: ProxyClusterBuilder) -> None:
    """A recovery can itself be recovered from."""
    system = await build(pairs=3)
    undisturbed = await stream(system)
    system.script.faults = dict(
        enumerate([Fault.RESET, Fault.ERROR, Fault.CUT, Fault.EOF, Fault.DONE_ONLY])
    )

    assert normal(await stream(system)) == normal(undisturbed)
    assert not system.script.faults


async def test_a_stream_in_a_long_queue_is_not_given_up(build: ProxyClusterBuilder) -> None:
    """An instance that is full and gets on with its streams is not silent, however long the others
    have to wait.

    One that has a line and gets on with nothing hangs, and is given up.
    """
    system = await build(
        pairs=1, proxy={"token_gap_s": 0.5}, policy={"recovery": {"max_attempts": 1}}
    )
    decode = system.instances["d0"]
    decode.queued = 1
    system.script.pause_s = 0.05
    busy = asyncio.create_task(system.complete(prompt=PROMPT, max_tokens=40, temperature=0))
    await system.until_streams_hold(2)
    system.script.faults[0] = Fault.HANG
    waiting = asyncio.create_task(system.complete(prompt=PROMPT, max_tokens=TOKENS, temperature=0))

    assert (await busy)[0] == 200

    assert not waiting.done()
    status, body = await waiting
    assert status == 502
    assert b"silent" in body


async def test_a_whole_answer_recovers_as_a_stream_does(build: ProxyClusterBuilder) -> None:
    """Requests without `stream` are streamed behind the proxy."""
    system = await build()
    system.script.faults = {1: Fault.RESET, 4: Fault.ERROR}

    status, body = await system.complete(
        prompt=PROMPT, max_tokens=TOKENS, temperature=0, return_token_ids=True
    )

    assert status == 200
    answer = msgspec.json.decode(body)
    ids = expected_ids(PROMPT, TOKENS)
    assert answer["choices"] == [
        {
            "text": "".join(map(text_of, ids)),
            "index": 0,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_token_ids": PROMPT,
            "token_ids": ids,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": TOKENS,
        "total_tokens": 3 + TOKENS,
    }


async def test_a_sampled_stream_keeps_one_seed(build: ProxyClusterBuilder) -> None:
    """Without the client's seed the proxy draws one, so that every attempt samples alike."""
    system = await build()
    system.script.faults = {2: Fault.RESET}

    await stream(system, temperature=1.0)

    seeds = [r.seed for i in ("d0", "d1") for r in system.instances[i].completions]
    assert len(seeds) == 2
    assert seeds[0] is not None
    assert seeds[0] == seeds[1]


async def test_one_instance_that_does_both_serves_alone(build: ProxyClusterBuilder) -> None:
    """Role `both` needs no pair; the ids of a text prompt still come from a prefill call."""
    from kvrs.protocol.instance import Role

    system = await build(pairs=1, roles=(("b", Role.BOTH),))
    system.script.faults = {3: Fault.RESET}

    body = await stream(system, prompt="abc")

    assert b'"completion_tokens":6' in body
    assert b'"prompt_tokens":3' in body


def test_the_script_s_oracle_is_sensitive_to_a_lost_token() -> None:
    """The tests above can only fail for a reason: a continuation from a wrong history differs at
    once.
    """
    ids = expected_ids(PROMPT, 5)

    assert expected_ids([*PROMPT, *ids[:2], *ids[3:4]], 1) != ids[4:5]
    assert Script().tokens_per_event == 1


def _payloads(body: bytes) -> list[bytes]:
    return [event[6:] for event in events_of(body) if event and event != b"data: [DONE]"]
