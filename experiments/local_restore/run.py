"""Restore from the own node's agent: 64 MB of pages copied out of its memory, beside memcpy and
beside the same pages over loopback.

    python -m experiments.local_restore.run [--repeats 31] [--megabytes 64]

The ways take turns within every repeat, in an order that moves on by one, so that what else the
machine does hits all of them alike.
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvloop

from experiments.record import Record
from kvrs.config.transfer import TransferSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol import frames
from kvrs.protocol.page_messages import CheckpointClaim
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import PAGES_SOCKET, Identity, Peer, PullRequest
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.send_faults import SendingFaults
from kvrs.transfer.server import PageServer
from kvrs.transfer.shared_memory.passing import listen_in
from kvrs.transfer.store.directory import StoreDirectory
from kvrs.transfer.store.host import HostStore

SECRET = b"only for this measurement"
SETTINGS = TransferSettings()
BAR = 0.9
NODE, AGENT = NodeId("n0"), InstanceId("agent-n0")
PAGE_BYTES = {"64 KiB pages": 1 << 16, "1 MiB pages": 1 << 20}
MEMCPY = "memcpy"


def identity(page_bytes: int) -> Identity:
    return Identity(InstanceId("d0"), NODE, 1, "none", page_bytes)


def tags(pages: int) -> tuple[Tag, ...]:
    return tuple(Tag(index.to_bytes(TAG_BYTES)) for index in range(pages))


def keep_pages(ports: Connection, directory: str, size: int, page_bytes: int) -> None:
    """An agent's store, filled, behind its page server."""

    async def serve() -> None:
        with StoreDirectory(Path(directory)) as own:
            store = HostStore(own, size, 3600.0, time.monotonic)
            store.adopt(identity(page_bytes))
            fill(store, size // page_bytes, page_bytes)
            server = PageServer(
                lambda: replace(identity(page_bytes), instance=AGENT, epoch=store.epoch),
                store,
                SECRET,
                SETTINGS,
                SendingLinks(SETTINGS, SendingFaults(), NODE),
                store,
            )
            port = await server.start("127.0.0.1", 0)
            server.lend(listen_in(own.path, PAGES_SOCKET, socket.SOCK_STREAM), store.places)
            ports.send(port)
            await asyncio.Event().wait()

    uvloop.run(serve())


def fill(store: HostStore, pages: int, page_bytes: int) -> None:
    claim = CheckpointClaim(StreamId("s"), 0, 1)
    store.offer(claim, pages * page_bytes, ())
    incoming = store.begin(claim, 0, tags(pages))
    for index, view in enumerate(incoming.views):
        assert view is not None
        view[:] = os.urandom(page_bytes)
        incoming.commit(index, frames.checksum(view))
    incoming.end()


class Agent:
    """A process of its own, which ends with this one."""

    def __init__(self, directory: Path, size: int, page_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, str(directory), size, page_bytes)
        process = context.Process(target=keep_pages, args=arguments, daemon=True)
        process.start()
        self.peer = Peer(AGENT, NODE, "127.0.0.1", ours.recv(), directory)
        assert process.pid is not None
        self._cpu_clock = Path(f"/proc/{process.pid}/schedstat")

    def cpu_s(self) -> float:
        return int(self._cpu_clock.read_text().split()[0]) / 1e9


@dataclass
class Way:
    name: str
    seconds: Callable[[], Awaitable[float]]
    gb_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # Of both ends.

    @property
    def rate(self) -> float:
        return median(self.gb_per_s)


class Restore:
    """The puller as it is, into the same memory over and over."""

    def __init__(self, region: memoryview, page_bytes: int, peer: Peer) -> None:
        self._page_bytes = page_bytes
        starts = range(0, len(region), page_bytes)
        self._pages = [region[start : start + page_bytes] for start in starts]
        # Nothing listens at port 1: what should be copied is never sent instead.
        self._mapped = replace(peer, port=1)
        self._sent = replace(peer, directory=None)
        self._puller = self._new()

    async def mapped(self) -> float:
        return await self._seconds(self._puller, self._mapped)

    async def first(self) -> float:
        """Connecting, proofs and the first use of the mapped files included."""
        puller = self._new()
        try:
            return await self._seconds(puller, self._mapped)
        finally:
            await puller.close()

    async def sent(self) -> float:
        return await self._seconds(self._puller, self._sent)

    def _new(self) -> PagePuller:
        own = identity(self._page_bytes)
        return PagePuller(lambda: own, SECRET, SETTINGS, time.perf_counter)

    async def _seconds(self, puller: PagePuller, peer: Peer) -> float:
        asked = PullRequest(tags(len(self._pages)))
        result = await puller.pull(peer, asked, self._pages, None)
        assert result.full_pages == len(self._pages), result
        return result.seconds


def memcpy(size: int, into: memoryview) -> Callable[[], Awaitable[float]]:
    source, target = np.frombuffer(os.urandom(size), np.uint8), np.frombuffer(into, np.uint8)

    async def seconds() -> float:
        started_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - started_s

    return seconds


async def measure(repeats: int, size: int, scratch: Path) -> list[Way]:
    # Written once, so that no page fault of the target is measured.
    region = memoryview(bytearray(os.urandom(size)))
    ways, agents = [Way(MEMCPY, memcpy(size, region))], []
    for number, (name, page_bytes) in enumerate(PAGE_BYTES.items()):
        agents.append(Agent(scratch / f"n{number}", size, page_bytes))
        restore = Restore(region, page_bytes, agents[-1].peer)
        ways += [
            Way(f"mapped, {name}", restore.mapped),
            Way(f"mapped for the first time, {name}", restore.first),
            Way(f"loopback, {name}", restore.sent),
        ]

    def cpu_s() -> float:
        return time.process_time() + sum(agent.cpu_s() for agent in agents)

    for repeat in range(repeats + 1):
        turn = repeat % len(ways)
        for way in ways[turn:] + ways[:turn]:
            before_s = cpu_s()
            seconds = await way.seconds()
            if repeat > 0:  # The first warms up.
                way.gb_per_s.append(size / seconds / 1e9)
                way.cpu_ms.append((cpu_s() - before_s) * 1e3)
    return ways


def as_text(ways: list[Way]) -> str:
    copied = ways[0].rate
    lines = [
        f"{'way':<40} {'GB/s p50':>8} {'min':>6} {'max':>6} {'CPU ms p50':>11} {'x memcpy':>9}"
    ]
    for way in ways:
        ends = f"{min(way.gb_per_s):6.2f} {max(way.gb_per_s):6.2f} {median(way.cpu_ms):11.1f}"
        lines.append(f"{way.name:<40} {way.rate:8.2f} {ends} {way.rate / copied:9.2f}")
    worst = worst_share(ways)
    verdict = "met" if worst >= BAR else "MISSED"
    lines.append(f"bar: {BAR} of memcpy for mapped pages: {verdict} (worst: {worst:.2f})")
    return "\n".join(lines)


def worst_share(ways: list[Way]) -> float:
    """The lowest share of memcpy's rate, where the files were mapped before."""
    return min(way.rate for way in ways if way.name.startswith("mapped,")) / ways[0].rate


def figures(ways: list[Way], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "megabytes": options.megabytes,
        "repeats": options.repeats,
        "bar": BAR,
        "worst_of_memcpy": round(worst_share(ways), 3),
        "ways": {
            way.name: {
                "gb_per_s_p50": round(way.rate, 3),
                "gb_per_s": [round(rate, 3) for rate in way.gb_per_s],
                "cpu_ms": [round(spent, 2) for spent in way.cpu_ms],
            }
            for way in ways
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    record = Record()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        found = measure(options.repeats, options.megabytes << 20, Path(scratch))
        ways = uvloop.run(found)
    text = as_text(ways)
    print(text)
    void = record.keep(options.out, "local_restore", figures(ways, options), text)
    raise SystemExit(1 if void or worst_share(ways) < BAR else 0)


if __name__ == "__main__":
    main()
