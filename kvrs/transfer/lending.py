"""The side of MAP that has pages: they are pinned, and the answer says where they lie in its files,
with descriptors of these for reading.

Pins end with the client's UNMAP, with its connection, and at the latest after the stall timeout: a
client that is slower finds by their checksums which of its copies are not the pages.
"""

import asyncio

from kvrs.errors import TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import AnswerHeader, FrameType
from kvrs.protocol.mapped_pages import MAX_FILES, MappedPages, PlacedPage
from kvrs.protocol.page_messages import PullFrame
from kvrs.transfer.peers import PageFile, PageSource, PinnedPages, Places
from kvrs.transfer.stream import SocketStream, close_all

_SMALL_BYTES = 1 << 20  # Up to this size it takes less time than a switch to another thread.


class LentFiles:
    """The files of one connection, in the order in which their descriptors were sent."""

    def __init__(self, stream: SocketStream, source: PageSource, places: Places) -> None:
        self._stream = stream
        self._source = source
        self._places = places
        self._files: list[PageFile] = []

    async def lend(self, pull: PullFrame) -> None:
        """Answer a MAP; returns after UNMAP.

        Raises:
            TransferError: a part or a tail of pages is asked for, or the client is too slow.
        """
        request = pull.request
        if request.part is not None or request.tail_index is not None:
            raise TransferError("MAP of a part or of a tail; allowed: whole pages")
        pinned = await self._source.pin(request)
        try:
            await self._answer(pull.request_id, pinned)
            await self._stream.receive_question(FrameType.UNMAP)
        finally:
            self._source.unpin(pinned)

    async def _answer(self, request_id: int, pinned: PinnedPages) -> None:
        numbers = {file: number for number, file in enumerate(self._files)}
        places: list[PlacedPage] = []
        checksums = pinned.checksums or await _checksums(pinned)
        for (file, offset), checksum in zip(self._places(pinned), checksums, strict=True):
            places.append((numbers.setdefault(file, len(numbers)), offset, checksum))
        if len(numbers) > MAX_FILES:
            raise TransferError(f"MAP of pages in more than {MAX_FILES} files")
        new = list(numbers)[len(self._files) :]
        payload = MappedPages(tuple([file.size_bytes for file in new]), tuple(places)).encode()
        answer = AnswerHeader(FrameType.MAPPED, request_id, len(places), 0, len(payload))
        start = self._stream.session.answer(answer, payload)
        descriptors: list[int] = []
        try:
            for file in new:
                descriptors.append(file.open())
            await self._stream.send_with(descriptors, start + payload)
        except OSError as error:
            raise TransferError(f"pages cannot be mapped: {error}") from None
        finally:
            close_all(descriptors)
        self._files += new


async def _checksums(pinned: PinnedPages) -> list[int]:
    """Of pages that were never stored, as they are now."""

    def compute() -> list[int]:
        return [frames.checksum(page) for page in pinned.pages]

    if sum(page.nbytes for page in pinned.pages) <= _SMALL_BYTES:
        return compute()
    return await asyncio.to_thread(compute)
