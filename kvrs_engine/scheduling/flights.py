"""The batches that an engine is computing."""

from collections.abc import Iterable
from operator import itemgetter

from kvrs_engine.scheduling.sequences import Chunk, Sequence

_sequence = itemgetter(0)


class Flights:
    """The batches in flight; a sequence is in one batch at most."""

    def __init__(self, depth: int = 1) -> None:
        """`depth` is the number of batches that the engine computes at a time."""
        self._depth = depth
        self._batches: list[frozenset[Sequence]] = []
        # Sequences that decode a token in every batch without being listed in it.
        self.steady: set[Sequence] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.steady or any(sequence in batch for batch in self._batches)

    @property
    def sequences(self) -> frozenset[Sequence]:
        return frozenset[Sequence]().union(self.steady, *self._batches)

    def share(self, ready: int) -> int:
        """Return the number of ready sequences for the next batch, so that the batches after it get
        equally many.
        """
        return -(-ready // max(1, self._depth - len(self._batches)))

    def begin(self, batch: Iterable[tuple[Sequence, Chunk]]) -> None:
        """Note a batch in flight; an empty batch is ignored."""
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
