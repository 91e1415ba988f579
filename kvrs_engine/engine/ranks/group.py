"""The ranks below one process: all of an instance's, as one worker, or those of some stages.

The process keeps no weights and computes nothing: it sends each batch to all ranks and reads the
logits, or the rows of its last stage. It owns the memory of their KV cells and of their units, so
both outlive a rank's process, and pages are sent and received without a rank.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from kvrs.config.engine import ElasticSettings, EngineSettings
from kvrs.errors import RanksLostError
from kvrs.ids import NodeId
from kvrs.protocol.instance import LayoutInfo, RankInfo
from kvrs.protocol.parts import Cell, Part
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.moving import LinkRates
from kvrs_engine.elastic.reforming import Reforming
from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.waiting import UNPREDICTED_S
from kvrs_engine.elastic.ways import Costs, Room
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.layers.proofs import sample
from kvrs_engine.engine.layers.tiles import padded_rows
from kvrs_engine.engine.models.digests import Note, root_of
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.ranks.cells import probe_page
from kvrs_engine.engine.ranks.formation import Predict, RankFormation
from kvrs_engine.engine.ranks.link import StageFacts, StageUse
from kvrs_engine.engine.ranks.reformed import RanksNow, ReformingNow
from kvrs_engine.engine.ranks.reformer import Reformer, cells_of
from kvrs_engine.engine.ranks.returning import StageLoan
from kvrs_engine.engine.ranks.seats import END_S
from kvrs_engine.engine.ranks.stages import StageRanks, base_beside, limit_s_of
from kvrs_engine.engine.worker import end_tokens_of, fingerprint_of, geometry_of
from kvrs_engine.scheduling import sequences
from kvrs_engine.scheduling.sequences import Chunk

_PROBE_TOKENS = 8


def describe_ranks(
    layout: Layout,
    pids: Mapping[int, int],
    nodes: Sequence[NodeId],
    loans: Mapping[int, StageLoan] = {},
    *,
    re_forms: bool,
) -> tuple[list[RankInfo], LayoutInfo]:
    """The ranks as others see them. `nodes`: of each stage that is not lent by others."""
    stages = [(stage.first, stage.last) for stage in layout.stages]
    ranks = []
    for rank in layout.ranks:
        if rank not in pids:
            continue
        share = Share.of(layout, rank)
        stage = layout.stages.index(layout.stage_of(rank))
        heads = sorted({head for own in (*share.heads, *share.spread) for head in own})
        node, loan = nodes[stage], loans.get(stage)
        if loan is not None:
            node = loan.node
        ranks.append(
            RankInfo(
                rank,
                stage,
                pids[rank],
                node,
                share.units,
                heads,
                borrowed_from=None if loan is None else loan.lender,
            )
        )
    return ranks, LayoutInfo(layout.number, stages, re_forms)


class RankGroup(StageRanks, StepHook):
    """The face of a `Worker` where all stages are here, and a `StageGroup` where some are.
    `execute` may be called by as many threads at a time as there are stages.
    """

    fingerprint: str  # Of the whole model, where all stages are here.

    def __init__(
        self,
        model_directory: Path,
        settings: EngineSettings,
        layout: Layout,
        elastic: ElasticSettings | None = None,
        lookahead_tokens: int = 0,
        stages: range | None = None,
        *,
        yields: bool = False,
    ) -> None:
        """Start the ranks and wait until all can compute. `lookahead_tokens`: as of the policy;
        `stages`: that have their ranks here, None: all; `yields`: the start yields to whatever else
        runs on the machine.

        Raises:
            ConfigError: directory or settings are wrong.
            KvrsError: there is not enough memory, a rank has ended, or the ranks differ.
        """
        elastic = elastic or ElasticSettings()
        self._has_bases = elastic.spread_heads
        stages = stages or range(len(layout.stages))
        spreads = elastic.spread_heads
        super().__init__(model_directory, settings, layout, stages, spreads=spreads, yields=yields)
        self.full = layout
        self.units, self.geometry = self._config.units_of_ranks, geometry_of(self._config, settings)
        self.vocab_size, self.eos_token_ids = self._config.vocab, end_tokens_of(self._config)
        self.max_positions = min(settings.max_model_len, self._config.max_positions)
        self.gpus: list[str] | None = []
        self._is_closed = False
        # Predicted seconds of a batch, once that is known.
        self.predict: Predict | None = None
        # Called from another thread: the instance cannot go on; something of the ranks is new.
        self.on_end: Callable[[RanksLostError], object] | None = None
        self.on_change: Callable[[], object] | None = None
        self.lost: dict[int, float] = {}  # Ranks that have died, and when that was noticed.
        self.lost_devices: set[int] = set()  # Of them, those that lost their memory as well.
        self.streams = 0  # Of the batches that were computed when the last one began.
        self._serving = threading.Condition()
        # Streams of each batch that is computed; under `_serving`.
        self._under_way: list[int] = []
        self.formation: RankFormation | None = None
        self._end: RanksLostError | None = None
        self._reformer: Reformer | None = None
        self.probed = torch.empty(0)
        try:
            costs = self._start()
            self.facts = self._facts(model_directory)
        except BaseException:
            self.close()
            raise
        self._machine = machine = Reforming(
            self._config.units_of_ranks,
            layout,
            Room(capacity_bytes=0, cell_bytes=0, pages=0),
            costs,
            min_ranks=elastic.min_ranks,
            spread=elastic.spread_heads,
            in_pieces=False,
            stages=stages,
        )
        self._reformer = Reformer(self, machine, elastic, lookahead_tokens)
        self._reformer.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that are not lost."""
        seats = list(self.processes.seats.items())
        return {rank: seat.pid for rank, seat in seats if rank not in self.lost}

    @property
    def unit_bytes(self) -> dict[int, int]:
        """Resident bytes of units by rank."""
        units = self._config.units
        return {
            rank: sum(map(units.bytes_of, seat.units))
            for rank, seat in self.processes.seats.items()
        }

    @property
    def reforming(self) -> ReformingNow | None:
        """None: all ranks of the layout compute."""
        return None if self._reformer is None else self._reformer.now

    @property
    def reformer(self) -> Reformer:
        assert self._reformer is not None, "the ranks compute"
        return self._reformer

    @property
    def now(self) -> RanksNow:
        deaths, number = self.reformer.deaths, self._machine.epoch
        return RanksNow(self.layout, self.pids, deaths, number, self.reforming)

    def use(self, session: int | None = None) -> dict[int, StageUse]:
        """Work and reads of each stage, in a session of a host or without one."""
        formation, read = self.formation, self.processes.read_bytes
        lines = {} if formation is None else formation.memory.lines
        return {
            stage: StageUse(
                os.getpid(),
                session,
                sum(lines[rank].worked_ms.value / 1e3 for rank in ranks if rank in lines),
                sum(read[rank] for rank in ranks),
            )
            for stage in self.stages
            if (ranks := self.full.stages[stage].ranks)
        }

    def factors(self, layout: Layout) -> tuple[float, float]:
        """Step times of decode and of prefill over those of the full layout."""
        return self.reformer.factors(layout)

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        return self.reformer.order(rank, leaves=leaves)

    def execute(
        self, chunks: Sequence[Chunk], rows: Tensor | None = None, limit_s: float | None = None
    ) -> Tensor:
        """Compute a batch as `Worker.execute` does, one at a time where some stages are elsewhere:
        from the rows `[padded rows, hidden]` of the stage before to those behind the last stage
        here, or to logits where that is the model's last. `limit_s`: for so long no rank may come
        further; None: as it is predicted.

        Raises:
            RanksLostError: the batch is not computed; KV of its positions may be written in part.
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
            # A rank that was killed may have read its cells when these were gone.
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
        """Sleep until the ranks compute again.

        Raises:
            RanksLostError: they do not any more.
        """
        with self._serving:
            self._serving.wait_for(lambda: self.formation is not None or self._end is not None)
        if self._end is not None:
            raise self._end

    def on_restart(self) -> None:
        self.pool.mended()

    async def read(self, pages: Sequence[int]) -> Tensor:
        """The part of these pages that is here, as bytes `[pages, part of a page]`.

        Raises:
            TransferError: cells of it are lost.
        """
        staged = self.pool.stage(pages)
        await staged.save()
        return staged.buffer

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None = None) -> None:
        """The other way round; `cells`: those that `parts` has of each page, None: all.

        Raises:
            TransferError: cells were lost meanwhile.
        """
        staged = self.pool.stage(pages, cells)
        staged.buffer.copy_(parts)
        await staged.restore(len(pages))

    def place(self, sequence: sequences.Sequence, others: Iterable[sequences.Sequence]) -> None:
        if self._has_bases:
            sequence.base = base_beside(self.layout, others)

    def lose_device(self, rank: int, bases: Sequence[int] = ()) -> dict[int, frozenset[Cell]]:
        """Kill a rank and drop the memory of its cells and its units; `bases`: of each page.
        Returns the cells of a page by its base, of bases with any: a model may have fewer KV heads
        than ranks.
        """
        # Before the kill: the survivors may have their layout a moment after it.
        by_base = {base: cells_of(self.layout, rank, base) for base in {0, *bases}}
        cells = {base: own for base, own in by_base.items() if own}
        self.lost_devices.add(rank)
        self.processes.seats[rank].kill(with_device=True)
        if cells:
            self.pool.lose(cells, bases)
        return cells

    def close(self) -> None:
        """End all ranks, however far they are."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._reformer is not None:
            self._reformer.stop()
        self.end()
        self.end_ranks(0.0 if self.lost else END_S)

    def end(self) -> None:
        """Let batches, and calls that wait for the ranks, end in RanksLostError."""
        with self._serving:
            self._end = self._end or RanksLostError(self.layout.ranks, "has ended")
            formation, self.formation = self.formation, None
            self._serving.notify_all()
        if formation is not None:
            formation.end()

    # For the thread that re-forms.

    def freeze(self, *, at_once: bool) -> None:
        """Compute nothing more in this formation; `at_once`: not even the batches under way."""
        with self._serving:
            formation, self.formation = self.formation, None
            if at_once and formation is not None:
                formation.end()
            self._serving.wait_for(lambda: not self._under_way)
        if formation is not None:
            formation.end()

    def probe(self, formation: RankFormation) -> Tensor:
        """Results that are the same in every formation."""
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
        if self.on_end is not None:
            self.on_end(error)

    def changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    # The start.

    def _start(self) -> Costs:
        """Raises ConfigError, KvrsError. Returns the costs of what was done."""
        formation, times = self.start_ranks()
        self.probed = self.probe(formation)
        self.formation = formation
        layout = self.layout
        most = max(layout.weight_bytes(rank, self._config.units_of_ranks) for rank in layout.ranks)
        rate = most / max(times.fetched_s - times.loaded_s, 1e-3)
        return Costs(
            # A copy within memory is several times as fast as a read and a hash.
            rates=LinkRates(rate, 2 * rate),
            kept_is_readable=True,
            join_s=time.monotonic() - times.fetched_s,
            restart_s=times.alone_s,
            replace_s=times.alone_s,
            back_s=times.whole_s,
        )

    def _facts(self, directory: Path) -> StageFacts:
        """Note the root of a whole model beside its files; returns what was loaded."""
        arithmetic, hashes = self.processes.arithmetic, self.processes.hashes
        assert arithmetic is not None, "all ranks have answered"
        note = Note(directory, Weights(directory).files)
        noted = note.read()
        if len(self.stages) == len(self.layout.stages):
            root = root_of(hashes, self._config.layers)
            if noted != root:
                note.write(root)
            self.fingerprint = fingerprint_of(arithmetic, root)
        return StageFacts(arithmetic, hashes, noted)
