"""An agent serves rows of living and dead engines, and never a wrong one."""

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kvrs.agent import row_port
from kvrs.agent.regions import ADOPTED_S, Regions
from kvrs.agent.row_port import RowCopies
from kvrs.errors import TransferError
from kvrs.protocol import rows
from kvrs.protocol.rows import RowFrame, Space
from kvrs.protocol.secrets import NONCE_BYTES, ClientProof, Scope, ServerProof, scoped_key
from kvrs.transfer.rows.connections import RowStream, dial_unix
from kvrs.transfer.rows.tags import SALT_BYTES, RowTagger
from kvrs_testkit.row_agent import SECRET, RowAgent, load, look_up, until
from kvrs_testkit.row_engine import AGENT, RowEngine, key_of, row_of

ROWS = 24
SPACE = Space(bytes(31) + b"s", 1 << 16)
SMALL = Space(SPACE.namespace, 4096)


@pytest.fixture
def engine(agent: RowAgent) -> Iterator[subprocess.Popen[str]]:
    """A process that writes rows all the time, and has written each once."""
    process = start(agent)
    client = agent.stream(SPACE)
    until(lambda: sum(look_up(client, ALL_KEYS)) >= ROWS - 1)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def linked(agent: RowAgent) -> Iterator[RowEngine]:
    """An engine of this process whose second row has key 7."""
    engine = RowEngine(agent.path, SECRET, SMALL.namespace, 2, 4096)
    engine.write(1, 7)
    engine.link.start()
    until(lambda: bool(agent.regions.of(SMALL)))
    yield engine
    engine.link.close()


def start(agent: RowAgent) -> subprocess.Popen[str]:
    orders = [agent.path, SECRET.hex(), SPACE.namespace.hex(), str(ROWS), str(SPACE.row_bytes)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrs_testkit.row_engine", *orders],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


ALL_KEYS = [key_of(number) for number in range(1, 998)]


@pytest.mark.process
def test_no_row_of_a_living_engine_is_wrong(agent: RowAgent, engine: subprocess.Popen[str]) -> None:
    client = agent.stream(SPACE)
    served = 0
    for _ in range(40):
        keys = random.Random(served).sample(ALL_KEYS, 200)
        for key, row in zip(keys, load(client, SPACE, keys), strict=True):
            assert row is None or row == row_of(key, SPACE.row_bytes)
            served += row is not None
    assert served


@pytest.mark.process
def test_rows_of_a_killed_engine_are_served_and_none_is_wrong(
    agent: RowAgent, engine: subprocess.Popen[str]
) -> None:
    engine.kill()
    engine.wait()
    until(lambda: settled(agent))
    client = agent.stream(SPACE)
    found = look_up(client, ALL_KEYS)
    loaded = load(client, SPACE, ALL_KEYS)
    assert [row is not None for row in loaded] == found
    assert sum(found) >= ROWS - 1  # One was being written.
    for key, row in zip(ALL_KEYS, loaded, strict=True):
        assert row is None or row == row_of(key, SPACE.row_bytes)


@pytest.mark.process
def test_a_reader_without_the_ledger_reads_rows_that_are_wrong(
    agent: RowAgent, engine: subprocess.Popen[str]
) -> None:
    """The oracle of the two tests above can fail."""
    (region,) = agent.regions.of(SPACE)
    mixed = 0
    for _ in range(200):
        os.kill(engine.pid, signal.SIGSTOP)
        data = os.pread(region._memory, ROWS * SPACE.row_bytes, 0)
        os.kill(engine.pid, signal.SIGCONT)
        found = [data[at : at + SPACE.row_bytes] for at in range(0, len(data), SPACE.row_bytes)]
        mixed += sum(row != row_of(row[:8], SPACE.row_bytes) for row in found)
        time.sleep(0.002)
        if mixed:
            return
    raise AssertionError("no row was read while it was written")


def settled(agent: RowAgent, space: Space = SPACE) -> bool:
    agent.regions.settle(time.monotonic())
    (region,) = agent.regions.of(space)
    return region.died_s is not None


@pytest.mark.process
def test_an_engine_is_dead_although_its_child_holds_the_link(
    agent: RowAgent, tmp_path: Path
) -> None:
    program = (
        "import os, sys, time\n"
        "from kvrs_testkit.row_engine import RowEngine\n"
        f"engine = RowEngine({agent.path!r}, {SECRET!r}, {SMALL.namespace!r}, 2, 4096)\n"
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
    until(lambda: bool(agent.regions.of(SMALL)))
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        os.kill(child, 0)
        until(lambda: settled(agent, SMALL))
        (row,) = load(agent.stream(SMALL), SMALL, [key_of(7)])
        assert row == row_of(key_of(7), 4096)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdin.close()
        parent.stdout.close()


@pytest.mark.process
def test_the_next_agent_has_the_rows_of_a_living_engine(
    agent: RowAgent, engine: subprocess.Popen[str]
) -> None:
    agent.port.close()
    following = RowAgent(Path(agent.path))
    try:
        until(lambda: any(look_up(following.stream(SPACE), ALL_KEYS)))
        engine.kill()
        engine.wait()
        until(lambda: settled(following))
        assert any(look_up(following.stream(SPACE), ALL_KEYS))
    finally:
        following.close()


@pytest.mark.process
def test_memory_of_a_dead_engine_is_given_back(
    agent: RowAgent, engine: subprocess.Popen[str]
) -> None:
    engine.kill()
    engine.wait()
    until(lambda: settled(agent))
    agent.regions.settle(time.monotonic() + ADOPTED_S + 1)
    assert agent.regions.of(SPACE) == []
    assert not any(look_up(agent.stream(SPACE), ALL_KEYS))


def test_a_client_of_another_secret_is_refused(agent: RowAgent) -> None:
    with pytest.raises(TransferError, match="another secret"):
        agent.connected().prove(scoped_key(bytes(32), Scope.ROWS, AGENT))


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (rows.encode(RowFrame.SPACE, body=b"short"), "SPACE of 5 bytes"),
        (
            rows.encode(RowFrame.SPACE, body=rows.encode_space(Space(SPACE.namespace, 0))),
            "rows of 0 bytes",
        ),
        (rows.encode(RowFrame.REGION, body=b"{}"), "REGION with 0 descriptors"),
        (rows.encode(RowFrame.HELD), "HELD is not a question"),
        (b"KR" + b"\x63" + bytes(13), "frame b'KR' 99"),
        (b"KR" + bytes([RowFrame.LOOKUP, 36]) + b"\x7f" * 4 + bytes(8), "LOOKUP with"),
        (b"KR" + bytes([RowFrame.SPACE, 0]) + bytes(4) + b"\x7f" * 8, "SPACE of"),
    ],
)
def test_a_frame_that_is_wrong_ends_its_connection_alone(
    agent: RowAgent, frame: bytes, said: str
) -> None:
    other, stream = agent.stream(SPACE), agent.proven()
    stream.send(frame)
    with pytest.raises(TransferError, match=f"(?s){said}|closed"):
        stream.expect(RowFrame.HELD)
    assert look_up(other, [key_of(1)]) == [False]


def test_a_region_that_is_none_is_refused(agent: RowAgent, tmp_path: Path) -> None:
    engine = RowEngine(agent.path, SECRET, SMALL.namespace, 2, 4096)
    os.ftruncate(engine.memory, 4096)
    stream = agent.proven()
    stream.send_with(engine.link._shown, rows.encode_region(engine.link._info))
    with pytest.raises(TransferError, match="4096 bytes; allowed: 8192"):
        stream.expect(RowFrame.HELD)


def test_a_descriptor_that_can_write_is_refused(agent: RowAgent) -> None:
    engine = RowEngine(agent.path, SECRET, SMALL.namespace, 2, 4096)
    stream = agent.proven()
    shown = [engine.memory, engine.ledger.descriptor]
    stream.send_with(shown, rows.encode_region(engine.link._info))
    with pytest.raises(TransferError, match="for reading"):
        stream.expect(RowFrame.HELD)


@pytest.mark.process
def test_an_engine_that_closed_its_ledger_serves_nothing(
    agent: RowAgent, linked: RowEngine
) -> None:
    """A reset of vLLM's cache closes it."""
    client = agent.stream(SMALL)
    assert load(client, SMALL, [key_of(7)]) == [row_of(key_of(7), 4096)]
    linked.ledger.close()
    linked.ledger.writing(1)
    linked.ledger.holds(1, key_of(7))
    assert load(client, SMALL, [key_of(7)]) == [None]


@pytest.mark.process
def test_an_agent_reports_what_it_serves(agent: RowAgent, engine: subprocess.Popen[str]) -> None:
    """A dead engine's rows until they are given back."""

    def reported() -> list[tuple[object, ...]]:
        return [msgspec.structs.astuple(each) for each in agent.regions.reports()]

    facts = (f"engine {engine.pid}", SPACE.namespace.hex()[:16])
    assert reported() == [(*facts, True, ROWS, SPACE.row_bytes, 16, "", None, 0)]

    engine.kill()
    engine.wait()
    until(lambda: settled(agent))
    (region,) = agent.regions.of(SPACE)
    assert reported() == [(*facts, False, ROWS, SPACE.row_bytes, 16, "", None, region.unchecked)]
    assert region.unchecked >= ROWS - 1  # One was being written.

    agent.regions.settle(time.monotonic() + ADOPTED_S + 1)
    assert reported() == []


def test_rows_that_were_withdrawn_are_not_reported(agent: RowAgent, linked: RowEngine) -> None:
    assert len(agent.regions.reports()) == 1
    linked.ledger.close()
    assert agent.regions.reports() == []


def test_fields_by_which_engines_of_one_model_differ_are_named_once(
    agent: RowAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at each link, and not of engines with different models; each link's line has the fields,
    which tell engines of two nodes apart.
    """
    caplog.set_level(logging.INFO)
    spaces = bytes(31) + b"a", bytes(31) + b"b"
    engines = [
        RowEngine(agent.path, SECRET, space, 2, 4096, {"weights": weights, "device": "x"}, model)
        for space, weights, model in (
            (spaces[0], "1", "m"),
            (spaces[1], "2", "m"),
            (SPACE.namespace, "3", "n"),
        )
    ]
    for engine in (*engines, engines[1]):
        stream = agent.proven()
        stream.send_with(engine.link._shown, rows.encode_region(engine.link._info))
        stream.expect(RowFrame.HELD)

    served = [each for each in caplog.records if "serving an engine" in each.message]
    assert [each.__dict__["fields"]["weights"] for each in served] == ["1", "2", "3", "2"]
    told = [each for each in caplog.records if "namespaces differ" in each.message]
    assert [each.__dict__["fields"] for each in told] == [["weights"]]


@pytest.mark.parametrize("name", ["", "x" * 129])
def test_an_engine_without_a_name_that_can_be_told_is_refused(agent: RowAgent, name: str) -> None:
    """Proxies would take no report with it, and use the agent no more."""
    info = rows.RegionInfo(name, SPACE.namespace, 2, 4096, {})
    with pytest.raises(TransferError, match="engine"):
        rows.decode_region(rows.encode_region(info)[rows.HEAD_BYTES :])


@pytest.mark.process
def test_a_region_that_shrinks_ends_nothing(agent: RowAgent, linked: RowEngine) -> None:
    client = agent.stream(SMALL)
    assert load(client, SMALL, [key_of(7)]) == [row_of(key_of(7), 4096)]
    os.ftruncate(linked.memory, 0)
    assert load(client, SMALL, [key_of(7)]) == [None]


@pytest.mark.network
def test_connections_that_prove_nothing_make_room_for_one_that_does(
    agent: RowAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of the peer with most of them."""
    monkeypatch.setattr(row_port, "MAX_SILENT", 8)
    monkeypatch.setattr(row_port, "PROOF_S", 3600.0)
    over_tcp = socket.create_connection(("127.0.0.1", agent.tcp))
    silent = [agent.connected() for _ in range(row_port.MAX_SILENT + 5)]
    client = agent.stream(SMALL)
    assert look_up(client, [key_of(7)]) == [False]
    for each in silent[:5]:
        each.until(5.0)
        with pytest.raises(TransferError, match="closed by the other end"):
            each.receive_exactly(1)
    over_tcp.setblocking(False)
    with pytest.raises(BlockingIOError):
        over_tcp.recv(1)
    over_tcp.close()


def test_clients_that_are_about_to_prove_themselves_outrank_silent_ones(
    agent: RowAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many silent ones come meanwhile, from the same user; and what a client has said
    counts when it would make room.
    """
    monkeypatch.setattr(row_port, "MAX_SILENT", 4)
    proof = ClientProof(agent.key, bytes(NONCE_BYTES))
    greeted, late = agent.connected(), agent.connected()
    greeted.send(proof.hello)
    answer = b""
    while not answer:
        answer = proof.receive(greeted.receive_exactly(proof.wanted_bytes))
    crowd = [agent.connected() for _ in range(3)]
    late.send(ClientProof(agent.key, bytes(NONCE_BYTES)).hello)
    crowd += [agent.connected() for _ in range(20)]

    greeted.send(answer)
    greeted.choose(SMALL)

    assert look_up(greeted, [key_of(7)]) == [False]
    late.until(5.0)
    assert late.receive_exactly(5) == b"KVRS-"
    crowd[0].until(5.0)
    with pytest.raises(TransferError, match="closed by the other end"):
        crowd[0].receive_exactly(1)


def test_bytes_that_have_come_count_before_their_connection_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although no turn has read them yet."""
    monkeypatch.setattr(row_port, "MAX_SILENT", 2)
    key = scoped_key(SECRET, Scope.ROWS, AGENT)
    tagger = RowTagger(SECRET, bytes(SALT_BYTES))
    port = row_port.RowPort(Regions(), RowCopies(lambda: 0), [key], tagger)
    pairs = [socket.socketpair() for _ in range(4)]
    first, second, *more = [RowStream(client) for client, _ in pairs]
    for _, server in pairs[:2]:
        port._meet(server, "user 0")
    first.send(ClientProof(key, bytes(NONCE_BYTES)).hello)

    for _, server in pairs[2:]:
        port._meet(server, "user 0")

    assert first.receive_exactly(5) == b"KVRS-"
    with pytest.raises(TransferError, match="closed by the other end"):
        second.receive_exactly(1)
    port.close()
    port._admit()
    for each in (first, second, *more):
        each.close()


def test_clients_that_only_greet_are_bounded_too(
    agent: RowAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right first message can be copied from another connection."""
    monkeypatch.setattr(row_port, "MAX_GREETED", 3)
    some = [agent.connected() for _ in range(5)]
    for each in some:
        proof = ClientProof(agent.key, bytes(NONCE_BYTES))
        each.until(5.0)
        each.send(proof.hello)
        while not proof.receive(each.receive_exactly(proof.wanted_bytes)):
            pass
    for each in some[:2]:
        with pytest.raises(TransferError, match="closed by the other end"):
            each.receive_exactly(1)
    assert look_up(agent.stream(SMALL), [key_of(7)]) == [False]


def test_a_bug_at_one_clients_proof_ends_that_connection_alone(
    agent: RowAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One thread hears all clients."""
    receive = ServerProof.receive

    def heard(proof: ServerProof, data: bytes) -> tuple[bytes, bytes]:
        if data.startswith(b"bug"):
            raise ZeroDivisionError
        return receive(proof, data)

    monkeypatch.setattr(ServerProof, "receive", heard)
    one = agent.connected()
    one.until(5.0)
    one.send(b"bug")

    with pytest.raises(TransferError):
        one.receive_exactly(1)
    agent.proven().close()
    assert "ended by a bug" in caplog.text


def test_a_client_that_says_nothing_in_time_is_ended(
    agent: RowAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_port, "PROOF_S", 0.01)
    monkeypatch.setattr(row_port, "_LOOK_S", 0.01)
    assert look_up(agent.stream(SMALL), [key_of(7)]) == [False]
    silent = agent.connected()
    silent.until(5.0)
    with pytest.raises(TransferError, match="closed by the other end"):
        silent.receive_exactly(1)


@pytest.mark.network
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_look_ups_are_answered_beside_a_flood_of_silent_connections(
    agent: RowAgent, way: str
) -> None:
    """Each over a connection of its own, of the user and from the address that floods."""
    over, silents, answers = threading.Event(), 0, list[list[bool]]()
    give_up_s = time.monotonic() + 60.0

    def flood() -> None:
        nonlocal silents
        kept: deque[socket.socket] = deque()
        while not over.is_set():
            with suppress(OSError):
                if way == "unix":
                    kept.append(dial_unix(Path(agent.path), 5.0))
                else:
                    kept.append(socket.create_connection(("127.0.0.1", agent.tcp), 5.0))
                silents += 1
            if len(kept) > 300:
                kept.popleft().close()
        for each in kept:
            each.close()

    port = None if way == "unix" else agent.tcp
    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        until(lambda: silents > 2 * row_port.MAX_SILENT)
        for _ in range(100):
            client = agent.client(SMALL, port)
            client._call(lambda stream: answers.append(look_up(stream, [key_of(7)])), give_up_s)
            client.close()
    finally:
        over.set()
        flooding.join()
    assert answers == [[False]] * 100


def test_connections_beyond_the_bound_are_closed(
    agent: RowAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_port, "MAX_CONNECTIONS", 3)
    first = [agent.stream(SMALL) for _ in range(3)]
    with pytest.raises(TransferError):
        agent.stream(SMALL)
    assert look_up(first[0], [key_of(7)]) == [False]


def test_a_port_without_descriptors_says_so_once_and_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([OSError(24, "Too many open files")] * 4)
    accept = socket.socket.accept

    def failing(listener: socket.socket) -> object:
        with suppress(StopIteration):
            raise next(failures)
        return accept(listener)

    pauses: list[float] = []
    monkeypatch.setattr(row_port, "_PAUSE_S", 0.001)
    monkeypatch.setattr(socket.socket, "accept", failing)
    monkeypatch.setattr(time, "sleep", pauses.append)
    agent = RowAgent(tmp_path / "rows")
    try:
        assert look_up(agent.stream(SMALL), [key_of(7)]) == [False]
    finally:
        agent.close()
    said = [each for each in caplog.records if "no connection is accepted" in each.message]
    assert len(said) == 1
    assert len(pauses) == 4
    assert max(pauses) > 0.001


def test_what_a_client_said_proves_nothing_a_second_time(agent: RowAgent) -> None:
    """Replayed bytes of a proof are refused: each connection has nonces of both ends."""
    said: list[bytes] = []
    first = agent.connected()
    send = first.send

    def noting(*parts: bytes | bytearray | memoryview) -> None:
        said.extend(map(bytes, parts))
        send(*parts)

    first.send = noting  # type: ignore[method-assign]
    first.prove(agent.key)

    second = agent.connected()
    second.until(5.0)
    with suppress(TransferError):  # The agent may have refused the proof before the last bytes.
        for each in (*said, rows.encode(RowFrame.LOOKUP, [key_of(7)])):
            second.send(each)
    answer = b""
    with suppress(TransferError):
        while True:
            answer += second.receive_exactly(1)
    assert answer.count(b"\r\n\r\n") == 1  # The agent's own proof, and no frame.
    assert b"KR" not in answer
