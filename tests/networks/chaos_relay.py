"""A relay in front of one port of a host: it delays, reorders, loses, duplicates, damages and cuts
packets.

The fate of a packet is drawn from the seed and the packet's number alone, so a run can be repeated
as far as packets come in the same order. Each piece that is read from a connection counts as a
packet; pieces keep their order, none is duplicated or lost, and a piece that is cut ends the
connection. Packets back over a connection have settings of their own; datagrams back have none
here, because their receivers have relays of their own.
"""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple, Self

from tests.networks.network_cluster import Network

_PIECE_BYTES = 1 << 16
_SHIFT = 10000  # From a port to that of its relay.
_BEGIN_S = 0.05  # Until a connection that was just accepted has a task.


class Fate(NamedTuple):
    delays_s: tuple[float, ...]  # Of each copy; empty: lost.
    damaged_at: float | None  # Position of the changed byte, as a share of the length.
    cut_at: float | None  # Length of the rest, likewise.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Shares are of 1. Packets with different delays overtake each other."""

    seed: int
    lost: float = 0.0
    duplicated: float = 0.0
    damaged: float = 0.0
    cut: float = 0.0
    delay_s: float = 0.0  # Maximum.
    bytes_per_s: float = inf  # Of each connection.

    def fate(self, number: int) -> Fate:
        draw = Random(f"{self.seed}/{number}")
        # Everything is drawn for every packet, so that the shares are independent.
        lost, duplicated, damaged, cut = (
            draw.random() < share for share in (self.lost, self.duplicated, self.damaged, self.cut)
        )
        delays_s = draw.uniform(0, self.delay_s), draw.uniform(0, self.delay_s)
        where = draw.random(), draw.random()
        copies = 0 if lost else 2 if duplicated else 1
        return Fate(delays_s[:copies], where[0] if damaged else None, where[1] if cut else None)


UNDISTURBED = ChaosSettings(seed=0)


class Relay:
    """A thread whose sockets are the host's, from `with` to its end. It starts before
    connections to the port are made, because earlier ones bypass it; its settings may change at
    any time.
    """

    def __init__(
        self,
        network: Network,
        host: str,
        protocol: str,
        port: int,
        chaos: ChaosSettings = UNDISTURBED,
        back: ChaosSettings = UNDISTURBED,
    ) -> None:
        self._network, self._host, self._protocol, self._port = network, host, protocol, port
        self.chaos, self.back = chaos, back
        self.seen: Counter[str] = Counter()
        self._number = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"relay of {host}")
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60), "the relay does not start"
        self._network.redirect(self._host, self._protocol, self._port, self._port + _SHIFT)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._network.enter(self._host)
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._target = self._network.addresses[self._host], self._port
        where = self._target[0], self._port + _SHIFT
        if self._protocol == "udp":
            datagrams = _Datagrams(self, where, self._target)
            self._ready.set()
            await self._stop.wait()
            datagrams.close()
            return
        server = await asyncio.start_server(self._serve_connection, *where)
        self._ready.set()
        await self._stop.wait()
        server.close()
        await asyncio.sleep(_BEGIN_S)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for writer in self._writers:
            # What it has not sent yet would keep it open; one that has closed has no abort() left.
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
        await asyncio.sleep(0)

    def _next_fate(self, chaos: ChaosSettings) -> Fate:
        self._number += 1
        self.seen["packets"] += 1
        fate = chaos.fate(self._number)
        for what, happened in (
            ("lost", not fate.delays_s),
            ("damaged", fate.damaged_at is not None),
            ("cut", fate.cut_at is not None),
        ):
            self.seen[what] += happened
        return fate

    def pass_datagram(self, data: bytes, send: Callable[[bytes], None]) -> None:
        fate = self._next_fate(self.chaos)
        for delay_s in fate.delays_s:
            self._loop.call_later(delay_s, send, _changed(data, fate))

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers.append(writer)
        try:
            with contextlib.suppress(OSError):
                upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
                self._writers.append(upstream_writer)
                try:
                    ways = (
                        self._pump(reader, upstream_writer, lambda: self.chaos),
                        self._pump(upstream_reader, writer, lambda: self.back),
                    )
                    pumps = [asyncio.create_task(way) for way in ways]
                    # The end of either connection ends both, so that neither side waits for the
                    # other.
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
                finally:
                    upstream_writer.close()
        finally:
            writer.close()
            self._connections.discard(task)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        now: Callable[[], ChaosSettings],
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                fate = self._next_fate(now())
                if fate.delays_s:
                    await asyncio.sleep(fate.delays_s[0])
                changed = _changed(piece, fate)
                while changed:
                    # Steps of a twentieth of a second, so that changed settings apply at once.
                    step = int(min(len(changed), max(1.0, now().bytes_per_s / 20)))
                    writer.write(changed[:step])
                    await writer.drain()
                    changed = changed[step:]
                    await asyncio.sleep(step / now().bytes_per_s)
                if fate.cut_at is not None:
                    return


class _Datagrams:
    """One socket towards the host per sender, by which answers return to that sender."""

    def __init__(self, relay: Relay, where: tuple[str, int], target: tuple[str, int]) -> None:
        self._relay, self._target = relay, target
        self._loop = asyncio.get_running_loop()
        self._entrance = self._socket()
        self._entrance.bind(where)
        self._ways: dict[tuple[str, int], socket.socket] = {}
        self._loop.add_reader(self._entrance, self._come_in)

    def close(self) -> None:
        for each in (self._entrance, *self._ways.values()):
            self._loop.remove_reader(each)
            each.close()

    def _come_in(self) -> None:
        data, source = self._entrance.recvfrom(_PIECE_BYTES)
        if (way := self._ways.get(source)) is None:
            way = self._ways[source] = self._socket()
            way.connect(self._target)
            self._loop.add_reader(way, self._go_back, way, source)
        self._relay.pass_datagram(data, lambda changed: self._send(way, changed))

    def _send(self, way: socket.socket, data: bytes) -> None:
        # The host may be dead, or the relay closed: as a lost packet.
        with contextlib.suppress(OSError):
            way.send(data)

    def _go_back(self, way: socket.socket, source: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            self._entrance.sendto(way.recv(_PIECE_BYTES), source)

    @staticmethod
    def _socket() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setblocking(False)
        return made


def _changed(data: bytes, fate: Fate) -> bytes:
    if fate.damaged_at is not None:
        changed = bytearray(data)
        changed[int(fate.damaged_at * len(data))] ^= 0x55
        data = bytes(changed)
    return data if fate.cut_at is None else data[: int(fate.cut_at * len(data))]
