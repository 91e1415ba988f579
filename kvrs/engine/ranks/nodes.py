"""An instance with stages in hosts, on this node or on others, as one worker.

The first stages may have their ranks below the instance's own process. A batch goes from stage to
stage as rows, which are the float32 that ranks of one node hand on in memory, so no bit changes;
the instance's process passes them on. A page is put together from the parts of all stages.

Nothing of such an instance is formed again: with any of its ranks, a stage's host or its connection
the instance's process ends, and its streams go elsewhere. Hosts that are left serve the next
process, with the weights that they have.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrs.config.cluster import InstanceSettings
from kvrs.config.file import Config
from kvrs.elastic.layouts import Layout
from kvrs.engine.hooks import StepHook
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.models.digests import root_of
from kvrs.engine.ranks.formation import Predict
from kvrs.engine.ranks.link import facts_digest, stage_key
from kvrs.engine.ranks.local import LocalStages, StageGroup
from kvrs.engine.ranks.remote import RemoteStage, StageAt
from kvrs.engine.ranks.stages import base_beside, limit_s_of
from kvrs.engine.worker import end_tokens_of, fingerprint_of, geometry_of
from kvrs.errors import KvrsError, RanksLostError
from kvrs.ids import NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.parts import Cell
from kvrs.scheduling import sequences
from kvrs.scheduling.sequences import Chunk
from kvrs.transfer.peers import Identity, Peer


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
        self.settings, self.layout, self.full = settings, layout, layout
        self.units, self.geometry = model.units_of_ranks, geometry_of(model, settings)
        self.vocab_size, self.eos_token_ids = model.vocab, end_tokens_of(model)
        self.max_positions = min(settings.max_model_len, model.max_positions)
        self.gpus: list[str] | None = []
        self._has_bases = config.elastic.spread_heads
        self.predict: Predict | None = None
        # Called from another thread: the instance cannot go on.
        self.on_end: Callable[[RanksLostError], object] | None = None
        self._ended = threading.Condition()
        self._end: RanksLostError | None = None
        self.groups: list[StageGroup] = []
        own = Identity(
            instance.id,
            node,
            epoch,
            facts_digest(model, settings, layout),
            self.geometry.page_bytes,
        )
        try:
            if local := instance.own_stages:
                self.groups.append(LocalStages(directory, settings, layout, local))
            for stage, host in instance.remote_stages.items():
                peer = Peer(instance.stage_host_id(stage), host.node, host.host, host.port)
                at = StageAt(peer, own, stage_key(secret), config.transfer.stall_timeout_s)
                self.groups.append(RemoteStage(at, model, settings, layout, stage))
            self.fingerprint = self._fingerprint(model)
        except BaseException:
            self.close()
            raise
        for group in self.groups:
            group.on_end = self._lost
        self.pool = PartedPool(self.geometry, self.groups)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: pid for group in self.groups for rank, pid in group.ready.pids.items()}

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute a batch as `Worker.execute` does.

        Raises:
            RanksLostError: the batch is not computed, nor will any other be.
        """
        assert chunks, "a batch has at least one chunk"
        limit_s = limit_s_of(self.predict, chunks)
        rows: Tensor | None = None
        try:
            for group in self.groups:
                rows = group.execute(chunks, rows, limit_s)
        except RanksLostError as lost:
            self._lost(lost)
            assert self._end is not None, "it was lost now, or before"
            raise self._end from None
        assert rows is not None, "an instance has stages"
        return rows

    def on_lost(self) -> None:
        """Raises RanksLostError: nothing computes again."""
        with self._ended:
            self._ended.wait_for(lambda: self._end is not None)
        assert self._end is not None, "it has just been set"
        raise self._end

    def place(self, sequence: sequences.Sequence, others: Iterable[sequences.Sequence]) -> None:
        if self._has_bases:
            sequence.base = base_beside(self.layout, others)

    def lose_device(self, rank: int, bases: Sequence[int] = ()) -> dict[int, frozenset[Cell]]:
        """Kill a rank; its memory goes with the instance. Returns no cells: none are computed
        again.
        """
        next(group for group in self.groups if rank in group.ready.pids).kill_rank(rank)
        return {}

    def close(self) -> None:
        """End the ranks of this process, and the sessions with hosts, which stay."""
        with self._ended:
            self._end = self._end or RanksLostError(self.layout.ranks, "has ended")
            self._ended.notify_all()
        for group in self.groups:
            group.close()

    def _lost(self, error: RanksLostError) -> None:
        with self._ended:
            if self._end is not None:
                return
            self._end = error
            self._ended.notify_all()
        for group in self.groups:
            group.end()
        if self.on_end is not None:
            self.on_end(error)

    def _fingerprint(self, model: ModelConfig) -> str:
        """Fingerprint of the units of all nodes, equal to that of one process.

        Raises:
            KvrsError: the nodes do not compute alike, or have other weights.
        """
        first, *others = (group.ready for group in self.groups)
        for group, ready in zip(self.groups[1:], others, strict=True):
            if ready.arithmetic != first.arithmetic:
                raise KvrsError(
                    f"stage {group.stages.start} computes with other results than stage 0; "
                    f"allowed: nodes of one arithmetic"
                )
        hashes = {name: leaf for each in (first, *others) for name, leaf in each.hashes.items()}
        root = root_of(hashes, model.layers)
        for group in self.groups:
            # Each node has read its own layers only: what was noted there is of the whole model.
            if group.ready.root not in (None, root):
                raise KvrsError(
                    f"stage {group.stages.start} has the weights of another model than the other "
                    f"stages; allowed: the same files on all nodes"
                )
        return fingerprint_of(first.arithmetic, root)


class PartedPool:
    """A `PagePool` of whole pages over the parts of several nodes."""

    def __init__(self, geometry: KvGeometry, groups: Sequence[StageGroup]) -> None:
        self.geometry = geometry
        self.parts = []
        layer_bytes = geometry.page_bytes // geometry.layers
        for group in groups:
            layers = group.layers
            columns = slice(layers.start * layer_bytes, layers.stop * layer_bytes)
            self.parts.append((group, columns))

    def stage(self, pages: Sequence[int]) -> "PartedPages":
        return PartedPages(self, pages)


class PartedPages:
    """Copies of pages on their way between the nodes of an instance and sockets."""

    def __init__(self, pool: PartedPool, pages: Sequence[int]) -> None:
        self._pool, self._pages = pool, list(pages)
        self._buffer = torch.empty(len(pages), pool.geometry.page_bytes, dtype=torch.uint8)
        self.views = [page.numpy().data for page in self._buffer]

    async def save(self) -> None:
        async def read(group: StageGroup, columns: slice) -> None:
            self._buffer[:, columns] = await group.read(self._pages)

        await _all([read(*part) for part in self._pool.parts])

    async def restore(self, count: int) -> None:
        async def write(group: StageGroup, columns: slice) -> None:
            await group.write(self._pages[:count], self._buffer[:count, columns])

        await _all([write(*part) for part in self._pool.parts])

    def free(self) -> None:
        """The views stay valid for their holders, as any memory does."""


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
