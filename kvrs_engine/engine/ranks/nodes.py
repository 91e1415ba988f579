"""An instance with stages in hosts, on this node or on others, as one worker.

The first stages may have their ranks below the instance's own process. A batch goes from stage to
stage as rows, which are the float32 that ranks of one node hand on in memory, so no bit changes;
the instance's process passes them on. A page is put together from the parts of all stages.

Each group of ranks re-forms where it is: a batch is given up meanwhile, and computed again when all
groups serve. A batch that is given up has been answered by every stage that it was sent to, so none
of them writes into its pages any more. Where a host is lost, or the connection to it, another
instance of the group lends the host that it has of this stage, and until then it is waited for: all
cells of the stage are lost, and are computed or fetched again by the same attempts, unless their
streams leave. If none comes, the instance's process ends; hosts that are left serve the next one,
with the weights that they have.
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
from kvrs.config.policy import LOOKAHEAD_TOKENS
from kvrs.errors import KvrsError, RanksLostError
from kvrs.ids import NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.parts import Cell, Part
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
from kvrs_engine.engine.worker import end_tokens_of, fingerprint_of, geometry_of
from kvrs_engine.scheduling import sequences
from kvrs_engine.scheduling.sequences import Chunk


class StageGroup(Protocol):
    """Consecutive stages: `RankGroup` below this process, `RemoteStage` in a host."""

    stages: range
    layers: range
    # Called from another thread: it computes nothing any more; something of its ranks is new.
    on_end: Callable[[RanksLostError], object] | None
    on_change: Callable[[], object] | None

    @property
    def facts(self) -> StageFacts: ...
    @property
    def now(self) -> RanksNow: ...
    def use(self) -> dict[int, StageUse]: ...

    def execute(self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float) -> Tensor:
        """Compute a batch: from the rows `[padded rows, hidden]` of the stage before to those
        behind the last stage, or to logits where that is the model's last.

        Raises:
            RanksLostError: it is not computed.
        """
        ...

    def on_lost(self) -> None:
        """Wait until the ranks compute again, and none of them an earlier batch.

        Raises:
            RanksLostError: they do not any more.
        """
        ...

    def on_restart(self) -> None:
        """No book has pages any more that were there when cells were lost."""
        ...

    async def read(self, pages: Sequence[int]) -> Tensor:
        """These layers' part of pages, as bytes `[pages, part of a page]`.

        Raises:
            TransferError: the stages, or cells of them, are lost.
        """
        ...

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None = None) -> None:
        """`cells`: those that `parts` has of each page, None: all.

        Raises:
            TransferError: the stages are lost, or cells were meanwhile.
        """
        ...

    def lose_device(self, rank: int, bases: Sequence[int] = ()) -> dict[int, frozenset[Cell]]:
        """`RankGroup.lose_device`. Raises TransferError: the stages are lost."""
        ...

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        """`Reformer.order`."""
        ...

    def end(self) -> None:
        """Let a batch that is computed end in RanksLostError."""
        ...

    def close(self) -> None: ...


class RanksOnNodes(StepHook):
    """The face of a `Worker`, over groups of stages. `execute` may be called by as many threads at
    a time as there are stages.
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
        """Start the ranks of the first stages, and wait until those in hosts can compute. `epoch`:
        of the sessions with these, which rises with every start of the instance.

        Raises:
            ConfigError: directory or settings are wrong.
            KvrsError: there is not enough memory, a stage cannot be used, or the stages differ.
        """
        assert config.cluster.model is not None, "the caller has looked"
        directory, settings = Path(config.cluster.model), config.cluster.engine
        model = ModelConfig.from_directory(directory)
        self.settings, self.full = settings, layout
        self.units, self.geometry = model.units_of_ranks, geometry_of(model, settings)
        self.vocab_size, self.eos_token_ids = model.vocab, end_tokens_of(model)
        self.max_positions = min(settings.max_model_len, model.max_positions)
        self.gpus: list[str] | None = []
        self._has_bases = config.elastic.spread_heads
        self.predict: Predict | None = None
        # Called from another thread: the instance cannot go on; something of the ranks is new.
        self.on_end: Callable[[RanksLostError], object] | None = None
        self.on_change: Callable[[], object] | None = None
        self._ending = threading.Lock()
        self._end: RanksLostError | None = None
        self.groups: list[StageGroup] = []
        digest, page_bytes = facts_digest(model, settings, layout), self.geometry.page_bytes
        own = Identity(instance.id, node, epoch, digest, page_bytes)
        try:
            if local := instance.own_stages:
                elastic = config.elastic
                self.groups.append(
                    RankGroup(directory, settings, layout, elastic, LOOKAHEAD_TOKENS, local)
                )
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
            group.on_end, group.on_change = self._lost, self._changed
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
        """The stages in hosts."""
        return [group for group in self.groups if isinstance(group, RemoteStage)]

    @property
    def loans(self) -> dict[int, StageLoan]:
        """Loans of other instances, by stage."""
        found = {group.stages.start: group.loan for group in self.remote}
        return {stage: loan for stage, loan in found.items() if loan is not None}

    def factors(self, layout: Layout) -> tuple[float, float]:
        """Step times of decode and of prefill over those of the full layout."""
        return step_factors(layout, self.full, self.units)

    def use(self) -> dict[int, StageUse]:
        return {stage: used for group in self.groups for stage, used in group.use().items()}

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute a batch as `Worker.execute` does.

        Raises:
            RanksLostError: the batch is not computed; no stage computes it any more.
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
        """Sleep until all stages compute again.

        Raises:
            RanksLostError: they do not any more.
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
        """End the ranks of this process, and the sessions with hosts, which stay."""
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
        if self.on_end is not None:
            self.on_end(error)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _fingerprint(self, model: ModelConfig) -> str:
        """Fingerprint of the units of all stages, equal to that of one process.

        Raises:
            KvrsError: the nodes do not compute alike, or have other weights.
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
            # Each node has read its own layers only: what was noted there is of the whole model.
            if group.facts.root not in (None, root):
                raise KvrsError(
                    f"stage {group.stages.start} has the weights of another model than the other "
                    f"stages; allowed: the same files on all nodes"
                )
        return fingerprint_of(first.arithmetic, root)


def together(parts: Sequence[tuple[range, RanksNow]]) -> RanksNow:
    """The ranks of all parts, which re-form until the last one serves, and pause if one of them
    does. Each part has these consecutive stages; they follow each other.
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
    """The layout of which each part has these consecutive stages; the parts follow each other, and
    are of one model and of the same layers in each stage.
    """
    _, last = parts[-1]
    by_layer = [(layer, layout) for stages, layout in parts for layer in layout.layers(stages)]
    joined_stages = tuple(layout.stages[stage] for stages, layout in parts for stage in stages)
    turns: Turns = ()
    if any(layout.turns for _, layout in parts):
        # A part without spread heads has no turns, and any do for it.
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
        """Stage pages as `PagePool.stage` does; with `part` these cells of each page."""
        return PartedPages(self, pages, part)


class PartedPages:
    """Copies of pages, or of some of their cells, on their way between the groups of an instance
    and sockets.
    """

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
        """The views stay valid for their holders, as any memory does."""

    def _columns(self, layers: range, count: int) -> Tensor:
        """The bytes of these layers in the first pages."""
        first = layers.start - self._layers.start
        stop = first + len(layers)
        return self._buffer[:count, first * self._layer_bytes : stop * self._layer_bytes]


async def _all(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """A cancelled call returns only when all have ended."""
    work = asyncio.gather(*parts, return_exceptions=True)
    try:
        found = await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
    for each in found:
        if each is not None:
            raise each
