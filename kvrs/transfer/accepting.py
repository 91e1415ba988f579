"""The accept loop of page ports and stages' hosts, with bounds on peers and on strangers."""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from kvrs.transfer.stream import StalledError, page_socket, readable

log = logging.getLogger(__name__)

MAX_PEERS = 256
# Most connections that have not ended their hand-shake. A further one closes the oldest of the
# address with the most such connections: a silent one if there is any, once it has had `_CHANCE_S`
# to say its first byte; else one that has had `_GRACE_S`, in which every peer's hand-shake is over.
# Until then it waits.
MAX_STRANGERS = 256
_CHANCE_S, _GRACE_S = 0.02, 0.5
HANDSHAKE_TIMEOUT_S = 5.0
_BACKLOG = 512

# Pause of accepting after an error such as a lack of file descriptors: other connections must close
# before a new one can be accepted.
_PAUSE_S = 0.1


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raises OSError: it cannot be bound."""
    listener = page_socket(host)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class AcceptLoop:
    """Serves each connection in a task of its own. The task closes the connection, and may end at
    any error of the peer.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], Coroutine[Any, Any, None]],
        failed: Callable[[BaseException], None] = lambda bug: None,
    ) -> None:
        """`serve` calls `proven` once the hand-shake of its connection is over; `failed` is called
        with an exception that `serve` raises by a bug.
        """
        self._serve, self._failed = serve, failed
        # Listening sockets, by the task that accepts their connections.
        self._listeners: dict[asyncio.Task[None], socket.socket] = {}
        self._connections: set[asyncio.Task[None]] = set()
        # Client's address and time of accepting of each connection whose hand-shake is not over,
        # oldest first; and those of them that have said nothing.
        self._strangers: dict[asyncio.Task[None], tuple[str, float]] = {}
        self._silent: dict[asyncio.Task[None], tuple[str, float]] = {}
        self._handshake_over = asyncio.Event()

    def listen(self, listener: socket.socket) -> None:
        """Accept connections of the socket until `close`, which also closes the socket."""
        self._listeners[asyncio.create_task(self._accept(listener))] = listener

    def proven(self) -> None:
        """Note that the hand-shake of the calling task's connection is over."""
        task = asyncio.current_task()
        assert task is not None
        self._no_stranger(task)

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        tasks = [*self._connections, *self._listeners]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners.values():
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            # After a failure dozens of peers connect at once: they wait, and none is refused.
            await readable(listener, None)
            await self._make_room()
            sock, address = await _accepted(listener)
            # Nothing is awaited before the connection has its task: a cancellation there would
            # leave the connection open.
            if len(self._connections) - len(self._strangers) >= MAX_PEERS:
                sock.close()
                continue
            task = asyncio.create_task(self._begin(sock))
            self._connections.add(task)
            self._strangers[task] = address, asyncio.get_running_loop().time()
            self._silent[task] = self._strangers[task]
            task.add_done_callback(partial(self._finished, sock))

    async def _begin(self, sock: socket.socket) -> None:
        """Serve a connection once its client has said something."""
        try:
            await readable(sock, HANDSHAKE_TIMEOUT_S)
        except StalledError:
            sock.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._silent.pop(task, None)
        await self._serve(sock)

    async def _make_room(self) -> None:
        """Wait until fewer than `MAX_STRANGERS` connections are in their hand-shake, or end one."""
        while len(self._strangers) >= MAX_STRANGERS:
            some, grace_s = self._strangers, _GRACE_S
            if self._silent:
                some, grace_s = self._silent, _CHANCE_S
            counts = Counter(address for address, _ in some.values())
            ((crowd, _),) = counts.most_common(1)
            oldest, since_s = next(
                (task, since_s) for task, (address, since_s) in some.items() if address == crowd
            )
            left_s = since_s + grace_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                del self._strangers[oldest]
                self._silent.pop(oldest, None)
                oldest.cancel()
                continue
            self._handshake_over.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._handshake_over.wait()

    def _no_stranger(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._silent.pop(task, None)
        self._handshake_over.set()

    def _finished(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        # A task that was cancelled before it ran has not closed its socket.
        sock.close()
        self._connections.discard(task)
        self._no_stranger(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("connection closed by a bug", exc_info=bug)
            self._failed(bug)


async def _accepted(listener: socket.socket) -> tuple[socket.socket, str]:
    """Accept the next connection; return it with its client's address. A cancelled call has
    accepted no connection.
    """
    while True:
        try:
            await readable(listener, None)
            sock, address = listener.accept()
            return sock, str(address[0]) if address else "this host"
        except BlockingIOError:
            continue  # The client left before it was accepted.
        except OSError as error:
            log.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(_PAUSE_S)
