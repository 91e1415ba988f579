"""Receiving the pages of a STORE: from the socket straight into the store's memory, visible only
when their checksum is right.
"""

from collections.abc import Sequence

from kvrs.errors import DamagedPageError
from kvrs.protocol import frames
from kvrs.protocol.page_messages import StoredRange
from kvrs.protocol.session import SESSION_MAC_BYTES
from kvrs.transfer.peers import HeldPages, Incoming, PageSink
from kvrs.transfer.stream import Filling, SocketStream


async def receive_ranges(
    stream: SocketStream, sink: PageSink, ranges: Sequence[StoredRange], page_bytes: int
) -> list[HeldPages]:
    """Receive all pages of `ranges`, which follow each other on the stream; returns what is then
    held of each range's stream.

    Raises:
        TransferError: the peer was lost, or a page is damaged. The pages before it stay.
    """
    arriving: list[Incoming] = []
    held: list[HeldPages] = []
    try:
        arriving += (sink.begin(each.claim, each.first_page, each.tags) for each in ranges)
        await _receive_pages(stream, ranges, arriving, page_bytes)
    finally:
        held += [incoming.end() for incoming in arriving]
    return held


async def _receive_pages(
    stream: SocketStream,
    ranges: Sequence[StoredRange],
    arriving: Sequence[Incoming],
    page_bytes: int,
) -> None:
    views = [list(incoming.views) for incoming in arriving]
    assert all(len(own) == len(each.tags) for own, each in zip(views, ranges, strict=True))
    assert all(view is None or view.nbytes == page_bytes for own in views for view in own)
    # All pages without a view go here, one over the other.
    dropped = memoryview(bytearray(page_bytes))
    pages = [dropped if view is None else view for own in views for view in own]
    macs = [memoryview(bytearray(SESSION_MAC_BYTES)) for _ in pages]
    filling = Filling(stream, [view for pair in zip(pages, macs, strict=True) for view in pair])
    for each, incoming, own in zip(ranges, arriving, views, strict=True):
        for index, (view, checksum) in enumerate(zip(own, each.checksums, strict=True)):
            page, mac = await filling.next(), await filling.next()
            if view is None:
                stream.session.skip()
                continue
            if frames.checksum(page) != checksum:
                raise DamagedPageError(
                    f"checksum of page {each.first_page + index} of {each.claim.stream!r} is wrong"
                )
            stream.session.check(mac, page)
            incoming.commit(index, checksum)
