"""A kvrs connector in a scripted vLLM server: it speaks the instance protocol at a port of its own,
and takes the parameters that proxies seal for it. It moves no pages: it notes what it was asked
for.
"""

import asyncio
import itertools
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from kvrs import __version__
from kvrs.errors import RequestError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.connector import FIELD, connector_key, unseal
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import (
    EPOCHS_PER_START,
    Capability,
    ConnectorReport,
    FenceRequest,
    FetchReport,
    InstanceInfo,
    KvrsParams,
    LinkReport,
    LoadReport,
    MeasuredPrefill,
    Role,
)
from kvrs_testkit.scripted_server import ScriptedServer

_STARTS = itertools.count(1 << 22)


@dataclass(eq=False)
class ScriptedConnector(ScriptedServer):
    geometry: KvGeometry = field(default_factory=lambda: KvGeometry(2, 4, 8, 2, 16))
    fingerprint: str = "weights"
    capabilities: list[Capability] = field(
        default_factory=lambda: [
            Capability.PULL_PAGES,
            Capability.CHECKPOINT,
            Capability.SPLIT,
            Capability.FENCE,
        ]
    )
    taken: list[KvrsParams] = field(default_factory=list)  # Of all requests, in their order.
    refused: list[str] = field(default_factory=list)  # Parameters that it does not take, and why.
    fences: list[FenceRequest] = field(default_factory=list)
    off_reason: str | None = None
    pages_saved: int = 0
    pages_loaded: int = 0
    pages_damaged: int = 0
    fetches: list[FetchReport] = field(default_factory=list)
    # By agent that it saves to: leading pages by stream, as the agent has them.
    holdings: dict[str, dict[str, int]] = field(default_factory=dict)
    saves_behind_tokens: int = 0  # A request that asks for no more has ended before.
    loads_rightly: bool = True  # Else vLLM computes other tokens behind what it has loaded.
    loads: bool = True  # Else nothing that it should load comes, and vLLM computes that.
    deadline_s: float = 2.0  # For the front of a history.
    lag_pages: int = 0
    staging_pages: int = 1 << 10
    links: list[LinkReport] = field(default_factory=list)

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/kvrs/v1/instance", self._info)
        router.add_get("/kvrs/v1/load", self._load)
        router.add_get("/kvrs/v1/heartbeat", self._load)
        router.add_post("/kvrs/v1/fence", self._fence)

    async def start(self) -> None:
        self.epoch = next(_STARTS) * EPOCHS_PER_START
        await super().start()

    def take(
        self, transfer: dict[str, object], history_tokens: int, max_tokens: int
    ) -> KvrsParams | None:
        """The connector's part of the parameters of a request; None: it has none that counts."""
        if FIELD not in transfer or self._port is None:
            return None
        try:
            params = unseal(transfer[FIELD], [connector_key(self.secret, InstanceId(self.id))])
        except RequestError as error:
            self.refused.append(str(error))
            return None
        self.taken.append(params)
        full_pages = history_tokens // self.geometry.page_size_tokens
        for target in params.checkpoints if max_tokens > self.saves_behind_tokens else ():
            self.holdings.get(target.agent, {})[params.stream] = full_pages
        return params

    def load(self, params: KvrsParams, history_tokens: int, *, has_front: bool) -> bool:
        """Load what the parameters name, behind its front; False: nothing comes of it."""
        loads = self.loads and has_front
        pages = sum(source.pages for source in params.sources) * loads
        self.pages_loaded += pages
        loaded = pages * self.geometry.page_size_tokens
        rest = history_tokens - loaded
        self.fetches.append(
            FetchReport(
                params.stream,
                params.attempt,
                params.owner_epoch,
                loaded,
                rest,
                "" if loads else "nothing came",
            )
        )
        return loads

    async def _info(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._identity()))

    async def _fence(self, request: web.Request) -> web.Response:
        self.fences.append(msgspec.json.decode(await request.read(), type=FenceRequest))
        self.epoch += 1
        return web.Response(body=msgspec.json.encode(self._identity()))

    def _identity(self) -> InstanceInfo:
        return InstanceInfo(
            id=InstanceId(self.id),
            node=NodeId(self.node),
            role=Role.DECODE,
            epoch=self.epoch,
            pid=self.pid,
            model="tiny",
            fingerprint=self.fingerprint,
            geometry=self.geometry,
            max_model_len=0,
            page_port=0,
            capabilities=self.capabilities,
            prefill=MeasuredPrefill("", 1, []),
            fetch_pages_max=self.staging_pages,
        )

    async def _load(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.Response(body=msgspec.json.encode(self._report()))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        assert request.transport is not None
        self._watching.add(request.transport)
        while True:
            line = {"loop_age_s": 0.0} if "heartbeat" in request.path else self._report()
            await response.write(msgspec.json.encode(line) + b"\n")
            await asyncio.sleep(float(request.query["watch"]))
            await self.awake.wait()

    def _report(self) -> LoadReport:
        return LoadReport(
            epoch=self.epoch,
            queued=0,
            running=0,
            free_pages=0,
            queue_delay_s=0.0,
            links=self.links,
            checkpoint_lag_pages=self.lag_pages,
            damaged_pages=self.pages_damaged,
            fetched_pages=self.pages_loaded,
            fetches=self.fetches,
            connector=ConnectorReport(
                __version__,
                self.pages_saved,
                self.pages_loaded,
                self.pages_damaged,
                self.lag_pages,
                off_reason=self.off_reason,
                fingerprint=self.fingerprint,
                staging_pages=self.staging_pages,
            ),
        )
