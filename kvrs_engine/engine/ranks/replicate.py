"""The replication of parts of pages between the hosts of one stage in the instances of a group
(KevlarFlow's ring).

The instances' processes (heads) order transfers and keep the page tables; the bytes go from host to
host, and no batch waits for them. The receiving head chooses the destination pages of each offer.
These pages are written only until the offer ends: with its last part, with the link, or with the
session of that head. Later parts are refused, and the head reuses a page only after it was told of
the end.
"""

import asyncio
import logging
from collections.abc import Mapping

from torch import Tensor

from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.pages import TrafficClass
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity
from kvrs_engine.engine.ranks.connection import BRINGING, StageAt, open_link
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.link import (
    IS_HERE,
    VERSION,
    Begin,
    BringParts,
    OfferParts,
    PagesDone,
    PartsHeld,
    PartsOver,
    PartsRange,
    PartsRefused,
    PartsTaken,
    StageChannel,
    StageLink,
    StageRefused,
    StoreParts,
    TakeParts,
    page_groups,
)
from kvrs_engine.engine.ranks.sessions import StageRefusedError, StageSession, StageSessions

log = logging.getLogger(__name__)


class PartsSender:
    """Sends parts of pages to other instances' hosts. Methods run in the event loop of its host."""

    def __init__(
        self, group: RankGroup, peers: Mapping[InstanceId, StageAt], links: SendingLinks
    ) -> None:
        """`peers` are the hosts of the same stage, by instance."""
        self._group, self._peers, self._sending = group, peers, links
        self._links: dict[InstanceId, StageLink] = {}
        self._locks = {name: asyncio.Lock() for name in peers}

    async def serve(self, link: StageLink, session: StageSession) -> None:
        """Carry out a head's orders; raises TransferError when the link is lost."""
        await link.send(PagesDone())
        while True:
            order, _ = await link.receive()
            if not isinstance(order, BringParts):
                raise StageRefusedError(f"a message out of turn: {type(order).__name__}")
            session.check(order)
            check_ranges(order.ranges, self._group.settings.pages)
            count = sum(len(each.tags) for each in order.ranges)
            last = self._group.settings.pages - 1
            is_allowed = all(0 <= page <= last for page in order.pages)
            if len(order.pages) not in (0, count) or not is_allowed:
                raise StageRefusedError(
                    f"{len(order.pages)} pages {order.pages[:8]} for {count} tags; allowed: one of "
                    f"0 to {last} for each tag, or none"
                )
            session.check_pages(order.pages)
            await link.send(await self._bring(order))

    def close(self) -> None:
        for link in self._links.values():
            link.stream.close()

    async def _bring(self, order: BringParts) -> PartsHeld | PartsRefused:
        if (at := self._peers.get(order.to)) is None:
            allowed = ", ".join(map(repr, self._peers)) or "none"
            return PartsRefused(f"{order.to!r} takes no parts of this host; allowed: {allowed}")
        limit_s = (BRINGING - 1) * at.stall_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._locks[order.to]:
                return await self._bring_to(at, order)
        except TimeoutError:
            return PartsRefused(f"{at.peer.instance}: no parts were taken for {limit_s:g} s")
        except (OSError, TransferError) as error:
            return PartsRefused(f"{at.peer.instance}: {error}")

    async def _bring_to(self, at: StageAt, order: BringParts) -> PartsHeld | PartsRefused:
        """Send parts to a host; raises OSError or TransferError if it is not there or refuses."""
        try:
            if (link := self._links.get(order.to)) is None:
                begin = Begin(VERSION, StageChannel.PARTS)
                link, _ = await open_link(at, begin, 0, PagesDone)
                link.limit(self._sending.to(at.peer.node), TrafficClass.CHECKPOINT)
                self._links[order.to] = link
            return await self._offer(link, order, at.stall_timeout_s)
        except BaseException:
            if (lost := self._links.pop(order.to, None)) is not None:
                lost.stream.close()
            raise

    async def _offer(
        self, link: StageLink, order: BringParts, stall_timeout_s: float
    ) -> PartsHeld | PartsRefused:
        await link.send(OfferParts(order.ranges, are_sent=bool(order.pages)))
        answer = await _answer(link, stall_timeout_s)
        if isinstance(answer, PartsRefused):
            return answer
        if not isinstance(answer, PartsTaken) or not {*answer.places} <= {*range(len(order.pages))}:
            raise TransferError(f"a message out of turn: {type(answer).__name__}")
        places, held, sent_bytes = answer.places, answer.held, 0
        for group in page_groups(places, self._group.pool.geometry.page_bytes):
            own = [places[at] for at in group]
            parts = await self._group.read([order.pages[place] for place in own])
            await link.send(StoreParts(own), parts)
            stored = await _answer(link, stall_timeout_s)
            if not isinstance(stored, PartsHeld):
                raise TransferError(f"a message out of turn: {type(stored).__name__}")
            held, sent_bytes = stored.held, sent_bytes + parts.numel()
        return PartsHeld(held, sent_bytes)


class PartsReceiver:
    """Receives parts of pages from other instances' hosts. Methods run in the event loop of its
    host.
    """

    def __init__(
        self,
        group: RankGroup,
        sessions: StageSessions,
        senders: frozenset[InstanceId],
        stall_timeout_s: float,
    ) -> None:
        """`senders` are the instances whose hosts may send parts."""
        self._group, self._sessions, self._senders = group, sessions, senders
        self._stall_timeout_s = stall_timeout_s

    async def serve(self, link: StageLink, sender: Identity) -> None:
        """Receive parts from a sender; raises TransferError if the link is lost or the parts are
        refused.
        """
        if sender.instance not in self._senders:
            allowed = ", ".join(map(repr, sorted(self._senders))) or "none"
            raise StageRefusedError(f"parts of {sender.instance!r}; allowed: {allowed}")
        await link.send(PagesDone())
        while True:
            offer, _ = await link.receive()
            if not isinstance(offer, OfferParts):
                raise StageRefusedError(f"a message out of turn: {type(offer).__name__}")
            check_ranges(offer.ranges, self._group.settings.pages)
            session = self._sessions.receiving()
            if isinstance(session, str):
                await link.send(PartsRefused(session))
                continue
            with session.beside(link):
                taken = await self._sessions.offer(session, sender.instance, offer)
                if isinstance(taken, str):
                    await link.send(PartsRefused(taken))
                else:
                    await self._take(link, session, offer, taken)

    async def _take(
        self, link: StageLink, session: StageSession, offer: OfferParts, taken: TakeParts
    ) -> None:
        places = [at for at, page in enumerate(taken.pages) if page >= 0]
        left, filled = {*places}, []
        try:
            await link.send(PartsTaken(taken.held, places))
            while left:
                order, payload = await link.receive(self._stall_timeout_s)
                if not isinstance(order, StoreParts):
                    raise StageRefusedError(f"a message out of turn: {type(order).__name__}")
                await self._store(order, payload, taken, left)
                left.difference_update(order.places)
                filled += order.places
                await link.send(PartsHeld(_held(offer.ranges, taken, {*filled})))
        finally:
            if places:
                await session.tell(PartsOver(taken.offer, filled))

    async def _store(
        self, order: StoreParts, payload: Tensor, taken: TakeParts, left: set[int]
    ) -> None:
        places, part_bytes = order.places, self._group.pool.geometry.page_bytes
        if not places or len({*places}) < len(places) or not {*places} <= left:
            raise StageRefusedError(
                f"parts of places {places[:8]}; allowed: each of {sorted(left)[:8]} once"
            )
        if len(payload) != len(places) * part_bytes:
            raise StageRefusedError(
                f"{len(payload)} bytes of parts; allowed: {len(places) * part_bytes}"
            )
        pages = [taken.pages[place] for place in places]
        await self._group.write(pages, payload.view(len(pages), part_bytes))


def check_ranges(ranges: list[PartsRange], pages: int) -> None:
    """Raises StageRefusedError if the ranges have more pages than an instance has."""
    count = sum(len(each.tags) for each in ranges)
    if count > pages or len(ranges) > pages:
        raise StageRefusedError(
            f"{count} tags in {len(ranges)} ranges; allowed: {pages}, the pages of an instance"
        )
    if ranges and (last := max(each.first_page for each in ranges)) > pages:
        raise StageRefusedError(f"page {last} of a stream; allowed: 0 to {pages}")


def _held(ranges: list[PartsRange], taken: TakeParts, filled: set[int]) -> list[int]:
    """Return the number of leading pages of each range's stream that have the part now."""
    found, place = [], 0
    for each, held in zip(ranges, taken.held, strict=True):
        places = range(place, place + len(each.tags))
        place = places.stop
        leading = 0
        while leading < len(places) and (
            places[leading] in filled or taken.pages[places[leading]] == IS_HERE
        ):
            leading += 1
        # Pages before the range are held, or no page of the range was accepted.
        found.append(max(held, each.first_page + leading) if held >= each.first_page else held)
    return found


async def _answer(link: StageLink, stall_timeout_s: float) -> object:
    answer, _ = await link.receive(stall_timeout_s)
    if isinstance(answer, StageRefused):
        raise StageRefusedError(answer.reason)
    return answer
