"""Requests that a healthy vLLM answers in an unusual way: none of them counts against an instance,
and none is computed more often than it takes to know whose fault it is.
"""

import asyncio
import json
from typing import Any

import pytest

from kvrs_testkit.odd_vllm import Oddity, OddVllm, make_odd
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Builder, Servers, Vllms

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": TOKENS,
    "temperature": 0,
}
PICTURE: dict[str, Any] = CHAT | {
    "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y"}}]}
    ]
}


async def odd_vllms(vllms: Builder, odd: dict[str, Any], **settings: Any) -> tuple[Vllms, Oddity]:
    made = list[Oddity]()

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.passed = ("/v1/embeddings",)
        made.append(make_odd(servers, **odd))

    system = await vllms(prepare=prepare, **settings)
    made[0].calls.clear()
    return system, made[0]


async def blamed(system: Vllms) -> list[str]:
    """The instances of which an answer counts as a failure, or that get nothing new."""
    rows = (await system.state())["instances"]
    return [
        row["id"]
        for row in rows
        if row["answers"]["failures_in_a_row"]
        or row["answers"]["ejected"]
        or row["answers"]["paused_s"]
    ]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("stage", "is_event"), [("prefill", False), ("decode", False), ("decode", True)]
)
async def test_an_error_that_two_instances_give_reaches_the_client(
    vllms: Builder, stage: str, *, streams: bool, is_event: bool
) -> None:
    """With its status and message, and without a third try; openai's clients do not repeat it."""
    odd = {"status": 500, "stage": stage, "is_event": is_event}
    system, seen = await odd_vllms(vllms, odd)

    url = f"{system.url}/v1/chat/completions"
    request = (PICTURE if stage == "prefill" else CHAT) | {"stream": streams}
    async with system.http.post(url, json=request) as answer:
        status, headers, body = answer.status, answer.headers, await answer.json()

    assert (status, headers.get("X-Should-Retry")) == (500, "false")
    assert "Forbidden" in body["error"]["message"]
    assert len([name for name in seen.calls if name[0] == stage[0]]) == 2
    assert await blamed(system) == []


@pytest.mark.parametrize("is_event", [True, False])
@pytest.mark.parametrize(("times", "wanted"), [(2, 200), (3, 500)])
async def test_two_equal_errors_that_name_no_input_are_not_the_requests(
    vllms: Builder, times: int, wanted: int, *, is_event: bool
) -> None:
    """Both servers may have met the same full disk: only a third error goes to the client."""
    message = "[Errno 28] No space left on device"
    odd = {"status": 500, "stage": "decode", "times": times, "message": message}
    system, seen = await odd_vllms(vllms, odd | {"is_event": is_event})

    status, body = await system.ask(CHAT)

    assert status == wanted
    assert (message in body.decode()) is (wanted == 500)
    assert len([name for name in seen.calls if name[0] == "d"]) == 3


async def test_an_error_of_embeddings_that_two_instances_give_reaches_the_client(
    vllms: Builder,
) -> None:
    """A third instance is not asked."""
    system, seen = await odd_vllms(vllms, {"status": 500})

    async with system.http.post(f"{system.url}/v1/embeddings", json={"input": "x"}) as answer:
        status, body = answer.status, await answer.json()

    assert (status, len(seen.calls)) == (500, 2)
    assert "Forbidden" in body["error"]["message"]


@pytest.mark.parametrize("status", [201, 204, 302, 999])
async def test_embeddings_with_another_status_than_of_an_answer_are_502(
    vllms: Builder, status: int
) -> None:
    """Neither a redirect nor a status without a body is passed on."""
    system, _ = await odd_vllms(vllms, {"status": status})

    async with system.http.post(f"{system.url}/v1/embeddings", json={"input": "x"}) as answer:
        answered, body = answer.status, await answer.json()

    assert answered == 502
    assert f"HTTP {status}; allowed: 200, or 400 to 599" in body["error"]["message"]


@pytest.mark.parametrize("reason", ["repetition", "content_filter", "function_call", "tomorrow"])
async def test_an_answer_is_complete_whatever_its_finish_reason_says(
    vllms: Builder, reason: str
) -> None:
    """Also one that a later vLLM adds. It is counted as `other`."""
    system, seen = await odd_vllms(vllms, {"finish": reason})

    streamed = await system.ask(CHAT | {"stream": True})
    whole = await system.ask(CHAT)

    last = json.loads(events_of(streamed[1])[-3][6:])
    assert last["choices"][0]["finish_reason"] == reason
    assert json.loads(whole[1])["choices"][0]["finish_reason"] == reason
    assert len(seen.calls) == 4
    assert await blamed(system) == []
    assert await system.count("kvrs_streams_ended_total", finish_reason="other") == 2


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_the_engine_gave_up_is_not_complete(
    vllms: Builder, reason: str
) -> None:
    """The client never sees it as an end."""
    recovery = {"max_attempts": 2}
    system, _ = await odd_vllms(vllms, {"finish": reason}, policy={"recovery": recovery})

    status, body = await system.ask(CHAT | {"stream": True})

    finishes = [
        choice["finish_reason"]
        for event in events_of(body)
        if event.startswith(b"data: {")
        for choice in json.loads(event[6:]).get("choices", ())
    ]
    assert (status, b"[DONE]" in body, {*finishes}) == (200, False, {None})


async def test_a_stream_without_token_ids_is_served(vllms: Builder) -> None:
    """vLLM sends none with `include_reasoning: false`: no instance is blamed, none asked twice."""
    system, seen = await odd_vllms(vllms, {"hides_ids": True})

    status, streamed = await system.ask(CHAT | {"stream": True, "include_reasoning": False})
    whole = await system.ask(CHAT | {"include_reasoning": False})

    *events, done, _ = events_of(streamed)
    deltas = [json.loads(each[6:])["choices"][0] for each in events]
    text = "".join(each["delta"].get("content") or "" for each in deltas)
    assert (status, done) == (200, b"data: [DONE]")
    assert deltas[-1]["finish_reason"] == "length"
    assert (whole[0], len(seen.calls)) == (200, 4)
    answer = json.loads(whole[1])
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["completion_tokens"] > 0  # By the engine, which alone can count them.
    assert await blamed(system) == []


async def test_a_cut_stream_of_drawn_tokens_without_ids_ends_with_an_error(
    vllms: Builder,
) -> None:
    """Its beginning would be repeated, and no second run generates the same."""
    system, seen = await odd_vllms(vllms, {"hides_ids": True})
    system.shared.pause_s = 0.05
    request = CHAT | {"max_tokens": 400, "stream": True, "include_reasoning": False}
    request["temperature"] = 0.7
    asked = asyncio.create_task(system.ask(request))

    async def is_running() -> bool:
        return any(each.running for each in system.servers.values())

    await system.until(is_running)
    decoding = next(each for each in system.servers.values() if each.running)
    live = next(iter(system.proxy.parts.driver.streams.values()))

    async def has_text() -> bool:
        return live.journal.lacks_ids

    await system.until(has_text)
    await decoding.kill()
    _, body = await asked

    assert b"[DONE]" not in body
    assert b"token_ids" in body
    assert len(seen.calls) == 2


async def test_a_prompt_that_takes_longer_than_between_two_tokens_is_computed_once(
    vllms: Builder,
) -> None:
    """The prediction is a guess, and no sign comes of a prefill before its end."""
    proxy = {"token_gap_s": 0.3}
    profiles = {"prefill": "llama-3.1-8b-h100-vllm-tp1"}
    system, seen = await odd_vllms(vllms, {"takes_s": 0.9}, proxy=proxy, profiles=profiles)

    ids = await system.ids()

    assert ids == expected_ids(PROMPT, TOKENS)
    assert [name[0] for name in seen.calls] == ["p", "d"]


async def test_embeddings_may_take_any_time(vllms: Builder) -> None:
    """Nothing predicts how long: silence alone repeats none of them."""
    system, seen = await odd_vllms(vllms, {"takes_s": 0.9}, proxy={"token_gap_s": 0.1})

    async with system.http.post(f"{system.url}/v1/embeddings", json={"input": "x"}) as answer:
        assert answer.status == 200

    assert len(seen.calls) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_request_has_a_time_limit_where_one_is_set(vllms: Builder, path: str) -> None:
    """Then it gets 504, and its call is ended."""
    proxy = {"token_gap_s": 0.1, "request_timeout_s": 0.4}
    system, seen = await odd_vllms(vllms, {"takes_s": 30.0}, proxy=proxy)
    fields = {"prompt": PROMPT, "input": "x"}
    wanted = {"prompt": "prompt", "input": "input"}["prompt" if "comp" in path else "input"]

    async with system.http.post(system.url + path, json={wanted: fields[wanted]}) as answer:
        status, body = answer.status, await answer.json()

    assert (status, body["error"]["code"]) == (504, "timeout")
    assert "proxy.request_timeout_s" in body["error"]["message"]
    assert len(seen.calls) >= 1


async def test_a_server_of_the_kit_is_of_the_odd_kind(vllms: Builder) -> None:
    """Else these tests would say nothing."""
    system, _ = await odd_vllms(vllms, {})

    assert all(isinstance(each, OddVllm) for each in system.servers.values())
