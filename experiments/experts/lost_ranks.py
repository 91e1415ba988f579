"""From the loss of a rank that has experts to the first token and to full speed, in place beside a
restart that loads all weights (AnchorTP, Table I).

    python -m experiments.experts.lost_ranks [--tiny]

Real: `kvrs lab up` with one instance of a generated Mixtral with 1 GB of weights, of 8 and of 4
ranks, of which two are lost with their memory, one after the other: the first once a quarter or
half of the requests were sent, the second a fixed time later. In place the other ranks go on, and a
lost one is told to stay away, so that the second loss meets the ranks without it; for the restart
`elastic.enabled` is false, so a loss ends the instance, which is started again. Requests are to
come faster than they are served: each row has how many were open, at the loss or at the peak behind
it, whichever is less. TTP of the first loss counts up to the second. Tokens are compared with those
of an undisturbed run. The part of a restart that starts Python and torch is measured on its own.

All cases run once, and again as long as one more round fits into `--most-s`. Exit status 1: a token
differs, a time in place is above its bar, or there is none.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from urllib.error import HTTPError

from rich.console import Console

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.demo import run_load, scaled_requests
from kvrs_lab.faults.language import Fault, parse_faults
from kvrs_lab.load.passes import Run
from kvrs_lab.report.impact import time_to_peak_s
from kvrs_lab.report.report import Report, build_report
from kvrs_lab.traces.generator import GeneratorSettings, generate
from kvrs_lab.traces.records import ReplayRequest, StreamRecord
from kvrs_testkit.random_experts import ExpertsModel, write_experts_model

NAME = "lost_ranks"
RANKS, LOSSES = (8, 4), 2
RUNNING = 16  # Sequences that the instance works on at a time.
SHARES = (0.25, 0.5)  # Of the requests that were sent before the first loss.
WAYS = ("in place", "restart")
MOST = {"tfs_s": 0.1, "ttp_s": 0.5}  # Of the restart's.
WAIT_S = 600.0
_LOOK_S = 0.05  # For lost ranks: sooner than one is started again,
_NOTICED_S = 0.2  # and once the instance has noticed the loss.
_BEGINS_S = 1.0  # Within so long from a loss tokens that were on their way have come.
_IMPORT = "import kvrs_engine.engine.instance"


@dataclass(frozen=True, slots=True)
class Times:
    """Times that tokens took behind one loss."""

    tfs_s: float | None
    ttp_s: float | None
    note: str  # Why one of them is None, or how TFS was found otherwise.
    open_requests: int  # At the loss, or at the peak behind it: the fewer.


@dataclass(frozen=True, slots=True)
class Row:
    ranks: int
    share: float  # Of the requests that were sent before the first loss.
    way: str
    round: int  # From 1 on, as is the loss.
    loss: int
    times: Times
    exact: bool
    rebalances: int


@dataclass(frozen=True, slots=True)
class Played:
    run: Run
    rebalances: int  # Changes of copies of experts.
    degree: int  # Ranks that compute in the end.


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--gap-s", type=float, default=30.0, help="between losses")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all cases, at most")
    parser.add_argument("--most-s", type=float, default=2900.0, help="no round that ends later")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it run")
    options = parser.parse_args()
    gap = max(1, round(options.gap_s * options.rate))  # In requests.
    if max(SHARES) * options.requests + (LOSSES - 1) * gap > options.requests:
        parser.error("--requests: all are sent before the last loss; allowed: more of them")
    record = Record(options.seed)
    python_s = import_s()
    with tempfile.TemporaryDirectory() as directory:
        size = ExpertsModel.tiny if options.tiny else ExpertsModel.large
        write_experts_model(Path(directory), size("mixtral", skew=1.0), options.seed)
        rows = rounds(directory, gap, options, record)
    ratios = ratios_of(rows)
    figures = {"rows": [as_figures(row) for row in rows], "ratios": ratios, "python_s": python_s}
    text = as_text(rows, ratios, python_s)
    print(text)
    record.keep(options.out, NAME, figures, text)
    met = all(
        ratio is not None and ratio <= MOST[what]
        for own in ratios.values()
        for what, ratio in own.items()
    )
    return not (met and all(row.exact for row in rows))


def rounds(model: str, gap: int, options: argparse.Namespace, record: Record) -> list[Row]:
    """Rows of all cases, in rounds: as many as fit."""
    began_s, rows = time.monotonic(), list[Row]()
    trace = generate(GeneratorSettings(requests=options.requests), options.seed)
    requests = scaled_requests(trace, options.seed, options.rate)

    def play(ranks: int, way: str, faults: list[Fault]) -> Played:
        found = played(config(model, ranks, way), requests, faults, options.seed)
        done_s = time.monotonic() - began_s
        print(f"{done_s:5.0f} s: {ranks} ranks, {way}, {len(faults)} losses", flush=True)
        return found

    clean = {ranks: play(ranks, "in place", []).run.records for ranks in RANKS}
    for number in range(1, options.repeats + 1):
        from_s = time.monotonic()
        for ranks, share, way in product(RANKS, SHARES, WAYS):
            found = play(ranks, way, losses(ranks, max(1, int(share * options.requests)), gap))
            if way == "in place" and found.degree != ranks - LOSSES:
                record.void(f"{found.degree} ranks are left of {ranks} behind {LOSSES} losses")
            run = found.run
            report = build_report(run.records, clean[ranks], run.recoveries, run.faults, {})
            for reason in report["reasons"]:
                print(f"        {reason}")
            for loss, times in enumerate(times_of(report, run), 1):
                exact, rebalances = report["exact"], found.rebalances
                rows.append(Row(ranks, share, way, number, loss, times, exact, rebalances))
                print(f"        {as_line(rows[-1])}", flush=True)
        ends_s = 2 * time.monotonic() - from_s - began_s  # Of one more round.
        if number < options.repeats and ends_s > options.most_s:
            print(f"no further round, which would end after {ends_s:.0f} s")
            break
    return rows


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
                "engine": {"pages": 2048, "max_running": RUNNING},
                "nodes": [{"id": "n0", "instances": [{"id": "b0", "role": "both", "tp": ranks}]}],
            },
            "policy": {
                "recovery": {"wait_s": WAIT_S, "role_wait_s": WAIT_S},
                "admission": {"wait_s": 2 * WAIT_S},  # No request is refused for the queue.
            },
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


def times_of(report: Report, run: Run) -> list[Times]:
    """Those of each loss, in order."""
    faults = sorted(report["faults"], key=lambda fault: fault["at_s"])
    assert len(faults) == LOSSES, "every loss has a time"
    rates, bin_s = (report["throughput"][key] for key in ("tokens_per_s", "bin_s"))
    ends = [(fault["at_s"], "the next loss") for fault in faults[1:]]
    ends.append((len(rates) * bin_s, "the end"))
    found = []
    for fault, (end_s, end) in zip(faults, ends, strict=True):
        at_s, tfs_s, ttp_s, note = fault["at_s"], fault["tfs_s"], None, ""
        if not any(at_s <= row["at_s"] < end_s for row in run.recoveries):
            tfs_s, note = silence_s(run.records, at_s), "no stream was reported interrupted"
        if tfs_s is None or at_s + tfs_s >= end_s:  # A token behind the next loss is that one's.
            tfs_s, note = None, f"no interrupted stream went on before {end}"
        else:
            ttp_s = time_to_peak_s(rates[: int(end_s / bin_s)], bin_s, at_s + tfs_s)
            if ttp_s is None:
                note = f"no three bins of {bin_s:g} s with tokens before {end}"
        peak_s = end_s if tfs_s is None or ttp_s is None else at_s + tfs_s + ttp_s
        least = min(open_requests(run.records, at_s), open_requests(run.records, peak_s))
        found.append(Times(tfs_s, ttp_s, note, least))
    return found


def silence_s(records: Sequence[StreamRecord], at_s: float) -> float | None:
    """Seconds from a loss to the end of the longest silence of all clients that begins within
    `_BEGINS_S`: its TFS where the ranks re-form before they report that they do.
    """
    times_s = sorted(time_s for record in records for time_s in record.token_times_s)
    gaps = [
        (until_s - max(from_s, at_s), until_s - at_s)
        for from_s, until_s in pairwise(times_s)
        if until_s > at_s and from_s < at_s + _BEGINS_S
    ]
    return max(gaps)[1] if gaps else None


def open_requests(records: Sequence[StreamRecord], at_s: float) -> int:
    return sum(record.due_s <= at_s < record.ended_s for record in records)


def played(
    config: Config, requests: Sequence[ReplayRequest], faults: list[Fault], seed: int
) -> Played:
    console = Console(quiet=True)
    away = kept_away if faults and config.elastic.enabled else contextlib.nullcontext
    with Cluster(config, lambda line: None) as cluster:
        with away(cluster):
            run = run_load(cluster, requests, faults, seed, console, "", timeout_s=WAIT_S)
        (row,) = cluster.state()["instances"]
        rebalances = 0 if row["experts"] is None else row["experts"]["rebalances"]
        return Played(run, rebalances, row["degree"])


@contextlib.contextmanager
def kept_away(cluster: Cluster) -> Iterator[None]:
    """Order each rank away once its process has ended: it would come back a little later."""
    over = threading.Event()

    (row,) = cluster.state()["instances"]
    pids = {one["rank"]: one["pid"] for one in row["ranks"]}

    def look() -> None:
        # Not by reports, which may come when the rank is back.
        while not over.wait(_LOOK_S):
            for rank in [rank for rank, pid in pids.items() if has_ended(pid)]:
                time.sleep(_NOTICED_S)
                url = f"{cluster.admin_url}/kvrs/v1/leave/{row['id']}/{rank}"
                request = urllib.request.Request(url, method="POST")  # noqa: S310 - our own URL
                with contextlib.suppress(HTTPError):  # Not yet.
                    urllib.request.urlopen(request, timeout=WAIT_S).close()  # noqa: S310
                    del pids[rank]

    thread = threading.Thread(target=look, name="kept away", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def ratios_of(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Medians in place over those of the restart; None: one of them was never reached."""
    found: dict[str, dict[str, float | None]] = {}
    for ranks, share, loss in product(RANKS, SHARES, range(1, LOSSES + 1)):
        own = [row for row in rows if (row.ranks, row.share, row.loss) == (ranks, share, loss)]
        found[f"{ranks} ranks, {share:.0%}, loss {loss}"] = {
            what: _ratio(
                [[getattr(row.times, what) for row in own if row.way == way] for way in WAYS]
            )
            for what in MOST
        }
    return found


def _ratio(by_way: Sequence[Sequence[float | None]]) -> float | None:
    known = [[each for each in own if each is not None] for own in by_way]
    return median(known[0]) / median(known[1]) if all(known) else None


def as_figures(row: Row) -> dict[str, object]:
    figures: dict[str, object] = asdict(row)
    del figures["times"]
    return figures | asdict(row.times)


def as_text(
    rows: Sequence[Row], ratios: dict[str, dict[str, float | None]], python_s: float
) -> str:
    lines = ["ranks    at  way       round  loss    TFS s    TTP s  open  re-balances  exact"]
    lines += [as_line(row) for row in rows]
    if few := sum(row.times.open_requests < RUNNING for row in rows):
        lines += ["", f"{few} rows: fewer requests were open than the {RUNNING} that it works on"]
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


def as_line(row: Row) -> str:
    times = row.times
    shown = (
        f"{row.ranks:5} {row.share:5.0%}  {row.way:9} {row.round:5} {row.loss:5} "
        f"{_shown(times.tfs_s):>8} {_shown(times.ttp_s):>8} {times.open_requests:5} "
        f"{row.rebalances:12}  {row.exact}"
    )
    return f"{shown}  {times.note}" if times.note else shown


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
