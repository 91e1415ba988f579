"""Verdicts of the evidence: how they follow from figures, that each row has one, and that no missed
bar is hidden.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import evidence, exhibits
from experiments.exhibits import EXAMPLES, NO_CAUSE, PAPERS, Exhibit, How
from experiments.exhibits.figures import published
from experiments.kept import EXPERIMENTS, misses, misses_in
from experiments.programs import ALL
from experiments.verdicts import (
    MEANING,
    Claim,
    Compared,
    Headline,
    Verdict,
    change,
    each_of,
    headline,
    of_all,
)
from kvrs_lab.report.student import Interval

pytestmark = pytest.mark.nightly

ROWS = [each for paper in PAPERS.values() for each in paper.exhibits]
FILLED = [each for each in ROWS if each.found()]
RATIOS = st.floats(0.01, 100.0)


def compared(
    published: float, ours: float, half: float | None = None, nothing: float | None = 1.0
) -> Verdict:
    return Compared("a", published, ours, half, nothing).verdict()


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        pytest.param(compared(0.56, 0.73, 0.06), Verdict.DIRECTION, id="less of it"),
        pytest.param(compared(0.56, 0.65, 0.10), Verdict.REPRODUCED, id="in the interval"),
        pytest.param(compared(1.71, 1.72), Verdict.REPRODUCED, id="near, one run"),
        pytest.param(compared(1.086, 1.016, 0.01), Verdict.DIRECTION, id="near as a ratio only"),
        pytest.param(compared(20.0, 14.0, 0.5), Verdict.DIRECTION, id="near as neither"),
        pytest.param(compared(1.086, 1.058, 0.115), Verdict.UNDECIDED, id="none and published"),
        pytest.param(compared(0.5, 1.4, 0.2), Verdict.CONTRADICTED, id="the other way"),
        pytest.param(compared(1.0, 1.01, 0.03), Verdict.REPRODUCED, id="no effect, as claimed"),
        pytest.param(
            compared(1.0, 1.05, 0.049), Verdict.CONTRADICTED, id="an effect where none is"
        ),
        pytest.param(compared(0.95, 0.87, 0.0, None), Verdict.REPRODUCED, id="a share"),
        pytest.param(compared(0.95, 0.5, 0.0, None), Verdict.CONTRADICTED, id="another share"),
    ],
)
def test_a_verdict_follows_from_interval_and_ratio(found: Verdict, verdict: Verdict) -> None:
    assert found is verdict


@pytest.mark.parametrize(
    ("half", "claim", "verdict"),
    [
        pytest.param(0.01, Claim.AT_MOST, Verdict.REPRODUCED, id="below"),
        pytest.param(0.05, Claim.AT_MOST, Verdict.UNDECIDED, id="the limit in the interval"),
        pytest.param(0.01, Claim.AT_LEAST, Verdict.CONTRADICTED, id="beyond"),
    ],
)
def test_a_published_limit_is_kept_by_the_whole_interval(
    half: float, claim: Claim, verdict: Verdict
) -> None:
    found = Compared("a", 1.028, 1.0, half, claim=claim)

    assert found.verdict() is verdict
    assert replace(found, published=None, bar=1.028).verdict() is (
        Verdict.KEPT_BAR if verdict is Verdict.REPRODUCED else Verdict.MISSED_BAR
    )


def test_a_published_figure_below_what_its_own_equation_allows_is_unattainable() -> None:
    """The paper's 8.9 % of a full reload, where its equation asks for 12.5 %."""
    found = Compared("reload", 0.089, 0.125, nothing=1.0, least=0.125)

    assert found.verdict() is Verdict.UNATTAINABLE
    assert replace(found, published=0.13).verdict() is Verdict.REPRODUCED
    assert of_all([found, Compared("same", 2.0, 2.0)]) is Verdict.UNATTAINABLE


def test_settings_of_what_has_no_effect_are_compared_without_power() -> None:
    """Depths of drafts that change nothing are equal in every run."""
    equal = [Compared("depth 2", 1.0, 1.001, 0.01)]

    assert of_all(equal, Compared("drafts", 0.77, 1.0, 0.02)) is Verdict.NO_POWER
    assert of_all(equal, Compared("drafts", 0.77, 0.9, 0.02)) is Verdict.REPRODUCED


def test_a_headline_holds_as_its_comparisons_do() -> None:
    assert headline(Verdict.REPRODUCED) is Headline.HOLDS
    assert headline(Verdict.DIRECTION) is Headline.DIRECTION
    assert headline(Verdict.UNDECIDED) is headline(Verdict.CONTRADICTED) is Headline.NOT_SHOWN
    assert headline(Verdict.MISSING) is Headline.CANNOT


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (Compared("a", 0.556, 0.6, 0.1), ("-44.4%", "-40.0% ± 10.0%")),
        (Compared("a", 0.95, 0.94, nothing=None, form="share"), ("95.0%", "94.0%")),
        (Compared("a", 2.0, 1483.0, form="times"), ("2x", "1,483x")),
        (Compared("a", 20.0, 14.0, claim=Claim.AT_LEAST, form="s"), ("≥ 20 s", "14 s")),
        (Compared("a", None, 0.2, bar=1, claim=Claim.AT_MOST, form="ms"), ("bar ≤ 1 ms", "0.2 ms")),
    ],
)
def test_figures_are_shown_in_their_form(found: Compared, shown: tuple[str, str]) -> None:
    assert found.shown() == shown


@given(RATIOS, RATIOS, st.floats(0.0, 10.0))
def test_nothing_is_reproduced_where_no_effect_is_possible(
    published: float, ours: float, half: float
) -> None:
    """An interval that has no effect in it shows none, whatever else lies in it."""
    found = compared(published, ours, half)

    if ours - half <= 1.0 <= ours + half and published != 1.0:
        assert found is Verdict.UNDECIDED


def test_the_middle_of_several_comparisons_is_the_verdict() -> None:
    """The weaker one of two; a contradiction decides alone."""
    same, less, none, other = (
        Compared("same", 2.0, 2.0),
        Compared("less", 2.0, 1.5),
        Compared("none", 2.0, 1.5, 0.6),
        Compared("other", 2.0, 0.5),
    )

    assert of_all([same, less]) is Verdict.DIRECTION
    assert of_all([none, same, less]) is Verdict.DIRECTION
    assert of_all([none, same, none, less]) is Verdict.UNDECIDED
    assert of_all([same, same, other]) is Verdict.CONTRADICTED
    assert each_of([none, same, less]) == ("reproduced: same; direction: less; undecided: none")
    assert each_of([same, same]) == "same, same"
    assert change("a", -0.4, Interval(-0.3, 0.1, 5)) == Compared("a", 0.6, 0.7, 0.1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_a_verdict_and_says_why(row: Exhibit) -> None:
    """A verdict is computed where something is measured; what is not reproduced has its cause."""
    found = row.row()

    assert row.verdict() in MEANING
    assert row.judged in (None, *EXAMPLES)
    assert (row.compared is None) == (row.how is How.MISSING)
    assert found["grounds"] or row.judged or row.verdict() is Verdict.MISSING
    assert row.why
    if row.verdict() not in NO_CAUSE:
        assert found["cause"], "the cause, as measured"


@pytest.mark.parametrize("row", FILLED, ids=lambda row: row.name)
def test_no_row_hides_a_bar_that_its_result_misses(row: Exhibit) -> None:
    """A miss in the text of a kept result stands in the data of the row."""
    assert row.row()["bars_missed"] == (misses(row.result) if row.result else [])
    assert row.result or row.how is How.COMPUTED, "a figure without the result that it comes from"


def test_no_figure_of_the_page_is_typed() -> None:
    """Published figures are data, and ours are computed of results whose programs can be run."""
    programs = {
        str(path.relative_to(EXPERIMENTS)) for each in ALL if each.command for path in each.paths
    }

    assert {row.result for row in ROWS if row.result} <= programs
    for rows in (paper["rows"] for paper in exhibits.DATA.values()):
        assert not {key for row in rows for key in row} & {"ours", "published"}
    for name, module in exhibits.MODULES.items():
        assert set(module.COMPARED) <= {row.name for row in PAPERS[name].exhibits}
        assert all(row["source"] and float(row["value"]) >= -1 for row in published(name))


@pytest.mark.parametrize("paper", PAPERS)
def test_a_headline_has_the_claim_and_ours(paper: str) -> None:
    """Each figure of the claim is the published one of a comparison."""
    found = exhibits.headline_of(paper)

    assert PAPERS[paper].claim.count("{") <= len(found["compared"])
    assert found["verdict"] in tuple(Headline)
    assert found["command"].endswith(paper)


def test_a_row_tells_its_age_and_of_how_many_runs_it_is() -> None:
    """One whose result is computed as the page is made has no age."""
    alone = Exhibit("a", How.SIMULATED, "b", result="lumen/results/processes.json")
    computed = next(each for each in FILLED if each.result is None)

    assert alone.note.startswith("measured on 20")
    assert computed.note == ""


def test_runs_on_machines_that_differ_are_named() -> None:
    first = {"commit": "a", "machine": "2 cores, Red, Linux x86_64"}
    other = {"commit": "a", "machine": "2 cores, Blue, Linux x86_64"}

    assert exhibits.parts_of([first]) == ""
    assert exhibits.parts_of([first, first]) == "put together from 2 runs"
    assert exhibits.parts_of([first, other]) == (
        "put together from 2 runs on machines of 2 kinds (Red and Blue)"
    )
    assert exhibits.parts_of([first, first | {"commit": "b"}]) == (
        "put together from 2 runs at 2 commits"
    )


def test_the_page_counts_verdicts() -> None:
    """The rows that measure something are counted."""
    page = evidence.as_markdown()
    rows = [row for row in evidence.data()["rows"] if row["verdict"] not in EXAMPLES]

    for verdict, count in Counter(row["verdict"] for row in rows).items():
        assert f"| {verdict} | {count} | " in page
    assert f"of {len(rows)} rows" in page


def test_every_kept_result_that_misses_a_bar_is_listed() -> None:
    """Also one that no exhibit shows."""
    page = evidence.as_markdown().partition("### Kept results that miss a bar")[2]

    texts = [
        path
        for path in EXPERIMENTS.glob("*/results/**/*.txt")
        if any(word in path.read_text() for word in ("MISSED", "FAILED", "   missed\n"))
    ]
    names = {
        f"{path.relative_to(EXPERIMENTS).parts[0]}/"
        f"{'/'.join(path.relative_to(EXPERIMENTS).with_suffix('').parts[2:])}"
        for path in texts
    }
    assert names
    assert f"\n{len(names)} of them;" in page
    assert all(f"[{name}](" in page for name in names)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("a 1\nPASSED\n", [], id="none"),
        pytest.param("a 1\nMISSED: p99 3 ms; bar 2\n", ["p99 3 ms; bar 2"], id="named"),
        pytest.param("a 1\nb   2; bar 1\nFAILED\n", ["b 2; bar 1"], id="before"),
        pytest.param("a 1\n\nMISSED\nb 2; bar 1\n\nc 9; bar\n", ["b 2; bar 1"], id="behind"),
        pytest.param("a 1.5 <= 1 x    missed\n", ["a 1.5 <= 1 x missed"], id="in a table"),
        pytest.param("2 of 3 instances have failed\n", [], id="another failure"),
    ],
)
def test_a_missed_bar_is_found_in_the_text_of_a_result(text: str, found: list[str]) -> None:
    assert misses_in(text) == found
