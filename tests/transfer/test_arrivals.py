"""Bytes that have arrived, as the kernel counts them."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvrs.transfer.stream import Arrivals

pytestmark = pytest.mark.network


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connected sender and reader, neither of which blocks."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        sender = socket.create_connection(server.getsockname())
        reader, _ = server.accept()
    with closing(sender), closing(reader):
        sender.setblocking(False)
        reader.setblocking(False)
        yield sender, reader


def fill(sender: socket.socket) -> None:
    """Send until the sender has waited for its reader for a while."""
    give_up_s = time.monotonic() + 0.05
    while time.monotonic() < give_up_s:
        try:
            sender.send(bytes(1 << 16))
            give_up_s = time.monotonic() + 0.05
        except BlockingIOError:
            time.sleep(0.01)


def test_a_sender_waits_for_a_reader_that_does_not_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """From its last bytes until the reader makes room, and once."""
    begun_s = time.monotonic()
    sender, reader = pair
    arrivals = Arrivals(reader)
    fill(sender)
    arrivals.look()

    arrivals.reading(0)
    arrivals.reading(0)
    assert reader.recv(1 << 24)
    fill(sender)
    seen = arrivals.look()

    assert seen is not None, "this system does not tell"
    assert seen.bytes > 0
    assert 0.04 < seen.waited_s < time.monotonic() - begun_s
    again = arrivals.look()
    assert again is not None
    assert (again.bytes, again.waited_s) == (0, 0.0)


def test_a_sender_whose_bytes_have_room_does_not_wait(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, reader = pair
    arrivals = Arrivals(reader)
    sender.send(bytes(1000))
    time.sleep(0.05)

    arrivals.reading(0)
    seen = arrivals.look()

    assert seen is not None, "this system does not tell"
    assert (seen.bytes, seen.waited_s) == (1000, 0.0)
    assert seen.at_s < time.monotonic()
