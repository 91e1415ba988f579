"""One kill for each seed in virtual time, under each policy: before it the runs of a seed are the
same, and no second kill hits what the first one has left. So the pauses of all seeds can be taken
together, and compared seed by seed.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from experiments.kill_series.run import HIT_AT_LEAST, PAUSE_BARS_S, RESULTS
from experiments.kill_series.simulated import WAYS, config_of, percentile
from experiments.record import Record
from kvrs.core import rules
from kvrs.core.event_log import LogEntry, read
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.demo import scaled_requests
from kvrs.explain.incidents import Loss, incidents
from kvrs.faults.language import parse_faults
from kvrs.ids import StreamId
from kvrs.report.student import interval
from kvrs.sim.fault_scenarios import named_deaths
from kvrs.sim.streams import Arrival
from kvrs.sim.world import World
from kvrs.traces.generator import GeneratorSettings, generate

NAME = "one_kill"
# As many requests as the series has before its second kill; of the same traces.
TRACE_REQUESTS, REQUESTS = 500, 70
KILL_FROM_S = 3.0
# What is killed is not back before its victims go on.
RELOAD_S = 10.0
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Parts:
    """A pause, from the loss on: until the last decision, until the history was computed (None: at
    no prefill instance), until the next token.
    """

    option: str
    decided_s: float
    prefilled_s: float | None
    resumed_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """One kill under one policy."""

    pauses_s: tuple[float, ...]
    recoveries: Counter[str]
    longest: Parts


def play(way: str, seed: int) -> Played | None:
    """None: no instance had enough streams. Raises AssertionError where an invariant is
    violated.
    """
    name, rule = WAYS[way]
    trace = generate(GeneratorSettings(requests=TRACE_REQUESTS), seed)
    asked = scaled_requests(trace, seed)[:REQUESTS]
    arrivals = [Arrival(each.arrival_s, each.prompt_ids, each.max_tokens) for each in asked]
    kill = {
        "when": {"at_s": KILL_FROM_S, "inflight_at_least": HIT_AT_LEAST},
        "what": "kill",
        "whom": {"role": "decode", "pick": "busiest"},
    }
    with patch.dict(rules.BY_NAME, {name: rule}):
        world = World(
            config_of(name, seed),
            arrivals,
            named_deaths(parse_faults([kill])),
            seed=seed,
            stay_away=0.0,
            reload_s=RELOAD_S,
            keep_log=True,
        )
        outcome = world.run()
    assert set(outcome.ended) == {"complete"}, outcome.given_up
    if not outcome.pauses_s:
        return None
    (proxy,) = world.cluster.proxies
    assert proxy.log is not None
    taken = Counter({str(option): count for option, count in outcome.recoveries.items()})
    victims = parts_of(each for each in read(proxy.log) if isinstance(each, LogEntry))
    return Played(tuple(outcome.pauses_s), taken, max(victims, key=lambda each: each.resumed_s))


def parts_of(log: Iterable[LogEntry]) -> list[Parts]:
    """The parts of every stream that had a token before the loss."""
    entries = [*log]
    happened = incidents(entries)
    lost_s = next(each.at_s for each in happened if isinstance(each, Loss))
    began: set[StreamId] = set()
    came_s: dict[tuple[type, StreamId, int], float] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, ev.PrefillDone | ev.StreamResumed):
            came_s[type(event), event.stream, event.attempt] = entry.now_s
            if isinstance(event, ev.StreamResumed) and entry.now_s < lost_s:
                began.add(event.stream)
    found: dict[StreamId, Parts] = {}
    for each in happened:
        if isinstance(each, Loss) or not isinstance(action := each.action, act.Recovered):
            continue
        attempt = action.stream, action.attempt
        resumed_s = came_s.get((ev.StreamResumed, *attempt))
        if action.stream not in began or resumed_s is None:
            continue
        prefilled_s = came_s.get((ev.PrefillDone, *attempt))
        found[action.stream] = Parts(
            action.option.value,
            each.at_s - lost_s,
            None if prefilled_s is None else prefilled_s - lost_s,
            resumed_s - lost_s,
        )
    return [*found.values()]


def figures_of(played: dict[int, Played], best: dict[int, Played]) -> dict[str, Any]:
    """Figures of all seeds, and the differences to `auto`, seed by seed."""
    pauses_s = [pause_s for each in played.values() for pause_s in each.pauses_s]
    longest_s = [max(each.pauses_s) for each in played.values()]
    longer = interval(
        [fmean(each.pauses_s) - fmean(best[seed].pauses_s) for seed, each in played.items()]
    )
    assert longer is not None
    return {
        "kills": len(played),
        "pauses": len(pauses_s),
        "mean_s": fmean(pauses_s),
        **{f"p{share}_s": percentile(pauses_s, share) for share in (50, 90, 99)},
        "longest_mean_s": fmean(longest_s),
        "mean_longer_s": asdict(longer),
        "recoveries": dict(sum((each.recoveries for each in played.values()), Counter[str]())),
    }


def row(way: str, figures: dict[str, Any]) -> str:
    keys = ("mean_s", "p50_s", "p90_s", "p99_s", "longest_mean_s")
    times = "".join(f"{figures[key] * 1e3:7.0f}" for key in keys)
    longer = figures["mean_longer_s"]
    beside = "-"
    if way != AUTO:
        beside = f"{longer['mean'] * 1e3:+.0f} ± {longer['half_width'] * 1e3:.0f}"
    taken = ", ".join(f"{n} {option}" for option, n in sorted(figures["recoveries"].items()))
    return f"{way:22}{figures['pauses']:7}{times}{beside:>11}   {taken}"


def words(longest: Sequence[Parts]) -> list[str]:
    """The parts of which the longest pauses of the kills consist."""

    def mean_ms(values: Iterable[float]) -> str:
        return f"{fmean(values) * 1e3:.0f}"

    elsewhere = [each for each in longest if each.prefilled_s is not None]
    at_target = [each for each in longest if each.prefilled_s is None]
    lines = [f"the longest pause of each kill under {AUTO}, means in ms:"]
    if elsewhere:
        prefills = [(each.prefilled_s or 0.0) - each.decided_s for each in elsewhere]
        hand_offs = [each.resumed_s - (each.prefilled_s or 0.0) for each in elsewhere]
        lines.append(
            f"  {len(elsewhere)} computed at a prefill instance: "
            f"{mean_ms(each.decided_s for each in elsewhere)} until the decision, "
            f"{mean_ms(prefills)} queue and prefill, {mean_ms(hand_offs)} hand-off and first token"
        )
    if at_target:
        lines.append(
            f"  {len(at_target)} at the target alone: "
            f"{mean_ms(each.decided_s for each in at_target)} until the decision, "
            f"{mean_ms(each.resumed_s - each.decided_s for each in at_target)} until the token"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    record = Record(*seeds, timed=False)
    found = {
        way: {seed: run for seed in seeds if (run := play(way, seed)) is not None} for way in WAYS
    }
    best = found[AUTO]
    rows = {way: figures_of(each, best) for way, each in found.items()}
    longest = [each.longest for each in best.values()]
    missed = [
        f"{share} of {AUTO}: {rows[AUTO][f'{share}_s'] * 1e3:.0f} ms; bar {bar_s * 1e3:.0f} ms"
        for share, bar_s in PAUSE_BARS_S.items()
        if rows[AUTO][f"{share}_s"] > bar_s
    ]
    lines = [
        f"one kill for each seed in virtual time, {len(best)} of {len(seeds)} seeds have an "
        f"instance with {HIT_AT_LEAST} streams; pauses in ms",
        f"{'':22}{'pauses':>7}{'mean':>7}{'p50':>7}{'p90':>7}{'p99':>7}{'most':>7}"
        f"{'to auto':>11}   recoveries",
        *(row(way, figures) for way, figures in rows.items()),
        "most: the mean of the kills' longest pauses; to auto: of the mean pauses, kill by kill",
        "",
        *words(longest),
        *(["MISSED", *missed] if missed else ["PASSED"]),
    ]
    text = "\n".join(lines)
    print(text)
    figures = {
        "ways": rows,
        "longest": [asdict(each) for each in longest],
        "bars_s": PAUSE_BARS_S,
        "passed": not missed,
    }
    record.keep(chosen.out, NAME, figures, text)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
