"""A client counts only whole rows of an agent that is slow, dies, damages rows or says nonsense."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvrs.errors import TransferError
from kvrs.protocol import rows
from kvrs.protocol.rows import RowFrame, Space
from kvrs.protocol.secrets import ProofError, Scope, scoped_key
from kvrs.transfer.rows import connections
from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.connections import RowStream, dial_unix, listen_unix
from kvrs.transfer.rows.tags import SALT_BYTES, RowTagger, RowTags
from kvrs_testkit.row_agent import admit
from kvrs_testkit.row_engine import AGENT, key_of, row_of

SECRET = bytes(32)
KEY = scoped_key(SECRET, Scope.ROWS, AGENT)
ROW_BYTES = 4096
SPACE, TAGS = Space(bytes(32), ROW_BYTES), RowTags([SECRET])
TAGGER = RowTagger(SECRET, bytes(SALT_BYTES))
KEYS = [key_of(number) for number in range(1, 7)]

Answer = Callable[[RowStream, list[bytes], int], None]  # Keys of a LOAD, number of the connection.


class Agent:
    """An agent by script."""

    def __init__(self, path: Path) -> None:
        self.dial = partial(dial_unix, path)
        self.connections = 0
        self.asked: list[list[bytes]] = []
        self.answer: Answer = whole
        self._listener = listen_unix(path)
        threading.Thread(target=self._accept, daemon=True).start()

    def client(self, *, is_local: bool = False) -> RowClient:
        return RowClient("n0", self.dial, KEY, SPACE, TAGS, is_local=is_local)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(
                    target=self._serve, args=(RowStream(connection), self.connections), daemon=True
                ).start()

    def _serve(self, stream: RowStream, number: int) -> None:
        with suppress(TransferError, ProofError):
            admit(stream, [KEY])
            while True:
                stream.until(None)
                head = stream.receive_head()
                keys = rows.split_keys(stream.receive_exactly(head.keys_bytes), head.key_bytes)
                stream.receive_exactly(head.body_bytes)
                if head.frame is RowFrame.SPACE:
                    stream.send(rows.encode(RowFrame.HELD))
                    continue
                self.asked.append(keys)
                self.answer(stream, keys, number)
        stream.close()


def whole(stream: RowStream, keys: list[bytes], number: int) -> None:
    for key in keys:
        send(stream, key)


def send(stream: RowStream, key: bytes) -> None:
    row = bytearray(row_of(key, ROW_BYTES))
    stream.send(start(key, row), row)


def start(key: bytes, row: bytearray) -> bytes:
    return rows.row_start(len(row), TAGGER.make(SPACE, key, row))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "rows")
    yield agent
    agent.close()


def load(client: RowClient, timeout_s: float = 5.0) -> tuple[int, list[bytes]]:
    """How many rows are said to be there, and what the memory holds."""
    memory = [bytearray(ROW_BYTES) for _ in KEYS]
    try:
        wanted = [(key, memoryview(row)) for key, row in zip(KEYS, memory, strict=True)]
        return client.load(wanted, timeout_s), [bytes(row) for row in memory]
    finally:
        client.close()


def expect(found: tuple[int, list[bytes]], count: int) -> None:
    loaded, memory = found
    assert loaded == count
    for key, row in zip(KEYS[:count], memory, strict=False):
        assert row == row_of(key, ROW_BYTES)


def test_all_rows_are_there(agent: Agent) -> None:
    expect(load(agent.client()), len(KEYS))


def test_rows_behind_one_that_is_gone_do_not_count(agent: Agent) -> None:
    def answer(stream: RowStream, keys: list[bytes], number: int) -> None:
        for place, key in enumerate(keys):
            if place == 2:
                stream.send(rows.encode(RowFrame.GONE))
            else:
                send(stream, key)

    agent.answer = answer
    expect(load(agent.client()), 2)


@pytest.mark.parametrize("place", [0, 3])
def test_a_damaged_row_is_not_there(agent: Agent, place: int) -> None:
    def answer(stream: RowStream, keys: list[bytes], number: int) -> None:
        for at, key in enumerate(keys):
            row = bytearray(row_of(key, ROW_BYTES))
            head = start(key, row)
            row[100] ^= at == place
            stream.send(head, row)

    agent.answer = answer
    expect(load(agent.client()), place)


@pytest.mark.parametrize(
    ("space", "key"), [(SPACE, KEYS[1]), (Space(b"o" * 32, ROW_BYTES), KEYS[0])]
)
def test_a_row_of_another_key_or_namespace_is_not_there(
    agent: Agent, space: Space, key: bytes
) -> None:
    """Its tag is right for what it is."""

    def answer(stream: RowStream, keys: list[bytes], number: int) -> None:
        row = bytearray(row_of(keys[0], ROW_BYTES))
        stream.send(rows.row_start(ROW_BYTES, TAGGER.make(space, key, row)), row)

    agent.answer = answer
    expect(load(agent.client()), 0)


@pytest.mark.parametrize(("is_local", "count"), [(True, len(KEYS)), (False, 0)])
def test_a_checksum_is_enough_within_a_host_alone(agent: Agent, is_local: bool, count: int) -> None:
    """Whoever is on the way to another host can make one."""

    def answer(stream: RowStream, keys: list[bytes], number: int) -> None:
        for key in keys:
            row = bytearray(row_of(key, ROW_BYTES))
            stream.send(rows.row_start(len(row), rows.checksum(row), RowFrame.CHECKED), row)

    agent.answer = answer
    expect(load(agent.client(is_local=is_local)), count)


def test_what_came_before_an_agent_dies_counts(agent: Agent) -> None:
    def answer(stream: RowStream, keys: list[bytes], number: int) -> None:
        send(stream, keys[0])
        send(stream, keys[1])
        stream.send(rows.row_start(ROW_BYTES, bytes(rows.TAG_BYTES)), bytes(100))
        raise TransferError("it died")

    agent.answer = answer
    client = agent.client()
    expect(load(client), 2)
    assert not client.is_usable


def test_an_agent_that_hangs_costs_the_time_of_a_load(agent: Agent) -> None:
    forever = threading.Event()

    def answer(stream: RowStream, keys: list[bytes], number: int) -> None:
        send(stream, keys[0])
        forever.wait(30)

    agent.answer = answer
    expect(load(agent.client(), 0.2), 1)
    forever.set()


def test_a_question_is_put_again_on_a_connection_that_had_ended(agent: Agent) -> None:
    """Rows that had come are not asked for, and not written, a second time."""

    def answer(stream: RowStream, keys: list[bytes], number: int) -> None:
        for place, key in enumerate(keys):
            if number == 1 and len(keys) == len(KEYS) and place == 2:
                raise TransferError("it died")
            send(stream, key)

    agent.answer = answer
    client = agent.client()
    row = bytearray(ROW_BYTES)
    assert client.load([(KEYS[0], memoryview(row))], 5.0) == 1  # The connection is idle now.
    agent.asked.clear()
    expect(load(client), len(KEYS))
    assert agent.asked == [KEYS, KEYS[2:]]


def test_an_agent_that_never_proves_itself_costs_the_time_of_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        connections, "PROOF_S", 3600.0
    )  # The agent's own limit is none of the client's.
    path = tmp_path / "silent"
    with listen_unix(path):
        client = RowClient("n0", partial(dial_unix, path), KEY, SPACE, TAGS)
        assert list(client.find(KEYS, 0.2)) == [False] * len(KEYS)
    client.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        rows.encode(RowFrame.HELD),
        rows.row_start(ROW_BYTES + 1, bytes(rows.TAG_BYTES)),
        rows.encode(RowFrame.REFUSED, body=b"no"),
    ],
)
def test_nonsense_is_no_row(agent: Agent, nonsense: bytes) -> None:
    agent.answer = lambda stream, keys, number: stream.send(nonsense)
    expect(load(agent.client()), 0)


def test_no_agent_is_no_row_and_nothing_is_found(agent: Agent) -> None:
    agent.close()
    client = agent.client()
    assert list(client.find(KEYS, 1.0)) == [False] * len(KEYS)
    expect(load(client), 0)
