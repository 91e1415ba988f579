"""The simulator beside a real cluster at the same pace: the same requests and kills, side by side.

    python -m experiments.simulator.cluster [--streams 800] [--kills 8] [--rate 8] [--logs DIR]

The cluster is that of the series of kills: two pairs of instances that compute a tiny model, each
step of which takes the time of a profile. Links carry its pages in the time that those of the
profile's model take in the simulator. Decisions that differ are taken apart by their inputs
(`causes.py`).
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from experiments.command_line import parser_of
from experiments.kills.simulated import TINY_BYTES_PER_TOKEN, config_of
from experiments.record import Record
from experiments.simulator import causes
from experiments.two_pairs import PACE, two_pairs
from kvrs.cli.incidents import lines_of
from kvrs.config.file import Config
from kvrs.config.policy import PolicyName
from kvrs.ids import StreamId
from kvrs.profiles.catalog import kv_geometry
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.demo import run_load, scaled_requests
from kvrs_lab.faults.language import Fault, parse_faults
from kvrs_lab.load.passes import Run
from kvrs_lab.report import metrics
from kvrs_lab.sim.clients import records_of, stream_of
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.generator import GeneratorSettings, generate
from kvrs_lab.traces.records import ReplayRequest, StreamRecord

BACK_S = 5.0  # A killed instance of the tiny model serves again after about that.
BAR, DECISIONS_BAR = 0.25, 0.95
MEASURES = {
    "TTFT": metrics.arrival_ttft_s,
    "TPOT": metrics.tpot_s,
    "end to end": metrics.latency_s,
    "longest gap": metrics.max_gap_s,
}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    records: list[StreamRecord]  # By number.
    options: dict[int, str]  # Of recovered requests.
    pause_s: float  # The median.
    log: list[str]  # The proxy's event log.
    numbers: dict[StreamId, int]


def kills_of(count: int, span_s: float, seed: int) -> list[Fault]:
    """Kills of decode instances, evenly over the run; each waits for four streams."""
    rows = [
        {
            "when": {"at_s": span_s * (number + 1) / (count + 2), "inflight_at_least": 4},
            "what": "kill",
            "whom": {"role": "decode", "pick": "random", "seed": seed + number},
        }
        for number in range(count)
    ]
    return parse_faults(rows) if rows else []


def logged(config: Config, path: Path) -> Config:
    proxy = config.proxy.model_copy(update={"event_log": str(path)})
    return config.model_copy(update={"proxy": proxy})


def real(requests: Sequence[ReplayRequest], faults: list[Fault], seed: int) -> Side:
    """In real time."""
    console = Console(stderr=True)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        config = logged(two_pairs(PolicyName.AUTO, seed), path)
        with Cluster(config, lambda line: console.print(line)) as cluster:
            run: Run = run_load(cluster, requests, faults, seed, console, "real")
        log, _ = lines_of(path)
    numbers = {StreamId(record.stream): record.index for record in run.records}
    rows = [row for row in run.recoveries if row["stream"] in numbers]
    options = {numbers[row["stream"]]: str(row["option"]) for row in rows}
    return Side(run.records, options, _pause_s(rows), log, numbers)


def simulated(
    requests: Sequence[ReplayRequest], faults: list[Fault], seed: int, delays_seed: int = 0
) -> Side:
    """The same in virtual time."""
    arrivals = [Arrival(each.arrival_s, each.prompt_ids, each.max_tokens) for each in requests]
    deaths = named_deaths(faults) if faults else []
    config = config_of(PolicyName.AUTO, seed)
    world = World(
        config, arrivals, deaths, seed=delays_seed, stay_away=0.0, reload_s=BACK_S, keep_log=True
    )
    world.run()
    numbers = {stream_of(number): number for number in range(len(arrivals))}
    rows = [each.row() for proxy in world.cluster.proxies for each in proxy.recovered]
    options = {numbers[row["stream"]]: str(row["option"]) for row in rows}
    (proxy,) = world.cluster.proxies
    records = records_of(arrivals, world.cluster.proxies)
    return Side(records, options, _pause_s(rows), proxy.log or [], numbers)


def _pause_s(rows: Sequence[Row]) -> float:
    gaps = [float(row["gap_s"]) for row in rows if row["gap_s"] is not None]
    return metrics.percentile(gaps, 50) or 0.0


def causes_of(one: Side, other: Side, again: Side) -> list[Row]:
    """By which inputs the decisions of both sides differ; `again`: the simulator with other delays
    of messages.
    """
    larger = kv_geometry(PACE).bytes_per_token / TINY_BYTES_PER_TOKEN
    there = causes.decided(other.log, other.numbers, larger)
    here = causes.decided(one.log, one.numbers, 1.0, there)
    return causes.causes(here, there, causes.decided(again.log, again.numbers, larger))


def compare(sides: dict[str, Side], faults: list[Fault]) -> list[Row]:
    rows = []
    for name, measure in MEASURES.items():
        row: Row = {"name": name}
        for name_of, side in sides.items():
            found = metrics.spread(map(measure, side.records))
            row |= {f"{name_of}_{key}_s": found[key] for key in ("p50", "p90", "p99")}
        rows.append(row)
    one, other = sides["real"], sides["simulated"]
    if faults:
        rows.append({"name": "pause", "real_p50_s": one.pause_s, "simulated_p50_s": other.pause_s})
        both = one.options.keys() & other.options.keys()
        pairs = Counter((one.options[number], other.options[number]) for number in both)
        rows.append(
            {
                "name": "decisions",
                "real": len(one.options),
                "simulated": len(other.options),
                "both": len(both),
                "same": sum(count for (here, there), count in pairs.items() if here == there),
                "others": {
                    f"{here}, simulated {there}": count
                    for (here, there), count in pairs.most_common()
                    if here != there
                },
                "real_options": Counter(one.options.values()),
                "simulated_options": Counter(other.options.values()),
            }
        )
    return rows


def error(row: Row) -> float:
    """The error of the median."""
    return float(row["simulated_p50_s"] / row["real_p50_s"] - 1)


def as_text(rows: Sequence[Row]) -> str:
    lines = [f"{'':14}{'real p50':>12}{'simulated':>12}{'':>8}{'real p99':>12}{'simulated':>12}"]
    for row in rows:
        if row["name"] == "decisions":
            continue
        tail = ""
        if "real_p99_s" in row:
            tail = f"{row['real_p99_s'] * 1e3:>9.0f} ms{row['simulated_p99_s'] * 1e3:>9.0f} ms"
        lines.append(
            f"{row['name']:14}{row['real_p50_s'] * 1e3:>9.1f} ms"
            f"{row['simulated_p50_s'] * 1e3:>9.1f} ms{error(row):>+8.1%}{tail}"
        )
    most = largest(rows)
    lines += [
        "",
        f"largest error of a median: {most:.1%}; bar {BAR:.0%}: {_verdict(holds=most <= BAR)}",
    ]
    if (share := agreement(rows)) is not None:
        row = rows[-1]
        lines.append(
            f"recovered: {row['real']} real, {row['simulated']} simulated, {row['both']} in both; "
            f"by the same option {share:.0%}; bar {DECISIONS_BAR:.0%}: "
            f"{_verdict(holds=share >= DECISIONS_BAR)}"
        )
        lines += [f"{pair}: {count}" for pair, count in row["others"].items()]
        for side in ("real", "simulated"):
            options = row[f"{side}_options"].items()
            lines.append(f"{side}: " + ", ".join(f"{name} {count}" for name, count in options))
    return "\n".join(lines)


def _verdict(*, holds: bool) -> str:
    return "met" if holds else "MISSED"


def largest(rows: Sequence[Row]) -> float:
    return max(abs(error(row)) for row in rows if "real_p50_s" in row)


def agreement(rows: Sequence[Row]) -> float | None:
    """Share of the streams recovered on both sides that took the same option."""
    row = rows[-1]
    return row["same"] / row["both"] if row["name"] == "decisions" and row["both"] else None


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--streams", type=int, default=800)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--logs", type=Path, help="where the event logs of both sides are kept")
    options = parser.parse_args()
    record = Record(options.seed)
    trace = generate(GeneratorSettings(requests=options.streams), options.seed)
    requests = scaled_requests(trace, options.seed, options.rate)
    faults = kills_of(options.kills, requests[-1].arrival_s, options.seed)
    sides = {
        "real": real(requests, faults, options.seed),
        "simulated": simulated(requests, faults, options.seed, options.seed),
    }
    rows = compare(sides, faults)
    text = as_text(rows)
    print(text)
    again = simulated(requests, faults, options.seed, options.seed + 1)
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
        for name, side in sides.items():
            (options.logs / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in side.log))
            (options.logs / f"{name}.json").write_text(json.dumps(side.numbers))
    inputs = causes_of(sides["real"], sides["simulated"], again)
    text += f"\n\n{causes.as_text(inputs)}"
    print(f"\n{causes.as_text(inputs)}")
    record.keep(options.out, "cluster", {"rows": rows, "causes": inputs}, text)
    share = agreement(rows)
    met = largest(rows) <= BAR and (share is None or share >= DECISIONS_BAR)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
