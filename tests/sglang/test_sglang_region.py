"""Pages in a server's own region: what its ledger says at each moment, and which page goes."""

import os

import pytest

from kvrs.sglang.pages import PageRegion
from kvrs.transfer.rows.ledger import LedgerView

PAGE_BYTES = 64


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def page_of(number: int) -> bytes:
    return bytes((number,)) * PAGE_BYTES


def region_with(rows: int, *numbers: int) -> PageRegion:
    region = PageRegion(rows, PAGE_BYTES)
    for number in numbers:
        keep(region, number)
    return region


def keep(region: PageRegion, number: int) -> None:
    def fill(row: memoryview) -> None:
        row[:] = page_of(number)

    region.put(key_of(number), fill)


def shared(region: PageRegion) -> dict[bytes, bytes]:
    """Return pages as an agent reads them, by the ledger."""
    view = LedgerView(region.ledger.descriptor)
    found = {}
    for row, sequence in enumerate(view.sequences()):
        if sequence and (entry := view.entry(row)) is not None:
            found[entry[0]] = os.pread(region.memory, PAGE_BYTES, row * PAGE_BYTES)
    view.release()
    return found


def pages(*numbers: int) -> dict[bytes, bytes]:
    return {key_of(number): page_of(number) for number in numbers}


def test_agents_read_each_page_by_its_key() -> None:
    assert shared(region_with(4, 1, 2, 3)) == pages(1, 2, 3)


def test_a_row_that_is_being_written_is_nobody_s() -> None:
    """Also where another page was in it: a process may die between any two stores."""
    region, seen = region_with(2, 1, 2), list[dict[bytes, bytes]]()

    def fill(row: memoryview) -> None:
        row[: PAGE_BYTES // 2] = page_of(3)[: PAGE_BYTES // 2]
        seen.append(shared(region))

    region.put(key_of(3), fill)

    assert seen == [pages(2)]


def test_a_page_that_cannot_be_copied_is_not_kept() -> None:
    region = region_with(1, 1)

    def fill(row: memoryview) -> None:
        row[:1] = b"x"
        raise ValueError("no such page")

    with pytest.raises(ValueError, match="no such page"):
        region.put(key_of(2), fill)

    assert shared(region) == {}
    assert region.held([key_of(1), key_of(2)]) == [False, False]
    keep(region, 3)
    assert shared(region) == pages(3)


def test_the_least_recently_used_page_goes_first() -> None:
    region = region_with(3, 1, 2, 3)
    assert region.take(key_of(1), len)
    keep(region, 2)
    keep(region, 4)
    assert shared(region) == pages(1, 2, 4)
    assert not region.take(key_of(3), len)


def test_nothing_of_before_is_shared_once_it_is_cleared() -> None:
    region = region_with(3, 1, 2)
    view = LedgerView(region.ledger.descriptor)
    epoch = view.epoch

    region.clear()

    assert shared(region) == {}
    assert view.epoch != epoch
    assert region.held([key_of(1), key_of(2)]) == [False, False]
    for number in (2, 3, 4, 5):
        keep(region, number)
    assert shared(region) == pages(3, 4, 5)


def test_a_closed_region_keeps_nothing_more() -> None:
    region = region_with(3, 1, 2)
    region.close()
    keep(region, 3)
    region.clear()
    assert LedgerView(region.ledger.descriptor).is_closed
    assert shared(region) == {}
    assert not region.take(key_of(1), len)
