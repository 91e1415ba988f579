"""Small calls to a process of the cluster, and watches that last.

Every failure of the other side is an `UpstreamError`.

A proxy's requests to the agent of a node, which holds checkpoints and grants slots.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TypeVar

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import (
    AgentInfo,
    AgentReport,
    Heartbeat,
    LeaseAnswer,
    LeaseUpdate,
    SlotAnswer,
    SlotUpdate,
)
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.wire.errors import UnusableError
from kvrs.proxy.wire.upstream import Pool
from kvrs.proxy.wire.watchdog import SilentError, Watchdog

Answer = TypeVar("Answer")

CONTROL_TIMEOUT_S = 2.0  # Time limit of small calls; completions have no such limit.


class Peer:
    """A client of the process that one pool connects to."""

    UNAUTHORISED = "it was started with another secret than this proxy"

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.engine_version: str | None = None

    @property
    def url(self) -> str:
        return self.pool.url

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        return await self.control("POST", "/kvrs/v1/leases", update, LeaseAnswer)

    def watch_heartbeats(
        self, interval_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Heartbeat]]:
        return self.watch("/kvrs/v1/heartbeat", interval_s, Heartbeat)

    @asynccontextmanager
    async def watch(
        self, path: str, interval_s: float, kind: type[Answer]
    ) -> AsyncIterator[AsyncIterator[Answer]]:
        """Connect, and yield the process's reports, one per line, until the connection ends with
        the process.
        """
        async with (
            self.pool.lines(f"{path}?watch={interval_s}") as lines,
            aclosing(_reports_of(lines, kind)) as reports,
        ):
            yield reports

    async def control(
        self, method: str, path: str, message: msgspec.Struct | None, kind: type[Answer]
    ) -> Answer:
        body = None if message is None else msgspec.json.encode(message)
        assert (method == "GET") == (body is None)
        try:
            with Watchdog(lambda *_: CONTROL_TIMEOUT_S):
                status, raw = await self.pool.ask(path, body)
        except SilentError:
            raise SilentError(f"no answer to {path} within {CONTROL_TIMEOUT_S} s") from None
        if status == 401:
            raise UnusableError(f"HTTP 401: {self.UNAUTHORISED}")
        if status != 200:
            raise _unexpected(status, path, raw)
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNREADABLE as error:
            raise UnusableError(f"unexpected answer to {path}: {error}") from None


def _unexpected(status: int, path: str, body: bytes) -> UpstreamError:
    """Return the error for an unexpected status: a server of the cluster fails with 5xx, so another
    status shows another server.
    """
    answer = f"HTTP {status} for {path}: {body[:300].decode(errors='replace')}"
    return (
        UpstreamError(answer)
        if status >= 500
        else UnusableError(f"another server answers there: {answer}")
    )


async def _reports_of(lines: AsyncIterator[bytes], kind: type[Answer]) -> AsyncGenerator[Answer]:
    """Decode lines to reports. Raises UpstreamError: a line is not a report of this kind."""
    async for line in lines:
        try:
            yield msgspec.json.decode(line, type=kind)
        except UNREADABLE as error:
            raise UpstreamError(f"unexpected report: {error}") from None


class AgentBackend(Peer):
    """Client of the agent at one URL; failures raise `UpstreamError`."""

    async def info(self) -> AgentInfo:
        return await self.control("GET", "/kvrs/v1/agent", None, AgentInfo)

    def watch_holdings(
        self, interval_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[AgentReport]]:
        return self.watch("/kvrs/v1/holdings", interval_s, AgentReport)

    async def slots(self, update: SlotUpdate) -> SlotAnswer:
        return await self.control("POST", "/kvrs/v1/slots", update, SlotAnswer)
