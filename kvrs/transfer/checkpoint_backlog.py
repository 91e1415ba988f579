"""Backlog of checkpoint pages to send to each holder.

Pure: no socket, no clock, no tensor. An engine's checkpointer drives it with pages filled by the
scheduler, and with holders' answers.

Invariants, which `check` and the tests hold it to:
1. A holder gets an offer before it gets pages of a stream: its answer is how many leading pages it
   has, and only those behind them are sent. The offer is made again after every failure, and when
   nothing was taken: a restarted holder may have less.
2. Of one stream pages are sent in their order, of several the oldest stream's first.
3. A stream that a holder refuses (it saw a higher attempt, or has no memory for pages that were
   reserved) is not sent there again. One that finds no room when it is offered is
   offered again after a while: other streams end, and a restarted holder may have room.
4. Where a prefill instance handed the history over, it sends the history's pages itself. They are
   sent from here only when the holder has no more of them than at the offer before.
5. The lag is the sum, over all deliveries that are neither refused nor without room, of the pages
   that are full here and not held there.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Protocol

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.pages import CheckpointClaim, HeldPages, StoreCode, Tag

# Pause between two offers to a holder that is still receiving the handed-over pages from the
# prefill instance.
LOOK_AGAIN_S = 0.2

# Time after which a holder that answered without taking anything gets a new offer: it may have been
# replaced, without the reservation.
STUCK_S = 0.5

# Time after which a holder without room gets a new offer.
ROOM_S = 5.0

# Most page ranges of one batch, so that its STORE frame stays far below the largest allowed one.
_MAX_RANGES = 1024

# First pause before an agent that did not answer is tried again; each further pause is twice as
# long.
RETRY_S = 0.5
RETRY_MOST_S = 5.0


class Followed(Protocol):
    """A sequence whose pages are sent: `kvrs_engine.scheduling.sequences.Sequence` is one."""

    stream: StreamId
    attempt: tuple[int, int]  # Owner epoch and number of the attempt; a larger pair is later.
    tags: list[Tag]  # Tags of all full pages of its tokens, computed or not.
    computed_tokens: int
    history_tokens: int


@dataclass(slots=True, eq=False)
class CheckpointDelivery:
    """Delivery of one attempt's pages to one holder."""

    claim: CheckpointClaim
    holder: InstanceId
    reserved_bytes: int
    order: int  # Number in the order in which deliveries began: a lower one is sent first.
    sequence: Followed  # Sequence with the pages; its tags grow.
    handed_over_pages: int  # Leading pages that the prefill instance is probably sending; 0: none.
    full_pages: int = 0  # Number of full pages that this instance has computed.
    held_pages: int = 0  # Number of leading pages that the holder has, by its last answer.
    # `held_pages` at the last offer while the prefill instance sends pages; -1: no offer was
    # answered.
    looked_pages: int = -1
    offered: bool = False
    refused: bool = False
    no_room: bool = False  # The holder had no room at the last offer.
    ended: bool = False  # The sequence computes no more pages; the unsent ones are still sent.
    # The next page to send was evicted; False again once the sequence fills pages.
    missing: bool = False
    not_before_s: float = 0.0

    @property
    def lag_pages(self) -> int:
        return 0 if self.refused or self.no_room else max(0, self.full_pages - self.held_pages)

    @property
    def waits(self) -> bool:
        """True if the holder lacks pages that can be sent, now or later."""
        return self.full_pages > self.held_pages and not self.refused and not self.missing

    @property
    def known_tags(self) -> tuple[Tag, ...]:
        """Tags of all pages that a holder may have: the history's, and those filled since."""
        return tuple(self.sequence.tags)

    def tags(self, first: int, end: int) -> tuple[Tag, ...]:
        return tuple(self.sequence.tags[first:end])


@dataclass(slots=True, eq=False)
class _Holder:
    waiting: dict[CheckpointDelivery, None] = field(default_factory=dict)
    answers: bool = True


class CheckpointBacklog:
    """All deliveries of one instance. A call costs O(1) per delivery that it touches, but `ranges`
    and `offers` sort the waiting deliveries.
    """

    def __init__(self, page_size_tokens: int) -> None:
        self.lag_pages = 0
        self._page_size = page_size_tokens
        self._deliveries: dict[Followed, list[CheckpointDelivery]] = {}
        self._current: dict[tuple[StreamId, InstanceId], CheckpointDelivery] = {}
        self._holders: defaultdict[InstanceId, _Holder] = defaultdict(_Holder)
        # Holders that have deliveries with pages to send.
        self._waited_for: dict[InstanceId, None] = {}
        self._begun = 0

    def held(self, sequence: Followed) -> dict[InstanceId, int]:
        """Return the number of the sequence's leading full pages that each of its holders has, by
        the holder's last answer.
        """
        deliveries = self._deliveries.get(sequence, [])
        return {each.holder: each.held_pages for each in deliveries if each.held_pages}

    def follows(self, sequence: Followed) -> bool:
        """Return whether the backlog has a delivery of the sequence."""
        return sequence in self._deliveries

    # The scheduler calls the methods below.

    def follow(
        self, sequence: Followed, checkpoints: Iterable[CheckpointTarget], *, handed_over: bool
    ) -> None:
        """Deliver the sequence's pages to these holders from now on, instead of the pages of
        earlier attempts at its stream; a later attempt is left alone.
        """
        for checkpoint in checkpoints:
            key = (sequence.stream, checkpoint.agent)
            older = self._current.get(key)
            if older is not None and older.sequence.attempt > sequence.attempt:
                continue
            self._begun += 1
            delivery = CheckpointDelivery(
                claim=CheckpointClaim(sequence.stream, *sequence.attempt),
                holder=checkpoint.agent,
                reserved_bytes=checkpoint.reserved_bytes,
                order=self._begun,
                sequence=sequence,
                handed_over_pages=sequence.history_tokens // self._page_size if handed_over else 0,
            )
            if older is not None:
                if older.claim == delivery.claim:
                    # This instance has already delivered pages of the attempt as its prefill
                    # instance, so no other instance sends them.
                    delivery.full_pages, delivery.held_pages, delivery.handed_over_pages = (
                        older.full_pages,
                        older.held_pages,
                        0,
                    )
                self.drop(older)
            self._current[key] = delivery
            self._deliveries.setdefault(sequence, []).append(delivery)
            self._settle(delivery, 0)

    def filled(self, sequence: Followed, now_s: float) -> list[InstanceId]:
        """Note that the sequence has computed further full pages, or evicted ones again; return the
        holders to which pages are to be sent.
        """
        if (deliveries := self._deliveries.get(sequence)) is None:
            return []
        full_pages = sequence.computed_tokens // self._page_size
        for delivery in deliveries:
            lag_pages = delivery.lag_pages
            if delivery.full_pages == 0 and delivery.handed_over_pages:
                delivery.not_before_s = now_s + LOOK_AGAIN_S
            delivery.full_pages = max(full_pages, delivery.full_pages)
            delivery.missing = False
            self._settle(delivery, lag_pages)
        return [delivery.holder for delivery in deliveries if delivery.waits]

    def ended(self, sequence: Followed, *, send_rest: bool) -> None:
        """Note that the sequence computes no more pages. With `send_rest` its unsent pages are
        still sent, else they are forgotten.
        """
        for delivery in list(self._deliveries.get(sequence, ())):
            delivery.ended = True
            if not (send_rest and delivery.waits):
                self.drop(delivery)

    # The sender of pages calls the methods below.

    def due_in_s(self, holder: InstanceId, now_s: float) -> float | None:
        """Return the time until an offer or pages for the holder are due; None: no delivery to it
        is waiting.
        """
        waiting = self._holders[holder].waiting
        return (
            max(0.0, min(delivery.not_before_s for delivery in waiting) - now_s)
            if waiting
            else None
        )

    def offers(self, holder: InstanceId, now_s: float) -> list[CheckpointDelivery]:
        """Return the due deliveries that must be offered to the holder before pages are sent."""
        return [delivery for delivery in self._due(holder, now_s) if not delivery.offered]

    def ranges(
        self, holder: InstanceId, now_s: float, budget_pages: int
    ) -> Iterator[tuple[CheckpointDelivery, int, int]]:
        """Return the page ranges to send next, of at most `budget_pages` pages in all: delivery,
        first page and end (exclusive) of each.
        """
        offered = (delivery for delivery in self._due(holder, now_s) if delivery.offered)
        for delivery in islice(offered, _MAX_RANGES):
            if not budget_pages:
                return
            first = delivery.held_pages
            end = min(delivery.full_pages, first + budget_pages)
            budget_pages -= end - first
            yield delivery, first, end

    def budget_pages(self, staging_pages: int, lent_pages: int) -> int:
        """Return how many pages may be lent for sends to one holder: an equal share of
        `staging_pages`, less what is lent already, so that a stalling holder leaves room for
        others.
        """
        busy_holders = sum(
            any(delivery.lag_pages for delivery in self._holders[name].waiting)
            for name in self._waited_for
        )
        share = max(1, staging_pages // max(1, busy_holders))
        return min(share, staging_pages - lent_pages)

    def offered(self, delivery: CheckpointDelivery, held: HeldPages, now_s: float) -> None:
        """Note a holder's answer to the offer of a delivery."""
        self._holders[delivery.holder].answers = True
        if not self._is_current(delivery):
            return
        lag_pages = delivery.lag_pages
        delivery.refused = held.code is StoreCode.FENCED
        delivery.no_room = held.code is StoreCode.FULL
        delivery.held_pages = held.pages
        if delivery.no_room:
            delivery.not_before_s = now_s + ROOM_S
        elif held.pages < delivery.handed_over_pages and held.pages > delivery.looked_pages:
            delivery.looked_pages = held.pages
            delivery.not_before_s = now_s + LOOK_AGAIN_S
        else:
            delivery.offered = True
            delivery.not_before_s = 0.0
            # A page that the holder lacks from now on is not on its way from the prefill instance.
            delivery.handed_over_pages = 0
        self._settle(delivery, lag_pages)

    def stored(
        self, delivery: CheckpointDelivery, first: int, held: HeldPages, now_s: float
    ) -> None:
        """Note a holder's answer to a page range that began at page `first`."""
        self._holders[delivery.holder].answers = True
        if not self._is_current(delivery):
            return
        lag_pages = delivery.lag_pages
        delivery.refused = held.code is not StoreCode.OK
        delivery.held_pages = held.pages
        # Without progress the holder may be a new process, which got no offer.
        delivery.offered = held.pages > first
        delivery.not_before_s = 0.0 if delivery.offered else now_s + STUCK_S
        self._settle(delivery, lag_pages)

    def lost(self, holder: InstanceId) -> None:
        """Note that the holder does not answer; all its deliveries must be offered again."""
        self._holders[holder].answers = False
        for delivery in self._current.values():
            if delivery.holder == holder:
                delivery.offered = False

    def moved(self, holder: InstanceId) -> None:
        """Record that another process, which may have no pages, has replaced this holder."""
        for delivery in self._current.values():
            if delivery.holder == holder:
                lag_pages = delivery.lag_pages
                delivery.offered, delivery.held_pages = False, 0
                self._settle(delivery, lag_pages)

    def missed(self, delivery: CheckpointDelivery) -> None:
        """Note that the delivery's next page was evicted before sending. A preempted sequence will
        compute it again.
        """
        lag_pages = delivery.lag_pages
        delivery.missing = True
        self._settle(delivery, lag_pages)

    def drop(self, delivery: CheckpointDelivery) -> None:
        """Remove a delivery; to drop it twice is harmless."""
        if self._is_current(delivery):
            del self._current[delivery.claim.stream, delivery.holder]
            siblings = self._deliveries[delivery.sequence]
            siblings.remove(delivery)
            if not siblings:
                del self._deliveries[delivery.sequence]
            self._wait(delivery, waits=False)
            self.lag_pages -= delivery.lag_pages

    def endings(self, holder: InstanceId) -> list[CheckpointDelivery]:
        """Waiting deliveries whose sequence has ended."""
        return [delivery for delivery in self._holders[holder].waiting if delivery.ended]

    def lag_of(self, holder: InstanceId) -> int:
        """Return the holder's part of `lag_pages`."""
        return sum(delivery.lag_pages for delivery in self._holders[holder].waiting)

    @property
    def unprotected(self) -> int:
        """Return the number of sequences whose checkpoint no holder keeps, because each refused it,
        is full, or does not answer.
        """
        return sum(
            all(
                each.refused or each.no_room or not self._holders[each.holder].answers
                for each in deliveries
            )
            for deliveries in self._deliveries.values()
        )

    def check(self) -> None:
        """Assert that all indexes and counters agree. O(deliveries)."""
        all_of_them = [
            delivery for deliveries in self._deliveries.values() for delivery in deliveries
        ]
        assert all(self._deliveries.values()), "a sequence without a delivery"
        assert len(all_of_them) == len(self._current)
        assert all(self._is_current(delivery) for delivery in all_of_them)
        assert self.lag_pages == sum(delivery.lag_pages for delivery in all_of_them), (
            "the lag does not add up"
        )
        assert all(delivery.waits for delivery in all_of_them if delivery.ended), (
            "an ended delivery that waits for nothing"
        )
        assert self._waited_for.keys() == {
            name for name, holder in self._holders.items() if holder.waiting
        }
        for name, holder in self._holders.items():
            assert set(holder.waiting) == {
                one for one in all_of_them if one.holder == name and one.waits
            }

    def _is_current(self, delivery: CheckpointDelivery) -> bool:
        return self._current.get((delivery.claim.stream, delivery.holder)) is delivery

    def _due(self, holder: InstanceId, now_s: float) -> list[CheckpointDelivery]:
        due = (
            delivery for delivery in self._holders[holder].waiting if delivery.not_before_s <= now_s
        )
        return sorted(due, key=attrgetter("order"))

    def _settle(self, delivery: CheckpointDelivery, lag_pages: int) -> None:
        """Update indexes and counters for a delivery whose lag was `lag_pages`."""
        self.lag_pages += delivery.lag_pages - lag_pages
        self._wait(delivery, waits=delivery.waits)
        if delivery.ended and not delivery.waits:
            self.drop(delivery)

    def _wait(self, delivery: CheckpointDelivery, *, waits: bool) -> None:
        waiting = self._holders[delivery.holder].waiting
        if waits:
            waiting[delivery] = self._waited_for[delivery.holder] = None
        elif waiting.pop(delivery, delivery) is None and not waiting:
            del self._waited_for[delivery.holder]
