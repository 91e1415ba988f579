"""The batches of one engine that are computed at present."""

from collections.abc import Iterable
from operator import itemgetter

from kvrs_engine.scheduling.sequences import Chunk, Sequence

_sequence = itemgetter(0)


class Flights:
    """Batches in flight, of which no two have a sequence in common."""

    def __init__(self, depth: int = 1) -> None:
        """`depth`: how many the engine computes at a time."""
        self._depth = depth
        self._batches: list[frozenset[Sequence]] = []
        # Each decodes a token in every batch, which does not name it, for as long as it is here.
        self.steady: set[Sequence] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.steady or any(sequence in batch for batch in self._batches)

    @property
    def sequences(self) -> frozenset[Sequence]:
        return frozenset[Sequence]().union(self.steady, *self._batches)

    def share(self, ready: int) -> int:
        """How many of the sequences that are ready the next batch takes, so that those behind it
        get as many.
        """
        return -(-ready // max(1, self._depth - len(self._batches)))

    def begin(self, batch: Iterable[tuple[Sequence, Chunk]]) -> None:
        """An empty batch is never in flight."""
        if sequences := frozenset(map(_sequence, batch)):
            self._batches.append(sequences)

    def end(self, batch: Iterable[tuple[Sequence, Chunk]]) -> None:
        try:
            self._batches.remove(frozenset(map(_sequence, batch)))
        except ValueError:
            raise AssertionError("not a batch that is in flight") from None

    def check(self) -> None:
        flying = len(self.steady) + sum(map(len, self._batches))
        assert len(self.sequences) == flying, "a sequence is in two batches"
