"""Pulls of a part of each page: only its cells travel, and pages that were written in parts by one
set of ranks are read in parts by another.
"""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.protocol.frames import checksum
from kvrs.protocol.page_messages import HeldPages, StoreCode
from kvrs.protocol.parts import PagePart, Part
from kvrs.transfer.peers import PinnedPages, PullRequest, PullResult
from tests.transfer.storing import A, StoringAgent, agent_store, content, range_of, tags

LAYERS, HEADS, CELL = 4, 8, 128  # 4,096 bytes a page.


@pytest.mark.network
@pytest.mark.parametrize("heads", [range(8), range(3, 5)], ids=["whole layers", "some heads"])
async def test_only_the_cells_of_the_part_arrive(heads: range) -> None:
    """In order of layers, then heads, without a gap."""
    asked = PagePart(LAYERS, HEADS, Part(range(1, 3), heads))
    async with agent_store() as store:
        assert await store.pusher.store(store.peer, [range_of(A, 0, 3)]) == [
            HeldPages(StoreCode.OK, 3)
        ]

        into = [memoryview(bytearray(asked.part.cells * CELL)) for _ in range(3)]
        result = await pulled(store, asked, into)

    assert (result.full_pages, result.error) == (3, None)
    assert result.bytes == 3 * asked.part.cells * CELL
    for index, view in enumerate(into):
        page = content(A, index)
        cells = [page[at * CELL : (at + 1) * CELL] for at in range(LAYERS * HEADS)]
        due = [cells[layer * HEADS + head] for layer in range(1, 3) for head in heads]
        assert bytes(view) == b"".join(due)


@pytest.mark.network
async def test_a_part_of_a_page_that_was_damaged_at_rest_is_refused() -> None:
    """Even where the damage lies in other cells: the whole page's checksum is from its arrival."""
    asked = PagePart(LAYERS, HEADS, Part(range(1), range(8)))
    async with agent_store() as store:
        await store.pusher.store(store.peer, [range_of(A, 0, 1)])
        whole, pin = await store.sink.pin(PullRequest(tags(A, 0, 1))), store.sink.pin
        stored = [checksum(page) ^ 1 for page in whole.pages]

        async def damaged(request: PullRequest) -> PinnedPages:
            return replace(await pin(request), checksums=stored)

        store.sink.pin = damaged  # type: ignore[method-assign]
        result = await pulled(store, asked, [memoryview(bytearray(8 * CELL))])

    assert result.full_pages == 0
    assert result.error == "checksum of page 0 is wrong"


@pytest.mark.network
async def test_a_part_that_does_not_divide_the_page_ends_the_connection() -> None:
    """The agent knows the pages' size, and names both."""
    asked = PagePart(3, HEADS, Part(range(1), range(8)))
    async with agent_store() as store:
        await store.pusher.store(store.peer, [range_of(A, 0, 1)])

        result = await pulled(store, asked, [memoryview(bytearray(4096 // 24 * 8))])

    assert result.full_pages == 0
    assert "closed by the peer" in (result.error or "")


@given(st.data())
def test_what_ranks_of_one_degree_write_ranks_of_another_read(data: st.DataObject) -> None:
    """A page put together of the parts of one layout, and taken apart into those of another."""
    page = bytearray(range(256)) * 16
    written = memoryview(bytearray(4096))
    for part in parted(data):
        source, target = part.runs(memoryview(page)), part.runs(written)
        for run, place in zip(source, target, strict=True):
            place[:] = run

    read = {
        (layer, head): cell
        for part in parted(data)
        for (layer, head), cell in cells_of(part, written).items()
    }

    assert bytes(written) == bytes(page)
    assert read == cells_of(PagePart(LAYERS, HEADS, Part(range(4), range(8))), memoryview(page))


def parted(data: st.DataObject) -> list[PagePart]:
    """All of a page, over stages and ranks."""

    def spans(size: int) -> list[range]:
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(1, size - 1), max_size=3))})
        return [range(first, last) for first, last in pairwise(cuts)]

    return [
        PagePart(LAYERS, HEADS, Part(layers, heads))
        for layers in spans(LAYERS)
        for heads in spans(HEADS)
    ]


def cells_of(part: PagePart, page: memoryview) -> dict[tuple[int, int], bytes]:
    joined = b"".join(part.runs(page))
    names = [(layer, head) for layer in part.part.layers for head in part.part.heads]
    return {name: joined[at * CELL : (at + 1) * CELL] for at, name in enumerate(names)}


async def pulled(store: StoringAgent, part: PagePart, into: list[memoryview]) -> PullResult:
    request = PullRequest(tags(A, 0, len(into)), part=part)
    return await asyncio.wait_for(store.puller.pull(store.peer, request, into, None), 20)
