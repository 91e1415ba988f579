"""How the proxy treats its clients: good ones, broken ones, slow ones, and ones that leave."""

import asyncio
import re
import socket
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from kvrs.config import parse_config
from kvrs.errors import ConfigError
from kvrs.protocol.openai import error_body
from kvrs.protocol.secrets import http_token
from kvrs.proxy.server import Proxy
from tests.proxy.conftest import HouseBuilder
from tests.proxy.house import House
from tests.proxy.scripted import SECRET, Fault
from tests.proxy.scripted_model import expected_ids, ids_of, text_of

ASKED: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


async def raw(house: House, data: bytes) -> bytes:
    """Send bytes as they are; the whole answer until the proxy closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.proxy.port)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def running(house: House) -> int:
    return sum(instance.running for instance in house.instances.values())


async def test_a_client_that_leaves_ends_the_upstream_stream(build: HouseBuilder) -> None:
    """Nobody computes for a client that is gone."""
    house = await build(pairs=1, transfer={"lease_s": 0.3})
    house.script.gate, house.script.gate_at = asyncio.Event(), 2
    response = await house.http.post(f"{house.url}/v1/completions", json=ASKED | {"stream": True})
    await house.until_streams_hold(2)

    response.close()

    await house.until(lambda: _truth(running(house) == 0))
    assert house.instances["d0"].aborted == 1
    assert (await house.state())["streams"] == []
    assert 'kvrs_requests_total{outcome="client_gone"} 1.0' in await house.metrics()
    await house.until(lambda: _truth(any(update.release for update in house.instances["p0"].lease_updates)))


async def test_a_client_that_leaves_before_the_first_byte_is_noticed_too(build: HouseBuilder) -> None:
    """Also while nothing is written to it."""
    house = await build(pairs=1)
    house.script.gate = asyncio.Event()
    asked = asyncio.create_task(house.complete(**ASKED))
    await house.until(lambda: _truth(running(house) == 1))

    asked.cancel()

    await house.until(lambda: _truth(running(house) == 0))
    assert (await house.state())["streams"] == []


async def test_a_client_that_does_not_read_is_cut_off(build: HouseBuilder) -> None:
    """Its stream ends after `proxy.write_timeout_s`; others go on."""
    house = await build(pairs=1, proxy={"write_timeout_s": 0.3})
    house.script.event_padding = 100_000
    reader, writer = await asyncio.open_connection("127.0.0.1", house.proxy.port, limit=1024)
    body = msgspec.json.encode(ASKED | {"stream": True, "max_tokens": 1000})
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    await house.until(lambda: _truth(house.instances["d0"].aborted == 1))

    assert (await house.state())["streams"] == []
    rest = await reader.read()
    assert not rest.endswith(b"0\r\n\r\n"), "what was sent must not look complete"
    writer.close()
    house.script.event_padding = 0
    assert (await house.complete(**ASKED))[0] == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b'{"prompt": 3}', "prompt"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens must be in"),
        (b'{"prompt": "a", "n": 17}', "n must be in"),
        (b"[" * 100_000, "not valid JSON|Expected"),
        (b"\xff", "not valid JSON"),
    ],
)
async def test_a_wrong_request_gets_an_openai_error(build: HouseBuilder, body: bytes, says: str) -> None:
    """400, with the body that OpenAI clients read."""
    house = await build(pairs=1)

    async with house.http.post(f"{house.url}/v1/completions", data=body) as response:
        error = msgspec.json.decode(await response.read())["error"]

    assert response.status == 400
    assert error["type"] == "invalid_request_error"
    assert re.search(says, error["message"])
    assert "POST /v1/completions" not in house.instances["p0"].calls


async def test_http_errors_have_openai_bodies_too(build: HouseBuilder) -> None:
    """Unknown paths, wrong methods, bodies that are too large."""
    house = await build(pairs=1, proxy={"max_body_bytes": 2048})

    for method, path, size, status, says in (
        ("GET", "/v1/nothing", 0, 404, "GET /v1/nothing"),
        ("GET", "/v1/completions", 0, 405, "Method Not Allowed"),
        ("POST", "/v1/completions", 5000, 413, "at most 2048 bytes"),
    ):
        async with house.http.request(method, house.url + path, data=b" " * size) as response:
            assert response.status == status
            assert says in msgspec.json.decode(await response.read())["error"]["message"]
            assert response.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_a_compressed_body_is_refused_by_name(build: HouseBuilder) -> None:
    """A few bytes of it could unpack to any size."""
    house = await build(pairs=1)

    async with house.http.post(f"{house.url}/v1/completions", data=b"x", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 415
        assert "'gzip'" in msgspec.json.decode(await response.read())["error"]["message"]


async def test_only_the_served_model_can_be_asked_for(build: HouseBuilder) -> None:
    """404 with the code that OpenAI clients know; also where one model is looked up."""
    house = await build(pairs=1)

    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        assert (await client.models.retrieve("scripted")).id == "scripted"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/another")
        with pytest.raises(openai.NotFoundError) as refusal:
            await client.completions.create(model="another", prompt="a")

    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
    assert "allowed: 'scripted'" in refusal.value.message


async def test_a_bug_has_an_openai_body_as_well(build: HouseBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client library shows what it finds in the body."""
    house = await build(pairs=1)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvrs.proxy.app.read", broken)
    status, body = await house.complete(**ASKED)

    assert (status, msgspec.json.decode(body)["error"]["type"]) == (500, "server_error")


async def test_broken_http_is_logged_without_what_was_sent(build: HouseBuilder, caplog: pytest.LogCaptureFixture) -> None:
    """What is no request may be a prompt whose length was counted wrongly, or a key."""
    house = await build(pairs=1)

    answer = await raw(house, b"GET /healthz HTTP/1.1\r\nHost: x\r\nmy very private prompt\r\n\r\n")

    assert b"400" in answer
    assert "broken HTTP" in caplog.text
    assert "private" not in caplog.text


async def test_a_client_that_drips_its_body_is_cut_off(build: HouseBuilder) -> None:
    """408 after `proxy.body_timeout_s`, then the end of the connection."""
    house = await build(pairs=1, proxy={"body_timeout_s": 0.2})

    answer = await raw(house, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")

    assert answer.startswith(b"HTTP/1.1 408")


async def test_http_1_0_with_a_transfer_encoding_is_refused(build: HouseBuilder) -> None:
    """A pair that proxies before us may read differently."""
    house = await build(pairs=1)

    answer = await raw(house, b"POST /v1/completions HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")

    assert b" 400 " in answer.split(b"\r\n")[0]


async def test_more_streams_than_allowed_get_503(build: HouseBuilder) -> None:
    """`proxy.max_streams` protects those that are open."""
    house = await build(pairs=1, proxy={"max_streams": 1})
    house.script.gate = asyncio.Event()
    first = asyncio.create_task(house.complete(**ASKED))
    await house.until(lambda: _truth(running(house) == 1))

    status, body = await house.complete(**ASKED)
    house.script.gate.set()

    assert status == 503
    assert "1 of 1 streams are open" in msgspec.json.decode(body)["error"]["message"]
    assert (await first)[0] == 200


async def test_what_an_engine_finds_wrong_is_passed_on(build: HouseBuilder) -> None:
    """A prompt that is too long is the client's affair, not a failure of the instance."""
    house = await build(pairs=1)
    body = error_body("the prompt is too long", param="prompt")
    house.instances["p0"].refusal = (400, body)

    assert await house.complete(**ASKED) == (400, body)
    assert len(house.instances["p0"].completions) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{\n "error": {\n  "message": "no such\\nthing", "code": 400}\n}', "no such\nthing"),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b"<html>\n\ndata: [DONE]\n\n</html>", "the engine refuses the request: <html>\n\ndata: [DONE]"),
    ],
)
async def test_a_refusal_in_a_stream_is_one_event(build: HouseBuilder, body: bytes, says: str) -> None:
    """However an engine words it, and although it refuses what another had begun."""
    house = await build()
    house.script.gate, house.script.gate_at = asyncio.Event(), 2
    streaming = asyncio.create_task(house.complete(**ASKED, stream=True))
    await house.until_streams_hold(2)
    for instance in house.instances.values():
        instance.refusal = (400, body)

    victim = (await house.state())["streams"][0]["decode"]
    await house.instances[victim].kill()
    status, answer = await streaming

    *events, end = answer.split(b"\n\n")
    assert (status, end) == (200, b"")
    assert len(events) == 3
    assert b"\n" not in events[2]
    assert msgspec.json.decode(events[2][6:])["error"]["message"].startswith(says)


async def test_causes_do_not_quote_engines(build: HouseBuilder, caplog: pytest.LogCaptureFixture) -> None:
    """An engine may repeat the prompt in its error; logs and state must not."""
    house = await build(policy={"recovery": {"max_attempts": 2, "retry_pause_s": 0.01}})
    for instance in house.instances.values():
        instance.refusal = (500, error_body("bad prompt: 'my very private prompt'", kind="InternalServerError"))

    status, _ = await house.complete(**ASKED)

    assert status == 502
    logged = str([vars(record) for record in caplog.records])
    assert "HTTP 500 (InternalServerError)" in logged
    assert "private" not in logged + str(await house.state())


async def test_internal_fields_and_headers_of_a_client_go_nowhere(build: HouseBuilder) -> None:
    """Who writes which stream, and from where KV comes, is said by the proxy alone."""
    house = await build(pairs=1)
    forged = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_engine_id": "evil"},
        "kvrs": {"stream": "chosen", "attempt": 99, "prompt_tokens": 1},
        "cache_salt": "tenant",
    }
    headers = {"X-Request-Id": "chosen", "Authorization": "Bearer of-the-client"}

    async with house.http.post(f"{house.url}/v1/completions", json=ASKED | forged, headers=headers) as response:
        answer = await response.read()

    assert b"chosen" not in answer
    for name in ("p0", "d0"):
        (asked,) = house.instances[name].completions
        assert asked.kvrs is not None
        assert asked.kv_transfer_params is not None
        assert re.fullmatch("[0-9a-f]{32}", asked.kvrs.stream)
        assert asked.kvrs.attempt == 1
        assert asked.kv_transfer_params.remote_engine_id != "evil"
        assert asked.kv_transfer_params.remote_host is None
        assert asked.cache_salt == "tenant"
        for seen in house.instances[name].headers:
            assert seen["Authorization"] == f"Bearer {http_token(SECRET)}"
            assert "X-Request-Id" not in seen


async def test_the_openai_client_works_unmodified(build: HouseBuilder) -> None:
    """Streaming, not streaming, through a cut, models, and errors."""
    house = await build()
    expected = "".join(map(text_of, expected_ids(ids_of("hello"), 5)))
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(model="scripted", prompt="hello", max_tokens=5, temperature=0)
        house.script.faults = {2: Fault.RESET}
        chunks = [
            chunk
            async for chunk in await client.completions.create(
                model="scripted", prompt="hello", max_tokens=5, temperature=0, stream=True, stream_options={"include_usage": True}
            )
        ]
        models = await client.models.list()
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model="scripted", prompt="hello", max_tokens=0)

    assert whole.choices[0].text == expected
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 5
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage == whole.usage
    assert not house.script.faults
    assert [model.id for model in models.data] == ["scripted"]


async def test_the_openai_client_hears_of_a_stream_that_failed(build: HouseBuilder) -> None:
    """An error event raises in the client; a truncated stream would not."""
    house = await build(pairs=1, policy={"recovery": {"max_attempts": 1}})
    house.script.faults = {2: Fault.RESET}
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="scripted", prompt="hello", max_tokens=5, temperature=0, stream=True)

        with pytest.raises(openai.APIError, match="failed 1 times"):
            async for _ in stream:
                pass


async def test_a_proxy_that_stops_tells_its_streams(build: HouseBuilder) -> None:
    """An explicit error, not a broken connection; and nothing is left running."""
    house = await build(pairs=1)
    house.script.gate, house.script.gate_at = asyncio.Event(), 2
    asked = asyncio.create_task(house.complete(**ASKED, stream=True))
    await house.until_streams_hold(2)

    await house.proxy.close()

    _, body = await asked
    assert msgspec.json.decode(body.split(b"\n\n")[-2][6:])["error"]["code"] == "shutting_down"
    await house.until(lambda: _truth(running(house) == 0))


@pytest.mark.parametrize("key", ["port", "admin_port"])
async def test_a_port_in_use_is_named(key: str) -> None:
    """Which of the two, and what would be allowed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        nodes = [{"id": "n", "instances": [{"id": "b", "role": "both", "port": 1}]}]
        config = parse_config({"proxy": {"port": 0, "admin_port": 0} | {key: port}, "cluster": {"nodes": nodes}})

        with pytest.raises(ConfigError, match=f"proxy.{key}: port 127.0.0.1:{port} is already in use"):
            await Proxy(config, SECRET).start()


async def test_readiness_is_health_with_instances(build: HouseBuilder) -> None:
    """A balancer sends nothing to a proxy that has nobody to ask."""
    house = await build(pairs=1)

    async def status(path: str) -> int:
        async with house.http.get(house.url + path) as response:
            return response.status

    assert (await status("/healthz"), await status("/readyz")) == (200, 200)
    await house.instances["p0"].kill()
    await house.until_health(p0="down")
    assert (await status("/healthz"), await status("/readyz")) == (200, 503)


async def test_state_and_metrics_are_not_on_the_clients_port(build: HouseBuilder) -> None:
    """Admin is another port."""
    house = await build(pairs=1)

    for path in ("/kvrs/v1/state", "/metrics"):
        async with aiohttp.ClientSession() as http, http.get(house.url + path) as response:
            assert response.status == 404


async def _truth(value: bool) -> bool:
    return value
