"""Goodput with 90 % of the requests at one of two nodes, in virtual time: hand-offs that stay,
against hand-offs that may go to the other node, over many seeds.

    python -m experiments.load_skew.simulated [--seeds 100] [--rates 4.1 4.2 4.3]

The case of `rates.py` in the simulator, with the same requests of a seed, proxies, limits and
clock. Both hand-offs of a seed are a pair. Beside the given rates stands the one at which hand-offs
that stay lose as much as in the seed's paper, which runs of these alone find.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from experiments.command_line import parser_of
from experiments.load_skew.rates import LOST, MODES, SHARE, Rows, as_text, gains, lost
from experiments.load_skew.run import (
    GBIT_PER_S,
    behind_door,
    figures,
    requests,
    settings,
)
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import Handoff
from kvrs_lab.sim.clients import records_of, stream_of
from kvrs_lab.sim.cluster import SimCluster
from kvrs_lab.sim.proxy import SimProxy
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.traces.records import ReplayRequest, StreamRecord

RATES = (4.1, 4.2, 4.3)
APART, MOST = 0.2, 6.0  # The rates of the premise test, which begins at the last given one.
UP_S = 1.0  # By then both proxies know all instances.
DRAIN_S = 60.0


class TwoDoors(SimCluster):
    """A cluster whose proxies are front doors: each prefills on its own node alone, and decodes on
    both. They tell each other nothing.
    """

    def __init__(self, config: Config, handoff: Handoff, seed: int) -> None:
        self._doors = [parse_config(behind_door(config, node, handoff)) for node in range(2)]
        super().__init__(config, seed=seed, proxies=2, stay_away=0.0, keep_log=False)

    def new_proxy(self) -> SimProxy:
        config = self._doors[len(self.proxies)]
        known = {instance.id for _, instance in config.cluster.instances()}
        holders = {name: each for name, each in self._site.holders.items() if name in known}
        site = replace(self._site, config=config, holders=holders)
        proxy = SimProxy(f"proxy{len(self.proxies)}", site, self._grants, self.rng, keep_log=False)
        self.proxies.append(proxy)
        return proxy

    def take(self, doors: Sequence[Sequence[ReplayRequest]], until_s: float) -> list[StreamRecord]:
        """Run with these requests at each door, and return the records of all clients."""
        self.begin()
        arrivals = [
            [Arrival(UP_S + each.arrival_s, each.prompt_ids, each.max_tokens) for each in door]
            for door in doors
        ]
        for proxy, asked in zip(self.serving, arrivals, strict=True):
            for number, each in enumerate(asked):
                self.clock.after(each.at_s, proxy.arrive, stream_of(number), each)
        self.clock.run(UP_S + until_s)
        self.close()
        return [
            record
            for proxy, asked in zip(self.serving, arrivals, strict=True)
            for record in records_of(asked, [proxy])
        ]


def simulated_settings() -> Config:
    """The cluster of `run.py`, with the link that its shaped one stands for: simulated pages have
    the profile's size.
    """
    document = settings().model_dump(mode="json")
    document["transfer"]["link_bytes_per_s"] = GBIT_PER_S / 8 * 1e9
    return parse_config(document)


class Case:
    """Runs of the case, kept by rate and hand-off."""

    def __init__(self, seeds: int, seconds: float) -> None:
        self._config = simulated_settings()
        self._seeds, self._seconds = range(seeds), seconds
        self.rows: Rows = {}

    def run(self, rate: float, modes: Sequence[Handoff]) -> dict[str, list[dict[str, Any]]]:
        """A run of each seed with each hand-off that was not run yet."""
        ways = self.rows.setdefault(f"{rate:g}", {})
        for mode in modes:
            if mode.value not in ways:
                ways[mode.value] = [self._of_seed(rate, mode, seed) for seed in self._seeds]
        return ways

    def _of_seed(self, rate: float, mode: Handoff, seed: int) -> dict[str, Any]:
        asked = requests(seed, self._seconds, SHARE, rate)
        records = TwoDoors(self._config, mode, seed).take(asked, self._seconds + DRAIN_S)
        found = figures(records, self._seconds)
        return {key: found[key] for key in ("requests", "good", "goodput_per_s")}

    def premise(self, first: float) -> float:
        """The rate at which hand-offs that stay lose the least above what they lost in the seed's
        paper, or the highest one.
        """
        rate = first
        while lost(self.run(rate, (Handoff.OWN_PAIR,))[Handoff.OWN_PAIR.value]) < LOST:
            if rate >= MOST:
                break
            rate = round(rate + APART, 1)
        return rate


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    record = Record(*range(options.seeds), timed=False)
    case = Case(options.seeds, options.seconds)
    like_paper = case.premise(max(options.rates))
    for rate in {*options.rates, like_paper}:
        case.run(rate, MODES)
    rows = {rate: ways for rate, ways in sorted(case.rows.items()) if len(ways) == len(MODES)}
    premise = {
        rate: round(lost(ways[Handoff.OWN_PAIR.value]), 4) for rate, ways in case.rows.items()
    }
    text = as_text(rows, options.seeds, options.seconds)
    text += f"at {like_paper:g}/s `own_pair` loses as much as there ({LOST:.1%})\n"
    print(text, end="")
    document = {
        "share": SHARE,
        "repeats": options.seeds,
        "seconds": options.seconds,
        "like_paper": f"{like_paper:g}",
        "own_pair_loses": premise,
        "gains": {rate: asdict(gains(*ways.values())) for rate, ways in rows.items()},
        "rows": rows,
    }
    record.keep(options.out, "simulated", document, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
