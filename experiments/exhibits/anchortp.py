"""AnchorTP: its figures beside ours."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from experiments.exhibits.figures import half_widths, mean_of, value
from experiments.kept import Results
from experiments.panels import Kind, Panel, Series
from experiments.verdicts import Claim, Compared
from kvrs_engine.elastic import cmm
from kvrs_engine.elastic.plans import HOST

RECOVERY, PLANS, PLANNERS, DEGREES = (
    f"anchortp/results/{name}.json" for name in ("recovery", "plans", "planners", "degrees")
)
EXPERTS, EXPERTS_CPU, EXPERTS_LOST, EXPERTS_DEGREES = (
    f"experts/results/{name}.json" for name in ("simulated", "cpu", "lost_ranks", "degrees")
)
EXPERTS_FITTED = "experts/results/fitted.json"
QWEN, MIXTRAL = "Qwen3-30B-A3B", "Mixtral-8x22B"
IN_PLACE, RESTART = "in place, KV restored", "restart and reload"

_published = partial(value, "anchortp")
_table_1 = partial(_published, source="Table I")


def figure_3(_: Results) -> list[Compared]:
    shards = [
        cmm.Shard(gpu, *part)
        for gpu, part in zip((1, 2, 3, 4), cmm.even_parts(1024, 4), strict=True)
    ]
    tasks = cmm.plan_interval(shards, {2}, [1, 3, 4])
    reloaded = sum(task.bytes for task in tasks if task.source == HOST)
    moved = sum(task.bytes for task in tasks if task.source not in (HOST, task.target))
    return [
        Compared(what, _published(source="Figure 3", measure=what), ours, nothing=None, form="rows")
        for what, ours in (("rows reloaded", reloaded), ("rows between GPUs", moved))
    ]


def _shown(model: str, measure: str, loss: int) -> float:
    """The published ratio of in place over a restart."""
    ours, base = (
        _table_1(model=model, measure=measure, way=way, loss=str(loss))
        for way in ("in place", "restart")
    )
    return ours / base


def recovery(results: Results) -> list[Compared]:
    """In place over a restart, at each of the two losses."""
    rows = results(RECOVERY)["rows"]
    pairs = list(zip(rows[IN_PLACE]["losses"], rows[RESTART]["losses"], strict=True))
    found = [
        Compared(
            f"{name} at loss {loss}",
            _shown(QWEN, measure, loss),
            ours[measure] / base[measure],
            form="times",
        )
        for measure, name in (("tfs_s", "TFS"), ("ttp_s", "TTP"))
        for loss, (ours, base) in enumerate(pairs, 1)
        if base[measure] and ours[measure] is not None
    ]
    base_s = rows["no failure"]["total_s"]
    ours_s, restart_s = (rows[way]["total_s"] - base_s for way in (IN_PLACE, RESTART))
    shown = {
        way: _table_1(model=QWEN, way=way, measure="total_s")
        for way in ("in place", "restart", "no failure")
    }
    added = (shown["in place"] - shown["no failure"]) / (shown["restart"] - shown["no failure"])
    return [*found, Compared("time added in all", added, ours_s / restart_s, form="times")]


def planners(results: Results) -> list[Compared]:
    """Bytes from the host, of those of a full reload, 8 to 7 ranks."""
    rows = {
        row["planner"]: row["host_bytes"]
        for row in results(PLANS)["rows"]
        if (row["model"], row["left"]) == (MIXTRAL, 7)
    }
    return [_plan(name, min(rows[name]) / min(rows["full reload"])) for name in ("cmm", "greedy")]


def planners_s(results: Results) -> list[Compared]:
    """Seconds of the reload, of those of a full one."""
    rows = {row["planner"]: row["reload_s"] for row in results(PLANNERS)["rows"]}
    return [_plan(name, rows[name] / rows["full reload"]) for name in ("cmm", "greedy")]


def _plan(name: str, ours: float) -> Compared:
    """The published share is below what the paper's Eq. 1 allows, 8 to 7 ranks."""
    reload_s, full_s = (
        _published(source="Table II", way=way, measure="reload_s") for way in (name, "full reload")
    )
    least = _published(way=name, measure="least of a full reload")
    what = f"{name} of a full reload"
    return Compared(what, reload_s / full_s, ours, least=least, form="share")


def degrees_real(results: Results) -> list[Compared]:
    """TFS of the second loss over the first."""
    first, second = (each["tfs_s"] for each in results(RECOVERY)["rows"][IN_PLACE]["losses"])
    shown = [_table_1(model=QWEN, way="in place", measure="tfs_s", loss=each) for each in "12"]
    return [Compared("TFS, loss 2 over 1", shown[1] / shown[0], second / first, form="times")]


def degrees(measure: str, results: Results) -> list[Compared]:
    """A dense model: each loss over the one before, on the way to two ranks."""
    found = []
    shown = [_table_1(model=QWEN, way="in place", measure=measure, loss=each) for each in "12"]
    for model, by_degree in _by_degree(results, "what is lost").items():
        steps = list(by_degree)
        for before, after in pairwise(steps):
            ratios = [
                row[measure] / base[measure]
                for base, row in zip(by_degree[before], by_degree[after], strict=True)
                if base[measure] and row[measure]
            ]
            ours = mean_of(ratios)
            what = f"{_name(measure)}, {before} to {after} ranks, {model}"
            limit = shown[1] / shown[0]
            found.append(Compared(what, limit, ours.mean, ours.half_width, form="times"))
    return found


def dense(results: Results) -> list[Compared]:
    return [*degrees("tfs_s", results), *degrees("ttp_s", results)]


def _name(measure: str) -> str:
    return measure.removesuffix("_s").upper()


def _by_degree(results: Results, way: str) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Rows of all seeds by model and by ranks before the loss, the most ranks first."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(dict)
    rows = [row for row in results(DEGREES)["rows"] if row["way"] == way]
    for row in sorted(rows, key=lambda row: (-row["degree"], row["seed"])):
        found[row["model"]].setdefault(row["degree"], []).append(row)
    return found


def expert_degrees(results: Results) -> list[Compared]:
    """TFS and TTP rise with each loss: the last over the first, at the largest skew."""
    rows = [
        row for row in results(EXPERTS_DEGREES)["rows"] if row["variant"] == "on" and row["tfs_s"]
    ]
    skew = max(row["exponent"] for row in rows)
    ranks = {row["ranks"]: row for row in rows if row["exponent"] == skew}
    return [
        Compared(
            f"{_name(measure)}, {min(ranks)} over {max(ranks)} ranks left",
            _table_1(model=MIXTRAL, way="in place", measure=measure, loss="2")
            / _table_1(model=MIXTRAL, way="in place", measure=measure, loss="1"),
            ranks[min(ranks)][measure] / ranks[max(ranks)][measure],
            claim=Claim.AT_LEAST,
            form="times",
        )
        for measure in ("tfs_s", "ttp_s")
    ]


def _gain() -> float:
    on, off = (_published(source="Figure 6", way=way) for way in ("on", "off"))
    return on / off


def experts(results: Results) -> list[Compared]:
    """Tokens per second with copies over without, at each skew of the router."""
    rows = {(row["exponent"], row["variant"]): row["behind"] for row in results(EXPERTS)["rows"]}
    skews = sorted({skew for skew, _ in rows})
    return [
        Compared(f"Zipf {skew:g}", _gain(), rows[skew, "on"] / rows[skew, "off"], form="times")
        for skew in skews
    ]


def experts_fitted(results: Results) -> list[Compared]:
    """The gain at the skew at which tokens/s without copies are the published ones."""
    found = results(EXPERTS_FITTED)
    what = f"gain at Zipf {found['exponent']:g}"
    return [Compared(what, _gain(), found["gains"]["on"], form="times")]


def experts_cpu(results: Results) -> list[Compared]:
    found = []
    for skew, gains in results(EXPERTS_CPU)["gains_by_seed"].items():
        ours = mean_of(gains)
        found.append(Compared(f"Zipf {skew}", _gain(), ours.mean, ours.half_width, form="times"))
    return found


def lost_ranks(measure: str, results: Results) -> list[Compared]:
    """In place over a restart; the paper loses one rank at 25 % and one at 50 %."""
    found = []
    for case, own in results(EXPERTS_LOST)["ratios"].items():
        ranks, loss = case.split()[0], int(case.split()[-1])
        if own[measure] is not None:
            shown = _shown(MIXTRAL if ranks == "8" else QWEN, measure, loss)
            what = f"{_name(measure)}, {case}"
            found.append(Compared(what, shown, own[measure], form="times"))
    return found


def headline(results: Results) -> list[Compared]:
    """The first loss's time to the first token, and the second one's to the peak."""
    ways = results(RECOVERY)["rows"]
    first, second = ways[IN_PLACE]["losses"]
    first_base, second_base = ways[RESTART]["losses"]
    return [
        Compared(
            "first token",
            1 / _shown(QWEN, "tfs_s", 1),
            first_base["tfs_s"] / first["tfs_s"],
            form="times",
        ),
        Compared("peak", _shown(QWEN, "ttp_s", 2), second["ttp_s"] / second_base["ttp_s"]),
    ]


COMPARED: dict[str, Callable[[Results], list[Compared]]] = {
    "Figure 3: 1,024 rows, 4 to 3 GPUs": figure_3,
    "Table I on real weights": recovery,
    "Table II: planners, in bytes": planners,
    "Table II: planners, in seconds": planners_s,
    "Figure 5: degree by degree": degrees_real,
    "Figure 5: experts, from 8 to 2": expert_degrees,
    "Figure 5 for dense models": dense,
    "Figures 4, 6: experts rebalanced": experts,
    "Figures 4, 6: at a fitted skew": experts_fitted,
    "Figures 4, 6: work of the busiest rank": experts_cpu,
    "Table I with experts: TFS": partial(lost_ranks, "tfs_s"),
    "Table I with experts: TTP": partial(lost_ranks, "ttp_s"),
}


def _degrees(measure: str, results: Results) -> list[Panel]:
    """Seconds by the ranks that are left; the paper's two points are those of 3 and 2 ranks."""
    shown = [_table_1(model=QWEN, way="in place", measure=measure, loss=each) for each in "12"]
    series = [Series("published: in place", [3, 2], shown, None, True)]
    for model, by_degree in _by_degree(results, "what is lost").items():
        found = [mean_of(row[measure] or 0.0 for row in rows) for rows in by_degree.values()]
        series.append(
            Series(
                f"ours: {model}",
                [degree - 1 for degree in by_degree],
                [each.mean for each in found],
                half_widths(found),
            )
        )
    name = _name(measure)
    title = f"Figure 5: {name} by ranks left"
    return [Panel(title, "ranks left", f"{name} (s)", series, falling=True)]


def _recovery(measure: str, results: Results) -> list[Panel]:
    """Table I as bars, at the first and at the second loss."""
    places = ["loss 1", "loss 2"]
    rows = results(RECOVERY)["rows"]
    ways = ((RESTART, "restart"), (IN_PLACE, "in place"))
    shown = [
        Series(
            f"published: {way}",
            places,
            [_table_1(model=QWEN, way=way, measure=measure, loss=each) for each in "12"],
            *(None, True, Kind.BARS),
        )
        for _, way in ways
    ]
    ours = [
        Series(
            f"ours: {way}",
            places,
            [each[measure] or 0.0 for each in rows[name]["losses"]],
            kind=Kind.BARS,
        )
        for name, way in ways
    ]
    name = _name(measure)
    return [Panel(f"Table I: {name}, 4 to 2 ranks", "", f"{name} (s)", [*shown, *ours])]


def _shares(results: Results) -> list[Panel]:
    rows = planners(results)
    names = [row.what.split()[0] for row in rows]
    least = [100 * row.least for row in rows if row.least is not None]
    shown = [100 * row.published for row in rows if row.published is not None]
    panel = Panel(
        "Table II: reload, 8 to 7 ranks",
        "planner",
        "of a full reload (%)",
        [
            Series("published: seconds", names, shown, None, True, Kind.BARS),
            Series("published: Eq. 1, at least", names, least, None, True, Kind.BARS),
            Series("ours: bytes", names, [100 * row.ours for row in rows], kind=Kind.BARS),
        ],
    )
    return [panel]


def _experts(results: Results) -> list[Panel]:
    rows = experts(results)
    skews = [float(row.what.split()[-1]) for row in rows]
    cpu = experts_cpu(results) if results.has(EXPERTS_CPU) else []
    panel = Panel(
        "Figure 6: copies of hot experts",
        "skew of the router (Zipf)",
        "throughput over none (times)",
        [
            Series(
                "published: skew unknown", skews, [_gain()] * len(rows), None, True, Kind.DASHED
            ),
            Series("ours: tokens/s", skews, [row.ours for row in rows]),
            Series(
                "ours: CPU of ranks",
                [float(row.what.split()[-1]) for row in cpu],
                [row.ours for row in cpu],
                [row.half_width or 0.0 for row in cpu],
            ),
        ],
    )
    return [panel]


# Figure 5 degree by degree, Tables I and II, and the experts of Figure 6.
PANELS = (
    *(partial(_degrees, measure) for measure in ("tfs_s", "ttp_s")),
    *(partial(_recovery, measure) for measure in ("tfs_s", "ttp_s")),
    _shares,
    _experts,
)
