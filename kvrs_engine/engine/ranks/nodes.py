"""An instance with stages in hosts, on this node or on others, as one worker.

The first stages may have their ranks in the instance's own process. A batch passes from stage to
stage as float32 rows, through the instance's process, so that no bit changes. A page consists of
the parts of all stages.

Each group of ranks re-forms by itself; a running batch is abandoned and computed again when all
groups serve. Every stage of an abandoned batch has answered, so that none writes into its pages any
more. If a host or its connection is lost, another instance of the group lends its host of the same
stage, or a new own host takes over. All cells of the stage are lost, and the same attempts compute
or fetch them again, unless their streams leave. If no host comes, the instance's process ends; the
remaining hosts serve the next process with their loaded weights.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvrs.config.cluster import InstanceSettings
from kvrs.config.file import Config
from kvrs.errors import KvrsError, RanksLostError
from kvrs.ids import NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.pages import Cell, Part
from kvrs.transfer.peers import Identity, Peer
from kvrs_engine.elastic.layouts import Layout, fresh_turns
from kvrs_engine.elastic.placing import Turns
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.digests import root_of
from kvrs_engine.engine.ranks.connection import StageAt
from kvrs_engine.engine.ranks.formation import Predict
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.link import StageFacts, StageUse, facts_digest
from kvrs_engine.engine.ranks.reformed import RanksNow, ReformingNow
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.ranks.returning import StageLoan
from kvrs_engine.engine.ranks.stages import base_beside, limit_s_of, step_factors
from kvrs_engine.engine.worker import ModelWorker, fingerprint_of
from kvrs_engine.scheduling import sequences
from kvrs_engine.scheduling.sequences import Chunk


class StageGroup(Protocol):
    """Consecutive stages: `RankGroup` below this process, `RemoteStage` in a host."""

    stages: range
    layers: range
    # Called from another thread: the stages have ended for good; the state of ranks has changed.
    on_end: Callable[[RanksLostError], object]
    on_change: Callable[[], object]

    @property
    def facts(self) -> StageFacts: ...
    @property
    def now(self) -> RanksNow: ...
    def use(self) -> dict[int, StageUse]: ...

    def execute(self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float) -> Tensor:
        """Compute a batch from the previous stage's rows `[padded rows, hidden]`; return the output
        rows, or the logits of the model's last stage.

        Raises:
            RanksLostError: the batch has failed.
        """
        ...

    def on_lost(self) -> None:
        """Wait until the ranks can compute again, and none computes an earlier batch.

        Raises:
            RanksLostError: the ranks are lost for good.
        """
        ...

    def on_restart(self) -> None:
        """Note that the page tables have dropped all pages that lost cells."""
        ...

    async def read(self, pages: Sequence[int]) -> Tensor:
        """Read these stages' part of pages, as bytes `[pages, part of a page]`.

        Raises:
            TransferError: the stages or cells of the pages are lost.
        """
        ...

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None = None) -> None:
        """Write these stages' part of pages. `cells` are the cells of a page in `parts`; None: all.

        Raises:
            TransferError: the stages are lost, or cells were lost meanwhile.
        """
        ...

    def lose_device(self, rank: int, bases: Sequence[int] = ()) -> dict[int, frozenset[Cell]]:
        """Do as `RankGroup.lose_device`; raises TransferError if the stages are lost."""
        ...

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        """Do as `Reformer.order`."""
        ...

    def end(self) -> None:
        """End the stages; a running batch fails with RanksLostError."""
        ...

    def close(self) -> None: ...


class RanksOnNodes(ModelWorker, StepHook):
    """Groups of stages with the interface of `Worker`. As many threads as stages may call `execute`
    at a time.
    """

    def __init__(
        self,
        config: Config,
        node: NodeId,
        instance: InstanceSettings,
        layout: Layout,
        secret: bytes,
        epoch: int,
    ) -> None:
        """Start the ranks of the local stages, and wait until all stages can compute. `epoch` is
        that of the sessions with hosts; it must rise with every start of the instance.

        Raises:
            ConfigError: directory or settings are wrong.
            KvrsError: there is not enough memory, a stage cannot be used, or the stages differ.
        """
        assert config.cluster.model is not None, "the caller has looked"
        directory, settings = Path(config.cluster.model), config.cluster.engine
        model = ModelConfig.from_directory(directory)
        super().__init__(model, settings)
        self.full, self.units = layout, model.units_of_ranks
        self._has_bases = config.elastic.spread_heads
        self.predict: Predict | None = None
        # Called from another thread: the instance cannot go on; the state of the ranks has changed.
        self.on_end: Callable[[RanksLostError], object] = lambda lost: None
        self.on_change: Callable[[], object] = lambda: None
        self._ending = threading.Lock()
        self._end: RanksLostError | None = None
        self.groups: list[StageGroup] = []
        digest, page_bytes = facts_digest(model, settings, layout), self.geometry.page_bytes
        own = Identity(instance.id, node, epoch, digest, page_bytes)
        try:
            if local := instance.own_stages:
                elastic = config.elastic
                self.groups.append(RankGroup(directory, settings, layout, elastic, local))
            for stage, host in instance.remote_stages.items():
                peer = Peer(instance.stage_host_id(stage), host.node, host.host, host.port)
                at = StageAt(peer, own, secret, config.transfer)
                donors = []
                for _, other in config.cluster.donors(instance.id):
                    there = other.remote_stages[stage]
                    name = other.stage_host_id(stage)
                    peer = Peer(name, there.node, there.host, there.port)
                    donors.append(replace(at, peer=peer, lender=other.id))
                self.groups.append(RemoteStage(at, model, settings, layout, stage, donors))
            self.fingerprint = self._fingerprint(model)
        except BaseException:
            self.close()
            raise
        for group in self.groups:
            group.on_end, group.on_change = self._lost, lambda: self.on_change()
        self.pool = PartedPool(self.geometry, self.groups)

    @property
    def layout(self) -> Layout:
        return self.now.layout

    @property
    def pids(self) -> dict[int, int]:
        return self.now.pids

    @property
    def now(self) -> RanksNow:
        return together([(group.stages, group.now) for group in self.groups])

    @property
    def remote(self) -> list[RemoteStage]:
        """The groups of stages in hosts."""
        return [group for group in self.groups if isinstance(group, RemoteStage)]

    @property
    def loans(self) -> dict[int, StageLoan]:
        """The loans of other instances' hosts, by stage."""
        found = {group.stages.start: group.loan for group in self.remote}
        return {stage: loan for stage, loan in found.items() if loan is not None}

    def factors(self, layout: Layout) -> tuple[float, float]:
        """Return the step times of decode and prefill relative to the full layout."""
        return step_factors(layout, self.full, self.units)

    def use(self) -> dict[int, StageUse]:
        return {stage: used for group in self.groups for stage, used in group.use().items()}

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute a batch as `Worker.execute` does.

        Raises:
            RanksLostError: the batch has failed, and no stage computes it any more.
        """
        assert chunks, "a batch has at least one chunk"
        limit_s = limit_s_of(self.predict, chunks)
        rows: Tensor | None = None
        try:
            for group in self.groups:
                rows = group.execute(chunks, rows, limit_s)
        except RanksLostError as lost:
            raise self._end or lost from None
        assert rows is not None, "an instance has stages"
        return rows

    def on_lost(self) -> None:
        """Sleep until all stages can compute again.

        Raises:
            RanksLostError: a stage is lost for good.
        """
        try:
            for group in self.groups:
                group.on_lost()
        except RanksLostError as lost:
            raise self._end or lost from None

    def on_restart(self) -> None:
        for group in self.groups:
            group.on_restart()

    def place(self, sequence: sequences.Sequence, others: Iterable[sequences.Sequence]) -> None:
        if self._has_bases:
            sequence.base = base_beside(self.layout, others)

    def lose_device(self, rank: int, bases: Sequence[int] = ()) -> dict[int, frozenset[Cell]]:
        return self._group_of(rank).lose_device(rank, bases)

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        if rank not in self.full.ranks:
            refused: Future[str | None] = Future()
            allowed = ", ".join(map(str, self.full.ranks))
            refused.set_result(f"rank: got {rank}; allowed: {allowed}")
            return refused
        return self._group_of(rank).order(rank, leaves=leaves)

    def close(self) -> None:
        """End the ranks of this process and the sessions with hosts; the hosts go on."""
        with self._ending:
            self._end = self._end or RanksLostError(self.full.ranks, "has ended")
        for group in self.groups:
            group.close()

    def _group_of(self, rank: int) -> StageGroup:
        stage = self.full.stages.index(self.full.stage_of(rank))
        return next(group for group in self.groups if stage in group.stages)

    def _lost(self, error: RanksLostError) -> None:
        with self._ending:
            if self._end is not None:
                return
            self._end = error
        for group in self.groups:
            group.end()
        self.on_end(error)

    def _fingerprint(self, model: ModelConfig) -> str:
        """Return the model's fingerprint, which is the same as for a single process.

        Raises:
            KvrsError: the nodes have different arithmetic or weights.
        """
        first = self.groups[0].facts
        for group in self.groups:
            if group.facts.arithmetic != first.arithmetic:
                raise KvrsError(
                    f"stage {group.stages.start} computes with other results than stage 0; "
                    f"allowed: nodes of one arithmetic"
                )
        hashes = {name: leaf for each in self.groups for name, leaf in each.facts.hashes.items()}
        root = root_of(hashes, model.layers)
        for group in self.groups:
            # A node has read only its own layers; its saved root is that of the whole model.
            if group.facts.root not in (None, root):
                raise KvrsError(
                    f"stage {group.stages.start} has the weights of another model than the other "
                    f"stages; allowed: the same files on all nodes"
                )
        return fingerprint_of(first.arithmetic, root)


def together(parts: Sequence[tuple[range, RanksNow]]) -> RanksNow:
    """Combine the states of consecutive parts. Together they re-form until the last part serves,
    and pause if any part pauses.
    """
    each = [now for _, now in parts]
    number = sum(now.number for now in each)
    reforming: ReformingNow | None = None
    if under_way := [now.reforming for now in each if now.reforming is not None]:
        after = [
            (stages, now.layout if now.reforming is None else now.reforming.after)
            for stages, now in parts
        ]
        reforming = replace(
            max(under_way, key=lambda now: (now.way.pauses, now.ready_at_s)),
            number=number,
            after=joined(after),
            lost=tuple(rank for now in under_way for rank in now.lost),
            move_bytes=sum(now.move_bytes for now in under_way),
            lost_cells=sum(now.lost_cells for now in under_way),
        )
    return RanksNow(
        layout=joined([(stages, now.layout) for stages, now in parts]),
        pids={rank: pid for now in each for rank, pid in now.pids.items()},
        deaths=sum(now.deaths for now in each),
        number=number,
        reforming=reforming,
    )


def joined(parts: Sequence[tuple[range, Layout]]) -> Layout:
    """Combine the layouts of consecutive parts of one model, each with its own stages."""
    _, last = parts[-1]
    by_layer = [(layer, layout) for stages, layout in parts for layer in layout.layers(stages)]
    joined_stages = tuple(layout.stages[stage] for stages, layout in parts for stage in stages)
    turns: Turns = ()
    if any(layout.turns for _, layout in parts):
        # A part without spread heads has no turns; any turns are valid there.
        fresh = fresh_turns(joined_stages)
        turns = tuple((layout.turns or fresh)[layer] for layer, layout in by_layer)
    copies = tuple(layout.copies_of(layer) for layer, layout in by_layer)
    return Layout(
        number=1 + sum(layout.number - 1 for _, layout in parts),
        stages=joined_stages,
        attention=tuple(layout.attention[layer] for layer, layout in by_layer),
        mlp=tuple(layout.mlp[layer] for layer, layout in by_layer),
        vocabulary=last.vocabulary,
        turns=turns,
        copies=copies if any(copies) else (),
        split=last.split,
    )


class PartedPool:
    """A `PagePool` of whole pages over the parts of several groups."""

    def __init__(self, geometry: KvGeometry, groups: Sequence[StageGroup]) -> None:
        self.geometry, self.groups = geometry, groups

    def stage(self, pages: Sequence[int], part: Part | None = None) -> "PartedPages":
        """Stage pages as `PagePool.stage` does, or with `part` only these cells of each page."""
        return PartedPages(self, pages, part)


class PartedPages:
    """Copies of pages, or of some of their cells, between an instance's groups and sockets."""

    def __init__(self, pool: PartedPool, pages: Sequence[int], part: Part | None) -> None:
        self._pool, self._pages, self._part = pool, list(pages), part
        size = pool.geometry
        own = part or Part(range(size.layers), range(size.kv_heads))
        self._layers = own.layers
        self._layer_bytes = size.page_bytes // size.page_cells * len(own.heads)
        page_bytes = self._layer_bytes * len(own.layers)
        self._buffer = torch.empty(len(pages), page_bytes, dtype=torch.uint8)
        self.views = [page.numpy().data for page in self._buffer]

    async def save(self) -> None:
        assert self._part is None, "whole pages are sent"

        async def read(group: StageGroup) -> None:
            self._columns(group.layers, len(self._pages)).copy_(await group.read(self._pages))

        await _all([read(group) for group in self._pool.groups])

    async def restore(self, count: int) -> None:
        async def write(group: StageGroup) -> None:
            layers = range(
                max(group.layers.start, self._layers.start),
                min(group.layers.stop, self._layers.stop),
            )
            if layers and count:
                part = None if self._part is None else Part(layers, self._part.heads)
                await group.write(self._pages[:count], self._columns(layers, count), part)

        await _all([write(group) for group in self._pool.groups])

    def free(self) -> None:
        """Do nothing: the memory lives as long as its views."""

    def _columns(self, layers: range, count: int) -> Tensor:
        """Return the bytes of these layers in the first `count` pages."""
        first = layers.start - self._layers.start
        stop = first + len(layers)
        return self._buffer[:count, first * self._layer_bytes : stop * self._layer_bytes]


async def _all(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all parts; a cancelled call returns only when all have ended."""
    work = asyncio.gather(*parts, return_exceptions=True)
    try:
        found = await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
    for each in found:
        if each is not None:
            raise each
