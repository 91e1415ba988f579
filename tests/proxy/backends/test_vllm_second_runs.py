"""Streams that vLLM continues only by a second run of the request, at servers without the
processor: their self-tests are equal, and the output is compared.
"""

import json
from typing import Any

import pytest

from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import Arithmetic, Sampler
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import PROMPT, Builder, Servers, Vllms

MESSAGES = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "stream": True}
BOUND: list[dict[str, Any]] = [
    {"messages": MESSAGES, "tools": TOOLS},
    {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"},
    {"messages": MESSAGES, "response_format": {"type": "json_object"}},
    {"prompt": PROMPT, "structured_outputs": {"regex": "a+"}},
]


async def built(vllms: Builder, *, tests: bool = True, **more: Any) -> Vllms:
    system = await vllms(proxy={"self_test": tests}, policy={"recovery": {"wait_s": 0.3}}, **more)
    system.shared.prompt_tokens = len("user: a\n")
    return system


async def asked(system: Vllms, fields: dict[str, Any]) -> tuple[str | None, list[Any], bool]:
    """The head's mark, the choices or the error, and whether the stream is complete."""
    path = "chat/completions" if "messages" in fields else "completions"
    if "prompt" in fields:
        system.shared.prompt_tokens = len(PROMPT)
    url = f"{system.url}/v1/{path}"
    async with system.http.post(url, json=GREEDY | fields) as got:
        assert got.status == 200, await got.read()
        events = [each[6:] for each in events_of(await got.read()) if each]
    said = [json.loads(each) for each in events if each != b"[DONE]"]
    mark = got.headers.get("x-kvrs-exact")
    return mark, [each.get("choices", each) for each in said], events[-1] == b"[DONE]"


@pytest.mark.parametrize("fields", BOUND, ids=["tools", "required", "schema", "regex"])
@pytest.mark.parametrize("cut_at", [1, 5])
async def test_an_equal_server_generates_the_known_output_again(
    vllms: Builder, fields: dict[str, Any], cut_at: int
) -> None:
    """From the same request, and without the field of the processor; the head warns all the same,
    because the second run could have differed.
    """
    system = await built(vllms)
    calm = await asked(system, fields)
    first = {name: len(system.servers[name].bodies) for name in ("d0", "d1")}
    system.shared.faults = {cut_at: Fault.RESET}

    said = await asked(system, fields)

    assert said == calm
    assert said[0] == "no"
    assert said[2]
    assert [row["option"] for row in (await system.state())["recoveries"]] == ["replay"]
    bodies = [system.servers[name].bodies[count:] for name, count in first.items()]
    (one,), (again,) = bodies
    assert "vllm_xargs" not in again
    for name in fields:
        assert one[name] == again[name]
    assert system.shared.violations == []


@pytest.mark.parametrize("fields", BOUND, ids=["tools", "required", "schema", "regex"])
async def test_without_self_tests_such_a_stream_ends_with_an_error(
    vllms: Builder, fields: dict[str, Any]
) -> None:
    """At once: no server can be known to be equal, and half an object or call is not completed."""
    system = await built(vllms, tests=False)
    system.shared.faults = {3: Fault.RESET}

    mark, said, is_complete = await asked(system, fields)

    assert mark == "no"
    assert said[-1]["error"]["code"] == "inexact"
    assert not is_complete
    assert not (await system.state())["recoveries"]


async def test_a_second_run_that_differs_reaches_no_client_and_charges_no_server(
    vllms: Builder,
) -> None:
    """The client gets an error, none of the other tokens."""
    system = await built(vllms)
    _, calm, _ = await asked(system, BOUND[0])
    system.servers["d0"].arithmetic = system.servers["d1"].arithmetic = Arithmetic(
        sampler=Sampler.NOISE
    )
    system.shared.faults = {4: Fault.RESET}

    _, said, is_complete = await asked(system, BOUND[0] | {"temperature": 0.8, "seed": 3})

    assert said[-1]["error"]["code"] == "inexact"
    assert not is_complete
    assert len(said) - 1 < len(calm)
    state = await system.state()
    assert {row["health"] for row in state["instances"]} == {"up"}


async def test_drawn_tokens_come_again_where_seeds_are_equal(vllms: Builder) -> None:
    """The proxy draws a seed for a stream that only a second run continues."""

    def prepare(servers: Servers) -> None:
        for each in servers.values():
            each.arithmetic = Arithmetic(sampler=Sampler.GENERATOR)

    system = await built(vllms, prepare=prepare)
    system.shared.faults = {4: Fault.RESET}

    _, said, is_complete = await asked(system, BOUND[0] | {"temperature": 0.8})

    assert is_complete, said[-1]
    bodies = [server.bodies[-1] for name, server in system.servers.items() if name[0] == "d"]
    assert bodies[0]["seed"] == bodies[1]["seed"]
    assert [row["option"] for row in (await system.state())["recoveries"]] == ["replay"]
