"""Requests to a vLLM server that belong to no stream: its health, its metrics and its engines."""

import time

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import HandOffReport, LinkReport, SpeculationReport
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.stock_facts import CountedSteps
from kvrs.proxy.backends.stock_peer import StockPeer
from kvrs.proxy.backends.vllm_metrics import ProcessIdentity, ProcessTotals, VllmMetrics
from kvrs.proxy.wire.errors import UnusableError
from kvrs.proxy.wire.upstream import EngineLinks
from kvrs.transfer.meter import FetchedHandOff, HandOffMeter, Pulled

# Paths of `--enable-fault-tolerance`, by version. With that option `/health` still says 200 while
# an engine waits for an orchestrator, although streams stand still and new requests get 503.
_FT_PATHS = ("/fault_tolerance/status", "/v1/fault_tolerance/status")
_HEALTH = "/health"
_FT_STOPPED = ("unhealthy", "paused", "dead")


class _FtEngine(msgspec.Struct):
    status: str


class _FtStatus(msgspec.Struct):
    engines: list[_FtEngine]


class VllmServer(StockPeer):
    ENGINE = "vLLM"

    def __init__(self, links: EngineLinks, url: str) -> None:
        super().__init__(links, url)
        # The one of `_FT_PATHS` that answered; None: fault tolerance is off.
        self._ft_path: str | None = None
        self._process = ProcessIdentity()
        self._totals = ProcessTotals()
        self._meter = HandOffMeter()
        self._steps = CountedSteps()

    async def _read(self, path: str) -> bytes:
        status, answer = await self.pool.ask(path, None)
        if status == 200:
            return answer
        if status >= 500:
            of = ": its engine is dead" if path == _HEALTH else ""
            raise UpstreamError(f"HTTP {status} for {path}{of}")
        raise UnusableError(f"another server than vLLM answers there: HTTP {status} for {path}")

    async def _metrics(self) -> VllmMetrics:
        return VllmMetrics((await self._read("/metrics")).decode(errors="replace"))

    def _epoch(self, metrics: VllmMetrics, other_mark: str | None) -> int:
        """Return the epoch of the process that has just answered `/metrics`."""
        return self._process.read(
            metrics.started_s,
            other_mark,
            metrics.tokens,
            now_s=time.monotonic(),
            wall_s=time.time(),
        )

    async def kv_received(self) -> float | None:
        metrics = await self._metrics()
        if metrics.received_bytes is None or metrics.hand_offs is None:
            return None
        return self._counts(metrics)[0].transferred_bytes

    def _counts(self, metrics: VllmMetrics) -> tuple[HandOffReport, SpeculationReport, float]:
        """Return the counts of hand-offs and drafts, added over all processes behind the port, and
        the time of a recent step; 0: vLLM does not report the count.
        """
        hand_offs = metrics.hand_offs or HandOffReport()
        drafts = metrics.drafts or SpeculationReport("engine", active=True)
        sums = self._totals.add(
            self._process.epoch,
            metrics.started_s,
            (
                *msgspec.structs.astuple(hand_offs),
                *(drafts.steps, drafts.proposed, drafts.accepted),
                *metrics.token_intervals,
            ),
        )
        *counts, steps, proposed, accepted, intervals, took_us = sums
        changes = {"steps": steps, "proposed": proposed, "accepted": accepted}
        step_s = self._steps.read(self._process.epoch, intervals, took_us / 1e6)
        return HandOffReport(*counts), msgspec.structs.replace(drafts, **changes), step_s

    async def _find_ft_path(self) -> None:
        self._ft_path = None
        for path in _FT_PATHS:
            status, _ = await self.pool.ask(path, None)
            if status == 200:
                self._ft_path = path
                return

    async def _healthy(self) -> None:
        await self._read(_HEALTH)

    async def _stopped_engines(self) -> str:
        """Ask the server's fault tolerance for engines that have stopped; return what it says of
        them, empty if all run.
        """
        if self._ft_path is None:
            return ""
        try:
            status = msgspec.json.decode(await self._read(self._ft_path), type=_FtStatus)
        except UNREADABLE as error:
            raise UnusableError(f"unexpected answer to {self._ft_path}: {error}") from None
        stopped = [each.status for each in status.engines if each.status in _FT_STOPPED]
        if not stopped:
            return ""
        return (
            f"{len(stopped)} of its {len(status.engines)} engines: {stopped[0]}, by {self._ft_path}"
        )

    def _measured_links(self, metrics: VllmMetrics) -> list[LinkReport]:
        """Return the bandwidths of the links over which this instance has fetched this proxy's
        hand-offs.
        """
        counts, now_s = metrics.hand_offs, time.monotonic()
        if counts is not None:
            pulled = Pulled(counts.transfers, counts.transferred_bytes, metrics.transfer_s)
            self._meter.counted(pulled, now_s, metrics.started_s)
        measured = self._meter.measurements(now_s)
        return [LinkReport(source, *found) for source, found in measured.items()]

    def _begin_pull(self, call: Call, bytes_per_token: int) -> FetchedHandOff | None:
        """Tell the bandwidth meter that the call fetches a hand-off; None: the call
        fetches none.
        """
        hand_off = call.hand_off
        if hand_off is None:
            return None
        size_bytes = hand_off.tokens * bytes_per_token
        now_s = time.monotonic()
        pull = hand_off.pull = FetchedHandOff(hand_off.node, size_bytes, hand_off.ranks, now_s)
        self._meter.begins(pull)
        return pull
