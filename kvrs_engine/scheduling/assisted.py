"""The streams of an instance for which another one makes drafts, and the counts of what came of
drafts. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrs.ids import StreamId
from kvrs.protocol.speculation import Burst, DraftChoice, MirrorUpdate
from kvrs_engine.scheduling.alignment import Bursts
from kvrs_engine.scheduling.sequences import Sequence


@dataclass(slots=True)
class DraftCounts:
    """Counts since the start, as a `SpeculationReport` has them."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    def verified(self, proposed: int, accepted: int) -> None:
        self.steps += 1
        self.proposed += proposed
        self.accepted += accepted


class _Assisted:
    """A stream that the helper knows."""

    def __init__(self, number: int, sequence: Sequence) -> None:
        self.number, self.sequence = number, sequence
        self.told = len(sequence.token_ids)
        self.bursts = Bursts()


class AssistedStreams:
    """A helper is told a stream when drafts of it are wanted first, then its tokens and its end."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._streams: dict[Sequence, _Assisted] = {}
        self._by_number: dict[int, _Assisted] = {}
        self._begun = self._stale = 0
        self._updates: list[MirrorUpdate] = []

    @property
    def stale(self) -> int:
        """Drafts that came and were not proposed: their stream had gone on otherwise."""
        return self._stale + sum(each.bursts.stale for each in self._streams.values())

    def propose(self, sequence: Sequence, choice: DraftChoice, most: int) -> list[int]:
        """At most `most` drafts behind the sequence's tokens, of those that are here."""
        token_ids = sequence.token_ids
        if (assisted := self._streams.get(sequence)) is None:
            self._begun += 1
            assisted = self._streams[sequence] = _Assisted(self._begun, sequence)
            self._by_number[self._begun] = assisted
            self._updates.append(MirrorUpdate(assisted.number, list(token_ids), choice))
        elif assisted.told < len(token_ids):
            self._updates.append(MirrorUpdate(assisted.number, [*token_ids[assisted.told :]]))
            assisted.told = len(token_ids)
        return assisted.bursts.proposal(token_ids, min(most, self._depth))

    def ended(self, sequence: Sequence) -> None:
        if (assisted := self._streams.pop(sequence, None)) is not None:
            del self._by_number[assisted.number]
            self._stale += assisted.bursts.stale
            self._updates.append(MirrorUpdate(assisted.number))

    def came(self, bursts: Iterable[Burst]) -> None:
        """Drafts of the helper; those of streams that it does not know are dropped."""
        for burst in bursts:
            if (assisted := self._by_number.get(burst.number)) is not None:
                assisted.bursts.came(burst.position, burst.token_ids, burst.begins_anew)

    def stream(self, number: int) -> StreamId | None:
        """The stream of that number; None: it has ended."""
        assisted = self._by_number.get(number)
        return None if assisted is None else assisted.sequence.stream

    def take_updates(self) -> list[MirrorUpdate]:
        """For the helper, in the order of what they tell."""
        updates, self._updates = self._updates, []
        return updates

    def left(self) -> None:
        """The helper has gone; another one knows nothing."""
        self._stale = self.stale
        self._streams.clear()
        self._by_number.clear()
        self._updates.clear()
