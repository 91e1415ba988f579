"""Which connection of a crowded port makes room for a new one."""

from collections.abc import Callable

from kvrs.net.connections import ConnectionLimits, Connections, PortConnection
from kvrs.protocol.secrets import Scope


class Client(PortConnection):
    def __init__(
        self,
        name: str,
        closed: list[str],
        address: str = "host",
        scope: Scope | None = None,
        idle_since_s: float | None = 0.0,
    ) -> None:
        super().__init__(set())
        self.name, self.closed = name, closed
        self.address, self.scope, self.idle_since_s = address, scope, idle_since_s

    def reserve(self, address: str, abort: Callable[[], object]) -> bool:
        raise AssertionError("no limit reserves")

    def abort(self) -> None:
        self.closed.append(self.name)

    def check_room(self, size_bytes: int) -> None:
        raise AssertionError("a limit sends no response")

    def want_body(self) -> None:
        raise AssertionError("a limit reads no body")


def test_the_stranger_that_is_idle_for_longest_makes_room() -> None:
    """One that has proved itself does so when no stranger is idle, and one with a request never."""
    port, closed = Connections(ConnectionLimits(4, 4)), list[str]()
    for client in (
        Client("proved", closed, scope=Scope.PROXY, idle_since_s=1.0),
        Client("later", closed, idle_since_s=3.0),
        Client("longest", closed, idle_since_s=2.0),
        Client("busy", closed, idle_since_s=None),
    ):
        assert port.admit(client)
    busy = [Client(name, closed, idle_since_s=None) for name in ("new", "newer", "newest")]

    admitted = [port.admit(each) for each in busy]

    assert (closed, admitted) == (["longest", "later", "proved"], [True] * 3)
    assert not port.admit(Client("last", closed))
    assert port.busy == 4


def test_a_crowded_address_makes_room_for_itself() -> None:
    """Idle connections of others stay."""
    port, closed = Connections(ConnectionLimits(9, 1)), list[str]()
    for client in (Client("other", closed, "other"), Client("own", closed, idle_since_s=5.0)):
        assert port.admit(client)

    assert port.admit(Client("new", closed, idle_since_s=None))
    assert closed == ["own"]
    assert not port.admit(Client("last", closed))


class Looked(Client):
    """A client that counts how often any of them was looked at."""

    looks = 0

    @property
    def idle_since_s(self) -> float | None:
        Looked.looks += 1
        return self.since_s

    @idle_since_s.setter
    def idle_since_s(self, since_s: float | None) -> None:
        self.since_s = since_s


def test_a_flood_of_silent_connections_costs_few_looks_and_no_peer() -> None:
    """A choice for each of them, among thousands, would take the event loop's time."""
    port, closed = Connections(ConnectionLimits(1000, 1000)), list[str]()
    port.admit(Looked("peer", closed, scope=Scope.PROXY, idle_since_s=0.0))
    for number in range(999):
        port.admit(Looked("silent", closed, idle_since_s=float(number)))
    Looked.looks = 0

    for number in range(500):
        assert port.admit(Looked("silent", closed, idle_since_s=1000.0 + number))

    assert closed == ["silent"] * 500
    assert Looked.looks < 500 * 100


def test_of_many_strangers_a_fresh_one_does_not_make_room() -> None:
    port, closed = Connections(ConnectionLimits(300, 300)), list[str]()
    for number in range(300):
        port.admit(Client(str(number), closed, idle_since_s=float(number)))

    for number in range(200):
        assert port.admit(Client("fresh", closed, idle_since_s=1000.0 + number))

    assert "fresh" not in closed
