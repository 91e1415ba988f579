"""From the loss of ranks that have experts to the first token and to full speed, in place beside a
restart that loads all weights (AnchorTP, Table I).

    python -m experiments.experts.lost_ranks [--tiny]

Real: `kvrs up` with one instance of a generated Mixtral with 1 GB of weights, of 8 ranks of which 2
are lost with their memory, and of 4 of which 2 are, once a quarter and once half of the requests
were sent. In place the other ranks go on; for the restart `elastic.enabled` is false, so the loss
ends the instance, which is started again. Tokens are compared with those of an undisturbed run. The
part of a restart that starts Python and torch is measured on its own. Exit status 1: a token
differs, or a time in place is above its bar.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

from rich.console import Console

from experiments.record import Record
from kvrs.cluster.launcher import Cluster
from kvrs.config.file import Config, parse_config
from kvrs.demo import run_load, scaled_requests
from kvrs.engine.random_experts import ExpertsModel, write_experts_model
from kvrs.faults.language import Fault, parse_faults
from kvrs.load.passes import Run
from kvrs.report.report import build_report
from kvrs.traces.generator import GeneratorSettings, generate
from kvrs.traces.records import ReplayRequest

NAME = "lost_ranks"
DEGREES = ((8, 2), (4, 2))  # Ranks, and how many of them are lost.
SHARES = (0.25, 0.5)  # Of the requests that were sent before.
WAYS = ("in place", "restart")
MOST = {"tfs_s": 0.1, "ttp_s": 0.5}  # Of the restart's.
WAIT_S = 600.0
_IMPORT = "import kvrs.engine.instance"


@dataclass(frozen=True, slots=True)
class Row:
    ranks: int
    lost: int
    share: float
    way: str
    tfs_s: float | None
    ttp_s: float | None
    exact: bool
    rebalances: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    record, rows = Record(options.seed), []
    trace = generate(GeneratorSettings(requests=options.requests), options.seed)
    requests = scaled_requests(trace, options.seed, options.rate)
    python_s = import_s()
    with tempfile.TemporaryDirectory() as directory:
        size = ExpertsModel.tiny if options.tiny else ExpertsModel.large
        write_experts_model(Path(directory), size("mixtral", skew=1.0), options.seed)
        for ranks, lost in DEGREES:
            clean = played(config(directory, ranks, "in place"), requests, [], options.seed)[0]
            for share, way, _ in product(SHARES, WAYS, range(options.repeats)):
                faults = losses(ranks, lost, int(share * options.requests))
                run, rebalances = played(
                    config(directory, ranks, way), requests, faults, options.seed
                )
                report = build_report(run.records, clean.records, run.recoveries, run.faults, {})
                times = report["tfs_s"], report["ttp_s"]
                row = Row(ranks, lost, share, way, *times, report["exact"], rebalances)
                print(row, flush=True)
                rows.append(row)
    ratios = ratios_of(rows)
    figures = {"rows": [asdict(row) for row in rows], "ratios": ratios, "python_s": python_s}
    text = as_text(rows, ratios, python_s)
    print(text)
    record.keep(options.out, NAME, figures, text)
    met = all(
        ratio is not None and ratio <= MOST[what]
        for own in ratios.values()
        for what, ratio in own.items()
    )
    return not (met and all(row.exact for row in rows))


def import_s() -> float:
    """Seconds until a process has what an instance imports."""
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", _IMPORT], check=True)
        took_s.append(time.monotonic() - began_s)
    return median(took_s)


def config(model: str, ranks: int, way: str) -> Config:
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {
                "model": model,
                "allow_faults": True,
                "start_timeout_s": WAIT_S,
                "engine": {"pages": 2048},
                "nodes": [{"id": "n0", "instances": [{"id": "b0", "role": "both", "tp": ranks}]}],
            },
            "policy": {"recovery": {"wait_s": WAIT_S, "role_wait_s": WAIT_S}},
            "elastic": {"enabled": way == "in place", "experts": {"room_share": 1.0}},
        }
    )


def losses(ranks: int, lost: int, after_requests: int) -> list[Fault]:
    """All at once."""
    when = {"after_requests": max(1, after_requests)}
    return parse_faults(
        [
            {"when": when, "what": "lose_device", "whom": {"id": "b0", "rank": rank}}
            for rank in range(ranks - lost, ranks)
        ]
    )


def played(
    config: Config, requests: Sequence[ReplayRequest], faults: list[Fault], seed: int
) -> tuple[Run, int]:
    """The run, and how often copies of experts have changed in it."""
    console = Console(quiet=True)
    with Cluster(config, lambda line: None) as cluster:
        run = run_load(cluster, requests, faults, seed, console, "", timeout_s=WAIT_S)
        (row,) = cluster.state()["instances"]
        return run, 0 if row["experts"] is None else row["experts"]["rebalances"]


def ratios_of(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Medians in place over those of the restart; None: one of them was never reached."""
    found: dict[str, dict[str, float | None]] = {}
    for (ranks, lost), share in product(DEGREES, SHARES):
        own = [row for row in rows if (row.ranks, row.share) == (ranks, share)]
        found[f"{ranks} to {ranks - lost}, {share:.0%}"] = {
            what: _ratio([[asdict(row)[what] for row in own if row.way == way] for way in WAYS])
            for what in MOST
        }
    return found


def _ratio(by_way: Sequence[Sequence[float | None]]) -> float | None:
    known = [[each for each in own if each is not None] for own in by_way]
    return median(known[0]) / median(known[1]) if all(known) else None


def as_text(
    rows: Sequence[Row], ratios: dict[str, dict[str, float | None]], python_s: float
) -> str:
    lines = ["ranks  lost  at   way        TFS s    TTP s  re-balances  exact"]
    lines += [
        f"{row.ranks:5} {row.lost:5} {row.share:5.0%} {row.way:9} {_shown(row.tfs_s):>7} "
        f"{_shown(row.ttp_s):>8} {row.rebalances:12}  {row.exact}"
        for row in rows
    ]
    lines += ["", "in place over restart, of medians"]
    lines += [
        f"{case}: TFS {_shown(own['tfs_s'])}, TTP {_shown(own['ttp_s'])}"
        for case, own in ratios.items()
    ]
    lines += [
        "",
        f"bars: TFS {MOST['tfs_s']}, TTP {MOST['ttp_s']}; of a restart {python_s:.1f} s are the "
        f"start of Python and torch",
    ]
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
