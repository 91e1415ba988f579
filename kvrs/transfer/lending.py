"""Server side of MAP: it pins the pages, and sends descriptors of its files with the pages'
offsets, for mapping.

Pins end with the client's UNMAP, with its connection, or after the stall timeout: a slower client
finds invalid copies by their checksums.
"""

from kvrs.errors import TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import AnswerHeader, FrameType, cell_checksums, part_checksum
from kvrs.protocol.pages import MappedPages, PagePart, PullFrame
from kvrs.transfer.peers import PageSource, PinnedPages
from kvrs.transfer.shared_memory.passing import close_all
from kvrs.transfer.shared_memory.regions import Region, in_threads
from kvrs.transfer.stream import SocketStream


class LentFile:
    """Lends pages of one file over one connection; the file's descriptor is sent with the first
    answer.
    """

    def __init__(self, stream: SocketStream, source: PageSource) -> None:
        self._stream = stream
        self._source = source
        self._region: Region | None = None

    async def lend(self, pull: PullFrame) -> None:
        """Answer a MAP frame, and keep its pages pinned until the client's UNMAP.

        Raises:
            TransferError: the request includes a tail, or no UNMAP comes before the stall timeout.
        """
        request = pull.request
        if request.tail_index is not None:
            raise TransferError("MAP of a tail; allowed: full pages, or a part of each")
        async with self._source.pinned(request) as pinned:
            await self._answer(pull.request_id, pinned, request.part)
            await self._stream.receive_question(FrameType.UNMAP)

    async def _answer(self, request_id: int, pinned: PinnedPages, part: PagePart | None) -> None:
        region, known = pinned.region, self._region
        if region is None or known not in (None, region):
            raise TransferError("MAP of pages in another file")
        checksums = await _checksums(pinned, part)
        places = tuple(zip(pinned.offsets, checksums, strict=True))
        payload = MappedPages(region.size_bytes if known is None else 0, places).encode()
        answer = AnswerHeader(FrameType.MAPPED, request_id, len(places), 0, len(payload))
        start = self._stream.session.answer(answer, payload)
        descriptors: list[int] = []
        try:
            if known is None:
                descriptors.append(region.open())
            await self._stream.send_with(descriptors, start + payload)
        except OSError as error:
            raise TransferError(f"pages cannot be mapped: {error}") from None
        finally:
            close_all(descriptors)
        self._region = region


async def _checksums(pinned: PinnedPages, part: PagePart | None) -> list[int]:
    """Return the checksums of the pinned pages, or of their `part`. Those of pages that were never
    stored are computed now.
    """
    found = [pinned.checksum(index, part) for index in range(len(pinned.pages))]
    unknown = [index for index, checksum in enumerate(found) if checksum is None]

    def compute() -> None:
        for index in unknown:
            found[index] = _checksum(pinned.pages[index], part)

    await in_threads(sum(pinned.pages[index].nbytes for index in unknown), [compute])
    return [checksum for checksum in found if checksum is not None]


def _checksum(page: memoryview, part: PagePart | None) -> int:
    if part is None:
        return frames.checksum(page)
    runs = part.runs(page)
    cells = part.part.cells // len(runs)
    return part_checksum(b"".join([cell_checksums(run, cells) for run in runs]))
