"""Figures in prose are those of the kept results that they name."""

import json
import re
from pathlib import Path

import pytest

from experiments import evidence, kept

EXPERIMENTS = kept.EXPERIMENTS
# Made as a whole from the kept results (tests/test_experiments.py).
PAGES = [page for page in evidence.pages() if page.name != "evidence.md"]
MARK = re.compile(r"[\d,.]+<!-- kept: [^>]+ -->")
MEASURED = re.compile(r"(?<![\w./])\d[\d,]*\.\d+(?![\w.]*\d)")
# Bars, code and links.
SET = re.compile(r"bar [\d.]+|`[^`]*`|\]\([^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_marked_figures_are_those_of_the_kept_results(page: Path) -> None:
    """`python -m experiments.run_all --readme` writes them."""
    text = page.read_text()

    assert text == kept.renewed(text)
    assert text.count("<!-- kept:") == len(kept.MARKED.findall(text)), "a mark that is none"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_measured_figure_beside_an_experiment_is_marked(page: Path) -> None:
    """In a row, a paragraph or an entry that names an experiment every figure with a decimal point
    has a mark, or is a bar or code.
    """
    unmarked = []
    for block in re.split(r"\n\n|\n(?=- |\| )", page.read_text()):
        named = re.search(r"experiments/(\w+)", block)
        if named and (EXPERIMENTS / named[1] / "results").is_dir():
            rest = SET.sub("", MARK.sub("", block))
            unmarked += MEASURED.findall(rest)

    assert unmarked == []


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept result, `a/results/a.json`."""
    figures = {"ratio": 1.2249, "rows": [{"id": "d0", "s": 2.0}, {"id": "d, 1", "s": 6000.0}]}
    path = tmp_path / "a" / "results" / "a.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(figures))
    monkeypatch.setattr(kept, "EXPERIMENTS", tmp_path)
    kept.kept.cache_clear()


@pytest.mark.parametrize(
    ("mark", "figure"),
    [
        pytest.param("ratio .2f", "1.22", id="a key"),
        pytest.param("ratio +.1f*100", "+122.5", id="a factor"),
        pytest.param("rows/0/s .0f", "2", id="an index"),
        pytest.param("rows/id=d, 1/s ,.0f", "6,000", id="an entry"),
        pytest.param("sum rows/*/s .0f", "6002", id="a sum"),
        pytest.param("median rows/*/s ,.1f", "3,001.0", id="a median"),
        pytest.param("sum\nrows/id=d,\n1/s\n.0f", "6000", id="over lines"),
        pytest.param("max rows/*/s .0f", "6000", id="the most"),
    ],
)
@pytest.mark.usefixtures("result")
def test_a_mark_names_a_figure_and_its_form(mark: str, figure: str) -> None:
    """The text around it stays as it was."""
    comment = f"<!-- kept: a/results/a.json {mark} -->"

    assert kept.renewed(f"It took 9.9{comment} s, or 3.") == f"It took {figure}{comment} s, or 3."


@pytest.mark.parametrize("where", ["none", "rows", "rows/7/s", "rows/*/s", "rows/id=none/s", "id"])
@pytest.mark.usefixtures("result")
def test_a_mark_without_its_figure_is_refused(where: str) -> None:
    """It is named, with the result."""
    with pytest.raises(ValueError, match=r"a/results/a.json: got .*; allowed: "):
        kept.renewed(f"1<!-- kept: a/results/a.json {where} .0f -->")


@pytest.mark.usefixtures("result")
def test_a_mark_without_its_result_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b/results/b.json: got x; allowed: "):
        kept.renewed("1<!-- kept: b/results/b.json x .0f -->")
