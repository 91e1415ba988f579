"""RaidServe's Table 3 in place, on the clock of its model: Llama-3.1-70B on eight GPUs, one lost,
56 requests of 16K tokens.

    python -m experiments.raidserve.in_place

Simulated: scheduler, re-forming, layouts and restores are the product's, in virtual time; batches
take the times of the profile, moves their bytes over the paper's links. Exit status 1: an order or
a ratio of the paper is missed.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.virtual_time import NumberedPrompt, grouped, patient, run_until, token_times
from kvrs.config.file import Config, parse_config
from kvrs.core.model.estimates import Option
from kvrs.elastic import on_demand
from kvrs.elastic.layouts import hybrid, staged
from kvrs.elastic.moving import LinkRates, schedule
from kvrs.elastic.plans import plan
from kvrs.elastic.shapes import SHAPES
from kvrs.elastic.units import Units
from kvrs.explain.elastic import ElasticQuestion, explain_elastic
from kvrs.ids import InstanceId, StreamId
from kvrs.sim.cluster import SimCluster
from kvrs.sim.process import require
from kvrs.sim.rank_model import RankModel
from kvrs.sim.ranks import SimRanks
from kvrs.sim.streams import Arrival

NAME = "in_place"
PROFILE, MODEL = "llama-3.1-70b-h100-vllm-tp8", "meta-llama/Llama-3.1-70B"
RANKS, REQUESTS, CONTEXT_TOKENS = 8, 56, 16384
RATES = LinkRates(host_bytes_per_s=50e9, peer_bytes_per_s=362.2e9)
PUBLISHED_S = {"recompute": 22.0, "host": 0.530, "full": 0.120, "oracle": 0.015}
MEANING = {
    "recompute": "whole shards from the host, all KV computed again",
    "host": "whole shards from the host, lost KV from the host",
    "full": "only lost weights and lost KV from the host",
    "oracle": "nothing to move",
}
IN_LADDER = {"recompute": "recompute", "host": "host", "full": "on demand"}
# Of the paper: host memory over recomputing, and only what was lost over whole shards.
LEAST_RATIOS = {("recompute", "host"): 41.0, ("host", "full"): 4.4}
MEASURED = Path(__file__).parents[1] / "measured_once" / "results" / "in_place.json"
HOME = InstanceId("b0")
_GROUPS = 4  # Layers that lie alike, as one: there are fewer cells to follow.
_OUTPUT_TOKENS, _LEAST_TOKENS = 1500, 8
_STEP_S, _FINE_S, _LONGEST_S = 0.5, 0.001, 600.0
_NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    way: str
    weights_s: float  # Until the ranks that are left compute again.
    first_s: float  # From the loss to the next token: of the first stream to have one,
    p50_s: float
    last_s: float  # and of the last one, when nothing of the lost KV is missing any more.


def units() -> Units:
    return grouped(SHAPES[MODEL].units(), _GROUPS)


def join_s() -> float:
    """The measured time of real ranks with next to nothing to move."""
    found = json.loads(MEASURED.read_text())
    return float(found["pause_s"]["p50"])


def rates_of(way: str) -> LinkRates:
    """Links on which what is missing takes as long as the way's moves do."""
    if way == "full":
        return RATES
    if way == "oracle":
        return LinkRates(RATES.host_bytes_per_s * _NEVER_S, RATES.peer_bytes_per_s * _NEVER_S)
    model = units()
    before = hybrid(model, staged(model.layers, [range(RANKS)]))
    after = on_demand.reshaped(before, model, on_demand.survivors(before, [RANKS - 1]))
    missing = plan(before, after, model, [RANKS - 1])
    whole = plan(before, after, model, before.ranks)
    slower = schedule(whole, RATES).makespan_s / schedule(missing, RATES).makespan_s
    return LinkRates(RATES.host_bytes_per_s / slower, RATES.peer_bytes_per_s / slower)


def config_of(way: str) -> Config:
    longest = CONTEXT_TOKENS + _OUTPUT_TOKENS
    backup: dict[str, Any] = {"mode": "off"}
    if way in ("host", "full"):
        backup = {
            "mode": "local",
            "capacity_bytes": 1 << 40,
            "host_to_device_bytes_per_s": RATES.host_bytes_per_s * (RANKS - 1),
            "staging_pages": 4096,
        }
    return parse_config(
        {
            "proxy": {"token_gap_s": 300.0},
            "cluster": {
                "engine": {
                    "pace": PROFILE,
                    "pages": REQUESTS * (longest // 16 + 2),
                    "max_model_len": longest,
                    "max_running": REQUESTS,
                    "max_batch_tokens": 8192,
                },
                "nodes": [
                    {"id": "n0", "instances": [{"id": HOME, "role": "both", "tp": RANKS}]},
                ],
            },
            "policy": {"recovery": {"wait_s": 300.0}, "admission": {"wait_s": 3600.0}},
            "slo": {"recovery_gap_s": 600.0},
            "backup": backup,
        }
    )


def play(way: str, seed: int) -> Row:
    """Raises AssertionError where an invariant of the simulator is violated."""
    model = RankModel(units(), rates_of(way), join_s(), _NEVER_S, _NEVER_S)
    with token_times() as tokens_s, patient(_LONGEST_S):
        cluster = SimCluster(
            config_of(way), seed=seed, proxies=1, stay_away=0.0, keep_log=False, rank_model=model
        )
        clock, proxy = cluster.clock, cluster.serving[0]
        cluster.begin()
        names = [StreamId(f"s{n}") for n in range(REQUESTS)]
        for n, name in enumerate(names):
            prompt = NumberedPrompt(n, CONTEXT_TOKENS)
            clock.after(1.0, partial(proxy.arrive, name, Arrival(1.0, prompt, _OUTPUT_TOKENS)))
        engine = cluster.engines[HOME]

        def is_settled() -> bool:
            """All decode, and of each at most the newest page has no backup."""
            lag_pages = engine.backlog.lag_pages if cluster.agents else 0
            return lag_pages <= REQUESTS and all(
                len(tokens_s[name]) >= _LEAST_TOKENS for name in names
            )

        run_until(clock, is_settled, _STEP_S, _LONGEST_S)
        clock.run(clock.now_s + Random(seed).uniform(0.0, _STEP_S))
        lost_s, had = clock.now_s, {name: len(tokens_s[name]) for name in names}
        require(all(proxy.streams[name].outcome == "" for name in names), f"{way}: streams ended")
        proxy.recoveries.clear()
        ranks = engine.ranks
        assert isinstance(ranks, SimRanks)
        ranks.lose([RANKS - 1], memory_kept=way == "oracle")
        run_until(clock, lambda: ranks.serves, _FINE_S, _LONGEST_S)
        weights_s = clock.now_s - lost_s
        run_until(
            clock,
            lambda: all(len(tokens_s[name]) > had[name] + 1 for name in names),
            _FINE_S,
            _LONGEST_S,
        )
    # A token of the batch under way may have been on its way to the client.
    pauses_s = [
        max(after - before for before, after in pairwise([lost_s, *times_s[had[name] :]]))
        for name, times_s in tokens_s.items()
    ]
    taken = dict(proxy.recoveries)
    # Of a short pause the proxy may hear when it is over.
    require(set(taken) <= {Option.IN_PLACE.value}, f"{way}: {taken}")
    return Row(way, weights_s, min(pauses_s), median(pauses_s), max(pauses_s))


def ladder_s() -> dict[str, float]:
    """`kvrs explain --elastic`: the same by arithmetic alone, without scheduling."""
    found: dict[str, float] = {}
    for has_backup in (False, True):
        question = ElasticQuestion(
            profile=PROFILE,
            tp=RANKS,
            lost=1,
            requests=REQUESTS,
            context_tokens=CONTEXT_TOKENS,
            has_backup=has_backup,
            host_bytes_per_s=RATES.host_bytes_per_s,
            peer_bytes_per_s=RATES.peer_bytes_per_s,
            bytes_per_s=12.5e9,
        )
        ladder = explain_elastic(question)["ladder"]
        rungs = {rung["way"]: rung["total_s"] for rung in ladder}
        found |= {
            way: rungs[rung]
            for way, rung in IN_LADDER.items()
            if rung in rungs and has_backup is (way != "recompute")
        }
    return found


def figures_of(rows: Sequence[Row], computed_s: dict[str, float]) -> dict[str, Any]:
    last_s = {row.way: row.last_s for row in rows}
    return {
        "rows": [asdict(row) for row in rows],
        "computed_s": computed_s,
        "published_s": PUBLISHED_S,
        "join_s": join_s(),
        "ratios": {f"{one} / {other}": last_s[one] / last_s[other] for one, other in LEAST_RATIOS},
        "computed_ratios": {
            f"{one} / {other}": computed_s[one] / computed_s[other] for one, other in LEAST_RATIOS
        },
    }


def missed(figures: dict[str, Any]) -> list[str]:
    last_s = [row["last_s"] for row in figures["rows"]]
    found = [] if last_s == sorted(last_s, reverse=True) else ["the order of the ways is another"]
    for (one, other), least in LEAST_RATIOS.items():
        ratio = figures["computed_ratios"][f"{one} / {other}"]
        if ratio < least:
            found.append(f"{one} takes {ratio:.1f} times as long as {other}; bar {least:g}")
    return found


def as_text(figures: dict[str, Any]) -> str:
    lines = [
        f"SIMULATED on the clock of {PROFILE}, no GPU: one of {RANKS} ranks lost with its memory, "
        f"{REQUESTS} streams of {CONTEXT_TOKENS:,} tokens go on in place",
        f"links of {RATES.host_bytes_per_s / 1e9:g} GB/s from the host to each rank, "
        f"{RATES.peer_bytes_per_s / 1e9:g} GB/s between ranks; ranks join in "
        f"{figures['join_s'] * 1e3:.0f} ms, as real ones with a small model (in_place)",
        "",
        f"{'seconds':11}{'RaidServe':>10}{'by bytes':>10}{'weights':>10}"
        f"{'next token: first':>19}{'p50':>9}{'last':>9}",
    ]
    for row in figures["rows"]:
        way = row["way"]
        computed_s = figures["computed_s"].get(way, 0.0)
        lines.append(
            f"{way:11}{PUBLISHED_S[way]:>10.3f}{computed_s:>10.3f}{row['weights_s']:>10.3f}"
            f"{row['first_s']:>19.3f}{row['p50_s']:>9.3f}{row['last_s']:>9.3f}  {MEANING[way]}"
        )
    lines.append("")
    for one, other in LEAST_RATIOS:
        key, published = f"{one} / {other}", PUBLISHED_S[one] / PUBLISHED_S[other]
        lines.append(
            f"{key}: RaidServe {published:.1f}, by bytes {figures['computed_ratios'][key]:.1f}, "
            f"until the last stream's next token {figures['ratios'][key]:.1f}"
        )
    wrong = missed(figures)
    return "\n".join([*lines, "", *(["MISSED", *wrong] if wrong else ["PASSED"])])


def main() -> int:
    parser = parser_of(__doc__, seed=1)
    parser.add_argument("--jobs", type=int, help="processes at a time")
    chosen = parser.parse_args()
    record = Record(chosen.seed, timed=False)
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(partial(play, seed=chosen.seed), PUBLISHED_S))
    figures = figures_of(rows, ladder_s())
    text = as_text(figures)
    print(text)
    record.keep(chosen.out, NAME, figures, text)
    return int(bool(missed(figures)))


if __name__ == "__main__":
    sys.exit(main())
