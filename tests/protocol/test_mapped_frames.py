"""The payload of MAPPED: what is encoded comes back, anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import TransferError
from kvrs.protocol.mapped_pages import (
    MAX_FILES,
    MappedPages,
    PlacedPage,
    check_files,
    check_place,
    decode_mapped,
)

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
PLACES = st.lists(st.tuples(U32, U64, U64), max_size=8).map(tuple)
FILES = st.lists(U64, max_size=MAX_FILES).map(tuple)


@given(FILES, PLACES)
def test_what_is_encoded_comes_back(files: tuple[int, ...], places: tuple[PlacedPage, ...]) -> None:
    """Numbers of any size are carried; what they mean is checked apart."""
    mapped = MappedPages(files, places)

    assert decode_mapped(mapped.encode(), len(places)) == mapped


@given(st.binary(max_size=200), st.integers(0, 8))
def test_other_bytes_are_refused(payload: bytes, pages: int) -> None:
    """Or are exactly an answer with so many pages."""
    try:
        found = decode_mapped(payload, pages)
    except TransferError:
        return
    assert (found.encode(), len(found.pages)) == (payload, pages)


def test_too_many_files_are_refused() -> None:
    """Before memory is allocated for them."""
    payload = (MAX_FILES + 1).to_bytes(4) + bytes(8 * (MAX_FILES + 1))

    with pytest.raises(TransferError, match="129 files"):
        decode_mapped(payload, 0)


@pytest.mark.parametrize(
    ("page", "is_right"),
    [
        ((0, 0, 0), True),
        ((0, 60, 0), True),
        ((0, 61, 0), False),
        ((1, 0, 0), False),
        ((0, (1 << 64) - 1, 0), False),
    ],
)
def test_a_page_lies_within_its_file(page: PlacedPage, is_right: bool) -> None:
    """Pages of 4 bytes in a file of 64."""
    if is_right:
        check_place(page, 4, [64])
        return
    with pytest.raises(TransferError, match="MAPPED places a page"):
        check_place(page, 4, [64])


@pytest.mark.parametrize("found", [[64], [64, 64, 64], [64, 65]])
def test_announced_files_are_those_that_came(found: list[int]) -> None:
    """Announced and received files agree in number and size."""
    with pytest.raises(TransferError, match="but sends"):
        check_files([64, 64], found)
