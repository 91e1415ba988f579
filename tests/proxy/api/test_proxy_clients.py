"""How the proxy treats its clients: good ones, broken ones, slow ones, and ones that leave."""

import asyncio
import re
import socket
from collections import Counter
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs.net import server
from kvrs.protocol.openai.chunks import error_body
from kvrs.protocol.openai.decoding import bytes_within
from kvrs.proxy.api import bodies
from kvrs.proxy.server import Proxy
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import SECRET, Fault
from kvrs_testkit.scripted_model import expected_ids, ids_of, text_of, vocabulary
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


async def raw(system: ProxyCluster, data: bytes) -> bytes:
    """Send bytes as they are; the whole answer until the proxy closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def running(system: ProxyCluster) -> int:
    return sum(instance.running for instance in system.instances.values())


async def test_a_client_that_leaves_ends_the_upstream_stream(build: ProxyClusterBuilder) -> None:
    """No engine computes for a client that is gone."""
    system = await build(pairs=1, transfer={"lease_s": 0.3})
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    response = await system.http.post(
        f"{system.url}/v1/completions", json=REQUEST | {"stream": True}
    )
    await system.until_streams_hold(2)

    response.close()

    await system.until(lambda: _truth(running(system) == 0))
    assert system.instances["d0"].aborted == 1
    assert (await system.state())["streams"] == []
    assert 'kvrs_requests_total{outcome="client_gone"} 1.0' in await system.metrics()
    await system.until(
        lambda: _truth(any(update.release for update in system.instances["p0"].lease_updates))
    )


async def test_a_client_that_leaves_before_the_first_byte_is_noticed_too(
    build: ProxyClusterBuilder,
) -> None:
    """Also while nothing is written to it."""
    system = await build(pairs=1)
    system.script.gate = asyncio.Event()
    task = asyncio.create_task(system.complete(**REQUEST))
    await system.until(lambda: _truth(running(system) == 1))

    task.cancel()

    await system.until(lambda: _truth(running(system) == 0))
    assert (await system.state())["streams"] == []


@pytest.mark.network
async def test_a_client_that_does_not_read_is_cut_off(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream ends after `WRITE_TIMEOUT_S`; others go on."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.3)
    system = await build(pairs=1)
    system.script.event_padding = 100_000
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port, limit=1024)
    body = msgspec.json.encode(REQUEST | {"stream": True, "max_tokens": 1000})
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    await system.until(lambda: _truth(system.instances["d0"].aborted == 1))

    assert (await system.state())["streams"] == []
    rest = await reader.read()
    assert not rest.endswith(b"0\r\n\r\n"), "what was sent must not look complete"
    writer.close()
    system.script.event_padding = 0
    assert (await system.complete(**REQUEST))[0] == 200


async def test_a_whole_response_without_room_is_refused(build: ProxyClusterBuilder) -> None:
    """Unread responses share the memory of bodies: where it is full, a long one becomes a 503."""
    system = await build(pairs=1)
    budget = system.proxy.parts.api.budget
    system.script.event_padding = 50_000
    taken_bytes = budget.total_bytes - 100_000

    budget.held_bytes += taken_bytes
    status, body = await system.complete(**REQUEST)
    short, _ = await system.complete(**REQUEST | {"max_tokens": 1})
    streamed, _ = await system.complete(**REQUEST, stream=True)
    budget.held_bytes -= taken_bytes
    again, _ = await system.complete(**REQUEST)

    assert (status, short, streamed, again) == (503, 200, 200, 200)
    assert msgspec.json.decode(body)["error"]["code"] == "no_room"
    assert budget.held_bytes == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"", "the body is empty; allowed: a JSON object"),
        (b" \n", "the body is empty; allowed: a JSON object"),
        (b'{"prompt": 3}', "prompt"),
        (b'{"prompt": "a", "max_tokens": 0}', r"max_tokens must be at least 1, .*got 0$"),
        (b'{"prompt": "a", "n": 17}', "n must be in"),
        (b"[" * 100_000, "not valid JSON|Expected"),
        (b"\xff", "not valid JSON"),
    ],
)
async def test_a_wrong_request_gets_an_openai_error(
    build: ProxyClusterBuilder, body: bytes, says: str
) -> None:
    """400, with the body that OpenAI clients read."""
    system = await build(pairs=1)

    async with system.http.post(f"{system.url}/v1/completions", data=body) as response:
        error = msgspec.json.decode(await response.read())["error"]

    assert response.status == 400
    assert error["type"] == "invalid_request_error"
    assert re.search(says, error["message"])
    assert "POST /v1/completions" not in system.instances["p0"].calls


async def test_http_errors_have_openai_bodies_too(build: ProxyClusterBuilder) -> None:
    """Unknown paths, wrong methods, bodies that are too large; each error says what is allowed."""
    system = await build(pairs=1, proxy={"max_body_bytes": 2048})

    for method, path, size, status, says in (
        ("GET", "/", 0, 404, "GET /: Not Found; allowed: /classify, /detokenize, "),
        ("POST", "/chat/completions", 0, 404, "; the nearest one is /v1/chat/completions"),
        ("GET", "/v1/completions", 0, 405, "Method Not Allowed; allowed: POST"),
        ("POST", "/v1/completions", 5000, 413, "at most 2048 bytes"),
    ):
        async with system.http.request(method, system.url + path, data=b" " * size) as response:
            assert response.status == status
            assert says in msgspec.json.decode(await response.read())["error"]["message"]
            assert response.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_a_body_is_bounded_by_what_its_model_takes(
    build: ProxyClusterBuilder, model: str
) -> None:
    """In bytes and in elements: the scripted model takes 4,096 tokens. Nothing of it is sent to an
    instance.
    """
    system = await build(pairs=1, model=model)
    longest = max(map(len, vocabulary().tokenizer.get_vocab()))
    messages = [{"role": "user", "content": "a"}]
    long = "b" * bytes_within(4096, longest)

    for fields, named in (
        ({"prompt": long}, "tokens; allowed"),
        ({"messages": messages, "chat_template_kwargs": {"a": long}}, "tokens; allowed"),
        ({"messages": messages, "tools": [{}] * 5200}, "5120 objects and lists"),
    ):
        status, body = await system.ask(fields)
        assert (status, named in body.decode()) == (400, True), body
    assert system.instances["p0"].bodies == []
    assert (await system.ask(REQUEST | {"prompt": "b" * 3000}))[0] == 200


async def test_a_body_beyond_the_limit_of_the_proxy_is_named_so_before_the_models(
    build: ProxyClusterBuilder, model: str
) -> None:
    """413 with the limit in bytes, not 400 with a number of tokens."""
    most = bytes_within(4096, max(map(len, vocabulary().tokenizer.get_vocab())))
    system = await build(pairs=1, model=model, proxy={"max_body_bytes": 100_000})

    status, body = await system.ask({"prompt": " " * most})

    assert status == 413
    assert "at most 100000 bytes (proxy.max_body_bytes), got " in body.decode()


async def test_a_compressed_body_is_refused_by_name(build: ProxyClusterBuilder) -> None:
    """A few bytes of it could unpack to any size."""
    system = await build(pairs=1)

    async with system.http.post(
        f"{system.url}/v1/completions", data=b"x", headers={"Content-Encoding": "gzip"}
    ) as response:
        assert response.status == 415
        assert "Content-Encoding" in msgspec.json.decode(await response.read())["error"]["message"]


async def test_only_the_served_model_is_accepted(build: ProxyClusterBuilder) -> None:
    """404 with the code that OpenAI clients know; also where one model is looked up."""
    system = await build(pairs=1)

    async with openai.AsyncOpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0
    ) as client:
        model = await client.models.retrieve("scripted")
        assert model.id == "scripted"
        assert model.model_extra == {"max_model_len": 4096}
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/another")
        with pytest.raises(openai.NotFoundError) as refusal:
            await client.completions.create(model="another", prompt="a")

    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
    assert "allowed: 'scripted'" in refusal.value.message


async def test_an_internal_error_has_an_openai_body(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client library shows the message in the body."""
    system = await build(pairs=1)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvrs.proxy.api.client_port.Journal", broken)
    status, body = await system.complete(**REQUEST)

    assert (status, msgspec.json.decode(body)["error"]["type"]) == (500, "server_error")


async def test_broken_http_is_logged_without_what_was_sent(
    build: ProxyClusterBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that are no request may be a prompt after a wrong length, or a key."""
    system = await build(pairs=1)

    answer = await raw(
        system, b"GET /healthz HTTP/1.1\r\nHost: x\r\nmy very private prompt\r\n\r\n"
    )

    assert b"400" in answer
    assert "broken HTTP" in caplog.text
    assert "private" not in caplog.text


async def test_a_client_that_drips_its_body_is_cut_off(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """408 after `BODY_TIMEOUT_S`, then the end of the connection."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.2)
    system = await build(pairs=1)

    answer = await raw(
        system, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    )

    assert answer.startswith(b"HTTP/1.1 408")


async def test_http_1_0_with_a_transfer_encoding_is_refused(build: ProxyClusterBuilder) -> None:
    """A proxy in front may interpret this pair of headers differently."""
    system = await build(pairs=1)

    answer = await raw(
        system,
        b"POST /v1/completions HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    )

    assert b" 400 " in answer.split(b"\r\n")[0]


async def test_more_streams_than_allowed_get_503(build: ProxyClusterBuilder) -> None:
    """`proxy.max_streams` protects those that are open."""
    system = await build(pairs=1, proxy={"max_streams": 1})
    system.script.gate = asyncio.Event()
    first = asyncio.create_task(system.complete(**REQUEST))
    await system.until(lambda: _truth(running(system) == 1))

    status, body = await system.complete(**REQUEST)
    system.script.gate.set()

    assert status == 503
    assert "1 of 1 streams are open" in msgspec.json.decode(body)["error"]["message"]
    assert (await first)[0] == 200


@pytest.mark.network
async def test_a_storm_of_requests_is_refused_and_does_not_come_back_together(
    build: ProxyClusterBuilder,
) -> None:
    """Each request of a burst is served or told a time to come back, and the times are spread; the
    proxy serves on.
    """
    system = await build(pairs=1, proxy={"max_streams": 8})
    system.script.gate = asyncio.Event()

    async def ask() -> tuple[int, str | None]:
        url = f"{system.url}/v1/completions"
        async with system.http.post(url, json=REQUEST) as answer:
            await answer.read()
            return answer.status, answer.headers.get("Retry-After")

    storm = [asyncio.create_task(ask()) for _ in range(400)]
    await system.until(lambda: _truth(sum(each.done() for each in storm) == 392))
    system.script.gate.set()
    answers = await asyncio.gather(*storm)

    refused = [after for status, after in answers if status == 503]
    assert Counter(status for status, _ in answers) == {200: 8, 503: 392}
    assert len(set(refused)) > 1
    assert None not in refused
    assert (await system.complete(**REQUEST))[0] == 200


async def test_an_engine_s_refusal_reaches_the_client(build: ProxyClusterBuilder) -> None:
    """A prompt that is too long is the client's affair, not a failure of the instance."""
    system = await build(pairs=1)
    body = error_body("the prompt is too long", param="prompt")
    system.instances["p0"].refusal = (400, body)

    assert await system.complete(**REQUEST) == (400, body)
    assert len(system.instances["p0"].completions) == 1


async def test_a_refusal_of_two_instances_reaches_the_client_and_ejects_neither(
    build: ProxyClusterBuilder,
) -> None:
    """Wrong requests say nothing of the instances that refuse them, however many come."""
    system = await build(pairs=3)
    body = error_body("no")  # One that names the fault is final at the first instance.
    for name in ("p0", "p1", "p2"):
        system.instances[name].refusal = (400, body)

    answers = [await system.complete(**REQUEST) for _ in range(10)]

    assert answers == [(400, body)] * 10
    assert sum(len(system.instances[name].completions) for name in ("p0", "p1", "p2")) == 20
    assert await system.count("kvrs_worker_ejected") == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{\n "error": {\n  "message": "no such\\nthing", "code": 400}\n}', "no such\nthing"),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (
            b"<html>\n\ndata: [DONE]\n\n</html>",
            "the engine refused the request: <html>\n\ndata: [DONE]",
        ),
    ],
)
async def test_a_refusal_has_openai_s_form_on_one_line(
    build: ProxyClusterBuilder, body: bytes, says: str
) -> None:
    """In any form of an engine."""
    system = await build(pairs=1)
    system.instances["d0"].refusal = (400, body)

    status, answer = await system.complete(**REQUEST, stream=True)

    assert status == 400
    assert b"\n" not in answer
    assert msgspec.json.decode(answer)["error"]["message"].startswith(says)


@pytest.mark.parametrize(
    ("error", "param", "code"),
    [
        ({"message": "no such field", "type": "BadRequestError", "code": 400}, None, None),
        ({"message": "no such model", "type": "NotFoundError", "code": "x"}, None, "x"),
        (
            {
                "message": "This model's maximum context length is 8 tokens. However, you ...",
                "type": "BadRequestError",
                "param": "input_tokens",
                "code": 400,
            },
            "input_tokens",
            "context_length_exceeded",
        ),
        (
            {
                "message": "The decoder prompt (length 9) is longer than the maximum model length",
                "type": "ValueError",
                "param": 3,
                "code": None,
            },
            None,
            "context_length_exceeded",
        ),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
async def test_refusals_of_engines_have_one_form(
    build: ProxyClusterBuilder,
    error: dict[str, object],
    param: str | None,
    code: str | None,
    *,
    flat: bool,
) -> None:
    """vLLM's type is the name of an exception, and its code the status: agents look for
    `context_length_exceeded`.
    """
    system = await build(pairs=1)
    body = msgspec.json.encode(error if flat else {"error": error})
    system.instances["d0"].refusal = (400, body)

    status, answer = await system.complete(**REQUEST)

    assert status == 400
    assert msgspec.json.decode(answer)["error"] == {
        "message": error["message"],
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }


async def test_a_stream_that_flows_outlives_the_refusal_of_its_next_instance(
    build: ProxyClusterBuilder,
) -> None:
    """A request that one instance has begun is not wrong: another one is asked."""
    system = await build(pairs=4)
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    streaming = asyncio.create_task(system.complete(**REQUEST, stream=True))
    await system.until_streams_hold(2)
    victim = (await system.state())["streams"][0]["decode"]
    others = [name for name in system.instances if name.startswith("d") and name != victim]
    for name in others[:-1]:
        system.instances[name].refusal = (413, error_body("too large"))

    await system.instances[victim].kill()
    system.script.gate.set()
    status, answer = await streaming

    *events, end = events_of(answer)[:-1]
    assert (status, end) == (200, b"data: [DONE]")
    parts = [msgspec.json.decode(event[6:])["choices"][0]["text"] for event in events]
    assert "".join(parts) == "".join(map(text_of, expected_ids([1, 2, 3], 5)))


@pytest.mark.parametrize("role", ["p", "d"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [101, 201, 204, 304, 302, 399, 600, 999])
async def test_a_status_that_is_no_answer_to_a_completion_is_502(
    build: ProxyClusterBuilder, status: int, stream: bool, role: str
) -> None:
    """Whichever call got it; the client's next request on the connection gets its own answer."""
    system = await build(pairs=1)
    system.instances[f"{role}0"].refusal = (status, b"{}")

    answered, body = await system.complete(**REQUEST, stream=stream)
    system.instances[f"{role}0"].refusal = None
    async with system.http.get(f"{system.url}/healthz") as response:
        healthy = response.status, await response.read()

    error = msgspec.json.decode(body)["error"]
    assert answered == 502
    assert error["type"] == "server_error"
    assert f"HTTP {status}; allowed: 200, or 400 to 599" in error["message"]
    assert healthy == (200, b"ok\n")


async def test_causes_do_not_quote_engines(
    build: ProxyClusterBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine may repeat the prompt in its error; logs and state must not."""
    system = await build(policy={"recovery": {"max_attempts": 2}})
    for status, instance in zip((500, 501, 502, 504), system.instances.values(), strict=True):
        instance.refusal = (  # Not alike: it would be the request's.
            status,
            error_body("bad prompt: 'my very private prompt'", kind="InternalServerError"),
        )

    status, _ = await system.complete(**REQUEST)

    assert status == 502
    logged = str([vars(record) for record in caplog.records])
    assert "(InternalServerError)" in logged
    assert "private" not in logged + str(await system.state())


async def test_internal_fields_and_headers_of_a_client_are_dropped(
    build: ProxyClusterBuilder,
) -> None:
    """Only the proxy sets the writer of a stream and the source of its KV."""
    system = await build(pairs=1)
    forged = {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "remote_host": "10.0.0.1",
            "remote_engine_id": "evil",
        },
        "kvrs": {"stream": "chosen", "attempt": 99, "prompt_tokens": 1},
        "cache_salt": "tenant",
    }
    headers = {"X-Request-Id": "chosen", "Authorization": "Bearer of-the-client"}

    async with system.http.post(
        f"{system.url}/v1/completions", json=REQUEST | forged, headers=headers
    ) as response:
        answer = await response.read()

    assert b"chosen" not in answer
    for name in ("p0", "d0"):
        (completion,) = system.instances[name].completions
        assert completion.kvrs is not None
        assert completion.kv_transfer_params is not None
        assert re.fullmatch("[0-9a-f]{32}", completion.kvrs.stream)
        assert completion.kvrs.attempt == 1
        assert completion.kv_transfer_params.remote_engine_id != "evil"
        assert completion.kv_transfer_params.remote_host is None
        assert completion.cache_salt == "tenant"
        for seen in system.instances[name].headers:
            assert "Authorization" not in seen
            assert seen.get("X-Request-Id") != "chosen"


async def test_the_openai_client_works_unmodified(build: ProxyClusterBuilder) -> None:
    """Streaming, not streaming, through a cut, models, and errors."""
    system = await build()
    expected = "".join(map(text_of, expected_ids(ids_of("hello"), 5)))
    async with openai.AsyncOpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0
    ) as client:
        whole = await client.completions.create(
            model="scripted", prompt="hello", max_tokens=5, temperature=0
        )
        system.script.faults = {2: Fault.RESET}
        chunks = [
            chunk
            async for chunk in await client.completions.create(
                model="scripted",
                prompt="hello",
                max_tokens=5,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
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
    assert not system.script.faults
    assert [model.id for model in models.data] == ["scripted"]


async def test_the_openai_client_raises_for_a_stream_that_failed(
    build: ProxyClusterBuilder,
) -> None:
    """An error event raises in the client; a truncated stream would not."""
    system = await build(pairs=1, policy={"recovery": {"max_attempts": 1}})
    system.script.faults = {2: Fault.RESET}
    async with openai.AsyncOpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.completions.create(
            model="scripted", prompt="hello", max_tokens=5, temperature=0, stream=True
        )

        with pytest.raises(openai.APIError, match="failed 1 times"):
            async for _ in stream:
                pass


async def test_a_proxy_that_stops_ends_its_streams_with_an_error(
    build: ProxyClusterBuilder,
) -> None:
    """An explicit error, not a broken connection; and nothing is left running."""
    system = await build(pairs=1)
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    task = asyncio.create_task(system.complete(**REQUEST, stream=True))
    await system.until_streams_hold(2)

    await system.proxy.close()

    _, body = await task
    assert msgspec.json.decode(events_of(body)[-2][6:])["error"]["code"] == "shutting_down"
    await system.until(lambda: _truth(running(system) == 0))


@pytest.mark.network
@pytest.mark.parametrize("key", ["port", "admin_port"])
async def test_a_port_in_use_is_named(key: str) -> None:
    """Which of the two, and what would be allowed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        nodes = [{"id": "n", "instances": [{"id": "b", "role": "both", "port": 1}]}]
        config = parse_config(
            {"proxy": {"port": 0, "admin_port": 0} | {key: port}, "cluster": {"nodes": nodes}}
        )

        with pytest.raises(
            ConfigError, match=f"proxy.{key}: port 127.0.0.1:{port} is already in use"
        ):
            await Proxy(config, SECRET).start()


async def test_readiness_is_health_with_instances(build: ProxyClusterBuilder) -> None:
    """A load balancer sends no request to a proxy without instances."""
    system = await build(pairs=1)

    async def status(path: str) -> int:
        async with system.http.get(system.url + path) as response:
            return response.status

    assert (await status("/healthz"), await status("/readyz")) == (200, 200)
    await system.instances["p0"].kill()
    await system.until_health(p0="down")
    assert (await status("/healthz"), await status("/readyz")) == (200, 503)


async def test_state_and_metrics_are_not_on_the_clients_port(build: ProxyClusterBuilder) -> None:
    """Admin is another port."""
    system = await build(pairs=1)

    for path in ("/kvrs/v1/state", "/metrics"):
        async with aiohttp.ClientSession() as http, http.get(system.url + path) as response:
            assert response.status == 404


async def _truth(value: bool) -> bool:
    return value
