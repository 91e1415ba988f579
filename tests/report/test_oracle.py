"""The oracle's counts of lost, repeated and different tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs_lab.report.oracle import Difference, compare, judge, total
from kvrs_lab.traces.records import ErrorKind, StreamRecord
from kvrs_testkit.examples import examples

CLEAN = list(range(100, 120))
tokens = st.lists(st.integers(0, 4), max_size=30)


@pytest.mark.parametrize(
    ("faulted", "expected"),
    [
        (CLEAN, Difference()),
        (CLEAN[:12], Difference(lost=8)),
        ([], Difference(lost=20)),
        (CLEAN[:5] + CLEAN[8:], Difference(lost=3)),
        (CLEAN[:7] + CLEAN[5:], Difference(repeated=2)),
        ([*CLEAN, 119], Difference(repeated=1)),
        ([*CLEAN[:4], 7, *CLEAN[5:]], Difference(different=1)),
        ([*CLEAN[:4], 7, 7, 7, *CLEAN[5:]], Difference(repeated=2, different=1)),
        ([*CLEAN[:4], 7, *CLEAN[7:]], Difference(lost=2, different=1)),
        (CLEAN[:3] + CLEAN[4:8] + CLEAN[7:], Difference(lost=1, repeated=1)),
    ],
)
def test_every_way_to_be_wrong_has_its_name(faulted: list[int], expected: Difference) -> None:
    """A hole is lost, a stutter repeated, a change different, a missing tail lost."""
    assert compare(faulted, CLEAN) == expected


@given(tokens, tokens)
@examples(300)
def test_the_counts_always_add_up(faulted: list[int], clean: list[int]) -> None:
    """len(clean) - lost + repeated == len(faulted), and only equal streams are exact."""
    difference = compare(faulted, clean)

    assert len(clean) - difference.lost + difference.repeated == len(faulted)
    assert difference.exact == (faulted == clean)
    assert difference.lost + difference.different <= len(clean)
    assert min(difference.lost, difference.repeated, difference.different) >= 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
@examples(100)
def test_a_cut_tail_is_lost_and_nothing_else(clean: list[int], data: st.DataObject) -> None:
    """Truncation must never look like a difference."""
    kept = data.draw(st.integers(0, len(clean)))

    assert compare(clean[:kept], clean) == Difference(lost=len(clean) - kept)


def record(
    index: int, token_ids: list[int], text: str = "t", finish: str | None = "length"
) -> StreamRecord:
    return StreamRecord(
        index, 0.0, 1, 9, token_ids=token_ids, text=text, finish_reason=finish, usage_tokens=9
    )


def test_streams_are_matched_by_request_and_not_by_order() -> None:
    """Both runs may be listed in any order."""
    clean = [record(0, [1, 2]), record(1, [3, 4])]

    verdicts = judge([record(1, [3, 4]), record(0, [1])], clean)

    assert [(verdict.index, verdict.exact) for verdict in verdicts] == [(1, True), (0, False)]
    assert total(verdicts) == Difference(lost=1)


def test_totals_are_the_sum_over_streams() -> None:
    """Nothing cancels out between streams."""
    rng = random.Random(5)
    clean = [record(i, [rng.randrange(5) for _ in range(20)]) for i in range(20)]
    faulted = [record(i, [rng.randrange(5) for _ in range(rng.randrange(30))]) for i in range(20)]

    summed = total(judge(faulted, clean))

    parts = [compare(f.token_ids, c.token_ids) for f, c in zip(faulted, clean, strict=True)]
    assert summed == Difference(
        sum(part.lost for part in parts),
        sum(part.repeated for part in parts),
        sum(part.different for part in parts),
    )


def test_equal_ids_with_another_text_or_end_are_not_exact() -> None:
    """A seam can break a character even when all ids are right."""
    clean = [record(0, [1], "né"), record(1, [1])]

    text, finish = judge([record(0, [1], "n\ufffd"), record(1, [1], finish="stop")], clean)

    assert (text.tokens.exact, text.text_equal, text.exact) == (True, False, False)
    assert (finish.text_equal, finish.finish_equal, finish.exact) == (True, False, False)


def test_a_clean_run_that_failed_proves_nothing() -> None:
    """Two equally broken streams are not exact, they are unverified."""
    broken = record(0, [1], finish=None)
    broken.fail(ErrorKind.TRUNCATED, "cut")

    [verdict, missing] = judge([broken, record(1, [1])], [broken])

    assert not verdict.verified
    assert not verdict.exact
    assert not missing.verified
