"""Whole answers to chats that vLLM parses: they are those of its parser of whole answers."""

import asyncio
import json
from typing import Any

import pytest

from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_vllm import BESIDE_USAGE
from kvrs_testkit.vllm_cluster import TOKENS, Builder, Servers, Vllms

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
MESSAGE = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": None}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "b c d"}],
    "max_tokens": TOKENS,
    "temperature": 0,
}
ASKED = CHAT | {"tools": TOOLS}
PROMPT_TOKENS = 12  # As the scripted template renders it.


def parsing(servers: Servers) -> None:
    servers["p0"].script.prompt_tokens = PROMPT_TOKENS
    for name in ("d0", "d1"):
        servers[name].message, servers[name].finish_reason = MESSAGE, "tool_calls"


async def answer(system: Vllms, **fields: Any) -> Any:
    status, body = await system.ask(ASKED | fields)
    assert status == 200, body
    return json.loads(body)


def asked_at(system: Vllms, name: str) -> list[bool]:
    """Return of each request that the server got whether it asks for a stream."""
    return [body["stream"] for body in system.servers[name].bodies]


async def test_a_whole_answer_with_tools_is_that_of_the_engines_own_parser(vllms: Builder) -> None:
    """Its message as it came; the prompt is prefilled and handed over as that of a stream."""
    system = await vllms(parsing)

    found = await answer(system)

    (choice,) = found["choices"]
    assert choice["message"] == MESSAGE
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("tool_calls", 0, None)
    assert "token_ids" not in choice
    assert (found["object"], found["id"], found["created"]) == ("chat.completion", "chatcmpl-x", 7)
    assert found["usage"]["completion_tokens"] == TOKENS
    assert found["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert (asked_at(system, "d0"), system.servers["d0"].pulled) == ([False], 1)


async def test_details_of_the_usage_are_passed_on(vllms: Builder) -> None:
    def prepare(servers: Servers) -> None:
        parsing(servers)
        for server in servers.values():
            server.says_more = True

    system = await vllms(prepare)

    found = await answer(system)

    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == TOKENS
    assert found["system_fingerprint"] == BESIDE_USAGE["system_fingerprint"]


async def test_tokens_are_counted_by_an_engine_that_gives_no_ids(vllms: Builder) -> None:
    """Requests with `include_reasoning: false` get none."""

    def prepare(servers: Servers) -> None:
        parsing(servers)
        for server in servers.values():
            server.hides_ids = True

    system = await vllms(prepare)

    found = await answer(system)

    assert found["choices"][0]["message"] == MESSAGE
    assert found["usage"]["completion_tokens"] == TOKENS
    assert found["usage"]["prompt_tokens"] == PROMPT_TOKENS


async def test_ids_are_given_to_those_who_ask_for_them(vllms: Builder) -> None:
    system = await vllms(parsing)

    found = await answer(system, return_token_ids=True)

    assert len(found["choices"][0]["token_ids"]) == TOKENS
    assert len(found["prompt_token_ids"]) == PROMPT_TOKENS


@pytest.mark.parametrize("position", [0, 3, 5])
async def test_after_a_death_all_of_it_is_asked_for_again(vllms: Builder, position: int) -> None:
    """Nothing of it is known, so nothing of it can be wrong; and it counts once."""
    system = await vllms(parsing)
    system.shared.faults = {position: Fault.RESET}

    found = await answer(system)

    assert found["choices"][0]["message"] == MESSAGE
    assert found["usage"]["completion_tokens"] == TOKENS
    assert asked_at(system, "d0") + asked_at(system, "d1") == [False, False]
    bodies = system.servers["d0"].bodies + system.servers["d1"].bodies
    assert [body["max_tokens"] for body in bodies] == [TOKENS, TOKENS]


async def test_an_answer_that_the_engine_did_not_complete_is_asked_for_elsewhere(
    vllms: Builder,
) -> None:
    def prepare(servers: Servers) -> None:
        parsing(servers)
        servers["d0"].finish_reason = "abort"

    system = await vllms(prepare)

    found = await answer(system)

    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert await system.count("kvrs_attempts_failed_total", worker="d0") == 1


async def test_each_of_several_choices_is_an_answer(vllms: Builder) -> None:
    system = await vllms(parsing)

    found = await answer(system, n=2)

    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert [choice["message"] for choice in found["choices"]] == [MESSAGE, MESSAGE]
    assert found["usage"]["completion_tokens"] == 2 * TOKENS
    assert found["usage"]["prompt_tokens"] == PROMPT_TOKENS


async def test_what_is_not_parsed_or_not_whole_is_streamed(vllms: Builder) -> None:
    """By the engine, so that a recovery goes on where it was cut. Also with a key, whose stream
    another proxy may go on with.
    """
    system = await vllms(parsing)

    await system.ask(CHAT)
    await system.ask(ASKED | {"tool_choice": "none"})
    await system.ask(ASKED | {"stream": True})
    await system.ask(ASKED, {"Idempotency-Key": "k"})

    assert asked_at(system, "d0") + asked_at(system, "d1") == [True] * 4


async def test_chats_of_an_engine_that_parses_reasoning_are_asked_for_whole(vllms: Builder) -> None:
    """Once a stream has shown that it does."""

    def prepare(servers: Servers) -> None:
        for name in ("d0", "d1"):
            servers[name].reasons = True

    system = await vllms(prepare)

    for _ in range(2):
        await system.ask(CHAT)

    assert sorted(asked_at(system, "d0") + asked_at(system, "d1")) == [False, True]


async def test_a_long_answer_is_not_taken_for_silence(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch, quick_suspicion: None
) -> None:
    """Nothing comes of it before its end, while the engine counts tokens."""
    monkeypatch.setattr("kvrs.proxy.backends.vllm._METRICS_INTERVAL_S", 0.0)

    def prepare(servers: Servers) -> None:
        parsing(servers)
        for server in servers.values():
            server.tokens = 0

    system = await vllms(prepare, proxy={"token_gap_s": 1.5})
    system.shared.pause_s = 0.5

    found = await answer(system)

    assert found["choices"][0]["message"] == MESSAGE
    assert await system.count("kvrs_attempts_failed_total") == 0


async def test_an_engine_that_makes_no_tokens_any_more_is_left(
    vllms: Builder, quick_suspicion: None
) -> None:
    """Its server answers, and its worker hangs."""

    def prepare(servers: Servers) -> None:
        parsing(servers)
        for server in servers.values():
            server.tokens = 0

    system = await vllms(prepare, proxy={"token_gap_s": 0.4})
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    asked = asyncio.create_task(answer(system))

    async def is_left() -> bool:
        return await system.count("kvrs_attempts_failed_total") > 0

    await system.until(is_left)
    system.shared.gate.set()

    assert (await asked)["choices"][0]["message"] == MESSAGE
