"""Bodies of clients' requests are read. One that comes later than its head takes of the body budget
as it comes, and is cut off if that takes too long.

A body is cut off when nothing of it comes for a time, however long it takes as a whole. A client
that sends byte by byte could hold its connection and what it has sent for days by that, so a body
that is not whole has to grow by a step within many such times: at a rate below that of any modem.
"""

import asyncio
from dataclasses import dataclass

from kvrs.errors import RequestError
from kvrs.net.http_request import Body
from kvrs.net.routes import Request
from kvrs.proxy.wire.requests import RequestUsage

# A client that sends nothing of a body for this long is cut off.
BODY_TIMEOUT_S = 10.0
STEP_BYTES = 64 << 10
STEP_PAUSES = 30  # Of the longest pause: the time for a step.


@dataclass(slots=True, eq=False)
class _Reading:
    """A body that is being read."""

    request: Request
    body: Body
    held: RequestUsage
    timeout: asyncio.Timeout
    pause_s: float
    step_s: float  # When it began, or made its last step.
    step_bytes: int = 0  # It had come so far then.

    def check(self) -> None:
        """Some of it may have come; raises RequestError: it is too long, or there is no room."""
        received_bytes, now_s = self.body.received_bytes, asyncio.get_running_loop().time()
        self.held.take(received_bytes)
        if received_bytes - self.step_bytes >= STEP_BYTES:
            # For the limits of connections it is idle since its last step.
            self.request.connection.idle_since_s = self.step_s = now_s
            self.step_bytes = received_bytes
        due_s = self.step_s + STEP_PAUSES * self.pause_s
        self.timeout.reschedule(min(now_s + self.pause_s, due_s))


async def read_body(request: Request, held: RequestUsage) -> bytes:
    """The body of a request. A body that has no room among open requests is refused before it is
    read.

    Raises:
        RequestError: it is compressed, too long or too slow, or there is no room for it.
    """
    held.allow(request.content_length or 0)
    if (body := request.coming) is None or body.is_over:  # It came with the head.
        whole = await request.read()
    else:
        whole = await _read_rest(request, body, held)
    held.take(len(whole))
    return whole


async def _read_rest(request: Request, body: Body, held: RequestUsage) -> bytes:
    connection, pause_s = request.connection, BODY_TIMEOUT_S
    connection.idle_since_s = began_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(pause_s) as timeout:
            reading = _Reading(request, body, held, timeout, pause_s, began_s)
            return await request.read(reading.check)
    except TimeoutError:
        raise RequestError(
            f"the body came too slowly; allowed: pauses of {pause_s:g} s, and {STEP_BYTES} bytes "
            f"in {STEP_PAUSES * pause_s:g} s",
            status=408,
        ) from None
    finally:
        connection.idle_since_s = None
