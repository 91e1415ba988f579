"""Takes the pages of a STORE: straight from the socket into the store's memory, and visible only when they are right."""

from collections.abc import Sequence

from kvrs.errors import DamagedPageError
from kvrs.protocol import frames
from kvrs.protocol.frames import StoredRun
from kvrs.transfer.peers import Held, Incoming, PageSink
from kvrs.transfer.stream import Filling, SocketStream


async def receive_runs(stream: SocketStream, sink: PageSink, runs: Sequence[StoredRun], page_bytes: int) -> list[Held]:
    """Receive all pages of `runs`, which follow each other on the stream; returns what is then held of each run's stream.

    Raises:
        TransferError: the peer was lost, or a page is damaged. The pages before it stay.
    """
    arriving: list[Incoming] = []
    held: list[Held] = []
    try:
        arriving += (sink.begin(run.claim, run.first_page, run.tags) for run in runs)
        await _receive_pages(stream, runs, arriving, page_bytes)
    finally:
        held += [incoming.end() for incoming in arriving]
    return held


async def _receive_pages(stream: SocketStream, runs: Sequence[StoredRun], arriving: Sequence[Incoming], page_bytes: int) -> None:
    views = [list(incoming.views) for incoming in arriving]
    assert all(len(own) == len(run.tags) for own, run in zip(views, runs, strict=True))
    assert all(view is None or view.nbytes == page_bytes for own in views for view in own)
    dropped = memoryview(bytearray(page_bytes))  # All pages that nobody wants go here, one over the other.
    filling = Filling(stream, [dropped if view is None else view for own in views for view in own])
    for run, incoming, own in zip(runs, arriving, views, strict=True):
        for index, (view, checksum) in enumerate(zip(own, run.checksums, strict=True)):
            page = await filling.next()
            if view is None:
                continue
            if frames.checksum(page) != checksum:
                raise DamagedPageError(f"checksum of page {run.first_page + index} of {run.claim.stream!r} is wrong")
            incoming.commit(index, checksum)
