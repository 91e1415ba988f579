"""The least that a Python proxy on uvloop can cost that does what kvrs does for a token: two calls
for each stream over kept connections, a journal of its ids, the ids cut from what the client gets,
and the end found. Protocols of asyncio and nothing else: no task, no timer, no policy; a request
that fails ends its client's connection.

    python -m experiments.bench_proxy.raw_relay --port 0 --prefill PORT --decode PORT

`ready PORT` on stdout says that it takes requests. It reads what the mocks write: a chunk holds
whole events, an event the ids of one choice as its last list.
"""

import argparse
import asyncio
from array import array
from collections.abc import Callable
from typing import Any, cast

import msgspec
import uvloop

_IDS = b',"token_ids":['
_ANSWER_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_END_OF_BODY = b"0\r\n\r\n"
_ENCODER = msgspec.json.Encoder()


class _Choice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw


class _Prefilled(msgspec.Struct):
    choices: list[_Choice]
    kv_transfer_params: msgspec.Raw


_PREFILLED = msgspec.json.Decoder(_Prefilled)
_REQUEST = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Engine:
    """One instance, with the connections to it that are not in use."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._kept: list[Upstream] = []
        self._connecting: set[asyncio.Task[None]] = set()

    def call(self, body: bytes, take: Callable[[bytes], None], client: "Client") -> None:
        """`take` gets the body's chunks, at last an empty one."""
        head = "POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: %d\r\n\r\n"
        request = (head % len(body)).encode() + body
        if self._kept:
            self._kept.pop().begin(request, take, client)
            return
        task = asyncio.get_running_loop().create_task(self._connect(request, take, client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(
        self, request: bytes, take: Callable[[bytes], None], client: "Client"
    ) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(self), "127.0.0.1", self._port)
        upstream.begin(request, take, client)

    def give_back(self, upstream: "Upstream") -> None:
        self._kept.append(upstream)

    def forget(self, upstream: "Upstream") -> None:
        if upstream in self._kept:
            self._kept.remove(upstream)


class Upstream(asyncio.Protocol):
    """A connection to an instance."""

    __slots__ = ("_client", "_engine", "_length", "_rest", "_take", "transport")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._client: Client | None = None  # None: there is no call.
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def begin(self, request: bytes, take: Callable[[bytes], None], client: "Client") -> None:
        self._client, self._take = client, take
        self._length: int | None = None  # Of a body without chunks; None: the head is awaited.
        client.upstream = self
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        client = self._client
        if client is None:
            self.transport.abort()
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
        at = 0
        if self._length is None:
            at = data.find(b"\r\n\r\n") + 4
            if at < 4:
                self._rest = data
                return
            head = data[:at].lower()
            if not head.startswith(b"http/1.1 200"):
                client.fail()
                return
            _, found, length = head.partition(b"\r\ncontent-length:")
            self._length = int(length[: length.find(b"\r")]) if found else -1
        if self._length >= 0:
            self._read_whole(data[at:], self._length)
        else:
            self._read_chunks(data, at, client)

    def _read_whole(self, body: bytes, length: int) -> None:
        if len(body) < length:
            self._rest = body
        else:
            self._end(body)

    def _read_chunks(self, data: bytes, at: int, client: "Client") -> None:
        end, size = at, len(data)
        while (line_end := data.find(b"\r\n", at)) >= 0:
            chunk_bytes = int(data[at:line_end], 16)
            end = line_end + 2 + chunk_bytes
            if end + 2 > size:
                break
            if chunk_bytes == 0:
                self._end(b"")
                return
            self._take(data[line_end + 2 : end])
            at = end + 2
        self._rest = data[at:]
        client.flush()

    def _end(self, last: bytes) -> None:
        take, client, self._client = self._take, self._client, None
        assert client is not None
        client.upstream = None
        self._engine.give_back(self)
        take(last)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.forget(self)
        if self._client is not None:
            self._client.fail()


class Client(asyncio.Protocol):
    """A client's connection, with one request at a time."""

    __slots__ = (
        *("_begun", "_decode", "_events", "_fields", "_finished", "_ids", "_prefill"),
        *("_received", "_transport", "upstream"),
    )

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._prefill, self._decode = prefill, decode
        self._received = b""
        self.upstream: Upstream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._received + data
        self._received = b""
        at = data.find(b"\r\n\r\n") + 4
        head = data[:at].lower()
        if head.startswith(b"get "):
            self._transport.write(_HEALTHY)
            return
        _, _, length = head.partition(b"\r\ncontent-length:")
        if at < 4 or len(data) < at + int(length[: length.find(b"\r")]):
            self._received = data
            return
        self._fields: dict[str, Any] = {**_REQUEST.decode(data[at:])}
        self._ids = array("I")
        self._events: list[bytes] = []
        self._begun = self._finished = False
        fields: dict[str, Any] = {"max_tokens": 1, "stream": False, "return_token_ids": True}
        fields["kv_transfer_params"] = {"do_remote_decode": True}
        self._prefill.call(_ENCODER.encode(self._fields | fields), self._prefilled, self)

    def _prefilled(self, body: bytes) -> None:
        answer = _PREFILLED.decode(body)
        fields: dict[str, Any] = {
            "prompt": answer.choices[0].prompt_token_ids,
            "return_token_ids": True,
        }
        fields["kv_transfer_params"] = answer.kv_transfer_params
        self._decode.call(_ENCODER.encode(self._fields | fields), self._take, self)
        del self._fields

    def _take(self, chunk: bytes) -> None:
        """A chunk of events; an empty one is the end of the body."""
        if not chunk:
            self._end()
            return
        at = 0
        while (found := chunk.find(_IDS, at)) >= 0:
            begin = found + len(_IDS)
            end = chunk.index(b"]", begin)
            digits = chunk[begin:end]
            if digits.isdigit():
                self._ids.append(int(digits))
            else:
                self._ids.extend(map(int, digits.split(b",")))
            chunk = chunk[:found] + chunk[end + 1 :]
            at = found
        if chunk.endswith(b"data: [DONE]\n\n"):
            self._finished = b'"finish_reason":"' in chunk
        self._events.append(chunk)

    def flush(self) -> None:
        """Write the events of one read together."""
        if self._events:
            body = self._events[0] if len(self._events) == 1 else b"".join(self._events)
            self._events.clear()
            head = b"" if self._begun else _ANSWER_HEAD
            self._begun = True
            self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(body), body))

    def _end(self) -> None:
        self.flush()
        if self._finished:
            self._transport.write(_END_OF_BODY)
        else:
            self.fail()

    def fail(self) -> None:
        self._transport.abort()

    def pause_writing(self) -> None:
        if self.upstream is not None:
            self.upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.upstream is not None:
            self.upstream.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.upstream is not None:
            self.upstream.transport.abort()


async def run(port: int, prefill: Engine, decode: Engine) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Client(prefill, decode), "127.0.0.1", port, backlog=4096
    )
    print("ready", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--prefill", type=int, required=True)
    parser.add_argument("--decode", type=int, required=True)
    arguments = parser.parse_args()
    uvloop.run(run(arguments.port, Engine(arguments.prefill), Engine(arguments.decode)))


if __name__ == "__main__":
    main()
