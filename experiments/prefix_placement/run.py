"""Hits of prefix caches and first tokens in virtual time, by the rule that places prompts."""

import argparse
from array import array
from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.prefix_placement.rules import OWN_INDEX, RULES, placed_by
from experiments.record import ROOT, Record
from kvrs.config.file import Config, parse_config
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.case import FIRST_ORDINARY_TOKEN, VOCAB_SIZE
from kvrs_lab.sim.fault_scenarios import FaultEvent, named_deaths
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
BURSTS, EVEN_BURSTS = "bursts", "even bursts"
RATES = {"conversation": 2.0, "synthetic": 2.25, BURSTS: 12.0, EVEN_BURSTS: 12.0}
REQUESTS = 375  # Of each prefill instance.
# A prefill instance's cache: KV of an H100 in which a small model leaves most of the memory, and
# more than a trace has.
CACHES = {"1M": 1_048_576, "no limit": 16_777_216}
SIZES = (4, 8, 16)
# Tokens of a document with which all prompts of a burst begin, and of what each adds. So many
# prompts come within `BURST_S`, the others until the next document comes in the mean. Documents
# come at random, or at even intervals, in which the cluster has long computed the one before.
DOCUMENT, QUESTION = 10_240, 256
BURST, BURST_S, ASKED = 24, 0.07, 40
ALIKE_S = 0.001  # The rules may place all prompts alike, but for the delays of messages.
DEATH_S = 5.0  # The instance is back after that, and empty.


class Case(NamedTuple):
    """The prompts of a trace, and the cluster that they come to."""

    trace: str
    size: int
    cache: str = "1M"
    proxies: int = 1
    has_death: bool = False

    @property
    def name(self) -> str:
        proxies = f", {self.proxies} proxies" if self.proxies > 1 else ""
        death = ", a death" if self.has_death else ""
        return f"{self.trace}, {self.size} x {self.cache}{proxies}{death}"

    @property
    def rules(self) -> tuple[str, ...]:
        return (*RULES, OWN_INDEX) if self.proxies > 1 else RULES


class Cell(NamedTuple):
    case: Case
    rule: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.rule}, seed {self.seed}"


MOONCAKE = ("conversation", "synthetic")
CASES = (
    *(Case(trace, size, cache) for size in SIZES for cache in CACHES for trace in MOONCAKE),
    *(Case(trace, 4, proxies=count) for count in (2, 4) for trace in MOONCAKE),
    *(Case(trace, 4, has_death=True) for trace in MOONCAKE),
    *(Case(BURSTS, size) for size in (4, 8)),
    Case(EVEN_BURSTS, 4),
)


def cells(seeds: int) -> Iterator[Cell]:
    """In the order in which they are measured: small clusters first."""
    for size in SIZES:
        for seed in range(seeds):
            for case in CASES:
                if case.size == size:
                    yield from (Cell(case, rule, seed) for rule in case.rules)


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


@lru_cache(maxsize=1)
def arrivals_of(trace_name: str, size: int, seed: int) -> list[Arrival]:
    if trace_name in (BURSTS, EVEN_BURSTS):
        found = bursts(size, seed, even=trace_name == EVEN_BURSTS)
        return sorted(found, key=attrgetter("at_s"))
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


def bursts(size: int, seed: int, *, even: bool) -> Iterator[Arrival]:
    """Questions about documents, most of them at once."""
    rng, every_s, begin_s = Random(seed), ASKED / (RATES[BURSTS] * size), 0.0

    def words(count: int) -> "array[int]":
        return array("H", rng.choices(range(FIRST_ORDINARY_TOKEN, VOCAB_SIZE), k=count))

    for _ in range(REQUESTS * size // ASKED):
        document = words(DOCUMENT)
        begin_s += every_s if even else rng.expovariate(1 / every_s)
        for number in range(ASKED):
            first_s, last_s = (0.0, BURST_S) if number < BURST else (BURST_S, every_s)
            at_s = begin_s + rng.uniform(first_s, last_s)
            yield Arrival(at_s, document + words(QUESTION), OUTPUT_TOKENS)


def best_share(trace_name: str, size: int) -> float:
    """The share of prompt tokens that one instance without limit would find."""
    if trace_name in (BURSTS, EVEN_BURSTS):
        return (ASKED - 1) * DOCUMENT / (ASKED * (DOCUMENT + QUESTION))
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


def deaths_of(arrivals: list[Arrival]) -> list[FaultEvent]:
    """One prefill instance dies when half of the prompts have come."""
    at_s = arrivals[len(arrivals) // 2].at_s
    return named_deaths(
        parse_faults([{"when": {"at_s": at_s}, "what": "kill", "whom": {"id": "p0"}}])
    )


def measure(cell: Cell) -> dict[str, Any]:
    """Raises AssertionError where an invariant of the simulator is violated."""
    case = cell.case
    route = "load" if cell.rule == "load" else "prefix"
    arrivals = arrivals_of(case.trace, case.size, cell.seed)
    world = World(
        config_of(case.size, CACHES[case.cache], route),
        arrivals,
        deaths_of(arrivals) if case.has_death else [],
        seed=cell.seed,
        proxies=case.proxies,
        reload_s=DEATH_S,
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
    for case in CASES:
        rows = []
        for rule in case.rules:
            if of_rule := _of(found, case, rule, seeds):
                rows.append(_row(rule, of_rule))
        if rows:
            best = best_share(case.trace, case.size)
            lines += [
                f"{case.name}; best share {best:.1%}",
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
    """How far the cases that are there keep the bars, in the mean of their seeds."""
    shares, gains, own, slower = [], [], [], []
    beaten = {"cache_aware": [0, 0], "llm-d": [0, 0]}
    for case in CASES:
        means = {
            rule: {key: fmean(each[key] for each in of_rule) for key in ("hits", "mean_s")}
            for rule in case.rules
            if (of_rule := _of(found, case, rule, seeds))
        }
        if set(means) != set(case.rules):
            continue
        ours = means["prefix"]
        shares.append(ours["hits"] / means["true contents"]["hits"])
        gains.append(1 - ours["mean_s"] / means["load"]["mean_s"])
        if gains[-1] < 0:
            slower.append(case.name)
        if OWN_INDEX in means:
            own.append(means[OWN_INDEX]["hits"] / ours["hits"])
        for rule, counts in beaten.items():
            counts[0] += ours["mean_s"] <= means[rule]["mean_s"] + ALIKE_S
            counts[1] += 1
    return {
        "cases": len(shares),
        "least_share_of_true": min(shares, default=None),
        "least_gain": min(gains, default=None),
        "slower_than_load": slower,
        "median_gain": median(gains) if gains else None,
        "most_of_own_index": max(own, default=None),
        "no_worse_than": beaten,
    }


def _of(found: dict[str, Any], case: Case, rule: str, seeds: int) -> list[dict[str, Any]]:
    names = (Cell(case, rule, seed).name for seed in range(seeds))
    return [found[name] for name in names if name in found]


def bar_lines(kept: dict[str, Any]) -> list[str]:
    if not kept["cases"]:
        return []
    least, gain = kept["least_share_of_true"], kept["median_gain"]
    compared = [
        (least >= 0.9, f"at least {least:.0%} of the hits with the true contents; bar 90%"),
        (gain >= 0.3, f"a mean {gain:.0%} below that of load in the middle; bar 30%"),
        *(
            (won == all_, f"no slower in the mean than {rule} in {won} of {all_} cases; bar all")
            for rule, (won, all_) in kept["no_worse_than"].items()
        ),
    ]
    lines = [f"MISSED: {line}" if not is_kept else line for is_kept, line in compared]
    slower = [
        f"MISSED: slower than load with {case}; bar none" for case in kept["slower_than_load"]
    ]
    own = kept["most_of_own_index"]
    told = [] if own is None else [f"proxies that share nothing find at most {own:.0%} of that"]
    return [
        f"prefix, in {kept['cases']} cases, by the means of their seeds:",
        *lines,
        *slower,
        *told,
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
    kept.measure(by_name, options.limit_s, lambda name: measure(by_name[name]))
    found = bars(kept.found, options.seeds)
    text = "\n".join([as_text(kept.found, options.seeds), *bar_lines(found)])
    print(text)
    kept.keep(record, {"bars": found}, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
