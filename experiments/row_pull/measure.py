"""CPU time per gigabyte of rows that a server reads from the agent of another node, beside pages
by PULL, the same with the macs that PULL had before, and bytes over raw sockets, all over loopback,
in turns.

    python -m experiments.row_pull.measure --rounds 5

Each round is appended to a file beside the result, so that a run that was interrupted goes on.
"""

import asyncio
import json
import mmap
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from blake3 import blake3

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol import frames
from kvrs.protocol.frames import GMAC_BYTES, Gmac
from kvrs.protocol.pages import TAG_BYTES, Tag
from kvrs.protocol.rows import Space
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer, PinnedPages, PullRequest
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.server import PageServer
from kvrs_testkit.row_agent import SECRET, RowAgent, until
from kvrs_testkit.row_engine import RowEngine, key_of

PAGE_BYTES, PAGES = 2 << 20, 480
GB = PAGE_BYTES * PAGES / 1e9
SPACE = Space(bytes(32), PAGE_BYTES)
KEYS = [key_of(number + 1) for number in range(PAGES)]
TAGS = tuple(Tag(number.to_bytes(TAG_BYTES)) for number in range(PAGES))
SERVER = Identity(InstanceId("agent-a"), NodeId("a"), 1, "model", PAGE_BYTES, 1)
CLIENT = Identity(InstanceId("b"), NodeId("b"), 1, "model", PAGE_BYTES, 1)
SETTINGS = TransferSettings(stall_timeout_s=30.0)
# Figures by kind: PULL of pages with the macs of former versions, and as it is; rows of a living
# engine at their first read, and later; rows of a dead one, read before; raw sockets.
FORMER, FIRST, DEAD = "pages, BLAKE3", "rows, first read", "rows, dead"
KINDS = (FORMER, "pages", FIRST, "rows", DEAD, "raw")
# One pass over the same bytes by one thread.
PASSES: dict[str, Callable[[memoryview], object]] = {
    "GMAC": partial(Gmac(bytes(32)).mac, 0, b""),
    "BLAKE3": lambda page: blake3(page, key=bytes(32)).digest(),
    "xxh3": frames.checksum,
    "copy": bytes,
}
BAR_OF_PAGES, BAR_OF_RAW = 0.5, 1.7


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def former_mac(_: Gmac, number: int, head: bytes, body: frames.Bytes) -> bytes:
    """Make the mac that messages of the page port had before GMAC."""
    numbers = (number, len(head))
    hashed = blake3(b"".join(each.to_bytes(8) for each in numbers), key=bytes(32))
    hashed.update(head)
    hashed.update(body)
    return hashed.digest(GMAC_BYTES)


MACS = {True: former_mac, False: Gmac.mac}


def prepare(kind: str) -> None:
    """Let this end seal and check messages as this kind does."""
    Gmac.mac = MACS[kind == FORMER]  # type: ignore[assignment, method-assign]


class Held:
    """The pages of an agent, whose checksums were taken as they were stored."""

    def __init__(self, memory: mmap.mmap) -> None:
        whole = memoryview(memory)
        views = [whole[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(PAGES)]
        self._pinned = PinnedPages(views, None, [frames.checksum(view) for view in views])

    def identity(self) -> Identity:
        return SERVER

    @asynccontextmanager
    async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
        yield self._pinned


async def serve(directory: Path) -> None:
    """All that is read from, in a process of its own. A line of input asks for its CPU time."""
    agent = RowAgent(directory / "rows")
    engine = RowEngine(agent.path, SECRET, SPACE.namespace, PAGES, PAGE_BYTES)
    for row in range(PAGES):
        engine.write(row, row + 1)
    engine.link.start()
    until(lambda: bool(agent.regions.of(SPACE)))
    memory = mmap.mmap(engine.memory, PAGES * PAGE_BYTES)
    links = SendingLinks(SETTINGS, SendingFaults(), SERVER.node)
    pages = PageServer(Held(memory), SECRET, SETTINGS, links)
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_raw, args=(raw, engine.memory), daemon=True).start()
    ports = [await pages.start("127.0.0.1", 0), agent.tcp, raw.getsockname()[1]]
    print(json.dumps(ports), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if kind := line.strip():
            prepare(kind)
        (region,) = agent.regions.of(SPACE)
        region.died_s = time.monotonic() if kind == DEAD else None
        if kind == FIRST:
            region._known_tags.clear()
        print(cpu_s(), flush=True)
    os._exit(0)


def send_raw(listener: socket.socket, file: int) -> None:
    while True:
        connection, _ = listener.accept()
        with suppress(OSError):
            for at in range(0, PAGES * PAGE_BYTES, PAGE_BYTES):
                sent = 0
                while sent < PAGE_BYTES:
                    sent += os.sendfile(connection.fileno(), file, at + sent, PAGE_BYTES - sent)
        connection.close()


class Server:
    """The process with all that is read from."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "experiments.row_pull.measure", "--serve", str(directory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pages, self.rows, self.raw = json.loads(self._line())

    def cpu_s(self, order: str = "") -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class Puller:
    """The reader, by each way into the same memory."""

    def __init__(self, server: Server, directory: Path) -> None:
        self._server = server
        self._memory = mmap.mmap(-1, PAGES * PAGE_BYTES)
        whole = memoryview(self._memory)
        self._views = [whole[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(PAGES)]
        for view in self._views:
            view[:] = bytes(PAGE_BYTES)
        own = RowAgent(directory / "unused")
        self._client = own.client(SPACE, server.rows)
        self._puller = PagePuller(lambda: CLIENT, SECRET, SETTINGS, time.monotonic)

    async def read(self, kind: str) -> None:
        if kind in (FORMER, "pages"):
            peer = Peer(SERVER.instance, SERVER.node, "127.0.0.1", self._server.pages)
            result = await self._puller.pull(peer, PullRequest(TAGS), self._views, None)
            assert result.full_pages == PAGES, result.error
        elif kind == "raw":
            with socket.create_connection(("127.0.0.1", self._server.raw)) as connection:
                for view in self._views:
                    assert connection.recv_into(view, 0, socket.MSG_WAITALL) == PAGE_BYTES
        else:
            wanted = list(zip(KEYS, self._views, strict=True))
            assert self._client.load(wanted, 120.0) == PAGES

    async def measured(self, kind: str) -> dict[str, float]:
        """Seconds per GB: CPU of the server and of the puller, and time."""
        prepare(kind)
        server_s = self._server.cpu_s(kind)
        own_s, began_s = cpu_s(), time.monotonic()
        await self.read(kind)
        took_s = time.monotonic() - began_s
        own_s = cpu_s() - own_s
        return {
            "server": (self._server.cpu_s() - server_s) / GB,
            "puller": own_s / GB,
            "time": took_s / GB,
        }

    def passed_over(self, each: Callable[[memoryview], object]) -> dict[str, float]:
        """CPU seconds per GB of a pass over the memory."""
        begun_s = cpu_s()
        for view in self._views:
            each(view)
        return {"puller": (cpu_s() - begun_s) / GB}


@contextmanager
def pair(directory: Path) -> Iterator[Puller]:
    server = Server(directory)
    try:
        yield Puller(server, directory)
    finally:
        server.close()


async def measure(rounds: int, file: Path, directory: Path) -> list[dict[str, dict[str, float]]]:
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with pair(directory) as puller:
        for kind in KINDS:
            await puller.measured(kind)  # Connections, and pages of memory.
        while len(done) < rounds:
            order = KINDS if len(done) % 2 else KINDS[::-1]
            found = {kind: await puller.measured(kind) for kind in order}
            found |= {name: puller.passed_over(each) for name, each in PASSES.items()}
            done.append(found)
            with file.open("a") as lines:
                lines.write(json.dumps(found) + "\n")
    return done


def as_text(rounds: list[dict[str, dict[str, float]]]) -> str:
    lines = [f"{'seconds per GB, medians':<28}{'server':>9}{'puller':>9}{'both':>9}{'time':>9}"]
    for kind in KINDS:
        server, puller, took = (
            statistics.median(each[kind][name] for each in rounds)
            for name in ("server", "puller", "time")
        )
        lines.append(
            f"{kind:<28}{server:>9.3f}{puller:>9.3f}{both(rounds, kind):>9.3f}{took:>9.3f}"
        )
    for name in PASSES:
        passed_s = statistics.median(each[name]["puller"] for each in rounds)
        lines.append(f"{name + ', one pass':<28}{'':>9}{passed_s:>9.3f}")
    for kind in KINDS[1:5]:
        for beside, bar in ((FORMER, BAR_OF_PAGES), ("raw", BAR_OF_RAW)):
            ratio = both(rounds, kind) / both(rounds, beside)
            missed = "" if ratio <= bar else " MISSED"
            lines.append(f"{kind} / {beside}: {ratio:.2f} (bar: {bar}){missed}")
    return "\n".join(lines)


def both(rounds: list[dict[str, dict[str, float]]], kind: str) -> float:
    return statistics.median(each[kind]["server"] + each[kind]["puller"] for each in rounds)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=Path, help="be the process that is read from, in there")
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return 0
    record = Record()
    options.out.mkdir(parents=True, exist_ok=True)
    rounds_file = options.out / "row_pull.rounds.jsonl"
    with tempfile.TemporaryDirectory() as directory:
        rounds = asyncio.run(measure(options.rounds, rounds_file, Path(directory)))
    text = as_text(rounds)
    print(text)
    record.keep(options.out, "row_pull", {"rounds": rounds}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
