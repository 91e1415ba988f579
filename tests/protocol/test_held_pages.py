"""Answers of agents to the pages that they were sent."""

import pytest

from kvrs.protocol.pages import HeldPages, StoreCode

OK, FENCED, FULL = StoreCode.OK, StoreCode.FENCED, StoreCode.FULL


@pytest.mark.parametrize(
    ("held", "taken"),
    [
        (HeldPages(OK, 7), 3),
        (HeldPages(OK, 6), 2),
        (HeldPages(OK, 4), 0),
        (HeldPages(OK, 0), 0),
        (HeldPages(OK, 9), 3),
        (HeldPages(FULL, 5), 1),
        (HeldPages(FULL, 0), 0),
        (HeldPages(FENCED, 9), 0),
    ],
)
def test_of_a_range_an_agent_has_taken_what_it_holds_of_it(held: HeldPages, taken: int) -> None:
    """Three pages from the fifth on were sent; what a later attempt has brought was not taken."""
    assert held.taken(4, 3) == taken
