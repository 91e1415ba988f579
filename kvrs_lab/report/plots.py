"""The timeline of the report, as inline SVG in the reader's colour scheme.

The colours are CSS variables. matplotlib knows no CSS: it draws in stand-in colours, which are
replaced in the SVG text.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from kvrs_lab.report.report import Report
from kvrs_lab.report.style import OPTION_COLORS
from kvrs_lab.report.table import fault_label

# Stand-in colour by CSS variable; all must differ.
_COLORS = {
    "ink": "#1d2431",
    "soft": "#667086",
    "line": "#d9dee8",
    "base": "#a3acbc",
    "tokens": "#4a5569",
    "fault": "#c22b33",
    **{option.value: light for option, (light, _) in OPTION_COLORS.items()},
}
_LETTER_SHARE = 0.0072  # Largest share of the timeline's width for a letter of a label.
_LABEL_SHARE = 0.08  # Least distance of two labels, as a share of the timeline's width.
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _COLORS["ink"],
    "axes.labelcolor": _COLORS["soft"],
    "axes.edgecolor": _COLORS["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _COLORS["line"],
    "grid.linewidth": 0.6,
    "xtick.color": _COLORS["soft"],
    "ytick.color": _COLORS["soft"],
    "legend.frameon": False,
    "path.simplify": False,
}


_styled = mpl.rc_context(_STYLE)  # Decorator: each call draws in this style.


@_styled
def timeline_svg(report: Report) -> str:
    """Draw the streams by arrival, the first on top, with the times of the faulted run."""
    streams = sorted(report["per_stream"], key=lambda stream: (stream["due_s"], stream["index"]))
    row_of = {stream["index"]: row for row, stream in enumerate(streams)}
    height = min(8.0, max(2.4, 1.2 + 0.09 * len(streams)))  # Inches.
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.add_subplot()
    lives = [
        ((stream["sent_s"], row), (stream["ended_s"], row)) for row, stream in enumerate(streams)
    ]
    ticks = [
        ((t, row - 0.36), (t, row + 0.36))
        for row, stream in enumerate(streams)
        for t in stream["token_times_s"]
    ]
    _strokes(axes, lives, "base", width=0.8)
    _strokes(axes, ticks, "tokens", width=0.7, alpha=0.55)
    _draw_pauses(axes, report, row_of)
    _draw_faults(axes, report)
    axes.set_xlim(left=0, right=_ended_s(report) * 1.02)
    axes.set_ylim(len(streams) + 0.2, -1.2)
    axes.set_xlabel("seconds since the start of the run")
    axes.set_ylabel(f"{len(streams)} streams by arrival")
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper left", ncols=4)
    return _svg(figure)


def _ended_s(report: Report) -> float:
    return max((stream["ended_s"] for stream in report["per_stream"]), default=1.0)


def _no_formula(text: str) -> str:
    """Escape the dollar sign, which would begin a formula."""
    return text.replace("$", r"\$")


def _strokes(
    axes: Axes,
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]],
    color: str,
    width: float,
    alpha: float = 1.0,
) -> None:
    """Draw many straight strokes as one path, which takes a tenth of the bytes of SVG elements."""
    if not lines:
        return
    points = np.array(lines, dtype=float).reshape(-1, 2)
    codes = np.tile([Outline.MOVETO, Outline.LINETO], len(lines))
    style = {"edgecolor": _COLORS[color], "linewidth": width, "alpha": alpha}
    axes.add_patch(PathPatch(Outline(points, codes), fill=False, **style))


def _draw_pauses(axes: Axes, report: Report, row_of: dict[int, int]) -> None:
    # The last recovery in a pause brought the token.
    rows = {
        (row["index"], row["pause_to_s"]): row
        for row in report["recovery_rows"]
        if row["index"] is not None and row["pause_s"] is not None
    }
    for option in sorted({row["option"] for row in rows.values()}):
        own = [row for row in rows.values() if row["option"] == option]
        heights = [row_of[row["index"]] for row in own]
        starts, ends = [row["pause_from_s"] for row in own], [row["pause_to_s"] for row in own]
        style: dict[str, Any] = {"linewidth": 2.6, "label": f"pause, {option}", "zorder": 3}
        axes.hlines(heights, starts, ends, colors=_COLORS[option], **style)


def _draw_faults(axes: Axes, report: Report) -> None:
    ends_s = _ended_s(report)
    groups: list[tuple[float, list[str]]] = []
    for fault in sorted(report["faults"], key=lambda fault: float(fault["at_s"])):
        axes.axvline(fault["at_s"], color=_COLORS["fault"], linewidth=1.2, zorder=4)
        # Faults at about the same time share a label, since labels would overlap.
        if not groups or fault["at_s"] - groups[-1][0] > _LABEL_SHARE * ends_s:
            groups.append((fault["at_s"], []))
        groups[-1][1].append(fault_label(fault))
    taken = 0.0  # End of the last label, as a share of the width.
    high = False
    for at_s, labels in groups:
        text = _no_formula(", ".join(labels))
        late = at_s > ends_s / 2
        at, width = at_s / ends_s, _LETTER_SHARE * len(text)
        # A label that would overlap the previous one goes above it.
        high = not high and (at - width if late else at) < taken
        taken = max(taken, at if late else at + width)
        axes.annotate(
            text,
            (at_s, -0.4),
            xytext=(-4 if late else 4, 10 if high else 0),
            textcoords="offset points",
            color=_COLORS["fault"],
            fontsize=8,
            zorder=5,
            horizontalalignment="right" if late else "left",
        )


def _svg(figure: Figure) -> str:
    """Inline SVG without prologue and metadata, with colours by variable."""
    target = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "timeline"}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", '<svg role="img" aria-label="timeline"', 1)
    for variable, color in _COLORS.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg
