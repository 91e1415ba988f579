"""The same scenarios in virtual time, over a link without noise: the part of the regret that is the
rule's own, beside that of a rule that knows the rate at every moment, but not what follows.

python -m experiments.link_monitor.simulated [--seeds 8] [--out DIR]
"""

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.link_monitor.run import (
    BAR_PROBES,
    BAR_REGRET,
    LOOK_S,
    NAMES,
    OURS,
    PAGE_BYTES,
    PLAIN,
    REGION_PAGES,
    SETTINGS,
    SampledMeter,
    Scenario,
    Trial,
    scenarios,
)
from experiments.record import Record
from kvrs.ids import NodeId
from kvrs.protocol.frames import MAX_PROBE_BYTES
from kvrs.transfer.meter import lower_bound

PRESENT = "knows the rate"
BOUND = "kvrs, lower bound"  # On which decisions count.
RULES = (*NAMES, BOUND, PRESENT)
SOURCE = NodeId("n0")
READ_BYTES = 1 << 18  # So often the puller asks the kernel what has arrived.
PROBE_WAIT_S = 0.05
MOST_PHASE_S = 3.2  # Steps come at fixed times, probes at multiples of their interval.


class VirtualLink:
    """One scenario: transfers, pauses and probes as in run.py, without processes."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.trial = Trial(scenario)
        self.trial.seen |= {BOUND: [], PRESENT: []}
        self._probed_bytes = 0
        self._scenario = scenario
        self._random = random.Random(seed)
        self._meter = SampledMeter()
        self._now_s, self._looked_s = self._random.uniform(0.0, MOST_PHASE_S), 0.0

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
            self.trial.transfers += 1
            until_s = self._now_s + self._random.expovariate(1 / self._scenario.pause_s)
            while self._now_s < until_s and not self.is_over:
                self._probe()
                self._pass(min(PROBE_WAIT_S, max(1e-3, until_s - self._now_s)))
        return self.trial

    def _probe(self) -> None:
        meter, bounds = self._meter, (SETTINGS.probe_bytes, MAX_PROBE_BYTES)
        size = meter.probe_bytes(SOURCE, *bounds)
        if not meter.may_probe(SOURCE, size, SETTINGS.probe_interval_s, 1, self._now_s):
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
                self.trial.seen[OURS].append(measured.bytes_per_s)
                self.trial.seen[BOUND].append(lower_bound(measured, SETTINGS.link))
                self.trial.seen[PRESENT].append(self._scenario.rate(self._looked_s))
                for rule in PLAIN:
                    self.trial.seen[rule.name].append(rule.update(samples))
            self._looked_s += LOOK_S


def measure(seeds: range) -> list[dict[str, Any]]:
    """By scenario and rule: the mean over the seeds."""
    rows = []
    for scenario in (each for each in scenarios(1.0) if not each.hogs):
        links = [VirtualLink(scenario, seed) for seed in seeds]
        trials = [link.run() for link in links]
        rows += [
            {
                "scenario": scenario.name,
                "rule": name,
                "regret": fmean(trial.regret(name) for trial in trials),
                "settled_error": fmean(trial.settled_error(name) or 0.0 for trial in trials),
                "probe_share": max(link.probe_share for link in links),
            }
            for name in RULES
        ]
    return rows


def regrets(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By rule: the mean over the scenarios."""
    return {name: fmean(row["regret"] for row in rows if row["rule"] == name) for name in RULES}


def as_text(rows: list[dict[str, Any]], seeds: int) -> tuple[bool, str]:
    found = {(row["scenario"], row["rule"]): row["regret"] for row in rows}
    lines = [
        f"regret in virtual time, mean of {seeds} seeds",
        f"{'scenario':24}" + "".join(f"{name:>20}" for name in RULES),
    ]
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        cells = "".join(f"{found[scenario, name]:>20.1%}" for name in RULES)
        lines.append(f"{scenario:24}{cells}")
    means = regrets(rows)
    lines.append(f"{'mean':24}" + "".join(f"{means[name]:>20.1%}" for name in RULES))
    probes = max(row["probe_share"] for row in rows)
    passed = means[OURS] <= BAR_REGRET and probes <= BAR_PROBES
    return passed, "\n".join(
        [
            *lines,
            f"bar {BAR_REGRET:.0%}; probes {probes:.2%} of the link at most, bar {BAR_PROBES:.0%}",
            "PASSED" if passed else "FAILED",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    seeds = range(options.seeds)
    record = Record(*seeds, timed=False)
    rows = measure(seeds)
    passed, text = as_text(rows, len(seeds))
    print(text)
    record.keep(options.out, "simulated", {"rows": rows, "passed": passed}, text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
