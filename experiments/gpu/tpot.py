"""Time per output token with checkpoints on and off, on a GPU that decodes while its pages go to a
store in another process.

python -m experiments.gpu.tpot [--shape 8b] [--batch 32] [--context 2048] [--steps 128] [--repeats
7]
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from experiments.gpu.model import PAGE_TOKENS, SHAPES, RandomModel
from experiments.gpu.rig import Place, make_pool, parse, place, report
from kvrs.config.backup import BackupSettings
from kvrs.config.transfer import TransferSettings
from kvrs.engine.checkpoints import Checkpointer
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.tags import root_tag
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.sequences import Sequence
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.pusher import PagePusher
from kvrs.transfer.send_faults import SendingFaults
from kvrs.transfer.server import PageServer
from kvrs.transfer.store.directory import StoreDirectory
from kvrs.transfer.store.host import HostStore

SECRET = b"only for this measurement"
TRANSFER = TransferSettings()
AGENT, NODE = InstanceId("agent-n0"), NodeId("n0")
TARGET = 0.01


def serve_store(pipe: Connection, directory: str, capacity_bytes: int) -> None:
    """The agent's part: a store and its page port, until the pipe closes."""
    asyncio.run(_serve_store(pipe, directory, capacity_bytes))


async def _serve_store(pipe: Connection, directory: str, capacity_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    with StoreDirectory(Path(directory) / "store") as there:
        store = HostStore(there, capacity_bytes, lease_s=3600.0, clock=loop.time)

        def identity() -> Identity:
            return Identity(
                AGENT, NODE, store.epoch, store.fingerprint, store.page_bytes, store.page_cells
            )

        server = PageServer(
            identity, store, SECRET, TRANSFER, SendingLinks(TRANSFER, SendingFaults(), NODE), store
        )
        pipe.send(await server.start("127.0.0.1", 0))
        try:
            while True:
                # Streams of a series that is over; their pages are the first to be overwritten.
                store.release(await asyncio.to_thread(pipe.recv), lease_s=0.0)
                pipe.send(store.held_bytes)
        except EOFError:
            pass
        finally:
            await server.close()
            store.clear()


class Decoding:
    """Sequences of equal length, decoded as the engine does it: the loop owns the state, a thread
    launches the work.
    """

    def __init__(
        self, where: Place, shape: str, batch: int, context: int, steps: int, port: int
    ) -> None:
        self.geometry = SHAPES[shape].geometry
        self.batch, self.context, self.steps = batch, context, steps
        self.pages_each = -(-(context + steps) // PAGE_TOKENS)
        count = batch * self.pages_each
        self.pages = PageManager(count, PAGE_TOKENS)
        self.pool = make_pool(self.geometry, count, where)
        self.model = RandomModel(SHAPES[shape], self.pool)
        self.device = where.device
        peer = Peer(AGENT, NODE, "127.0.0.1", port)
        own = Identity(InstanceId("d0"), NODE, 1, "random weights", self.geometry.page_bytes)
        self.pusher = PagePusher(
            lambda: own, SECRET, TRANSFER, SendingLinks(TRANSFER, SendingFaults(), NODE)
        )
        self.checkpointer = Checkpointer(
            self.pages,
            self.pool,
            self.pusher,
            {AGENT: peer},
            BackupSettings(),
            clock=time.monotonic,
            released=lambda: None,
        )
        self.thread = ThreadPoolExecutor(1)

    async def series(self, number: int, *, backup: bool) -> tuple[float, list[StreamId]]:
        """Decode so many steps with a context that is there already; returns the mean step, and the
        streams' names.
        """
        self.pages.reset_cache()
        sequences = [
            self._begin(StreamId(f"s{number}-{index}"), number, index, backup=backup)
            for index in range(self.batch)
        ]
        tables = torch.tensor([sequence.pages for sequence in sequences], device=self.device)
        token_ids = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        loop = asyncio.get_running_loop()
        times: list[float] = []
        for position in range(self.context, self.context + self.steps):
            started_s = time.perf_counter()
            sampled = await loop.run_in_executor(
                self.thread, self._step, token_ids, position, tables
            )
            self._take(sequences, sampled, position)
            await asyncio.sleep(0)
            times.append(time.perf_counter() - started_s)
        while self.checkpointer.lag_pages:
            await asyncio.sleep(0.01)
        for sequence in sequences:
            self.checkpointer.ended(_run_of(sequence))
            self.pages.release(sequence.pages)
        return sum(times) / len(times), [sequence.stream for sequence in sequences]

    def _step(self, token_ids: torch.Tensor, position: int, tables: torch.Tensor) -> list[int]:
        chosen = self.model.decode(token_ids, position, tables)
        token_ids.copy_(chosen)
        return [int(token_id) for token_id in chosen.cpu().tolist()]

    def _begin(self, stream: StreamId, number: int, index: int, *, backup: bool) -> Sequence:
        # All share their history but for its last page, so that the store has it after the first
        # series: in a cluster, prefill sends it. What is sent here is what is decoded.
        shared = [1 + place % 200 for place in range(self.context - PAGE_TOKENS)]
        own = [number % 200, index, *range(PAGE_TOKENS - 2)]
        sequence = Sequence(
            stream, (0, 1), shared + own, 0, root_tag("random weights"), prefill_only=False
        )
        sequence.extend_tags(PAGE_TOKENS)
        pages = self.pages.allocate(self.pages_each)
        assert pages is not None
        sequence.pages, sequence.computed_tokens = pages, self.context
        for page, tag in zip(pages, sequence.tags, strict=False):
            self.pages.register(page, tag)
        if backup:
            most_bytes = self.pages_each * self.geometry.page_bytes
            self.checkpointer._backlog.follow(
                sequence, [CheckpointTarget(AGENT, most_bytes)], handed_over=False
            )
        return sequence

    def _take(self, sequences: list[Sequence], sampled: list[int], position: int) -> None:
        for sequence, token_id in zip(sequences, sampled, strict=True):
            sequence.token_ids.append(token_id)
            sequence.extend_tags(PAGE_TOKENS)
            sequence.computed_tokens = position + 1
            if sequence.computed_tokens % PAGE_TOKENS == 0:
                index = position // PAGE_TOKENS
                self.pages.register(sequence.pages[index], sequence.tags[index])
                self.checkpointer.filled(_run_of(sequence))


def _run_of(sequence: Sequence) -> Any:
    """A checkpointer uses no more of a run."""
    return SimpleNamespace(sequence=sequence)


async def measure(options: argparse.Namespace, where: Place, pipe: Connection) -> None:
    decoding = Decoding(
        where, options.shape, options.batch, options.context, options.steps, pipe.recv()
    )
    background = asyncio.create_task(decoding.checkpointer.run())
    times: dict[bool, list[float]] = {False: [], True: []}
    held_bytes = 0
    for repeat in range(options.repeats + 1):
        for backup in (False, True) if repeat % 2 else (True, False):
            taken_s, streams = await decoding.series(2 * repeat + backup, backup=backup)
            pipe.send(streams)
            held_bytes = pipe.recv()
            if repeat:  # The first series of each kind warms up.
                times[backup].append(taken_s)
    assert not background.done(), background
    background.cancel()
    await asyncio.gather(background, return_exceptions=True)
    await decoding.pusher.close()
    decoding.thread.shutdown()
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    report(
        "tpot",
        options,
        where,
        ["backup", "TPOT ms, median", "least", "most"],
        [
            ["on" if backup else "off", *(1e3 * pick(times[backup]) for pick in (median, min, max))]
            for backup in (False, True)
        ],
        on_to_off=median(ratios),
        within=f"{TARGET:.0%}: {median(ratios) <= 1 + TARGET}",
        store_holds_mb=held_bytes / 1e6,
    )


def main() -> None:
    options = parse(
        __doc__,
        ("shape", "8b", "of the model: 8b or 14b"),
        ("batch", 32, "sequences"),
        ("context", 2048, "tokens when decoding begins"),
        ("steps", 128, "decoded in each series"),
        ("repeats", 7, "series of each kind, in turns"),
        ("store-gb", 16.0, "capacity of the store"),
    )
    where = place(options)
    if where.rehearsal:
        options.shape, options.batch, options.context, options.steps = "toy", 4, 64, 40
        options.store_gb = 0.05
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        arguments = (theirs, directory, int(options.store_gb * 1e9))
        process = multiprocessing.get_context("spawn").Process(
            target=serve_store, args=arguments, daemon=True
        )
        process.start()
        theirs.close()
        try:
            asyncio.run(measure(options, where, ours))
        finally:
            ours.close()
            process.join(10)


if __name__ == "__main__":
    main()
