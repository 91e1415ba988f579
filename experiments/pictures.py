"""Pictures of the evidence as SVG: published points in grey, ours in colour with intervals.

    from experiments import kept, pictures

    pictures.draw("lumen", kept.Results(), Path("lumen.svg"))

The same data give the same bytes with the same matplotlib: no date, a fixed salt for identifiers.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from experiments.exhibits import panels_of
from experiments.kept import Results
from experiments.panels import Kind, Panel, Series, digest

_GREYS = ("#6f7683", "#a9afb9", "#484e59")
_COLORS = ("#1f6fec", "#d97707", "#16815a", "#7c5cd7", "#c22b33", "#0e7490")
_MARKS = ("o", "s", "^", "D", "v", "P")
_INK, _LINE = "#1d2431", "#d9dee8"
_WIDTH_IN, _HEIGHT_IN, _MOST_COLUMNS = 3.9, 3.1, 3
# Coordinates: hundredths of a point are enough.
_ATTRIBUTE, _LONG = re.compile(r'="[^"]*"'), re.compile(r"(\.\d\d)\d+")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvrs",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#8a92a0",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.7,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "lines.markersize": 5,
    "errorbar.capsize": 2.5,
}


def draw(paper: str, results: Results, out: Path) -> None:
    """Write the picture of a paper, of the panels whose results there are."""
    write(panels_of(paper, results), out)


def write(panels: Sequence[Panel], out: Path) -> None:
    """Draw the panels to a file of SVG that names their digest."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_svg(panels))


@mpl.rc_context(_STYLE)
def as_svg(panels: Sequence[Panel]) -> str:
    """Draw the panels side by side, with one legend below them."""
    columns = min(_MOST_COLUMNS, len(panels)) or 1
    rows = -(-len(panels) // columns)
    width = _WIDTH_IN * (columns if columns > 1 else 2.3)
    names = [name for panel in panels for name in _names(panel)]
    names = list(dict.fromkeys(names))
    longest = max(map(len, names), default=0)
    legend_columns = max(1, min(len(names), int(72 * width / (40 + 6.2 * longest))))
    legend_rows = -(-len(names) // legend_columns)
    figure = Figure(figsize=(width, _HEIGHT_IN * rows + 0.25 * legend_rows), layout="constrained")
    looks = _looks(panels)
    for place, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(rows, columns, place), panel, looks)
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=legend_columns,
    )
    file = io.StringIO()
    described = {"Date": None, "Creator": None, "Description": f"data {digest(panels)}"}
    figure.savefig(file, format="svg", metadata=described, facecolor="white")
    drawn = _ATTRIBUTE.sub(lambda found: _LONG.sub(r"\1", found[0]), file.getvalue())
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def _names(panel: Panel) -> list[str]:
    return [each.name for each in panel.series]


def _looks(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    """Colour and mark of each series by its name, the same in all panels."""
    looks: dict[str, tuple[str, str]] = {}
    counts = {True: 0, False: 0}
    for series in (each for panel in panels for each in panel.series):
        if series.name not in looks:
            number = counts[series.published]
            palette = _GREYS if series.published else _COLORS
            looks[series.name] = (palette[number % len(palette)], _MARKS[number % len(_MARKS)])
            counts[series.published] += 1
    return looks


def _draw_panel(axes: Axes, panel: Panel, looks: dict[str, tuple[str, str]]) -> None:
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.log_x:
        axes.set_xscale("log", base=2)
    if panel.log_y:
        axes.set_yscale("log")
    if panel.limits:
        axes.set_ylim(*panel.limits)
    if panel.falling:
        axes.invert_xaxis()
    bars = [each for each in panel.series if each.kind is Kind.BARS]
    if panel.stacked:
        _stack(axes, bars, looks)
        return
    for number, each in enumerate(bars):
        _draw_bars(axes, each, looks[each.name][0], number, len(bars))
    for number, each in enumerate(each for each in panel.series if each.kind is not Kind.BARS):
        # Intervals at one place of a logarithmic axis stand side by side.
        aside = 2.0 ** (0.06 * (number - 2)) if panel.log_x and each.half else 1.0
        _draw_line(axes, each, *looks[each.name], aside)
    if bars:
        _name_categories(axes, bars)
    elif panel.log_x:
        places = sorted({float(x) for each in panel.series for x in each.x})
        axes.set_xticks(places[:: -(-len(places) // 8)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if panel.log_y:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _categories(bars: Sequence[Series]) -> list[str]:
    return list(dict.fromkeys(str(x) for each in bars for x in each.x))


def _name_categories(axes: Axes, bars: Sequence[Series]) -> None:
    names = _categories(bars)
    is_long = any("\n" in name for name in names)
    axes.set_xticks(range(len(names)), names, fontsize=8 if is_long else None)
    axes.grid(visible=False, axis="x")


def _draw_bars(axes: Axes, series: Series, color: str, number: int, of: int) -> None:
    """Draw one series of groups of bars; the figure stands on each bar."""
    width = 0.84 / of
    names = _categories([series])
    places = np.array([names.index(str(x)) for x in series.x]) + width * (number - (of - 1) / 2)
    drawn = axes.bar(places, series.y, 0.92 * width, yerr=series.half, color=color, ecolor=_INK)
    drawn.set_label(series.name)
    axes.bar_label(drawn, [f"{value:.3g}" for value in series.y], padding=1, fontsize=7)
    axes.margins(y=0.12)


def _draw_line(axes: Axes, series: Series, color: str, mark: str, aside: float) -> None:
    if series.kind is Kind.BAND:
        low, high = min(series.y), max(series.y)
        axes.axhspan(low, high, color=color, alpha=0.35, lw=0, label=series.name)
        return
    is_dashed = series.kind is Kind.DASHED
    axes.errorbar(
        [float(x) * aside for x in series.x],
        series.y,
        yerr=series.half,
        color=color,
        marker=None if is_dashed else mark,
        linestyle="--" if is_dashed else "-",
        linewidth=1.4,
        label=series.name,
        zorder=2 if series.published else 3,
    )


def _stack(axes: Axes, bars: Sequence[Series], looks: dict[str, tuple[str, str]]) -> None:
    """Lay the bars on their side, one series behind the other, with the number in each part."""
    names = _categories(bars)
    ends = np.zeros(len(names))
    for each in bars:
        counts = np.array([dict(zip(each.x, each.y, strict=True)).get(name, 0) for name in names])
        drawn = axes.barh(names, counts, 0.72, left=ends, color=looks[each.name][0])
        drawn.set_label(each.name)
        inside = [f"{count:g}" if count else "" for count in counts]
        axes.bar_label(drawn, inside, label_type="center", color="white", fontsize=9)
        ends += counts
    axes.set_xlim(0, 1.03 * max(ends, default=1.0))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
