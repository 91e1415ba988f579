"""Bodies of clients' requests are read at aiohttp's server, and counted as they come."""

import asyncio
import logging
import sys
from collections.abc import Callable
from functools import partial

from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestPayloadError

from kvrs.config.proxy import ProxySettings
from kvrs.errors import RequestError
from kvrs.net.broken_http import BROKEN_BODY
from kvrs.net.direct import DirectConnection
from kvrs.net.http_connection import HttpConnection
from kvrs.net.unfinished import (
    GRACE_PAUSES,
    LEAST_BYTES_PER_S,
    SMALL_BYTES,
    Cut,
    UnfinishedBodies,
    due_s,
)
from kvrs.protocol.openai.structure import BYTE_ORDER_MARK
from kvrs.proxy.streams.metrics import AdmissionMetrics
from kvrs.proxy.wire.requests import RequestUsage

log = logging.getLogger(__name__)


# That of a request of which something has read it already.
BODY = web.RequestKey("body", bytes)

# Smaller pieces are put together to such parts.
_PART_BYTES = 16 << 10

# A client that sends nothing of a body for this long is cut off.
BODY_TIMEOUT_S = 10.0


class _ComingBody:
    """A body that is being read. `timeout` ends the reading, also when it is cut.

    It is kept in the parts in which it came: one buffer would be moved about in memory as it grows,
    beside those of others, and leave holes there.
    """

    def __init__(self, content: StreamReader, timeout: asyncio.Timeout) -> None:
        self.content = content
        self.read_bytes = 0
        self.is_cut = False
        self._timeout = timeout
        self._parts: list[bytes] = []
        self._small = bytearray()

    def add(self, piece: bytes) -> None:
        self.read_bytes += len(piece)
        if len(piece) < _PART_BYTES:
            self._small += piece
            if len(self._small) < _PART_BYTES:
                return
            piece = b""
        if self._small:
            self._parts.append(bytes(self._small))
            self._small = bytearray()
        if piece:
            self._parts.append(piece)

    def whole(self) -> bytes:
        """All of it, which is held here no longer."""
        parts, self._parts = self._parts, []
        return b"".join((*parts, self._small))

    @property
    def held_bytes(self) -> int:
        """With what has come and is not read yet, and with the buffer's room for more."""
        room_bytes = sys.getsizeof(self._small) - len(self._small)
        return self.content.total_bytes + room_bytes

    def cut(self) -> None:
        self.is_cut = True
        self._parts, self._small = [], bytearray()
        self._timeout.reschedule(asyncio.get_running_loop().time())


class ClientBodies:
    """Reads the bodies of one port. `unfinished` counts all of which the end has not come."""

    def __init__(
        self, settings: ProxySettings, metrics: AdmissionMetrics, clock: Callable[[], float]
    ) -> None:
        self.unfinished = UnfinishedBodies[_ComingBody | DirectConnection](
            settings.unfinished_body_bytes
        )
        self._metrics = metrics
        self._clock = clock
        metrics.unfinished_bytes.set_function(lambda: self.unfinished.held_bytes)

    async def read(self, request: web.Request, held: RequestUsage) -> bytes:
        """The body of a request. A body that has no room among open requests is refused before it
        is read, and takes of that room when it is whole.

        Raises:
            RequestError: it is compressed, too long or too slow, there is no room for it, or it
                was cut in favour of others.
        """
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestError(
                "this Content-Encoding is not supported; allowed: 'identity'",
                status=415,
            )
        held.allow(request.content_length or 0)
        content, connection = request.content, request.protocol
        if content.is_eof():  # All of it came with the head, or right behind it.
            whole = content.read_nowait()
        else:
            whole = await self._read_rest(content, connection, held)
        whole = whole.removeprefix(BYTE_ORDER_MARK)
        held.take(len(whole))
        return whole

    async def _read_rest(
        self, content: StreamReader, connection: object, held: RequestUsage
    ) -> bytes:
        counted = connection if isinstance(connection, HttpConnection) else None
        loop, pause_s, body = asyncio.get_running_loop(), BODY_TIMEOUT_S, None
        began_s, step_bytes = loop.time(), 0
        try:
            async with asyncio.timeout(pause_s) as timeout:
                body = _ComingBody(content, timeout)
                if counted is not None:
                    counted.data_came = partial(self._note, body)
                    # Idle since its last step, for the limits of connections.
                    counted.idle_since_s = began_s
                self._note(body)
                while not body.is_cut and not content.at_eof():
                    # No name holds a piece while the next one is awaited.
                    body.add(await content.readany())
                    self._note(body)
                    if not body.is_cut:
                        held.allow(body.read_bytes)
                        now_s = loop.time()
                        timeout.reschedule(due_s(began_s, now_s, body.read_bytes, pause_s))
                        if counted is not None and body.read_bytes - step_bytes >= SMALL_BYTES:
                            counted.idle_since_s, step_bytes = now_s, body.read_bytes
        except RequestPayloadError:
            raise RequestError(BROKEN_BODY.message, status=BROKEN_BODY.status) from None
        except TimeoutError:
            if body is None or not body.is_cut:
                raise RequestError(
                    f"the body came too slowly; allowed: pauses of {pause_s:g} s, and after "
                    f"{GRACE_PAUSES * pause_s:g} s {LEAST_BYTES_PER_S} bytes/s",
                    status=408,
                ) from None
        finally:
            if counted is not None:
                counted.data_came = counted.idle_since_s = None
            if body is not None:
                self.unfinished.end(body)
        if body.is_cut:
            raise RequestError(
                "the body was cut: it came more slowly than others, and unfinished bodies take up "
                "the memory for them; allowed: to send it again",
                status=408,
                code="body_cut",
            )
        return body.whole()

    def _note(self, body: _ComingBody) -> None:
        """Some of it may have come, or been read."""
        if body.is_cut:
            return
        if body.content.is_eof():  # Whole: from here on it is not cut.
            self.unfinished.end(body)
            return
        received_bytes = body.content.total_bytes
        for cut in self.unfinished.note(body, body.held_bytes, received_bytes, self._clock()):
            self._cut(cut)

    def _cut(self, cut: Cut[_ComingBody | DirectConnection]) -> None:
        assert isinstance(cut.body, _ComingBody)  # Others are small.
        facts = {"held_bytes": cut.held_bytes, "quiet_s": round(cut.quiet_s, 3)}
        log.warning("unfinished body cut", extra=facts)
        self._metrics.bodies_cut.inc()
        cut.body.cut()
