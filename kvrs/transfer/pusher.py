"""Sends pages to the agents that keep checkpoints of them, in the background of all else that is sent."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvrs.errors import TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import Answer, FrameType, Offer, Store, StoredRun, TrafficClass
from kvrs.protocol.tags import Tag
from kvrs.transfer.config import TransferSettings
from kvrs.transfer.connections import Connection, ConnectionPool, Question
from kvrs.transfer.handshake import page_key
from kvrs.transfer.links import SendingLinks, groups
from kvrs.transfer.peers import Claim, Held, Identity, Peer, StoredPages


class PagePusher:
    """One per instance."""

    def __init__(self, identity: Callable[[], Identity], secret: bytes, settings: TransferSettings, links: SendingLinks) -> None:
        self._pool = ConnectionPool(identity, page_key(secret), settings.stall_timeout_s)
        self._links = links

    async def offer(self, peer: Peer, claim: Claim, reserved_bytes: int, tags: Sequence[Tag]) -> Held:
        """Ask for room for a stream's checkpoint, and what of it is there already.

        Raises:
            TransferError: the agent cannot be reached, refuses, or answers out of turn.
        """

        async def question(connection: Connection) -> None:
            offer = Offer(connection.request_id, claim, reserved_bytes, tuple(tags))
            with self._links.to(peer.node).sending(connection.stream, TrafficClass.CHECKPOINT) as sender:
                await sender.send(frames.encode_offer(offer))

        return (await self._ask(peer, question, 1))[0]

    async def store(self, peer: Peer, batch: Sequence[StoredPages]) -> list[Held]:
        """Send pages; returns what the agent then holds of each stream, in the order of `batch`.

        Once this has returned, raised or was cancelled, nothing reads the pages any more.

        Raises:
            TransferError: the agent cannot be reached, refuses, found a page damaged, or answers out of turn. Some of the
                pages may be there: an offer tells.
        """
        pages = [page for stored in batch for page in stored.pages]
        runs = _runs(batch, await _checksums(pages))

        async def question(connection: Connection) -> None:
            assert all(page.nbytes == connection.own.page_bytes for page in pages)
            with self._links.to(peer.node).sending(connection.stream, TrafficClass.CHECKPOINT) as sender:
                # In one call with the first pages: most stores are small, and each call wakes the agent.
                head = [frames.encode_store(Store(connection.request_id, runs))]
                for group in groups(pages):
                    await sender.send(*head, *(sender.on_its_way(page) for _, page in group))
                    head = []

        return await self._ask(peer, question, len(runs))

    async def close(self) -> None:
        """End all connections. What is still being sent ends with a `TransferError`."""
        self._pool.close()

    async def _ask(self, peer: Peer, question: Question, count: int) -> list[Held]:
        connection, answer = await self._pool.ask(peer, None, question, FrameType.HELD)
        with self._pool.using(connection):
            due = Answer(FrameType.HELD, connection.request_id, count, 0, frames.held_bytes(count))
            if answer != due:
                raise TransferError(f"answer out of turn: {answer} where {due} is due")
            payload = memoryview(bytearray(answer.payload_bytes))
            await connection.stream.receive_into(payload)
            return frames.decode_held(payload)


async def _checksums(pages: Sequence[memoryview]) -> Iterator[int]:
    """Taken a few at a time: others must get their turn on the loop."""
    checksums: list[int] = []
    for group in groups(pages):
        checksums += (frames.checksum(page) for _, page in group)
        await asyncio.sleep(0)
    return iter(checksums)


def _runs(batch: Sequence[StoredPages], checksums: Iterator[int]) -> tuple[StoredRun, ...]:
    """What is sent ahead of the pages."""
    return tuple(
        StoredRun(stored.claim, stored.first_page, stored.tags, tuple(islice(checksums, len(stored.pages)))) for stored in batch
    )
