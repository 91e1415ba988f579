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
