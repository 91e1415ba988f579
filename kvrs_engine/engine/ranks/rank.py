"""One rank of an instance: a process with some units of the model and the cells of its KV heads.

The rank obeys the orders of the instance's process, over a socket, until the socket closes. The
memory of its cells belongs to the instance's process, and outlives the rank.

`python -m kvrs_engine.engine.ranks.rank` forks ranks for an instance
(`kvrs_engine.engine.nursery`); each request carries the rank's end of its socket.
"""

import argparse
import mmap
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NoReturn, assert_never

import msgspec
import torch
from torch import Tensor

from kvrs.errors import ConfigError, KvrsError
from kvrs.transfer.shared_memory import map_file
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.on_demand import after_losses
from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.units import Unit, UnitKind
from kvrs_engine.elastic.ways import PLANNERS
from kvrs_engine.engine.allocator import keep_freed_memory
from kvrs_engine.engine.layers.proofs import Proofs, sample
from kvrs_engine.engine.layers.step import build_step
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.decoder import Decoder
from kvrs_engine.engine.models.digests import leaves, unit_name
from kvrs_engine.engine.models.loading import proven, read_decoder
from kvrs_engine.engine.models.reading import WeightReading
from kvrs_engine.engine.models.unit_blocks import UnitBlock, UnitBlocks, assemble
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.nursery import tend
from kvrs_engine.engine.ranks.cells import CellPool, of_layers
from kvrs_engine.engine.ranks.exchange import (
    Areas,
    FormationEndedError,
    FormationMemory,
    SharedMemory,
)
from kvrs_engine.engine.ranks.futex import Life
from kvrs_engine.engine.ranks.spread import RankPart, SpreadHeads, hybrid
from kvrs_engine.engine.ranks.wire import (
    Answer,
    Attach,
    Compute,
    Fetched,
    FetchUnits,
    Join,
    Joined,
    Load,
    Loaded,
    Order,
    RankGoneError,
    Receiver,
    Refused,
    Settle,
    UnitMove,
    chunks_of,
    encode,
    send,
    settings_of,
)
from kvrs_engine.engine.ranks.yielding import LOAD_NICE, yielding
from kvrs_engine.engine.worker import arithmetic_of, check_attention, geometry_of
from kvrs_engine.scheduling.sequences import Chunk

# A loading rank proves the forms for layouts after this many losses, up to `_LAYOUTS_AHEAD`.
_LOSSES_AHEAD = 2
_LAYOUTS_AHEAD = 150


class ShareWorker:
    """Computes one rank's share of each batch."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        rank: int,
        decoder: Decoder,
        pool: CellPool,
        memory: FormationMemory,
        spread: RankPart | None = None,
    ) -> None:
        self._pool, self._memory, self._rank = pool, memory, rank
        self._line = memory.lines[rank]
        self._exchange = SharedMemory(memory, layout, rank)
        self._spread = None
        if spread is not None:
            self._spread = SpreadHeads(layout, rank, spread, self._exchange)
            decoder = hybrid(decoder, self._spread)
        self._decoder = decoder
        self._tiles = [each.experts.tiles for each in decoder.layers if each.experts is not None]
        self._tiles_before = sum(each.computed for each in self._tiles)
        self._hidden = config.hidden
        tiles = config.grain.vocabulary
        self._columns = _runs([tiles[place] for place in layout.vocabulary_tiles(rank)])

    def execute(self, chunks: Sequence[Chunk], batch: int) -> None:
        """Compute the share of a batch; raises FormationEndedError if another rank is lost."""
        step = build_step(chunks, self._pool)
        self._exchange.begin(step.token_ids.shape[0], self._hidden)
        if self._spread is not None:
            self._spread.begin(chunks)
        decoder = self._decoder
        hidden = (
            self._exchange.receive(batch) if decoder.embedding is None else decoder.embedding(step)
        )
        hidden = decoder.through(hidden, step, self._pool, self._exchange)
        if decoder.head is None:
            self._exchange.send(hidden, batch)
        elif decoder.head.weights and step.logits:
            self._write_logits(decoder.logits(hidden, step), batch)
        if self._tiles:
            computed = sum(each.computed for each in self._tiles) - self._tiles_before
            self._memory.note_computed(self._rank, computed)
        self._line.worked_ms.note(int(time.thread_time() * 1e3))
        self._line.done.set(batch)

    def _write_logits(self, columns: Tensor, batch: int) -> None:
        """Write the logits of this rank's tiles into their columns of the shared memory."""
        whole = self._memory.logits(columns.shape[0], batch)
        for first, count, own in self._columns:
            whole[:, first : first + count] = columns[:, own : own + count]


def _runs(columns: Sequence[range]) -> list[tuple[int, int, int]]:
    """Merge adjacent ranges of columns; return (first column of all, number of columns, first own
    column) of each run.
    """
    runs: list[tuple[int, int, int]] = []
    offset = 0
    for own in columns:
        if runs and own.start == runs[-1][0] + runs[-1][1]:
            first, count, at = runs.pop()
            runs.append((first, count + len(own), at))
        else:
            runs.append((own.start, len(own), offset))
        offset += len(own)
    return runs


class _Rank:
    """The main loop of a rank's process, which receives orders and sends answers."""

    def __init__(self, pair: socket.socket) -> None:
        self._pair = pair
        self._orders = Receiver(pair, Order)
        self._answering = threading.Lock()
        self._loaded: _Loaded | None = None
        self._epoch = 0
        self._worker: ShareWorker | None = None
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="mover")

    def run(self) -> None:
        """Carry out orders until the instance's process closes the socket."""
        while True:
            try:
                order = self._orders.receive()
                self._obey(order)
            except RankGoneError:
                return
            except ConfigError as error:
                self._refuse(error.faults)
                return
            except KvrsError as error:
                self._refuse([str(error)])
                return

    def _obey(self, order: Order) -> None:
        match order:
            case Load():
                lives, cells = map(map_file, self._descriptors())
                # The main thread must hold the mutex: a loading thread ends earlier.
                life = Life(lives, 0)
                life.begin()
                torch.set_num_threads(1)
                load = partial(_Loaded, order, life, cells)
                self._loaded = yielding(load, LOAD_NICE) if order.yields else load()
                self._answer(self._loaded.answer)
            case FetchUnits():
                assert self._loaded is not None, "the common weights are loaded first"
                memories = [_bytes_of(map_file(file)) for file in self._descriptors()]
                self._loaded.fetching = order.epoch
                self._mover.submit(self._fetch, self._loaded, order, memories)
            case Attach():
                assert self._loaded is not None, "the common weights are loaded first"
                (memory,) = (_bytes_of(map_file(file)) for file in self._descriptors())
                self._loaded.attach(order, memory)
            case Join():
                (file,) = self._descriptors()
                assert self._loaded is not None, "the weights are loaded first"
                self._epoch = self._loaded.fetching = order.epoch
                self._worker = self._loaded.worker(order, map_file(file))
                self._answer(Joined(order.epoch))
            case Settle():
                assert self._loaded is not None, "the weights are loaded first"
                self._loaded.settle()
            case Compute():
                self._compute(order)
            case _:
                assert_never(order)

    def _descriptors(self) -> list[int]:
        found, self._orders.descriptors = self._orders.descriptors, []
        return found

    def _fetch(self, loaded: "_Loaded", order: FetchUnits, memories: list[Tensor]) -> None:
        """Fetch units in a separate thread, while batches are computed."""

        def fetch() -> None:
            for answer in loaded.fetch(order, memories):
                self._answer(answer)

        try:
            if order.nice:
                yielding(fetch, order.nice)
            else:
                fetch()
        except ConfigError as error:
            self._refuse(error.faults)
            os._exit(1)
        except RankGoneError:
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _compute(self, order: Compute) -> None:
        if order.epoch != self._epoch:
            return
        if self._worker is None:
            return  # The formation has ended in an earlier batch.
        try:
            with torch.inference_mode():
                self._worker.execute(chunks_of(order.chunks), order.batch)
        except FormationEndedError:
            self._worker = None

    def _refuse(self, faults: list[str]) -> None:
        with suppress(RankGoneError):
            self._answer(Refused(faults))

    def _answer(self, answer: Answer) -> None:
        with self._answering:
            send(self._pair, encode(answer))


class _Loaded:
    """The loaded state of a rank: the common weights of its layers, its units, and its cells."""

    def __init__(self, order: Load, life: Life, cells: mmap.mmap) -> None:
        """Load the common weights; raises ConfigError and KvrsError as `Worker` does."""
        self._life = life  # Keeps the memory mapped.
        settings, directory = settings_of(order), Path(order.model)
        device = torch.device(settings.device)
        torch.set_float32_matmul_precision("highest")
        keep_freed_memory()
        self._config = ModelConfig.from_directory(directory)
        self._rank, self._pages = order.rank, settings.pages
        self._geometry = geometry_of(self._config, settings)
        layers = range(order.first, order.last)
        nothing = Share.nothing(layers, is_first=order.is_first, is_last=order.is_last)
        positions = min(settings.max_model_len, self._config.max_positions)
        self._batch_tokens = settings.max_batch_tokens
        self._cells = _bytes_of(cells)
        self._weights = Weights(directory, WeightReading(0, order.bytes_per_s))
        self._unit_blocks = UnitBlocks(self._config, self._weights)
        self._blocks: dict[Unit, UnitBlock] = {}
        self._held: frozenset[Unit] = frozenset()  # Units by the layout of the last formation.
        self._proofs = Proofs()  # Shared by all formations, which have mostly equal shapes.
        self.fetching = 0  # Epoch of the newest order; older orders are abandoned.
        with torch.inference_mode():
            self._common = read_decoder(self._config, self._weights, positions, device, nothing)
            check_attention(self._config, settings.page_size_tokens, device)
            self.answer = Loaded(
                arithmetic_of(self._config, self._geometry, device),
                leaves(self._common, nothing),
                self._weights.read_bytes,
            )
        if order.layout is not None:
            began_s = time.monotonic()
            self._prove_ahead(order.layout, partial(PLANNERS[order.planner], spread=order.spreads))
            took_s = time.monotonic() - began_s
            self.answer = msgspec.structs.replace(self.answer, ahead_s=took_s)

    def _prove_ahead(self, layout: Layout, reshape: Callable[..., Layout]) -> None:
        """Prove the forms for a layout and for the layouts after losses, so that a re-forming need
        not. Proofs depend on shapes only, so arbitrary weights are used.
        """
        units = self._config.units_of_ranks
        blocks = [unit for unit in units.all() if unit.kind != UnitKind.COMMON]
        most = max(self._unit_blocks.places([unit])[1] for unit in blocks)
        numbers = sample(1, -(-most // 4), torch.device("cpu")).view(torch.uint8).view(-1)

        def block_of(unit: Unit) -> UnitBlock:
            return self._unit_blocks.block(unit, numbers, 0)

        after = after_losses(layout, units, self._rank, _LOSSES_AHEAD, reshape)
        known: set[Hashable] = set()
        for each in (layout, *islice(after, _LAYOUTS_AHEAD)):
            share = Share.of(each, self._rank)
            for part in (share, share.spread_heads) if any(share.spread) else (share,):
                if not (kinds := part.kinds(units)) <= known:
                    known |= kinds
                    with torch.inference_mode():
                        whole = assemble(self._common, part, self._config, block_of)
                        proven(whole, self._proofs)

    def fetch(self, order: FetchUnits, memories: Sequence[Tensor]) -> Iterator[Fetched]:
        """Fetch units, yielding an answer for each; raises ConfigError if files have changed or
        cannot be read.
        """
        # Each order is a reading of its own: time before it is no credit.
        self._weights.reading = WeightReading(0, order.bytes_per_s)
        try:
            for move in order.moves:
                if self.fetching != order.epoch:
                    return
                yield self._fetch(order, move, memories)
        finally:
            self._weights.close()

    def _fetch(self, order: FetchUnits, move: UnitMove, memories: Sequence[Tensor]) -> Fetched:
        unit, weights = move.unit, self._weights
        block = self._unit_blocks.block(unit, memories[move.memory], move.offset)
        known, before, was_damaged = order.hashes.get(unit_name(unit)), weights.read_bytes, False
        found = None
        if move.source:
            if move.source != move.memory:
                theirs = memories[move.source]
                block.copy_(self._unit_blocks.block(unit, theirs, move.source_offset))
            found = block.hash()
            was_damaged = found != known
        if found is None or was_damaged:
            self._unit_blocks.read(unit, weights, block)
            found = block.hash()
        if known is not None and found != known:
            raise ConfigError(
                f"{unit_name(unit)}: the model's files have other weights than at the start"
            )
        self._blocks[unit] = block
        return Fetched(order.epoch, unit, found, weights.read_bytes - before, was_damaged)

    def attach(self, order: Attach, memory: Tensor) -> None:
        for place in order.units:
            block = self._unit_blocks.block(place.unit, memory, place.offset)
            self._blocks[place.unit] = block

    def settle(self) -> None:
        """Drop the units outside the layout of the last formation."""
        # An older order may add an unwanted unit meanwhile.
        self._blocks = {unit: self._blocks[unit] for unit in self._held if unit in self._blocks}

    def worker(self, order: Join, memory: mmap.mmap) -> ShareWorker:
        layout, stages = order.layout, range(*order.stages)
        share = Share.of(layout, self._rank)
        self._held = layout.held(self._rank)
        areas = Areas(
            layout,
            stages,
            config=self._config,
            batch_tokens=self._batch_tokens,
        )
        layers = layout.layers(stages)
        geometry = of_layers(self._geometry, layers)

        def part(of: Share) -> RankPart:
            with torch.inference_mode():
                decoder = assemble(self._common, of, self._config, self._blocks.__getitem__)
                decoder = proven(decoder, self._proofs)
            pool = CellPool(of, geometry, self._pages, self._cells, layers.start)
            return RankPart(decoder, pool)

        own = part(share)
        spread = part(share.spread_heads) if any(share.spread) else None
        formation = FormationMemory(memory, areas)
        return ShareWorker(
            self._config, layout, self._rank, own.decoder, own.pool, formation, spread
        )


def _bytes_of(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def obey(pair: socket.socket, _name: str) -> NoReturn:
    """Run a rank in this process, and exit."""
    try:
        rank = _Rank(pair)
        rank.run()
    except BaseException:
        traceback.print_exc()
    # `rank` keeps the memory of its mutex mapped until here, which reports the end.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvrs_engine.engine.ranks.rank", description=__doc__
    )
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--line", type=int, required=True)
    given = parser.parse_args()
    with socket.socket(fileno=given.line) as line:
        tend(given.parent, line, obey)


if __name__ == "__main__":
    main()
