"""The payload of MAPPED: what is encoded comes back, anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import TransferError
from kvrs.protocol.pages import MappedPages, PlacedPage, check_file, check_place, decode_mapped

U64 = st.integers(0, (1 << 64) - 1)


@given(U64, st.lists(st.tuples(U64, U64), max_size=8).map(tuple))
def test_what_is_encoded_comes_back(file_bytes: int, places: tuple[PlacedPage, ...]) -> None:
    """Numbers of any size are carried; what they mean is checked apart."""
    mapped = MappedPages(file_bytes, places)

    assert decode_mapped(mapped.encode(), len(places)) == mapped


@given(st.binary(max_size=200), st.integers(0, 8))
def test_other_bytes_are_refused(payload: bytes, pages: int) -> None:
    """Or are exactly an answer with so many pages."""
    try:
        found = decode_mapped(payload, pages)
    except TransferError:
        return
    assert (found.encode(), len(found.pages)) == (payload, pages)


@pytest.mark.parametrize(
    ("offset", "is_right"), [(0, True), (60, True), (61, False), ((1 << 64) - 1, False)]
)
def test_a_page_lies_within_its_file(offset: int, is_right: bool) -> None:
    """Pages of 4 bytes in a file of 64."""
    if is_right:
        check_place((offset, 0), 4, 64)
        return
    with pytest.raises(TransferError, match="MAPPED places a page"):
        check_place((offset, 0), 4, 64)


@pytest.mark.parametrize(("announced", "found"), [(64, []), (64, [64, 64]), (64, [65]), (0, [64])])
def test_the_announced_file_is_the_one_that_came(announced: int, found: list[int]) -> None:
    """No file comes without its size, and none but that."""
    with pytest.raises(TransferError, match="but sends"):
        check_file(announced, found)
