"""Ranks that compute together: from the orders of a batch to its logits, or to its rows where the
next stage is on another node.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kvrs.elastic.layouts import Layout
from kvrs.engine.layers.tiles import padded_rows
from kvrs.engine.ranks.exchange import Areas, FormationMemory
from kvrs.engine.ranks.seats import RankSeat, Shared
from kvrs.engine.ranks.wire import batch_of, encode
from kvrs.errors import RanksLostError
from kvrs.scheduling.sequences import Chunk


class RankFormation:
    """The ranks of one layout that are on this node, in memory of their own. Batches are computed
    by one thread at a time.
    """

    def __init__(
        self,
        epoch: int,
        layout: Layout,
        seats: Mapping[int, RankSeat],
        areas: Areas,
        shared: Shared,
    ) -> None:
        self.epoch, self.layout = epoch, layout
        self.memory = FormationMemory(shared.memory, areas)
        self._seats = {rank: seats[rank] for rank in areas.ranks}
        self._batch = 0
        stages = layout.stages
        first, last = (stages.index(layout.stage_of(areas.ranks[at])) for at in (0, -1))
        # Behind which stages rows come from another node, and go to one.
        self._enter = first - 1 if first else None
        self._leave = last if last + 1 < len(stages) else None

    @property
    def has_ended(self) -> bool:
        return bool(self.memory.ended.value)

    def end(self) -> None:
        """A batch that is computed ends without a result."""
        self.memory.end()

    def execute(
        self,
        chunks: Sequence[Chunk],
        page_size_tokens: int,
        limit_s: float,
        rows: Tensor | None = None,
    ) -> Tensor:
        """As `Worker.execute`, where the last stage is here; else the rows behind the last one that
        is, `[padded rows, hidden]`. `rows`: those of the stage before, where that is elsewhere.

        Raises:
            RanksLostError: ranks were lost, or were killed because they hung.
        """
        self._batch += 1
        if self._enter is not None:
            assert rows is not None, "the first stage is elsewhere"
            self._rows(self._enter, chunks).copy_(rows)
            # As a rank of that stage says it.
            sender = self.layout.stages[self._enter].ranks[0]
            self.memory.lines[sender].sent.set(self._batch)
        frame = encode(batch_of(self.epoch, self._batch, chunks, page_size_tokens))
        until_s = time.monotonic() + limit_s
        for seat in self._seats.values():
            try:
                seat.send(frame)
            except RanksLostError:
                seat.kill()
                raise
        for rank in self._seats:
            done = self.memory.lines[rank].done
            done.wait(self._batch, lambda: self._look(until_s, limit_s))
        if self._leave is not None:
            return self._rows(self._leave, chunks).clone()
        return self.memory.logits(sum(chunk.wants_logits for chunk in chunks)).clone()

    def _rows(self, boundary: int, chunks: Sequence[Chunk]) -> Tensor:
        areas, count = self.memory.areas, sum(len(chunk.token_ids) for chunk in chunks)
        return self.memory.floats(areas.rows(boundary), padded_rows(count), areas.hidden)

    def _look(self, until_s: float, limit_s: float) -> None:
        """While a batch is computed."""
        dead = [rank for rank, seat in self._seats.items() if seat.process.poll()]
        if dead or self.has_ended:
            raise RanksLostError(dead, "has died")
        if time.monotonic() > until_s and (stuck := self.memory.stuck(self._batch)):
            # Before anything else goes on: what they would write later reaches nothing.
            for rank in stuck:
                self._seats[rank].kill()
            raise RanksLostError(stuck, f"has not computed a batch for {limit_s:.1f} s")


Predict = Callable[[Sequence[Chunk]], float]
