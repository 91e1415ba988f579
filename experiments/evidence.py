"""Tables and figures of the five papers beside ours: docs/evidence.md, its pictures and its data.

    python -m experiments.run_all --readme  # Writes them anew, and marked figures in other pages.

A cell of the page is short; evidence.json has every comparison, its reason and its age.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import kept, pictures
from experiments.exhibits import EXAMPLES, PAPERS, How, headline_of, panels_of, rows_of
from experiments.panels import Kind, Panel, Series
from experiments.verdicts import MEANING, Verdict

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
OVERVIEW = "rows"
MOST_LETTERS = 100  # Of a cell.

_HEADER = """# Evidence: five papers, and ours beside them

kvrs unites five systems. No paper's hardware was at hand, so ratios and orders can be compared,
seconds cannot. The first claim of each paper, with the command that measures ours:
"""

_ROWS = """
The rows that compare a figure of ours with a published one, by verdict and by how ours came about
(real: timed processes of a small model; paced: real processes, engines sleep the times of a
profile; simulated: the product's decisions in virtual time; computed: its code, without time):
"""

_READING = """
Of several comparisons of a row the middle one is its verdict, the weaker one of two; one that
contradicts the publication, or is unattainable, decides. Ours are in the order of the published
figures; an interval is that of a mean over runs (95 %, Student). `(+2)` stands for two more:
[evidence.json](evidence.json) has all, with the reasons, the cause of each row that is not
reproduced, and the age of each result. A dagger (†) stands at a result since which a sentinel of
the code has moved; a run is void that shared the machine with others. In LUMEN's rows 8x2 means
that two of eight workers fail; `10x1:1.2` has another rate of a worker. Mechanisms that differ:
[papers](research/papers.md). Rows that measure nothing, and results that miss a bar of our own,
are in the [appendix](#appendix). `python -m experiments.run_all --readme` makes the page.
"""

_APPENDIX = """## Appendix

Examples and formulas of the papers, computed by the product's code, and figures that were put in:
nothing is measured.
"""


def data() -> dict[str, Any]:
    """All of evidence.json."""
    return {
        "headlines": [headline_of(name) for name in PAPERS],
        "rows": [
            {"paper": about.title} | row for name, about in PAPERS.items() for row in rows_of(name)
        ],
    }


def as_json() -> str:
    return json.dumps(data(), indent=1, ensure_ascii=False) + "\n"


def as_markdown() -> str:
    found = data()
    rows = found["rows"]
    shown = [row for row in rows if not _is_example(row)]
    parts = [
        _HEADER,
        _headlines(found["headlines"]),
        _ROWS,
        _picture(OVERVIEW, "rows by verdict and by how"),
        _meanings(shown),
        _READING,
    ]
    for name, about in PAPERS.items():
        parts += [
            f"## {about.title}",
            _picture(name, f"{about.title}: published points in grey, ours in colour"),
            _table(row for row in shown if row["paper"] == about.title),
        ]
    parts += [_APPENDIX, _table(filter(_is_example, rows)), _missed_bars()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _is_example(row: Mapping[str, Any]) -> bool:
    return row["verdict"] in EXAMPLES


def _picture(name: str, text: str) -> str:
    return f"![{text}](pictures/{name}.svg)"


def _lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *lines])


def _headlines(found: Iterable[Mapping[str, Any]]) -> str:
    return _lines(
        ("paper", "its claim", "ours", "verdict", "command"),
        (
            (
                f"[{each['paper']}](#{_anchor(each['paper'])})",
                each["claim"],
                "; ".join(f"{found['what']}: {found['ours']}" for found in each["compared"]),
                f"**{each['verdict']}**",
                f"`{each['command']}`",
            )
            for each in found
        ),
    )


def _anchor(title: str) -> str:
    return "".join(each for each in title.lower().replace(" ", "-") if each not in "()")


def _meanings(shown: Sequence[Mapping[str, Any]]) -> str:
    """The verdicts that the rows have."""
    count = Counter(row["verdict"] for row in shown)
    return _lines(
        ("verdict", f"of {len(shown)} rows", ""),
        (
            (verdict, str(count[verdict]), text)
            for verdict, text in MEANING.items()
            if count[verdict]
        ),
    )


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    return _lines(
        ("exhibit", "published", "ours", "verdict", "how", "experiment"),
        (
            (
                row["exhibit"],
                *_cells(row["compared"]),
                verdict_of(row),
                row["how"],
                _link(row["experiment"]),
            )
            for row in rows
        ),
    )


def verdict_of(row: Mapping[str, Any]) -> str:
    """The verdict, the parameters that were fitted, and how far the run can be relied on."""
    number, verdict = row["fitted"], row["verdict"]
    plural = "s" if number > 1 else ""
    is_shown = number and verdict == Verdict.REPRODUCED
    fitted = f", {number} parameter{plural} fitted" if is_shown else ""
    void = ", but the run is void" if row["note"].startswith("void") else ""
    return f"**{verdict}**{fitted}{void}{' †' if 'sentinel' in row['note'] else ''}"


def _link(folder: str) -> str:
    return "-" if folder == "-" else f"[{folder}](../experiments/{folder})"


def _cells(compared: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Published figures with their names, and ours in the same order, as many as have room."""
    number = len(compared)
    while (cells := _joined(compared, number)) and max(map(len, cells)) > MOST_LETTERS > number > 1:
        number -= 1
    return cells


def _joined(compared: Sequence[Mapping[str, str]], number: int) -> tuple[str, str]:
    shown = compared[:number]
    published = "; ".join(f"{each['what']} {each['published']}" for each in shown)
    rest = f" (+{len(compared) - number})" if number < len(compared) else ""
    return (published or "-") + rest, "; ".join(each["ours"] for each in shown) or "-"


def _missed_bars() -> str:
    """Every kept result whose text says that it misses a bar of our own, shown above or not."""
    found = []
    for text in sorted(kept.EXPERIMENTS.glob("*/results/**/*.txt")):
        path = text.relative_to(kept.EXPERIMENTS)
        if missed := kept.misses(str(path)):
            name = f"{path.parts[0]}/{'/'.join(path.with_suffix('').parts[2:])}"
            found.append((f"[{name}](../experiments/{path})", str(len(missed))))
    return "\n\n".join(
        [
            "### Kept results that miss a bar of our own",
            f"{len(found)} of them; the text of each names its bars. Bars that were missed by\n"
            "programs that are gone: [measured once](research/measured.md).",
            _lines(("result", "bars missed"), found),
        ]
    )


def overview() -> list[Panel]:
    """The rows that measure something, by verdict and by how."""
    rows = [row for name in PAPERS for row in rows_of(name) if not _is_example(row)]
    count = Counter((row["how"], row["verdict"]) for row in rows)
    verdicts = [each for each in MEANING if any(row["verdict"] == each for row in rows)]
    series = [
        Series(how, verdicts, [count[how, each] for each in verdicts], kind=Kind.BARS)
        for how in How
        if any(row["how"] == how for row in rows)
    ]
    return [Panel(f"{len(rows)} rows of five papers", "rows", "", series, stacked=True)]


def panels() -> dict[str, list[Panel]]:
    """All pictures of the page, by the names of their files."""
    return {OVERVIEW: overview()} | {name: panels_of(name) for name in PAPERS}


def pages() -> list[Path]:
    """Pages whose marked figures come from kept results."""
    return [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]


def renew() -> None:
    """Write the page, its data and its pictures, and the marked figures of all pages."""
    (DOCS / "evidence.md").write_text(as_markdown())
    (DOCS / "evidence.json").write_text(as_json())
    for name, found in panels().items():
        pictures.write(found, PICTURES / f"{name}.svg")
    for path in pages():
        before = path.read_text()
        after = kept.renewed(before)
        if after != before:
            path.write_text(after)
