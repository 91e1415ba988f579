"""Metrics of several workers as those of one proxy.

Counters and histograms add up, also over workers that have ended: a total that fell would be taken
for the restart of a process. What every worker counts by itself of the same thing, such as the
death of an instance, is the largest of their totals.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrs.proxy.workers.messages import Family, Sample

_Series = tuple[str, tuple[tuple[str, str], ...]]  # Name and labels of a sample.


class _Sum(Enum):
    """How the samples of a series at several workers become one."""

    ADDED = auto()
    LARGEST = auto()
    SMALLEST = auto()
    MEAN = auto()


_HOW = {
    # Of one thing, as each worker sees it.
    "kvrs_worker_deaths": _Sum.LARGEST,
    "kvrs_worker_rank_deaths": _Sum.LARGEST,
    "kvrs_agent_deaths": _Sum.LARGEST,
    "kvrs_damaged_pages": _Sum.LARGEST,
    "kvrs_fleet_orders_aside": _Sum.LARGEST,
    "kvrs_tokenizer_missing": _Sum.LARGEST,
    "kvrs_worker_ejected": _Sum.LARGEST,
    "kvrs_worker_draining": _Sum.LARGEST,
    "kvrs_checkpoint_lag_pages": _Sum.LARGEST,
    "kvrs_agent_reserved_bytes": _Sum.LARGEST,
    "kvrs_gossip_members": _Sum.LARGEST,
    "kvrs_gossip_health": _Sum.LARGEST,
    "kvrs_worker_queued_requests": _Sum.LARGEST,
    "kvrs_worker_running_requests": _Sum.LARGEST,
    "kvrs_worker_free_pages": _Sum.LARGEST,
    "kvrs_worker_queue_seconds": _Sum.LARGEST,
    "kvrs_worker_degree": _Sum.LARGEST,
    "kvrs_worker_full_degree": _Sum.LARGEST,
    "kvrs_worker_kv_bytes": _Sum.LARGEST,
    "kvrs_build": _Sum.LARGEST,
    "kvrs_model_info": _Sum.LARGEST,
    "python_info": _Sum.LARGEST,
    # In use by all of them.
    "kvrs_worker_up": _Sum.SMALLEST,
    "kvrs_agent_up": _Sum.SMALLEST,
    "kvrs_link_bytes_per_second": _Sum.SMALLEST,
    "process_max_fds": _Sum.SMALLEST,
    "process_start_time_seconds": _Sum.SMALLEST,
    "kvrs_recovery_correction_ratio": _Sum.MEAN,
}


def families_of(registry: CollectorRegistry) -> list[Family]:
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [Sample(each.name, dict(each.labels), each.value) for each in metric.samples],
        )
        for metric in registry.collect()
    ]


class Totals:
    """The series of one worker, by its place: of the process there, and of those before it."""

    def __init__(self) -> None:
        self._before: dict[_Series, float] = {}
        self._now: dict[str, Family] = {}

    def note(self, families: Iterable[Family]) -> None:
        """What the process there has counted."""
        self._now = {family.name: family for family in families}

    def end(self) -> None:
        """The process there has ended: what it counted last stays counted."""
        for family in self._now.values():
            if _is_total(family):
                for sample in family.samples:
                    key = _key(sample)
                    self._before[key] = self._before.get(key, 0.0) + sample.value
            family.samples = [
                Sample(each.name, each.labels, 0.0) for each in family.samples if _is_total(family)
            ]

    def families(self) -> Iterator[tuple[Family, list[Sample]]]:
        for family in self._now.values():
            if _how(family) is _Sum.ADDED and _is_total(family):
                yield (
                    family,
                    [
                        Sample(
                            each.name, each.labels, each.value + self._before.get(_key(each), 0.0)
                        )
                        for each in family.samples
                    ],
                )
            else:
                yield family, family.samples


class Added(Collector):
    """The series of all workers as those of one proxy, for a registry."""

    def __init__(self) -> None:
        self.workers: list[Totals] = []
        self._largest: dict[_Series, float] = {}  # Of totals, which do not fall.

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Family] = {}
        found: dict[str, dict[_Series, list[Sample]]] = {}
        for worker in self.workers:
            for family, samples in worker.families():
                families.setdefault(family.name, family)
                series = found.setdefault(family.name, {})
                for sample in samples:
                    series.setdefault(_key(sample), []).append(sample)
        for name, family in families.items():
            metric = Metric(name, family.help, family.type)
            for key, samples in found[name].items():
                value = _SUMS[_how(family)]([sample.value for sample in samples])
                if _is_total(family) and _how(family) is _Sum.LARGEST:
                    value = self._largest[key] = max(value, self._largest.get(key, 0.0))
                metric.add_sample(samples[0].name, samples[0].labels, value)
            yield metric


_SUMS: dict[_Sum, Callable[[list[float]], float]] = {
    _Sum.ADDED: sum,
    _Sum.LARGEST: max,
    _Sum.SMALLEST: min,
    _Sum.MEAN: lambda values: sum(values) / len(values),
}


def _how(family: Family) -> _Sum:
    return _HOW.get(family.name, _Sum.ADDED)


def _is_total(family: Family) -> bool:
    return family.type in ("counter", "histogram")


def _key(sample: Sample) -> _Series:
    return sample.name, tuple(sorted(sample.labels.items()))
