"""The operator's port, separate from the clients': state, metrics, reload."""

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvrs.config.file import Config, read_admin_tokens
from kvrs.errors import ConfigError, RequestError
from kvrs.ids import InstanceId
from kvrs.net.http import HEALTHZ, answer, require_token
from kvrs.net.routes import Request, Response, Routes
from kvrs.process.large_work import LargeWork
from kvrs.protocol.mirror import DrainOrder
from kvrs.proxy.api.rows import INTERVAL_S, Counts, History, StateSeries, overview
from kvrs.proxy.api.state import describe, describe_open, describe_processes
from kvrs.proxy.fleet.orders import (
    RankOrder,
    note_exit,
    parse_exit,
    pass_on,
)
from kvrs.proxy.mirror.peers import Peers
from kvrs.proxy.reload import (
    Apply,
    ReloadingPart,
    ReloadResult,
    Reloads,
)
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.watch.gossip_view import GossipView

log = logging.getLogger(__name__)

Describe = Callable[[Driver, GossipView, dict[str, Any], float], dict[str, Any]]

UI = "/ui"
_LONGEST_DRAIN_S = 86_400.0
_RANK = "/kvrs/v1/leave/{id}/{rank}"
# The page itself contains no data: it fetches all data with the token that the operator types, and
# loads nothing else.
_UI_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action "
    "'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Collected(Collector):
    """Metric families that were collected on the event loop, so that no value changes while a
    thread renders them.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = [*metrics]

    def collect(self) -> list[Metric]:
        return self._metrics


class Admin:
    def __init__(
        self,
        driver: Driver,
        metrics: Metrics,
        gossip_view: GossipView,
        peers: Peers,
        reloads: Reloads,
        proxy: Callable[[], dict[str, Any]],
        reloaded: Callable[[], None] | None,
    ) -> None:
        """`proxy` returns the proxy's own row of the state; `reloaded` is called after each reload
        through this port.
        """
        # Accepted tokens, of which a request must have one; empty: no token is required.
        self._tokens = read_admin_tokens(reloads.config.security, os.environ)
        reloads.add(ReloadingPart("admin_token", self._prepare_tokens))
        self._driver = driver
        self._registry = metrics.registry
        self._streams = metrics.streams
        self._history, self._began_s = History(), time.time()
        self._registry.register(StateSeries(partial(self._described, describe_processes)))
        self._gossip_view = gossip_view
        self._peers = peers
        self._reloads = reloads
        self._proxy = proxy
        self._reloaded = reloaded
        self._large = LargeWork()
        self._page = (Path(__file__).parent / "ui.html").read_bytes()

    async def keep_history(self) -> None:
        """Take a sample for the page's curves every few seconds, until cancelled."""
        while True:
            self._sample()
            await asyncio.sleep(INTERVAL_S)

    def _sample(self) -> None:
        driver, ttft, now_s = self._driver, self._streams.ttft, self._driver.clock()
        since_s = now_s - INTERVAL_S
        hits = driver.control.policy.prefix_hits.values()
        counts = Counts(
            driver.control.progress.tokens,
            sum(ttft.counts),
            ttft.sum_s,
            sum(each.prompt_tokens for each in hits),
            sum(each.cached_tokens for each in hits),
        )
        journals = [live.journal for live in driver.streams.values()]
        pauses_s = [now_s - each.last_write_s for each in journals if each.last_write_s is not None]
        pauses_s += driver.recoveries.gaps_since(since_s)
        longest_s = max(pauses_s, default=None)
        ttfts_s = [
            each.first_write_s - each.arrived_s
            for each in journals
            # A stream of another proxy had its first token there.
            if each.first_write_s is not None
            and each.first_write_s > since_s
            and not each.owner_epoch
        ]
        self._history.sample(counts, len(journals), longest_s, now_s, time.time(), ttfts_s=ttfts_s)

    def _described(self, describe: Describe) -> dict[str, Any]:
        return describe(self._driver, self._gossip_view, self._proxy(), self._driver.clock())

    def routes(self) -> Routes:
        authenticate = require_token(self._tokens, "the admin token", (HEALTHZ, "/", UI))
        routes = Routes(*([authenticate] if self._tokens else []))
        routes.add("GET", "/", self._go_to_ui)
        routes.add("GET", UI, self._ui)
        routes.add("GET", "/kvrs/v1/state", self._state)
        routes.add("GET", "/kvrs/v1/overview", self._overview)
        routes.add("POST", "/kvrs/v1/reload", self._reload)
        routes.add("POST", "/kvrs/v1/drain/{id}", self._drain)
        routes.add("DELETE", "/kvrs/v1/drain/{id}", self._end_drain)
        routes.add("POST", "/kvrs/v1/accept/{id}", self._accept)
        routes.add("POST", _RANK, partial(self._order_rank, leaves=True))
        routes.add("DELETE", _RANK, partial(self._order_rank, leaves=False))
        routes.add("POST", "/kvrs/v1/exits/{id}", self._note_exit)
        routes.add("GET", "/metrics", self._show_metrics)
        routes.add("GET", "/healthz", self._healthz)
        return routes

    def _prepare_tokens(self, config: Config) -> Apply | None:
        found = read_admin_tokens(config.security, os.environ)
        if found == self._tokens:
            return None
        return partial(self._tokens.__setitem__, slice(None), found)

    async def _state(self, _: Request) -> Response:
        return answer(self._described(describe))

    async def _overview(self, _: Request) -> Response:
        config = self._reloads.config
        policy = {
            "policy": config.policy.name.value,
            "handoff": config.policy.handoff.value,
            "dispatch": config.policy.dispatch.value,
            "backup": config.backup.mode.value,
        }
        view = overview(
            self._described(describe_open), policy, self._driver.recoveries, self._history
        )
        return answer(view | {"now_s": time.time(), "began_s": self._began_s})

    async def _go_to_ui(self, _: Request) -> Response:
        return Response(307, b"", {"Location": UI})

    async def _ui(self, _: Request) -> Response:
        """Return the page that shows the overview every second."""
        return Response(200, self._page, {**_UI_HEADERS})

    async def _reload(self, _: Request) -> Response:
        """Reload the configuration file; 400 with every fault, if any."""
        response = await self._answer(self._reloads.reload())
        if response.status == HTTPStatus.OK and self._reloaded is not None:
            self._reloaded()
        return response

    async def _answer(self, change: Awaitable[ReloadResult]) -> Response:
        try:
            return answer(await change)
        except ConfigError as fault:
            what = {"message": str(fault), "type": "invalid_configuration", "faults": fault.faults}
            return answer({"error": what | {"param": None, "code": None}}, 400)

    async def _drain(self, request: Request) -> Response:
        """Drain an instance: it gets no new streams, and the streams that run there may end within
        the seconds of `?drain_s=`.
        """
        default_s = self._reloads.config.cluster.drain_s
        drain_s = _drain_s(request, default_s)
        return await self._order(DrainOrder(InstanceId(request.parameters["id"]), drain_s))

    async def _end_drain(self, request: Request) -> Response:
        return await self._order(DrainOrder(InstanceId(request.parameters["id"]), None))

    async def _order(self, order: DrainOrder) -> Response:
        self._peers.orders.obey(order)
        await self._peers.pass_on(order)
        return answer({"instance": order.instance, "drain_s": order.drain_s})

    async def _accept(self, request: Request) -> Response:
        """Accept the model and the weights of an instance as the right ones, at this proxy and, by
        the next hello, at its peers.
        """
        name = request.parameters["id"]
        if (fault := self._driver.fault_of_model(InstanceId(name))) is not None:
            raise RequestError(fault, param="id", status=409)
        self._peers.orders.accept(name, time.time())
        self._peers.news.tell()
        log.info("accepted", extra={"instance": name})
        return answer({"instance": name})

    async def _order_rank(self, request: Request, *, leaves: bool) -> Response:
        """Order a rank to pass its work to its instance's other ranks and end (`leaves`), or to
        return.
        """
        name, given = InstanceId(request.parameters["id"]), request.parameters["rank"]
        if not re.fullmatch("[0-9]{1,9}", given, re.ASCII):
            raise RequestError(f"rank: got {given!r:.80}; allowed: its number", param="rank")
        rank = int(given)
        order = RankOrder(name, rank, leaves)
        await pass_on(order, self._driver.control, self._driver.backends)
        return answer({"instance": name, "rank": rank, "leaves": leaves})

    async def _note_exit(self, request: Request) -> Response:
        """Take a supervisor's report of how an instance's process ended."""
        exited = parse_exit(request.parameters["id"], await request.read())
        note_exit(self._driver.control, exited, self._driver.clock())
        return answer({"instance": exited.instance, "start": exited.report.start})

    async def _show_metrics(self, request: Request) -> Response:
        """Return the metrics in the text format, or in OpenMetrics if requested."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        collected = _Collected(self._registry.collect())
        body = await self._large.run_aside(partial(encode, collected))
        return Response(200, body, {"Content-Type": content_type})

    async def _healthz(self, _: Request) -> Response:
        return Response(200, b"ok\n", {"Content-Type": "text/plain; charset=utf-8"})


def _drain_s(request: Request, default_s: float) -> float:
    """Return the seconds of `?drain_s=`, by default `default_s`. Raises
    RequestError: not a time.
    """
    given = request.query.get("drain_s", str(default_s))
    try:
        drain_s = float(given)
    except ValueError:
        drain_s = math.nan
    if not 0 <= drain_s <= _LONGEST_DRAIN_S:
        raise RequestError(
            f"drain_s: got {given!r:.80}; allowed: seconds from 0 to {_LONGEST_DRAIN_S:g}",
            param="drain_s",
        )
    return drain_s
