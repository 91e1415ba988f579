"""Hits of prefix caches and first tokens in virtual time, by the rule that places prompts."""

import argparse
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.prefix_placement.rules import RULES, placed_by
from experiments.record import ROOT, Record
from kvrs.config.file import Config, parse_config
from kvrs_lab.sim.case import FIRST_ORDINARY_TOKEN, VOCAB_SIZE
from kvrs_lab.sim.fault_scenarios import FaultEvent
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.mooncake import at_rate, clip, prompt_token_ids, window

TRACES = ROOT.parent / "shared/data/traces"
PACE = "llama-3.1-8b-h100-vllm-tp1"
PAGE_TOKENS, STEP_TOKENS, LONGEST = 128, 8192, 131_072
LINK_BYTES_PER_S = 50e9
OUTPUT_TOKENS = 8
# Requests per second of each prefill instance: it is busy nine tenths of the time by load.
RATES = {"conversation": 2.0, "synthetic": 2.25}
REQUESTS = 375  # Of each prefill instance.
# A prefill instance's cache: KV of an H100 in which a small model leaves most of the memory, and
# more than a trace has.
CACHES = {"1M": 1_048_576, "no limit": 16_777_216}
SIZES = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Cell:
    trace: str
    size: int
    cache: str
    rule: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.trace}, {self.size} x {self.cache}, {self.rule}, seed {self.seed}"


def cells(seeds: int) -> Iterator[Cell]:
    """In the order in which they are measured: one seed of all first, small clusters first."""
    for seed in range(seeds):
        for cache in CACHES:
            for size in SIZES:
                for trace in RATES:
                    for rule in RULES:
                        yield Cell(trace, size, cache, rule, seed)


def config_of(size: int, cache_tokens: int, route: str) -> Config:
    instances = [
        [{"id": f"p{n}", "role": "prefill"}, {"id": f"d{n}", "role": "decode"}] for n in range(size)
    ]
    engine = {
        "pace": PACE,
        "page_size_tokens": PAGE_TOKENS,
        "pages": cache_tokens // PAGE_TOKENS,
        "max_batch_tokens": STEP_TOKENS,
        "max_running": 256,
        "max_model_len": 2 * LONGEST,
    }
    return parse_config(
        {
            "cluster": {
                "nodes": [{"id": f"n{n}", "instances": each} for n, each in enumerate(instances)],
                "engine": engine,
            },
            "policy": {"route": route, "admission": {"wait_s": 3600.0}},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S},
            "backup": {"mode": "off"},
        }
    )


def arrivals_of(trace_name: str, size: int, seed: int) -> list[Arrival]:
    trace = load_trace(TRACES / f"{trace_name}_trace.jsonl")
    count = min(REQUESTS * size, len(trace.requests))
    trace = clip(window(trace, count, 0), LONGEST, OUTPUT_TOKENS)
    trace = at_rate(trace, RATES[trace_name] * size)
    return [
        Arrival(
            each.arrival_s,
            array(
                "H",
                prompt_token_ids(each, trace.block_tokens, VOCAB_SIZE, seed, FIRST_ORDINARY_TOKEN),
            ),
            each.output_tokens,
        )
        for each in trace.requests
    ]


def best_share(trace_name: str, size: int) -> float:
    """The share of prompt tokens that one instance without limit would find."""
    trace = load_trace(TRACES / f"{trace_name}_trace.jsonl")
    seen: set[int] = set()
    found = tokens = 0
    for each in trace.requests[: REQUESTS * size]:
        count = min(each.input_tokens, LONGEST)
        whole = each.hash_ids[: count // trace.block_tokens]
        known = next((at for at, block in enumerate(whole) if block not in seen), len(whole))
        found += min(known * trace.block_tokens, count - 1)
        tokens += count
        seen.update(whole)
    return found / tokens


def measure(cell: Cell, deaths: list[FaultEvent], proxies: int = 1) -> dict[str, Any]:
    """Raises AssertionError where an invariant of the simulator is violated."""
    route = "load" if cell.rule == "load" else "prefix"
    config = config_of(cell.size, CACHES[cell.cache], route)
    arrivals = arrivals_of(cell.trace, cell.size, cell.seed)
    world = World(
        config,
        arrivals,
        deaths,
        seed=cell.seed,
        proxies=proxies,
        first_token=FirstToken.PREFILL,
    )
    with placed_by(cell.rule, world):
        outcome = world.run()
    waits_s = sorted(
        live.journal.received_s[0] - live.arrival.at_s
        for proxy in world.cluster.proxies
        for live in proxy.streams.values()
        if live.journal.received_s
    )
    return {
        "hits": outcome.cached_tokens / outcome.prompt_tokens,
        "mean_s": fmean(waits_s),
        **{f"p{share}_s": waits_s[len(waits_s) * share // 100] for share in (50, 90, 99)},
        "recovered": outcome.recovered_streams,
        "ended": dict(outcome.ended),
    }


def as_text(found: dict[str, Any], seeds: int) -> str:
    lines = ["Prompt tokens found in a prefix cache, and time to the first token in seconds", ""]
    for cache in CACHES:
        for size in SIZES:
            for trace in RATES:
                rows = []
                for rule in RULES:
                    names = [Cell(trace, size, cache, rule, seed).name for seed in range(seeds)]
                    of_rule = [found[name] for name in names if name in found]
                    if of_rule:
                        rows.append(_row(rule, of_rule))
                if rows:
                    best = best_share(trace, size)
                    lines += [
                        f"{trace}, {size} prefill instances, cache {cache}; best share {best:.1%}",
                        f"{'':16}{'seeds':>6}{'hits':>8}{'mean':>8}{'p50':>8}{'p90':>8}{'p99':>8}"
                        f"{'recovered':>11}",
                        *rows,
                        "",
                    ]
    return "\n".join(lines)


def _row(rule: str, cells: list[dict[str, Any]]) -> str:
    hits = fmean(each["hits"] for each in cells)
    times = "".join(
        f"{fmean(each[key] for each in cells):8.2f}"
        for key in ("mean_s", "p50_s", "p90_s", "p99_s")
    )
    recovered = sum(each["recovered"] for each in cells)
    return f"{rule:16}{len(cells):>6}{hits:>8.1%}{times}{recovered:>11}"


def bars(found: dict[str, Any], seeds: int) -> dict[str, Any]:
    """How far the cells that are there keep the bars."""
    shares, gains = [], []
    beaten = {"cache_aware": [0, 0], "llm-d": [0, 0]}
    for cell in cells(seeds):
        if cell.rule != "prefix" or cell.name not in found:
            continue
        ours = found[cell.name]
        other = {rule: found.get(replace(cell, rule=rule).name) for rule in RULES}
        if (true := other["true contents"]) is not None:
            shares.append(ours["hits"] / true["hits"])
        if (load := other["load"]) is not None:
            gains.append(1 - ours["mean_s"] / load["mean_s"])
        for rule, counts in beaten.items():
            if (theirs := other[rule]) is not None:
                counts[0] += ours["mean_s"] <= theirs["mean_s"]
                counts[1] += 1
    return {
        "least_share_of_true": min(shares, default=None),
        "least_gain": min(gains, default=None),
        "median_gain": median(gains) if gains else None,
        "no_worse_than": beaten,
    }


def bar_lines(kept: dict[str, Any]) -> list[str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    return [
        "prefix beside the same rule with the true contents: least share of hits "
        f"{share(kept['least_share_of_true'])}; bar 90%",
        f"prefix beside load: mean time to the first token {share(kept['median_gain'])} less in "
        f"the middle, bar 30%; {share(kept['least_gain'])} less at least, bar 0%",
        *(
            f"prefix is no slower in the mean than {rule} in {won} of {all_} cells"
            for rule, (won, all_) in kept["no_worse_than"].items()
        ),
    ]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="begin no cell beyond it")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    record = Record(*range(options.seeds), timed=False)
    by_name = {cell.name: cell for cell in cells(options.seeds)}
    kept = Cells(options.out, "prefix_placement", {"pace": PACE, "requests": REQUESTS})
    kept.measure(by_name, options.limit_s, lambda name: measure(by_name[name], []))
    found = bars(kept.found, options.seeds)
    text = "\n".join([as_text(kept.found, options.seeds), *bar_lines(found)])
    print(text)
    kept.keep(record, {"bars": found}, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
