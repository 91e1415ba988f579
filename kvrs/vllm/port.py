"""The connector's sockets: a thread with an event loop in the
process of vLLM's scheduler.

It fetches pages for restores, sends pages to agents, and serves the instance protocol to proxies
and agents.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.file import Config
from kvrs.errors import KvrsError
from kvrs.ids import StreamId
from kvrs.net.connections import ConnectionLimits
from kvrs.net.http import HttpPort
from kvrs.net.tls import load_certificates
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import CheckpointTarget, FetchReport
from kvrs.protocol.page_messages import Identity
from kvrs.protocol.secrets import Scope, scoped_keys
from kvrs.transfer.checkpoint_backlog import CheckpointBacklog, CheckpointDelivery
from kvrs.transfer.checkpoint_sender import CheckpointSender, DueRange, PushedPages
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import HeldPages, Peer
from kvrs.transfer.puller import PagePuller, RecentReports
from kvrs.transfer.pusher import PagePusher
from kvrs.transfer.registry import agents_of, probe_links, with_own_memory
from kvrs.transfer.send_faults import SendingFaults
from kvrs.vllm.fetching import RestoreFetches
from kvrs.vllm.instance_protocol import InstanceProtocol
from kvrs.vllm.staging import Staging
from kvrs.vllm.tracked import CopyRequest, Counts, FilledPages, Restore, SavedStream

log = logging.getLogger(__name__)

_MAX_FENCED = 1 << 16  # Streams of which the lowest attempt that counts is remembered.
_START_S = 10.0


class _CountedPages(PushedPages):
    """The pages that agents have taken count as saved, not those that they were only sent."""

    def __init__(self, port: "ConnectorPort", pusher: PagePusher, counts: Counts) -> None:
        super().__init__(port, pusher)
        self._counts = counts

    async def send(
        self, agent: Peer, ranges: Sequence[DueRange]
    ) -> list[tuple[int, HeldPages] | None]:
        answers = await super().send(agent, ranges)
        for (_, first_page, _), answer in zip(ranges, answers, strict=True):
            if answer is not None:
                pages, held = answer
                self._counts.pages_saved += held.taken(first_page, pages)
        return answers


class ConnectorPort:
    """Methods without an underscore may be called in any thread, those of tasks apart."""

    def __init__(
        self,
        config: Config,
        node: NodeSettings,
        settings: InstanceSettings,
        ring: Sequence[bytes],
        geometry: KvGeometry,
        fingerprint: str,
        staging: Staging,
        request_copy: Callable[[CopyRequest], None],
        off_reason: Callable[[], str | None],
        pinned_blocks: Callable[[], int],
        epoch: int,
    ) -> None:
        self.counts = Counts()
        self.recent: RecentReports[FetchReport] = RecentReports(time.monotonic)
        self._config, self.node, self.settings, self._ring = config, node, settings, ring
        self.geometry, self.fingerprint = geometry, fingerprint
        self.staging, self._request_copy, self.off_reason = staging, request_copy, off_reason
        self.pinned_blocks = pinned_blocks
        self.epoch = epoch
        self.fenced: dict[StreamId, tuple[int, int]] = {}
        self._agents = with_own_memory(agents_of(config), config, node, ring[0])
        self.backlog = CheckpointBacklog(geometry.page_size_tokens)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self.failure: str | None = None  # Why its thread has ended; the scheduler's thread looks.
        self._thread = threading.Thread(target=self._run, name="kvrs-pages", daemon=True)

    def start(self) -> None:
        """Raises KvrsError: its port cannot be had."""
        self._thread.start()
        if not self._started.wait(_START_S):
            raise KvrsError("the connector's port did not open in time")
        if self.failure is not None:
            raise KvrsError(self.failure)

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._stop.set)
            self._thread.join(_START_S)

    # What the scheduler's thread calls.

    def fetch(self, restore: Restore) -> None:
        self._call(self.fetches.begin, restore)

    def release(self, restore: Restore) -> None:
        self._call(self.fetches.end, restore)

    def settled(
        self, restore: Restore, loaded_tokens: int, computed_tokens: int, fault: str
    ) -> None:
        self.counts.pages_loaded += loaded_tokens // self.geometry.page_size_tokens
        owner_epoch, attempt = restore.attempt
        fetch = FetchReport(
            restore.stream, attempt, owner_epoch, loaded_tokens, computed_tokens, fault
        )
        self._call(self.recent.note, fetch)

    def follow(
        self, saved: SavedStream, checkpoints: Sequence[CheckpointTarget], *, handed_over: bool
    ) -> None:
        known = [each for each in checkpoints if each.agent in self._agents]
        self._call(lambda: self.backlog.follow(saved, known, handed_over=handed_over))

    def filled(self, fills: Sequence[FilledPages]) -> None:
        self._call(self._filled, fills)

    def copied(self, copies: Sequence[tuple[CopyRequest, int]]) -> None:
        self._call(self._copied, copies)

    def ended(self, saved: SavedStream, *, send_rest: bool) -> None:
        self._call(self._ended, saved, send_rest)

    def is_sent(self, saved: SavedStream) -> bool:
        return saved.is_ended and not self.backlog.follows(saved)

    def is_fenced(self, stream: StreamId, attempt: tuple[int, int]) -> bool:
        return attempt < self.fenced.get(stream, attempt)

    def _call(self, work: Callable[..., object], *args: Any) -> None:
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(work, *args)

    # The thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            log.exception("the connector's port has ended")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        config, settings = self._config, self.settings
        links = SendingLinks(config.transfer, SendingFaults(), self.node.id)
        secret = self._ring[0]
        self._puller = PagePuller(self._identity, secret, config.transfer, time.monotonic)
        self.fetches = RestoreFetches(self._puller, self._agents, self.staging)
        self._pusher = PagePusher(self._identity, secret, config.transfer, links)
        self._sender = CheckpointSender(
            self.backlog,
            _CountedPages(self, self._pusher, self.counts),
            self._agents,
            config.backup,
            min(config.backup.staging_pages, max(1, self.staging.pages // 2)),
            time.monotonic,
        )
        keys = scoped_keys(self._ring, settings.id, Scope.INSTANCE)
        tls = load_certificates("security.tls", config.security.tls)
        port = HttpPort(
            InstanceProtocol(self, self._puller, self._pusher).app(),
            ConnectionLimits.of_peers(),
            shutdown_timeout_s=0.5,
            names={settings.host, *config.security.hosts},
            keys=keys,
            tls=tls,
        )
        assert settings.connector_port is not None
        await port.open(settings.bound(settings.host), settings.connector_port)
        own = Peer(settings.id, self.node.id, settings.host, 0)
        registry = {settings.id: own, **self._agents}
        interval_s = config.transfer.probe_interval_s
        jobs = [
            asyncio.create_task(self._sender.run()),
            asyncio.create_task(probe_links(self._puller, registry, settings.id, interval_s)),
            asyncio.create_task(self._wait()),
        ]
        if tls is not None:
            jobs.append(asyncio.create_task(tls.run()))
        self._started.set()
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            ending = [*jobs, *self.fetches.tasks]
            for job in ending:
                job.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await port.close()
            await self._puller.close()
            await self._pusher.close()

    async def _wait(self) -> None:
        await self._stop.wait()

    def _identity(self) -> Identity:
        return Identity(
            instance=self.settings.id,
            node=self.node.id,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            page_bytes=self.geometry.page_bytes,
            page_cells=self.geometry.page_cells,
        )

    # Checkpoints.

    def _filled(self, fills: Sequence[FilledPages]) -> None:
        for filled in fills:
            saved = filled.saved
            if self.is_fenced(saved.stream, saved.attempt):
                self.backlog.ended(saved, send_rest=False)
                continue
            saved.tags += filled.tags
            saved.computed_tokens = filled.computed_tokens
            self._sender.wake(self.backlog.filled(saved, time.monotonic()))

    def _copied(self, copies: Sequence[tuple[CopyRequest, int]]) -> None:
        for copy, pages in copies:
            copy.copied(pages)

    def _ended(self, saved: SavedStream, send_rest: bool) -> None:
        self.backlog.ended(saved, send_rest=send_rest)
        saved.is_ended = True

    def is_over(self, delivery: CheckpointDelivery) -> bool:
        return False  # The scheduler's thread says how long an ended one is sent.

    @asynccontextmanager
    async def lend(self, ranges: Sequence[DueRange]) -> AsyncIterator[list[list[memoryview]]]:
        """Copies of the pages, as vLLM's next step makes them."""
        taken = [self.staging.take(end - first) for _, first, end in ranges]
        copies = [
            self._copy(delivery.sequence, first, slots)
            for (delivery, first, _), slots in zip(ranges, taken, strict=True)
        ]
        try:
            # None is cancelled: a worker may be copying into these slots.
            await asyncio.wait(copies)
            counts = [copy.result() for copy in copies]
            yield [
                [self.staging.view(slot) for slot in slots[:count]]
                for slots, count in zip(taken, counts, strict=True)
            ]
        finally:
            for slots in taken:
                self.staging.give_back(slots)

    def _copy(self, saved: Any, first_page: int, slots: list[int]) -> asyncio.Future[int]:
        assert isinstance(saved, SavedStream)
        pages: asyncio.Future[int] = self._loop.create_future()
        # A connector that is off makes no step any more in which there could be an answer.
        if slots and self.off_reason() is None:
            self._request_copy(CopyRequest(saved.request_id, first_page, slots, pages.set_result))
        else:
            pages.set_result(0)
        return pages

    def fence(self, attempts: Mapping[StreamId, tuple[int, int]], *, slots_only: bool) -> None:
        """Drop lower attempts: nothing is fetched for them, and with an epoch of its own nothing of
        them is taken any more, nor saved once they have filled a page more. With `slots_only` only
        what is fetched under a slot. For the protocol's routes.
        """
        self.fetches.fence(attempts, slots_only=slots_only)
        if slots_only:
            return
        for stream, attempt in attempts.items():
            self.fenced[stream] = max(attempt, self.fenced.pop(stream, attempt))
        while len(self.fenced) > _MAX_FENCED:
            del self.fenced[next(iter(self.fenced))]
        self.epoch += 1
