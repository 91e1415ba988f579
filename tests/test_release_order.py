"""The order in which pages and slots are evicted."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.release_order import ReleaseOrder

NUMBERS = st.integers(0, 9) | st.sampled_from([255, 256, 1023])  # Arrays grow by 256.
STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard", "pop_first"]), NUMBERS))


@given(STEPS)
def test_numbers_leave_in_the_order_in_which_they_came(steps: list[tuple[str, int]]) -> None:
    """A number that is taken out and added again is the last one."""
    order, model = ReleaseOrder(), OrderedDict[int, None]()
    for step, number in steps:
        if step == "add" and number not in model:
            order.add(number)
            model[number] = None
        elif step == "discard":
            order.discard(number)
            model.pop(number, None)
        elif step == "pop_first" and model:
            assert order.pop_first() == model.popitem(last=False)[0]

        assert list(order) == list(model)
        assert len(order) == len(model)
        assert [number in order for number in range(12)] == [
            number in model for number in range(12)
        ]


def test_a_number_is_not_added_twice() -> None:
    """One that is in already would tear the order apart."""
    order = ReleaseOrder()
    order.update([3, 1])

    with pytest.raises(AssertionError, match="1 is released twice"):
        order.add(1)

    assert list(order) == [3, 1]


def test_an_empty_order_gives_nothing() -> None:
    """The caller has counted wrongly, and hears of it."""
    with pytest.raises(AssertionError, match="no number is in"):
        ReleaseOrder().pop_first()
