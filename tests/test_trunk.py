"""Connections within one: what each of them brings, and what neither end can do to the other."""

import asyncio
import errno
from struct import pack
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.trunk import MOST_BYTES, MOST_HELD_BYTES, Trunk

DATA, PAUSE, RESUME, CLOSE, RESET = range(5)


class Wire(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return 0


class Noting(asyncio.Protocol):
    """Notes what happens to a connection."""

    def __init__(self) -> None:
        self.data = b""
        self.happened: list[str] = []
        self.error: BaseException | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: BaseException | None) -> None:
        self.happened.append("lost")
        self.error = exc

    def pause_writing(self) -> None:
        self.happened.append("full")

    def resume_writing(self) -> None:
        self.happened.append("room")


def entry(number: int, kind: int, data: bytes = b"") -> bytes:
    return pack(">II", number, kind << 24 | len(data)) + data


class End:
    """A trunk whose other end is the test."""

    def __init__(self, *, accepts: bool) -> None:
        self.accepted: list[Noting] = []
        self.lost = 0
        self.wire = Wire()
        self.trunk = Trunk(self._accept if accepts else None, self._lost)
        self.trunk.connection_made(self.wire)

    def _accept(self) -> Noting:
        self.accepted.append(made := Noting())
        return made

    def _lost(self) -> None:
        self.lost += 1

    def connect(self) -> Noting:
        made = Noting()
        self.trunk.connect(made)
        return made

    async def sent(self) -> bytes:
        """What was written since the last time, each turn of the event loop in one piece."""
        for _ in range(3):
            await asyncio.sleep(0)
        sent, self.wire.sent = self.wire.sent, b""
        return sent


_entries = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([DATA, DATA, DATA, CLOSE]), st.binary(max_size=9)),
    max_size=12,
)


@given(_entries, st.lists(st.integers(1, 20), max_size=30))
def test_the_same_bytes_say_the_same_wherever_reads_end(
    entries: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    """A read may end in the middle of an entry and of its head."""
    sent = b"".join(
        entry(number, kind, data if kind == DATA else b"") for number, kind, data in entries
    )

    async def seen(pieces: list[bytes]) -> list[tuple[bytes, list[str]]]:
        end = End(accepts=True)
        for piece in pieces:
            end.trunk.data_received(piece)
        return [(each.data, each.happened) for each in end.accepted]

    pieces, at = [], 0
    for cut in cuts:
        pieces.append(sent[at : at + cut])
        at += cut
    pieces.append(sent[at:])

    assert asyncio.run(seen(pieces)) == asyncio.run(seen([sent]))


async def test_what_an_engine_writes_in_one_turn_leaves_in_one_piece() -> None:
    """Of all connections, in the order in which it was written."""
    end = End(accepts=True)
    end.trunk.data_received(entry(1, DATA, b"x") + entry(2, DATA, b"x"))
    one, two = end.accepted

    one.transport.write(b"a")
    two.transport.writelines([b"b", b"c"])
    one.transport.write(bytes(MOST_BYTES + 1))
    nothing_yet = end.wire.sent

    assert nothing_yet == b""
    assert await end.sent() == b"".join(
        (
            entry(1, DATA, b"a"),
            entry(2, DATA, b"bc"),
            entry(1, DATA, bytes(MOST_BYTES)),
            entry(1, DATA, b"\0"),
        )
    )


async def test_what_a_client_writes_leaves_at_once() -> None:
    """No request waits for a turn of the event loop."""
    end = End(accepts=False)
    one = end.connect()

    one.transport.write(b"request")

    assert end.wire.sent == entry(1, DATA, b"request")


@pytest.mark.parametrize("ours", ["close", "abort"])
async def test_a_connection_that_is_closed_hears_no_more(ours: str) -> None:
    """What the other end has sent before it knew is dropped; the others go on."""
    end = End(accepts=False)
    one, two = end.connect(), end.connect()

    getattr(one.transport, ours)()
    one.transport.write(b"too late")
    end.trunk.data_received(entry(1, DATA, b"late") + entry(1, CLOSE) + entry(2, DATA, b"on time"))

    assert await end.sent() == entry(1, CLOSE if ours == "close" else RESET)
    assert (one.data, one.happened) == (b"", ["lost"])
    assert (two.data, two.happened) == (b"on time", [])


async def test_the_other_end_closes_one_connection() -> None:
    """A reset is an error of the system, as without a trunk."""
    end = End(accepts=False)
    one, two, three = end.connect(), end.connect(), end.connect()

    end.trunk.data_received(entry(1, DATA, b"last") + entry(1, CLOSE) + entry(2, RESET))

    assert (one.data, one.happened, one.error) == (b"last", ["lost"], None)
    assert isinstance(two.error, ConnectionResetError)
    assert two.error.errno == errno.ECONNRESET
    assert three.happened == []


async def test_the_end_of_a_trunk_is_that_of_all_its_connections() -> None:
    """They hear of it in one callback, after the trunk's owner."""
    end = End(accepts=False)
    all_of_them = [end.connect() for _ in range(5)]
    all_of_them[0].transport.pause_reading()
    end.trunk.data_received(entry(1, DATA, b"held"))
    error = ConnectionResetError()
    end.wire.abort()

    end.trunk.connection_lost(error)

    assert end.lost == 1
    assert [each.happened for each in all_of_them] == [["lost"]] * 5
    assert all(each.error is error for each in all_of_them)
    assert not end.trunk.is_open


async def test_a_connection_that_is_not_read_holds_little() -> None:
    """It asks the other end to pause. What comes all the same is kept in order, and within a
    bound.
    """
    end = End(accepts=False)
    one, two = end.connect(), end.connect()
    one.transport.pause_reading()
    paused = await end.sent()
    end.trunk.data_received(
        entry(1, DATA, b"a") + entry(2, DATA, b"x") + entry(1, DATA, b"b") + entry(1, CLOSE)
    )
    before = one.data, list(one.happened)
    one.transport.resume_reading()
    resumed = await end.sent()

    assert (paused, resumed) == (entry(1, PAUSE), entry(1, RESUME))
    assert before == (b"", [])
    assert (one.data, one.happened) == (b"ab", ["lost"])
    assert two.data == b"x"

    two.transport.pause_reading()
    for _ in range(MOST_HELD_BYTES // MOST_BYTES + 1):
        end.trunk.data_received(entry(2, DATA, bytes(MOST_BYTES)))

    assert await end.sent() == entry(2, PAUSE) + entry(2, RESET)
    assert two.happened == ["lost"]
    assert not end.wire.is_aborted


async def test_writers_pause_for_the_other_end_and_for_the_wire() -> None:
    """Each is told once, and may write again when neither is full."""
    end = End(accepts=True)
    end.trunk.data_received(entry(1, DATA, b"x") + entry(1, PAUSE) + entry(1, PAUSE))
    (one,) = end.accepted
    end.trunk.pause_writing()
    end.trunk.data_received(entry(2, DATA, b"x"))
    end.trunk.data_received(entry(1, RESUME))
    still_full = list(one.happened)
    end.trunk.resume_writing()

    assert still_full == ["full"]
    assert [each.happened for each in end.accepted] == [["full", "room"]] * 2


@pytest.mark.parametrize(
    ("accepts", "nonsense"),
    [
        (True, pack(">II", 1, MOST_BYTES + 1)),
        (True, pack(">II", 1, 0xFFFFFFFF)),
        (True, pack(">II", 1, CLOSE << 24 | 1)),
        (True, pack(">II", 1, 5 << 24)),
        (False, entry(1, DATA, b"x")),
    ],
)
async def test_a_trunk_ends_at_what_is_no_entry(accepts: bool, nonsense: bytes) -> None:
    """Before any of its bytes are waited for."""
    end = End(accepts=accepts)

    end.trunk.data_received(nonsense)

    assert end.wire.is_aborted
    assert end.accepted == []


async def test_a_bug_of_one_protocol_ends_its_connection_alone() -> None:
    """As on a connection of its own."""
    end = End(accepts=False)
    one, two = end.connect(), end.connect()
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def fails(data: bytes) -> None:
        raise ZeroDivisionError

    one.data_received = fails  # type: ignore[method-assign]
    end.trunk.data_received(entry(1, DATA, b"x") + entry(2, DATA, b"y"))

    assert await end.sent() == entry(1, RESET)
    assert two.data == b"y"
    assert isinstance(told[0]["exception"], ZeroDivisionError)


async def test_a_retired_trunk_ends_with_its_last_connection() -> None:
    """Its calls go on."""
    end = End(accepts=False)
    one = end.connect()

    end.trunk.retire()
    open_before = not end.wire.is_aborted
    one.transport.close()
    sent = await end.sent()

    assert open_before
    assert (sent, end.wire.is_aborted) == (entry(1, CLOSE), True)
