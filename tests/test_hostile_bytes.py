"""Requests that servers read differently, and pickles, at every port for HTTP."""

import pickle
import re
from pathlib import Path

import pytest

from tests.test_http_ports import Opened, admin, agent, engine, exchange, proxy

pytestmark = [pytest.mark.network, pytest.mark.engine, pytest.mark.usefixtures("tiny_beside")]

_HEAD = b"POST /v1/completions HTTP/1.1\r\n"
_HOST = b"Host: 127.0.0.1\r\n"
# Each can be read as two requests by one server and as one by another.
SMUGGLING = {
    "length and chunks": _HEAD + _HOST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": _HEAD + _HOST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
    "signed length": _HEAD + _HOST + b"Content-Length: +4\r\n\r\nabcd",
    "unknown encoding": _HEAD + _HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked, identity": _HEAD + _HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "space before colon": _HEAD + _HOST + b"Content-Length : 4\r\n\r\nabcd",
    "folded header": _HEAD + _HOST + b"X-A: a\r\n b\r\n\r\n",
    "bare line feed": b"POST /v1/completions HTTP/1.1\n" + b"Host: x\nContent-Length: 0\n\n",
    "two hosts": _HEAD + _HOST + b"Host: b\r\nContent-Length: 0\r\n\r\n",
    "line feed in a chunk's extension": _HEAD
    + _HOST
    + b"Transfer-Encoding: chunked\r\n\r\n2;a\nb\r\nxx\r\n0\r\n\r\n",
    "0x in a chunk's size": _HEAD
    + _HOST
    + b"Transfer-Encoding: chunked\r\n\r\n0x2\r\nxx\r\n0\r\n\r\n",
    "negative chunk": _HEAD + _HOST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "zero byte": _HEAD + _HOST + b"X-A: a\x00b\r\n\r\n",
    "long header": _HEAD + _HOST + b"X-A: " + b"a" * 40000 + b"\r\n\r\n",
    "many headers": _HEAD + _HOST + b"".join(b"X-%d: a\r\n" % n for n in range(300)) + b"\r\n",
    "1.0 with chunks": b"POST /healthz HTTP/1.0\r\n"
    + _HOST
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("opened", [agent, engine, proxy, admin])
async def test_what_servers_read_differently_is_refused_at_every_port(
    opened: Opened, tmp_path: Path
) -> None:
    """With 400 and the end of the connection, so that nothing after it counts as a request; with
    431 what is too large. A broken chunk is found when the body is read, which no stranger's is.
    """
    second = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with opened(tmp_path) as port:
        for name, request in SMUGGLING.items():
            answer = await exchange(port, request + second)

            status = b"431" if name in ("long header", "many headers") else b"400"
            status = b"40[014]" if "chunk's" in name or name == "negative chunk" else status
            assert re.match(rb"HTTP/1\.[01] %b " % status, answer), (name, answer)
            assert len(re.findall(rb"HTTP/1\.\d \d{3} ", answer)) == 1, (name, answer)


class _Canary:
    """A pickle of it makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("opened", [agent, engine, proxy, admin])
async def test_no_port_reads_a_pickle(opened: Opened, tmp_path: Path) -> None:
    """Neither as it is nor as the body of a request, whatever its type is said to be."""
    canary = tmp_path / "canary"
    payload = pickle.dumps(_Canary(canary))
    pickle.loads(payload)
    canary.unlink()
    async with opened(tmp_path) as port:
        for path in ("/v1/completions", "/kvrs/v1/leases", "/kvrs/v1/reload"):
            for kind in ("application/json", "application/python-pickle"):
                header = (
                    f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                    f"Content-Type: {kind}\r\nContent-Length: {len(payload)}\r\n\r\n"
                )
                await exchange(port, header.encode() + payload)
        await exchange(port, payload + b"\r\n\r\n")

    assert not canary.exists()
