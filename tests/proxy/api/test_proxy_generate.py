"""DistServe's `/generate`: the same streams in DistServe's form."""

import json
from typing import Any

import pytest

from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids, ids_of, text_of
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder

REQUEST: dict[str, Any] = {"prompt": "hello", "max_tokens": 6}


async def generate(system: ProxyCluster, fields: dict[str, Any]) -> tuple[int, bytes]:
    async with system.http.post(system.url + "/generate", json=fields) as response:
        return response.status, await response.read()


def texts() -> list[str]:
    return [text_of(token_id) for token_id in expected_ids(ids_of("hello"), 6)]


async def test_every_event_has_all_text_so_far(build: ProxyClusterBuilder) -> None:
    """Framed as server-sent events; a cut is not seen."""
    system = await build()
    system.script.faults = {3: Fault.RESET}

    status, body = await generate(system, REQUEST | {"stream": True})

    *events, done, end = events_of(body)
    assert (status, done, end) == (200, b"data: [DONE]", b"")
    said = texts()
    assert [json.loads(event[6:]) for event in events] == [
        {"text": "".join(said[: count + 1])} for count in range(6)
    ]
    assert not system.script.faults


async def test_a_whole_answer_begins_with_the_prompt(build: ProxyClusterBuilder) -> None:
    system = await build(pairs=1)

    status, body = await generate(system, REQUEST)

    answer = json.loads(body)
    assert status == 200
    assert answer["text"] == "hello" + "".join(texts())
    assert len(answer["timestamps"]) == 6
    assert answer["timestamps"] == sorted(answer["timestamps"])


@pytest.mark.parametrize("unset", [{}, {"temperature": None}])
async def test_an_engine_gets_a_greedy_completion(
    build: ProxyClusterBuilder, unset: dict[str, Any]
) -> None:
    """DistServe ignores its own default and decodes greedily."""
    system = await build(pairs=1)

    given = {"stop": ["x"], "top_k": -1, "best_of": 1, "use_beam_search": False}
    await generate(system, REQUEST | given | unset)

    body = system.instances["d0"].bodies[0]
    assert {name: body[name] for name in ("temperature", "stop", "max_tokens", "top_k")} == {
        "temperature": 0,
        "stop": ["x"],
        "max_tokens": 6,
        "top_k": -1,
    }


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"use_beam_search": 0}, "use_beam_search"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ...}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1}, "seed"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_what_has_no_place_in_the_answer_is_refused(
    build: ProxyClusterBuilder, change: dict[str, Any], param: str
) -> None:
    """By name; DistServe would ignore some of it, and fail on the rest."""
    system = await build(pairs=1)
    fields = {name: value for name, value in (REQUEST | change).items() if value is not ...}

    status, body = await generate(system, fields)

    assert (status, json.loads(body)["error"]["param"]) == (400, param)


async def test_a_body_that_is_no_json_is_refused(build: ProxyClusterBuilder) -> None:
    system = await build(pairs=1)

    async with system.http.post(system.url + "/generate", data=b"{") as response:
        assert response.status == 400
