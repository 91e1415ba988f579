"""How many connections a port has room for, and which one is closed in favour of another."""

from dataclasses import dataclass
from typing import Protocol

from kvrs.descriptors import descriptors_left

_MOST_CONNECTIONS = 8192
_PAGE_PORT = 512  # Connections of peers and strangers there.


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections a port has at a time, in all and from one address."""

    total: int
    per_address: int

    @classmethod
    def of_peers(cls) -> "ConnectionLimits":
        """Limits of an instance or an agent: half of the descriptors beside those of its page port.
        Its peers are few, and may share an address, which leaves a quarter to the others.
        """
        total = min(_MOST_CONNECTIONS, descriptors_left(_PAGE_PORT) // 2)
        return cls(total, max(1, total * 3 // 4))


class Counted(Protocol):
    """A connection; `scope` is what its client has proved, None for a stranger."""

    @property
    def address(self) -> str: ...
    @property
    def scope(self) -> object | None: ...
    def abort(self) -> None: ...


class Connections:
    """The connections of one port. In place of a new one beyond a limit, the one is closed that
    has been without a request for longest, of a stranger if there is one; where all have one, the
    new one is refused.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._of_address: dict[str, int] = {}
        self._open: set[Counted] = set()
        self._idle: dict[Counted, None] = {}  # Those without a request, longest first.

    def admit(self, connection: Counted) -> bool:
        address = connection.address
        crowded = self._of_address.get(address, 0) >= self._limits.per_address
        if crowded or len(self._open) >= self._limits.total:
            idle = [each for each in self._idle if not crowded or each.address == address]
            strangers = (each for each in idle if each.scope is None)
            if (evicted := next(strangers, idle[0] if idle else None)) is None:
                return False
            self.forget(evicted)
            evicted.abort()
        self._open.add(connection)
        self._of_address[address] = self._of_address.get(address, 0) + 1
        self._idle[connection] = None
        return True

    @property
    def busy(self) -> int:
        return len(self._open) - len(self._idle)

    def begin(self, connection: Counted) -> None:
        """A request has come."""
        self._idle.pop(connection, None)

    def end(self, connection: Counted) -> None:
        """It has been answered."""
        if connection in self._open:
            self._idle[connection] = None

    def abort(self) -> None:
        """Close all."""
        for connection in list(self._open):
            connection.abort()

    def forget(self, connection: Counted) -> None:
        if connection not in self._open:
            return
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._of_address[connection.address] -= 1
        if not self._of_address[connection.address]:
            del self._of_address[connection.address]
