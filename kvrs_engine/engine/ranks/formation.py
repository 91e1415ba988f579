"""A formation: ranks that compute batches together, up to the logits or the rows for the next stage
on another node.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor

from kvrs.errors import RanksLostError
from kvrs.transfer.shared_memory import Region
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.engine.layers.tiles import padded_rows
from kvrs_engine.engine.ranks.exchange import Areas, FormationMemory
from kvrs_engine.engine.ranks.seats import RankSeat, status_of
from kvrs_engine.engine.ranks.wire import batch_of, encode
from kvrs_engine.scheduling.sequences import Chunk

log = logging.getLogger(__name__)

# Limit of the time counted between two looks. After a longer time the looking process was itself
# suspended or starved, and perhaps the ranks too.
_LOOK_MAX_S = 0.1


class HangWatch:
    """Detects that ranks hang in a batch: no rank makes progress for `limit_s`. A slow batch, on a
    busy processor, may take longer.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s, self._looked_s = limit_s, now_s
        self._still_s = 0.0
        self._progress: Sequence[int] = ()

    def look(self, progress: Sequence[int], now_s: float) -> bool:
        """Return whether the ranks hang. `progress` must differ from the last call after any
        progress.
        """
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if progress == self._progress:
            self._still_s += min(passed_s, _LOOK_MAX_S)
        else:
            self._progress, self._still_s = progress, 0.0
        return self._still_s > self._limit_s


class RankFormation:
    """The ranks of one layout on this node, with their shared memory.

    As many threads as stages may compute a batch at a time; each stage computes batches in the same
    order. A new batch begins when the batch whose areas it takes is computed and read.
    """

    def __init__(
        self,
        epoch: int,
        layout: Layout,
        seats: Mapping[int, RankSeat],
        areas: Areas,
        shared: Region,
    ) -> None:
        self.epoch, self.layout = epoch, layout
        self.memory = FormationMemory(shared.memory, areas)
        self._seats = {rank: seats[rank] for rank in areas.ranks}
        self._batch = 0
        self._ordering = threading.Lock()
        # Held from a batch's order until its result is copied: one lock per set of areas.
        self._unread = [threading.Lock() for _ in range(areas.depth)]
        stages = layout.stages
        first, last = (stages.index(layout.stage_of(areas.ranks[at])) for at in (0, -1))
        # The stages whose rows come from another node, and go to another node.
        self._enter = first - 1 if first else None
        self._leave = last if last + 1 < len(stages) else None

    @property
    def has_ended(self) -> bool:
        return bool(self.memory.ended.value)

    def end(self) -> None:
        """End the formation; running batches end without a result."""
        self.memory.end()

    def execute(
        self,
        chunks: Sequence[Chunk],
        page_size_tokens: int,
        limit_s: float,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute a batch as `Worker.execute` does, or return the last local stage's output rows
        `[padded rows, hidden]` if the model's last stage is elsewhere.

        `rows` is the output of the previous stage, if that is elsewhere. `limit_s` is the limit of
        time without progress.

        Raises:
            RanksLostError: ranks were lost, or were killed because they hung.
        """
        with ExitStack() as held:
            with self._ordering:
                self._batch = batch = self._batch + 1
                held.enter_context(self._unread[batch % len(self._unread)])
                self._order(batch, chunks, page_size_tokens, rows)
            watch = HangWatch(limit_s, time.monotonic())
            for rank in self._seats:
                done = self.memory.lines[rank].done
                done.wait(batch, lambda: self._look(batch, watch, limit_s))
            if self._leave is not None:
                return self._rows(self._leave, batch, chunks).clone()
            return self.memory.logits(sum(chunk.logits for chunk in chunks), batch).clone()

    def _order(
        self, batch: int, chunks: Sequence[Chunk], page_size_tokens: int, rows: Tensor | None
    ) -> None:
        """Order all ranks to compute a batch."""
        if self._enter is not None:
            assert rows is not None, "the first stage is elsewhere"
            self._rows(self._enter, batch, chunks).copy_(rows)
            # Act as the sending rank of that stage.
            sender = self.layout.stages[self._enter].ranks[0]
            self.memory.lines[sender].sent.set(batch)
        frame = encode(batch_of(self.epoch, batch, chunks, page_size_tokens))
        for seat in self._seats.values():
            try:
                seat.send(frame)
            except RanksLostError:
                seat.kill()
                raise

    def _rows(self, boundary: int, batch: int, chunks: Sequence[Chunk]) -> Tensor:
        areas, count = self.memory.areas, sum(len(chunk.token_ids) for chunk in chunks)
        return self.memory.floats(areas.rows(boundary, batch), padded_rows(count), areas.hidden)

    def _look(self, batch: int, watch: HangWatch, limit_s: float) -> None:
        """Check for dead and hanging ranks while a batch is computed."""
        dead = [rank for rank, seat in self._seats.items() if seat.process.poll()]
        if dead or self.has_ended:
            status = status_of([self._seats[rank] for rank in dead])
            raise RanksLostError(dead, "has died", status)
        is_hanging = watch.look(self.memory.progress(), time.monotonic())
        if is_hanging and (stuck := self.memory.stuck(batch)):
            # Kill first, so that hanging ranks write nothing later.
            for rank in stuck:
                log.error("a rank hangs in a batch", extra={"rank": rank, "limit_s": limit_s})
                self._seats[rank].kill()
            raise RanksLostError(stuck, f"has made no progress in a batch for {limit_s:.1f} s")


Predict = Callable[[Sequence[Chunk]], float]
