"""LUMEN: its figures beside ours.

A case such as `8x2` has eight workers of which two fail; `10x1:1.2` has another rate of a worker.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.exhibits.figures import half_widths, mean_of, published, value
from experiments.kept import Results
from experiments.panels import Kind, Panel, Series
from experiments.verdicts import Claim, Compared, change
from kvrs_lab.report.student import Interval

STOP, FIXED, SCHEDULED = "stop-and-restart", "fixed", "+ scheduling"  # In all results.
PROGRESSIVE, WHOLE = "+ progressive", "LUMEN"  # With draft models.
SCHEMES = (FIXED, SCHEDULED, PROGRESSIVE, WHOLE)
QUARTERS = ("4x1", "8x2", "16x4", "32x8", "64x16")
SINGLES = ("4x1", "8x1", "16x1", "32x1", "64x1")
# The simulated cluster of the paper (B.1 to B.7), and its prototypes (A.1, A.2, A.4).
PAPER = tuple(f"lumen/results/{name}.json" for name in ("ten_workers", "loads", "sizes"))
PROTOTYPE = tuple(
    f"lumen/results/{name}.json" for name in ("prototype_four", "prototype", "prototype_rates")
)
# At the present clock, up to sixteen workers.
PRESENT = tuple(
    f"lumen/results/{name}.json" for name in ("sizes_to_16", "four_workers", "eight_workers")
)
PROCESSES = "lumen/results/recovery.json"
COST = "checkpoint_cost/results/checkpoint_cost.json"
MEASURES = {
    "window": "recovery time",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "hit_tpot": "TPOT of the interrupted",
}

BySeed = Mapping[str, Mapping[str, float]]
_published = partial(value, "lumen")


def rows_of(results: Results, paths: Iterable[str], case: str) -> Mapping[str, BySeed]:
    """By scheme and seed; empty: no result has the case."""
    found: list[dict[str, Any]] = [results(path)["cases"] for path in paths if results.has(path)]
    return next((cases[case] for cases in found if case in cases), {})


def changed(rows: Mapping[str, BySeed], measure: str, scheme: str, against: str) -> Interval | None:
    """A scheme against another one, seed by seed. A seed without a window is left out, and for the
    length of a window also one whose window was open when a run ended.
    """
    key = _key(next(iter(rows[scheme].values())), measure)
    pairs = [
        (row.get(key), rows[against][seed].get(key))
        for seed, row in rows[scheme].items()
        if seed in rows[against]
        if measure != "window"
        or (row.get("is_closed", True) and rows[against][seed].get("is_closed", True))
    ]
    ratios = [ours / base - 1 for ours, base in pairs if ours and base]
    return mean_of(ratios) if ratios else None


def _key(row: Mapping[str, float], measure: str) -> str:
    """The figure of the failure's window, where the result has it, else that of all requests."""
    of_window = f"window_{measure}_s"
    return of_window if of_window in row else f"{measure}_s"


def changes(
    source: str, paths: Iterable[str], cases: tuple[str, ...], results: Results
) -> list[Compared]:
    """The published changes of a figure or a table; one without a case is that of all `cases`."""
    found: list[Compared] = []
    for row in published("lumen"):
        if row["source"] != source:
            continue
        for case in [row["case"]] if row["case"] else cases:
            found += _compared(rows_of(results, paths, case), case, row)
    return found


def _compared(rows: Mapping[str, BySeed], case: str, row: Mapping[str, str]) -> Iterable[Compared]:
    scheme = row["scheme"]
    of = "" if scheme == WHOLE else f" of {scheme}"
    if scheme == WHOLE and scheme not in rows:
        scheme, of = SCHEDULED, ", no drafts"
    if scheme not in rows or row["against"] not in rows:
        return
    ours = changed(rows, row["measure"], scheme, row["against"])
    if ours is None:
        return
    against = " over fixed" if row["against"] == FIXED else ""
    what = f"{MEASURES[row['measure']]} at {case}{of}{against}"
    yield change(what, float(row["value"]), ours)


def impact(paths: Iterable[str], results: Results) -> list[Compared]:
    """TTFT and time per token in the window, over those without a failure."""
    return [
        _times(f"{MEASURES[measure]} at {case}", limit, rows, ours, clean)
        for case in QUARTERS
        if (rows := rows_of(results, paths, case).get(STOP))
        for measure in ("ttft", "tpot")
        for ours, clean in [(f"window_{measure}_s", f"window_clean_{measure}_s")]
        for limit in [_published(source="Figures 1, 2", measure=measure)]
    ]


def _times(what: str, published: float, rows: BySeed, key: str, base: str) -> Compared:
    found = mean_of(row[key] / row[base] for row in rows.values() if row.get(base))
    return Compared(what, published, found.mean, found.half_width, form="times")


def causes(paths: Iterable[str], results: Results) -> list[Compared]:
    """Queueing in the wait of the uninterrupted, and replays over that wait."""
    found = []
    for case in QUARTERS:
        if not (rows := rows_of(results, paths, case).get(STOP)):
            continue
        ttft_s, queueing_s, replay_s = (
            _published(source="Table 1", case=case, measure=measure)
            for measure in ("ttft_s", "queueing_s", "replay_s")
        )
        ours = mean_of(row["queue_share"] for row in rows.values())
        found += [
            Compared(
                *(f"queueing at {case}", queueing_s / ttft_s, ours.mean, ours.half_width, 0.0),
                form="share",
            ),
            _times(f"replay at {case}", replay_s / ttft_s, rows, "replay_ttft_s", "ttft_s"),
        ]
    return found


def one_failure(paths: Iterable[str], results: Results) -> list[Compared]:
    """Figure 13, and the time per token of the interrupted of Table 4."""
    found = changes("Figure 13 (B.5)", paths, SINGLES, results)
    for case in SINGLES:
        if (rows := rows_of(results, paths, case)) and WHOLE in rows:
            whole, stop = (
                _published(source="Table 4 (B.5)", case=case, scheme=scheme)
                for scheme in (WHOLE, STOP)
            )
            if ours := _interrupted(rows):
                what = f"{MEASURES['hit_tpot']} at {case}"
                found.append(change(what, whole / stop - 1, ours))
    return found


def _interrupted(rows: Mapping[str, BySeed]) -> Interval | None:
    pairs = [(row.get("hit_tpot_s"), rows[STOP].get(seed, {})) for seed, row in rows[WHOLE].items()]
    ratios = [ours / base["hit_tpot_s"] - 1 for ours, base in pairs if ours and base]
    return mean_of(ratios) if ratios else None


def on_processes(results: Results) -> list[Compared]:
    """The window of real processes, run by run."""
    found = []
    for source, case in (("Figure 6 (A.1)", "4x1"), ("Table 2 (A.1)", "8x1")):
        runs = results(PROCESSES)["cases"][case]
        shown = _published(source=source, case=case, measure="window", against=STOP, scheme=WHOLE)
        ratios = [
            run["recovery_time_s"] / base["recovery_time_s"] - 1
            for run, base in zip(runs[SCHEDULED], runs[STOP], strict=False)
        ]
        found.append(change(f"{MEASURES['window']} at {case}", shown, mean_of(ratios)))
    return found


def steady(results: Results) -> list[Compared]:
    """CPU time stands for time, since the copies run on the core that computes."""
    found = results(COST)
    parts = {"CPU per token": (found["cost"], found["cost_interval"])} | {
        f"CPU per token of {part}": tuple(cost) for part, cost in found["cost_parts"].items()
    }
    none, limit_ms = (
        _published(source="Steady state", measure=measure)
        for measure in ("time per token", "time per token in ms")
    )
    gap = {mode: found["gap_ms"][mode]["p50"] for mode in ("on", "off")}
    return [
        *(Compared(what, 1 + none, 1 + cost, half) for what, (cost, half) in parts.items()),
        Compared(
            "time per token, p50",
            *(limit_ms, gap["on"] - gap["off"], None, None, Claim.AT_MOST),
            form="ms",
        ),
    ]


def co_failure(results: Results) -> list[Compared]:
    found = results("lumen/results/placement.json")["co_failure"]["load"]
    lost = _published(source="B.4")
    return [Compared("checkpoints lost with their streams", lost, found, None, None, form="share")]


def variants(source: str, results: Results) -> list[Compared]:
    """LUMEN with other values, against the default: the greatest published change is a limit."""
    row = next(row for row in published("lumen") if row["source"] == source)
    rows = rows_of(results, PAPER[:1], row["case"])
    found = []
    for name in rows:
        if name != row["against"] and (ours := changed(rows, "tpot", name, row["against"])):
            what = f"TPOT, {name} over {row['against'].split()[-1]}"
            change = 1 + abs(ours.mean)
            limit = 1 + float(row["value"])
            found.append(Compared(what, limit, change, ours.half_width, claim=Claim.AT_MOST))
    return found


def drafts_act(results: Results) -> Compared:
    """The effect of drafts, without which their depth and the placement show nothing."""
    rows = rows_of(results, PAPER, "10x1")
    ours = changed(rows, "tpot", WHOLE, SCHEDULED)
    assert ours is not None
    whole, scheduled = (
        1 + _published(source="Table 3 (B.1)", scheme=scheme, measure="tpot")
        for scheme in (WHOLE, SCHEDULED)
    )
    return change("TPOT of LUMEN over + scheduling", whole / scheduled - 1, ours)


def headline(results: Results) -> list[Compared]:
    """The prototype of four workers, against stop-and-restart."""
    found = changes("Figure 6 (A.1)", PROTOTYPE, (), results)
    return [
        replace(each, what=each.what.replace(" at 4x1", ""))
        for each in found
        if not each.what.endswith("over fixed")
    ]


COMPARED: dict[str, Callable[[Results], list[Compared]]] = {
    "Figures 1, 2: impact of failures": partial(impact, PAPER),
    "Figures 1, 2: to 8 workers, the present clock": partial(impact, PRESENT),
    "Table 1: causes": partial(causes, PAPER),
    "Table 1: to 8 workers, the present clock": partial(causes, PRESENT),
    "Figure 6 (A.1): four workers": partial(changes, "Figure 6 (A.1)", PROTOTYPE, ()),
    "Table 2 (A.1): eight workers": partial(changes, "Table 2 (A.1)", PROTOTYPE, ()),
    "Figure 7 (A.2): parts of the scheme": partial(changes, "Figure 7 (A.2)", PROTOTYPE, ()),
    "Figure 8 (A.3): request rates": partial(changes, "Figure 8 (A.3)", PROTOTYPE, ()),
    "Figure 9 (A.4): 1, 2, 4 of 8 fail": partial(changes, "Figure 9 (A.4)", PROTOTYPE, ()),
    "Figures 6, 9 on processes": on_processes,
    "Steady state": steady,
    "Table 3 (B.1): one of ten fails": partial(changes, "Table 3 (B.1)", PAPER, ()),
    "Figure 10 (B.2): request rates": partial(changes, "Figure 10 (B.2)", PAPER, ()),
    "Figure 11 (B.3): 1 to 5 of 10 fail": partial(changes, "Figure 11 (B.3)", PAPER, ()),
    "Figure 12 (B.4): a quarter fails": partial(changes, "Figure 12 (B.4)", PAPER, QUARTERS),
    "Figure 12 (B.4): to 8 workers, the present clock": partial(
        changes, "Figure 12 (B.4)", PRESENT, QUARTERS[:2]
    ),
    "B.4: checkpoints lost with their streams": co_failure,
    "Figure 13, Table 4 (B.5): one fails": partial(one_failure, PAPER),
    "Figure 13, Table 4 (B.5): to 16 workers, the present clock": partial(one_failure, PRESENT),
    "Table 5 (B.6): depth of speculation": partial(variants, "Table 5 (B.6)"),
    "Table 6 (B.7): alpha": partial(variants, "Table 6 (B.7)"),
}
POWER = {
    "Table 5 (B.6): depth of speculation": drafts_act,
    "Table 6 (B.7): alpha": drafts_act,
}


def _sizes(failing: str, cases: tuple[str, ...], measure: str, results: Results) -> list[Panel]:
    """Changes against stop-and-restart at 4 to 64 workers."""
    ours = [_scheme(results, PAPER, cases, measure, scheme) for scheme in SCHEMES]
    present = _scheme(results, PRESENT, cases, measure, WHOLE)
    ours.append(replace(present, name=f"{present.name}, present clock"))
    shown = [each for each in ours if each.x]
    series = [*_published_of(cases, measure, shown[0].x), *shown]
    title, unit = f"{MEASURES[measure]}: {failing}", "over stop-and-restart (%)"
    return [Panel(title, "workers", unit, series, log_x=True, limits=(-70, 50))]


def _scheme(
    results: Results, paths: Iterable[str], cases: tuple[str, ...], measure: str, scheme: str
) -> Series:
    points = [
        (int(case.partition("x")[0]), ours)
        for case in cases
        if (rows := rows_of(results, paths, case)) and {scheme, STOP} <= set(rows)
        if (ours := changed(rows, measure, scheme, STOP))
    ]
    halves = half_widths([ours for _, ours in points]) if points else None
    return Series(
        f"ours: {scheme}",
        [workers for workers, _ in points],
        [100 * ours.mean for _, ours in points],
        halves and [100 * half for half in halves],
    )


def _published_of(
    cases: tuple[str, ...], measure: str, workers: Sequence[float | str]
) -> list[Series]:
    """A range for a quarter; the two ends for one failure."""
    if cases is QUARTERS:
        ends = [
            100 * _published(source=source, measure=measure)
            for source in ("Figure 12 (B.4)", "Figure 12 (B.4) at most")
        ]
        places = [workers[0], workers[-1]]
        return [Series("published: LUMEN (range)", places, ends, None, True, Kind.BAND)]
    found = [
        100 * _published(source="Figure 13 (B.5)", measure=measure, case=case)
        for case in (SINGLES[0], SINGLES[-1])
    ]
    return [Series("published: LUMEN (ends)", [4, 64], found, None, True)]


def _time_line(results: Results) -> list[Panel]:
    """Figure 1 in small: TTFT of one bucket of requests after the other, on processes."""
    cases = results(PROCESSES)["cases"]["4x1"]
    ours = {"no failure": (cases[STOP], "clean_ttft_s")}
    ours |= {scheme: (cases[scheme], "ttft_s") for scheme in (STOP, SCHEDULED)}
    series = []
    for name, (runs, key) in ours.items():
        number = min(len(run["buckets"]) for run in runs)
        buckets = [[run["buckets"][at] for run in runs] for at in range(number)]
        begins = [mean_of(each["from_s"] for each in bucket).mean for bucket in buckets]
        found = [mean_of(each[key] for each in bucket) for bucket in buckets]
        means = [each.mean for each in found]
        series.append(Series(f"ours: {name}", begins, means, half_widths(found)))
    title = "Figure 1 on processes: one of 4 fails"
    return [Panel(title, "begin of a bucket of requests (s)", "mean TTFT (s)", series)]


# Figure 12, what is published of Figure 13, and Figure 1 in small.
PANELS = (
    *(partial(_sizes, "a quarter fails (B.4)", QUARTERS, each) for each in ("ttft", "tpot")),
    partial(_sizes, "a quarter fails (B.4)", QUARTERS, "window"),
    *(partial(_sizes, "one fails (B.5)", SINGLES, each) for each in ("ttft", "tpot")),
    _time_line,
)
