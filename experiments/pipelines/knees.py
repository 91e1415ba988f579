"""KevlarFlow's Figures 3 and 4 in virtual time: latency and time to the first token of the baseline
without a failure, on 8 and on 16 nodes, over the rate of requests.

    python -m experiments.pipelines.knees

The clock, the slots and the lengths are those of `table1`, which were set so that requests queue
from the published rates on: the knees are there by construction, and only the curves are output.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from experiments.command_line import parser_of
from experiments.pipelines.table1 import RUN_S, SLOTS, STAGES, Case, Row, pool_of, simulate
from experiments.record import Record

NAME, PER_S = "knees", "requests_per_s"
CLUSTERS = {8: "1", 16: "2"}  # A scene of table 1 with as many nodes.
# Published: latency grows from the first rate to the second, requests queue from the first one on.
PUBLISHED = {8: (3.0, 4.0), 16: (6.0, 7.0)}
RATES = {8: (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 16: (2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0)}
GROWN = 1.25  # Latency over that of the lowest rate from which on it grows.
QUEUED_S = 1.0  # Mean TTFT from which on requests queue; without a queue it is 0.2 s.


@dataclass(frozen=True, slots=True)
class Knee:
    """Requests per second; None: none of the rates."""

    latency: tuple[float | None, float | None]  # The last rate before it grows, and the next one.
    queued: float | None  # The first rate at which requests queue.


def measured(point: tuple[int, float], seed: int) -> Row:
    nodes, per_s = point
    return simulate(Case(CLUSTERS[nodes], per_s), "base", seed, failures=0)


def knee(rows: Sequence[dict[str, Any]], nodes: int) -> Knee:
    own = sorted((row for row in rows if row["nodes"] == nodes), key=itemgetter(PER_S))
    grown = [row[PER_S] for row in own if row["latency_s"] >= GROWN * own[0]["latency_s"]]
    before = [row[PER_S] for row in own if not grown or row[PER_S] < grown[0]]
    queued = [row[PER_S] for row in own if row["ttft_s"] >= QUEUED_S]
    latency = max(before, default=None), min(grown, default=None)
    return Knee(latency, min(queued, default=None))


def as_text(rows: Sequence[dict[str, Any]], seed: int) -> str:
    lines = [
        f"Llama 3.1 8B in pipelines of {STAGES} stages without a failure, virtual time, seed "
        f"{seed}; requests for {RUN_S:g} s; {SLOTS} slots of a pipeline, set by the published "
        "knees: by construction",
        "",
        f"{'nodes':>5}{'/s':>6}{'latency s':>12}{'p99':>9}{'TTFT s':>10}{'p99':>9}",
    ]
    lines += [
        f"{row['nodes']:>5}{row[PER_S]:>6g}{row['latency_s']:>12.2f}{row['latency_s_p99']:>9.2f}"
        f"{row['ttft_s']:>10.2f}{row['ttft_s_p99']:>9.2f}"
        for row in rows
    ]
    lines.append("")
    for nodes in dict.fromkeys(row["nodes"] for row in rows):
        last, first = PUBLISHED[nodes]
        ours = knee(rows, nodes)
        grows = " to ".join("-" if rate is None else f"{rate:g}" for rate in ours.latency)
        queues = "-" if ours.queued is None else f"{ours.queued:g}"
        lines.append(
            f"{nodes} nodes: latency grows from {grows} requests/s (published {last:g} to "
            f"{first:g}), requests queue from {queues} on (published {last:g})"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--nodes", type=int, nargs="+", choices=list(RATES), default=list(RATES), metavar="N"
    )
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    points = [(nodes, per_s) for nodes in options.nodes for per_s in RATES[nodes]]
    with pool_of(options.jobs) as pool:
        found = pool.map(partial(measured, seed=options.seed), points)
        rows = [
            {"nodes": nodes, PER_S: per_s, **row}
            for (nodes, per_s), row in zip(points, found, strict=True)
        ]
    text = as_text(rows, options.seed)
    print(text, end="")
    published = {nodes: Knee(rates, rates[0]) for nodes, rates in PUBLISHED.items()}
    figures = {
        "rows": rows,
        "knees": {str(nodes): asdict(knee(rows, nodes)) for nodes in options.nodes},
        "published_knees": {str(nodes): asdict(each) for nodes, each in published.items()},
    }
    record.keep(options.out, NAME, figures, text)
    return int(any(knee(rows, nodes) != published[nodes] for nodes in options.nodes))


if __name__ == "__main__":
    sys.exit(main())
