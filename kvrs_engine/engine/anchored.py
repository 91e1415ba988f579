"""The memory of an instance that its node's agent owns: weights shared by the node's instances, and
KV pages that outlive the process.

On a CPU the memory is mapped, never copied.
"""

import logging
import mmap
import os
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kvrs.config.file import Config
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import PAGE_LAYOUT, KvGeometry
from kvrs.protocol.instance import MeasuredPrefill
from kvrs.transfer.anchors import (
    FORMAT,
    AnchoredFiles,
    AnchorError,
    KeptPages,
    LedgerLayout,
    NoAgentError,
    PageLedger,
)
from kvrs.transfer.peers import PagePlace
from kvrs.transfer.sealed import kind_of
from kvrs.transfer.shared_memory import Region, map_file
from kvrs.transfer.store.directory import store_directory
from kvrs_engine.elastic import grain
from kvrs_engine.engine.hooks import Batch, StepHook
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.arena import Arena
from kvrs_engine.engine.models.decoder import Decoder
from kvrs_engine.engine.models.digests import file_states, weights_digest
from kvrs_engine.engine.models.loading import proven, read_decoder, skeleton, with_rotary
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.scheduling.pages import PageManager

log = logging.getLogger(__name__)

_MAX_NOTED = 128  # Limit of the points of a prefill table in a ledger's note.


# The longest time that an instance waits for its node's agent; then its memory is its own.
_AGENT_WAIT_S = 10.0


class TakenOverError(KvrsError):
    """A later process has taken over this instance, and this process must end."""


@dataclass(frozen=True, slots=True, eq=False)
class AnchoredPool(StepHook):
    """KV pages in the agent's memory with their ledger, and the pages left by the previous
    process.
    """

    pool: KvPool
    first_page: PagePlace
    ledger: PageLedger
    kept: KeptPages
    prefill: PrefillTable | None  # The table that the previous process has measured.

    def adopt(self, pages: PageManager, until_s: float) -> None:
        """Adopt the pages of the previous process into the cache, with leases for its streams."""
        pages.adopt(self.kept.pages)
        for stream, tags in self.kept.streams.items():
            found = pages.match(tags)
            pages.retain(stream, found, len(found) * pages.page_size_tokens, until_s)
            pages.release(found)

    def note_prefill(self, table: PrefillTable) -> None:
        every = -(-len(table.seconds) // _MAX_NOTED)
        points = list(table.seconds[::every])
        note = MeasuredPrefill(table.label, every * table.step_tokens, points)
        self.ledger.write_note(msgspec.json.encode(note))

    def kept_now(self, pages: PageManager) -> dict[StreamId, int]:
        """Return the number of leased leading full pages of each stream of the previous process."""
        held = {
            stream: pages.retained_tokens(stream) // pages.page_size_tokens
            for stream in self.kept.streams
        }
        return {stream: count for stream, count in held.items() if count}

    def before_batch(self, batch: Batch) -> None:
        """Raises TakenOverError."""
        if not self.ledger.is_current:
            raise TakenOverError("a later process has attached this instance's memory")

    def filled(self, run: GenerationRun) -> None:
        if full_pages := run.reported_pages:
            sequence = run.sequence
            self.ledger.note_stream(sequence.stream, full_pages, sequence.tags[full_pages - 1])

    def ended(self, run: GenerationRun) -> None:
        self.ledger.end_stream(run.sequence.stream)


class AnchoredMemory:
    """The agent's memory that an instance attaches at its start."""

    def __init__(self, config: Config, node: NodeId, instance: InstanceId, secret: bytes) -> None:
        directory = store_directory(config.backup.directory, secret, node)
        reserved_bytes = config.backup.reserved_bytes
        self._instance = instance
        self._attaching = partial(
            AnchoredFiles.of_agent, directory, wait_s=_AGENT_WAIT_S, reserved_bytes=reserved_bytes
        )

    def decoder(
        self, config: ModelConfig, weights: Weights, directory: Path, positions: int
    ) -> tuple[Decoder, bytes] | None:
        """Return the model with shared read-only weights, and their root hash; None: there is no
        agent. The first process of a node reads the weights from files.

        Raises:
            ConfigError: the agent refuses, or the files are wrong.
            KvrsError: this machine's matrix library cannot compute exactly.
        """
        arena = Arena(skeleton(config))
        try:
            fd, is_new = self._arena(arena, config, weights, directory)
        except NoAgentError as error:
            log.warning("no agent: weights are this process's own", extra={"cause": str(error)})
            return None
        except AnchorError as error:
            raise ConfigError(f"state_plane: {error}") from None
        # Populate now, because page faults would cost as much later, in the middle of a step.
        memory = tensor_of(map_file(fd, arena.size_bytes, writable=False, populated=True))
        root = arena.root(memory)
        if root is None or (is_new and not arena.is_whole(memory)):
            raise ConfigError("state_plane: the arena of weights is damaged")
        return proven(with_rotary(arena.decoder(memory), config, positions)), root

    def has_weights(self, directory: Path) -> bool:
        """Return whether the agent has the weights of a model now."""
        try:
            key = _key_of(Weights(directory), directory)
            with self._attaching(wait_s=0.0) as anchored:
                return anchored.has_weights(key)
        except (KvrsError, OSError):
            return False

    def keep_weights(self, directory: Path) -> None:
        """Have the agent keep the weights of a model, which are read if it has none, as long as
        this process runs.

        Raises:
            KvrsError: there is no agent or no room, or the files are wrong.
        """
        config, weights = ModelConfig.from_directory(directory), Weights(directory)
        # The open descriptor marks the arena as used until the process ends.
        self._arena(Arena(skeleton(config)), config, weights, directory)

    def _arena(
        self, arena: Arena, config: ModelConfig, weights: Weights, directory: Path
    ) -> tuple[int, bool]:
        """Return a descriptor to read the arena of a model, and whether this process has written
        it.

        Raises:
            AnchorError: there is no agent, or not enough memory.
            ConfigError: the files are wrong.
        """
        key = _key_of(weights, directory)
        with self._attaching() as anchored:
            fd, to_write = anchored.weights(key, arena.size_bytes)
        if to_write is not None:
            with ExitStack() as undo:
                undo.callback(os.close, fd)
                self._write_weights(to_write, key, arena, config, weights, directory)
                undo.pop_all()
        return fd, to_write is not None

    def pool(
        self, start: int, geometry: KvGeometry, pages: int, rows: int, fingerprint: str
    ) -> AnchoredPool | None:
        """Return the instance's pages for start number `start`; None: there is no agent.

        Raises:
            ConfigError: the agent refuses.
        """
        layout = LedgerLayout(pages, rows)
        size = layout.size_bytes + (pages + 1) * geometry.page_bytes
        kind = kind_of(FORMAT, fingerprint, PAGE_LAYOUT, geometry, layout)
        try:
            with self._attaching() as anchored:
                is_new, fd = anchored.memory(self._instance, start, kind, size)
        except NoAgentError as error:
            log.warning("no agent: KV is this process's own", extra={"cause": str(error)})
            return None
        except AnchorError as error:
            raise ConfigError(f"state_plane: {error}") from None
        region = Region(fd)
        memory = tensor_of(region.memory)[layout.size_bytes :]
        pool = KvPool(geometry, pages, torch.device("cpu"), memory)
        ledger = PageLedger(memoryview(region.memory), layout, start, pool.view)
        prefill = None if is_new else _noted_prefill(ledger)
        if prefill is None:
            # Pages are about to be written by a measurement.
            ledger.forget()
        kept = KeptPages() if prefill is None else ledger.adopt()
        log.info(
            "memory attached",
            extra={"is_new": is_new, "pages": len(kept.pages), "streams": len(kept.streams)},
        )
        return AnchoredPool(pool, (region, layout.size_bytes), ledger, kept, prefill)

    def _write_weights(
        self,
        fd: int,
        key: str,
        arena: Arena,
        config: ModelConfig,
        weights: Weights,
        directory: Path,
    ) -> None:
        """Read the weights and write them to the arena, which is not kept mapped."""
        try:
            files = [directory / "config.json", *weights.files]
            before = file_states(files)
            decoder = read_decoder(config, weights, 1, torch.device("cpu"))
            root = weights_digest(decoder, directory, weights.files)
            with mmap.mmap(fd, arena.size_bytes) as memory:
                arena.write(tensor_of(memory), decoder, root)
            if file_states(files) != before:
                raise ConfigError(f"cluster.model: {directory}: changed while it was read")
        finally:
            os.close(fd)
        with self._attaching() as anchored:
            anchored.commit(key)


def _key_of(weights: Weights, directory: Path) -> str:
    files = [directory / "config.json", *weights.files]
    return kind_of(grain.VERSION, file_states(files))


def _noted_prefill(ledger: PageLedger) -> PrefillTable | None:
    note = ledger.read_note()
    try:
        found = None if note is None else msgspec.json.decode(note, type=MeasuredPrefill)
    except msgspec.DecodeError:
        return None
    return None if found is None else PrefillTable.from_measured(found)


def tensor_of(memory: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        # Torch warns that a write into read-only memory ends the process, as intended.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)
