"""RaidServe: its figures beside ours."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.exhibits.figures import mean_of, published, value
from experiments.kept import Results
from experiments.panels import Kind, Panel, Series
from experiments.verdicts import Claim, Compared
from kvrs_engine.elastic import on_demand, speed
from kvrs_engine.elastic.layouts import hybrid, staged, uneven
from kvrs_engine.elastic.units import Units
from kvrs_lab.report import metrics
from kvrs_lab.report.student import Interval
from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.presets import PRESETS
from kvrs_testkit.layouts import even, rotated

THROUGHPUT, CURVES, PEAKS = (
    f"raidserve/results/{name}.json" for name in ("throughput", "curves", "peaks")
)
BALANCE, COMPUTED, IN_PLACE = (
    f"raidserve/results/{name}.json" for name in ("rank_balance", "computed", "in_place")
)
LLAMA = "Llama-3.1-70B"
WAYS = ("recompute", "host", "full", "oracle")

_published = partial(value, "raidserve")


def _example(what: str, source: str, ours: float, form: str = "times") -> list[Compared]:
    return [Compared(what, _published(source=source), ours, nothing=None, form=form)]


def cyclic(_: Results) -> list[Compared]:
    """Cells of a page at the fullest rank: four heads on three GPUs, twelve layers."""
    units = Units(12, (1,) * 4, (1,) * 12, (1,), 0)
    stages = staged(12, [range(3)])
    naive, even_out = (
        max(layout.cells_per_page(rank) for rank in layout.ranks)
        for layout in (uneven(units, stages), rotated(units, stages))
    )
    return _example("KV capacity over naive placement", "Figure 1", naive / even_out)


def hybrid_attention(_: Results) -> list[Compared]:
    """KV heads that the busiest rank computes, over those of hybrid attention."""
    units = Units(1, (1,) * 8, (1,) * 7, (1,) * 7, 0)
    stages = staged(1, [range(7)])
    naive, even_out = (
        speed.shares(layout, units).cells
        for layout in (uneven(units, stages), hybrid(units, stages))
    )
    return _example("KV heads of the busiest of 7 ranks", "Figure 2", naive / even_out)


def shares(results: Results) -> list[Compared]:
    """An example of our own: the paper's has four requests and no figure."""
    rows = results("raidserve/results/shares.json")["rows"].values()
    load = max(row["largest_over_mean"] for row in rows)
    by_arrival = max(row["by_arrival"] for row in rows)
    what = "largest load over the mean; bar: by arrival"
    return [Compared(what, None, load, None, None, Claim.AT_MOST, bar=by_arrival, form="times")]


def loaded_on_demand(_: Results) -> list[Compared]:
    """Tiles that each survivor loads, whichever of four GPUs is lost."""
    units = Units(1, (1,) * 4, (1,) * 12, (1,) * 4, 0)
    before = even(units, 4)
    most = 0
    for lost in before.ranks:
        after = on_demand.reshaped(before, units, on_demand.survivors(before, [lost]))
        loads = [len({*after.tiles(r, 0)} - {*before.tiles(r, 0)}) for r in after.ranks]
        most = max(most, *loads)
    return _example("loaded by each survivor", "Figure 4", most, "tiles")


def throughput(results: Results) -> list[Compared]:
    found = []
    for row in published("raidserve"):
        if row["source"] == "Figures 6, 9":
            word, base = row["what"].split(" ", 1)
            seeds = results(THROUGHPUT)["results"][row["model"]]
            ours = mean_of(each["ours"] / each[base] for each in seeds)
            nothing = None if word == "of" else 1.0
            found.append(_compared(f"{row['what']}, {row['model']}", row, ours, nothing))
    return found


def _compared(
    what: str, row: Mapping[str, str], ours: Interval, nothing: float | None = 1.0
) -> Compared:
    limit = float(row["value"])
    return Compared(what, limit, ours.mean, ours.half_width, nothing, form="times")


def preset(_: Results) -> list[Compared]:
    """Lengths of a generated trace."""
    trace = generate(replace(PRESETS["openthoughts"], requests=3000), seed=0)
    sides = {
        "input": [request.input_tokens for request in trace.requests],
        "output": [request.output_tokens for request in trace.requests],
    }
    return _lengths(
        "Table 1",
        {
            side: {"mean": statistics.fmean(each), "median": statistics.median(each)}
            for side, each in sides.items()
        },
    )


def lengths(results: Results) -> list[Compared]:
    """The first requests of the file, as many as the paper has."""
    return _lengths("Table 2", results("raidserve/results/lengths.json")["first"])


def _lengths(source: str, ours: Mapping[str, Mapping[str, float]]) -> list[Compared]:
    found = []
    for row in published("raidserve"):
        if row["source"] == source:
            what, side = row["what"].split()
            limit = float(row["value"])
            tokens = ours[side][what]
            found.append(Compared(row["what"], limit, tokens, nothing=None, form="tokens"))
    return found


def curves(results: Results) -> list[Compared]:
    """Throughput within the limits of TTFT and time between tokens."""
    found = []
    for row in published("raidserve"):
        if row["source"] == "Figure 10":
            stage, base = row["what"].split(" over ")
            of = results(CURVES)["curves"][row["model"]][stage]
            seeds = zip(of["ours 7"], of[base], strict=True)
            ours = mean_of(
                own["at_limit"]["tokens_per_s"] / other["at_limit"]["tokens_per_s"]
                for own, other in seeds
            )
            found.append(_compared(f"{row['what']}, {row['model']}", row, ours))
    return found


def peaks(stage: str, results: Results) -> list[Compared]:
    """RaidServe over naive, by the number of GPUs; the published 0 % is rounded, so no verdict."""
    found = []
    for row in published("raidserve"):
        if row["source"] == "Figure 11" and row["what"].startswith(stage):
            gpus = row["what"].split()[-1]
            ours = _peak(results, stage, f"ours {gpus}", f"naive {gpus}")
            found.append(_gained(f"{stage} at TP {gpus}", float(row["value"]), ours))
    return found


def _peak(results: Results, stage: str, ours: str, base: str) -> Interval:
    of = results(PEAKS)["tokens_per_s"][LLAMA][stage]
    return mean_of(own / other for own, other in zip(of[ours], of[base], strict=True))


def _gained(what: str, published: float, ours: Interval) -> Compared:
    return Compared(what, published, ours.mean, ours.half_width)


def breakdown(results: Results) -> list[Compared]:
    """Points of the throughput of naive, by balanced memory and then by balanced computing."""
    found = []
    for row in published("raidserve"):
        if row["source"] == "Figure 12":
            stage, part = row["what"].split()
            memory = _peak(results, stage, "cyclic 7", "naive 7")
            whole = _peak(results, stage, "ours 7", "naive 7")
            ours = memory.mean if part == "memory" else 1 + whole.mean - memory.mean
            found.append(Compared(f"{stage}, {part}", 1 + float(row["value"]), ours))
    return found


def rank_balance(results: Results) -> list[Compared]:
    """CPU time of the busiest rank: naive over hybrid, in place of throughput."""
    rows = {(row["layout"], row["ranks"]): row for row in results(BALANCE)["rows"]}
    return [
        Compared(
            f"decode at TP {ranks}, {name}",
            _published(source="Figure 11", what=f"decode over naive {ranks}"),
            rows["naive", ranks][key] / rows["hybrid", ranks][key],
        )
        for key, name in (("decode_by_layer_s", "layers"), ("decode_busiest_s", "in sum"))
        for ranks in (5, 6, 7)
    ]


def _seconds(way: str) -> float:
    return _published(source="Table 3", what=f"{way} in s")


def recovery(results: Results) -> list[Compared]:
    """Recomputing over restoring from the host, run by run; weights stay."""
    cells = results(COMPUTED)["cells"]
    runs = sorted({name.split("#")[1] for name in cells})
    ours = mean_of(
        statistics.fmean(cells[f"recompute#{run}"]["victims_s"])
        / statistics.fmean(cells[f"host#{run}"]["victims_s"])
        for run in runs
        if {f"recompute#{run}", f"host#{run}"} <= set(cells)
    )
    what = "recompute over host"
    limit = _seconds("recompute") / _seconds("host")
    return [Compared(what, limit, ours.mean, ours.half_width, form="times")]


def by_bytes(results: Results) -> list[Compared]:
    """The published 120 ms are more than 50 GB/s for their bytes: by those, host takes 3.3 times
    as long as full.
    """
    ratio = results(IN_PLACE)["computed_ratios"]["host / full"]
    own = _published(source="Table 3 by its own 50 GB/s")
    return [Compared("host over full, by bytes", own, ratio, form="times")]


def in_place(results: Results) -> list[Compared]:
    ratio = results(IN_PLACE)["ratios"]["recompute / host"]
    limit = _seconds("recompute") / _seconds("host")
    return [Compared("recompute over host", limit, ratio, form="times")]


def longest_gap(results: Results) -> list[Compared]:
    """Over 10 s recomputed: the published ratio is a lower limit."""
    cells = results(COMPUTED)["cells"].items()
    recomputed, restored = (
        metrics.percentile(
            [
                gap
                for name, cell in cells
                if name.startswith(way)
                for gap in [*cell["victims_s"], *cell["others_s"]]
            ],
            99,
        )
        or 0.0
        for way in ("recompute", "host")
    )
    most, host = (
        _published(source="Figure 13", what=f"p99 {way} in s")
        for way in ("recomputed", "with host")
    )
    what = "recompute over host, p99"
    ratio = recomputed / restored
    return [Compared(what, most / host, ratio, claim=Claim.AT_LEAST, form="times")]


def headline(results: Results) -> list[Compared]:
    """Throughput over the fallback to four GPUs, and recovery over computing again."""
    found = [
        replace(each, what=each.what.split()[0])
        for each in curves(results)
        if "over standard 4" in each.what
    ]
    ours = {row["way"]: row["last_s"] for row in results(IN_PLACE)["rows"]}
    faster = ours["recompute"] / ours["full"]
    limit = _seconds("recompute") / _seconds("full")
    return [*found, Compared("recovery", limit, faster, form="times")]


COMPARED: dict[str, Callable[[Results], list[Compared]]] = {
    "Figure 1: cyclic placement": cyclic,
    "Figure 2: hybrid attention": hybrid_attention,
    "Figure 3: load-aware routing and scheduling": shares,
    "Figure 4: on-demand weights": loaded_on_demand,
    "Figures 6, 9: GCP trace": throughput,
    "Table 1: OpenThoughts": preset,
    "Table 2: Mooncake sample": lengths,
    "Figure 10: Mooncake at 7 of 8 GPUs": curves,
    "Figure 11: prefill balance": partial(peaks, "prefill"),
    "Figure 11: decode balance": partial(peaks, "decode"),
    "Figure 12: breakdown at 7 GPUs": breakdown,
    "Figure 11 as CPU time of ranks": rank_balance,
    "Table 3: recompute and host": recovery,
    "Table 3 in place: host and full": by_bytes,
    "Table 3 in place: recompute and host": in_place,
    "Figure 13: longest time between tokens": longest_gap,
}


def _curves(results: Results) -> list[Panel]:
    of = results(CURVES)["curves"]
    return [_curve(of[model][stage], model, stage) for model in of for stage in of[model]]


def _curve(of: dict[str, Any], model: str, stage: str) -> Panel:
    """Throughput and latency below four times the limit, which is dashed."""
    limit, unit, name = (10.0, 1.0, "TTFT (s)") if stage == "prefill" else (40.0, 1e3, "TBT (ms)")
    series = []
    for scheme, seeds in of.items():
        points = [
            (each["tokens_per_s"] / 1e3, each["mean_s"] * unit)
            for each in seeds[0]["points"]
            if each["mean_s"] * unit <= 4 * limit
        ]
        layout, degree = scheme.split()
        label = f"ours: {'RaidServe' if layout == 'ours' else layout} TP {degree}"
        series.append(Series(label, [x for x, _ in points], [y for _, y in points]))
    ends = [min(x for each in series for x in each.x), max(x for each in series for x in each.x)]
    limits = Series("published: limit", ends, [limit] * 2, None, True, Kind.DASHED)
    title = f"{model.split('-')[0]}, {stage}"
    return Panel(title, "throughput (1,000 tokens/s)", f"mean {name}", [limits, *series])


def _ratios(results: Results) -> list[Panel]:
    rows = curves(results)
    places = [_place(row.what) for row in rows]
    published = [row.published for row in rows if row.published is not None]
    panel = Panel(
        "RaidServe TP 7 over the baseline, at the limit",
        "",
        "throughput (times)",
        [
            Series("published", places, published, None, True, Kind.BARS),
            Series("ours", places, [row.ours for row in rows], None, kind=Kind.BARS),
        ],
    )
    return [panel]


def _place(what: str) -> str:
    """Stage, baseline and model below each other."""
    ratio, model = what.split(", ")
    stage, base = ratio.split(" over ")
    layout, degree = base.split()
    return f"{stage}\n{layout[:5]} {degree}\n{model.split('-')[0]}"


def _ladder(results: Results) -> list[Panel]:
    ours = {row["way"]: row["last_s"] for row in results(IN_PLACE)["rows"]}
    panel = Panel(
        "Table 3: to the next token of all",
        "way to recover",
        "seconds",
        [
            Series("published", WAYS, [_seconds(way) for way in WAYS], None, True, Kind.BARS),
            Series("ours", WAYS, [ours[way] for way in WAYS], None, kind=Kind.BARS),
        ],
        log_y=True,
    )
    return [panel]


# Figure 10's curves, the published ratios at their limits, and Table 3.
PANELS = (_curves, _ratios, _ladder)
