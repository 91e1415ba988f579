"""Second copies have what running streams need, within their room, and outlive the other node."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvrs.agent import row_port
from kvrs.agent.regions import ADOPTED_S
from kvrs.agent.row_port import RowCopies
from kvrs.config.file import parse_config
from kvrs.errors import TransferError
from kvrs.ids import NodeId
from kvrs.protocol import rows
from kvrs.protocol.rows import CopyReport, RowFrame, Space, short
from kvrs.transfer.rows.connections import RowStream
from kvrs_testkit.row_agent import RowAgent, admit, load, until
from kvrs_testkit.row_engine import RowEngine, key_of, row_of

pytestmark = pytest.mark.network

SPACE = Space(bytes(31) + b"s", 4096)
KEYS = [key_of(number) for number in range(1, 9)]


@pytest.fixture
def engine(agents: list[RowAgent]) -> Iterator[RowEngine]:
    """An engine with the first agent, whose rows hold KEYS."""
    engine = agents[0].engine(SPACE, len(KEYS))
    yield engine
    engine.link.close()


def protect(engine: RowEngine, *protected: int) -> None:
    for row in range(len(KEYS)):
        engine.ledger.protect(row, protected=row in protected)


def copied(agent: RowAgent, space: Space = SPACE) -> set[int]:
    keys = [key for copies in agent.copies.of(space) for key in list(copies.rows)]
    return {KEYS.index(key) for key in keys}


def test_rows_that_running_streams_need_are_copied_and_no_others(
    agents: list[RowAgent], engine: RowEngine
) -> None:
    protect(engine, 1, 2, 5)
    agents[1].copies_of(agents[0].tcp)
    until(lambda: copied(agents[1]) == {1, 2, 5})
    protect(engine, 2, 6)
    until(lambda: copied(agents[1]) == {2, 6})


def test_copies_outlive_the_other_node_until_nothing_reads_them(
    agents: list[RowAgent], engine: RowEngine
) -> None:
    first, second = agents
    protect(engine, 0, 1)
    second.copies_of(first.tcp)
    until(lambda: copied(second) == {0, 1})
    first.close()
    until(lambda: second.copies._lost_s is not None)

    second.copies.settle(time.monotonic() + ADOPTED_S - 5)
    found = load(second.stream(SPACE), SPACE, KEYS[:3])
    second.copies.settle(time.monotonic() + ADOPTED_S + 5)

    assert found == [row_of(KEYS[0], 4096), row_of(KEYS[1], 4096), None]
    assert copied(second) == set()


def test_there_are_no_more_copies_than_there_is_room_for(
    agents: list[RowAgent], engine: RowEngine
) -> None:
    """Rows of streams that have ended make room for those of others."""
    second = agents[1]
    second.room_bytes = 3 * SPACE.row_bytes + 100
    protect(engine, 0, 1, 2, 3, 4)
    second.copies_of(agents[0].tcp)
    until(lambda: len(copied(second)) == 3)
    first = copied(second)
    protect(engine, *({0, 1, 2, 3, 4} - first), 7)
    until(lambda: copied(second) == {0, 1, 2, 3, 4, 7} - first)
    assert second.copies.held_bytes == 3 * SPACE.row_bytes


def test_a_report_says_whose_rows_are_copied_and_how_far(
    agents: list[RowAgent], engine: RowEngine
) -> None:
    """In tenths, rounded down, of what running streams there need."""
    second = agents[1]
    second.room_bytes = 2 * SPACE.row_bytes
    assert second.copies.reports(NodeId("a")) == ()
    protect(engine, *range(7))
    second.copies_of(agents[0].tcp)
    until(lambda: len(copied(second)) == 2)
    told = CopyReport(NodeId("a"), short(SPACE.namespace), 0.2)
    assert second.copies.reports(NodeId("a")) == (told,)

    protect(engine, *copied(second))
    until(lambda: second.copies.reports(NodeId("a"))[0].share == 1.0)


def test_copies_of_two_namespaces_are_never_mixed(
    agents: list[RowAgent], engine: RowEngine
) -> None:
    other = Space(bytes(31) + b"o", SPACE.row_bytes)
    another = agents[0].engine(other, len(KEYS))
    another.write(0, 8)
    protect(engine, 1)
    protect(another, 0)
    agents[1].copies_of(agents[0].tcp)
    until(lambda: copied(agents[1]) == {1} and copied(agents[1], other) == {7})
    assert load(agents[1].stream(other), other, [KEYS[1]]) == [None]
    assert load(agents[1].stream(SPACE), SPACE, [KEYS[7]]) == [None]
    another.link.close()


def test_rows_of_a_dead_engine_are_still_copied(agents: list[RowAgent], engine: RowEngine) -> None:
    protect(engine, 3)
    (region,) = agents[0].regions.of(SPACE)
    region.adopt(time.monotonic())
    agents[1].copies_of(agents[0].tcp)
    until(lambda: copied(agents[1]) == {3})


def test_a_copier_of_another_secret_copies_nothing(
    agents: list[RowAgent], engine: RowEngine, caplog: pytest.LogCaptureFixture
) -> None:
    protect(engine, 3)
    agents[1].copies_of(agents[0].tcp, key=bytes(32))
    until(lambda: "another secret" in caplog.text)
    assert copied(agents[1]) == set()


def test_copies_wait_for_rows_that_servers_load(
    agents: list[RowAgent], engine: RowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_port, "_COPY_WAITS_S", 60.0)
    protect(engine, 3)
    with agents[0].port.loading():
        agents[1].copies_of(agents[0].tcp)
        until(lambda: bool(agents[1].copies.of(SPACE)))
        time.sleep(0.3)
        assert copied(agents[1]) == set()
    until(lambda: copied(agents[1]) == {3})


def test_copies_are_slowed_down_to_the_rate_of_the_link(
    agents: list[RowAgent], engine: RowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is followed by the pause in which the link would have carried its rows."""
    waited: list[float] = []
    wait = threading.Event.wait

    def noting(event: threading.Event, timeout: float | None = None) -> bool:
        waited.append(timeout or 0.0)
        return wait(event, 0.01)

    protect(engine, *range(8))
    monkeypatch.setattr(threading.Event, "wait", noting)
    agents[1].copies_of(agents[0].tcp, bytes_per_s=1024.0)
    until(lambda: len(copied(agents[1])) == 8)
    until(lambda: any(25.0 < each <= 32.0 for each in waited))


def test_an_agent_that_names_keys_without_end_is_not_believed(agents: list[RowAgent]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=endless, args=(listener, agents[0]), daemon=True).start()
        agents[1].copies_of(listener.getsockname()[1])
        until(lambda: agents[1].copies._lost_s is not None)
        assert agents[1].copies.of(SPACE) == []


def endless(listener: socket.socket, agent: RowAgent) -> None:
    connection, _ = listener.accept()
    stream = RowStream(connection)
    keys = rows.encode(RowFrame.KEYS, KEYS * 1024, rows.encode_space(SPACE))
    try:
        admit(stream, [agent.key])
        stream.receive_head()
        while True:
            stream.send(keys)
    except TransferError:
        stream.close()


def nodes(**ports: int | None) -> dict[str, object]:
    return {
        "cluster": {
            "backend": "vllm",
            "nodes": [
                {
                    "id": name,
                    "agent": {"row_port": port, "port": 9200 + at, "page_port": 9300 + at},
                    "instances": [{"id": f"d-{name}", "role": "decode", "port": 9100 + at}],
                }
                for at, (name, port) in enumerate(ports.items())
            ],
        },
        "backup": {"mode": "remote"},
    }


def test_the_next_node_with_a_row_port_keeps_the_copy() -> None:
    cluster = parse_config(nodes(a=9001, c=None, b=9002, d=9003)).cluster
    holders = {node.id: cluster.row_holder(node.id) for node in cluster.nodes}
    found = {str(node): holder and str(holder.id) for node, holder in holders.items()}
    assert found == {"a": "b", "b": "d", "c": None, "d": "a"}
    assert parse_config(nodes(a=9001, b=None)).cluster.row_holder(NodeId("a")) is None


def test_nothing_is_given_back_before_there_was_a_loss() -> None:
    copies = RowCopies(lambda: 1 << 20)
    copies.keep({SPACE: KEYS})
    copies.put(SPACE, KEYS[0], b"", memoryview(bytearray(4096)))
    copies.settle(1e9)
    assert copies.held_bytes == 4096


class _Watched(bytes):
    """A key that calls a function once as it is looked up."""

    then: Callable[[], object] | None = None

    def __hash__(self) -> int:
        then, self.then = self.then, None
        if then is not None:
            then()
        return super().__hash__()


def test_a_damaged_copy_that_is_read_meanwhile_stays_dropped() -> None:
    """The thread that keeps copies goes on if another one finds damage in the same moment."""
    copies, first = RowCopies(lambda: 1 << 20), _Watched(KEYS[0])
    copies.keep({SPACE: KEYS})
    damaged = memoryview(bytearray(SPACE.row_bytes))
    for key in (first, *KEYS[1:]):
        copies.put(SPACE, key, b"tag", damaged if key == KEYS[1] else memoryview(bytes(4096)))
    (of_space,) = copies.of(SPACE)
    damaged[7] = 1
    first.then = lambda: of_space.read(KEYS[1], memoryview(bytearray(4096)), 0.0)

    copies.keep({SPACE: KEYS})

    assert {*of_space.rows} == {*KEYS} - {KEYS[1]}
    assert copies.refused_rows == 1
    assert copies.missing(SPACE, KEYS) == [KEYS[1]]
