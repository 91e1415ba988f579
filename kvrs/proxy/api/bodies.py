"""Limits on the time and memory of clients' bodies.

A body that arrives after its head takes from the body budget as it arrives, and is cut off if it
takes too long.

A body is cut off when nothing arrives for a time, however long the whole body takes. A client that
sends byte by byte could thus hold its connection and memory for days, so an incomplete body must
also grow by a step within many such times: a rate below that of any modem.
"""

import asyncio
from dataclasses import dataclass

from kvrs.errors import RequestError
from kvrs.net.http_request import Body
from kvrs.net.routes import Request
from kvrs.proxy.wire.requests import RequestUsage

# Longest pause within a client's body, after which the body is cut off.
BODY_TIMEOUT_S = 10.0
STEP_BYTES = 64 << 10
STEP_PAUSES = 30  # Longest time for STEP_BYTES of a body, as a multiple of the longest pause.


@dataclass(slots=True, eq=False)
class _Reading:
    """A client's body that is being read, with its time limits."""

    request: Request
    body: Body
    held: RequestUsage
    timeout: asyncio.Timeout
    pause_s: float
    step_s: float  # Time of the body's start, or of its last STEP_BYTES.
    step_bytes: int = 0  # Number of bytes received at `step_s`.

    def check(self) -> None:
        """Check the part that was received, and extend the body's time limit. Raises RequestError:
        too long, or open requests leave no memory.
        """
        received_bytes, now_s = self.body.received_bytes, asyncio.get_running_loop().time()
        self.held.take(received_bytes)
        if received_bytes - self.step_bytes >= STEP_BYTES:
            # For the port's limits on idle connections, this connection is idle since the body's
            # last step.
            self.request.connection.idle_since_s = self.step_s = now_s
            self.step_bytes = received_bytes
        due_s = self.step_s + STEP_PAUSES * self.pause_s
        self.timeout.reschedule(min(now_s + self.pause_s, due_s))


async def read_body(request: Request, held: RequestUsage) -> bytes:
    """Read a request's body.

    Raises:
        RequestError: compressed, too long, too slow, or open requests leave no memory.
    """
    if (body := request.coming) is None or body.is_over:  # The whole body arrived with the head.
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
