"""Table 1 of KevlarFlow in virtual time: three scenes, at each rate of requests the standard
behaviour after the loss of a node and a stage that is borrowed, beside the published figures.

    python -m experiments.pipelines.table1                       # 80 runs; results/

The clock and the load are set by what the paper says of runs without a failure; how long its runs
are and when the failure comes it does not say: these two are fitted to one row of the baseline, and
all other figures are output. A run goes on from the cells that are kept.
"""

import csv
import gc
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import ceil, exp, log
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import yaml

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.record import Record
from experiments.virtual_time import NumberedPrompt
from kvrs.config.backup import BackupSettings
from kvrs.config.cluster import pipeline_nodes
from kvrs.config.file import Config, parse_config
from kvrs.config.presets import SystemPreset
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.rank_model import PipelineModel
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World

HERE = Path(__file__).parent
STAGES = 4
# Published (sections 4, 4.1, 4.3): a port of 1 Gbit/s, ten minutes until a node is there again.
LINK_BYTES_PER_S, RELOAD_S = 1e9 / 8, 600.0
# From runs without a failure: requests queue from 3 and 6 a second on, at two and four pipelines,
# so that one serves somewhat more than 1.5 a second, of 60 s each (163 ms a token).
SLOTS = 92
# Mean and spread of the output give the mean latency and its 99th percentile where none queue.
OUTPUT_TOKENS, OUTPUT_SIGMA, MAX_OUTPUT = 370.0, 0.38, 2048
PROMPT_TOKENS_P50, PROMPT_SIGMA, MAX_PROMPT = 161.31 / 1.6487, 1.0, 1024
# Fitted to the baseline of scene 1 at 4 requests/s, and to nothing else.
FITTED = ("1", 4.0)
RUN_S, FAILS_S = 480.0, 120.0
PAGES = 32_768  # 18 GB of a stage for pages of 16 tokens.
SESSION_S = 0.1
# Of a stage's part of a step, which takes 163 ms at every load: its GPU reads 4 GB of weights and
# the KV of a batch at 600 GB/s.
COMPUTING_SHARE = 0.18
SYSTEMS = ("base", "ours")
Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    scene: str
    per_s: float

    @property
    def pipelines(self) -> int:
        return 2 if self.scene == "1" else 4

    @property
    def failures(self) -> int:
        return 2 if self.scene == "3" else 1


def published() -> dict[tuple[str, float], Row]:
    """By scene and requests/s, as the paper has them."""
    with (HERE / "published.csv").open() as file:
        return {
            (row.pop("scene"), float(row.pop("requests_per_s"))): {
                key: float(value) for key, value in row.items()
            }
            for row in csv.DictReader(file)
        }


def config_of(case: Case, system: str) -> Config:
    """`base`: a lost node ends its pipeline, and the streams are computed again at others; `ours`:
    the preset `kevlarflow`.
    """
    nodes = [
        node.model_dump(mode="json", exclude_unset=True)
        for node in pipeline_nodes(case.pipelines, STAGES)
    ]
    sections: dict[str, Any] = yaml.safe_load(SystemPreset.KEVLARFLOW.path.read_text())
    if system == "base":
        for instance in (each for node in nodes for each in node.get("instances", ())):
            del instance["group"]
        sections["policy"]["name"] = "always_recompute"
        sections |= {"elastic": {"enabled": False}, "backup": {"mode": "off"}}
    del sections["cluster"]
    backup = sections.pop("backup")
    sections["policy"]["admission"] = {"wait_s": 3600}
    config = parse_config(
        {
            "cluster": {
                "engine": {
                    "pace": str(HERE / "profiles" / "a10.json"),
                    "pages": PAGES,
                    "max_running": SLOTS,
                    "max_batch_tokens": 2048,
                    "max_model_len": MAX_PROMPT + MAX_OUTPUT,
                },
                "nodes": nodes,
            },
            "proxy": {"load_interval_s": 1.0},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S},
        }
        | sections
    )
    return config.model_copy(update={"backup": BackupSettings(**backup)})


def arrivals(per_s: float, run_s: float, seed: int) -> list[Arrival]:
    """Poisson, given its mean; a request has the same lengths at every rate."""
    times, lengths, found = Random(f"times {seed}"), Random(f"lengths {seed}"), []
    middle = log(OUTPUT_TOKENS) - OUTPUT_SIGMA**2 / 2
    for number, at_s in enumerate(
        sorted(times.uniform(0.0, run_s) for _ in range(round(per_s * run_s)))
    ):
        tokens = ceil(exp(lengths.gauss(log(PROMPT_TOKENS_P50), PROMPT_SIGMA)))
        output = ceil(exp(lengths.gauss(middle, OUTPUT_SIGMA)))
        prompt = NumberedPrompt(number, min(tokens, MAX_PROMPT))
        found.append(Arrival(at_s, prompt, min(output, MAX_OUTPUT)))
    return found


def simulate(
    case: Case,
    system: str,
    seed: int,
    *,
    run_s: float = RUN_S,
    fails_s: float = FAILS_S,
    computing_share: float = COMPUTING_SHARE,
    failures: int | None = None,
) -> Row:
    """Figures of all requests; `failures` None: as many as the scene has. Raises AssertionError
    where an invariant is violated.
    """
    asked = arrivals(case.per_s, run_s, seed)
    rows = [
        {"when": {"at_s": fails_s}, "what": "kill", "whom": {"id": f"d{pipeline}", "stage": 1}}
        for pipeline in range(case.failures if failures is None else failures)
    ]
    world = World(
        config_of(case, system),
        asked,
        named_deaths(parse_faults(rows)) if rows else [],
        seed=seed,
        reload_s=RELOAD_S,
        pipeline_model=PipelineModel(
            load_s=RELOAD_S, session_s=SESSION_S, computing_share=computing_share
        ),
    )
    outcome = world.run()
    assert set(outcome.ended) == {"complete"}, outcome.ended
    (proxy,) = world.cluster.proxies
    ttfts_s, latencies_s = list[float](), list[float]()
    for live in proxy.streams.values():
        first_s, last_s = live.journal.first_token_s, live.journal.last_token_s
        assert first_s is not None, live.id
        assert last_s is not None, live.id
        ttfts_s.append(first_s - live.journal.arrived_s)
        latencies_s.append(last_s - live.journal.arrived_s)
    return {
        "requests": float(len(asked)),
        "latency_s": fmean(latencies_s),
        "ttft_s": fmean(ttfts_s),
        "latency_s_p99": p99(latencies_s),
        "ttft_s_p99": p99(ttfts_s),
        "span_s": outcome.span_s,
        "moved": float(outcome.recovered_streams),
        "stayed": float(outcome.recoveries["substitute"]),
    }


def p99(values: Sequence[float]) -> float:
    return sorted(values)[ceil(0.99 * len(values)) - 1]


def name_of(case: Case, system: str) -> str:
    return f"{case.scene}:{case.per_s:g}:{system}"


def measured(name: str, seed: int) -> Row:
    scene, per_s, system = name.split(":")
    return simulate(Case(scene, float(per_s)), system, seed)


KEYS = ("latency_s", "ttft_s", "latency_s_p99", "ttft_s_p99")
TITLES = ("latency", "TTFT", "latency p99", "TTFT p99")


def as_text(cells: dict[str, Row], seed: int) -> str:
    """Each figure with the paper's behind it, in brackets."""
    lines = [
        f"Llama 3.1 8B in pipelines of {STAGES} stages, virtual time, seed {seed}; seconds, in "
        f"brackets as published",
        f"a stage's GPU computes in {100 * COMPUTING_SHARE:g} % of its part of a step: as long as "
        f"it takes to read its 4 GB of weights and the KV of a batch at 600 GB/s",
        f"{SLOTS} slots of a pipeline, {OUTPUT_TOKENS:g} tokens of output in the mean; a session "
        f"with a lender takes {SESSION_S:g} s",
        f"requests for {RUN_S:g} s, a node (scene 3: of each of two pipelines) is lost at "
        f"{FAILS_S:g} s and is there again {RELOAD_S:g} s later; fitted: scene {FITTED[0]} at "
        f"{FITTED[1]:g} requests/s, base",
        f"{'scene':>5}{'/s':>4}  {'':5}" + "".join(f"{title:>20}" for title in TITLES),
    ]
    paper = published()
    cases = sorted({(name.split(":")[0], float(name.split(":")[1])) for name in cells})
    for scene, per_s in cases:
        for system in SYSTEMS:
            row = cells.get(name_of(Case(scene, per_s), system))
            if row is None:
                continue
            theirs = paper[scene, per_s]
            line = f"{scene:>5}{per_s:4g}  {system:5}"
            for key in KEYS:
                line += f"{row[key]:.2f} ({theirs[f'{system}_{key}']:.2f})".rjust(20)
            fitted = (scene, per_s, system) == (*FITTED, "base")
            lines.append(line + ("  fitted" if fitted else ""))
    return "\n".join([*lines, *distances(cells, paper)]) + "\n"


def distances(cells: dict[str, Row], paper: dict[tuple[str, float], Row]) -> list[str]:
    """How far the rows are from the paper's, without the fitted one."""
    lines = []
    for system in SYSTEMS:
        for key, title in zip(KEYS, TITLES, strict=True):
            found = [
                abs(log(row[key] / theirs[f"{system}_{key}"]))
                for (scene, per_s), theirs in paper.items()
                if (row := cells.get(name_of(Case(scene, per_s), system))) is not None
                and (scene, per_s, system) != (*FITTED, "base")
            ]
            if found:
                within = sum(each <= log(1.25) for each in found)
                lines.append(
                    f"{system} {title}: {within} of {len(found)} rows within 25 % of the paper's; "
                    f"mean |log| {fmean(found):.2f}"
                )
    return lines


def pool_of(jobs: int) -> ProcessPoolExecutor:
    """A process for each run, which keeps its garbage: to look for it takes a sixth of the time."""
    spawn = get_context("spawn")
    return ProcessPoolExecutor(jobs, spawn, initializer=gc.disable, max_tasks_per_child=1)


def cases_of(scenes: Sequence[str], rates: Sequence[float] | None) -> list[Case]:
    """Those with the fewest requests first."""
    found = [
        Case(scene, per_s)
        for scene, per_s in published()
        if scene in scenes and (rates is None or per_s in rates)
    ]
    return sorted(found, key=lambda case: case.per_s)


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--scenes", nargs="+", choices=("1", "2", "3"), default=["1", "2", "3"])
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=7200.0, help="no cell goes beyond")
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    settings = {"run_s": RUN_S, "fails_s": FAILS_S, "seed": options.seed, "session_s": SESSION_S}
    cells = Cells(options.out, "table1", settings)
    names = [
        name_of(case, system)
        for case in cases_of(options.scenes, options.rates)
        for system in SYSTEMS
    ]
    missing = [name for name in names if name not in cells.found]
    work = partial(measured, seed=options.seed)
    with pool_of(options.jobs) as pool:
        found = {name: pool.submit(work, name) for name in missing}
        cells.measure(names, options.limit_s, lambda name: found[name].result())
        for future in found.values():
            future.cancel()
    text = as_text(cells.found, options.seed)
    print(text, end="")
    cells.keep(record, {}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
