"""Streams that vLLM continues exactly only by generating their output once more."""

import json
from typing import Any

import pytest

from kvrs.core.fleet import known
from kvrs.core.options import replay
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import Arithmetic, Sampler
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import PROMPT, Builder, Servers, Vllms

# Of a generator that starts with the request: only a replay continues it.
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 8}
MESSAGES = [{"role": "user", "content": "a"}]
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}


def replaying(servers: Servers) -> None:
    for name in ("d0", "d1"):
        servers[name].replays = True
        servers[name].arithmetic = Arithmetic(sampler=Sampler.GENERATOR)


async def answer(system: Vllms, **fields: Any) -> tuple[list[str], str | None, dict[str, Any]]:
    """The data of all events but their time and name, the header, and the last body of d1."""
    path = "chat/completions" if "messages" in fields else "completions"
    async with system.http.post(f"{system.url}/v1/{path}", json=fields | {"stream": True}) as got:
        assert got.status == 200, await got.read()
        events = events_of(await got.read())
    bodies = system.servers["d1"].bodies
    said = [event.decode() for event in events]
    return said, got.headers.get("x-kvrs-exact"), bodies[-1] if bodies else {}


async def test_the_proxy_finds_out_which_servers_replay(vllms: Builder) -> None:
    """Nothing but what a server generates shows it."""

    def prepare(servers: Servers) -> None:
        servers["d1"].replays = True

    system = await vllms(prepare=prepare, proxy={"self_test": True})

    tests = {row["id"]: row["self_test"] for row in (await system.state())["instances"]}
    assert [name for name, test in tests.items() if "replay" in test["capabilities"]] == ["d1"]


@pytest.mark.parametrize("cut_at", [1, 3, 7])
@pytest.mark.parametrize("per_event", [1, 3])
async def test_a_generator_of_random_numbers_goes_on_where_it_was(
    vllms: Builder, cut_at: int, per_event: int
) -> None:
    """The client gets each token once, though the engine makes all of them, in events that need not
    end where the cut was.
    """
    system = await vllms(prepare=replaying)
    asked = {"prompt": PROMPT, "return_token_ids": True, **SEEDED}
    calm, mark, _ = await answer(system, **asked)
    system.shared.faults = {cut_at: Fault.RESET}

    system.shared.tokens_per_event = per_event
    said, again, body = await answer(system, **asked)

    def of(events: list[str]) -> tuple[list[int], str]:
        choices = [json.loads(each[6:])["choices"][0] for each in events if "[" in each[:-8]]
        return [i for c in choices for i in c["token_ids"]], "".join(c["text"] for c in choices)

    assert of(said[:-2]) == of(calm[:-2])
    assert (mark, again) == (None, None)
    assert [row["option"] for row in (await system.state())["recoveries"]] == ["replay"]
    assert len(body["vllm_xargs"]["kvrs_replay"]) == cut_at
    assert (body["prompt"], body["max_tokens"], body["seed"]) == (PROMPT, 8, 7)
    assert system.shared.violations == []


async def test_a_chat_is_sent_as_it_was(vllms: Builder) -> None:
    """With its messages and its grammar, which a continued completion has not."""
    system = await vllms(prepare=replaying)
    system.shared.prompt_tokens = len("user: a\n")
    asked = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "logprobs": True, **JSON}
    calm, _, _ = await answer(system, **asked)
    system.shared.faults = {4: Fault.RESET}

    said, mark, body = await answer(system, **asked)

    assert said == calm
    assert mark is None
    assert body["messages"] == MESSAGES
    assert body["response_format"] == JSON["response_format"]
    assert "prompt" not in body


async def test_a_longer_output_is_marked_and_ends_rather_than_losing_its_grammar(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`REPLAY_S_MAX` bounds the pause. What may take longer is not promised, and no half of an
    object is completed without its grammar.
    """
    for module in (known, replay):
        monkeypatch.setattr(module, "REPLAY_S_MAX", 1e-9)
    system = await vllms(prepare=replaying, policy={"recovery": {"wait_s": 0.2}})
    system.shared.faults = {4: Fault.RESET}

    said, mark, body = await answer(system, prompt=PROMPT, max_tokens=8, temperature=0, **JSON)

    assert mark == "no"
    assert not body
    assert said[-1] == ""
    assert json.loads(said[-2][6:])["error"]["code"] == "inexact"


@pytest.mark.parametrize(("max_tokens", "status"), [(8, 200), (10_000, 400)])
async def test_what_can_be_replayed_is_not_refused(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch, max_tokens: int, status: int
) -> None:
    """`proxy.inexact: refuse` lets in what goes on exactly, whatever happens."""
    for module in (known, replay):
        monkeypatch.setattr(module, "REPLAY_S_MAX", 5.0)
    system = await vllms(prepare=replaying, proxy={"inexact": "refuse"})

    asked = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **JSON}
    assert (await system.ask(asked))[0] == status


@pytest.mark.parametrize("inexact", ["mark", "refuse"])
async def test_a_server_that_replays_no_more_ends_what_was_promised(
    vllms: Builder, inexact: str
) -> None:
    """Its other tokens never reach the client, whose head had no mark: the stream ends with an
    error, and not inexactly.
    """
    recovery = {"max_attempts": 3}
    system = await vllms(
        prepare=replaying, proxy={"inexact": inexact}, policy={"recovery": recovery}
    )
    for name in ("d0", "d1"):
        system.servers[name].replays = False
        system.servers[name].arithmetic = Arithmetic(sampler=Sampler.NOISE)
    system.shared.faults = {4: Fault.RESET}

    status, body = await system.ask(
        {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True, **JSON}
    )

    assert status == 200
    options = [row["option"] for row in (await system.state())["recoveries"]]
    assert {*options} == {"replay"}
    assert b"data: [DONE]" not in body
    assert b"replayed other tokens" in body
