"""Detection times, false deaths and costs of gossip, in virtual time over many seeds. The nodes
are the product's own objects (`kvrs.gossip.node.Gossip`), network and clocks those of
`kvrs_testkit.gossip_net`.
"""

import os
from dataclasses import asdict
from typing import Any

from experiments.command_line import parser_of
from experiments.gossip_detection.hours import Chunk, figures_of, run_chunk, run_chunks
from experiments.gossip_detection.measures import death_times, deaths_by_stops, traffic
from experiments.gossip_detection.storms import storms
from experiments.gossip_detection.tables import HOURS, as_text, misses
from experiments.record import Record
from kvrs.config.gossip import GossipSettings

LOSS = 0.2


def measure_deaths(large_seeds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"first_s": {}, "all_s": {}}
    for name, count, seeds, kills, loss in (
        ("5 nodes", 5, range(20), 20, 0.0),
        ("64 nodes", 64, range(10), 20, 0.0),
        ("64 nodes, 20 % loss", 64, range(5), 20, LOSS),
        ("1000 nodes", 1000, range(large_seeds), 10, 0.0),
    ):
        first, all_others = death_times(count, seeds, kills, loss)
        found["first_s"][name], found["all_s"][name] = asdict(first), asdict(all_others)
    return found


def measure_stops() -> dict[str, int]:
    return dict(
        zip(("stops", "of_stopped", "of_others"), deaths_by_stops(range(5), 10.0), strict=True)
    )


def tell(chunks: list[Chunk]) -> None:
    deaths = sum(chunk.deaths for chunk in chunks)
    print(f"{len(chunks)} hours, {deaths} false deaths", flush=True)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--hours", type=int, default=HOURS, help="simulated, without a death")
    parser.add_argument(
        "--budget-s", type=float, default=600.0, help="after which no further hour is begun"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--large-seeds", type=int, default=2, help="clusters of 1,000 nodes")
    parser.add_argument("--storms", type=int, default=10_000, help="seeds")
    options = parser.parse_args()
    os.nice(19 - os.nice(0))
    record = Record(timed=False)
    ways = ((0, False), (0, True), (LOSS, True))
    chunks = run_chunks(LOSS, options.hours, options.budget_s, options.workers, tell)
    figures = {
        "settings": GossipSettings().model_dump(mode="json"),
        "deaths": measure_deaths(options.large_seeds),
        "stops": measure_stops(),
        "traffic": [asdict(traffic(loss, publishing)) for loss, publishing in ways],
        "harder": [asdict(run_chunk(0, 0.25, loss)) for loss in (0.3, 0.4)],
        "storms": asdict(storms(range(options.storms))),
        "hours": figures_of(chunks, LOSS),
    }
    text = as_text(figures)
    print(text, end="")
    record.keep(options.out, "gossip_detection", figures, text)
    missed = misses(figures)
    print(f"missed: {', '.join(missed)}\n" if missed else "", end="")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
