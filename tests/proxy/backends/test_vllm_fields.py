"""Which fields of a client reach vLLM, at the first attempt and after a cut."""

import json
from typing import Any

import pytest

from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Builder

GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "stream": True,
}
# What a client must not set, by the name that some engine gives it.
INTERNAL: dict[str, Any] = {
    "request_id": "chosen",
    "priority": -1,
    "vllm_xargs": {"kv_transfer_params": "x"},
    "ec_transfer_params": {"peer": "x"},
    "lora_request": {"lora_path": "/x"},
    "data_parallel_rank": 1,
    "disagg_prefill_dp_rank": 1,
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "a_field_of_a_newer_release": 1,
}


@pytest.mark.parametrize("name", INTERNAL)
async def test_internal_fields_of_a_client_reach_no_engine(vllms: Builder, name: str) -> None:
    """They name the process of a request, its place in the queue, or the KV of another one."""
    system = await vllms()

    for request in (GREEDY, CHAT):
        status, body = await system.ask(request | {name: INTERNAL[name]})

        error = json.loads(body)["error"]
        assert (status, error["param"]) == (400, name)
        assert "allowed: " in error["message"]
    assert not any(server.bodies for server in system.servers.values())


async def test_those_that_are_dropped_reach_no_engine_either(vllms: Builder) -> None:
    """vLLM believes any `kv_transfer_params`, and an empty list in them ends its engine."""
    system = await vllms()
    forged = {
        "kv_transfer_params": {"remote_host": "10.0.0.1", "remote_block_ids": []},
        "kvrs": {"stream": "chosen", "attempt": 9, "prompt_tokens": 1},
    }

    status, _ = await system.ask(GREEDY | forged)

    assert status == 200
    assert system.shared.violations == []
    for server in system.servers.values():
        assert "10.0.0.1" not in json.dumps(server.bodies)
        assert "chosen" not in json.dumps(server.bodies)


# Field, value, whether prefill needs it, whether a cut stream is continued exactly, and whether the
# engine that continues it gets the field.
SERVED: list[tuple[str, Any, bool, bool, bool]] = [
    ("logit_bias", {"5": 1}, False, True, True),
    ("allowed_token_ids", [1, 2], False, True, True),
    ("min_p", 0.5, False, True, True),
    ("bad_words", ["x"], False, False, True),
    ("skip_special_tokens", False, False, False, True),
    ("include_stop_str_in_output", True, False, False, True),
    ("return_tokens_as_token_ids", True, False, True, True),
    ("truncate_prompt_tokens", 3, True, True, False),
]


GRAMMARS: list[tuple[str, Any, bool, bool, bool]] = [
    ("response_format", {"type": "json_object"}, True, False, False),
    ("structured_outputs", {"regex": "a+"}, False, False, False),
]


@pytest.mark.parametrize(("name", "value", "at_prefill", "exact", "continued"), SERVED)
async def test_what_vllm_serves_is_served_and_its_seam_is_told(
    vllms: Builder, name: str, value: Any, at_prefill: bool, exact: bool, continued: bool
) -> None:
    """The header says beforehand whether a cut would show. A prompt is truncated once."""
    system = await vllms(policy={"name": "always_recompute"})
    system.shared.faults = {3: Fault.RESET}

    async with system.http.post(
        f"{system.url}/v1/completions", json=GREEDY | {name: value, "return_token_ids": True}
    ) as response:
        events = events_of(await response.read())[:-2]
    ids = [i for e in events for c in json.loads(e[6:])["choices"] for i in c["token_ids"]]

    assert ids == expected_ids(PROMPT, TOKENS)
    assert ("x-kvrs-exact" not in response.headers) == exact
    prefill, first, again = (system.servers[each].bodies[0] for each in ("p0", "d0", "d1"))
    assert (name in prefill) == at_prefill
    assert first.get(name) == (None if name == "truncate_prompt_tokens" else value)
    assert again.get(name) == (value if continued else None)


@pytest.mark.parametrize(
    "fields",
    [
        {"include_reasoning": False},
        {"documents": [{"title": "a", "text": "b"}], "add_generation_prompt": False},
        {"reasoning_effort": "low", "parallel_tool_calls": False},
    ],
)
async def test_a_chat_s_fields_end_with_the_chat(vllms: Builder, fields: dict[str, Any]) -> None:
    """It is continued as a completion of ids, which has been rendered already."""
    system = await vllms(policy={"name": "always_recompute"})
    system.shared.prompt_tokens = len("user: a\n")
    system.shared.faults = {3: Fault.RESET}

    status, body = await system.ask(CHAT | fields)

    assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
    prefill, first, again = (system.servers[each].bodies[0] for each in ("p0", "d0", "d1"))
    for name, value in fields.items():
        assert prefill[name] == first[name] == value
        assert name not in again
    assert "prompt" in again


async def test_what_would_break_at_a_seam_is_refused_where_that_is_wanted(vllms: Builder) -> None:
    """`proxy.inexact: refuse`: no such stream is begun."""
    system = await vllms(proxy={"inexact": "refuse"})

    for name, value, _, exact, _ in [*SERVED, *GRAMMARS]:
        status, body = await system.ask(GREEDY | {name: value})
        assert status == (200 if exact else 400), name
        assert exact or json.loads(body)["error"]["param"] == name


async def test_fields_about_accounts_are_taken_and_kept_from_engines(vllms: Builder) -> None:
    """Clients of OpenAI's service send them; no output depends on them."""
    system = await vllms()

    status, _ = await system.ask(
        CHAT | {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "verbosity": None}
    )

    assert status == 200
    for body in (*system.servers["p0"].bodies, *system.servers["d0"].bodies):
        assert not {"store", "metadata", "service_tier", "verbosity"} & body.keys()
