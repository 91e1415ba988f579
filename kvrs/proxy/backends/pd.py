"""The embedded engine's and vLLM's P/D convention: what a proxy asks of an instance, and how that can fail.

A failure of the instance is an `UpstreamError`; a request that the instance finds wrong is a `RefusedError`, whose
body the client gets.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvrs.errors import KvrsError, UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.instance import FenceRequest, InstanceInfo, LeaseAnswer, LeaseUpdate, LoadReport
from kvrs.protocol.openai import error_body, error_kind
from kvrs.proxy.backends.bodies import Call

Answer = TypeVar("Answer")

_CONNECT_TIMEOUT_S = 1.0
_CONTROL_TIMEOUT_S = 2.0  # Of the small calls of the instance protocol; never of a completion.
_MAX_LINE_BYTES = 1 << 20
# These say something about the proxy or the moment, not about the client's request.
_NOT_THE_CLIENTS_FAULT = frozenset({401, 403, 407, 408, 409, 425, 429})


class RefusedError(KvrsError):
    """The engine says that the client's request is wrong."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with HTTP {status}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What prefill hands to decode. `transfer` is forwarded as the bytes it came in."""

    prompt_ids: list[int]
    transfer: msgspec.Raw | None


class _PrefillChoice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _PrefillAnswer(msgspec.Struct):
    choices: list[_PrefillChoice] = []
    prompt_token_ids: list[int] | None = None
    # Raw knows no union: absent is empty, and null stays the four bytes that it is.
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


def new_session(token: str) -> aiohttp.ClientSession:
    """One connection pool for everything that goes to instances."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=10, socket_factory=_make_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        headers={"Authorization": f"Bearer {token}"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices a peer which vanished without a word."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system names these.
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000)):
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class PdBackend:
    """Speaks to the instance at one URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    # The two calls of a stream.

    async def prefill(self, call: Call) -> Prefilled:
        """Have the history's KV computed and retained for a hand-off."""
        async with self._completion(call) as response:
            raw = await _body_of(response)
        try:
            answer = msgspec.json.decode(raw, type=_PrefillAnswer)
        except msgspec.DecodeError as error:
            raise UpstreamError(f"prefill answered what is no completion: {error}") from None
        # In a completion each choice has them, in a chat the answer.
        prompt_ids = answer.prompt_token_ids or next((choice.prompt_token_ids for choice in answer.choices), None)
        if not prompt_ids:
            raise UpstreamError("prefill answered without prompt_token_ids")
        transfer = answer.kv_transfer_params
        return Prefilled(prompt_ids, None if bytes(transfer) in (b"", b"null") else transfer)

    @asynccontextmanager
    async def decode(self, call: Call) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open the stream of the tokens after the history, as chunks of bytes."""
        async with self._completion(call) as response:
            yield _Chunks(response)

    @asynccontextmanager
    async def _completion(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._call("POST", call.path, call.body) as response:
            if response.status != 200:
                answer = await _body_of(response)
                if 400 <= response.status < 500 and response.status not in _NOT_THE_CLIENTS_FAULT:
                    raise RefusedError(response.status, _as_openai(answer))
                raise UpstreamError(f"HTTP {response.status}{error_kind(_decoded(answer))}")
            yield response

    # The instance protocol.

    async def info(self) -> InstanceInfo:
        return await self._control("GET", "/kvrs/v1/instance", None, InstanceInfo)

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        return await self._control("POST", "/kvrs/v1/leases", update, LeaseAnswer)

    async def fence(self, attempts: dict[StreamId, int]) -> InstanceInfo:
        return await self._control("POST", "/kvrs/v1/fence", FenceRequest(attempts), InstanceInfo)

    @asynccontextmanager
    async def watch_load(self, interval_s: float, silence_s: float) -> AsyncIterator[AsyncIterator[LoadReport]]:
        """Load reports until the connection ends; it ends with the instance."""
        async with self._call("GET", f"/kvrs/v1/load?watch={interval_s}", None) as response:
            if response.status != 200:
                raise UpstreamError(f"HTTP {response.status} for its load")
            async with aclosing(_load_reports(response, silence_s)) as reports:
                yield reports

    async def _control(self, method: str, path: str, message: msgspec.Struct | None, kind: type[Answer]) -> Answer:
        body = None if message is None else msgspec.json.encode(message)
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S), self._call(method, path, body) as response:
                raw = await _body_of(response)
        except TimeoutError:
            raise UpstreamError(f"no answer to {path} within {_CONTROL_TIMEOUT_S} s") from None
        if response.status == 401:
            raise UpstreamError("HTTP 401: the instance was started with another secret than this proxy")
        if response.status != 200:
            raise UpstreamError(f"HTTP {response.status} for {path}: {raw[:300].decode(errors='replace')}")
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise UpstreamError(f"unexpected answer to {path}: {error}") from None

    @asynccontextmanager
    async def _call(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            response = await self._session.request(method, self.url + path, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:  # Timeouts of sock_connect are OSErrors too.
            raise _lost(error) from None
        try:
            yield response
        finally:
            # A response read to its end has given its connection back already; any other closes it here.
            response.close()


def _decoded(body: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _as_openai(body: bytes) -> bytes:
    """An engine's refusal in the form that clients read, on one line, as it must be in an event.

    Engines have other forms too: older ones of vLLM a flat one, and what stands before an engine may say anything.
    """
    match _decoded(body):
        case {"error": {"message": str()}} as said:
            return msgspec.json.encode(said)
        case {"message": str(message)}:
            return error_body(message)
        case _:
            return error_body(f"the engine refuses the request: {body[:300].decode(errors='replace')}")


async def _body_of(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise _lost(error) from None


def _lost(error: aiohttp.ClientError | OSError) -> UpstreamError:
    if isinstance(error, aiohttp.ClientPayloadError):
        return UpstreamError("connection lost: closed in the middle of a response")
    return UpstreamError(f"connection lost: {error or type(error).__name__}")


class _Chunks(AsyncIterator[bytes]):
    """Whatever has arrived, each time something has. (No generator: an attempt may stop reading anywhere.)"""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from None
        if not chunk:
            raise StopAsyncIteration
        return chunk


async def _load_reports(response: aiohttp.ClientResponse, silence_s: float) -> AsyncGenerator[LoadReport]:
    rest = b""
    chunks = _Chunks(response)
    while True:
        try:
            async with asyncio.timeout(silence_s):
                chunk = await anext(chunks)
        except TimeoutError:
            raise UpstreamError(f"silent for {silence_s} s") from None
        except StopAsyncIteration:
            raise UpstreamError("connection closed") from None
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise UpstreamError("sent an endless line of load")
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=LoadReport)
            except msgspec.DecodeError as error:
                raise UpstreamError(f"unexpected load report: {error}") from None
