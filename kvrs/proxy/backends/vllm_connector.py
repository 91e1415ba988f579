"""The kvrs connector within a vLLM server: what it adds to the server's identity, load reports and
requests.

It speaks the instance protocol at a port of its own. While it gives no answer, or is off, the
server is used as a plain vLLM: the connector's end is not that of the server.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.connector import FIELD, seal
from kvrs.protocol.instance import (
    EPOCHS_PER_START,
    Capability,
    ConnectorReport,
    InstanceInfo,
    KvrsParams,
    LinkReport,
    LoadReport,
)
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.pd import PdBackend
from kvrs.proxy.backends.vllm_front import front_of

_USED = (Capability.PULL_PAGES, Capability.SPLIT, Capability.CHECKPOINT, Capability.FENCE)
_SILENT_S = 5.0  # Without a report; they come several times a second.
_ASK_AGAIN_S = 1.0


class VllmConnector:
    def __init__(self, peer: PdBackend, key: bytes) -> None:
        """`key`: under which parameters for it are sealed."""
        self.peer = peer
        self._key = key
        self._server: InstanceInfo | None = None  # The process that it is in.
        # Its epoch, and how far that is above the one that the server is known by; None: it has
        # not answered yet. It is 0 if it answered when the server was met: a later answer must not
        # look like another process.
        self._epoch = 0
        self._above: int | None = None
        self._pid = 0
        self._offered: list[Capability] = []
        self._fingerprint = ""
        self._fetch_pages_max: int | None = None
        self._report: LoadReport | None = None  # The last one of this process.
        self._fault: str | None = "not asked yet"  # None: it answers.

    @property
    def off_reason(self) -> str | None:
        """Why the server is used without it; None: it is at work."""
        if self._fault is None and self._report is not None and self._report.connector is not None:
            return self._report.connector.off_reason
        return self._fault

    # Identity and load.

    @property
    def known_start(self) -> int | None:
        """The number of the start of its process; None: it has given no answer since that of the
        server was met.
        """
        return self._epoch // EPOCHS_PER_START if self._fault is None else None

    async def start(self) -> int | None:
        """Ask the connector for the number of its start; None: it gives no answer."""
        try:
            return (await self.peer.info()).epoch // EPOCHS_PER_START
        except UpstreamError:
            return None

    async def join(self, server: InstanceInfo) -> InstanceInfo:
        """The identity of a server that answers, the connector's share included."""
        is_new = self._server is None or self._server.epoch != server.epoch
        self._server = server
        if is_new:
            self._epoch, self._above, self._pid = 0, None, 0
            self._report, self._fingerprint = None, ""
        own = await self._ask()
        if own is not None and is_new:
            self._above, self._pid = 0, own.pid
        return self._joined(server)

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        assert self._server is not None
        self._met(await self.peer.fence(attempts))
        return self._joined(self._server)

    def _merged(self, report: LoadReport) -> LoadReport:
        """A report of the server with the connector's beside it."""
        server, own, off_reason = self._server, self._report, self.off_reason
        assert server is not None
        counts = None if own is None else own.connector
        changes: dict[str, Any] = {
            "connector": msgspec.structs.replace(
                counts or ConnectorReport(""), off_reason=off_reason
            )
        }
        if report.epoch == server.epoch:  # Else a server that is yet to be met.
            joined = self._joined(server)
            changes |= {"epoch": joined.epoch, "capabilities": joined.capabilities}
        if own is not None:
            changes |= {
                "links": _merged_links(report.links, own.links if off_reason is None else []),
                "checkpoint_lag_pages": own.checkpoint_lag_pages,
                "damaged_pages": own.damaged_pages,
                "fetched_pages": own.fetched_pages,
                "fetches": own.fetches,
                "kv_bytes": own.kv_bytes,
            }
        return msgspec.structs.replace(report, **changes)

    @asynccontextmanager
    async def beside(
        self, interval_s: float, reports: AsyncGenerator[LoadReport]
    ) -> AsyncIterator[AsyncIterator[LoadReport]]:
        """Reports of the server, the connector's share included."""
        async with aclosing(reports):
            follows = asyncio.create_task(self._follow(interval_s))
            try:
                yield self._merge(reports, follows)
            finally:
                follows.cancel()
                await asyncio.gather(follows, return_exceptions=True)

    async def _merge(
        self, reports: AsyncIterator[LoadReport], follows: "asyncio.Task[None]"
    ) -> AsyncIterator[LoadReport]:
        async for report in reports:
            if follows.done():
                follows.result()  # A bug, which ends the watch.
            yield self._merged(report)

    async def _follow(self, interval_s: float) -> None:
        while True:
            try:
                if self._fault is None or await self._ask() is not None:
                    await self._read_reports(interval_s)
            except UpstreamError as error:
                self._fault = str(error)
            except TimeoutError:
                self._fault = f"silent for {_SILENT_S:g} s"
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _read_reports(self, interval_s: float) -> None:
        now_s = asyncio.get_running_loop().time
        async with (
            asyncio.timeout(_SILENT_S) as limit,
            self.peer.watch_load(interval_s) as reports,
        ):
            async for report in reports:
                limit.reschedule(now_s() + _SILENT_S)
                self._report = report
                self._epoch = max(self._epoch, report.epoch)

    async def _ask(self) -> InstanceInfo | None:
        """Ask it for its identity and load. None: it cannot be used, and `_fault` says why."""
        assert self._server is not None
        try:
            own = await self.peer.info()
            self._report = await self.peer.load()
        except UpstreamError as error:
            self._fault = str(error)
            return None
        counts = self._report.connector
        is_on = counts is None or counts.off_reason is None
        for what in ("id", "node", "geometry") if is_on else ():
            wanted, got = getattr(self._server, what), getattr(own, what)
            if wanted != got:
                self._fault = f"its {what} is {got}, that of the configuration {wanted}"
                return None
        self._met(own)
        return own

    def _met(self, own: InstanceInfo) -> None:
        assert self._server is not None
        self._fault, self._offered, self._fingerprint = None, own.capabilities, own.fingerprint
        self._fetch_pages_max = own.fetch_pages_max
        if self._above is None:
            self._above = own.epoch - self._server.epoch
        self._epoch = max(self._epoch, own.epoch)

    def _joined(self, server: InstanceInfo) -> InstanceInfo:
        offered = self._offered if self.off_reason is None else []
        if Capability.PREFIX_CACHE not in server.capabilities:
            # A front would be computed for nothing.
            offered = [each for each in offered if each is not Capability.SPLIT]
        return msgspec.structs.replace(
            server,
            epoch=server.epoch if self._above is None else self._epoch - self._above,
            pid=self._pid,
            capabilities=[*server.capabilities, *(each for each in _USED if each in offered)],
            kv_fingerprint=self._fingerprint,
            fetch_pages_max=self._fetch_pages_max,
        )

    # The calls of a stream.

    def front(self, call: Call) -> Call | None:
        """The call that computes the front of a decode call's history; None: it needs none."""
        assert self._server is not None
        found = front_of(call, self._server.geometry.page_size_tokens)
        if found is None or self.off_reason is not None:
            return None
        self.seal(*found)
        return found[0]

    def seal(self, call: Call, params: KvrsParams) -> None:
        """Put parameters for it into a call, beside those of a hand-off."""
        if self.off_reason is not None:
            return
        params.token_ids = None  # vLLM gets a history as its prompt.
        call.add_transfer(FIELD, seal(params, self._key))


def _merged_links(handed_off: list[LinkReport], fetched: list[LinkReport]) -> list[LinkReport]:
    """Links by what the connector has fetched, and by hand-offs where it has fetched nothing."""
    sources = {link.source for link in fetched}
    return [*fetched, *(link for link in handed_off if link.source not in sources)]
