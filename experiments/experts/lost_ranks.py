"""From the loss of a rank that has experts to the first token and to full speed, in place beside a
restart that loads all weights (AnchorTP, Table I).

    python -m experiments.experts.lost_ranks [--tiny]

Real: `kvrs up` with one instance of a generated Mixtral with 1 GB of weights, of 8 and of 4 ranks,
of which two are lost with their memory, one after the other: the first once a quarter or half of
the requests were sent, the second a fixed time later. In place the other ranks go on; for the
restart `elastic.enabled` is false, so a loss ends the instance, which is started again. More
requests come than are served, and the instance always works on the same number of them; TTP of the
first loss counts up to the second. Tokens are compared with those of an undisturbed run. The part
of a restart that starts Python and torch is measured on its own. Exit status 1: a token differs, or
a time in place is above its bar.
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
from kvrs.report.impact import time_to_peak_s
from kvrs.report.report import Report, build_report
from kvrs.traces.generator import GeneratorSettings, generate
from kvrs.traces.records import ReplayRequest

NAME = "lost_ranks"
RANKS, LOSSES = (8, 4), 2
RUNNING = 16  # Sequences that the instance works on at a time.
SHARES = (0.25, 0.5)  # Of the requests that were sent before the first loss.
WAYS = ("in place", "restart")
MOST = {"tfs_s": 0.1, "ttp_s": 0.5}  # Of the restart's.
WAIT_S = 600.0
_IMPORT = "import kvrs.engine.instance"


@dataclass(frozen=True, slots=True)
class Row:
    ranks: int
    share: float  # Of the requests that were sent before the first loss.
    way: str
    loss: int  # From 1 on.
    tfs_s: float | None
    ttp_s: float | None
    exact: bool
    rebalances: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--gap-s", type=float, default=30.0, help="between losses")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    gap = max(1, round(options.gap_s * options.rate))  # In requests.
    if max(SHARES) * options.requests + (LOSSES - 1) * gap > options.requests:
        parser.error("--requests: all are sent before the last loss; allowed: more of them")
    record, rows = Record(options.seed), []
    trace = generate(GeneratorSettings(requests=options.requests), options.seed)
    requests = scaled_requests(trace, options.seed, options.rate)
    python_s = import_s()
    with tempfile.TemporaryDirectory() as directory:
        size = ExpertsModel.tiny if options.tiny else ExpertsModel.large
        write_experts_model(Path(directory), size("mixtral", skew=1.0), options.seed)
        for ranks in RANKS:
            clean = played(config(directory, ranks, "in place"), requests, [], options.seed)[0]
            for share, way, _ in product(SHARES, WAYS, range(options.repeats)):
                faults = losses(ranks, max(1, int(share * options.requests)), gap)
                run, rebalances = played(
                    config(directory, ranks, way), requests, faults, options.seed
                )
                report = build_report(run.records, clean.records, run.recoveries, run.faults, {})
                for loss, times in enumerate(times_of(report), 1):
                    rows.append(Row(ranks, share, way, loss, *times, report["exact"], rebalances))
                    print(rows[-1], flush=True)
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
                "engine": {"pages": 2048, "max_running": RUNNING},
                "nodes": [{"id": "n0", "instances": [{"id": "b0", "role": "both", "tp": ranks}]}],
            },
            "policy": {"recovery": {"wait_s": WAIT_S, "role_wait_s": WAIT_S}},
            "elastic": {"enabled": way == "in place", "experts": {"room_share": 1.0}},
        }
    )


def losses(ranks: int, after_requests: int, gap_requests: int) -> list[Fault]:
    """One after the other, with so many requests sent in between."""
    return parse_faults(
        [
            {
                "when": {"after_requests": after_requests + number * gap_requests},
                "what": "lose_device",
                "whom": {"id": "b0", "rank": ranks - 1 - number},
            }
            for number in range(LOSSES)
        ]
    )


def times_of(report: Report) -> list[tuple[float | None, float | None]]:
    """TFS and TTP of each loss, in seconds; None: the next loss or the end came first."""
    faults = sorted(report["faults"], key=lambda fault: fault["at_s"])
    assert len(faults) == LOSSES, "every loss has a time"
    rates, bin_s = (report["throughput"][key] for key in ("tokens_per_s", "bin_s"))
    ends_s = [fault["at_s"] for fault in faults[1:]] + [len(rates) * bin_s]
    found: list[tuple[float | None, float | None]] = []
    for fault, end_s in zip(faults, ends_s, strict=True):
        tfs_s, ttp_s = fault["tfs_s"], None
        if tfs_s is not None and fault["at_s"] + tfs_s < end_s:
            ttp_s = time_to_peak_s(rates[: int(end_s / bin_s)], bin_s, fault["at_s"] + tfs_s)
        found.append((tfs_s, ttp_s))
    return found


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
    for ranks, share, loss in product(RANKS, SHARES, range(1, LOSSES + 1)):
        own = [row for row in rows if (row.ranks, row.share, row.loss) == (ranks, share, loss)]
        found[f"{ranks} ranks, {share:.0%}, loss {loss}"] = {
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
    lines = ["ranks    at  way       loss    TFS s    TTP s  re-balances  exact"]
    lines += [
        f"{row.ranks:5} {row.share:5.0%}  {row.way:9} {row.loss:4} {_shown(row.tfs_s):>8} "
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
