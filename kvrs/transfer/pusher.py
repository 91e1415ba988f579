"""Pusher of checkpoint pages to agents, with lower priority than all other traffic.

Whole pages are pushed, and a restore is an ordinary pull, since an agent is a peer like an
instance. Ranks do not push their cells, because the agent would keep incomplete pages.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from kvrs.config.transfer import TransferSettings
from kvrs.errors import TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import AnswerHeader, Bytes, FrameType
from kvrs.protocol.pages import OfferFrame, StoredRange, StoreFrame, Tag, TrafficClass
from kvrs.transfer.connections import ConnectionPool, PageConnection, Question
from kvrs.transfer.links import SendingLinks, groups
from kvrs.transfer.peers import CheckpointClaim, HeldPages, Identity, Peer, StoredPages


class PagePusher:
    """Offers and stores checkpoint pages for one instance."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        secret: bytes,
        settings: TransferSettings,
        links: SendingLinks,
    ) -> None:
        self._pool = ConnectionPool(identity, secret, settings.stall_timeout_s)
        self._links = links
        self.pushed_bytes = 0  # Bytes of sent pages that agents have acknowledged, since the start.

    async def offer(
        self, peer: Peer, claim: CheckpointClaim, reserved_bytes: int, tags: Sequence[Tag]
    ) -> HeldPages:
        """Ask the agent for room for a stream's checkpoint; return how much of it the agent has.

        Raises:
            TransferError: the agent cannot be reached, refuses, or answers out of turn.
        """

        async def question(connection: PageConnection) -> None:
            offer = OfferFrame(connection.request_id, claim, reserved_bytes, tuple(tags))
            with self._links.to(peer.node).sending(
                connection.stream, TrafficClass.CHECKPOINT
            ) as sender:
                frame = frames.encode_offer(offer)
                await sender.send(frame, connection.stream.session.seal(frame))

        return (await self._ask(peer, question, 1))[0]

    async def store(self, peer: Peer, batch: Sequence[StoredPages]) -> list[HeldPages]:
        """Send pages; return what the agent then holds of each stream, in the order of `batch`.

        Once this has returned, raised or was cancelled, the pages are not read any more.

        Raises:
            TransferError: the agent cannot be reached, refuses, found a page damaged, or answers
                out of turn. Some of the pages may be there: an offer returns how many.
        """
        pages = [page for stored in batch for page in stored.pages]
        ranges = _ranges(batch, await _checksums(pages))

        async def question(connection: PageConnection) -> None:
            assert all(page.nbytes == connection.own.page_bytes for page in pages)
            with self._links.to(peer.node).sending(
                connection.stream, TrafficClass.CHECKPOINT
            ) as sender:
                # The frame is sent in one call with the first pages: each call wakes the agent.
                session = connection.stream.session
                store = frames.encode_store(StoreFrame(connection.request_id, ranges))
                buffers: list[Bytes] = [store, session.seal(store)]
                for group in groups(pages):
                    for _, page in group:
                        payload = sender.payload(page)
                        buffers += (payload, session.seal(payload))
                    await sender.send(*buffers)
                    buffers = []

        held = await self._ask(peer, question, len(ranges))
        self.pushed_bytes += sum(page.nbytes for page in pages)
        return held

    async def close(self) -> None:
        """End all connections. Running sends end with a `TransferError`."""
        self._pool.close()

    async def _ask(self, peer: Peer, question: Question, count: int) -> list[HeldPages]:
        connection, answer = await self._pool.ask(peer, None, question, FrameType.HELD)
        with self._pool.using(connection):
            due = AnswerHeader(
                FrameType.HELD, connection.request_id, count, 0, frames.held_bytes(count)
            )
            if answer != due:
                raise TransferError(f"answer out of turn: {answer} where {due} is due")
            payload = memoryview(bytearray(answer.payload_bytes))
            await connection.stream.receive_into(payload)
            connection.stream.session.check_answer(connection.mac, answer, payload)
            return frames.decode_held(payload)


async def _checksums(pages: Sequence[memoryview]) -> Iterator[int]:
    """Return the checksums of pages; they are computed a few at a time, so that the event loop is
    not blocked.
    """
    checksums: list[int] = []
    for group in groups(pages):
        if checksums:
            await asyncio.sleep(0)
        checksums += (frames.checksum(page) for _, page in group)
    return iter(checksums)


def _ranges(batch: Sequence[StoredPages], checksums: Iterator[int]) -> tuple[StoredRange, ...]:
    """Return the descriptions of the page ranges that a STORE frame has before the pages."""
    return tuple(
        [
            StoredRange(
                stored.claim,
                stored.first_page,
                stored.tags,
                tuple([next(checksums) for _ in stored.pages]),
            )
            for stored in batch
        ]
    )
