"""The worth of memory that outlives engines: pauses, attaching, adopted pages, shared weights."""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.random_model import write_large
from experiments.record import Record
from experiments.state_plane import attach, gaps, kills
from kvrs.engine.tiny import write_tiny_model

RESTART = "restart, nothing kept"
WAYS = {
    RESTART: {"anchored": False, "spared": True},
    "memory kept, a new process": {"anchored": True, "spared": False},
    "memory kept, a spare": {"anchored": True, "spared": True},
}
MODELS: dict[str, Callable[[Path, int], None]] = {
    "tiny": write_tiny_model,
    "large": write_large,
}
INSTANCES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=["gaps", "attach", "kills", "memory"], default="gaps")
    parser.add_argument("--model", choices=[*MODELS], default="tiny", help="not of kills")
    parser.add_argument("--kills", type=int, default=None, help="of each way; 5, or 1,000 of pages")
    parser.add_argument("--processes", type=int, default=15, help="that attach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    record = Record(options.seed, timed=options.part in ("gaps", "attach"))
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / options.model
        if options.part != "kills":
            MODELS[options.model](model, options.seed)
        match options.part:
            case "gaps":
                figures = of_gaps(model, options.kills or 5)
            case "attach":
                figures = attach.run(model, options.processes)
            case "memory":
                figures = gaps.memory(model, INSTANCES)
            case _:
                figures = kills.run(options.kills or 1000, options.seed)
    text = TEXTS[options.part](figures)
    print(text)
    name = options.part if options.part == "kills" else f"{options.part}_{options.model}"
    void = record.keep(options.out, f"state_plane_{name}", figures, text)
    wrong = any(figures.get(key, 0) for key in ("different", "unknown", "missed"))
    raise SystemExit(1 if void or wrong else 0)


def of_gaps(model: Path, count: int) -> dict[str, Any]:
    """The ways take turns only by cluster: each has one of its own."""
    found = {}
    for name, way in WAYS.items():
        found[name] = gaps.gaps(model, count, **way)
        print(name, [round(each.at_kill_s, 3) for each in found[name]], flush=True)
    medians = {
        name: statistics.median(gap.at_kill_s for gap in each) for name, each in found.items()
    }
    restart_s = medians[RESTART]
    return {
        "rows": [
            {
                "way": name,
                "gap_s_p50": round(medians[name], 3),
                "gap_s": [round(gap.at_kill_s, 3) for gap in each],
                "of_restart": round(medians[name] / restart_s, 3),
                "token_s_p50": round(statistics.median(gap.token_s for gap in each), 4),
                "later_s": [round(gap.later_s, 3) for gap in each],
            }
            for name, each in found.items()
        ]
    }


def _gaps_as_text(figures: dict[str, Any]) -> str:
    return "".join(
        f"{row['way']}: {row['gap_s_p50']} s to the next token (p50 of {len(row['gap_s'])}, "
        f"at most {max(row['gap_s'])} s), {row['of_restart']} of restart;\n"
        f"    a token takes {row['token_s_p50']} s; later pauses at most {max(row['later_s'])} s\n"
        for row in figures["rows"]
    )


def _kills_as_text(figures: dict[str, Any]) -> str:
    return (
        f"{figures['kills']:,} SIGKILLs, {figures['with_pages']:,} of them with pages to adopt\n"
        f"{figures['pages']:,} pages adopted: {figures['different']} differ from their "
        f"recomputation, {figures['unknown']} are of no stream\n"
        f"{figures['refused']} records refused as torn; {figures['streams']:,} streams found\n"
    )


def _memory_as_text(figures: dict[str, Any]) -> str:
    return (
        f"{INSTANCES} instances with a spare each, {figures['processes']} processes: "
        f"{figures['copies']} copies of {figures['weights_bytes']:,} bytes of weights\n"
    )


TEXTS = {
    "gaps": _gaps_as_text,
    "attach": attach.as_text,
    "kills": _kills_as_text,
    "memory": _memory_as_text,
}


if __name__ == "__main__":
    main()
