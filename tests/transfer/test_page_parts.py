"""Pulls of a part of each page: only its cells travel, and pages that were written in parts by one
set of ranks are read in parts by another.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.protocol.frames import AnswerHeader, FrameType, cell_checksums, checksum_of
from kvrs.protocol.pages import HeldPages, PagePart, Part, StoreCode
from kvrs.transfer.connections import admit
from kvrs.transfer.peers import PinnedPages, PullRequest, PullResult
from kvrs.transfer.stream import SocketStream
from tests.transfer.storing import (
    AGENT,
    ENGINE,
    N1,
    SECRET,
    A,
    StoringAgent,
    agent_store,
    content,
    range_of,
    tags,
)
from tests.transfer.test_page_port import impostor

LAYERS, HEADS, CELL = 4, 8, 128  # 4,096 bytes a page.
CELLED = replace(ENGINE, page_cells=LAYERS * HEADS)


@pytest.mark.network
@pytest.mark.parametrize("heads", [range(8), range(3, 5)], ids=["whole layers", "some heads"])
async def test_only_the_cells_of_the_part_arrive(heads: range) -> None:
    """In order of layers, then heads, without a gap."""
    asked = PagePart(LAYERS, HEADS, Part(range(1, 3), heads))
    async with agent_store(CELLED) as store:
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
@pytest.mark.parametrize("layer", range(LAYERS))
async def test_a_part_is_checked_by_its_cells_as_they_were_stored(layer: int) -> None:
    """Damage in other cells is no matter of it: they are not even read."""
    asked = PagePart(LAYERS, HEADS, Part(range(1, 3), range(2, 5)))
    async with agent_store(CELLED) as store:
        await store.pusher.store(store.peer, [range_of(A, 0, 1)])
        pinned = store.sink.pinned
        damaged_page = bytearray(content(A, 0))
        damaged_page[(layer * HEADS + 3) * CELL] ^= 1

        @asynccontextmanager
        async def damaged(request: PullRequest) -> AsyncIterator[PinnedPages]:
            stored = memoryview(cell_checksums(content(A, 0), LAYERS * HEADS))
            async with pinned(request) as found:
                yield replace(found, pages=[memoryview(damaged_page)], cells=[stored])

        store.sink.pinned = damaged  # type: ignore[method-assign]
        result = await pulled(store, asked, [memoryview(bytearray(6 * CELL))])

    is_asked = layer in asked.part.layers
    assert (result.full_pages, result.error) == (
        (0, "checksum of page 0 is wrong") if is_asked else (1, None)
    )


@pytest.mark.network
@pytest.mark.parametrize(
    "asked",
    [PagePart(3, HEADS, Part(range(1), range(8))), PagePart(LAYERS, 4, Part(range(1), range(4)))],
    ids=["other layers", "other heads"],
)
async def test_a_part_of_pages_of_other_cells_ends_the_connection(asked: PagePart) -> None:
    """Both ends have agreed on the cells of a page."""
    async with agent_store(CELLED) as store:
        await store.pusher.store(store.peer, [range_of(A, 0, 1)])

        result = await pulled(store, asked, [memoryview(bytearray(asked.bytes_of(4096)))])

    assert result.full_pages == 0
    assert "closed by the peer" in (result.error or "")


@pytest.mark.network
@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (Part(range(1, 3), range(2, 4)), "answer out of turn"),
        (Part(range(4), range(8)), "answer out of turn"),
        (Part(range(1, 3), range(3, 6)), "checksum of page 0 is wrong"),
    ],
    ids=["short", "whole", "other cells"],
)
async def test_another_rectangle_than_was_asked_for_is_refused(sent: Part, error: str) -> None:
    """An agent that answers with other cells, and the checksum of the right ones, is believed in
    nothing.
    """
    due = PagePart(LAYERS, HEADS, Part(range(1, 3), range(2, 5)))
    page = memoryview(b"".join(bytes([cell]) * CELL for cell in range(LAYERS * HEADS)))
    payload = b"".join(PagePart(LAYERS, HEADS, sent).runs(page))
    right = checksum_of(b"".join(due.runs(page)), due)

    async def answer_wrongly(stream: SocketStream) -> None:
        await admit(stream, [SECRET], lambda: replace(CELLED, instance=AGENT.instance, node=N1))
        await stream.receive_question(FrameType.PULL)
        answer = AnswerHeader(FrameType.PAGE, 1, 0, right, len(payload))
        await stream.send(stream.session.answer(answer, payload), payload)
        await stream.wait_for_data()

    async with agent_store(CELLED) as store, impostor(answer_wrongly) as port:
        request = PullRequest(tags(A, 0, 1), part=due)
        into = [memoryview(bytearray(6 * CELL))]
        result = await store.puller.pull(replace(store.peer, port=port), request, into, None)

    assert result.full_pages == 0
    assert error in (result.error or "")


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
    return await asyncio.wait_for(store.puller.pull(store.peer, request, into, None), 60)
