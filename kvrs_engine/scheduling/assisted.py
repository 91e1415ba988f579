"""The streams of an instance for which another instance drafts tokens, and counts of the drafts."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrs.ids import StreamId
from kvrs.protocol.instance import Burst, DraftChoice, MirrorUpdate
from kvrs_engine.scheduling.alignment import Bursts
from kvrs_engine.scheduling.sequences import Sequence


@dataclass(slots=True)
class DraftCounts:
    """Counts since the start, as in `SpeculationReport`."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    def verified(self, proposed: int, accepted: int) -> None:
        self.steps += 1
        self.proposed += proposed
        self.accepted += accepted


class _Assisted:
    """A stream whose tokens the helper gets."""

    def __init__(self, number: int, sequence: Sequence) -> None:
        self.number, self.sequence = number, sequence
        self.told = len(sequence.token_ids)
        self.bursts = Bursts()


class AssistedStreams:
    """Keeps the helper informed of the streams: of the stream at its first proposal, then of its
    tokens and its end.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._streams: dict[Sequence, _Assisted] = {}
        self._by_number: dict[int, _Assisted] = {}
        self._begun = self._stale = 0
        self._updates: list[MirrorUpdate] = []

    @property
    def stale(self) -> int:
        """Number of received drafts that were dropped without a proposal."""
        return self._stale + sum(each.bursts.stale for each in self._streams.values())

    def propose(self, sequence: Sequence, choice: DraftChoice, most: int) -> list[int]:
        """Return received drafts after the sequence's tokens, at most `most`."""
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
        """Add drafts of the helper; drafts of unknown streams are dropped."""
        for burst in bursts:
            if (assisted := self._by_number.get(burst.number)) is not None:
                assisted.bursts.came(burst.position, burst.token_ids, burst.begins_anew)

    def stream(self, number: int) -> StreamId | None:
        """Return the stream with this number; None: the stream has ended."""
        assisted = self._by_number.get(number)
        return None if assisted is None else assisted.sequence.stream

    def take_updates(self) -> list[MirrorUpdate]:
        """Take the updates for the helper, in order."""
        updates, self._updates = self._updates, []
        return updates

    def left(self) -> None:
        """Forget what the helper knew, after its end."""
        self._stale = self.stale
        self._streams.clear()
        self._by_number.clear()
        self._updates.clear()
