"""Bodies that vLLM's port takes, at every endpoint and by both servers: behind a byte order mark,
and with whole numbers that have a fraction.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

MARK = b"\xef\xbb\xbf"
MESSAGES = b'"messages":[{"role":"user","content":"play latin."}]'
BODIES: list[tuple[str, bytes]] = [
    ("/v1/completions", b'{"prompt":[5.0,6e0,7],"max_tokens":4.0,"temperature":0,"n":1.0}'),
    ("/v1/chat/completions", b"{" + MESSAGES + b',"max_tokens":4.0,"temperature":0}'),
    ("/v1/responses", b'{"input":"play latin.","max_output_tokens":4.0,"temperature":0}'),
    ("/tokenize", b'{"prompt":"a"}'),
]


async def ask(system: ProxyCluster, path: str, pieces: list[bytes]) -> tuple[int, Any]:
    """The status and the answer for a body that comes in pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    size = sum(map(len, pieces))
    fields = f"Host: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    writer.write(f"POST {path} HTTP/1.1\r\n{fields}".encode())
    for piece in pieces:
        await asyncio.sleep(0.02)
        writer.write(piece)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), msgspec.json.decode(body)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_byte_order_mark_and_whole_numbers_with_a_fraction_are_taken(
    build: ProxyClusterBuilder, model: str, path: str, body: bytes
) -> None:
    """The mark may come with the body or before it."""
    system = await build(pairs=1, model=model)
    plain = body.replace(b"4.0", b"4").replace(b"5.0,6e0", b"5,6").replace(b"1.0", b"1")
    wanted = await ask(system, path, [plain])

    for pieces in ([body], [MARK + body], [MARK, body], [MARK[:1], MARK[1:] + body]):
        status, answer = await ask(system, path, pieces)

        assert status == wanted[0] == 200, answer
        assert _text(answer) == _text(wanted[1])


@pytest.mark.parametrize("body", [MARK, MARK * 2 + b"{}", b"{}" + MARK, b"\xff\xfe{\x00}\x00"])
async def test_no_other_mark_is_taken(build: ProxyClusterBuilder, body: bytes) -> None:
    """One, before the body; and no other encoding."""
    system = await build(pairs=1)

    status, _ = await ask(system, "/v1/completions", [body])

    assert status == 400


def _text(answer: dict[str, Any]) -> Any:
    kept = ("text", "output", "tokens", "choices", "usage")
    found = {name: value for name, value in answer.items() if name in kept}
    for item in found.get("output", ()):
        item.pop("id", None)
    return found
