"""LUMEN's experiments B.1 to B.7 at the paper's operating point, in virtual time: Llama-3-70B, the
chunks and the batches of its section 6.1, 1.4 requests/s of a worker. And A.1 to A.4 at that of its
prototypes: four workers with Qwen3-32B, or eight with Qwen3-14B.

    python -m experiments.lumen.paper --jobs 2              # B.1; results/
    python -m experiments.lumen.paper --exhibits B.2 B.3 --jobs 2      # loads
    python -m experiments.lumen.paper --exhibits B.4 B.5 --jobs 2      # sizes; hours
    python -m experiments.lumen.paper --exhibits A.1 A.3 A.4 --jobs 2  # prototypes

Two parameters are fitted to two figures of runs without a failure (`fit.py`), of four prototypes
one to the peak after a failure under stop-and-restart; all other figures are output. A run has
fewer requests than the paper's: it begins two minutes before the failure, and ends five after it,
of four prototypes five before and ten after. No request is refused for a long queue, as in the
paper. It goes on from the cells that are kept, if the code has not changed since.
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.lumen.operating_points import (
    ACCEPTANCE,
    FOUR_SPAN_S,
    PER_S,
    SPAN_S,
    prototype,
    simulator,
)
from experiments.lumen.simulated import (
    TARGET,
    WHOLE,
    ByCase,
    Clean,
    Row,
    Setup,
    by_case,
    cell_text,
    forked_cell,
    mean,
)
from experiments.record import Record

# Found by `fit.py` (results/fit.txt).
PREFILL_FACTOR, STEP_S = 2.62, 0.0  # Of the simulator.
EIGHT_PROMPT_TOKENS, PROTOTYPE_STEP_S = 3920.0, 0.02  # Of eight prototypes.
FOUR_PROMPT_TOKENS = 826.0  # Of four prototypes, whose steps have the same fixed time.
FITTED = 2  # Parameters behind each result, to as many published figures.
EXHIBITS = {
    "A.1": ("4x1", "8x1"),
    "A.3": ("8x1:1", "8x1:1.125", "8x1:1.375", "8x1:1.5"),
    "A.4": ("8x2", "8x4"),
    "B.1": ("10x1",),
    "B.2": ("10x1:1.2", "10x1:1.5", "10x1:1.7", "10x1:2.1"),
    "B.3": ("10x2", "10x3", "10x4", "10x5"),
    "B.4": ("4x1", "8x2", "16x4", "32x8", "64x16"),
    "B.5": ("8x1", "16x1", "32x1", "64x1"),
    "B.6": ("10x1 depth",),
    "B.7": ("10x1 alpha",),
}
# Names of the kept results; cases of one size share runs without a failure.
RESULTS = {
    **dict.fromkeys(("A.1", "A.3", "A.4"), "prototype"),
    **dict.fromkeys(("B.1", "B.6", "B.7"), "ten_workers"),
    **dict.fromkeys(("B.2", "B.3"), "loads"),
    **dict.fromkeys(("B.4", "B.5"), "sizes"),
}
# Of cases with a word behind them: LUMEN with other values, the default first, against which the
# others stand. Acceptances by depth are the paper's, of its pair of models.
VARIANTS = {
    "depth": tuple(
        replace(WHOLE, name=f"depth {depth}", depth=depth, acceptance=acceptance)
        for depth, acceptance in ((4, ACCEPTANCE), (2, 0.72), (8, 0.50))
    ),
    "alpha": tuple(
        replace(WHOLE, name=f"alpha {alpha:g}", backup={**WHOLE.backup, "alpha": alpha})
        for alpha in (1.0, 0.25, 0.5, 2.0, 4.0)
    ),
}


COLUMNS = (
    ("window s", "window_s", 1.0),
    ("moving window s", "moving_window_s", 1.0),
    ("TTFT s", "window_ttft_s", 1.0),
    ("TPOT ms", "window_tpot_s", 1e3),
    ("replay TTFT s", "replay_ttft_s", 1.0),
    ("TPOT ms of hit", "hit_tpot_s", 1e3),
)


def settings_of(result: str) -> dict[str, float]:
    """The fitted parameters of a result, and its span."""
    if result == "prototype":
        fitted = {
            "four_prompt_tokens": FOUR_PROMPT_TOKENS,
            "four_span_s": FOUR_SPAN_S,
            "eight_prompt_tokens": EIGHT_PROMPT_TOKENS,
            "step_s": PROTOTYPE_STEP_S,
        }
    else:
        fitted = {"prefill_factor": PREFILL_FACTOR, "step_s": STEP_S}
    return {"fitted": FITTED, **fitted, "span_s": SPAN_S}


def heads_of(result: str) -> list[str]:
    if result == "prototype":
        return [
            f"sharegpt's spread with means of {FOUR_PROMPT_TOKENS:g} tokens at 3/s of each of four "
            f"workers with Qwen3-32B, and of {EIGHT_PROMPT_TOKENS:g} at 1.25/s of each of eight "
            f"with Qwen3-14B; {FOUR_SPAN_S:g} s and {SPAN_S:g} s; steps "
            f"{PROTOTYPE_STEP_S * 1e3:g} ms longer; weights at 0.5 GB/s"
        ]
    return [
        f"splitwise-conv lengths, {PER_S}/s of a worker unless named, {SPAN_S:g} s; {TARGET}, "
        f"prefill {PREFILL_FACTOR:g} times as slow and steps {STEP_S * 1e3:g} ms longer; weights "
        "at 2 GB/s"
    ]


def as_text(found: ByCase, result: str = "ten_workers") -> str:
    """A row for each scheme of a case, and one for the same requests without a failure."""
    lines = [
        *heads_of(result),
        "means of the seeds; in brackets against the first row of the case, seed by seed; * where "
        "the interval excludes 0",
        f"{'case':12}{'scheme':18}{'seeds':>6}{'hit':>5}"
        + "".join(f"{title:>24}" for title, _, _ in COLUMNS),
    ]
    for case, rows in found.items():
        base = next(iter(rows))
        for scheme, by_seed in rows.items():
            line = f"{case:12}{scheme:18}{len(by_seed):>6}{mean(by_seed, 'interrupted'):>5.0f}"
            for _, key, scale in COLUMNS:
                line += f"{cell_text(rows, scheme, key, scale, base):>24}"
            lines.append(line.rstrip())
        first = rows[base]
        ttft_s, tpot_s = (mean(first, f"window_clean_{key}") for key in ("ttft_s", "tpot_s"))
        lines.append(f"{case:12}{'no failure':29}{'':24}{ttft_s:>24.2f}{tpot_s * 1e3:>24.2f}")
        lines.append(
            f"{case:12}{'':29}of the TTFT of the others in the first row "
            f"{mean(first, 'queue_share'):.0%} is queueing"
        )
        for scheme, by_seed in rows.items():
            if mean(by_seed, "draft_steps"):
                lines.append(
                    f"{case:12}{'':29}{mean(by_seed, 'draft_presence'):.0%} of the assisted steps "
                    f"have drafts under {scheme}, of which {mean(by_seed, 'accepted_a_step'):.2f} "
                    "are right"
                )
        still_open = sum(not row["is_closed"] for each in rows.values() for row in each.values())
        if still_open:
            lines.append(f"{case:12}{'':29}{still_open} windows were open when the run ended")
    lines += [
        "",
        "window: failure-impact window of LUMEN section 6.1, with TTFT and TPOT of the requests in "
        "it; moving: the same with a bucket that begins at each request; hit: interrupted requests",
    ]
    return "\n".join(lines) + "\n"


def cell_of(
    by_size: dict[str, Setup], jobs: int, clean: dict[str, Clean], name: str
) -> dict[str, Row]:
    """By scheme, of a case with a seed; of a variant, LUMEN's with other values. `clean` has the
    runs without a failure, which cells of one kind share.
    """
    case, _, seed = name.partition("#")
    size, _, variant = case.partition(" ")
    setup = by_size.get(size.partition("x")[0]) or by_size[""]
    schemes = VARIANTS[variant] if variant else setup.schemes
    own = clean.setdefault(variant, {})
    return forked_cell(replace(setup, schemes=schemes), f"{size}#{seed}", own, jobs)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--exhibits", nargs="+", choices=list(EXHIBITS), default=["B.1"])
    parser.add_argument("--cases", nargs="+", help="of these exhibits; default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--keep", metavar="RESULT", help="whose cells these are")
    parser.add_argument("--jobs", type=int, default=1, help="schemes of a case at a time")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no cell goes beyond")
    options = parser.parse_args()
    allowed = [case for exhibit in options.exhibits for case in EXHIBITS[exhibit]]
    for case in options.cases or ():
        if case not in allowed:
            parser.error(f"--cases: got {case}; allowed: {', '.join(allowed)}")
    together: dict[str, list[str]] = {}
    for exhibit in options.exhibits:
        together.setdefault(RESULTS[exhibit], []).append(exhibit)
    is_void = False
    with tempfile.TemporaryDirectory() as directory:
        for result, exhibits in together.items():
            is_void |= measured(setups(result, Path(directory)), result, exhibits, options)
    return is_void


def setups(result: str, directory: Path) -> dict[str, Setup]:
    """By number of workers; the key `""` is for all others."""
    if result != "prototype":
        return {"": simulator(PREFILL_FACTOR, STEP_S, directory)}
    return {
        "4": prototype(4, FOUR_PROMPT_TOKENS, PROTOTYPE_STEP_S, directory),
        "8": prototype(8, EIGHT_PROMPT_TOKENS, PROTOTYPE_STEP_S, directory),
    }


def measured(
    by_size: dict[str, Setup], result: str, exhibits: Sequence[str], options: Namespace
) -> bool:
    """Measure the cells of the exhibits that are missing in the result, and keep them, also where
    one fails. True if the record is void.
    """
    record = Record(*range(options.seeds), timed=False)
    cells = Cells(options.out, options.keep or result, settings_of(result))
    cases = dict.fromkeys(
        case
        for exhibit in exhibits
        for case in EXHIBITS[exhibit]
        if not options.cases or case in options.cases
    )
    names = [f"{case}#{seed}" for seed in range(options.seeds) for case in cases]
    is_void = False
    try:
        cells.measure(names, options.limit_s, partial(cell_of, by_size, options.jobs, {}))
    finally:
        if cells.found:
            rows = by_case(cells.found)
            text = as_text(rows, result)
            print(text, end="")
            is_void = cells.keep(record, {"cases": rows}, text)
    return is_void


if __name__ == "__main__":
    sys.exit(main())
