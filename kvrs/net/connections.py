"""Limits on a port's connections and on their memory, and the choice of a connection to close for a
new one.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvrs.process.memory import descriptors_left
from kvrs.protocol.secrets import Scope

_MAX_CONNECTIONS = 8192
# Unsent bytes of a connection above which its client counts as slower than what it is sent.
UNSENT_BYTES = 64 << 10
# Most idle strangers of which the one to be replaced is chosen: a flood of silent connections makes
# a choice for each, from thousands.
_CANDIDATES = 64
_PAGE_PORT = 512  # Most descriptors that the connections of a process's page port need.


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Most connections that a port has at a time, in total and from one address."""

    total: int
    per_address: int

    @classmethod
    def of_peers(cls) -> "ConnectionLimits":
        """Return the limits of an instance's or an agent's port: half of the descriptors that the
        page port leaves. Three quarters may come from one address, because the few peers may share
        it.
        """
        total = min(_MAX_CONNECTIONS, descriptors_left(_PAGE_PORT) // 2)
        return cls(total, max(1, total * 3 // 4))


class ByteBudget:
    """Limits on memory: `total_bytes` of all open requests' bodies and unread responses together,
    and `max_body_bytes` of each body.
    """

    def __init__(self, total_bytes: int, max_body_bytes: int) -> None:
        self.held_bytes = 0
        self.max_body_bytes = max_body_bytes
        self.total_bytes = total_bytes


class Writer(Protocol):
    """A response that is written to its connection as it is made."""

    def room_changed(self, has_room: bool) -> None:
        """Note that unsent bytes fill the connection's buffer, or that it has room again."""


class PortConnection(asyncio.Protocol, ABC):
    """A connection of a port: what the port's limits and the handlers of its requests use.

    `scope` is the scope whose key the client has proved; None: the client is a stranger.
    `writer` is the response that is being written; None: none, or in one piece. `watches` are the
    tasks of the port's watch streams.
    """

    __slots__ = ("address", "idle_since_s", "scope", "transport", "watches", "writer")

    def __init__(self, watches: set[asyncio.Task[Any]]) -> None:
        self.address = ""
        # Time since which no request is being served; None: one is.
        self.idle_since_s: float | None = None
        self.scope: Scope | None = None
        self.transport: asyncio.Transport | None = None
        self.watches = watches
        self.writer: Writer | None = None

    @abstractmethod
    def reserve(self, address: str, abort: Callable[[], object]) -> bool:
        """Count the connection, from before its hand-shake until `connection_lost`; return False if
        the port's limits refuse it. `abort` ends the connection while it has no transport.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once."""

    @abstractmethod
    def check_room(self, size_bytes: int) -> None:
        """Check that the port has memory for a response of this size, should its client not read
        it. Raises RequestError: it has not.
        """

    @abstractmethod
    def want_body(self) -> None:
        """Note that the request's handler now reads the body, so that more of it is received."""


class Connections:
    """The connections of one port. At a limit a new connection replaces an idle one, of a stranger
    if there is one: of `_CANDIDATES` strangers, looked at in turns, the one that has been idle for
    longest. If none is idle, the new connection is refused.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._of_address: dict[str, int] = {}
        # Connections that were looked at last are last.
        self._open: OrderedDict[PortConnection, None] = OrderedDict()

    def admit(self, connection: PortConnection) -> bool:
        address = connection.address
        crowded = self._of_address.get(address, 0) >= self._limits.per_address
        if crowded or len(self._open) >= self._limits.total:
            if (evicted := self._most_idle(address if crowded else None)) is None:
                return False
            self.forget(evicted)
            evicted.abort()
        self._open[connection] = None
        self._of_address[address] = self._of_address.get(address, 0) + 1
        return True

    def _most_idle(self, address: str | None) -> PortConnection | None:
        """Return a connection that has been idle for long, of a stranger if there is one; None:
        none is idle. `address`: consider only connections from this address; None: all.
        """
        idle: list[tuple[bool, float, int, PortConnection]] = []
        strangers = 0
        for number in range(len(self._open)):
            each = next(iter(self._open))
            self._open.move_to_end(each)
            if (since_s := each.idle_since_s) is None or address not in (None, each.address):
                continue
            idle.append((each.scope is not None, since_s, number, each))
            strangers += each.scope is None
            if strangers == _CANDIDATES:
                break
        return min(idle)[-1] if idle else None

    @property
    def busy(self) -> int:
        return sum(each.idle_since_s is None for each in self._open)

    def abort(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.abort()

    def forget(self, connection: PortConnection) -> None:
        if connection not in self._open:
            return
        del self._open[connection]
        self._of_address[connection.address] -= 1
        if not self._of_address[connection.address]:
            del self._of_address[connection.address]
