"""LUMEN's failures with processes that keep the clock of another GPU: A.1 and A.2 with one of four
instances, A.4 with two.

    python -m experiments.lumen.processes [--cases 4x1 4x2] [--seeds 4] [--requests 65]

Proxy, instances, agents and helpers are real, and compute tokens and KV of a pair of tiny models;
steps and loads take the time of the profiles. Instances are killed by their process ids. Every
scheme gets a cluster of its own and the same requests, in random order; the run without a failure
is that of stop-and-restart.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.lumen.simulated import (
    DRAFT,
    LINK_BYTES_PER_S,
    PROGRESSIVE,
    SCHEDULING,
    STOP,
    TARGET,
    WHOLE,
    ByCase,
    Case,
    Row,
    Run,
    Scheme,
    Setup,
    by_case,
    cell_text,
    figures,
    mean,
)
from experiments.record import Record
from experiments.rig import draw
from kvrs.config.file import Config, parse_config
from kvrs.profiles import catalog
from kvrs.tables import output
from kvrs_engine.engine.speculation.pairs import write_pair
from kvrs_engine.scheduling.assisted import DraftCounts
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.demo import run_load
from kvrs_lab.faults.language import Fault, parse_faults
from kvrs_lab.load import passes
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.presets import PRESETS
from kvrs_lab.traces.records import ReplayRequest
from kvrs_testkit.processes import cpu_ticks, share_used

ACCEPTANCE, DEPTH = 0.6, 4
DISK_BYTES_PER_S = 8e9
MAX_RUNNING = 4
KV_BYTES_PER_TOKEN = 2048  # Of the tiny model.
FAULT_AT = 0.3  # Of the requests.
MOST_CPU = 0.6  # A token takes its 31 ms with 45 % in use, and 34 to 38 ms with 70 to 78 %.
REQUEST_TIMEOUT_S = 180.0
SETUP = Setup(
    pace=TARGET,
    preset="sharegpt",
    most_prompt=256,
    most_output=128,
    per_s=1.15,
    requests=65,
    reload_s=catalog.load(TARGET).weight_bytes / DISK_BYTES_PER_S + catalog.load_s(TARGET),
    schemes=(STOP, SCHEDULING, PROGRESSIVE, WHOLE),
)


def config_of(case: Case, scheme: Scheme, models: Path) -> Config:
    shrink = KV_BYTES_PER_TOKEN / catalog.kv_geometry(TARGET).bytes_per_token
    nodes = [
        {"id": f"n{n}", "instances": [{"id": f"w{n}", "role": "both"}]}
        for n in range(case.instances)
    ]
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {
                "allow_faults": True,
                "model": str(models / "target"),
                "engine": {
                    "pace": TARGET,
                    "disk_bytes_per_s": DISK_BYTES_PER_S,
                    "max_running": MAX_RUNNING,
                    "max_batch_tokens": 512,
                },
                "nodes": nodes,
            },
            "policy": {"name": scheme.policy, "dispatch": scheme.dispatch},
            "backup": {"capacity_bytes": 256 << 20, **scheme.backup},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S * shrink},
            "speculation": {
                "source": "draft" if scheme.drafts else "off",
                "draft": str(models / "draft"),
                "depth": DEPTH,
                "pace": DRAFT,
            },
        }
    )


def requests(case: Case, seed: int) -> list[ReplayRequest]:
    """Poisson, with lengths of the preset, cut to what tiny models compute in time."""
    count, per_s = case.setup.requests * case.instances, case.per_s * case.instances
    drawn = replace(PRESETS[case.setup.preset], requests=count, requests_per_s=per_s)
    rng = random.Random(seed)
    return [
        ReplayRequest(
            asked.arrival_s,
            tuple(draw(rng, min(asked.input_tokens, case.setup.most_prompt))),
            min(asked.output_tokens, case.setup.most_output),
        )
        for asked in generate(drawn, seed).requests
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """One scheme."""

    faulted: Run
    clean: Run | None  # Of stop-and-restart.
    wrong: int  # Streams that failed.


def carried_out(case: Case, scheme: Scheme, models: Path, seed: int, console: Console) -> Measured:
    asked = requests(case, seed)
    fault_s = asked[int(len(asked) * FAULT_AT)].arrival_s
    rows = [
        {"when": {"at_s": fault_s}, "what": "kill", "whom": {"id": f"w{n}"}}
        for n in range(case.failures)
    ]

    def load(cluster: Cluster, faults: list[Fault], title: str) -> passes.Run:
        return run_load(cluster, asked, faults, seed, console, title, REQUEST_TIMEOUT_S)

    def tell(line: str) -> None:
        console.print(f"  {line}", style="dim", markup=False)

    with Cluster(config_of(case, scheme, models), tell) as cluster:
        run = load(cluster, parse_faults(rows), f"{scheme.name}, seed {seed}")
        drafts = asyncio.run(drafts_of(cluster))
        clean = None
        if scheme is STOP:
            cluster.wait_all_up()
            clean = load(cluster, [], f"no failure, seed {seed}")
    wrong = sum(record.error is not None for record in run.records)
    return Measured(
        as_run(run, drafts), None if clean is None else as_run(clean, DraftCounts()), wrong
    )


def as_run(run: passes.Run, drafts: DraftCounts) -> Run:
    hit = {row["stream"] for row in run.recoveries}
    interrupted = {record.index for record in run.records if record.stream in hit}
    fault_s = min((fault["at_s"] for fault in run.faults), default=0.0)
    return Run(run.records, interrupted, fault_s, drafts)


async def drafts_of(cluster: Cluster) -> DraftCounts:
    """Those of the instances that were not killed, without those of self-tests."""
    counts = DraftCounts()
    async with AdminPort(cluster.proxies[0].admin, cluster.secret, None) as port:
        state = await port.state()
    for instance in state["instances"]:
        if found := instance["speculation"]:
            tested = (instance["self_test"] or {}).get("drafts") or {}
            counts.steps += found["steps"] - tested.get("steps", 0)
            counts.proposed += found["proposed"] - tested.get("proposed", 0)
            counts.accepted += found["accepted"] - tested.get("accepted", 0)
    return counts


def different(faulted: Run, clean: Run) -> int:
    """Streams with other tokens than without a failure."""
    return sum(
        one.token_ids != other.token_ids
        for one, other in zip(faulted.records, clean.records, strict=True)
    )


def cell(setup: Setup, name: str, models: Path, console: Console) -> dict[str, Row]:
    """By scheme."""
    text, _, seed_text = name.partition("#")
    case, seed = Case.of(setup, text), int(seed_text)
    before, runs = cpu_ticks(), {}
    for scheme in random.Random(name).sample(setup.schemes, len(setup.schemes)):
        runs[scheme.name] = carried_out(case, scheme, models, seed, console)
    cpu_share = share_used(before, cpu_ticks())
    clean = runs[STOP.name].clean
    assert clean is not None
    return {
        scheme.name: figures(runs[scheme.name].faulted, clean, setup)
        | {
            "wrong": runs[scheme.name].wrong,
            "different": different(runs[scheme.name].faulted, clean),
            "cpu_share": cpu_share,
        }
        for scheme in setup.schemes
    }


def faults_of(cells: dict[str, dict[str, Row]]) -> list[str]:
    """The parts of the claim that the result does not bear out."""
    return [
        f"{name}, {scheme}: {row[key]} {text}"
        for name, rows in cells.items()
        for scheme, row in rows.items()
        for key, text in (("wrong", "streams failed"), ("different", "streams differ"))
        if row[key]
    ]


def measure(
    cells: Cells, setup: Setup, names: Sequence[str], limit_s: float, console: Console
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory)
        write_pair(models, ACCEPTANCE, seed=0)
        cells.measure(names, limit_s, lambda name: cell(setup, name, models, console))


SHOWN = (
    ("window s", "window_s", 1.0),
    ("TTFT s", "ttft_s", 1.0),
    ("replay TTFT s", "replay_ttft_s", 1.0),
    ("pause s", "pause_s", 1.0),
    ("TPOT ms", "tpot_s", 1e3),
)


def as_text(setup: Setup, found: ByCase) -> str:
    lines = [
        f"{setup.preset} lengths, {setup.requests} requests an instance, {setup.per_s}/s unless "
        f"named, {setup.pace}, back after {setup.reload_s:.3g} s; means of the seeds; drafts of "
        f"{DRAFT}, {DEPTH} a step, right with probability {ACCEPTANCE}",
        "in brackets against stop-and-restart, seed by seed; * where the interval excludes 0",
        f"{'case':9}{'scheme':18}{'seeds':>6}{'hit':>5}"
        + "".join(f"{name:>24}" for name, _, _ in SHOWN),
    ]
    for case, rows in found.items():
        for scheme, by_seed in rows.items():
            hit = mean(by_seed, "interrupted")
            text = f"{case:9}{scheme:18}{len(by_seed):>6}{hit:>5.0f}"
            for _, key, scale in SHOWN:
                text += f"{cell_text(rows, scheme, key, scale):>24}"
            lines.append(text.rstrip())
        clean, tpot = (mean(rows[STOP.name], f"clean_{key}") for key in ("ttft_s", "tpot_s"))
        lines.append(f"{case:9}{'no failure':29}{'':24}{clean:>24.2f}{'':48}{tpot * 1e3:>24.2f}")
        for scheme, by_seed in rows.items():
            if mean(by_seed, "draft_steps"):
                accepted = mean(by_seed, "accepted_a_step")
                lines.append(f"{case:9}{'':29}a step accepts {accepted:.2f} drafts under {scheme}")
        share = mean(rows[STOP.name], "queue_share")
        lines.append(f"{case:9}{'':29}of the TTFT of stop-and-restart {share:.0%} is queueing")
    lines += [
        "",
        "hit: interrupted streams of a run; TTFT and TPOT: of the others that came while an "
        "instance loaded",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--cases", nargs="+", default=["4x1", "4x2"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=SETUP.requests, help="of an instance")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no cell goes beyond")
    options = parser.parse_args()
    setup = replace(SETUP, requests=options.requests)
    record = Record(*range(options.seeds))
    common = {key: getattr(setup, key) for key in ("reload_s", "per_s", "requests")}
    cells = Cells(options.out, "processes", common)
    names = [f"{case}#{seed}" for seed in range(options.seeds) for case in options.cases]
    measure(cells, setup, names, options.limit_s, output())
    cpu_share = max(row["cpu_share"] for rows in cells.found.values() for row in rows.values())
    record.check_cpu(cpu_share, MOST_CPU)
    faults = faults_of(cells.found)
    figures: dict[str, Any] = {"cases": by_case(cells.found), "cpu_share": cpu_share}
    lines = [as_text(setup, figures["cases"]), f"CPU in use {cpu_share:.0%}"]
    text = "\n".join(lines + (faults or ["every stream is that of the run without a failure"]))
    print(text)
    cells.keep(record, figures, text)
    return 1 if faults or record.is_void() else 0


if __name__ == "__main__":
    sys.exit(main())
