"""The rows, the first claim and the picture of a paper, by the results of a run."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments import pictures
from experiments.exhibits import INCOMPLETE, PAPERS, headline_of, panels_of, rows_of
from experiments.kept import EXPERIMENTS, Results, misses_in

Row = dict[str, Any]


def figures_of(paper: str, root: Path) -> dict[str, Any]:
    """The first claim and every exhibit of a paper, by the results below `root`, which is laid out
    like experiments/. Without the results of the claim there is none.
    """
    results = Results(root)
    rows = [_of_root(row, root) for row in rows_of(paper, results)]
    found: dict[str, Any] = {"rows": rows}
    with suppress(*INCOMPLETE):
        found["headline"] = headline_of(paper, results)
    return found


def _of_root(row: Row, root: Path) -> Row:
    """The row without what `rows_of` knows of the kept results alone."""
    if root.resolve() == EXPERIMENTS.resolve():
        return row
    text = (root / row["result"]).with_suffix(".txt")
    missed = misses_in(text.read_text()) if text.is_file() else []
    return row | {"bars_missed": missed, "note": ""}


def draw(paper: str, root: Path, out: Path) -> bool:
    """Draw the picture of a paper; False: no panel has its results."""
    panels = panels_of(paper, Results(root))
    if panels:
        pictures.write(panels, out)
    return bool(panels)


def as_text(paper: str, figures: Mapping[str, Any]) -> str:
    """The claim and the rows for readers, an exhibit with its comparisons each."""
    lines = [f"{PAPERS[paper].title}: {len(figures['rows'])} exhibits"]
    if (headline := figures.get("headline")) is not None:
        lines.append(f"claim: {headline['claim']}: {headline['verdict']}")
        lines += _comparisons(headline["compared"])
    for row in figures["rows"]:
        lines.append(f"{row['exhibit']}: {row['verdict']} ({row['how']})")
        lines += _comparisons(row["compared"])
        lines += [f"    bar: {each}" for each in row["bars_missed"]]
        lines += [f"    {row['why']}"] * (not row["compared"])
    return "\n".join(lines) + "\n"


def _comparisons(compared: Sequence[Mapping[str, str]]) -> list[str]:
    return [
        f"    {each['what']}: published {each['published']}, ours {each['ours']}"
        for each in compared
    ]
