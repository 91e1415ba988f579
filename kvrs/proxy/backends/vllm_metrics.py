"""Reader of vLLM's `/metrics`, in Prometheus's text format.

Sums of counters over the processes behind one port; each read shows one process.

Recognition of a vLLM server's process, which vLLM itself does not identify.

Marks tell processes apart: the start time in `/metrics`, the engine id in prefill's hand-offs. A
server may have several processes behind its port, and `/metrics` of several API servers has no
start time. So a new mark means a new process only with further evidence:

| a read of `/metrics` shows         | watch stands | watch connection ended  | server was lost |
| ---------------------------------- | ------------ | ----------------------- | --------------- |
| a mark that was seen before        | same         | same                    | same            |
| a new mark, after one mark only    | same (*)     | new process             | new process     |
| a new mark, after several marks    | same (*)     | same (*)                | new process     |
| no mark, counters that went on     | same         | same                    | new process     |
| no mark, counters that did not     | same         | new process             | new process     |

(*) A new process once this has been the only start time for `REPLACED_S`: behind a gateway the
connection outlives a restart.

"Lost" means that a request of the watch failed; its streams are at other servers by then. Counters
went on if they are above 0 and not lower than at the last read: a new process starts at 0. Taking
one process for two is safe, and moves its streams. Taking two for one spoils a prediction: the
first one's streams have ended with their connections.
"""

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from kvrs.protocol.instance import HandOffReport, SpeculationReport
from kvrs.proxy.wire.errors import UnusableError

_MOST_PROCESSES = 256


class ProcessTotals:
    """Counts that never fall while an instance is in one epoch.

    The first process counts from its start, others from their first sighting: a process seen only
    once adds nothing.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._last: dict[float | None, Sequence[int]] = {}
        self._sums: list[int] = []

    def add(self, epoch: int, process: float | None, counts: Sequence[int]) -> list[int]:
        """Return the sums over all processes, after one process (named by its start time) has shown
        `counts`.
        """
        if epoch != self._epoch:
            self._epoch, self._last, self._sums = epoch, {process: counts}, [*counts]
        before = self._last.pop(process, counts)
        self._last[process] = counts
        if len(self._last) > _MOST_PROCESSES:
            del self._last[next(iter(self._last))]
        for at, (new, old) in enumerate(zip(counts, before, strict=True)):
            self._sums[at] += max(0, new - old)
        return [*self._sums]


# A number in the text; inf and nan do not match, and so count as absent.
_NUMBER = r"[-+]?[0-9]{1,30}(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,2})?"
_NAME = r"process_start_time_seconds|vllm:(?![a-z_]+_bucket\{)[a-z_]+"
_LINE = re.compile(
    rf"^({_NAME})(?:\{{(.*)\}})? ({_NUMBER})(?: [0-9]+)?$",
    re.MULTILINE,
)
_OF_PROGRESS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:request_success_total",
    "vllm:kv_cache_usage_perc",
)
# Series of intervals between two tokens of a request; older versions have the second name.
_INTERVALS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
# Series that count requests that fetch KV, the exact one first, each without the label of others.
_FETCHING = (
    ("vllm:num_requests_kv_fetch_by_stage", 'stage="waiting_to_start"'),
    ("vllm:num_requests_waiting_by_reason", 'reason="capacity"'),
)
_ROW_TIER = ':KvrsTier"'  # End of the label that names kvrs's tier, behind the number of the tier.
# By kind of store: lines of `/metrics` that show, from the start of vLLM, that it uses the store.
_STORES = {
    "mooncake": ("\n# TYPE vllm:mooncake_store_",),
    "lmcache": ("\n# TYPE vllm:lmcache_", "\n# TYPE lmcache:"),
    "hf3fs": ("\n# TYPE vllm:hf3fs_",),
}
# Sources of loaded KV that are no stores; any other source is one.
_NO_STORES = ("device", "host", "disk", "p2p")
_LABEL = re.compile(r'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')


class StoreLoads(NamedTuple):
    """Counts of an engine's store since the start: tokens that the engine asked for, tokens that
    the store had, and seconds of loading; None: the store does not count time.
    """

    queries: float
    hits: float
    seconds: float | None


class VllmMetrics:
    """One answer of `/metrics`. Values of several engines (data parallel) are added."""

    def __init__(self, text: str) -> None:
        self._text = text
        # Values and labels by name of the series; parsed once, because a server shows tens of
        # kilobytes.
        self._found: dict[str, list[tuple[str, float]]] = {}
        for name, labels, value in _LINE.findall(text):
            self._found.setdefault(name, []).append((labels, float(value)))

    def of_unknown_process(self) -> "VllmMetrics":
        """Return the settings without the values, which may be those of another process."""
        found = VllmMetrics("")
        found._text = self._text
        found._found = {name: of for name, of in self._found.items() if name.endswith("_info")}
        return found

    @cached_property
    def started_s(self) -> float | None:
        """Start time of the process by the server's clock; None: not shown, as several API servers
        share the `/metrics`.
        """
        return next(self._values("process_start_time_seconds"), None)

    @property
    def tokens(self) -> float | None:
        """Number of prompt and output tokens since the start; None: not reported by this
        version.
        """
        found = [*self._values("vllm:prompt_tokens_total")]
        found += self._values("vllm:generation_tokens_total")
        return sum(found) if found else None

    @property
    def running(self) -> int:
        return int(self._needed("vllm:num_requests_running"))

    @property
    def waiting(self) -> int:
        return int(self._needed("vllm:num_requests_waiting"))

    @property
    def pages(self) -> tuple[int, int]:
        """KV pages of all engines: the free ones, and all."""
        engines = list(self._values("vllm:kv_cache_usage_perc"))
        total = self._cache_number("num_gpu_blocks", 0) * len(engines)
        # vLLM's gauge is a fraction, although its name says "perc".
        used = sum(engines) / len(engines) if engines else 0.0
        return max(0, round(total * (1.0 - used))), total

    @property
    def progress(self) -> float:
        """A number that changes while the engine works, even within a long prompt: tokens computed
        and requests ended since the start, plus the share of KV blocks in use.
        """
        return sum(sum(self._values(name)) for name in _OF_PROGRESS)

    @property
    def prefill_s(self) -> float:
        """Mean seconds that a prefill took since the start; 0: no request yet."""
        count = sum(self._values("vllm:request_prefill_time_seconds_count"))
        return sum(self._values("vllm:request_prefill_time_seconds_sum")) / count if count else 0.0

    @property
    def token_intervals(self) -> tuple[int, int]:
        """Intervals between two tokens of a request since the start, and their sum in microseconds.

        Each step counts once for each request that gets a token, so the mean is that of the steps,
        weighted by their requests. At an instance that also computes prompts, it has the steps with
        chunks of these: an upper bound of a decode step there. A decode instance behind a prefill
        instance has only those of recoveries.

        vLLM's times of prefill (`request_prefill_time_seconds`) and of the first token are bounds
        from above too: of several prompts in one step each counts all of it, and the first token's
        also has the queue. So the scale of a prefill table is not taken from them, but from the
        busy periods that the proxy sees (`core/books/prefills.py`).
        """
        for name in _INTERVALS:
            if count := sum(self._values(f"{name}_count")):
                return int(count), round(1e6 * sum(self._values(f"{name}_sum")))
        return 0, 0

    @property
    def cache(self) -> dict[str, str]:
        """Settings of the KV cache by name, from the labels of vLLM's `cache_config_info`."""
        for labels in self._labels("vllm:cache_config_info"):
            return labels
        raise UnusableError(
            "it is not a vLLM that this adapter supports: its /metrics lack vllm:cache_config_info"
        )

    @property
    def page_size_tokens(self) -> int:
        return self._cache_number("block_size", 1)

    @property
    def has_connector(self) -> bool:
        """True if the engine runs a NixlConnector, which shows counters from its start."""
        return "\nvllm:nixl_" in self._text

    @property
    def hand_off_format(self) -> str:
        """Value that both ends of a hand-off must have in common: NIXL's compatibility hash, or
        where vLLM does not show the hash, the type of the KV cache. Empty: no connector.
        """
        if not self.has_connector:
            return ""
        hashes = {
            labels.get("compatibility_hash", "") for labels in self._labels("vllm:nixl_config_info")
        }
        if found := sorted(hashes - {""}):
            return f"hash {','.join(found)}"
        cache_dtype = self.cache.get("cache_dtype")
        return f"cache_dtype {cache_dtype}" if cache_dtype else ""

    @cached_property
    def hand_offs(self) -> HandOffReport | None:
        """Counts of the NixlConnector since the start; None: no connector."""
        if not self.has_connector:
            return None
        return HandOffReport(
            self._count("xfer_time_seconds_count"),
            self._count("bytes_transferred_sum"),
            self._count("num_failed_transfers_total"),
            self._count("num_failed_notifications_total"),
            self._count("num_kv_expired_reqs_total"),
            self._count("num_notifications_after_expiry_total"),
        )

    @property
    def transfer_s(self) -> float:
        """Seconds that all transfers of the NixlConnector took together, since the start."""
        return sum(self._values("vllm:nixl_xfer_time_seconds_sum"))

    @property
    def received_bytes(self) -> float | None:
        """Bytes of KV that the NixlConnector has fetched since the start; None: not reported by
        this version.
        """
        found = list(self._values("vllm:nixl_bytes_transferred_sum"))
        return sum(found) if found else None

    @property
    def pulls_nothing(self) -> bool:
        """True if the engine shows that no request fetches KV now; False also where its version
        does not show it.
        """
        for name, without in _FETCHING:
            found = [value for labels, value in self._found.get(name, ()) if without not in labels]
            if found:
                return not any(found)
        return False

    @property
    def rows_read(self) -> tuple[float, float]:
        """Bytes that kvrs's tier has loaded since the start, and the seconds that all loads took
        together.
        """
        size_bytes, seconds = (
            sum(value for labels, value in self._tier_reads(name) if _ROW_TIER in labels)
            for name in ("read_bytes", "read_time")
        )
        return size_bytes, seconds

    @cached_property
    def store(self) -> str:
        """Kind of the store that the engine loads KV from on its own; empty: no store seen."""
        if any(_ROW_TIER in labels for labels, _ in self._tier_reads("read_bytes")):
            return ""  # No store: kvrs's tier loads from agents.
        for kind, series in _STORES.items():
            if any(each in self._text for each in series):
                return kind
        return "other" if self.store_loads.hits else ""

    @cached_property
    def store_loads(self) -> "StoreLoads":
        """Tokens that the engine has asked its store for since the start, and tokens that the store
        had; with the loads' total seconds, or None if the store does not count time.
        """
        hits = sum(
            value
            for labels, value in self._found.get("vllm:prompt_tokens_cached_by_source_total", ())
            if not any(f'source="{source}"' in labels for source in _NO_STORES)
        )
        seconds = [
            value
            for labels, value in self._found.get(
                "vllm:mooncake_store_operation_time_seconds_sum", ()
            )
            if 'operation="load_get"' in labels
        ]
        queries = sum(self._values("vllm:external_prefix_cache_queries_total"))
        return StoreLoads(queries, hits, sum(seconds) if seconds else None)

    def _tier_reads(self, name: str) -> Sequence[tuple[str, float]]:
        return self._found.get(f"vllm:kv_offload_tiering_{name}_total", ())

    @cached_property
    def drafts(self) -> SpeculationReport | None:
        """Counts of the engine's speculative decoding since the start; None: no speculation."""
        steps, proposed, accepted = (
            list(self._values(f"vllm:spec_decode_num_{name}_total"))
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        if not (steps and proposed and accepted):
            return None
        return SpeculationReport(
            "engine",
            active=True,
            steps=max(0, int(sum(steps))),
            proposed=max(0, int(sum(proposed))),
            accepted=max(0, int(sum(accepted))),
        )

    def _labels(self, name: str) -> Iterator[dict[str, str]]:
        return (dict(_LABEL.findall(labels)) for labels, _ in self._found.get(name, ()))

    def _count(self, name: str) -> int:
        return max(0, int(sum(self._values(f"vllm:nixl_{name}"))))

    def _cache_number(self, name: str, least: int) -> int:
        value = self.cache.get(name, "")
        if not re.fullmatch("[0-9]{1,12}", value) or int(value) < least:
            raise UnusableError(
                f"its /metrics name a {name} of {value[:80]!r}; allowed: a number, at least {least}"
            )
        return int(value)

    def _needed(self, name: str) -> float:
        values = list(self._values(name))
        if not values:
            raise UnusableError(
                f"it is not a vLLM that this adapter supports: its /metrics lack {name}"
            )
        return sum(values)

    def _values(self, name: str) -> Iterator[float]:
        return (value for _, value in self._found.get(name, ()))


REPLACED_S = 10.0
_MOST_MARKS = 256


def engine_mark(engine_id: str) -> str:
    """Return the mark of a NIXL engine id: its part that all engines of one server (data parallel)
    share.
    """
    return f"engine {engine_id.split('_dp')[0]}"


class _Doubt(IntEnum):
    NONE = 0
    ENDED = 1  # The idle connection of the watch has ended.
    LOST = 2  # A request of the watch has failed.


class ProcessIdentity:
    """Numbers the processes behind one URL: each new process gets a higher epoch."""

    def __init__(self) -> None:
        self.epoch = 0  # Number of the present process; 0: no process met.
        # Marks seen so far, with the epoch in which each was seen last; the latest mark is last.
        self._marks: dict[str, int] = {}
        self._doubt = _Doubt.NONE
        self._counted: float | None = None
        # The one start time that all reads since `_alone_s` have shown, and whether it was new
        # then.
        self._alone, self._alone_s, self._alone_is_new = "", 0.0, False

    @property
    def is_in_doubt(self) -> bool:
        """True if the process may have been replaced since the last read of `/metrics`."""
        return self._doubt is not _Doubt.NONE

    def connection_ended(self) -> None:
        """Note that the watch's idle connection has ended, so the process may have been
        replaced.
        """
        self._doubt = max(self._doubt, _Doubt.ENDED)

    def lost(self) -> None:
        """Note that a request of the watch has failed, so the server counts as lost."""
        self._doubt = _Doubt.LOST

    def noted(self, engine_id: str) -> None:
        """Keep the mark of a NIXL engine id that the process has shown."""
        if self.epoch and not self.is_in_doubt:
            self._keep(engine_mark(engine_id))

    def read(
        self,
        started_s: float | None,
        other_mark: str | None,
        counted: float | None,
        *,
        now_s: float,
        wall_s: float,
    ) -> int:
        """Return the epoch of the process that has just answered `/metrics`.

        other_mark: mark shown beside or in place of the start time.
        counted: sum of counters that only rise while the process lives; None: no counters.
        wall_s: time that numbers a process without a start time.
        """
        start = "" if started_s is None else f"start {started_s!r}"
        marks = [mark for mark in (start, other_mark) if mark]
        is_replaced = self._has_replaced(start, now_s)
        if not self.epoch or is_replaced or self._is_new(marks, counted):
            number = round(100 * (wall_s if started_s is None else started_s))
            self.epoch = max(self.epoch + 1, number)
            self._alone_is_new = False
        for mark in marks:
            self._keep(mark)
        self._doubt, self._counted = _Doubt.NONE, counted
        return self.epoch

    def _is_new(self, marks: list[str], counted: float | None) -> bool:
        if self._doubt is _Doubt.NONE or any(mark in self._marks for mark in marks):
            return False
        if self._doubt is _Doubt.LOST:
            return True
        if marks:
            return self._marks_like(marks[0]) <= 1
        before = self._counted
        return not (before and counted is not None and counted >= before)

    def _marks_like(self, mark: str) -> int:
        """Return how many marks of the same kind the process of this epoch has shown."""
        kind = mark.split()[0]
        return sum(
            epoch == self.epoch and each.split()[0] == kind for each, epoch in self._marks.items()
        )

    def _has_replaced(self, start: str, now_s: float) -> bool:
        """Return whether a start time, new when first seen, has been the only one for
        `REPLACED_S`.
        """
        if start != self._alone:
            self._alone, self._alone_s = start, now_s
            self._alone_is_new = bool(start) and start not in self._marks
        return self._alone_is_new and now_s - self._alone_s >= REPLACED_S

    def _keep(self, mark: str) -> None:
        self._marks.pop(mark, None)
        self._marks[mark] = self.epoch
        if len(self._marks) > _MOST_MARKS:
            del self._marks[next(iter(self._marks))]
