"""Fits the operating points to published figures.

    python -m experiments.lumen.fit          # A quarter of an hour.

The simulator's (four workers): a factor on prefill and a fixed time per step. For each fixed time
the factor is sought that has the published time per token; of these the pair counts whose TTFT is
nearest to the published one. That of eight prototypes likewise, with the mean length of prompts in
place of the factor, since the paper's conversations are longer than first messages are. For four
prototypes, whose time per token is not published, the length is sought at the fixed time of the
eight that has the published peak of TTFT after a failure under stop-and-restart. At the length that
has their TTFT without a failure, shown beside it, they are so near their capacity that most queues
outlast a run.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import fmean, median

from experiments.command_line import parser_of
from experiments.lumen.operating_points import prototype, simulator
from experiments.lumen.simulated import STOP, Case, Setup, simulate
from experiments.record import Record
from kvrs_lab.report import metrics
from kvrs_lab.report.impact import bucket_size

# Published figures without a failure: section 3.1, table 2 and section 6.2; and the peak of the
# mean TTFT of a bucket of requests after one, "above 5 s" in section 6.2.
SIMULATOR_TTFT_S, SIMULATOR_TPOT_S = 1.16, 0.1389
EIGHT_TTFT_S, EIGHT_TPOT_S = 0.83, 0.0926
FOUR_TTFT_S, FOUR_PEAK_S = 0.76, 5.0
STEPS_S = (0.0, 0.01, 0.02, 0.04)
SPAN_S = 300.0
PEAK_SPAN_S, PEAK_SEEDS = 600.0, 3
NEAR_ENOUGH = 0.02
MOST_RUNS = 7


@dataclass(frozen=True, slots=True)
class Fit:
    """Figures without a failure at a parameter (factor, or mean tokens) and a time per step."""

    parameter: float
    step_s: float
    ttft_s: float
    tpot_s: float
    peak_s: float | None = None  # Of TTFT after a failure, where that is fitted.


def without_failure(setup: Setup, case: str, seeds: int) -> tuple[float, float]:
    """Return mean TTFT and time per token of requests from the moment of a failure on."""
    ttft_s, tpot_s = list[float](), list[float]()
    for seed in range(seeds):
        whole = replace(setup, span_s=SPAN_S)
        run = simulate(Case.of(whole, case), STOP, seed, fails=False)
        late = [each for each in run.records if each.due_s >= run.fault_s]
        ttft_s += [found for each in late if (found := metrics.arrival_ttft_s(each)) is not None]
        tpot_s += [found for each in late if (found := metrics.tpot_s(each)) is not None]
    return fmean(ttft_s), fmean(tpot_s)


def peak_s(setup: Setup, case: str, seeds: int) -> float:
    """Return the greatest mean TTFT of a bucket of requests under stop-and-restart, as the median
    of the seeds.
    """
    found = []
    for seed in range(seeds):
        whole = replace(setup, span_s=PEAK_SPAN_S)
        run = simulate(Case.of(whole, case), STOP, seed, fails=True)
        buckets: dict[int, list[float]] = {}
        for each in run.records:
            if (ttft_s := metrics.arrival_ttft_s(each)) is not None:
                buckets.setdefault(each.index // bucket_size(len(run.records)), []).append(ttft_s)
        found.append(max(map(fmean, buckets.values())))
    return median(found)


def sought(run: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return the parameter at which a figure that grows with it is near the target, by
    interpolation of logarithms between two parameters; one of these where the target is beyond it.
    """
    below, above = run(low), run(high)
    if below >= target:
        return low
    if above <= target:
        return high
    for _ in range(MOST_RUNS - 2):
        share = (log(target) - log(below)) / (log(above) - log(below))
        # Not all the way to an end: the figure bends up.
        share = min(0.9, max(0.1, share))
        at = exp(log(low) + share * (log(high) - log(low)))
        found = run(at)
        if abs(found / target - 1) <= NEAR_ENOUGH:
            return at
        if found < target:
            low, below = at, found
        else:
            high, above = at, found
    return at


def best_of(
    figures: Callable[[float, float], tuple[float, float]],
    published: tuple[float, float],
    span: tuple[float, float],
) -> list[Fit]:
    """Return a fit for each time per step, the chosen one first."""
    ttft_s, tpot_s = published
    found = []
    for step_s in STEPS_S:
        at = sought(lambda each, step_s=step_s: figures(each, step_s)[1], tpot_s, *span)  # type: ignore[misc]
        found.append(Fit(at, step_s, *figures(at, step_s)))
        print(found[-1], flush=True)
    return sorted(
        found, key=lambda fit: abs(log(fit.ttft_s / ttft_s)) + abs(log(fit.tpot_s / tpot_s))
    )


def rows_of(
    name: str, parameter: str, fits: list[Fit], published: tuple[float, float]
) -> list[str]:
    has_peaks = any(fit.peak_s is not None for fit in fits)
    ttft_s, other_s = published
    other = f"peak after a failure {other_s:.0f} s" if has_peaks else f"TPOT {other_s * 1e3:.1f} ms"
    lines = [
        f"{name}: published TTFT {ttft_s:.2f} s, {other}",
        f"{parameter:>16}{'fixed ms':>10}{'TTFT s':>9}{'TPOT ms':>9}"
        + (f"{'peak s':>9}" if has_peaks else ""),
    ]
    for number, fit in enumerate(fits):
        peak = "" if fit.peak_s is None else f"{fit.peak_s:>9.2f}"
        lines.append(
            f"{fit.parameter:>16.4g}{fit.step_s * 1e3:>10.0f}{fit.ttft_s:>9.2f}"
            f"{fit.tpot_s * 1e3:>9.1f}{peak}{'  chosen' if not number else ''}"
        )
    return lines


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    record = Record(*range(options.seeds), timed=False)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        @cache
        def simulated(prefill: float, step_s: float) -> tuple[float, float]:
            return without_failure(simulator(prefill, step_s, directory), "4x1", options.seeds)

        @cache
        def eight(tokens: float, step_s: float) -> tuple[float, float]:
            return without_failure(prototype(8, tokens, step_s, directory), "8x1", options.seeds)

        @cache
        def four(tokens: float, step_s: float) -> tuple[float, float]:
            return without_failure(prototype(4, tokens, step_s, directory), "4x1", options.seeds)

        @cache
        def peak(tokens: float, step_s: float) -> float:
            return peak_s(prototype(4, tokens, step_s, directory), "4x1", PEAK_SEEDS)

        llama = best_of(simulated, (SIMULATOR_TTFT_S, SIMULATOR_TPOT_S), (0.7, 2.8))
        qwen_14b = best_of(eight, (EIGHT_TTFT_S, EIGHT_TPOT_S), (600.0, 4500.0))
        step_s = qwen_14b[0].step_s
        by_peak = sought(lambda each: peak(each, step_s), FOUR_PEAK_S, 800.0, 1100.0)
        by_ttft = sought(lambda each: four(each, step_s)[0], FOUR_TTFT_S, 400.0, 2500.0)
        qwen_32b = [
            Fit(tokens, step_s, *four(tokens, step_s), peak(tokens, step_s))
            for tokens in (by_peak, by_ttft)
        ]
    found = {"simulator": llama, "eight": qwen_14b, "four": qwen_32b}
    text = "\n".join(
        [
            *rows_of(
                "simulator, 4 workers",
                "prefill factor",
                llama,
                (SIMULATOR_TTFT_S, SIMULATOR_TPOT_S),
            ),
            *rows_of("eight prototypes", "prompt tokens", qwen_14b, (EIGHT_TTFT_S, EIGHT_TPOT_S)),
            *rows_of("four prototypes", "prompt tokens", qwen_32b, (FOUR_TTFT_S, FOUR_PEAK_S)),
            "",
        ]
    )
    print(text, end="")
    figures = {name: [asdict(each) for each in fits] for name, fits in found.items()}
    return record.keep(options.out, "fit", figures, text)


if __name__ == "__main__":
    sys.exit(main())
