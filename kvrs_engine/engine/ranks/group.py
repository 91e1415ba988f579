"""The ranks of one process: all ranks of an instance, as one worker, or the ranks of some stages.

The process has no weights and computes nothing: it sends each batch to all ranks and reads the
logits, or the rows of its last stage. The process owns the memory of the KV cells and of the units,
which so outlives a rank's process; pages are transferred without a rank.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from kvrs.config.cluster import ElasticSettings, EngineSettings
from kvrs.ids import NodeId
from kvrs.protocol.instance import LayoutInfo, RankInfo
from kvrs.protocol.pages import Cell, Part
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.moving import LinkRates
from kvrs_engine.elastic.reforming import Reforming
from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.ways import Costs, Room
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.models.digests import Note, root_of
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.ranks.link import StageFacts, StageUse
from kvrs_engine.engine.ranks.reformed import RanksNow, ReformingNow
from kvrs_engine.engine.ranks.reformer import Reformer, cells_of
from kvrs_engine.engine.ranks.returning import StageLoan
from kvrs_engine.engine.ranks.seats import END_S
from kvrs_engine.engine.ranks.stages import StageRanks, base_beside
from kvrs_engine.engine.worker import fingerprint_of
from kvrs_engine.scheduling import sequences


def describe_ranks(
    layout: Layout,
    pids: Mapping[int, int],
    nodes: Sequence[NodeId],
    loans: Mapping[int, StageLoan] = {},
    *,
    re_forms: bool,
) -> tuple[list[RankInfo], LayoutInfo]:
    """Describe the ranks and the layout for reports. `nodes` has each stage's node, for stages
    whose host is the own one.
    """
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
    """The ranks of one process, with the interface of `Worker` if it has all stages, else that of
    `StageGroup`. As many threads as stages may call `execute` at a time.
    """

    def __init__(
        self,
        model_directory: Path,
        settings: EngineSettings,
        layout: Layout,
        elastic: ElasticSettings | None = None,
        stages: range | None = None,
        *,
        yields: bool = False,
    ) -> None:
        """Start the ranks and wait until all can compute.

        `stages` are the local stages; None: all. `yields`: the start runs at
        a lowered priority.

        Raises:
            ConfigError: directory or settings are wrong.
            KvrsError: there is not enough memory, a rank has ended, or the ranks differ.
        """
        elastic = elastic or ElasticSettings()
        self._has_bases = elastic.spread_heads
        stages = stages or range(len(layout.stages))
        super().__init__(model_directory, settings, layout, stages, elastic, yields=yields)
        self._is_closed = False
        self._reformer: Reformer | None = None
        try:
            costs = self._start()
            self.facts = self._facts(model_directory)
        except BaseException:
            self.close()
            raise
        self._machine = machine = Reforming(
            self.units,
            layout,
            Room(capacity_bytes=0, cell_bytes=0, pages=0),
            costs,
            min_ranks=elastic.min_ranks,
            planner=elastic.planner,
            spread=elastic.spread_heads,
            in_pieces=False,
            stages=stages,
        )
        self._reformer = Reformer(self, machine, elastic)
        self._reformer.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that are not lost."""
        seats = list(self.processes.seats.items())
        return {rank: seat.pid for rank, seat in seats if rank not in self.lost}

    @property
    def reforming(self) -> ReformingNow | None:
        """The current re-forming; None: all ranks of the layout compute."""
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
        """Return the compute time and the reads of each stage. `session` is a host's session."""
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
        """Return the step times of decode and prefill relative to the full layout."""
        return self.reformer.factors(layout)

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        return self.reformer.order(rank, leaves=leaves)

    def on_restart(self) -> None:
        self.pool.mended()

    async def read(self, pages: Sequence[int]) -> Tensor:
        """Read the local stages' part of pages, as bytes `[pages, part of a page]`.

        Raises:
            TransferError: cells of the pages are lost.
        """
        staged = self.pool.stage(pages)
        await staged.save()
        return staged.buffer

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None = None) -> None:
        """Write the local stages' part of pages. `cells` are the cells of a page in `parts`; None:
        all.

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
        """Kill a rank and drop the memory of its cells and units. `bases` has the base of each
        page. Returns the lost cells by base, without bases that have none (a model may have fewer
        KV heads than ranks).
        """
        # Compute the cells before the kill, because the layout may change right after it.
        by_base = {base: cells_of(self.layout, rank, base) for base in {0, *bases}}
        cells = {base: own for base, own in by_base.items() if own}
        self.lost_devices.add(rank)
        self.processes.seats[rank].kill(with_device=True)
        if cells:
            self.pool.lose(cells, bases)
        return cells

    def close(self) -> None:
        """End all ranks, also ranks that are starting."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._reformer is not None:
            self._reformer.stop()
        self.end()
        self.end_ranks(0.0 if self.lost else END_S)

    def _start(self) -> Costs:
        """Start the ranks; return the measured costs. Raises ConfigError, KvrsError."""
        formation, times = self.start_ranks()
        self.probed = self.probe(formation)
        self.formation = formation
        layout = self.layout
        most = max(layout.weight_bytes(rank, self.units) for rank in layout.ranks)
        rate = most / max(times.fetched_s - times.loaded_s, 1e-3)
        return Costs(
            # A conservative guess: a copy in memory is several times as fast as a read with a hash.
            rates=LinkRates(rate, 2 * rate),
            kept_is_readable=True,
            join_s=time.monotonic() - times.fetched_s,
            restart_s=times.alone_s,
            replace_s=times.alone_s,
            back_s=times.whole_s,
        )

    def _facts(self, directory: Path) -> StageFacts:
        """Return the facts about the loaded weights; save the root of a whole model beside its
        files.
        """
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
