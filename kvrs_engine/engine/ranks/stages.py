"""The ranks of consecutive stages on one node: their processes, the memory of their KV cells, their
start, and their batches.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

import torch
from torch import Tensor

from kvrs.config.cluster import ElasticSettings, EngineSettings
from kvrs.errors import ConfigError, RanksLostError
from kvrs.transfer.shared_memory import Region
from kvrs_engine.elastic.experts import Tiles
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.placing import least_loaded
from kvrs_engine.elastic.plans import plan
from kvrs_engine.elastic.speed import Shares, shares
from kvrs_engine.elastic.units import Units
from kvrs_engine.elastic.waiting import UNPREDICTED_S, batch_limit_s, start_limit_s
from kvrs_engine.engine.layers.proofs import sample
from kvrs_engine.engine.layers.tiles import padded_rows
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.cells import WholePages, memory_bytes, of_layers, probe_page
from kvrs_engine.engine.ranks.exchange import Areas
from kvrs_engine.engine.ranks.formation import Predict, RankFormation
from kvrs_engine.engine.ranks.futex import check_futexes
from kvrs_engine.engine.ranks.processes import RankMessage, RankProcesses
from kvrs_engine.engine.ranks.seats import END_S, Answered, Ended, RankSeat
from kvrs_engine.engine.ranks.wire import Fetched, Joined, Loaded, Refused
from kvrs_engine.engine.ranks.yielding import LOAD_NICE
from kvrs_engine.engine.worker import ModelWorker
from kvrs_engine.scheduling import sequences
from kvrs_engine.scheduling.sequences import Chunk

_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class StartTimes:
    """The start times of the slowest rank: `alone_s` without proofs for later losses, `whole_s`
    with them; and the times at which all ranks were loaded and had fetched their units.
    """

    alone_s: float
    whole_s: float
    loaded_s: float
    fetched_s: float


class StageRanks(ModelWorker):
    """The ranks of some stages: their start, their batches, and their formations."""

    pool: WholePages

    def __init__(
        self,
        model_directory: Path,
        settings: EngineSettings,
        layout: Layout,
        stages: range,
        elastic: ElasticSettings,
        *,
        yields: bool = False,
    ) -> None:
        """`stages` are the local stages of the layout. `yields`: the start runs at a lowered
        priority.

        Raises:
            ConfigError: directory or settings are wrong.
            KvrsError: there is not enough memory.
        """
        check_futexes()
        if settings.device != "cpu":
            raise ConfigError(
                f"cluster.engine.device: got {settings.device!r}; allowed with several ranks: 'cpu'"
            )
        self.stages = stages
        self.full = self.layout = layout
        self.predict: Predict | None = None  # Predicts the time of a batch, once measured.
        # Called from another thread: the instance cannot go on; the state of the ranks has changed.
        self.on_end: Callable[[RanksLostError], object] = lambda lost: None
        self.on_change: Callable[[], object] = lambda: None
        self.lost: dict[int, float] = {}  # Dead ranks, with the time of detection.
        self.lost_devices: set[int] = set()  # Dead ranks whose memory is lost too.
        self.streams = 0  # Number of streams in running batches when the last batch began.
        self._serving = threading.Condition()
        # Number of streams of each running batch; guarded by `_serving`.
        self._under_way: list[int] = []
        self.formation: RankFormation | None = None
        self._end: RanksLostError | None = None
        self.probed = torch.empty(0)  # The expected result of `probe`.
        self._began_s = self._heard_s = 0.0  # Times of the start, and of the last answer.
        self._alone_s = self._whole_s = 0.0  # Times as in `StartTimes`.
        self._yields = yields
        self.layers = layout.layers(stages)
        self._config = ModelConfig.from_directory(model_directory)
        super().__init__(self._config, settings)
        self.units = self._config.units_of_ranks
        geometry = of_layers(self.geometry, self.layers)
        self._cells = Region.anonymous("kvrs-cells", memory_bytes(geometry, settings.pages))
        memory = torch.frombuffer(self._cells.memory, dtype=torch.uint8)
        self.pool = WholePages(geometry, settings.pages, memory, self.layers.start)
        self.processes = RankProcesses(
            model_directory, settings, self._config, self._cells, elastic, yields=yields
        )

    def start_ranks(self) -> tuple[RankFormation, StartTimes]:
        """Start the processes and wait until all can compute.

        Raises:
            ConfigError, KvrsError: a rank cannot be used, has ended, or hangs.
        """
        processes, layout = self.processes, self.layout
        self._began_s = self._heard_s = time.monotonic()
        own = [(stage, rank) for stage in self.stages for rank in layout.stages[stage].ranks]
        for stage, rank in own:
            processes.seats[rank] = processes.start(rank, layout, stage, readers=len(own))
        self._collect([*processes.seats])
        loaded_s = time.monotonic()
        whole = plan(layout, layout, self.units, layout.ranks, in_pieces=False)
        moves = [move for move in whole.moves if move.target in processes.seats]
        processes.fetch(1, moves, nice=LOAD_NICE if self._yields else 0)
        self._collect(move.target for move in moves)
        fetched_s = time.monotonic()
        formation = self.form(1, layout)
        self._collect([*processes.seats])
        processes.begun()
        return formation, StartTimes(self._alone_s, self._whole_s, loaded_s, fetched_s)

    def form(self, epoch: int, layout: Layout) -> RankFormation:
        """Create a formation that does not serve yet."""
        areas = Areas(
            layout,
            self.stages,
            config=self._config,
            batch_tokens=self.settings.max_batch_tokens,
        )
        return self.processes.form(epoch, layout, self.stages, areas)

    def execute(
        self, chunks: Sequence[Chunk], rows: Tensor | None = None, limit_s: float | None = None
    ) -> Tensor:
        """Compute a batch as `Worker.execute` does, one at a time if some stages are elsewhere.

        `rows` is the previous stage's output `[padded rows, hidden]`. The result is the output of
        the last local stage, or the logits of the model's last stage. `limit_s` limits the time
        without progress; None: by prediction.

        Raises:
            RanksLostError: the batch has failed; KV of its positions may be partially written.
        """
        assert chunks, "a batch has at least one chunk"
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        assert tokens <= self.settings.max_batch_tokens, "the ranks' slots have room for no more"
        with self._serving:
            formation, losses = self.formation, self.pool.losses
            self.streams = sum(self._under_way, len(chunks))
            if formation is None or not self.pool.is_whole:
                raise RanksLostError(sorted(self.lost), "has died")
            self._under_way.append(len(chunks))
        try:
            limit_s = limit_s or limit_s_of(self.predict, chunks)
            logits = formation.execute(chunks, self.geometry.page_size_tokens, limit_s, rows)
            # A killed rank may have read its cells after they were lost.
            if losses != self.pool.losses:
                raise RanksLostError(sorted(self.lost), "has lost cells meanwhile")
            return logits
        except RanksLostError:
            formation.end()
            with self._serving:
                if self.formation is formation:
                    self.formation = None
            raise
        finally:
            with self._serving:
                self._under_way.remove(len(chunks))
                self._serving.notify_all()

    def on_lost(self) -> None:
        """Sleep until the ranks can compute again.

        Raises:
            RanksLostError: the ranks are lost for good.
        """
        with self._serving:
            self._serving.wait_for(lambda: self.formation is not None or self._end is not None)
        if self._end is not None:
            raise self._end

    def end(self) -> None:
        """End the ranks: batches and waiting calls fail with RanksLostError."""
        with self._serving:
            self._end = self._end or RanksLostError(self.layout.ranks, "has ended")
            formation, self.formation = self.formation, None
            self._serving.notify_all()
        if formation is not None:
            formation.end()

    # Called by the reformer's thread.

    def freeze(self, *, at_once: bool) -> None:
        """End the current formation after its running batches; `at_once`: abandon these."""
        with self._serving:
            formation, self.formation = self.formation, None
            if at_once and formation is not None:
                formation.end()
            self._serving.wait_for(lambda: not self._under_way)
        if formation is not None:
            formation.end()

    def probe(self, formation: RankFormation) -> Tensor:
        """Compute a fixed probe, whose results must be the same in every formation."""
        count = min(_PROBE_TOKENS, self.geometry.page_size_tokens, self.max_positions)
        ids = [(7 * at + 3) % self.vocab_size for at in range(count)]
        chunk = Chunk(ids, 0, [probe_page(self.settings.pages)], logits=1)
        rows = None
        if self.stages.start:
            rows = sample(padded_rows(count), self._config.hidden, torch.device("cpu"))
        return formation.execute([chunk], self.geometry.page_size_tokens, UNPREDICTED_S, rows)

    def serve(self, formation: RankFormation) -> None:
        with self._serving:
            self.layout, self.formation = formation.layout, formation
            self._serving.notify_all()

    def give_up(self, error: RanksLostError) -> None:
        with self._serving:
            self._end = error
            self._serving.notify_all()
        self.on_end(error)

    def end_ranks(self, patience_s: float = END_S) -> None:
        """End all processes, also starting ones, and free the memory."""
        self.processes.close(patience_s)
        self._cells.close()

    def _collect(self, ranks: Iterable[int]) -> None:
        """Wait for one answer per entry in `ranks`."""
        awaited = Counter(ranks)
        while awaited.total():
            told = self._next_told(awaited)
            if isinstance(told, Ended):
                self._take_last_words(told.seat)
                raise RanksLostError([told.seat.rank], "did not start")
            assert isinstance(told, Answered)
            awaited[told.seat.rank] -= 1
            match told.answer:
                case Refused(faults=faults):
                    raise ConfigError(faults)
                case Loaded() as loaded:
                    self.processes.loaded(told.seat, loaded)
                    took_s = self._heard_s - told.seat.began_s
                    self._alone_s = max(self._alone_s, took_s - loaded.ahead_s)
                    self._whole_s = max(self._whole_s, took_s)
                case Fetched() as fetched:
                    self.processes.fetched(told.seat, fetched)
                case Joined():
                    pass

    def _take_last_words(self, seat: RankSeat) -> None:
        """Look for the last message of an ended rank, which may arrive after the report of its end.

        Raises:
            ConfigError: the message names the cause of the end.
        """
        until_s = time.monotonic() + END_S
        while seat.is_loaded and (left_s := until_s - time.monotonic()) > 0:
            try:
                told = self.processes.told.get(timeout=left_s)
            except Empty:
                return
            match told:
                case Answered(seat=other, answer=Refused(faults=faults)) if other is seat:
                    raise ConfigError(faults)
                case Ended(seat=other) if other is seat:
                    return

    def _next_told(self, awaited: Counter[int]) -> RankMessage | None:
        """Return the next message; raises RanksLostError if the awaited ranks hang."""
        limit_s = start_limit_s(self._heard_s - self._began_s)
        try:
            told = self.processes.told.get(timeout=limit_s)
        except Empty:
            hanging = sorted(+awaited)
            raise RanksLostError(
                hanging, f"said nothing for {limit_s:.0f} s as it started"
            ) from None
        self._heard_s = time.monotonic()
        return told


def base_beside(layout: Layout, others: Iterable[sequences.Sequence]) -> int:
    """Return the base for a new sequence beside the other sequences (RaidServe's routing)."""
    pending = dict.fromkeys(range(layout.bases), 0)
    for other in others:
        pending[other.base % len(pending)] += other.uncomputed_tokens
    return least_loaded(pending)


def step_factors(
    layout: Layout, full: Layout, units: Units, tiles: Tiles = ()
) -> tuple[float, float]:
    """Return the step times of decode and prefill relative to the full layout, for ranks on this
    node.

    Each rank computes with one thread; if ranks outnumber processors, a processor's share bounds
    the time. `tiles` is the load of the experts; empty: not known.
    """
    least = 1 / len(os.sched_getaffinity(0))

    def in_turns(own: Shares) -> Shares:
        return Shares(max(own.cells, least), max(own.weights, least), max(own.rows, least))

    own, whole = (in_turns(shares(each, units, tiles)) for each in (layout, full))
    return own.factors(whole)


def limit_s_of(predict: Predict | None, chunks: Sequence[Chunk]) -> float:
    """Return the limit of a batch's time without progress."""
    return batch_limit_s(None if predict is None else predict(chunks))
