"""Refusals of heads at the port for clients: with an id for the log, without what was sent."""

import asyncio
import logging
import re

import msgspec
import pytest

from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

BODY = {"prompt": [5, 6, 7], "max_tokens": 2}
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def raw(system: ProxyCluster, data: bytes) -> tuple[int, bytes, bytes]:
    """The status, the id of the request and the message for bytes that are sent as they are."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    writer.write(data)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    (request_id,) = re.findall(rb"X-Request-Id: (\S+)", head)
    message = msgspec.json.decode(body)["error"]["message"]
    return int(head.split()[1]), request_id, message.encode()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (_HEAD + b"Cookie: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (_HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n", 431),
        (b"POST /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"no HTTP\r\n\r\n", 400),
        (_HEAD + b"Transfer-Encoding: sesame\r\n\r\n", 400),
    ],
)
async def test_a_refusal_of_the_server_itself_has_an_id_which_the_log_has_too(
    build: ProxyClusterBuilder, data: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And counts among the responses."""
    caplog.set_level(logging.INFO, "kvrs.access")
    system = await build(pairs=1, logs={"access": True})

    got, request_id, message = await raw(system, data)
    counted = await system.count("kvrs_http_responses_total", path="other", code=str(status))
    await system.proxy.close()

    assert (got, counted) == (status, 1)
    assert b"xx" not in message
    records = [record for record in caplog.records if record.name == "kvrs.access"]
    rows = [facts for record in records for _, facts in vars(record)["rows"]]
    assert [each["request_id"] for each in rows] == [request_id.decode()]


async def test_a_head_that_is_too_large_in_all_keeps_its_id(build: ProxyClusterBuilder) -> None:
    """Each of its headers is within the limits."""
    system = await build(pairs=1)
    lines = b"".join(b"X-%d: %s\r\n" % (n, b"y" * 3000) for n in range(20))

    status, request_id, _ = await raw(
        system, _HEAD + b"X-Request-Id: order-7\r\n" + lines + b"\r\n"
    )

    assert (status, request_id) == (431, b"order-7")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Content-Encoding", "sesame"),
        ("Idempotency-Key", "sesame \xe9"),
        ("Last-Event-ID", "sesame"),
        ("X-Kvrs-Deadline-S", "sesame"),
        ("Authorization", "sesame"),
        ("Authorization", "Bearer sesame"),
        ("Transfer-Encoding", "sesame"),
        ("Expect", "sesame"),
        ("Content-Length", "sesame"),
    ],
)
async def test_no_error_quotes_the_value_of_a_header(
    build: ProxyClusterBuilder, name: str, value: str
) -> None:
    """It may be a key, and answers are shown and logged by others."""
    system = await build(pairs=1)
    body = msgspec.json.encode(BODY | {"stream": True})
    headers = {"Content-Length": str(len(body)), "Connection": "close"} | {name: value}
    if name == "Last-Event-ID":
        headers["Idempotency-Key"] = "a"
    lines = "".join(f"{each}: {text}\r\n" for each, text in headers.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    writer.write(_HEAD + lines.encode() + b"\r\n" + body)

    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()

    assert b"sesame" not in answer
