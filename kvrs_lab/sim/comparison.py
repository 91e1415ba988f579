"""`kvrs lab compare`: policies under the same arrivals and faults, ranked.

The runs of one seed are a pair and differ by the policy only. The interval is that of the pairs'
differences.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvrs.config.policy import PolicyName
from kvrs.errors import ConfigError, KvrsError
from kvrs.sums import sum_in_order
from kvrs.tables import folded, output
from kvrs_lab.report.student import Interval, interval
from kvrs_lab.sim.case import SimulateOptions
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.command import broken_lines, described, missed_faults, simulate_policies
from kvrs_lab.sim.seeds import Simulated

COMPLETE = "complete"  # The simulator's outcome of streams that got all their tokens.
# Seconds that a run's streams waited for their recoveries, divided by all its streams.
WAITED, INCOMPLETE = "waited_s", "incomplete_share"


@dataclass(frozen=True, slots=True)
class AgainstBest:
    """One policy against the best policy, over their common seeds."""

    policy: PolicyName
    # Mean difference to the best policy by measure; above 0: worse.
    differences: dict[str, Interval]

    def is_worse(self, measure: str) -> bool | None:
        """Return whether the interval shows a worse measure; None: no interval, from one seed."""
        found = self.differences[measure]
        return None if found.half_width is None else found.mean - found.half_width > 0


def parse_policies(text: str) -> tuple[PolicyName, ...]:
    """Parse the names of policies, separated by commas.

    Raises:
        ConfigError: fewer than two, or unknown names.
    """
    names = [name.strip() for name in text.split(",")]
    known = [policy.value for policy in PolicyName]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"--policies: got {wrong[0]!r}; allowed: {', '.join(known)}")
    if len(set(names)) < 2:
        raise ConfigError(f"--policies: got {text!r}; allowed: two or more different ones")
    return tuple(PolicyName(name) for name in dict.fromkeys(names))


def run_comparison(options: SimulateOptions) -> int:
    """Simulate, print the verdict, return the exit status: 0 if all invariants held and all faults
    of a file came due.

    Raises:
        ConfigError, TraceError: an option or a file is wrong.
    """
    if options.fault is None and not options.deaths:
        raise ConfigError("--fault, --deaths: missing; allowed: one of them, to recover from")
    config, faults, found = simulate_policies(options)
    if hollow := [policy.value for policy, each in found.items() if not each.by_seed]:
        raise KvrsError(f"all runs of {', '.join(hollow)} violated an invariant: kvrs lab simulate")
    comparisons = compare(found)
    if options.json:
        compared = {"comparison": _document(found, comparisons)}
        print(json.dumps(described(options, config, found) | compared, indent=2))
    else:
        output().print(_shown(found, comparisons))
    missed = missed_faults(found, faults)
    return 1 if missed or any(each.broken for each in found.values()) else 0


def compare(found: dict[PolicyName, Simulated]) -> list[AgainstBest]:
    """Rank the policies, the best first: fewest incomplete streams, then shortest waits. Values are
    means over the seeds.
    """
    means = {policy: measures(simulated.outcomes) for policy, simulated in found.items()}
    ranked = sorted(
        found, key=lambda policy: (fmean(means[policy][INCOMPLETE]), fmean(means[policy][WAITED]))
    )
    best = found[ranked[0]].by_seed
    comparisons = []
    for policy in ranked:
        own = found[policy].by_seed
        seeds = [seed for seed in best if seed in own]
        here = measures([own[seed] for seed in seeds])
        there = measures([best[seed] for seed in seeds])
        differences = {
            measure: interval([a - b for a, b in zip(values, there[measure], strict=True)])
            for measure, values in here.items()
        }
        comparisons.append(
            AgainstBest(policy, {k: v for k, v in differences.items() if v is not None})
        )
    return comparisons


def measures(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """The measures of a comparison, with a value for each run."""
    streams = [max(1, sum(outcome.ended.values())) for outcome in outcomes]
    return {
        WAITED: [sum_in_order(o.pauses_s) / n for o, n in zip(outcomes, streams, strict=True)],
        INCOMPLETE: [1 - o.ended[COMPLETE] / n for o, n in zip(outcomes, streams, strict=True)],
    }


def verdict(comparisons: Sequence[AgainstBest]) -> str:
    """State in a sentence which policy is better than which others."""
    best, *others = comparisons
    shown = [
        each.policy.value for each in others if each.is_worse(WAITED) or each.is_worse(INCOMPLETE)
    ]
    alike = [each.policy.value for each in others if each.policy.value not in shown]
    if others[0].is_worse(WAITED) is None:
        first = [
            each.policy.value
            for each in comparisons
            if not any(difference.mean for difference in each.differences.values())
        ]
        return f"{', '.join(first)} did best; one seed has no interval (--seeds)."
    parts = []
    if shown:
        parts.append(f"{best.policy.value} is better than {', '.join(shown)}")
    if alike:
        parts.append(f"no difference between {best.policy.value} and {', '.join(alike)} is shown")
    return f"{'; '.join(parts)} (95 %, {others[0].differences[WAITED].n} seeds)."


def _document(
    found: dict[PolicyName, Simulated], comparisons: Sequence[AgainstBest]
) -> dict[str, Any]:
    return {
        "verdict": verdict(comparisons),
        "best": comparisons[0].policy.value,
        "policies": {
            each.policy.value: {
                measure: {
                    "mean": fmean(measures(found[each.policy].outcomes)[measure]),
                    "difference": asdict(difference),
                }
                for measure, difference in each.differences.items()
            }
            for each in comparisons
        },
    }


def _shown(
    found: dict[PolicyName, Simulated], comparisons: Sequence[AgainstBest]
) -> RenderableType:
    best = comparisons[0].policy.value
    table = Table(
        Column("policy", no_wrap=True),
        "a stream waited",
        f"longer than {best}",
        "not complete",
        f"more than {best}",
        box=box.SIMPLE_HEAD,
    )
    for each in comparisons:
        means = {
            key: fmean(values) for key, values in measures(found[each.policy].outcomes).items()
        }
        waited, incomplete = (each.differences[key] for key in (WAITED, INCOMPLETE))
        table.add_row(
            each.policy.value,
            f"{means[WAITED] * 1000:,.1f} ms",
            "" if each is comparisons[0] else _spread(waited, 1000, " ms"),
            f"{means[INCOMPLETE]:.2%}",
            "" if each is comparisons[0] else _spread(incomplete, 100, " %"),
        )
    note = (
        "Means over the seeds; of all streams, interrupted or not. Differences between runs of the "
        "same seed, each with its 95 % interval (Student)."
    )
    return Group(
        Text(verdict(comparisons), style="bold"),
        *broken_lines(found),
        folded(table),
        Text(note, style="dim"),
    )


def _spread(found: Interval, scale: float, unit: str) -> str:
    mean = found.mean * scale
    if found.half_width is None:
        return f"{mean:,.1f}{unit}"
    half = found.half_width * scale
    return f"{mean:,.1f} [{mean - half:,.1f}, {mean + half:,.1f}]{unit}"
