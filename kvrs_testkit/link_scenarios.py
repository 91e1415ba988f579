"""The estimate of a link whose rate changes, and what decisions taken on it cost, in virtual time
over a link without noise: the part of the regret that is the rule's own.
"""

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from kvrs.ids import NodeId
from kvrs.profiles import catalog
from kvrs.protocol.frames import MAX_PROBE_BYTES
from kvrs.transfer.meter import PROBE_BYTES, TIME_CONSTANT_S, LinkMeter, lower_bound

PROBE_INTERVAL_S = 0.25
TIME_CONSTANTS = 5
BAR_PROBES = 0.01

PAGE_BYTES = 1 << 16
REGION_PAGES = 1024
LOOK_S = 0.1

PROFILE = "opt-13b-a100-distserve-tp1"
# Links of 12.5 to 125 MB/s are slower than a cluster's by this, and so is the KV of the decisions.
SHRINK = 100
DECISION_TOKENS = (512, 1024, 1475, 2000)
MB = 1e6

SOURCE = NodeId("n0")
READ_BYTES = 1 << 18  # So often the puller asks the kernel what has arrived.
PROBE_WAIT_S = 0.05
MAX_PHASE_S = 3.5  # Steps come at fixed times, probes at multiples of this interval.


@dataclass(frozen=True)
class Step:
    """The rate of the link from a moment on."""

    at_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Scenario:
    name: str
    steps: tuple[Step, ...]
    length_s: float
    transfers: tuple[float, float] | None  # Least and most bytes; None: probes alone.
    pause_s: float = 0.3  # Between transfers, on average.
    cross: tuple[float, float] | None = None  # While another flow shares the link.

    def rate(self, at_s: float) -> float:
        """The rate of a transfer."""
        index = bisect_right([step.at_s for step in self.steps], at_s) - 1
        whole = self.steps[max(0, index)].bytes_per_s
        shared = self.cross is not None and self.cross[0] <= at_s < self.cross[1]
        return whole / 2 if shared else whole

    def seconds_for(self, size_bytes: float, at_s: float) -> float:
        """The time of a transfer that begins at a moment, through all changes of the rate."""
        edges = [step.at_s for step in self.steps] + list(self.cross or ())
        now_s = at_s
        for edge_s in sorted(edge for edge in edges if edge > at_s):
            carried = (edge_s - now_s) * self.rate(now_s)
            if carried >= size_bytes:
                break
            size_bytes -= carried
            now_s = edge_s
        return now_s + size_bytes / self.rate(now_s) - at_s


def scenarios() -> list[Scenario]:
    slow, fast, half_s = 12.5 * MB, 125 * MB, 20.0
    steps = (Step(0, slow), Step(half_s, fast), Step(2 * half_s, slow))
    ramp = tuple(Step(2.0 + 0.25 * number, slow * 10 ** (number / 80)) for number in range(81))
    waves = tuple(Step(5.0 * number, (25, 100)[number % 2] * MB) for number in range(8))
    sizes = (1 * MB, 64 * MB)
    return [
        Scenario("steps", steps, 3 * half_s, sizes),
        Scenario("steps, probes alone", steps, 3 * half_s, None),
        Scenario("one long transfer", steps, 3 * half_s, (1000 * MB, 1000 * MB), pause_s=0.01),
        Scenario("ramp", (Step(0, slow), *ramp), 2 * half_s, sizes),
        Scenario("oscillation, 10 s", waves, 5.0 * len(waves), sizes),
        Scenario("cross traffic", (Step(0, fast),), 3 * half_s, sizes, cross=(half_s, 2 * half_s)),
    ]


OURS = "kvrs"
BOUND = "kvrs, lower bound"  # On which decisions count.
LAST = "last sample"
PRESENT = "knows the rate"  # At every moment, but not what follows.

Rule = Callable[[Sequence[float]], float]  # An estimate by all samples so far.
# Rules beside ours.
OTHERS: Mapping[str, Rule] = {LAST: lambda samples: samples[-1]}


class SampledMeter(LinkMeter):
    """Also keeps every sample, for the rules beside it."""

    def __init__(self) -> None:
        super().__init__(1 << 15)
        self.samples: list[float] = []

    def _take_sample(self, link: Any) -> None:
        before_s = link.measured_s
        super()._take_sample(link)
        if link.measured_s != before_s:
            self.samples.append(link.latest_bytes_per_s)


@dataclass
class Trial:
    """The observations of one scenario: by moment, the true rate and every rule's."""

    scenario: Scenario
    at_s: list[float] = field(default_factory=list)
    seen: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def errors(self, name: str) -> Iterator[tuple[float, float]]:
        for at_s, estimate in zip(self.at_s, self.seen[name], strict=True):
            yield at_s, abs(estimate / self.scenario.rate(at_s) - 1)

    def settled_error(self, name: str) -> float | None:
        """The mean from five time constants after a step to the next one."""
        wait_s = TIME_CONSTANTS * TIME_CONSTANT_S
        edges = [step.at_s for step in self.scenario.steps] + list(self.scenario.cross or ())
        found = [
            error
            for at_s, error in self.errors(name)
            if not any(edge <= at_s < edge + wait_s for edge in edges)
        ]
        return fmean(found) if found else None

    def regret(self, name: str) -> float:
        """The excess of migrating or recomputing by this rule, at every moment and length, over a
        rule that knows the rate at that moment and all that follow.
        """
        chosen = best = 0.0
        for at_s, estimate in zip(self.at_s, self.seen[name], strict=True):
            for tokens in DECISION_TOKENS:
                size_bytes, recompute_s = _costs(tokens)
                migrate_s = self.scenario.seconds_for(size_bytes, at_s)
                chosen += migrate_s if size_bytes / estimate <= recompute_s else recompute_s
                best += min(migrate_s, recompute_s)
        return chosen / best - 1


def _costs(tokens: int) -> tuple[float, float]:
    """Bytes to move, and seconds to compute: the break-even lies within the rates of the link."""
    geometry = catalog.kv_geometry(PROFILE)
    size_bytes = tokens * geometry.bytes_per_token / SHRINK
    return size_bytes, catalog.prefill_table(PROFILE).seconds_for(tokens)


class VirtualLink:
    """One scenario: transfers, pauses and probes as a puller makes them, without processes."""

    def __init__(self, scenario: Scenario, seed: int, others: Mapping[str, Rule] = OTHERS) -> None:
        self.trial = Trial(scenario)
        self._others = others
        self._probed_bytes = 0
        self._scenario = scenario
        self._random = random.Random(seed)
        self._meter = SampledMeter()
        self._now_s, self._looked_s = self._random.uniform(0.0, MAX_PHASE_S), 0.0

    @property
    def probe_share(self) -> float:
        """The probes' share of all that the link can carry."""
        scenario = self._scenario
        capacity = sum(
            scenario.rate(LOOK_S * index) * LOOK_S
            for index in range(int(scenario.length_s / LOOK_S))
        )
        return self._probed_bytes / capacity

    @property
    def is_over(self) -> bool:
        return self._now_s >= self._scenario.length_s

    def run(self) -> Trial:
        while not self.is_over:
            if self._scenario.transfers is None:
                self._probe()
                self._pass(PROBE_WAIT_S)
                continue
            least, most = self._scenario.transfers
            size = int(least * (most / least) ** self._random.random())
            for begin in range(0, size, PAGE_BYTES * REGION_PAGES):
                self._carry(min(PAGE_BYTES * REGION_PAGES, size - begin), self._meter.begin)
            until_s = self._now_s + self._random.expovariate(1 / self._scenario.pause_s)
            while self._now_s < until_s and not self.is_over:
                self._probe()
                self._pass(min(PROBE_WAIT_S, max(1e-3, until_s - self._now_s)))
        return self.trial

    def _probe(self) -> None:
        meter, bounds = self._meter, (PROBE_BYTES, MAX_PROBE_BYTES)
        size = meter.probe_bytes(SOURCE, *bounds)
        if not meter.may_probe(SOURCE, size, PROBE_INTERVAL_S, 1, self._now_s):
            return
        self._send_probe(size, follows=False)
        while (more := meter.follow_up_bytes(SOURCE, *bounds)) is not None and not self.is_over:
            self._send_probe(more, follows=True)

    def _send_probe(self, size: int, *, follows: bool) -> None:
        self._probed_bytes += size
        begin = partial(self._meter.probe_begins, size_bytes=size, follows=follows)
        self._carry(size, begin, unmeasured_bytes=size // 2)

    def _carry(
        self, size_bytes: int, begin: Callable[[NodeId, float], None], unmeasured_bytes: int = 0
    ) -> None:
        """Carry bytes as the puller does: the first half of a probe is not measured."""
        begin(SOURCE, self._now_s)
        if unmeasured_bytes:
            self._bring(unmeasured_bytes)
            self._meter.restart(SOURCE, self._now_s)
        self._bring(size_bytes - unmeasured_bytes)
        self._meter.end(SOURCE, self._now_s)

    def _bring(self, size_bytes: int) -> None:
        while size_bytes > 0 and not self.is_over:
            piece = min(READ_BYTES, size_bytes)
            self._pass(self._scenario.seconds_for(piece, self._now_s))
            self._meter.add(SOURCE, piece, self._now_s)
            size_bytes -= piece

    def _pass(self, seconds: float) -> None:
        """Time goes on; what is seen of the link is looked at on the way."""
        self._now_s += seconds
        samples = self._meter.samples
        while self._looked_s <= min(self._now_s, self._scenario.length_s):
            if samples:
                measured = self._meter.measurements(self._looked_s)[SOURCE]
                self.trial.at_s.append(self._looked_s)
                seen = self.trial.seen
                seen[OURS].append(measured.bytes_per_s)
                for name, rule in self._others.items():
                    seen[name].append(rule(samples))
                seen[BOUND].append(lower_bound(measured))
                seen[PRESENT].append(self._scenario.rate(self._looked_s))
            self._looked_s += LOOK_S


def measure(seeds: range, others: Mapping[str, Rule] = OTHERS) -> list[dict[str, Any]]:
    """By scenario and rule: the mean over the seeds."""
    rows = []
    for scenario in scenarios():
        links = [VirtualLink(scenario, seed, others) for seed in seeds]
        trials = [link.run() for link in links]
        rows += [
            {
                "scenario": scenario.name,
                "rule": name,
                "regret": fmean(trial.regret(name) for trial in trials),
                "settled_error": fmean(trial.settled_error(name) or 0.0 for trial in trials),
                "probe_share": max(link.probe_share for link in links),
            }
            for name in trials[0].seen
        ]
    return rows
