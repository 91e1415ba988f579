"""An agent serves rows of living and dead engines, and never a wrong one."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvrs.agent.regions import ADOPTED_S, Regions
from kvrs.agent.row_port import RowPort
from kvrs.errors import TransferError
from kvrs.protocol import rows
from kvrs.protocol.rows import RowFrame
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.stream import RowStream
from kvrs_testkit.row_engine import AGENT, RowEngine, dial, key_of, row_of

SECRET = bytes(range(32))
KEY = scoped_key(SECRET, Scope.ROWS, AGENT)
SPACE = bytes(31) + b"s"
ROWS, ROW_BYTES = 24, 1 << 16
TIMEOUT_S = 20.0


class Agent:
    """The row port of an agent at a socket of its own."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.regions = Regions()
        self.port = RowPort(self.regions, [KEY])
        self._streams: list[RowStream] = []
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen()
        self.port.listen(listener)

    def proven(self) -> RowStream:
        stream = self.connected()
        stream.prove(KEY)
        return stream

    def connected(self) -> RowStream:
        self._streams.append(RowStream(dial(self.path)))
        return self._streams[-1]

    def close(self) -> None:
        self.port.close()
        for stream in self._streams:
            stream.close()

    def client(self, namespace: bytes = SPACE, row_bytes: int = ROW_BYTES) -> RowStream:
        stream = self.proven()
        stream.send(rows.encode(RowFrame.SPACE, body=rows.encode_space(namespace, row_bytes)))
        stream.expect(RowFrame.HELD)
        return stream


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "rows")
    yield agent
    agent.close()


@pytest.fixture
def engine(agent: Agent) -> Iterator[subprocess.Popen[str]]:
    """A process that writes rows all the time, and has written each once."""
    process = start(agent)
    client = agent.client()
    until(lambda: sum(look_up(client, ALL_KEYS)) >= ROWS - 1)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def linked(agent: Agent) -> Iterator[RowEngine]:
    """An engine of this process whose second row has key 7."""
    engine = RowEngine(agent.path, SECRET, SPACE, 2, 4096)
    engine.write(1, 7)
    engine.link.start()
    until(lambda: bool(agent.regions.of(SPACE)))
    yield engine
    engine.link.close()


def start(agent: Agent) -> subprocess.Popen[str]:
    orders = [agent.path, SECRET.hex(), SPACE.hex(), str(ROWS), str(ROW_BYTES)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrs_testkit.row_engine", *orders],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def until(reached: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def look_up(client: RowStream, keys: list[bytes]) -> list[bool]:
    client.send(rows.encode(RowFrame.LOOKUP, keys))
    return [bool(each) for each in client.receive_exactly(client.expect(RowFrame.FOUND).body_bytes)]


def load(client: RowStream, keys: list[bytes]) -> list[bytes | None]:
    client.send(rows.encode(RowFrame.LOAD, keys))
    loaded: list[bytes | None] = []
    for _ in keys:
        head = client.receive_head()
        if head.frame is RowFrame.GONE:
            loaded.append(None)
            continue
        checksum = client.receive_exactly(rows.CHECKSUM_BYTES)
        row = client.receive_exactly(head.body_bytes - rows.CHECKSUM_BYTES)
        assert rows.is_intact(row, checksum)
        loaded.append(row)
    return loaded


ALL_KEYS = [key_of(number) for number in range(1, 998)]


@pytest.mark.process
def test_no_row_of_a_living_engine_is_wrong(agent: Agent, engine: subprocess.Popen[str]) -> None:
    client = agent.client()
    served = 0
    for _ in range(40):
        keys = random.Random(served).sample(ALL_KEYS, 200)
        for key, row in zip(keys, load(client, keys), strict=True):
            assert row is None or row == row_of(key, ROW_BYTES)
            served += row is not None
    assert served


@pytest.mark.process
def test_rows_of_a_killed_engine_are_served_and_none_is_wrong(
    agent: Agent, engine: subprocess.Popen[str]
) -> None:
    engine.kill()
    engine.wait()
    until(lambda: settled(agent))
    client = agent.client()
    found = look_up(client, ALL_KEYS)
    loaded = load(client, ALL_KEYS)
    assert [row is not None for row in loaded] == found
    assert sum(found) >= ROWS - 1  # One was being written.
    for key, row in zip(ALL_KEYS, loaded, strict=True):
        assert row is None or row == row_of(key, ROW_BYTES)


@pytest.mark.process
def test_a_reader_without_the_ledger_reads_rows_that_are_wrong(
    agent: Agent, engine: subprocess.Popen[str]
) -> None:
    """The oracle of the two tests above can fail."""
    (region,) = agent.regions.of(SPACE)
    mixed = 0
    for _ in range(200):
        os.kill(engine.pid, signal.SIGSTOP)
        data = os.pread(region._memory, ROWS * ROW_BYTES, 0)
        os.kill(engine.pid, signal.SIGCONT)
        found = [data[at : at + ROW_BYTES] for at in range(0, len(data), ROW_BYTES)]
        mixed += sum(row != row_of(row[:8], ROW_BYTES) for row in found)
        time.sleep(0.002)
        if mixed:
            return
    raise AssertionError("no row was read while it was written")


def settled(agent: Agent) -> bool:
    agent.regions.settle(time.monotonic())
    (region,) = agent.regions.of(SPACE)
    return region.died_s is not None


@pytest.mark.process
def test_an_engine_is_dead_although_its_child_holds_the_link(agent: Agent, tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from kvrs_testkit.row_engine import RowEngine\n"
        f"engine = RowEngine({agent.path!r}, {SECRET!r}, {SPACE!r}, 2, 4096)\n"
        "engine.write(0, 7)\n"
        "engine.link.start()\n"
        "sys.stdin.readline()\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    until(lambda: bool(agent.regions.of(SPACE)))
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        os.kill(child, 0)
        until(lambda: settled(agent))
        (row,) = load(agent.client(row_bytes=4096), [key_of(7)])
        assert row == row_of(key_of(7), 4096)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdin.close()
        parent.stdout.close()


@pytest.mark.process
def test_the_next_agent_has_the_rows_of_a_living_engine(
    agent: Agent, engine: subprocess.Popen[str]
) -> None:
    agent.port.close()
    following = Agent(Path(agent.path))
    try:
        until(lambda: any(look_up(following.client(), ALL_KEYS)))
        engine.kill()
        engine.wait()
        until(lambda: settled(following))
        assert any(look_up(following.client(), ALL_KEYS))
    finally:
        following.close()


@pytest.mark.process
def test_memory_of_a_dead_engine_is_given_back(agent: Agent, engine: subprocess.Popen[str]) -> None:
    engine.kill()
    engine.wait()
    until(lambda: settled(agent))
    agent.regions.settle(time.monotonic() + ADOPTED_S + 1)
    assert agent.regions.of(SPACE) == []
    assert not any(look_up(agent.client(), ALL_KEYS))


def test_a_client_of_another_secret_is_refused(agent: Agent) -> None:
    with pytest.raises(TransferError, match="another secret"):
        agent.connected().prove(scoped_key(bytes(32), Scope.ROWS, AGENT))


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (rows.encode(RowFrame.SPACE, body=b"short"), "SPACE of 5 bytes"),
        (rows.encode(RowFrame.SPACE, body=rows.encode_space(SPACE, 0)), "rows of 0 bytes"),
        (rows.encode(RowFrame.REGION, body=b"{}"), "REGION with 0 descriptors"),
        (rows.encode(RowFrame.HELD), "HELD is no question"),
        (b"KR" + b"\x63" + bytes(13), "frame b'KR' 99"),
        (b"KR" + bytes([RowFrame.LOOKUP, 36]) + b"\x7f" * 4 + bytes(8), "LOOKUP with"),
        (b"KR" + bytes([RowFrame.SPACE, 0]) + bytes(4) + b"\x7f" * 8, "SPACE of"),
    ],
)
def test_a_frame_that_is_wrong_ends_its_connection_alone(
    agent: Agent, frame: bytes, said: str
) -> None:
    other, stream = agent.client(), agent.proven()
    stream.send(frame)
    with pytest.raises(TransferError, match=f"(?s){said}|closed"):
        stream.expect(RowFrame.HELD)
    assert look_up(other, [key_of(1)]) == [False]


def test_a_region_that_is_none_is_refused(agent: Agent, tmp_path: Path) -> None:
    engine = RowEngine(agent.path, SECRET, SPACE, 2, 4096)
    os.ftruncate(engine.memory, 4096)
    stream = agent.proven()
    stream.send_with(engine.link._shown, rows.encode_region(engine.link._info))
    with pytest.raises(TransferError, match="4096 bytes; allowed: 8192"):
        stream.expect(RowFrame.HELD)


def test_a_descriptor_that_can_write_is_refused(agent: Agent) -> None:
    engine = RowEngine(agent.path, SECRET, SPACE, 2, 4096)
    stream = agent.proven()
    shown = [engine.memory, engine.ledger.descriptor]
    stream.send_with(shown, rows.encode_region(engine.link._info))
    with pytest.raises(TransferError, match="for reading"):
        stream.expect(RowFrame.HELD)


@pytest.mark.process
def test_an_engine_that_closed_its_ledger_serves_nothing(agent: Agent, linked: RowEngine) -> None:
    """A reset of vLLM's cache closes it."""
    client = agent.client(row_bytes=4096)
    assert load(client, [key_of(7)]) == [row_of(key_of(7), 4096)]
    linked.ledger.close()
    linked.ledger.writing(1)
    linked.ledger.holds(1, key_of(7))
    assert load(client, [key_of(7)]) == [None]


@pytest.mark.process
def test_a_region_that_shrinks_ends_nothing(agent: Agent, linked: RowEngine) -> None:
    client = agent.client(row_bytes=4096)
    assert load(client, [key_of(7)]) == [row_of(key_of(7), 4096)]
    os.ftruncate(linked.memory, 0)
    assert load(client, [key_of(7)]) == [None]


@pytest.mark.process
def test_what_two_namespaces_of_a_node_differ_in_is_said(
    agent: Agent, linked: RowEngine, caplog: pytest.LogCaptureFixture
) -> None:
    other = RowEngine(agent.path, SECRET, bytes(32), 2, 4096)
    fields = {"model": "none", "weights": "others"}
    info = msgspec.structs.replace(other.link._info, fields=fields)
    stream = agent.proven()
    stream.send_with(other.link._shown, rows.encode_region(info))
    stream.expect(RowFrame.HELD)
    (record,) = [each for each in caplog.records if "namespaces differ" in each.message]
    assert record.__dict__["fields"] == ["weights"]
