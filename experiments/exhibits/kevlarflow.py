"""KevlarFlow: its figures beside ours."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.exhibits.figures import value
from experiments.kept import Results
from experiments.panels import Panel, Series
from experiments.pipelines import table1
from experiments.verdicts import Claim, Compared

TABLE_1, CAPACITY, REPLICATION = (
    f"pipelines/results/{name}.json" for name in ("table1", "capacity", "replication")
)
# The rows of Table 1 of which its text speaks, and the highest rate of each scene.
NAMED = (("1", 2.0), ("1", 8.0), ("2", 5.0), ("2", 16.0), ("3", 5.0), ("3", 7.0), ("3", 16.0))
SCENES = ("1", "2", "3")

_published = partial(value, "kevlarflow")


def knees(results: Results) -> list[Compared]:
    """The last rate before latency grows, and the first one at which requests queue."""
    found = []
    for nodes, ours in results("pipelines/results/knees.json")["knees"].items():
        limit = _published(source="Figure 3", what=f"knee of {nodes} nodes in requests/s")
        for what, rate in (("latency grows", ours["latency"][0]), ("queue", ours["queued"])):
            found.append(
                Compared(f"{what} from, {nodes} nodes", limit, rate, nothing=None, form="/s")
            )
    return found


def scenarios(results: Results) -> list[Compared]:
    """How many times as long requests take without a borrowed stage."""
    cells = results(TABLE_1)["cells"]
    shown = table1.published()
    return [
        Compared(
            f"{name} in scene {scene} at {per_s:g}/s",
            shown[scene, per_s][f"base_{key}"] / shown[scene, per_s][f"ours_{key}"],
            cells[f"{scene}:{per_s:g}:base"][key] / cells[f"{scene}:{per_s:g}:ours"][key],
            form="times",
        )
        for key, name in (("ttft_s", "TTFT"), ("latency_s", "latency"))
        for scene, per_s in NAMED
        if f"{scene}:{per_s:g}:ours" in cells
    ]


def recovery(results: Results) -> list[Compared]:
    """How much sooner the pipeline serves with a borrowed stage than with its own."""
    rows = results(CAPACITY)["rows"]
    ways: dict[str, list[float]] = {}
    for row in rows:
        ways.setdefault(row["way"], []).append(row["serves_s"])
    ours = statistics.median(
        wait / loan for wait, loan in zip(ways["wait"], ways["substitute"], strict=True)
    )
    sooner = _published(source="Abstract", what="mean time to recovery")
    return [Compared("sooner than by its own stage", sooner, ours, form="times")]


def replication(results: Results) -> list[Compared]:
    """The paper's claim is an overhead of a few percent at most."""
    return [
        Compared(
            f"latency {key}",
            1 + _published(source="Figure 9", what=f"latency {key}"),
            1 + row["change"],
            (row["interval"][1] - row["interval"][0]) / 2,
            claim=Claim.AT_MOST,
        )
        for key, row in results(REPLICATION)["latency"].items()
    ]


def headline(results: Results) -> list[Compared]:
    """The greatest published ratios of TTFT and latency, at the same rows of ours; recovery."""
    cells = results(TABLE_1)["cells"]
    shown = table1.published()
    found = []
    for key, name in (("ttft_s", "TTFT"), ("latency_s", "latency")):
        ratios = {row: each[f"base_{key}"] / each[f"ours_{key}"] for row, each in shown.items()}
        (scene, per_s), most = max(ratios.items(), key=lambda item: item[1])
        base, ours = (cells[f"{scene}:{per_s:g}:{way}"][key] for way in ("base", "ours"))
        found.append(Compared(name, most, base / ours, form="times"))
    return [*found, *(replace(each, what="recovery") for each in recovery(results))]


COMPARED: dict[str, Callable[[Results], list[Compared]]] = {
    "Figures 3, 4: baseline": knees,
    "Table 1, figures 1, 5 to 7: three scenarios": scenarios,
    "Figure 8: recovery time": recovery,
    "Figure 9: overhead of replication": replication,
}


def _scenes(results: Results) -> list[Panel]:
    cells = results(TABLE_1)["cells"]
    return [
        _scene(cells, scene, key, name)
        for key, name in (("ttft_s", "mean TTFT"), ("latency_s", "mean latency"))
        for scene in SCENES
    ]


def _scene(cells: dict[str, Any], scene: str, key: str, name: str) -> Panel:
    shown = {per_s: row for (of, per_s), row in table1.published().items() if of == scene}
    kept = sorted(
        float(cell.split(":")[1])
        for cell in cells
        if cell.split(":")[0] == scene and cell.endswith("ours")
    )
    systems = (("base", "standard behaviour"), ("ours", "KevlarFlow"))
    series = [
        Series(
            f"published: {text}",
            list(shown),
            [row[f"{way}_{key}"] for row in shown.values()],
            None,
            True,
        )
        for way, text in systems
    ] + [
        Series(f"ours: {text}", kept, [cells[f"{scene}:{per_s:g}:{way}"][key] for per_s in kept])
        for way, text in systems
    ]
    return Panel(f"Scene {scene}: {name}", "requests/s", f"{name} (s)", series, log_y=True)


# Table 1: TTFT and latency against the rate, in the three scenes.
PANELS = (_scenes,)
