"""Series of deaths in a real cluster: which cluster, which load, and what dies when. The same
requests run with the deaths and undisturbed, and are compared token by token.
"""

import argparse
import io
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from experiments.kills.schedule import schedule
from experiments.record import Record
from experiments.traces import sample
from experiments.two_pairs import LINK_BYTES_PER_S, PACE, REQUESTS_PER_S, two_pairs
from kvrs.config.backup import BackupMode
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.demo import (
    FIRST_ORDINARY_TOKEN,
    VOCAB_SIZE,
    run_load,
    scaled_requests,
)
from kvrs_lab.faults.language import Fault, parse_faults
from kvrs_lab.load.passes import Run
from kvrs_lab.report.report import Report, build_report
from kvrs_lab.report.table import terminal_table
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.generator import GeneratorSettings, generate
from kvrs_lab.traces.mooncake import at_rate, jitter, replay_requests, scale, window
from kvrs_lab.traces.records import ReplayRequest
from kvrs_testkit.random_experts import ExpertsModel, write_experts_model

HIT_AT_LEAST = 8
# A killed instance is back after about five seconds; then the load needs a moment to fill it again.
KILL_GAP_S = (6.0, 10.0)
PAUSE_BARS_S = {"p50": 0.2, "p99": 0.35}  # Of `auto`, as its clients see it.
LONGEST = 8  # So many pauses are shown with what they consist of.
RETURN_S = 600.0  # A stage with torch and the model, on shared cores.

# Beside the repository, outside of it.
TRACE = Path(__file__).parents[2].parent / "shared/data/traces/conversation_trace.jsonl"
# Of Mooncake's trace: a window, lengths in the size of the tiny model, and the seconds of the
# batches in which arrivals were logged.
TRACE_REQUESTS, TRACE_TOKENS, TRACE_BATCH_S = 3000, (480, 240), 3.0

# Seconds from a death of DistServe to the next: a whole node needs a new server, too.
STAGE_GAP_S, NODE_GAP_S = (8.0, 12.0), (25.0, 30.0)
STAGE_DEATHS: dict[str, dict[str, Any]] = {
    "one decode worker": {"whom": {"role": "decode", "pick": "random"}, "workers": 1},
    "whole decode stage": {"whom": {"role": "decode", "pick": "random"}},
    "prefill worker": {"whom": {"role": "prefill", "pick": "random"}},
    "whole node": {},  # Of one node after the other.
}
NODES = ("n0", "n1", "n2")

Deaths = list[tuple[str, list[Fault]]]  # The faults of each death, by kind.


@dataclass(frozen=True, slots=True)
class Series:
    """One combination of victims and cluster."""

    config: Callable[[argparse.Namespace], Config]
    deaths: Callable[[float, int], Deaths]  # Seconds of the load, seed.
    streams: int = 500
    rate: float = REQUESTS_PER_S
    hit_at_least: int = HIT_AT_LEAST  # Streams, by each kill.
    counted: str = "inflight"  # At the victim; `streams`: that depend on it.
    is_sampled: bool = False  # Every second stream.
    has_pause_bars: bool = False


def kills(
    span_s: float,
    seed: int,
    hit_at_least: int = HIT_AT_LEAST,
    gap_s: tuple[float, float] = KILL_GAP_S,
    **whom: str,
) -> list[Fault]:
    """SIGKILLs at random moments over the run, `gap_s` (from, to) apart.

    Each waits until the decode instance that it hits has enough streams in flight.
    """
    rng = random.Random(seed)
    at_s, rows = rng.uniform(1.5, 4.0), []
    while at_s < span_s:
        when = {"at_s": at_s, "inflight_at_least": hit_at_least}
        victim: dict[str, Any] = {"role": "decode", "pick": "random"} | whom
        if whom:
            victim["seed"] = rng.randrange(1 << 30)
        rows.append({"when": when, "what": "kill", "whom": victim})
        at_s += rng.uniform(*gap_s)
    return parse_faults(rows)


def decode_deaths(span_s: float, seed: int) -> Deaths:
    return [("decode instance", [fault]) for fault in kills(span_s, seed)]


def trace_deaths(span_s: float, seed: int) -> Deaths:
    return [("decode instance", [fault]) for fault in kills(span_s, seed, 4, (8.0, 12.0))]


def rank_deaths(span_s: float, seed: int) -> Deaths:
    """Any rank of any decode instance that works."""
    found = kills(span_s, seed, 1, (10.0, 18.0), rank="random")
    return [("rank", [fault]) for fault in found]


def stage_deaths(span_s: float, seed: int) -> Deaths:
    """Kinds of death of DistServe in turn, at random moments."""
    rng = random.Random(seed)
    rows: list[tuple[str, dict[str, Any]]] = []
    at_s, nodes = rng.uniform(3.0, 5.0), 0
    while at_s < span_s:
        kind = list(STAGE_DEATHS)[len(rows) % len(STAGE_DEATHS)]
        row: dict[str, Any] = {"what": "kill"} | STAGE_DEATHS[kind]
        if kind == "whole node":
            row["whom"] = {"node": NODES[nodes % 2]}
            nodes += 1
        # A prefill instance is done with a prompt in a moment; many streams count on what it keeps.
        counted = "streams_at_least" if kind == "prefill worker" else "inflight_at_least"
        rows.append((kind, row | {"when": {"at_s": at_s, counted: 2}}))
        at_s += rng.uniform(*(NODE_GAP_S if kind == "whole node" else STAGE_GAP_S))
    faults = parse_faults([row for _, row in rows])
    return [(kind, [fault]) for (kind, _), fault in zip(rows, faults, strict=True)]


def all_deaths(span_s: float, seed: int) -> Deaths:
    return [(act.scenario, act.faults) for act in schedule(span_s, seed, NODES)]


def demo(options: argparse.Namespace) -> Config:
    return two_pairs(options.policy, options.seed)


def of_ranks(options: argparse.Namespace) -> Config:
    """Decode of two ranks, of three and of two stages, fed by prefill of one rank and of two, so
    that every page moves between degrees. With `experts` copies of them move meanwhile.
    """
    stages: dict[str, Any] = {"id": "d2", "role": "decode", "pp": 2}
    if options.on_nodes:
        stages["stage_hosts"] = [{"node": "n0", "port": 0}]
    cluster: dict[str, Any] = {"engine": {"pages": 1024}}
    more: dict[str, Any] = {}
    if options.experts:
        write_experts_model(options.directory, ExpertsModel.tiny("mixtral", skew=1.0), options.seed)
        cluster["model"] = str(options.directory)
        more["elastic"] = {"experts": {"room_share": 1.0}}
    return _config(
        options,
        [
            [{"id": "p0", "role": "prefill", "tp": 2}, {"id": "d0", "role": "decode", "tp": 2}],
            [{"id": "p1", "role": "prefill"}, {"id": "d1", "role": "decode", "tp": 3}, stages],
        ],
        cluster,
        **more,
    )


def of_distserve(options: argparse.Namespace) -> Config:
    """Two servers with one prefill and two decode workers each."""
    flags = ["--decoding-tensor-parallel-size", "2"]
    cluster = {"backend": "distserve", "distserve": {"flags": flags}, "engine": {}}
    more = {"transfer": {"probe_interval_s": 1.0}}
    return _config(options, [_pair(n) for n in range(2)], cluster, **more)


def of_three_nodes(options: argparse.Namespace) -> Config:
    """A prefill and a decode instance and an agent on each; links are so slow that all options get
    chosen.
    """
    transfer = {"link_bytes_per_s": LINK_BYTES_PER_S, "probe_interval_s": 1.0}
    cluster = {"engine": {"pace": PACE}, "allow_faults": True}
    return _config(options, [_pair(n) for n in range(3)], cluster, transfer=transfer)


def _pair(number: int) -> list[dict[str, Any]]:
    return [{"id": f"p{number}", "role": "prefill"}, {"id": f"d{number}", "role": "decode"}]


def _config(
    options: argparse.Namespace,
    instances: Sequence[list[dict[str, Any]]],
    cluster: dict[str, Any],
    **more: Any,
) -> Config:
    nodes = [{"id": id_, "instances": of} for id_, of in zip(NODES, instances, strict=False)]
    engine = cluster["engine"] | {"seed": options.seed}
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": cluster | {"engine": engine, "nodes": nodes},
            "policy": {"name": options.policy.value},
            "backup": {"mode": options.backup.value, "capacity_bytes": 64 << 20},
            **more,
        }
    )


SERIES = {
    "decode": Series(demo, decode_deaths, has_pause_bars=True),
    "decode-trace": Series(demo, trace_deaths, streams=300, rate=6.0, hit_at_least=4),
    "rank": Series(of_ranks, rank_deaths, rate=4.0, hit_at_least=1, is_sampled=True),
    "distserve": Series(of_distserve, stage_deaths, 200, 2.5, hit_at_least=0),
    "everything": Series(
        of_three_nodes, all_deaths, streams=2000, counted="streams", is_sampled=True
    ),
}


def requests_of(series: Series, options: argparse.Namespace) -> list[ReplayRequest]:
    seed = options.seed
    if options.load == "trace":
        return _of_the_trace(options.streams, series.rate, seed)
    trace = generate(GeneratorSettings(requests=options.streams), seed)
    found = scaled_requests(trace, seed, series.rate)
    if not series.is_sampled:
        return found
    return [
        replace(each, temperature=0.8, seed=seed + number) if number % 2 else each
        for number, each in enumerate(found)
    ]


def _of_the_trace(requests: int, rate: float, seed: int) -> list[ReplayRequest]:
    """Requests of the first of Mooncake's conversation trace, at their own distances stretched to a
    rate, with lengths scaled and prefixes kept.
    """
    trace = sample(window(load_trace(TRACE), TRACE_REQUESTS), requests, seed)
    trace = jitter(trace, TRACE_BATCH_S, seed)
    # The few longest prompts are cut; otherwise all others would shrink to a handful of tokens.
    longest = sorted(each.input_tokens for each in trace.requests)[int(0.9 * (requests - 1))]
    scaled = at_rate(scale(trace, *TRACE_TOKENS, longest_input_tokens=longest), rate)
    return replay_requests(scaled, VOCAB_SIZE, seed, FIRST_ORDINARY_TOKEN)


def run(name: str, options: argparse.Namespace) -> int:
    """One series, with its result."""
    series = SERIES[name]
    options.streams = options.streams or series.streams
    options.policy = options.policy or PolicyName.AUTO
    options.backup = options.backup or (BackupMode.BOTH if name == "everything" else BackupMode.OFF)
    record, console = Record(options.seed), Console()
    requests = requests_of(series, options)
    deaths = series.deaths(options.streams / series.rate, options.seed)
    faults = [fault for _, of_kind in deaths for fault in of_kind]
    with TemporaryDirectory() as directory:
        options.directory = Path(directory)  # Of a model that the series makes.
        config = series.config(options)
        faulted, clean, rebalances = with_and_without(
            config, requests, faults, options.seed, console
        )
    settings = {
        "policy": options.policy.value,
        "backup": config.backup.mode.value,
        "streams": options.streams,
    }
    report = build_report(
        faulted.records, clean.records, faulted.recoveries, faulted.faults, settings
    )
    figures = settings | summary(faulted, report, series.counted)
    if options.experts:
        figures["rebalances"] = rebalances
    figures |= {"by_kind": by_kind(faulted, deaths), "longest_pauses": longest(report)}
    misses = missed(figures, series)
    lines = [f"MISSED: {each}" for each in misses] or ["PASSED"]
    kinds = [f"{kind}: {counts}" for kind, counts in figures["by_kind"].items()]
    parts = longest_words(figures["longest_pauses"])
    kinds += [f"changes of copies of experts: {rebalances}"] if options.experts else []
    text = as_text(report, hit_words(figures), *kinds, parts, "\n".join(lines))
    print(text, end="")
    record.keep(options.out, name_of(name, options), figures, text)
    return 1 if misses else 0


def name_of(name: str, options: argparse.Namespace) -> str:
    """The name of the result: the series and what is not its default."""
    more = ["experts"] if options.experts else []
    more += ["on-nodes"] if options.on_nodes else []
    more += [options.policy.value] if options.policy is not PolicyName.AUTO else []
    if name != "everything" and options.backup is not BackupMode.OFF:
        more.append(options.backup.value)
    return "-".join([name, *more])


def with_and_without(
    config: Config,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    console: Console,
) -> tuple[Run, Run, int]:
    """The requests through one cluster twice, first with the faults, then undisturbed; and how
    often copies of experts have changed until then.
    """
    with Cluster(
        config, lambda line: console.print(f"  {line}", style="dim", markup=False)
    ) as cluster:
        faulted = run_load(cluster, requests, faults, seed, console, "with deaths")
        cluster.wait_all_up(RETURN_S)
        clean = run_load(cluster, requests, [], seed, console, "without")
        rows = rows_of(cluster.state()).values()
        return faulted, clean, sum(row["experts"]["rebalances"] for row in rows if row["experts"])


def summary(run: Run, report: Report, counted: str = "inflight") -> dict[str, Any]:
    """The figures that the claim is about."""
    keys = (
        *("streams", "completed", "errors", "tokens_lost", "tokens_repeated", "tokens_different"),
        *("text_different", "recoveries", "exact"),
    )
    phases: Counter[str] = Counter()
    for fault in run.faults:
        phases.update(fault["phases"])
    killed = [fault[counted] for fault in run.faults if fault["what"] == "kill"]
    return {key: report[key] for key in keys} | {
        "kills": len(killed),
        "kills_left": run.faults_left,
        "fewest_streams_hit_by_a_kill": min(killed, default=0),
        "streams_hit_by_phase": dict(phases),
        "client_visible_gap_s": report["gap_s"],
        "tfs_s": [fault["tfs_s"] for fault in report["faults"]],
    }


def by_kind(run: Run, deaths: Deaths) -> dict[str, dict[str, int]]:
    """How many deaths of each kind there were, and how many streams used the dead processes."""
    kinds = {fault.label: kind for kind, faults in deaths for fault in faults}
    found = {kind: Counter(deaths=0, streams=0) for kind, _ in deaths}
    for fault in run.faults:
        found[kinds[fault["fault"]]].update(deaths=1, streams=fault["streams"])
    return {kind: dict(count) for kind, count in found.items()}


def missed(figures: dict[str, Any], series: Series) -> list[str]:
    """The bars that are missed."""
    found = [] if figures["exact"] else ["tokens differ, or a stream has failed"]
    if (hit := figures["fewest_streams_hit_by_a_kill"]) < series.hit_at_least:
        found.append(f"a kill hit {hit} streams; bar {series.hit_at_least}")
    if figures["kills_left"]:
        found.append(f"{figures['kills_left']} faults never came due")
    if figures.get("rebalances") == 0:
        found.append("copies of experts never moved")
    found += [f"never: {kind}" for kind, of in figures["by_kind"].items() if not of["deaths"]]
    is_auto = series.has_pause_bars and figures["policy"] == PolicyName.AUTO.value
    return found + [
        f"pause {share} {pause_s * 1000:.1f} ms; bar {bar_s * 1000:.0f}"
        for share, bar_s in (PAUSE_BARS_S if is_auto else {}).items()
        if (pause_s := figures["client_visible_gap_s"][share]) > bar_s
    ]


def longest(report: Report, count: int = LONGEST) -> list[dict[str, Any]]:
    """The longest pauses and their parts: from the last token to the decision, the prediction with
    its own parts, and how much later than predicted the next token came.
    """
    rows = [
        row
        for row in report["recovery_rows"]
        if row["pause_s"] is not None and row["real_s"] is not None
    ]
    rows.sort(key=lambda row: float(row["pause_s"]), reverse=True)
    found = []
    for row in rows[:count]:
        chosen = next(each for each in row["estimates"] if each["option"] == row["option"])
        found.append(
            {
                "at_s": row["at_s"],
                "option": row["option"],
                "pause_s": row["pause_s"],
                "undecided_s": row["pause_s"] - row["real_s"],
                "predicted_s": row["predicted_s"],
                "later_s": row["real_s"] - row["predicted_s"],
                **{part: chosen[part] for part in ("queue_s", "transfer_s", "compute_s")},
            }
        )
    return found


def longest_words(rows: list[dict[str, Any]]) -> str:
    lines = [
        "the longest pauses, ms: until the decision, as predicted (queue + transfer + compute), "
        "later than that"
    ]
    for row in rows:
        parts = " + ".join(
            f"{row[part] * 1e3:.0f}" for part in ("queue_s", "transfer_s", "compute_s")
        )
        lines.append(
            f"  {row['pause_s'] * 1e3:4.0f} at {row['at_s']:5.2f} s, {row['option']}: "
            f"{row['undecided_s'] * 1e3:.0f}, {row['predicted_s'] * 1e3:.0f} ({parts}), "
            f"{row['later_s'] * 1e3:+.0f}"
        )
    return "\n".join(lines)


def as_text(report: Report, *lines: str) -> str:
    """The report's table and what follows it."""
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(terminal_table(report))
    for line in lines:
        console.print(line, markup=False)
    return console.export_text()


def hit_words(figures: dict[str, Any]) -> str:
    phases = ", ".join(f"{count} {name}" for name, count in figures["streams_hit_by_phase"].items())
    return (
        f"{figures['kills']} kills, {figures['kills_left']} left; at least "
        f"{figures['fewest_streams_hit_by_a_kill']} streams each: {phases}"
    )
