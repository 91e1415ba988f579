"""The simulator beside a real cluster at the same pace: the same requests and kills, side by side.

    python -m experiments.simulator.cluster [--streams 800] [--kills 8] [--rate 8]

The cluster is that of `kvrs demo`: two pairs of instances that compute a tiny model, each step of
which takes the time of a profile. Links carry its pages in the time that those of the profile's
model take in the simulator.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from experiments.command_line import parser_of
from experiments.kills.simulated import config_of
from experiments.record import Record
from kvrs.cluster.launcher import Cluster
from kvrs.config.policy import PolicyName
from kvrs.demo import demo_config, run_load, scaled_requests
from kvrs.faults.language import Fault, parse_faults
from kvrs.load.passes import Run
from kvrs.report import metrics
from kvrs.sim.clients import records_of, stream_of
from kvrs.sim.fault_scenarios import named_deaths
from kvrs.sim.streams import Arrival
from kvrs.sim.world import World
from kvrs.traces.generator import GeneratorSettings, generate
from kvrs.traces.records import ReplayRequest, StreamRecord

BACK_S = 5.0  # A killed instance of the tiny model serves again after about that.
BAR, DECISIONS_BAR = 0.25, 0.95
MEASURES = {
    "TTFT": metrics.arrival_ttft_s,
    "TPOT": metrics.tpot_s,
    "end to end": metrics.latency_s,
    "longest gap": metrics.max_gap_s,
}
Row = dict[str, Any]


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


def real(
    requests: Sequence[ReplayRequest], faults: list[Fault], seed: int
) -> tuple[list[StreamRecord], dict[int, str], float]:
    """Records by number, options of recovered requests, and the pauses' median."""
    console = Console(stderr=True)
    with Cluster(demo_config(PolicyName.AUTO, seed), lambda line: console.print(line)) as cluster:
        run: Run = run_load(cluster, requests, faults, seed, console, "real")
    numbers = {record.stream: record.index for record in run.records}
    rows = [row for row in run.recoveries if row["stream"] in numbers]
    options = {numbers[row["stream"]]: str(row["option"]) for row in rows}
    gaps = [float(row["gap_s"]) for row in rows if row["gap_s"] is not None]
    return run.records, options, metrics.percentile(gaps, 50) or 0.0


def simulated(
    requests: Sequence[ReplayRequest], faults: list[Fault], seed: int
) -> tuple[list[StreamRecord], dict[int, str], float]:
    """The same in virtual time."""
    arrivals = [Arrival(each.arrival_s, each.prompt_ids, each.max_tokens) for each in requests]
    deaths = named_deaths(faults) if faults else []
    config = config_of(PolicyName.AUTO, seed)
    world = World(config, arrivals, deaths, seed=seed, stay_away=0.0, reload_s=BACK_S)
    world.run()
    numbers = {stream_of(number): number for number in range(len(arrivals))}
    rows = [each.row() for proxy in world.cluster.proxies for each in proxy.recovered]
    options = {numbers[row["stream"]]: str(row["option"]) for row in rows}
    gaps = [float(row["gap_s"]) for row in rows if row["gap_s"] is not None]
    return (
        records_of(arrivals, world.cluster.proxies),
        options,
        metrics.percentile(gaps, 50) or 0.0,
    )


def compare(requests: Sequence[ReplayRequest], faults: list[Fault], seed: int) -> list[Row]:
    sides = {
        "real": real(requests, faults, seed),
        "simulated": simulated(requests, faults, seed),
    }
    rows = []
    for name, measure in MEASURES.items():
        row: Row = {"name": name}
        for side, (records, _, _) in sides.items():
            found = metrics.spread(map(measure, records))
            row |= {f"{side}_{key}_s": found[key] for key in ("p50", "p90", "p99")}
        rows.append(row)
    one, other = sides["real"], sides["simulated"]
    if faults:
        rows.append({"name": "pause", "real_p50_s": one[2], "simulated_p50_s": other[2]})
        both = one[1].keys() & other[1].keys()
        pairs = Counter((one[1][number], other[1][number]) for number in both)
        rows.append(
            {
                "name": "decisions",
                "real": len(one[1]),
                "simulated": len(other[1]),
                "both": len(both),
                "same": sum(count for (here, there), count in pairs.items() if here == there),
                "others": {
                    f"{here}, simulated {there}": count
                    for (here, there), count in pairs.most_common()
                    if here != there
                },
                "real_options": Counter(one[1].values()),
                "simulated_options": Counter(other[1].values()),
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
    options = parser.parse_args()
    record = Record(options.seed)
    trace = generate(GeneratorSettings(requests=options.streams), options.seed)
    requests = scaled_requests(trace, options.seed, options.rate)
    faults = kills_of(options.kills, requests[-1].arrival_s, options.seed)
    rows = compare(requests, faults, options.seed)
    text = as_text(rows)
    print(text)
    record.keep(options.out, "cluster", {"rows": rows}, text)
    share = agreement(rows)
    met = largest(rows) <= BAR and (share is None or share >= DECISIONS_BAR)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
