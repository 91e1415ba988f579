"""`kvrs tune` over the prefill table that decisions count on (`profiles.prefill`): the gain on a
held-out trace, from a table that is right and from two that are wrong.

    python -m experiments.simulator.tune

Simulated. The search has Mooncake's conversations, the comparison those of Azure. Recoveries of the
streams of killed instances are decided by the table; engines keep the time of a profile, whatever
the table says.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import yaml

from experiments.command_line import parser_of
from experiments.kills.drill import TRACE
from experiments.lumen.paper import slowed
from experiments.record import Record
from kvrs.sim.case import SimulateOptions
from kvrs.sim.goals import Goal
from kvrs.sim.tuning import Tuned, TuneOptions, Tuning, Value
from kvrs.traces.formats import load_trace
from kvrs.traces.mooncake import window

NAME = "tune"
KEY = "profiles.prefill"
HELD_OUT = TRACE.parent / "AzureLLMInferenceTrace_conv.csv"
PACE = "llama-3.1-8b-a100-vllm-tp1"
OTHERS = (
    "llama-3.1-8b-h100-vllm-tp1",
    "llama-3.1-8b-h200-vllm-tp1",
    "llama-3.1-70b-a100-vllm-tp4",
)
FACTORS = (0.25, 0.5, 2.0, 4.0)
OWN = "as instances measure it"
BASES = (OWN, "0.25 times", "4 times")
REQUESTS, PER_S = 120, 8.0
KILLS_S = (4.0, 8.0, 12.0)  # Of a decode instance, whichever the seed draws.
SEEDS, HELD_OUT_SEEDS, TRIALS = 4, 8, 24
LINK_BYTES_PER_S = 25e9 / 8


def tables(directory: Path) -> dict[str, Value]:
    """Values of the setting by name; files of those that are so many times as slow lie in the
    directory.
    """
    found: dict[str, Value] = {OWN: None}
    for factor in FACTORS:
        within = directory / f"{factor:g}"
        within.mkdir()
        found[f"{factor:g} times"] = slowed(PACE, factor, within)
    return found | {name: name for name in OTHERS}


def config_of(prefill: Value) -> dict[str, Any]:
    """Three nodes with a prefill and a decode instance each."""
    nodes = [
        {
            "id": f"n{n}",
            "instances": [{"id": f"p{n}", "role": "prefill"}, {"id": f"d{n}", "role": "decode"}],
        }
        for n in range(3)
    ]
    engine = {"pace": PACE, "pages": 8000, "max_batch_tokens": 2048, "max_model_len": 8192}
    return {
        "cluster": {"engine": engine, "nodes": nodes},
        "policy": {"name": "auto"},
        "profiles": {"prefill": prefill},
        "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S},
    }


def search(
    base: str, values: dict[str, Value], directory: Path, traces: tuple[Path, Path], **less: int
) -> Tuned:
    """From that table, over all of them; by the first trace, and compared by the other one.
    `less`: fewer requests, trials or seeds.
    """
    asked = {"requests": REQUESTS, "trials": TRIALS, "seeds": SEEDS} | less
    config, space = directory / "kvrs.yaml", directory / "space.yaml"
    faults = directory / "faults.yaml"
    kills = [
        {"when": {"at_s": at_s}, "what": "kill", "whom": {"role": "decode"}} for at_s in KILLS_S
    ]
    faults.write_text(yaml.safe_dump(kills))
    config.write_text(yaml.safe_dump(config_of(values[base])))
    space.write_text(yaml.safe_dump({KEY: list(values.values())}))
    case = SimulateOptions(
        config=config,
        trace=traces[0],
        requests=asked["requests"],
        rate=PER_S,
        fault=faults,
        seeds=asked["seeds"],
    )
    options = TuneOptions(
        space=space,
        goal=Goal.RECOVERY_P99,
        trials=asked["trials"],
        held_out=traces[1],
        held_out_seeds=min(HELD_OUT_SEEDS, 2 * asked["seeds"]),
    )
    return Tuning(options, case).run()


def cut(trace: Path, requests: int, directory: Path) -> Path:
    """The first requests of a trace, as a plain one."""
    rows = [
        [each.arrival_s, each.input_tokens, each.output_tokens]
        for each in window(load_trace(trace), requests).requests
    ]
    path = directory / "held_out.json"
    path.write_bytes(msgspec.json.encode(rows))
    return path


def figures_of(base: str, tuned: Tuned, values: dict[str, Value]) -> dict[str, Any]:
    """The values by their names."""
    by_value = {value: name for name, value in values.items()}
    return asdict(tuned) | {
        "from": base,
        "values": {key: by_value[value] for key, value in tuned.values.items()},
        "is_shown": tuned.is_shown,
    }


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"SIMULATED: {REQUESTS} requests at {PER_S:g}/s, {len(KILLS_S)} kills a run, engines at "
        f"the pace of {PACE}, links of 25 Gbit/s; goal: p99 of the pauses of recovered streams",
        f"search: Mooncake's conversations, {TRIALS} trials, {SEEDS} seeds; held out: Azure's, "
        f"{HELD_OUT_SEEDS} seeds, 95 %",
        f"tables: {', '.join([OWN, *(f'{each:g} times' for each in FACTORS), *OTHERS])}",
        "",
        f"{'from':26}{'best of the search':30}{'search s':>18}{'held out s':>12}  gain",
    ]
    for row in rows:
        gain = row["gain"]
        shown = f"{gain['mean']:+.4f} ± {gain['half_width']:.4f} s"
        lines.append(
            f"{row['from']:26}{row['values'][KEY]:30}"
            f"{row['base']:>8.4f} to {row['found']:.4f}{row['held_out_base']:>12.4f}  "
            + (shown if row["is_shown"] else f"none ({shown})")
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--held-out", type=Path, default=HELD_OUT)
    options = parser.parse_args()
    record = Record(*range(SEEDS), timed=False)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        values = tables(directory)
        traces = TRACE, cut(options.held_out, REQUESTS, directory)
        for base in BASES:
            tuned = search(base, values, directory, traces)
            rows.append(figures_of(base, tuned, values))
            print(json.dumps(rows[-1]), flush=True)
    text = as_text(rows)
    print(text)
    record.keep(options.out, NAME, {"searches": rows}, text)


if __name__ == "__main__":
    main()
