"""Bodies of clients' requests are read. One that comes later than its head is counted as it comes,
and cut off if that takes too long.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvrs.config.proxy import ProxySettings
from kvrs.errors import RequestError
from kvrs.net.http_request import Body
from kvrs.net.routes import Request
from kvrs.net.unfinished import (
    GRACE_PAUSES,
    LEAST_BYTES_PER_S,
    SMALL_BYTES,
    UnfinishedBodies,
    due_s,
)
from kvrs.proxy.streams.metrics import AdmissionMetrics
from kvrs.proxy.wire.requests import RequestUsage

log = logging.getLogger(__name__)

# A client that sends nothing of a body for this long is cut off.
BODY_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class _Reading:
    """A body that is being read."""

    request: Request
    body: Body
    held: RequestUsage
    timeout: asyncio.Timeout
    began_s: float
    pause_s: float
    is_cut: bool = False
    step_bytes: int = 0  # It had come so far when its connection last counted as idle since then.

    def cut(self) -> None:
        self.is_cut = True
        self.body.drop()
        if self.body.changed is not None:
            self.body.changed()

    def check(self) -> None:
        """Raises RequestError: it is cut, too long, or has no room any more."""
        if self.is_cut:
            raise RequestError(
                "the body was cut: it came more slowly than others, and unfinished bodies take up "
                "the memory for them; allowed: to send it again",
                status=408,
                code="body_cut",
            )
        received_bytes, now_s = self.body.received_bytes, asyncio.get_running_loop().time()
        self.held.allow(received_bytes)
        self.timeout.reschedule(due_s(self.began_s, now_s, received_bytes, self.pause_s))
        if received_bytes - self.step_bytes >= SMALL_BYTES:
            self.request.connection.idle_since_s, self.step_bytes = now_s, received_bytes


class ClientBodies:
    """Reads the bodies of one port. `unfinished` counts all of which the end has not come."""

    def __init__(
        self, settings: ProxySettings, metrics: AdmissionMetrics, clock: Callable[[], float]
    ) -> None:
        self.unfinished = UnfinishedBodies[_Reading](settings.unfinished_body_bytes)
        self._metrics = metrics
        self._clock = clock
        metrics.unfinished_bytes.set_function(lambda: self.unfinished.held_bytes)

    async def read(self, request: Request, held: RequestUsage) -> bytes:
        """The body of a request. A body that has no room among open requests is refused before it
        is read, and takes of that room when it is whole.

        Raises:
            RequestError: it is compressed, too long or too slow, there is no room for it, or it
                was cut in favour of others.
        """
        held.allow(request.content_length or 0)
        if (body := request.coming) is None or body.is_over:  # It came with the head.
            whole = await request.read()
        else:
            whole = await self._read_rest(request, body, held)
        held.take(len(whole))
        return whole

    async def _read_rest(self, request: Request, body: Body, held: RequestUsage) -> bytes:
        connection, pause_s, reading = request.connection, BODY_TIMEOUT_S, None
        began_s = asyncio.get_running_loop().time()
        # Idle since its last step, for the limits of connections.
        connection.idle_since_s = began_s
        try:
            async with asyncio.timeout(pause_s) as timeout:
                reading = _Reading(request, body, held, timeout, began_s, pause_s)
                return await request.read(partial(self._check, reading))
        except TimeoutError:
            raise RequestError(
                f"the body came too slowly; allowed: pauses of {pause_s:g} s, and after "
                f"{GRACE_PAUSES * pause_s:g} s {LEAST_BYTES_PER_S} bytes/s",
                status=408,
            ) from None
        finally:
            connection.idle_since_s = None
            if reading is not None:
                self.unfinished.end(reading)

    def _check(self, reading: _Reading) -> None:
        """Some of it may have come; raises RequestError: as `_Reading.check`."""
        if not reading.is_cut:
            body, now_s = reading.body, self._clock()
            held_bytes, received_bytes = body.held_bytes, body.received_bytes
            for cut in self.unfinished.note(reading, held_bytes, received_bytes, now_s):
                facts = {"held_bytes": cut.held_bytes, "quiet_s": round(cut.quiet_s, 3)}
                log.warning("unfinished body cut", extra=facts)
                self._metrics.bodies_cut.inc()
                cut.body.cut()
        reading.check()
