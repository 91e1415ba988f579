"""Rows that a vLLM server has loaded, by its own counters: for recovered streams, and for prompts
whose beginning an agent had of other ones.

vLLM counts what kvrs's tier reads for all requests together. What was read until streams have their
tokens is shared among them by what each could have loaded, and none gets more than that. Where
other requests load rows at the same time, it is an upper bound.
"""

from math import nan

from kvrs.ids import NodeId
from kvrs.protocol.instance import MEMORY, PREFIX, FetchReport, LinkReport
from kvrs.protocol.page_messages import TrafficClass
from kvrs.proxy.backends.bodies import RowLoad
from kvrs.proxy.backends.vllm_metrics import VllmMetrics
from kvrs.transfer.hand_offs import FetchedHandOff, HandOffMeter, Pulled

# An engine may publish its counters a moment after the token.
_SETTLED_S = 0.5
_TOLD_S = 5.0  # A report is repeated for so long.


class RowLoads:
    """Loads of rows at one server, and the rates of its links that follow from them."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._meter = HandOffMeter()
        self._open: list[tuple[RowLoad, FetchedHandOff]] = []
        self._over_s: float | None = None  # Since when all of these are over.
        self._before: tuple[float | None, float] = nan, 0.0  # Process and bytes, as read last.
        self._came_bytes = 0.0  # While some were open.
        self._recovery_bytes = self._prefix_bytes = 0.0
        self._told: list[tuple[float, FetchReport]] = []

    def begin(self, load: RowLoad, page_bytes: int) -> None:
        source = MEMORY if load.node is None or load.node == self._node else load.node
        pull = FetchedHandOff(source, load.pages * page_bytes, ranks=1)
        self._open.append((load, pull))
        self._meter.begins(pull)
        self._over_s = None

    def read(self, metrics: VllmMetrics, bytes_per_token: int, now_s: float) -> list[FetchReport]:
        """Take the counters; return the loads that are known since a few seconds."""
        size_bytes, seconds = metrics.rows_read
        process, (before, bytes_before) = metrics.started_s, self._before
        self._before = process, size_bytes
        for load, pull in self._open:
            pull.is_over = load.is_over
        self._meter.counted(Pulled(size_bytes, size_bytes, seconds), now_s, process)
        came_bytes = max(0.0, size_bytes - bytes_before) if process == before else 0.0
        if self._open:
            self._came_bytes += came_bytes
        else:
            self._prefix_bytes += came_bytes
        if not all(load.is_over for load, _ in self._open):
            self._over_s = None
        elif self._over_s is None:
            self._over_s = now_s
        elif now_s - self._over_s >= _SETTLED_S:
            self._settle(bytes_per_token, now_s)
        self._told = [each for each in self._told if now_s - each[0] < _TOLD_S]
        return [report for _, report in self._told]

    @property
    def kv_bytes(self) -> dict[str, int]:
        """Bytes by what they were loaded for, since each process of the server was met."""
        return {
            TrafficClass.RECOVERY.label: int(self._recovery_bytes),
            PREFIX: int(self._prefix_bytes),
        }

    def links(self, now_s: float) -> list[LinkReport]:
        found = self._meter.measurements(now_s)
        return [LinkReport(source, *measured) for source, measured in found.items()]

    def _settle(self, bytes_per_token: int, now_s: float) -> None:
        wanted_bytes = sum(pull.size_bytes for _, pull in self._open)
        share = min(1.0, self._came_bytes / wanted_bytes) if wanted_bytes else 0.0
        self._recovery_bytes += share * wanted_bytes
        self._prefix_bytes += self._came_bytes - share * wanted_bytes
        for load, pull in self._open:
            loaded = round(share * pull.size_bytes / bytes_per_token)
            rest = max(0, load.history_tokens - loaded)
            report = FetchReport(load.stream, load.attempt, load.owner_epoch, loaded, rest)
            self._told.append((now_s, report))
        self._open.clear()
        self._came_bytes, self._over_s = 0.0, None
