"""Hits and first tokens in virtual time where agents store what instances have computed, and new
prompts are loaded from there.

    python -m experiments.prefix_placement.agents [--seeds 4] [--limit-s S] [--out DIR]
"""

import argparse
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.prefix_placement.run import (
    LONGEST,
    MOONCAKE,
    PACE,
    RATES,
    REQUESTS,
    TRACES,
    arrivals_of,
    config_of,
)
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.core import prefix_routing
from kvrs.profiles.catalog import kv_geometry
from kvrs_lab.sim.calls import tokens_at
from kvrs_lab.sim.case import FIRST_ORDINARY_TOKEN, VOCAB_SIZE
from kvrs_lab.sim.clients import stream_of
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.mooncake import at_rate, clip, prompt_token_ids, window

SIZE = 4
# Of each prefill instance: what an 8B model leaves of an H100, and as in `run`.
CACHES = {"400k": 400_000, "1M": 1_048_576}
AGENT_TOKENS = 2_097_152  # Of each node: 256 GiB of this model's KV.
LINKS = {"50 GB/s": 50e9, "2.5 GB/s": 2.5e9}
# Turns of the trace whose prompts have the answers in them that the simulated instances give.
ANSWERED, MOST_OUTPUT = "conversation, answers", 1_000
NO_AGENTS, NO_LOADS, LOADS = "no agents", "no loads", "loads"
RULES = (NO_AGENTS, NO_LOADS, LOADS)


class Cell(NamedTuple):
    trace: str
    cache: str
    link: str
    rule: str
    seed: int

    @property
    def case(self) -> str:
        return f"{self.trace}, {SIZE} x {self.cache}, {self.link}"

    @property
    def name(self) -> str:
        return f"{self.case}, {self.rule}, seed {self.seed}"


def cells(seeds: int) -> Iterator[Cell]:
    cases = [
        *((trace, cache, "50 GB/s") for trace in MOONCAKE for cache in CACHES),
        *(("conversation", cache, "2.5 GB/s") for cache in CACHES),
        (ANSWERED, "1M", "50 GB/s"),
    ]
    for seed in range(seeds):
        for case in cases:
            yield from (Cell(*case, rule, seed) for rule in RULES)


def config_for(cell: Cell) -> Config:
    document = config_of(SIZE, CACHES[cell.cache], "prefix").model_dump(mode="json")
    document["transfer"]["link_bytes_per_s"] = LINKS[cell.link]
    if cell.rule != NO_AGENTS:
        capacity_bytes = AGENT_TOKENS * kv_geometry(PACE).bytes_per_token
        document["backup"] = {"mode": "remote", "capacity_bytes": capacity_bytes}
    return parse_config(document)


@lru_cache(maxsize=1)
def answered(seed: int) -> list[Arrival]:
    """Conversations whose next turn begins with the whole turn before it, and its answer."""
    trace = load_trace(TRACES / "conversation_trace.jsonl")
    trace = clip(window(trace, REQUESTS * SIZE, 0), LONGEST, MOST_OUTPUT)
    trace = at_rate(trace, RATES["conversation"] * SIZE)
    size, arrivals = trace.block_tokens, list[Arrival]()
    blocks: dict[int, array[int]] = {}
    turns: dict[int, int] = {}  # The last turn that ends with a block.
    for number, each in enumerate(trace.requests):
        drawn = prompt_token_ids(each, size, VOCAB_SIZE, seed, FIRST_ORDINARY_TOKEN)
        ids, known = array("H", drawn), 0
        whole = each.hash_ids[: len(ids) // size]
        while known < len(whole) and whole[known] in blocks:
            ids[known * size : (known + 1) * size] = blocks[whole[known]]
            known += 1
        before = next((turns[block] for block in reversed(whole) if block in turns), None)
        if before is not None:
            turn = arrivals[before].prompt_ids
            answer = tokens_at(stream_of(before), len(turn), arrivals[before].max_tokens)
            history = [*turn, *answer]
            if known * size <= len(turn) and len(history) <= len(ids):
                ids[known * size : len(history)] = array("H", history[known * size :])
        for index in range(known, len(whole)):
            blocks[whole[index]] = ids[index * size : (index + 1) * size]
        if whole:
            turns[whole[-1]] = number
        arrivals.append(Arrival(each.arrival_s, ids, each.output_tokens))
    return arrivals


def measure(cell: Cell) -> dict[str, Any]:
    """Raises AssertionError where an invariant of the simulator is violated."""
    is_answered = cell.trace == ANSWERED
    arrivals = answered(cell.seed) if is_answered else arrivals_of(cell.trace, SIZE, cell.seed)
    world = World(config_for(cell), arrivals, [], seed=cell.seed, first_token=FirstToken.PREFILL)
    stored = patch.object(prefix_routing, "_stored", lambda *_: None)
    with stored if cell.rule == NO_LOADS else nullcontext():
        outcome = world.run()
    streams = world.cluster.proxies[0].streams.values()
    waits_s = sorted(live.journal.received_s[0] - live.arrival.at_s for live in streams)
    return {
        "hits": outcome.cached_tokens / outcome.prompt_tokens,
        "mean_s": fmean(waits_s),
        **{f"p{share}_s": waits_s[len(waits_s) * share // 100] for share in (50, 90, 99)},
        "ended": dict(outcome.ended),
    }


def as_text(found: dict[str, Any], seeds: int) -> str:
    lines = ["Prompt tokens found, and time to the first token in seconds"]
    of_case: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for cell in cells(seeds):
        if cell.name in found:
            of_case.setdefault(cell.case, {}).setdefault(cell.rule, []).append(found[cell.name])
    for case, rules in of_case.items():
        lines += ["", f"{case:38}{'seeds':>6}{'hits':>8}{'mean':>8}{'p50':>8}{'p90':>8}{'p99':>8}"]
        for rule, runs in rules.items():
            hits = fmean(run["hits"] for run in runs)
            keys = ("mean_s", "p50_s", "p90_s", "p99_s")
            times = "".join(f"{fmean(run[key] for run in runs):8.2f}" for key in keys)
            lines.append(f"{rule:38}{len(runs):>6}{hits:>8.1%}{times}")
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="begin no cell beyond it")
    options: argparse.Namespace = parser.parse_args()
    record = Record(*range(options.seeds), timed=False)
    by_name = {cell.name: cell for cell in cells(options.seeds)}
    settings = {"pace": PACE, "requests": REQUESTS, "agent_tokens": AGENT_TOKENS}
    kept = Cells(options.out, "agents", settings)
    kept.measure(by_name, options.limit_s, lambda name: measure(by_name[name]))
    text = as_text(kept.found, options.seeds)
    print(text)
    kept.keep(record, {}, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
