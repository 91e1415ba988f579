"""Pages over Python's `ssl` beside pages as they are: two processes, loopback.

    python -m experiments.page_tls.run [--repeats 21] [--out DIR]

The ways take turns within every repeat, the order turns around.
"""

import argparse
import asyncio
import multiprocessing
import os
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from experiments.page_transfer.run import SECRET, SETTINGS, Memory, identity
from experiments.record import Record
from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.frames import AnswerHeader, Bytes, encode_answer
from kvrs.protocol.page_messages import Identity
from kvrs.protocol.session import SESSION_MAC_BYTES, Session
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.transfer.connections import ConnectionPool, PageConnection
from kvrs.transfer.handshake import admit, introduce, page_key
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Peer, PullRequest
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.send_faults import SendingFaults
from kvrs.transfer.server import PageServer
from kvrs.transfer.stream import Filling, SocketStream, page_socket
from tests.certificates import Authority, Pair

OUT = Path(__file__).parent / "results"
HOST = "127.0.0.1"
PAGES = 1024
# Size of a page, and repeats of it for one of the option.
SIZES = {"64 MiB in pages of 64 KiB": (1 << 16, 1.0), "1 GiB in pages of 1 MiB": (1 << 20, 1 / 3)}
_PIECE_BYTES = 1 << 20  # As much as the page server hands over at a time.
_NO_MAC = bytes(SESSION_MAC_BYTES)
_BYTES, _BYTES_TLS = "bytes", "bytes, ssl"
_PAGES, _PAGES_TLS = "pages, macs: as they are", "pages, ssl in place of macs"
WAYS = (_BYTES, _BYTES_TLS, _PAGES, _PAGES_TLS)


class OpenSession(Session):
    """Without macs: TLS has its own."""

    def __init__(self) -> None:
        super().__init__(SECRET, is_client=True)

    def seal(self, message: Bytes) -> bytes:
        return _NO_MAC

    def answer(self, answer: AnswerHeader, payload: Bytes = b"") -> bytes:
        return encode_answer(answer) + _NO_MAC

    def check(self, mac: Bytes, message: Bytes) -> None:
        pass

    def check_answer(self, mac: Bytes, answer: AnswerHeader, payload: Bytes = b"") -> None:
        pass


class TlsStream(SocketStream):
    """A connected socket of `ssl`, read and written as the page port does it: the socket first, the
    event loop where that has nothing. A call moves one record; several are joined where they are
    there.
    """

    def __init__(self, sock: Any, context: ssl.SSLContext, *, is_server: bool) -> None:
        super().__init__(sock, SETTINGS.stall_timeout_s)
        self._tls = self._sock = context.wrap_socket(
            sock,
            server_side=is_server,
            server_hostname=None if is_server else HOST,
            do_handshake_on_connect=False,
        )

    async def shake_hands(self) -> str:
        """Those of TLS; returns the name of the cipher."""
        await self._attempt(self._greet, self._readable)
        cipher = self._tls.cipher()
        assert cipher is not None
        return cipher[0]

    def _greet(self) -> int:
        self._tls.do_handshake()
        return 0

    def begin(self, session: Session) -> None:
        super().begin(OpenSession())

    async def send(self, *buffers: Bytes) -> None:
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                sent = await self._attempt(partial(self._tls.send, left), self._writable)
                left = left[sent:]

    def _scatter(self, views: Sequence[memoryview]) -> int:
        if self._arrivals is not None:
            self._arrivals.reading(self._received_bytes)
        received = 0
        for view in views:
            left = view
            while left:
                try:
                    size = self._tls.recv_into(left)
                except ssl.SSLWantReadError:
                    if not received:
                        raise
                    return received
                if not size:
                    raise TransferError("connection closed by the peer")
                received += size
                self._received_bytes += size
                left = left[size:]
        return received

    async def _attempt(
        self, call: Callable[[], int], ready: Callable[[float | None], Awaitable[None]]
    ) -> int:
        return await super()._attempt(partial(_tried, call), ready)


def _tried(call: Callable[[], int]) -> int:
    try:
        return call()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None


class TlsServer(PageServer):
    """A page port behind TLS."""

    def __init__(self, context: ssl.SSLContext, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._context = context

    async def _shake_hands(self, sock: Any) -> tuple[Identity, Identity, SocketStream]:
        stream = TlsStream(sock, self._context, is_server=True)
        await stream.shake_hands()
        own, client = await admit(stream, self._key, self._identity)
        return own, client, stream


class TlsPool(ConnectionPool):
    """Connections to page ports behind TLS."""

    def __init__(self, context: ssl.SSLContext, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._context = context

    async def _connect(self, peer: Peer) -> PageConnection:
        own = self._identity()
        stream = await connected(peer.port, self._context)
        server = await introduce(stream, self._key, own, peer)
        return PageConnection(stream, peer, own, server)


async def connected(port: int, context: ssl.SSLContext | None) -> SocketStream:
    sock = page_socket(HOST)
    await asyncio.get_running_loop().sock_connect(sock, (HOST, port))
    if context is None:
        return SocketStream(sock, SETTINGS.stall_timeout_s)
    stream = TlsStream(sock, context, is_server=False)
    await stream.shake_hands()
    return stream


async def serve_bytes(region: memoryview, context: ssl.SSLContext | None) -> int:
    """All of the region for each byte that comes; returns the port."""
    listener = page_socket(HOST)
    listener.bind((HOST, 0))
    listener.listen()

    async def serve() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        if context is None:
            stream = SocketStream(sock, SETTINGS.stall_timeout_s)
        else:
            stream = TlsStream(sock, context, is_server=True)
            await stream.shake_hands()
        while True:
            await stream.wait_for_data()
            await stream.receive_into(memoryview(bytearray(1)))
            for start in range(0, len(region), _PIECE_BYTES):
                await stream.send(region[start : start + _PIECE_BYTES])

    serving.add(asyncio.create_task(serve()))
    return int(listener.getsockname()[1])


serving: set[asyncio.Task[None]] = set()


def send(ours: Connection, page_bytes: int, pair: Pair) -> None:
    """The sending process: all ways, of one region."""
    region = memoryview(os.urandom(PAGES * page_bytes))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)

    async def serve() -> None:
        own = partial(identity, "sender", "n0", page_bytes)
        links = SendingLinks(SETTINGS, SendingFaults(), NodeId("n0"))
        rest = (own, Memory(region, page_bytes), SECRET, SETTINGS, links)
        servers = {_PAGES: PageServer(*rest), _PAGES_TLS: TlsServer(context, *rest)}
        ports = {name: await server.start(HOST, 0) for name, server in servers.items()}
        ports[_BYTES] = await serve_bytes(region, None)
        ports[_BYTES_TLS] = await serve_bytes(region, context)
        ours.send(ports)
        await asyncio.Event().wait()

    uvloop.run(serve())


class Sender:
    def __init__(self, page_bytes: int, pair: Pair) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.process = spawn.Process(target=send, args=(theirs, page_bytes, pair), daemon=True)
        self.process.start()
        self.ports: dict[str, int] = ours.recv()
        self._cpu_clock = Path(f"/proc/{self.process.pid}/schedstat")

    def cpu_s(self) -> float:
        """CPU time that both ends have used so far."""
        return int(self._cpu_clock.read_text().split()[0]) / 1e9 + time.process_time()


@contextmanager
def sending(page_bytes: int, pair: Pair) -> Iterator[Sender]:
    sender = Sender(page_bytes, pair)
    try:
        yield sender
    finally:
        sender.process.kill()
        sender.process.join()


class Receiver:
    """All ways, into one region."""

    def __init__(self, sender: Sender, page_bytes: int, context: ssl.SSLContext) -> None:
        self._sender = sender
        self._context = context
        # Written once, so that no page fault is measured.
        region = memoryview(bytearray(os.urandom(PAGES * page_bytes)))
        starts = range(0, len(region), page_bytes)
        self._pages = [region[start : start + page_bytes] for start in starts]
        self._request = PullRequest(tuple(Tag(n.to_bytes(TAG_BYTES)) for n in range(PAGES)))
        own = partial(identity, "receiver", "n1", page_bytes)
        rest = (own, page_key(SECRET), SETTINGS.stall_timeout_s)
        self._pullers = {
            name: PagePuller(own, SECRET, SETTINGS, time.perf_counter)
            for name in (_PAGES, _PAGES_TLS)
        }
        self._pullers[_PAGES_TLS]._pool = TlsPool(context, *rest)
        self._streams: dict[str, SocketStream] = {}
        self.cipher = ""

    async def connect(self) -> None:
        for name, context in ((_BYTES, None), (_BYTES_TLS, self._context)):
            stream = await connected(self._sender.ports[name], context)
            self._streams[name] = stream
            if isinstance(stream, TlsStream):
                self.cipher = await stream.shake_hands()

    async def receive(self, name: str) -> tuple[float, float]:
        """Seconds, and CPU seconds of both ends."""
        cpu_s, begun_s = self._sender.cpu_s(), time.perf_counter()
        if name in self._streams:
            stream = self._streams[name]
            await stream.send(b"x")
            filling = Filling(stream, self._pages)
            for _ in self._pages:
                await filling.next()
        else:
            port = self._sender.ports[name]
            peer = Peer(InstanceId("sender"), NodeId("n0"), HOST, port)
            result = await self._pullers[name].pull(peer, self._request, self._pages, None)
            assert result.full_pages == PAGES, result
        return time.perf_counter() - begun_s, self._sender.cpu_s() - cpu_s


async def measure(page_bytes: int, repeats: int, ca: Authority, pair: Pair) -> dict[str, Any]:
    gigabytes = PAGES * page_bytes / 1e9
    rows: dict[str, dict[str, list[float]]] = {
        name: {"gb_per_s": [], "cpu_s_per_gb": []} for name in WAYS
    }
    with sending(page_bytes, pair) as sender:
        receiver = Receiver(sender, page_bytes, ca.client())
        await receiver.connect()
        for repeat in range(repeats + 1):
            for name in WAYS if repeat % 2 else reversed(WAYS):
                seconds, cpu_s = await receiver.receive(name)
                if repeat > 0:  # The first warms up.
                    rows[name]["gb_per_s"].append(round(gigabytes / seconds, 3))
                    rows[name]["cpu_s_per_gb"].append(round(cpu_s / gigabytes, 4))
        return {"repeats": repeats, "cipher": receiver.cipher, "ways": rows}


async def measure_all(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        ca = Authority(Path(directory))
        pair = ca.issue("pages")
        return {
            name: await measure(page_bytes, max(2, round(repeats * share)), ca, pair)
            for name, (page_bytes, share) in SIZES.items()
        }


def as_text(found: dict[str, Any]) -> str:
    lines = []
    for name, each in found.items():
        ways = each["ways"]
        before = ways[_PAGES]
        lines += [
            f"{name}, {each['repeats']} repeats, {each['cipher']}",
            f"{'':30}{'GB/s p50':>9}{'min':>7}{'max':>7}{'CPU s/GB p50':>14}"
            f"{'x speed of pages':>18}{'x their CPU':>13}",
        ]
        for way, row in ways.items():
            rate, cpu_s = median(row["gb_per_s"]), median(row["cpu_s_per_gb"])
            speed = rate / median(before["gb_per_s"])
            cost = cpu_s / median(before["cpu_s_per_gb"])
            lines.append(
                f"{way:30}{rate:9.2f}{min(row['gb_per_s']):7.2f}{max(row['gb_per_s']):7.2f}"
                f"{cpu_s:14.2f}{speed:18.2f}{cost:13.2f}"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=21, help="of 64 MiB; of 1 GiB a third")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    record = Record()
    found = uvloop.run(measure_all(options.repeats))
    print(as_text(found))
    record.keep(options.out, "page_tls", {"sizes": found}, as_text(found))


if __name__ == "__main__":
    main()
