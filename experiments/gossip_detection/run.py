"""Detection times, false deaths and costs of gossip, in virtual time over many seeds. The nodes
are the product's own objects (`kvrs.gossip.node.Gossip`), network and clocks those of
`kvrs_testkit/gossip_net.py`. Results are saved at once; rows that are not selected stay as they
were.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.gossip_detection.chunks import Chunk, code_version, kept, run_chunk, run_chunks
from experiments.gossip_detection.measures import death_times, deaths_by_stops, traffic
from experiments.gossip_detection.storms import storms
from experiments.gossip_detection.tables import HOURS, Figures, as_text, misses
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


def hours_of(chunks: list[Chunk]) -> dict[str, Any]:
    return {
        "hours": sum(chunk.hours for chunk in chunks),
        "loss": LOSS,
        "deaths": sum(chunk.deaths for chunk in chunks),
        "suspicions": sum(chunk.suspicions for chunk in chunks),
        "most_accusers": max((chunk.most_accusers for chunk in chunks), default=0),
        "nearest": max((chunk.nearest for chunk in chunks), default=0.0),
        "packets": sum(chunk.packets for chunk in chunks),
        "cpu_s": sum(chunk.cpu_s for chunk in chunks),
    }


class Results:
    """The figures of every row, in a file for programs and one for people."""

    def __init__(self, folder: Path, record: Record) -> None:
        self._folder = folder
        self._record = record
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "gossip_detection.json"
        self.figures: Figures = (
            json.loads(path.read_text()) if path.exists() else {"code": {}, "cpu_s": {}}
        )
        self.figures.pop("run", None)  # Of the run before.
        self.figures["settings"] = GossipSettings().model_dump(mode="json")
        self.put("hours", hours_of(kept(self.hours_path, LOSS)))

    @property
    def hours_path(self) -> Path:
        return self._folder / "hours.json"

    def put(self, row: str, found: object, cpu_s: float | None = None) -> None:
        self.figures[row] = found
        self.figures["code"][row] = code_version()
        if cpu_s is not None:
            self.figures["cpu_s"][row] = round(cpu_s, 1)
        with contextlib.redirect_stdout(None):  # Its circumstances are printed at the end.
            self.keep()

    def keep(self) -> None:
        self._record.keep(self._folder, "gossip_detection", self.figures, as_text(self.figures))


def main() -> int:
    rows: dict[str, Callable[[], object]] = {
        "deaths": lambda: measure_deaths(arguments.large_seeds),
        "stops": measure_stops,
        "traffic": lambda: [
            asdict(traffic(loss, publishing))
            for loss, publishing in ((0, False), (0, True), (LOSS, True))
        ],
        "harder": lambda: [asdict(run_chunk(0, 0.25, loss)) for loss in (0.3, 0.4)],
        "storms": lambda: asdict(storms(range(arguments.storms))),
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*rows, "hours"],
        default=[*rows, "hours"],
        help="to be measured anew",
    )
    parser.add_argument(
        "--hours",
        type=float,
        default=HOURS,
        help="simulated, without a death; those of earlier runs count",
    )
    parser.add_argument(
        "--budget-s", type=float, default=600.0, help="after which no further hour is begun"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--large-seeds", type=int, default=2, help="clusters of 1,000 nodes")
    parser.add_argument("--storms", type=int, default=10_000, help="seeds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    os.nice(19 - os.nice(0))
    results = Results(arguments.out, Record(timed=False))
    for row, measure in rows.items():
        if row in arguments.rows:
            begun_s = time.process_time()
            results.put(row, measure(), time.process_time() - begun_s)
    if "hours" in arguments.rows:

        def tell(chunks: list[Chunk]) -> None:
            results.put("hours", hours_of(chunks))
            print(
                f"{len(chunks)} chunks, {sum(chunk.deaths for chunk in chunks)} false deaths",
                flush=True,
            )

        run_chunks(
            results.hours_path, LOSS, arguments.hours, arguments.budget_s, arguments.workers, tell
        )
    print(as_text(results.figures), end="")
    results.keep()
    missed = misses(results.figures)
    print(f"missed: {', '.join(missed)}\n" if missed else "", end="")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
