"""RaidServe's Table 3 where computing is real: prompts of 8,192 tokens on engines that sleep no
profile, and one of two instances of a node killed while all streams of both decode.

    python -m experiments.raidserve.computed                 # what fits in 9 minutes
    python -m experiments.raidserve.computed --limit-s 3600  # all

A cell is one way to recover and one repeat. A run goes on from the cells that are kept.
"""

import json
import random
import sys
import tempfile
import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.demo import FIRST_ORDINARY_TOKEN, VOCAB_SIZE, run_load
from kvrs_lab.load.passes import Run
from kvrs_lab.report.metrics import max_gap_s, percentile
from kvrs_lab.report.student import interval
from kvrs_lab.traces.records import ReplayRequest

NAME = "computed"
PROMPT_TOKENS = 8192
# Of each instance. All have so much to say that hardly one is over before the last one begins to
# decode, also where one instance is done with its prompts before the other.
STREAMS = 6
CHUNK_TOKENS = 256
LEAST_OUTPUT, MORE_OUTPUT = 250, 40
# All prompts are computed before the first instance dies, and half of them anew.
TIMEOUT_S = 3600.0
VICTIM = InstanceId("d0")
LOOK_S = 0.2
ORACLE = "oracle"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    policy: str
    backup: str


WAYS = {
    "recompute": Way("always_recompute", "off"),
    "host": Way("always_restore", "local"),
    "ours": Way("auto", "local"),
    ORACLE: Way("auto", "off"),
}


def write_model(directory: Path, seed: int) -> None:
    """The tiny model, with room for such prompts."""
    write_tiny_model(directory, seed)
    path = directory / "config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"max_position_embeddings": 2 * PROMPT_TOKENS}))


def config_of(way: Way, model: Path) -> Config:
    most = PROMPT_TOKENS + LEAST_OUTPUT + MORE_OUTPUT * STREAMS
    instances = [{"id": name, "role": "both"} for name in (VICTIM, "d1")]
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0, "token_gap_s": 120.0},
            "cluster": {
                "model": str(model),
                "engine": {
                    "pages": 2 * STREAMS * (most // 16 + 1) + 64,
                    "max_batch_tokens": CHUNK_TOKENS,
                    "max_model_len": most,
                },
                "nodes": [{"id": "n0", "instances": instances}],
            },
            "policy": {
                "name": way.policy,
                "recovery": {"wait_s": 120.0},
                "admission": {"wait_s": 3600.0},  # All prompts come at once.
            },
            "slo": {"recovery_gap_s": 600.0},
            "backup": {"mode": way.backup, "capacity_bytes": 1 << 30},
        }
    )


def requests(seed: int) -> list[ReplayRequest]:
    """For both instances at once; those that begin first have more to say."""
    rng = random.Random(seed)
    vocabulary = range(FIRST_ORDINARY_TOKEN, VOCAB_SIZE)
    return [
        ReplayRequest(
            0.05 * number,
            tuple(rng.choices(vocabulary, k=PROMPT_TOKENS)),
            LEAST_OUTPUT + MORE_OUTPUT * (STREAMS - number // 2),
        )
        for number in range(2 * STREAMS)
    ]


def row_of(run: Run) -> Row:
    hit = {recovery["stream"] for recovery in run.recoveries}
    return {
        "errors": [str(record.error) for record in run.records if record.error is not None],
        "digests": [
            blake2b(json.dumps(record.token_ids).encode(), digest_size=8).hexdigest()
            for record in run.records
        ],
        "options": sorted({recovery["option"] for recovery in run.recoveries}),
        "victims_s": [
            recovery["gap_s"] for recovery in run.recoveries if recovery["gap_s"] is not None
        ],
        "others_s": [
            gap
            for each in run.records
            if each.stream not in hit and (gap := max_gap_s(each)) is not None
        ],
    }


def kill_when_all_decode(cluster: Cluster, over: threading.Event) -> None:
    """All streams that are not over; one that was soon done with its prompt may be."""
    begun: set[str] = set()
    while not over.wait(LOOK_S):
        streams = cluster.state()["streams"]
        begun |= {each["id"] for each in streams}
        if len(begun) == 2 * STREAMS and all(each["output_tokens"] for each in streams):
            cluster.kill(VICTIM)
            return


def measured(name: str, seed: int, console: Console) -> Row | None:
    way, _, repeat = name.partition("#")
    with tempfile.TemporaryDirectory(prefix="kvrs-raidserve-") as directory:
        model = Path(directory) / "model"
        write_model(model, seed)
        with Cluster(
            config_of(WAYS[way], model),
            lambda line: console.print(f"  {line}", style="dim", markup=False),
        ) as cluster:
            over = threading.Event()
            killer = threading.Thread(target=kill_when_all_decode, args=(cluster, over))
            if way != ORACLE:
                killer.start()
            try:
                asked = requests(seed + int(repeat))
                run = run_load(cluster, asked, [], seed, console, name, TIMEOUT_S)
            finally:
                over.set()
                if way != ORACLE:
                    killer.join()
            if way != ORACLE and not run.recoveries:
                print(f"{name}: the kill hit no stream")
                return None
            return row_of(run)


def by_way(cells: dict[str, Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {way: {} for way in WAYS}
    for name, row in sorted(cells.items()):
        way, _, repeat = name.partition("#")
        found[way][repeat] = row
    return {way: rows for way, rows in found.items() if rows}


def wrong(rows: dict[str, Row], oracle: dict[str, Row]) -> tuple[int, int]:
    """Streams that ended with an error, and others than those of a run without a failure."""
    errors = sum(len(row["errors"]) for row in rows.values())
    different = sum(
        one != other
        for repeat, row in rows.items()
        if repeat in oracle
        for one, other in zip(row["digests"], oracle[repeat]["digests"], strict=True)
    )
    return errors, different


def pause_s(row: Row) -> float:
    gaps: list[float] = row["victims_s"]
    return fmean(gaps)


def as_text(found: dict[str, dict[str, Row]]) -> str:
    lines = [
        f"seconds without a token after {VICTIM} of two instances is killed; prompts of "
        f"{PROMPT_TOKENS:,} tokens, computed by the tiny model on CPUs, {2 * STREAMS} streams; "
        "others: longest time between two tokens, also before the kill",
        "",
        f"{'':11}{'runs':>5}{'victims':>9}{'p50':>8}{'p90':>8}{'most':>8}{'mean':>17}"
        f"{'others p50':>12}{'most':>8}  errors/different, ways",
    ]
    oracle = found.get(ORACLE, {})
    for way, rows in found.items():
        victims = [gap for row in rows.values() for gap in row["victims_s"]]
        others = [gap for row in rows.values() for gap in row["others_s"]]
        of_run = interval([pause_s(row) for row in rows.values() if row["victims_s"]])
        mean = "-" if of_run is None else f"{of_run.mean:.2f}"
        if of_run is not None and of_run.half_width is not None:
            mean += f" ± {of_run.half_width:.2f}"
        cells = [*(percentile(victims, share) for share in (50, 90)), max(victims, default=None)]
        lines.append(
            f"{way:11}{len(rows):>5}{len(victims):>9}"
            + "".join("       -" if cell is None else f"{cell:>8.2f}" for cell in cells)
            + f"{mean:>17}{percentile(others, 50) or 0.0:>12.2f}{max(others):>8.2f}  "
            + "{}/{}".format(*wrong(rows, oracle))
            + "".join(
                f", {option}" for option in sorted({o for r in rows.values() for o in r["options"]})
            )
        )
    for way, times in times_as_long(found).items():
        half = "" if times["half_width"] is None else f" ± {times['half_width']:.1f}"
        lines.append(f"recompute waits {times['mean']:.1f}{half} times as long as {way}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def times_as_long(found: dict[str, dict[str, Row]]) -> dict[str, dict[str, float | None]]:
    """How many times as long victims wait when they are computed again, in pairs of repeats."""
    ratios: dict[str, dict[str, float | None]] = {}
    recomputed = found.get("recompute", {})
    for way in ("host", "ours"):
        pairs = [
            pause_s(recomputed[repeat]) / pause_s(row)
            for repeat, row in found.get(way, {}).items()
            if row["victims_s"] and recomputed.get(repeat, {}).get("victims_s")
        ]
        times = interval(pairs)
        if times is not None:
            ratios[way] = {"mean": times.mean, "half_width": times.half_width}
    return ratios


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=540.0, help="no cell goes beyond")
    arguments = parser.parse_args()
    record, console = Record(arguments.seed), Console()
    cells = Cells(arguments.out, NAME, {"prompt_tokens": PROMPT_TOKENS})
    names = [
        f"{way}#{repeat}"
        for repeat in range(arguments.repeats)
        for way in random.Random(arguments.seed + repeat).sample([*WAYS], len(WAYS))
    ]
    cells.measure(names, arguments.limit_s, lambda name: measured(name, arguments.seed, console))
    found = by_way(cells.found)
    text = as_text(found)
    print(text, end="")
    is_void = cells.keep(record, {"recompute_over": times_as_long(found)}, text)
    oracle = found.get(ORACLE, {})
    is_wrong = any(sum(wrong(rows, oracle)) for rows in found.values())
    return 2 if is_void else int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
