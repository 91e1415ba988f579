"""Staying with an instance that has lost a rank, or leaving it one way or another, over a grid of
situations in virtual time: what each way costs the streams, and what `auto` makes of it.

Every way is carried out by the same simulator (`kvrs.sim`) with the real policy, scheduler and
re-forming, so that what a way costs is what happens, and not what was predicted. Exit status 1: a
bar is missed.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from experiments.record import Record
from experiments.virtual_time import run_until, token_times
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName
from kvrs.core import options, rules
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.rules.base import Rule
from kvrs.ids import InstanceId, StreamId
from kvrs.sim.cluster import SimCluster
from kvrs.sim.proxy import SimProxy
from kvrs.sim.streams import Arrival

CONTEXTS = (500, 2000)
BACKUPS = ("none", "late", "fresh")
DEGREES = (3, 8)
LOADS = (0, 6)
LINKS_BYTES_PER_S = (1.25e9, 12.5e9)
LOSSES = ("rank", "device")

NODES, STREAMS = 3, 12
HOME = InstanceId("d0")
LOOKAHEAD_TOKENS = 32  # As many as `policy.lookahead_tokens`.
_MAX_TOKENS = 900  # None ends before it has been looked at.
_LEAST_TOKENS = 8  # Of every stream, before the loss.
_LOAD_PROMPT_TOKENS = 2000
NEAR, SHARE_BAR = 1.1, 0.95
_PAGE_TOKENS = 16
_AGENT_BYTES = 64 << 30
_GATHER_S = {"late": 1.0, "fresh": 0.05}  # `backup.gather_s`.
STEP_S = 0.05
LONGEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Cell:
    context: int  # Tokens of each stream's prompt.
    backup: str
    degree: int  # Ranks before the loss.
    load: int  # Requests that arrive just before the loss.
    link_bytes_per_s: float
    lost: str  # The process of a rank, or a rank with its device.


class Fixed(Rule):
    """`auto`'s options and targets, but always the preferred option where there is one."""

    several_targets = True

    def __init__(self, preferred: Option) -> None:
        super().__init__(PolicyName.AUTO, options.ALL)
        self.stays = preferred is Option.IN_PLACE
        self._preferred = preferred

    def choose(self, estimates: Sequence[Estimate], fastest: Estimate) -> Estimate:
        found = [each for each in estimates if each.option is self._preferred]
        return min(found, key=lambda each: each.total_s, default=fastest)


AUTO = "auto"
RUNGS = (
    Option.IN_PLACE,
    Option.RECOMPUTE,
    Option.MIGRATE,
    Option.RESTORE,
    Option.SPLIT,
)
WAYS = {AUTO: rules.BY_NAME[PolicyName.AUTO], **{rung.value: Fixed(rung) for rung in RUNGS}}


@dataclass(frozen=True, slots=True)
class Run:
    """The streams that were at the instance when it lost a rank."""

    lost_s: float
    tokens_s: dict[StreamId, list[float]]  # When each token came, from the loss on.
    lag_tokens: float  # Mean part of a history of which no agent had reported a checkpoint.
    taken: Counter[str]


@dataclass(frozen=True, slots=True)
class Played:
    """The mean cost of a way to its victims."""

    cost_s: float  # By which the last token of the look-ahead is later than without the loss.
    gap_s: float  # From the loss to the next token.
    taken: dict[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """A cell under one seed, or the means of some."""

    cell: Cell
    streams: float
    lag_tokens: float
    ways: dict[str, Played]

    @property
    def best(self) -> str:
        return min((rung.value for rung in RUNGS), key=lambda rung: self.ways[rung].cost_s)

    @property
    def is_near(self) -> bool:
        """True if `auto` costs at most a tenth more than the best rung."""
        return self.ways[AUTO].cost_s <= NEAR * self.ways[self.best].cost_s


def grid() -> list[Cell]:
    axes = CONTEXTS, BACKUPS, DEGREES, LOADS, LINKS_BYTES_PER_S, LOSSES
    return [Cell(*values) for values in product(*axes)]


def config_of(cell: Cell, streams: int) -> Config:
    """Nodes with a prefill and a decode instance each."""
    longest = max(cell.context, _LOAD_PROMPT_TOKENS) + 1000
    nodes = [
        {
            "id": f"n{n}",
            "instances": [
                {"id": f"p{n}", "role": "prefill"},
                {"id": f"d{n}", "role": "decode", "tp": cell.degree},
            ],
        }
        for n in range(NODES)
    ]
    backup: dict[str, Any] = {"mode": "off"}
    if cell.backup in _GATHER_S:
        backup = {
            "mode": "remote",
            "capacity_bytes": _AGENT_BYTES,
            "gather_s": _GATHER_S[cell.backup],
        }
    engine = {
        "page_size_tokens": _PAGE_TOKENS,
        "pages": (streams + cell.load) * longest // _PAGE_TOKENS,
        "max_model_len": longest,
        "max_running": 64,
    }
    return parse_config(
        {
            "cluster": {"nodes": nodes, "engine": engine},
            "backup": backup,
            "policy": {"assumed_link_bytes_per_s": cell.link_bytes_per_s},
            "transfer": {"link_bytes_per_s": cell.link_bytes_per_s},
        }
    )


def play(cell: Cell, way: str, seed: int, *, loses: bool = True) -> Run:
    """Until every stream has some tokens, then the loss, and on until the look-ahead's tokens have
    come. Raises AssertionError where an invariant of the simulator is violated.
    """
    rule = patch.dict(rules.BY_NAME, {PolicyName.AUTO: WAYS[way]})
    with token_times() as tokens_s, rule:
        cluster, names = loaded(cell, seed, tokens_s, STREAMS, _MAX_TOKENS)
        clock, proxy = cluster.clock, cluster.serving[0]
        clock.run(clock.now_s + STEP_S)
        lost_s, had = clock.now_s, {name: len(tokens_s[name]) for name in names}
        victims = [name for name in names if proxy.streams[name].instance == HOME]
        lag_tokens = _lag_tokens(proxy, victims)
        proxy.recoveries.clear()
        ranks = cluster.engines[HOME].ranks
        assert ranks is not None
        if loses:
            ranks.lose([0], memory_kept=cell.lost == "rank")
        run_until(
            clock,
            lambda: all(len(tokens_s[name]) > had[name] + LOOKAHEAD_TOKENS for name in victims),
            STEP_S,
            LONGEST_S,
        )
    after_s = {name: tokens_s[name][had[name] :] for name in victims}
    return Run(lost_s, after_s, lag_tokens, proxy.recoveries)


def loaded(
    cell: Cell,
    seed: int,
    tokens_s: Mapping[StreamId, Sequence[float]],
    streams: int,
    max_tokens: int,
) -> tuple[SimCluster, list[StreamId]]:
    """A cluster of which every stream has some tokens, and at which the cell's requests have just
    arrived.
    """
    config = config_of(cell, streams)
    cluster = SimCluster(config, seed=seed, proxies=1, stay_away=0.0, keep_log=False)
    clock, proxy = cluster.clock, cluster.serving[0]
    cluster.begin()
    names = [StreamId(f"s{n}") for n in range(streams)]
    for n, name in enumerate(names):
        asked = _arrival(n, cell.context, max_tokens)
        clock.after(1.0 + n * STEP_S, partial(proxy.arrive, name, asked))
    run_until(
        clock,
        lambda: all(len(tokens_s.get(name, ())) >= _LEAST_TOKENS for name in names),
        STEP_S,
        LONGEST_S,
    )
    for n in range(cell.load):
        asked = _arrival(streams + n, _LOAD_PROMPT_TOKENS, max_tokens)
        proxy.arrive(StreamId(f"load{n}"), asked)
    return cluster, names


def _arrival(number: int, tokens: int, max_tokens: int) -> Arrival:
    """No two prompts begin alike."""
    return Arrival(1.0, tuple(range(number * 10_000, number * 10_000 + tokens)), max_tokens)


def measure(cell: Cell, seed: int) -> Row:
    undisturbed = play(cell, AUTO, seed, loses=False)
    ways: dict[str, Played] = {}
    run = undisturbed
    for way in WAYS:
        run = play(cell, way, seed)
        assert (run.lost_s, run.tokens_s.keys()) == (
            undisturbed.lost_s,
            undisturbed.tokens_s.keys(),
        ), "the runs differ before the loss"
        cost_s = [
            times[LOOKAHEAD_TOKENS] - undisturbed.tokens_s[name][LOOKAHEAD_TOKENS]
            for name, times in run.tokens_s.items()
        ]
        gap_s = [times[0] - run.lost_s for times in run.tokens_s.values()]
        ways[way] = Played(fmean(cost_s), fmean(gap_s), dict(run.taken))
    return Row(cell, len(run.tokens_s), run.lag_tokens, ways)


def averaged(rows: Sequence[Row]) -> Row:
    """One cell under several seeds."""
    ways: dict[str, Played] = {}
    for way in WAYS:
        played = [row.ways[way] for row in rows]
        taken = sum((Counter(each.taken) for each in played), Counter[str]())
        cost_s, gap_s = fmean(each.cost_s for each in played), fmean(each.gap_s for each in played)
        ways[way] = Played(cost_s, gap_s, dict(taken))
    streams, lag_tokens = fmean(row.streams for row in rows), fmean(row.lag_tokens for row in rows)
    return Row(rows[0].cell, streams, lag_tokens, ways)


def _lag_tokens(proxy: SimProxy, victims: Sequence[StreamId]) -> float:
    """The victims' mean lag, as the proxy knows it when it decides."""
    lags = []
    for name in victims:
        live = proxy.streams[name]
        pages = max((copy.pages for copy in live.copies.values()), default=0)
        lags.append(live.true_history_tokens - pages * _PAGE_TOKENS)
    return fmean(lags)


def figures_of(by_seed: dict[int, list[Row]]) -> dict[str, Any]:
    rows = [averaged(cell) for cell in zip(*by_seed.values(), strict=True)]
    return {
        "cells": len(rows),
        "seeds": list(by_seed),
        "near_share": fmean(row.is_near for row in rows),
        "near_share_by_seed": {
            seed: fmean(row.is_near for row in found) for seed, found in by_seed.items()
        },
        "sums_s": {way: sum(row.ways[way].cost_s for row in rows) for way in WAYS},
        "won": dict(Counter(row.best for row in rows)),
        "rows": [asdict(row) | {"best": row.best, "near": row.is_near} for row in rows],
    }


def as_text(by_seed: dict[int, list[Row]], figures: dict[str, Any]) -> str:
    rows = [averaged(cell) for cell in zip(*by_seed.values(), strict=True)]
    sums_s, seeds = figures["sums_s"], figures["near_share_by_seed"].values()
    columns = [*product(DEGREES, LOADS, LINKS_BYTES_PER_S)]
    best = {row.cell: row for row in rows}
    lines = [
        f"{len(rows)} cells; cost: seconds by which a stream's token {LOOKAHEAD_TOKENS} behind the "
        f"next one is late, mean of a cell over {len(seeds)} seeds",
        f"auto costs no more than the best rung and 10 % in {figures['near_share']:.0%} of the "
        f"cells; bar {SHARE_BAR:.0%}; by the seeds one by one: "
        + ", ".join(f"{share:.0%}" for share in seeds),
        "sums over all cells, s: "
        + ", ".join(f"{way} {sum_s:.1f}" for way, sum_s in sums_s.items()),
        "cells won: " + ", ".join(f"{rung} {won}" for rung, won in figures["won"].items()),
        "",
        "the best rung, and auto's cost over its; by ranks / requests arriving / GB/s of links",
        " " * 21 + "".join(f"{f'{d} / {n} / {rate / 1e9:g}':>17}" for d, n, rate in columns),
    ]
    for context, backup, lost in product(CONTEXTS, BACKUPS, LOSSES):
        line = f"{context:5} {backup:6} {lost:8}"
        for degree, load, rate in columns:
            row = best[Cell(context, backup, degree, load, rate, lost)]
            ratio = row.ways[AUTO].cost_s / row.ways[row.best].cost_s
            line += f"{f'{row.best} {ratio:.2f}':>17}"
        lines.append(line)
    return "\n".join([*lines, "", "PASSED" if passed(figures) else "MISSED"])


def passed(figures: dict[str, Any]) -> bool:
    sums_s = figures["sums_s"]
    in_sum = all(sums_s[AUTO] < sum_s for way, sum_s in sums_s.items() if way != AUTO)
    return in_sum and figures["near_share"] >= SHARE_BAR


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    record = Record(*seeds, timed=False)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        by_seed = {seed: list(pool.map(partial(measure, seed=seed), grid())) for seed in seeds}
    figures = figures_of(by_seed)
    text = as_text(by_seed, figures)
    print(text)
    record.keep(chosen.out, "cost_ladder", figures, text)
    return 0 if passed(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
