"""One rank of an instance: a process that has some units of the model, and the cells of its KV
heads.

`python -m kvrs.engine.ranks.rank DESCRIPTOR PARENT` obeys the instance at the other end of that
socket until it closes. The memory of its cells belongs to the instance, so it outlives the process.
"""

import mmap
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from kvrs.elastic.layouts import Layout
from kvrs.elastic.shares import Share
from kvrs.engine.allocator import keep_freed_memory
from kvrs.engine.layers.step import build_step
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.models.decoder import Decoder
from kvrs.engine.models.digests import leaves
from kvrs.engine.models.loading import load_decoder
from kvrs.engine.models.weights import Weights
from kvrs.engine.ranks.cells import CellMap, CellPool
from kvrs.engine.ranks.exchange import Areas, FormationEndedError, FormationMemory, SharedMemory
from kvrs.engine.ranks.futex import Life, die_with_parent
from kvrs.engine.ranks.wire import (
    Answer,
    Compute,
    Join,
    Joined,
    Load,
    Loaded,
    Order,
    RankGoneError,
    Receiver,
    Refused,
    chunks_of,
    encode,
    send,
    settings_of,
)
from kvrs.engine.worker import arithmetic_of, check_attention, geometry_of
from kvrs.errors import ConfigError, KvrsError
from kvrs.scheduling.sequences import Chunk


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
    ) -> None:
        self._decoder, self._pool, self._memory = decoder, pool, memory
        self._line = memory.lines[rank]
        self._exchange = SharedMemory(memory, layout, rank)
        self._hidden = config.hidden
        tiles = config.grain.vocabulary
        self._columns = _runs([tiles[place] for place in layout.vocabulary_tiles(rank)])

    def execute(self, chunks: Sequence[Chunk], batch: int) -> None:
        """Raises FormationEndedError: another rank is lost."""
        step = build_step(chunks, self._pool)
        self._exchange.begin(step.token_ids.shape[0], self._hidden)
        decoder = self._decoder
        hidden = (
            self._exchange.receive(batch) if decoder.embedding is None else decoder.embedding(step)
        )
        hidden = decoder.through(hidden, step, self._pool, self._exchange)
        if decoder.head is None:
            self._exchange.send(hidden, batch)
        elif decoder.head.weights and step.logits:
            self._write_logits(decoder.logits(hidden, step))
        self._line.worked_us.note(int(time.thread_time() * 1e6))
        self._line.done.set(batch)

    def _write_logits(self, columns: Tensor) -> None:
        """Into the columns of this rank's tiles, run by run."""
        whole = self._memory.logits(columns.shape[0])
        for first, count, own in self._columns:
            whole[:, first : first + count] = columns[:, own : own + count]


def _runs(columns: Sequence[range]) -> list[tuple[int, int, int]]:
    """Columns that lie beside each other both in all and among these: first of all, number, first
    of these.
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
    """The process: orders in, answers out."""

    def __init__(self, pair: socket.socket) -> None:
        self._pair = pair
        self._orders = Receiver(pair, Order)
        self._loaded: _Loaded | None = None
        self._epoch = 0
        self._worker: ShareWorker | None = None

    def run(self) -> None:
        """Obey until the instance closes its end."""
        while True:
            try:
                order = self._orders.receive()
            except RankGoneError:
                return
            match order:
                case Load():
                    if not self._answer_load(order):
                        return
                case Join():
                    self._join(order)
                case Compute():
                    self._compute(order)
                case _:
                    assert_never(order)

    def _answer_load(self, order: Load) -> bool:
        lives, cells = self._orders.descriptors
        self._orders.descriptors = []
        try:
            self._loaded = _Loaded(order, _mapped(lives), _mapped(cells))
        except ConfigError as error:
            self._answer(Refused(error.faults))
            return False
        except KvrsError as error:
            self._answer(Refused([str(error)]))
            return False
        self._answer(self._loaded.answer)
        return True

    def _join(self, order: Join) -> None:
        (descriptor,) = self._orders.descriptors
        self._orders.descriptors = []
        assert self._loaded is not None, "weights are loaded first"
        self._epoch = order.epoch
        self._worker = self._loaded.worker(order.layout, _mapped(descriptor))
        self._answer(Joined(order.epoch))

    def _compute(self, order: Compute) -> None:
        if order.epoch != self._epoch:
            return
        assert self._worker is not None, "a formation is joined first"
        try:
            with torch.inference_mode():
                self._worker.execute(chunks_of(order), order.batch)
        except FormationEndedError:
            self._worker = None

    def _answer(self, answer: Answer) -> None:
        send(self._pair, encode(answer))


class _Loaded:
    """A share of the weights, and the memory of its cells."""

    def __init__(self, order: Load, lives: mmap.mmap, cells: mmap.mmap) -> None:
        """Raises ConfigError, KvrsError: as `Worker`."""
        self._life = Life(lives, order.place)
        self._life.begin()
        settings, directory = settings_of(order), Path(order.model)
        device = torch.device(settings.device)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        keep_freed_memory()
        self._config = ModelConfig.from_directory(directory)
        self._rank, self._pages = order.rank, settings.pages
        self._geometry = geometry_of(self._config, settings)
        share = Share.of(order.layout, order.rank)
        positions = min(settings.max_model_len, self._config.max_positions)
        self._batch_tokens = settings.max_batch_tokens
        self._memory = torch.frombuffer(cells, dtype=torch.uint8)
        with torch.inference_mode():
            self._decoder = load_decoder(self._config, Weights(directory), positions, device, share)
            check_attention(self._config, settings.page_size_tokens, device)
            self.answer = Loaded(
                arithmetic_of(self._config, self._geometry, device),
                leaves(self._decoder, share),
                unit_bytes_of(self._decoder),
            )

    def worker(self, layout: Layout, memory: mmap.mmap) -> ShareWorker:
        cells = CellMap(Share.of(layout, self._rank), self._geometry)
        areas = Areas.of(
            layout,
            hidden=self._config.hidden,
            vocabulary=self._config.vocab,
            batch_tokens=self._batch_tokens,
        )
        pool = CellPool(cells, self._pages, self._memory)
        formation = FormationMemory(memory, areas)
        return ShareWorker(self._config, layout, self._rank, self._decoder, pool, formation)


def unit_bytes_of(decoder: Decoder) -> int:
    """Bytes of the units that are resident."""
    blocks = [
        weights
        for layer in decoder.layers
        for weights in (
            *(layer.attention.qkv.weights, layer.attention.output.weights),
            *(layer.mlp.up.weights, layer.mlp.down.weights),
        )
    ]
    if decoder.head is not None:
        blocks.append(decoder.head.weights)
    return sum(unit.nbytes for block in blocks for unit in block)


def _mapped(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def main() -> None:
    pair = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    rank = _Rank(pair)
    rank.run()
    # At once, while the memory of its life is still mapped: its end is told by that.
    os._exit(0)


if __name__ == "__main__":
    main()
