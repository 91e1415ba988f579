"""The instance protocol of the connector: its identity, load, heartbeats and fence, for proxies and
agents.
"""

import os
from collections.abc import Mapping
from typing import Protocol

from aiohttp import web

from kvrs import __version__
from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.ids import StreamId
from kvrs.net import http
from kvrs.net.heartbeats import add_heartbeats
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import (
    Capability,
    ConnectorReport,
    FenceRequest,
    FetchReport,
    InstanceInfo,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    MeasuredPrefill,
)
from kvrs.protocol.page_messages import TrafficClass
from kvrs.protocol.secrets import Scope
from kvrs.transfer.checkpoint_backlog import CheckpointBacklog
from kvrs.transfer.puller import PagePuller, RecentReports
from kvrs.transfer.pusher import PagePusher
from kvrs.vllm.staging import Staging
from kvrs.vllm.tracked import Counts

# A front of a history is a request of its own, for which the request behind it waits.
_OFFERED = [Capability.PULL_PAGES, Capability.SPLIT, Capability.CHECKPOINT, Capability.FENCE]


class Served(Protocol):
    """The port whose protocol it is."""

    settings: InstanceSettings
    node: NodeSettings
    fingerprint: str
    geometry: KvGeometry
    epoch: int
    counts: Counts
    recent: RecentReports[FetchReport]
    backlog: CheckpointBacklog
    staging: Staging

    def off_reason(self) -> str | None: ...
    def pinned_blocks(self) -> int: ...
    def fence(self, attempts: Mapping[StreamId, tuple[int, int]], *, slots_only: bool) -> None: ...


class InstanceProtocol:
    def __init__(self, port: Served, puller: PagePuller, pusher: PagePusher) -> None:
        self._port, self._puller, self._pusher = port, puller, pusher
        self._news = http.News()

    def app(self) -> web.Application:
        app = http.new_app(Scope.INSTANCE)
        app.add_routes(
            [
                web.get("/kvrs/v1/instance", self._info),
                web.get("/kvrs/v1/load", self._load),
                web.post("/kvrs/v1/fence", self._fence),
                web.post("/kvrs/v1/leases", self._leases),
            ]
        )
        add_heartbeats(app)
        return app

    async def _info(self, request: web.Request) -> web.Response:
        return http.answer(self._describe())

    def _describe(self) -> InstanceInfo:
        is_on = self._port.off_reason() is None
        return InstanceInfo(
            id=self._port.settings.id,
            node=self._port.node.id,
            role=self._port.settings.role,
            epoch=self._port.epoch,
            pid=os.getpid(),
            model="",
            fingerprint=self._port.fingerprint,
            geometry=self._port.geometry,
            max_model_len=0,
            page_port=0,
            capabilities=_OFFERED if is_on else [],
            prefill=MeasuredPrefill("", 1, []),
            fetch_pages_max=self._port.staging.pages,
        )

    def _report(self) -> LoadReport:
        moved = self._puller.pulled_bytes | {TrafficClass.CHECKPOINT: self._pusher.pushed_bytes}
        return LoadReport(
            epoch=self._port.epoch,
            queued=0,
            running=0,
            free_pages=0,
            queue_delay_s=0.0,
            links=self._puller.link_reports(),
            checkpoint_lag_pages=self._port.backlog.lag_pages,
            damaged_pages=self._puller.damaged_pages,
            fetched_pages=self._port.counts.pages_loaded,
            fetches=self._port.recent.reports(),
            kv_bytes={traffic.label: count for traffic, count in moved.items()},
            connector=ConnectorReport(
                version=__version__,
                pages_saved=self._port.counts.pages_saved,
                pages_loaded=self._port.counts.pages_loaded,
                pages_damaged=self._puller.damaged_pages,
                lag_pages=self._port.backlog.lag_pages,
                pinned_blocks=self._port.pinned_blocks(),
                off_reason=self._port.off_reason(),
                fingerprint=self._port.fingerprint,
                staging_pages=self._port.staging.pages,
            ),
        )

    async def _load(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return http.answer(self._report())
        return await http.watch(request, self._report, self._news)

    async def _fence(self, request: web.Request) -> web.Response:
        """Drop lower attempts: nothing is fetched for them, and nothing more of them is saved. vLLM
        ends them when their connections are closed.
        """
        fence = http.decode(await request.read(), FenceRequest)
        self._port.fence(fence.numbers(), slots_only=fence.slots_only)
        return http.answer(self._describe())

    async def _leases(self, request: web.Request) -> web.Response:
        """VLLM's blocks are not leased by proxies: all that are named are unknown."""
        return http.answer(LeaseAnswer(http.decode(await request.read(), LeaseUpdate).renew))
