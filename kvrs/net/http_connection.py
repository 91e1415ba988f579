"""A client's connection that aiohttp's server serves, and what one is told that is refused."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestPayloadError, _ErrInfo

from kvrs.net.broken_http import (
    BAD_EXPECT,
    BROKEN_BODY,
    MOST_HEAD_BYTES,
    MOST_URL_BYTES,
    HttpRefusal,
    refusal_of,
)
from kvrs.net.connections import Connections
from kvrs.net.routes import SERVER, refused
from kvrs.net.server import LINGERING_S, MUCH_BYTES, ReadingTurns, address_of, refuse
from kvrs.protocol.proof import NONCE_BYTES, ProofError, ServerProof
from kvrs.protocol.secrets import Scope, ScopedKey


class _BrokenHttp(logging.Filter):
    """Logs one line for a request that is not HTTP, without its bytes, which aiohttp quotes: they
    may be of a prompt or a key.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | RequestPayloadError):
            record.msg, record.args = "broken HTTP: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


log = logging.getLogger(__name__)
log.addFilter(_BrokenHttp())


class AiohttpConnection(web.RequestHandler):
    """A connection that counts. `scope` is the one of which the client has proved the key."""

    __slots__ = (
        *("_abort", "_among", "_body", "_has_begun_head", "_head_bytes", "_head_s", "_is_broken"),
        *("_proof", "_taken", "_turns", "_waits", "address", "idle_since_s", "scope"),
    )

    def __init__(
        self,
        server: web.Server,
        among: Connections,
        turns: ReadingTurns,
        keys: Sequence[ScopedKey],
        head_s: float,
        **settings: Any,
    ) -> None:
        super().__init__(server, keepalive_timeout=head_s, **settings)
        self._head_s = head_s
        self._has_begun_head = False  # Of the request that is waited for, something has come.
        self._head_bytes = 0  # Of a head, of which the end has not come.
        self._body: StreamReader = EMPTY_PAYLOAD  # Of the last request whose head is whole.
        self._is_broken = False  # What comes is no request any more.
        self._among = among
        self._turns = turns
        self._waits = False  # For its turn to read.
        self._proof = ServerProof(keys, secrets.token_bytes(NONCE_BYTES)) if keys else None
        self.address = ""
        self.idle_since_s: float | None = self._loop.time()  # None: it has a request.
        self.scope: Scope | None = None
        self._taken: asyncio.Transport | None = None
        self._abort: Callable[[], object] | None = None

    def reserve(self, address: str, abort: Callable[[], object]) -> bool:
        """Count it while it has no transport yet, until `connection_lost`; False: it is refused.
        `abort` ends it until then.
        """
        self.address, self._abort = address, abort
        self.idle_since_s = self._loop.time()
        return self._among.admit(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do what asyncio's do, and descend from none of them.
        transport = cast(asyncio.Transport, transport)
        if self._abort is None and not self.reserve(address_of(transport), transport.abort):
            refuse(transport)
            return
        self._taken = transport
        super().connection_made(transport)
        self._await_head(self._loop.time() + self._head_s)

    def _await_head(self, until_s: float) -> None:
        """Close the connection then, unless a whole head comes before."""
        self._has_begun_head = True
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        self._next_keepalive_close_time = until_s
        self._keepalive_handle = self._loop.call_at(until_s, self._process_keepalive)

    def data_received(self, data: bytes) -> None:
        if self._proof is not None:
            data = self._prove(self._proof, data)
            if not data:
                return
        if self._is_broken:
            return
        before, is_head = self._request_count, self._body.is_eof()
        super().data_received(data)
        if self._request_count != before:
            self._note_request()
        elif is_head:
            self._note_head(len(data))
        if not self._has_begun_head and self._waiter is not None and not self._waiter.done():
            self._await_head(self._loop.time() + self._head_s)
        if len(data) >= MUCH_BYTES and self.scope is None and not self._waits:
            self._waits = True
            self._pause_transport_reading()
            self._turns.wait(self)

    def _note_head(self, size_bytes: int) -> None:
        """A part of a head, of which the end has not come; bound it."""
        self._head_bytes += size_bytes
        if self._head_bytes > MOST_URL_BYTES + MOST_HEAD_BYTES:
            self._break(LineTooLong(b"", MOST_HEAD_BYTES))

    def _note_request(self) -> None:
        """The end of a head has come, or broken HTTP, which ends a body that was coming."""
        self._head_bytes = 0
        if not self._messages:
            return
        message, body = self._messages[-1]
        if isinstance(message, _ErrInfo):
            self._is_broken = True
            if not self._body.is_eof():  # Its handler waits for the rest, and answers.
                self._messages.pop()
                self._body.set_exception(RequestPayloadError(BROKEN_BODY.message))
        else:
            self._body = body

    def drop_rest(self) -> None:
        """Take nothing that comes from now on for a request, or a part of one."""
        self._is_broken = True

    def _break(self, error: HttpProcessingError) -> None:
        """Refuse what has come behind the last whole request, as the parser does."""
        self._is_broken = True
        self._messages.append((_ErrInfo(error.code, error, error.message), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer in the form of the OpenAI API, without bytes of the request."""
        super().handle_error(request, status, exc, message)
        if isinstance(exc, HttpProcessingError):
            return _closing(refusal_of(exc))
        if isinstance(exc, RequestPayloadError):
            return _closing(BROKEN_BODY)
        return _closing(HttpRefusal(status, "the server failed; its log says more"))

    def has_turn(self) -> None:
        """Its turn has come."""
        self._waits = False
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        if not self._waits:
            super()._resume_transport_reading()

    def _prove(self, proof: ServerProof, data: bytes) -> bytes:
        """Feed the proof; return the data that is left when it is over."""
        if self._taken is None:  # Refused.
            return b""
        try:
            answer, data = proof.receive(data)
        except ProofError as fault:
            log.warning("a client failed to prove itself: %s", fault)
            self._taken.abort()
            return b""
        if answer:
            self._taken.write(answer)
        if proof.is_over:
            self._proof = None
            self.scope = None if proof.scope is None else proof.scope.scope
        return data

    def connection_lost(self, exc: BaseException | None) -> None:
        self._among.forget(self)
        if self._taken is not None:
            super().connection_lost(exc)

    def abort(self) -> None:
        if self._taken is not None:
            self._taken.abort()
        elif self._abort is not None:
            self._abort()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):  # aiohttp's, before any handler.
            resp = _closing(BAD_EXPECT)
        if not resp.prepared:
            resp.headers.setdefault("Server", SERVER)
        try:
            finished = await super().finish_response(request, resp, start_time)
        finally:
            self.idle_since_s = self._loop.time()
            self._has_begun_head = False
        if self._is_broken and not self._messages and not self._force_close:
            await self._linger()
        return finished

    async def _linger(self) -> None:
        """Read on until the client closes, for a moment at most: a socket that is closed with
        unread bytes in it is reset, and the client loses the answer.
        """
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()
        await asyncio.sleep(LINGERING_S)


def _closing(refusal: HttpRefusal) -> web.Response:
    """The last response of a connection."""
    made = refused(refusal, {})
    response = web.Response(status=made.status, body=made.body, headers=made.headers)
    response.force_close()
    return response
