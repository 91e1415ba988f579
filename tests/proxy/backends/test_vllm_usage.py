"""Details of usage that an engine gives: passed on where one engine has seen the whole stream."""

import json
from typing import Any

import pytest

from kvrs.ids import StreamId
from kvrs.protocol.openai.chunks import (
    NO_FACTS,
    EngineFacts,
    facts_of,
    facts_together,
    sse,
    usage_of,
    with_facts,
)
from kvrs.proxy.streams.relay import Relay
from kvrs.proxy.streams.whole_answers import WholeClient
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs_testkit.answered import AnsweredAttempt
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import Arithmetic, Sampler
from kvrs_testkit.scripted_vllm import BESIDE_USAGE
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Builder, Servers, Vllms

COMPLETION: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": TOKENS,
    "temperature": 0,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
IMAGE = {"multimodal_tokens": {"image": 2}}


def saying_more(servers: Servers) -> None:
    for server in servers.values():
        server.says_more = True


async def last_of(
    system: Vllms, fields: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """The whole answer, or the event that has the usage."""
    path = "chat/completions" if "messages" in fields else "completions"
    async with system.http.post(
        f"{system.url}/v1/{path}", json=fields, headers=headers
    ) as response:
        body = await response.read()
    assert response.status == 200, body
    answer: dict[str, Any]
    if not fields.get("stream"):
        answer = json.loads(body)
    else:
        answer = json.loads(events_of(body)[-3].split(b"data: ", 1)[1])
        assert answer["choices"] == []
    return answer


@pytest.mark.parametrize("asked", [COMPLETION, CHAT])
@pytest.mark.parametrize("form", [{}, STREAMED])
@pytest.mark.parametrize("n", [1, 2])
async def test_details_of_whole_streams_are_passed_on(
    vllms: Builder, asked: dict[str, Any], form: dict[str, Any], n: int
) -> None:
    """Those of the output are added over the choices; the prompt, which they share, counts once.
    Counts and cached tokens are the proxy's own.
    """
    system = await vllms(prepare=saying_more)

    answer = await last_of(system, asked | form | {"n": n})

    usage = answer["usage"]
    assert usage["completion_tokens"] == n * TOKENS
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": n * TOKENS,
        "drafted": {"tokens": n},
    }
    assert {**usage["prompt_tokens_details"], "cached_tokens": 0} == {**IMAGE, "cached_tokens": 0}
    assert usage["units"] == 3 * n
    assert answer["system_fingerprint"] == BESIDE_USAGE["system_fingerprint"]
    assert answer["metrics"] == BESIDE_USAGE["metrics"]
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize("form", [{}, STREAMED])
@pytest.mark.parametrize("n", [1, 2])
async def test_details_are_left_out_after_a_cut(
    vllms: Builder, form: dict[str, Any], n: int
) -> None:
    """The second engine does not know how much of the first one's output was reasoning."""
    system = await vllms(prepare=saying_more)
    system.shared.faults = {3: Fault.RESET}

    answer = await last_of(system, COMPLETION | form | {"n": n})

    usage = answer["usage"]
    assert usage["completion_tokens"] == n * TOKENS
    assert usage["total_tokens"] == n * TOKENS + len(PROMPT)
    assert {"completion_tokens_details", "units"}.isdisjoint(usage)
    assert "multimodal_tokens" not in usage.get("prompt_tokens_details", {})
    assert {"system_fingerprint", "metrics"}.isdisjoint(answer)


async def test_an_engine_that_makes_all_output_again_has_seen_the_whole_stream(
    vllms: Builder,
) -> None:
    """Its details are of all of it."""

    def prepare(servers: Servers) -> None:
        saying_more(servers)
        for name in ("d0", "d1"):
            servers[name].replays = True
            servers[name].arithmetic = Arithmetic(sampler=Sampler.GENERATOR)

    system = await vllms(prepare=prepare)
    system.shared.faults = {3: Fault.RESET}

    asked = COMPLETION | STREAMED | {"temperature": 0.8, "seed": 7}
    usage = (await last_of(system, asked))["usage"]

    assert [row["option"] for row in (await system.state())["recoveries"]] == ["replay"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == TOKENS


@pytest.mark.parametrize("form", [{}, STREAMED])
async def test_an_answer_that_is_given_again_has_the_same_usage(
    vllms: Builder, form: dict[str, Any]
) -> None:
    """Its record has the details too."""
    system = await vllms(prepare=saying_more)
    key = {"Idempotency-Key": "key-1"}

    first = await last_of(system, COMPLETION | form, key)
    second = await last_of(system, COMPLETION | form, key)

    assert first["usage"]["completion_tokens_details"]["reasoning_tokens"] == TOKENS
    assert second["usage"] == first["usage"]
    assert second["system_fingerprint"] == first["system_fingerprint"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_response_has_the_reasoning_tokens_of_its_chat(
    vllms: Builder, stream: bool, is_cut: bool
) -> None:
    """And 0 where they are not known."""
    system = await vllms(prepare=saying_more)
    system.shared.prompt_tokens = len("user: a\n")
    system.shared.faults = {3: Fault.RESET} if is_cut else {}
    asked = {"input": "a", "max_output_tokens": TOKENS, "temperature": 0, "stream": stream}

    async with system.http.post(f"{system.url}/v1/responses", json=asked) as response:
        body = await response.read()
    if stream:
        body = json.dumps(
            json.loads(events_of(body)[-2].split(b"data: ", 1)[1])["response"]
        ).encode()
    answer = json.loads(body)

    usage = answer["usage"]
    assert usage["output_tokens"] == TOKENS
    assert usage["output_tokens_details"]["reasoning_tokens"] == (0 if is_cut else TOKENS)
    assert ("multimodal_tokens" in usage["input_tokens_details"]) is not is_cut
    async with system.http.get(f"{system.url}/v1/responses/{answer['id']}") as response:
        assert (await response.json())["usage"] == usage


async def test_a_client_that_asks_for_no_usage_costs_its_engine_none(vllms: Builder) -> None:
    """A stream without it has no event of it."""
    system = await vllms(prepare=saying_more)

    await system.ids()

    decodes = [body for name in ("d0", "d1") for body in system.servers[name].bodies]
    assert all("stream_options" not in body for body in decodes)


@pytest.mark.parametrize("is_later", [False, True])
def test_an_engine_that_goes_on_by_itself_knows_its_own_part_only(is_later: bool) -> None:
    """Its details are not those of the stream."""
    head = {"id": "a", "created": 1, "model": "m"}
    choice = {"index": 0, "text": "b", "finish_reason": "stop", "token_ids": [5]}
    counts = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    events = [
        head | {"choices": [choice | {"prompt_token_ids": [1]}]},
        head | {"choices": [], "usage": counts | {"completion_tokens_details": {"r": 1}}},
    ]
    body = json.dumps(COMPLETION | STREAMED).encode()
    journal = Journal(StreamId("1"), read(COMPLETIONS, body), 0.0, wants_usage=True, attempt=1)
    if is_later:
        journal.output_ids.append(4)
        journal.prompt_ids, journal.head = [1], b'{"id":"a","created":1,"model":"m"'
    relay = Relay(journal, WholeClient(), AnsweredAttempt())

    for event in events:
        relay.feed(sse(json.dumps(event, separators=(",", ":")).encode()))

    assert (journal.facts is None) is is_later


def test_what_cannot_be_added_is_left_out() -> None:
    """Where choices differ in it."""
    a, b = (
        EngineFacts({"x": "a", "y": 1, "z": True}, {"metrics": 1, "system_fingerprint": "f"}),
        (EngineFacts({"x": "b", "y": 2.5, "z": True}, {"metrics": 2, "system_fingerprint": "f"})),
    )

    assert facts_together([(a, True), (b, False)]) == EngineFacts(
        {"y": 3.5, "z": True}, {"system_fingerprint": "f"}
    )
    assert facts_together([(a, True), (None, False)]) == NO_FACTS
    assert facts_together([(a, True)]) == a


def test_prompts_of_one_request_are_counted_each() -> None:
    """Once, whatever the number of their choices."""
    one = EngineFacts({"prompt_tokens_details": IMAGE, "completion_tokens_details": {"r": 1}})

    both = facts_together([(one, True), (one, False), (one, True), (one, False)])

    assert both.details == {
        "prompt_tokens_details": {"multimodal_tokens": {"image": 4}},
        "completion_tokens_details": {"r": 4},
    }


def test_counts_and_cached_tokens_are_the_proxy_s_own() -> None:
    """Whatever the engine says; and details that are no objects are dropped."""
    usage: dict[str, Any] = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 9)
    usage |= {"a": None, "completion_tokens_details": 7}
    usage["prompt_tokens_details"] = {"cached_tokens": 8, "x": 1}

    facts = facts_of({"usage": usage, "system_fingerprint": None})

    assert facts == EngineFacts({"prompt_tokens_details": {"x": 1}})
    assert with_facts(usage_of(3, 2, 1), facts) == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"x": 1, "cached_tokens": 1},
    }
