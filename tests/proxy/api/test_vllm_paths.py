"""Paths beside the API of OpenAI that clients and probes of a vLLM use."""

import asyncio
import json
from typing import Any

import pytest

from kvrs import __version__
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

ASKED: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
MESSAGES = [{"role": "user", "content": "play latin."}]


async def got(system: ProxyCluster, path: str, method: str = "GET") -> tuple[int, bytes]:
    async with system.http.request(method, system.url + path) as answer:
        return answer.status, await answer.read()


async def test_health_is_that_of_the_streams_that_could_start(build: ProxyClusterBuilder) -> None:
    """Empty, as vLLM's; 503 where its engine is dead."""
    system = await build(pairs=1)

    up = [await got(system, "/health"), await got(system, "/ping")]
    up.append(await got(system, "/ping", "POST"))
    await system.instances["d0"].kill()
    await system.until(lambda: _is(system, "/readyz", 503))
    down = [await got(system, "/health"), await got(system, "/ping")]

    assert up == [(200, b"")] * 3
    assert down == [(503, b"")] * 2


async def test_a_proxy_that_drains_is_not_healthy(build: ProxyClusterBuilder) -> None:
    system = await build(pairs=1)

    await system.proxy.drain()

    assert (await got(system, "/health"))[0] == 503


async def test_version_and_load_are_told(build: ProxyClusterBuilder) -> None:
    """The engine is kvrs itself here; the load is of open streams."""
    system = await build(pairs=1)
    before = await got(system, "/load")
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    task = asyncio.create_task(system.complete(prompt=[1], max_tokens=4, temperature=0))
    await system.until_streams_hold(2)

    during = await got(system, "/load")
    system.script.gate.set()
    await task

    assert json.loads((await got(system, "/version"))[1]) == {"version": __version__}
    assert [json.loads(body) for _, body in (before, during)] == [
        {"server_load": 0},
        {"server_load": 1},
    ]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt": [1, 2]}, "/v1/completions"),
        ({"prompt": [1, 2], "messages": None}, "/v1/completions"),
        ({"prompt": "messages"}, "/v1/completions"),
        ({"messages": MESSAGES}, "/v1/chat/completions"),
    ],
    ids=["ids", "null", "text", "chat"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_invocation_is_answered_as_at_its_endpoint(
    build: ProxyClusterBuilder, fields: dict[str, Any], path: str, stream: bool
) -> None:
    """The fields of the body determine the endpoint."""
    system = await build(pairs=1)
    answers = []
    for asked in (path, "/invocations"):
        body = ASKED | fields | {"stream": stream}
        async with system.http.post(system.url + asked, json=body) as answer:
            assert answer.status == 200
            answers.append(await answer.read())

    assert [*map(texts_of, answers)] == [texts_of(answers[0])] * 2
    assert texts_of(answers[0])


def texts_of(body: bytes) -> list[Any]:
    """The choices of an answer, or of its events."""
    lines = [line.removeprefix(b"data: ") for line in body.splitlines()]
    return [json.loads(line)["choices"] for line in lines if line.startswith(b"{")]


async def test_an_invocation_for_no_endpoint_is_refused(build: ProxyClusterBuilder) -> None:
    system = await build(pairs=1)

    async with system.http.post(system.url + "/invocations", json={"max_tokens": 3}) as answer:
        error = (await answer.json())["error"]

    assert (answer.status, error["param"]) == (400, "prompt")


async def _is(system: ProxyCluster, path: str, status: int) -> bool:
    return (await got(system, path))[0] == status
