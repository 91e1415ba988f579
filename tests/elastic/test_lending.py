"""Terms of loans between instances of a group."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs_engine.elastic.lending import LEND_PAGES, BusyShare, Lender, terms

LENDER = Lender(pages=100, spare_pages=80, lent_pages=0, busy=0.2, least_gain=0.1)


def lender(**changed: object) -> Lender:
    return replace(LENDER, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "wanted", "lent"),
    [
        ({}, (100, 10, 0.5), 50),
        ({}, (30, 10, 0.5), 30),
        ({"spare_pages": 20}, (100, 10, 0.5), 20),
        ({"lent_pages": 30}, (100, 10, 0.5), 20),
        ({"busy": 1.0}, (100, 10, 0.0), 50),  # Its own stage had nothing to do.
        ({"busy": 0.8}, (100, 10, 1.0), 50),
    ],
)
def test_a_loan_is_as_large_as_wanted_and_as_allowed(
    changed: dict[str, object], wanted: tuple[int, int, float], lent: int
) -> None:
    assert terms(lender(**changed), *wanted) == lent


@pytest.mark.parametrize(
    ("changed", "wanted", "reason"),
    [
        ({"refusal": "the instance is draining"}, (100, 10, 0.5), "the instance is draining"),
        ({"spare_pages": 9}, (100, 10, 0.5), "9 pages could be lent; allowed: 10 or more"),
        ({"lent_pages": 41}, (100, 10, 0.5), "9 pages could be lent"),
        ({"busy": 0.95}, (100, 10, 0.9), r"computes 95% of the time, .* gain of 0.06; allowed"),
    ],
)
def test_a_loan_is_refused_with_what_is_allowed(
    changed: dict[str, object], wanted: tuple[int, int, float], reason: str
) -> None:
    found = terms(lender(**changed), *wanted)
    assert isinstance(found, str)
    assert re.search(reason, found)


@given(
    pages=st.integers(1, 1000),
    spare=st.integers(0, 1000),
    lent=st.integers(0, 1000),
    wanted=st.integers(1, 1000),
    least=st.integers(1, 1000),
)
def test_no_loan_is_beyond_what_is_spare_allowed_or_wanted(
    pages: int, spare: int, lent: int, wanted: int, least: int
) -> None:
    one = lender(pages=pages, spare_pages=spare, lent_pages=lent)
    found = terms(one, wanted, min(least, wanted), 0.5)
    if isinstance(found, int):
        assert min(least, wanted) <= found <= min(wanted, spare)
        assert found + lent <= LEND_PAGES * pages


def test_the_busy_share_is_that_of_the_last_seconds() -> None:
    busy = BusyShare(ranks=2)
    assert busy.share(0.0) == 0.0
    for at in range(11):
        busy.note(float(at), 1.0 * at)  # Both ranks half of the time.
    assert busy.share(10.0) == pytest.approx(0.5)
    for at in range(11, 21):
        busy.note(float(at), 10.0 + 2.0 * (at - 10))
    assert busy.share(20.0) == pytest.approx(1.0)
    assert busy.share(22.5) == pytest.approx(0.5, abs=0.15)  # Nothing was heard since.
    assert busy.share(30.0) == 0.0


def test_the_busy_share_of_another_process_begins_anew() -> None:
    busy = BusyShare(ranks=1)
    busy.note(0.0, 100.0)
    busy.note(1.0, 100.5)
    busy.note(2.0, 0.1)
    busy.note(3.0, 0.6)
    assert busy.share(3.0) == pytest.approx(0.5)
