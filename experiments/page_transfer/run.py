"""Page transfer against plain sockets: 64 MB over loopback, sender and receiver in processes of
their own.

    python -m experiments.page_transfer.run [--repeats 21] [--megabytes 64]

The ways take turns within every repeat, so that what else the machine does hits all of them alike.
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import uvloop

from experiments.record import Record
from kvrs.config.transfer import TransferSettings
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer, PinnedPages, PullRequest
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.send_faults import SendingFaults
from kvrs.transfer.server import PageServer

SECRET = b"only for this measurement"
SETTINGS = TransferSettings()
TARGET = 0.8
PAGE_BYTES = {"64 KiB pages": 1 << 16, "1 MiB pages": 1 << 20}


def identity(instance: str, node: str, page_bytes: int) -> Identity:
    return Identity(
        InstanceId(instance), NodeId(node), epoch=1, fingerprint="none", page_bytes=page_bytes
    )


class Memory:
    """Pages of one region; the tag of a page is its number."""

    def __init__(self, region: memoryview, page_bytes: int) -> None:
        self._region = region
        self._page_bytes = page_bytes

    async def pin(self, request: PullRequest) -> PinnedPages:
        starts = [int.from_bytes(tag) * self._page_bytes for tag in request.tags]
        return PinnedPages(
            [self._region[start : start + self._page_bytes] for start in starts], None, None
        )

    def unpin(self, pinned: PinnedPages) -> None:
        assert pinned.token is None


def serve_plainly(ports: Connection, size: int) -> None:
    region = memoryview(os.urandom(size))
    listener = socket.create_server(("127.0.0.1", 0))
    ports.send(listener.getsockname()[1])
    sock, _ = listener.accept()
    while sock.recv(1):
        sock.sendall(region)


def serve_pages(ports: Connection, size: int, page_bytes: int) -> None:
    async def serve() -> None:
        source = Memory(memoryview(os.urandom(size)), page_bytes)
        links = SendingLinks(SETTINGS, SendingFaults(), NodeId("n0"))
        server = PageServer(
            lambda: identity("sender", "n0", page_bytes), source, SECRET, SETTINGS, links
        )
        ports.send(await server.start("127.0.0.1", 0))
        await asyncio.Event().wait()

    uvloop.run(serve())


class Sender:
    """A process of its own, which ends with this one."""

    def __init__(self, target: Callable[..., None], *arguments: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        self.port: int = ours.recv()
        assert process.pid is not None
        self._cpu_clock = Path(f"/proc/{process.pid}/schedstat")

    def cpu_s(self) -> float:
        """CPU time that both ends have used so far."""
        return int(self._cpu_clock.read_text().split()[0]) / 1e9 + time.process_time()


class Plain:
    """`sendall` of everything; `recv_into` everything, in pieces of at most `piece_bytes`."""

    def __init__(self, region: memoryview, piece_bytes: int) -> None:
        self._region = region
        self._piece_bytes = piece_bytes
        self.sender = Sender(serve_plainly, len(region))
        self._sock = socket.create_connection(("127.0.0.1", self.sender.port))

    async def seconds(self) -> float:
        started_s = time.perf_counter()
        self._sock.send(b"x")
        received = 0
        while received < len(self._region):
            received += self._sock.recv_into(self._region[received : received + self._piece_bytes])
        return time.perf_counter() - started_s


class Pull:
    """Server and puller as they are, hand-shake and checksums included; the connection is used
    again.
    """

    def __init__(self, region: memoryview, page_bytes: int) -> None:
        self.sender = Sender(serve_pages, len(region), page_bytes)
        self._peer = Peer(InstanceId("sender"), NodeId("n0"), "127.0.0.1", self.sender.port)
        self._puller = PagePuller(
            lambda: identity("receiver", "n1", page_bytes), SECRET, SETTINGS, time.perf_counter
        )
        count = len(region) // page_bytes
        self._pages = [
            region[index * page_bytes : (index + 1) * page_bytes] for index in range(count)
        ]
        self._request = PullRequest(tuple(Tag(index.to_bytes(TAG_BYTES)) for index in range(count)))

    async def seconds(self) -> float:
        result = await self._puller.pull(self._peer, self._request, self._pages, None)
        assert result.full_pages == len(self._pages), result
        return result.seconds


@dataclass
class Result:
    name: str
    gb_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # Of both ends.

    @property
    def rate(self) -> float:
        return median(self.gb_per_s)


async def measure(repeats: int, size: int) -> list[Result]:
    region = memoryview(
        bytearray(os.urandom(size))
    )  # Written once, so that no page fault is measured.
    ways: dict[str, Plain | Pull] = {"plain, whole": Plain(region, size)}
    ways |= {
        f"plain, pieces of {name[:-6]}": Plain(region, piece) for name, piece in PAGE_BYTES.items()
    }
    ways |= {f"pull, {name}": Pull(region, page) for name, page in PAGE_BYTES.items()}
    results = {name: Result(name) for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            cpu_s = way.sender.cpu_s()
            seconds = await way.seconds()
            if repeat > 0:  # The first warms up.
                results[name].gb_per_s.append(size / seconds / 1e9)
                results[name].cpu_ms.append((way.sender.cpu_s() - cpu_s) * 1e3)
    return list(results.values())


def table(results: list[Result]) -> str:
    fastest_plain = max(result.rate for result in results if result.name.startswith("plain"))
    whole = results[0].rate
    lines = [
        f"{'way':<24} {'GB/s p50':>8} {'min':>6} {'max':>6} {'CPU ms p50':>11} "
        f"{'x plain, whole':>15} {'x fastest plain':>16}"
    ]
    for result in results:
        ends = (
            f"{min(result.gb_per_s):6.2f} {max(result.gb_per_s):6.2f} {median(result.cpu_ms):11.1f}"
        )
        ratios = f"{result.rate / whole:15.2f} {result.rate / fastest_plain:16.2f}"
        lines.append(f"{result.name:<24} {result.rate:8.2f} {ends} {ratios}")
    worst = min(result.rate for result in results if result.name.startswith("pull")) / whole
    lines.append(
        f"target: {TARGET} x plain, whole: {'met' if worst >= TARGET else 'MISSED'} "
        f"(worst pull: {worst:.2f})"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    record = Record()

    results = uvloop.run(measure(options.repeats, options.megabytes << 20))

    print(table(results))
    document = {
        "megabytes": options.megabytes,
        "repeats": options.repeats,
        "ways": {
            result.name: {
                "gb_per_s_p50": round(result.rate, 3),
                "gb_per_s": [round(rate, 3) for rate in result.gb_per_s],
                "cpu_ms": [round(spent, 2) for spent in result.cpu_ms],
            }
            for result in results
        },
    }
    record.keep(options.out, "page_transfer", document, table(results))


if __name__ == "__main__":
    main()
