"""The estimate of a link whose rate changes, and what decisions taken on it cost, in virtual time
over a link without noise: the part of the regret that is the rule's own, beside that of a rule that
knows the rate at every moment, but not what follows.

python -m experiments.link_monitor.simulated [--seeds 64] [--out DIR]
"""

import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs_testkit.link_scenarios import BAR_PROBES, OTHERS, OURS, Rule, measure

BAR_REGRET = 0.10


def _harmonic(samples: Sequence[float]) -> float:
    last = samples[-5:]
    return len(last) / sum(1 / rate for rate in last)


def _fixed_weight(samples: Sequence[float]) -> float:
    estimate = samples[0]
    for rate in samples[1:]:
        estimate += 0.3 * (rate - estimate)
    return estimate


PLAIN: Mapping[str, Rule] = {"EWMA, weight 0.3": _fixed_weight, "harmonic mean of 5": _harmonic}


def rules_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["rule"] for row in rows))


def regrets(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By rule: the mean over the scenarios."""
    return {
        name: fmean(row["regret"] for row in rows if row["rule"] == name) for name in rules_of(rows)
    }


def as_text(rows: list[dict[str, Any]], seeds: int) -> tuple[bool, str]:
    rules = rules_of(rows)
    found = {(row["scenario"], row["rule"]): row["regret"] for row in rows}
    lines = [
        f"regret in virtual time, mean of {seeds} seeds",
        f"{'scenario':24}" + "".join(f"{name:>20}" for name in rules),
    ]
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        cells = "".join(f"{found[scenario, name]:>20.1%}" for name in rules)
        lines.append(f"{scenario:24}{cells}")
    means = regrets(rows)
    lines.append(f"{'mean':24}" + "".join(f"{means[name]:>20.1%}" for name in rules))
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
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=64)
    options = parser.parse_args()
    seeds = range(options.seeds)
    record = Record(*seeds, timed=False)
    rows = measure(seeds, {**OTHERS, **PLAIN})
    passed, text = as_text(rows, len(seeds))
    print(text)
    record.keep(options.out, "simulated", {"rows": rows, "passed": passed}, text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
