"""A relay in front of one TCP port of a host, which damages and cuts what the host sends, and slows
it down.

Each piece that is read from a connection has a number; what becomes of it is drawn from the seed
and that number alone. A piece that is cut ends the connection.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Self

from kvrs_testkit.networks import Network

_PIECE_BYTES = 1 << 16
_SHIFT = 10000  # From a port to that of its relay.
_BEGIN_S = 0.05  # Until a connection that was just accepted has a task.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    seed: int
    damaged: float = 0.0  # Share of the pieces.
    cut: float = 0.0
    bytes_per_s: float = inf  # Of each connection.


UNDISTURBED = ChaosSettings(seed=0)


class Relay:
    """A thread whose sockets are the host's, from `with` to its end. It starts before
    connections to the port are made, because earlier ones bypass it; its settings may change at
    any time.
    """

    def __init__(self, network: Network, host: str, port: int) -> None:
        self._network, self._host, self._port = network, host, port
        self.back = UNDISTURBED  # What becomes of pieces that the host sends.
        self.seen: Counter[str] = Counter()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"relay of {host}")
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60), "the relay does not start"
        self._network.redirect(self._host, self._port, self._port + _SHIFT)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._network.enter(self._host)
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._address = self._network.addresses[self._host]
        server = await asyncio.start_server(
            self._serve_connection, self._address, self._port + _SHIFT
        )
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

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers.append(writer)
        try:
            with contextlib.suppress(OSError):
                upstream_reader, upstream_writer = await asyncio.open_connection(
                    self._address, self._port
                )
                self._writers.append(upstream_writer)
                try:
                    pumps = [
                        asyncio.create_task(self._pass(reader, upstream_writer)),
                        asyncio.create_task(self._return(upstream_reader, writer)),
                    ]
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

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                writer.write(piece)
                await writer.drain()

    async def _return(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := bytearray(await reader.read(_PIECE_BYTES)):
                self.seen["pieces"] += 1
                chaos = self.back
                draw = Random(f"{chaos.seed}/{self.seen['pieces']}")
                if draw.random() < chaos.damaged:
                    self.seen["damaged"] += 1
                    piece[draw.randrange(len(piece))] ^= 0x55
                if is_cut := draw.random() < chaos.cut:
                    del piece[draw.randrange(len(piece)) :]
                while piece:
                    # Steps of a twentieth of a second, so that changed settings apply at once.
                    step = int(min(len(piece), max(1.0, self.back.bytes_per_s / 20)))
                    writer.write(piece[:step])
                    await writer.drain()
                    del piece[:step]
                    await asyncio.sleep(step / self.back.bytes_per_s)
                if is_cut:
                    return
