"""Both sides of `recovery.poison_deaths` in virtual time: outages that no request caused, and
poisoned requests, each of which ends every decode instance that it gets.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from experiments.record import Record
from kvrs.config.policy import RecoverySettings
from kvrs_lab.report.metrics import percentile
from kvrs_lab.sim.world import World
from kvrs_testkit.random_worlds import outage, poisoned, poisons_at_once

ALLOWED = RecoverySettings().poison_deaths
SEEDS = 20
SPREADS_S = (0.0, 0.06, 0.3, 2.0)
POISONS = 3  # Requests of each attack.


@dataclass(frozen=True, slots=True)
class Row:
    """Worlds that differ in their seed only."""

    cell: str
    is_attack: bool
    worlds: int
    deaths: int
    recovered: int
    innocents_refused: int
    innocents_lost: int
    poisons_refused: int
    deaths_of_one_request: int
    ttft_of_recovered_s_p50: float | None
    ttft_of_recovered_s_p99: float | None

    @property
    def is_met(self) -> bool:
        """Each poisoned request is refused, and ends no more instances than allowed. Innocents
        have no bar: where no cause is known, deaths are all that is known of a request.
        """
        poisons = POISONS * self.worlds if self.is_attack else 0
        return self.deaths_of_one_request <= ALLOWED and self.poisons_refused == poisons


def outages() -> dict[str, Callable[[int], World]]:
    found: dict[str, Callable[[int], World]] = {}
    for spread_s in SPREADS_S:
        for both, what in ((False, "four pairs"), (True, "eight of both stages")):
            name = f"4 of 8 die within {spread_s:g} s, {what}"
            found[name] = partial(outage, spread_s=spread_s, both=both)
    found["4 of 8 die within 0.3 s, supervised"] = partial(
        outage, spread_s=0.3, both=True, is_supervised=True
    )
    return found


def attacks() -> dict[str, Callable[[int], World]]:
    return {
        "three poisons in 8 s, 6 pairs": poisoned,
        "three poisons at once, 4 pairs": partial(poisons_at_once, pairs=4),
        "the same, 30 requests/s": partial(poisons_at_once, pairs=4, per_s=30.0),
        "the same, all instances back at once": partial(
            poisons_at_once, pairs=4, per_s=30.0, stay_away=0.0
        ),
        "three poisons at once, 6 pairs": partial(poisons_at_once, pairs=6),
        "the same, reports 1 s apart": partial(poisons_at_once, pairs=6, load_interval_s=1.0),
        "the same, supervised": partial(poisons_at_once, pairs=6, is_supervised=True),
    }


def measure(
    name: str, make: Callable[[int], World], seeds: Iterable[int], *, is_attack: bool
) -> Row:
    worlds = [make(seed) for seed in seeds]
    outcomes = [world.run() for world in worlds]
    innocents = sum(each.innocents_refused for each in outcomes)
    first_tokens_s = [
        live.journal.first_token_s - live.journal.arrived_s
        for world in worlds
        for proxy in world.cluster.proxies
        for live in proxy.streams.values()
        if live.recoveries and live.journal.first_token_s is not None
    ]
    return Row(
        name,
        is_attack,
        len(worlds),
        sum(len(each.hits) for each in outcomes),
        sum(each.recovered_streams for each in outcomes),
        innocents,
        sum(each.innocents_lost for each in outcomes),
        sum(each.ended["poison"] for each in outcomes) - innocents,
        max(max(each.poison_deaths.values(), default=0) for each in outcomes),
        percentile(first_tokens_s, 50),
        percentile(first_tokens_s, 99),
    )


def totals(rows: Sequence[Row]) -> dict[str, int]:
    found = {"deaths_of_one_request": max(row.deaths_of_one_request for row in rows)}
    for name, is_attack in (("outages", False), ("attacks", True)):
        of = [row for row in rows if row.is_attack is is_attack]
        found[f"refused_in_{name}"] = sum(row.innocents_refused for row in of)
        found[f"recovered_in_{name}"] = sum(row.recovered for row in of)
    return found


def as_text(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':48}{'worlds':>8}{'deaths':>8}{'recovered':>11}{'innocents':>11}{'innocents':>11}"
        f"{'poisons':>9}{'deaths':>8}{'TTFT, s':>15}",
        f"{'':48}{'':>8}{'':>8}{'':>11}{'refused':>11}{'lost':>11}"
        f"{'refused':>9}{'of one':>8}{'p50':>8}{'p99':>7}",
    ]
    for row in rows:
        of_attack = (row.poisons_refused, row.deaths_of_one_request) if row.is_attack else "--"
        times = (row.ttft_of_recovered_s_p50, row.ttft_of_recovered_s_p99)
        p50, p99 = ("-" if each is None else f"{each:.2f}" for each in times)
        lines.append(
            f"{row.cell:48}{row.worlds:>8}{row.deaths:>8,}{row.recovered:>11,}"
            f"{row.innocents_refused:>11}{row.innocents_lost:>11}"
            f"{of_attack[0]:>9}{of_attack[1]:>8}{p50:>8}{p99:>7}"
            + ("" if row.is_met else "  MISSED")
        )
    found = totals(rows)
    lines += [
        "",
        f"poison_deaths {ALLOWED}: a poisoned request ended at most "
        f"{found['deaths_of_one_request']} instances; innocents refused: "
        f"{found['refused_in_outages']:,} of "
        f"{found['recovered_in_outages']:,} recovered streams in outages, "
        f"{found['refused_in_attacks']:,} of {found['recovered_in_attacks']:,} beside poisoned "
        "requests",
    ]
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace) -> int:
    seeds = range(options.seed, options.seed + (options.seeds or SEEDS))
    record = Record(seeds[0], seeds[-1], timed=False)
    rows = [
        measure(name, make, seeds, is_attack=is_attack)
        for cells, is_attack in ((outages(), False), (attacks(), True))
        for name, make in cells.items()
    ]
    text = as_text(rows)
    print(text, end="")
    figures = {"totals": totals(rows), "rows": [asdict(row) for row in rows]}
    record.keep(options.out, "poison", figures, text)
    return 0 if all(row.is_met for row in rows) else 1
