"""A row whose bytes have changed behind the ledger since its checksum was made is never served."""

import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvrs.agent import regions
from kvrs.agent.regions import EngineRegion, RowSummer, checksum_of
from kvrs.protocol.rows import Space, encode_region
from kvrs.transfer.rows.client import RowClient
from kvrs_testkit.row_agent import SECRET, RowAgent, load, look_up, until
from kvrs_testkit.row_engine import RowEngine, key_of, row_of

pytestmark = pytest.mark.network

SPACE = Space(bytes(31) + b"s", 8192)
KEYS = [key_of(number) for number in range(1, 9)]
ROWS = [row_of(key, SPACE.row_bytes) for key in KEYS]


@pytest.fixture
def engine(agent: RowAgent) -> Iterator[RowEngine]:
    """An engine of this process whose rows hold KEYS."""
    engine = agent.engine(SPACE, len(KEYS))
    yield engine
    engine.link.close()


@pytest.fixture(params=["own", "tcp"])
def client(request: pytest.FixtureRequest, agent: RowAgent) -> Iterator[RowClient]:
    """A client of the agent, of its node or of another one."""
    client = agent.client(SPACE, agent.tcp if request.param == "tcp" else None)
    yield client
    client.close()


def region_of(agent: RowAgent) -> EngineRegion:
    (region,) = agent.regions.of(SPACE)
    return region


def summed(agent: RowAgent) -> bool:
    region = region_of(agent)
    region.held(KEYS, time.monotonic())
    return all(region.checksums.has(*place) for place in region._rows.values())


def sum_all(agent: RowAgent) -> None:
    agent.sum_rows()
    until(lambda: summed(agent))


def loaded(client: RowClient, *numbers: int) -> list[bytes]:
    """The leading rows that the agent serves of these."""
    rows = [bytearray(SPACE.row_bytes) for _ in numbers]
    views = [memoryview(row) for row in rows]
    count = client.load([*zip([KEYS[each] for each in numbers], views, strict=True)], 10.0)
    return [bytes(row) for row in rows[:count]]


def test_a_row_that_changed_behind_the_ledger_is_refused_and_said(
    agent: RowAgent,
    engine: RowEngine,
    client: RowClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before its tag is made, and also when it was served before."""
    sum_all(agent)
    assert loaded(client, 1) == ROWS[1:2]
    engine.spoil(row=1)
    engine.spoil(row=2)

    found = [loaded(client, number) for number in range(len(KEYS))]

    assert found == [ROWS[:1], [], [], *[[row] for row in ROWS[3:]]]
    assert agent.regions.refused_rows == 2
    assert "a row has changed since its checksum was made" in caplog.text


def test_a_refused_row_is_neither_listed_nor_served_until_it_is_written_again(
    agent: RowAgent, engine: RowEngine, client: RowClient
) -> None:
    """Although its bytes come back, and although its engine connects again."""
    sum_all(agent)
    engine.spoil(row=2)
    engine.ledger.protect(2, protected=True)
    assert loaded(client, 2) == []
    engine.spoil(row=2)  # The bit is right again.
    former = region_of(agent)
    stream = agent.proven()
    stream.send_with(engine.link._shown, encode_region(engine.link._info))
    until(lambda: region_of(agent) is not former)

    assert client.find(KEYS, 10.0) == [True, True, False, *[True] * 5]
    assert loaded(client, 2) == []
    assert agent.regions.protected(time.monotonic()) == {SPACE: []}
    assert agent.regions.refused_rows == 1

    engine.write(2, 3)
    until(lambda: all(client.find(KEYS, 10.0)))
    assert loaded(client, 2) == ROWS[2:3]


def test_a_row_of_a_dead_engine_is_compared_too(
    agent: RowAgent, engine: RowEngine, client: RowClient
) -> None:
    """With its checksum from before the death, although its tag was made before the damage."""
    sum_all(agent)
    assert loaded(client, *range(8)) == ROWS
    region_of(agent).adopt(time.monotonic())
    engine.spoil(row=5)

    assert loaded(client, *range(8)) == ROWS[:5]
    assert loaded(client, 5) == []
    assert loaded(client, 6, 7) == ROWS[6:]
    assert agent.regions.refused_rows == 1


def test_rows_without_a_checksum_are_served_and_counted_at_the_death(
    agent: RowAgent, engine: RowEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A change before the checksum is made is not found."""
    caplog.set_level(logging.INFO)
    engine.spoil(row=0)
    stream = agent.stream(SPACE)
    (row,) = load(stream, SPACE, KEYS[:1])
    assert row != ROWS[0]
    assert row is not None

    region = region_of(agent)
    region.is_alive = lambda: False  # type: ignore[method-assign]
    agent.regions.settle(time.monotonic())

    # A read makes the checksum too.
    assert region.report.unchecked_rows == len(KEYS) - 1
    said = [record.__dict__ for record in caplog.records if record.message == "engine died"]
    assert [each["rows_without_checksum"] for each in said] == [len(KEYS) - 1]
    assert all(look_up(stream, KEYS))


def test_a_row_that_is_written_while_it_is_summed_gets_no_checksum(
    agent: RowAgent, engine: RowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, piece = region_of(agent), memoryview(bytearray(4096))
    ((row, sequence),) = region.without_checksum(1, time.monotonic())
    assert region.sum_row(row, sequence, piece) is not None

    def slow(memory: int, at: int, size: int, piece: memoryview) -> bytes | None:
        found = checksum_of(memory, at, size, piece)
        engine.write(row, 77)
        return found

    monkeypatch.setattr(regions, "checksum_of", slow)
    assert region.sum_row(row, sequence, piece) is None


def test_rows_of_running_streams_are_summed_first(agent: RowAgent, engine: RowEngine) -> None:
    for row in (3, 6):
        engine.ledger.protect(row, protected=True)
    region, now_s = region_of(agent), time.monotonic()

    order = [[row for row, _ in region.without_checksum(3, now_s)] for _ in range(4)]

    assert order == [[3, 6], [0, 1, 2], [4, 5, 7], []]


def test_the_thread_pauses_for_the_share_that_is_set(
    agent: RowAgent, engine: RowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine times as long as it has worked, for a tenth of a core."""
    worked_s, paused_s = 0.0, 0.0

    def worked() -> float:
        nonlocal worked_s
        worked_s += 0.001
        return worked_s

    summer = RowSummer(agent.regions, 0.1)

    def pause(seconds: float) -> bool:
        nonlocal paused_s
        paused_s += seconds
        return False

    monkeypatch.setattr(time, "thread_time", worked)
    monkeypatch.setattr(summer._stop, "wait", pause)
    summer._since_s = worked_s
    assert summer._sum_rows(region_of(agent)) == len(KEYS)
    summer._rest(0.0)
    assert paused_s == pytest.approx(9 * worked_s, rel=0.4)
    assert paused_s > 0.02


@pytest.mark.process
def test_no_row_of_an_engine_that_writes_all_the_time_is_refused(agent: RowAgent) -> None:
    """A checksum never belongs to bytes of two contents."""
    orders = [agent.path, SECRET.hex(), SPACE.namespace.hex(), "24", str(SPACE.row_bytes)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrs_testkit.row_engine", *orders], stdout=subprocess.PIPE
    )
    try:
        until(lambda: bool(agent.regions.of(SPACE)))
        agent.sum_rows()
        agent.sum_rows()
        stream, all_keys = agent.stream(SPACE), [key_of(number) for number in range(1, 998)]
        served = 0
        for seed in range(60):
            keys = random.Random(seed).sample(all_keys, 200)
            served += sum(row is not None for row in load(stream, SPACE, keys))
    finally:
        process.kill()
        process.communicate()
    assert served
    assert agent.regions.refused_rows == 0


def test_a_damaged_copy_is_refused_and_loaded_again(agents: list[RowAgent]) -> None:
    own, other = agents
    engine = RowEngine(own.path, SECRET, SPACE.namespace, len(KEYS), SPACE.row_bytes)
    for row in range(len(KEYS)):
        engine.write(row, row + 1)
        engine.ledger.protect(row, protected=True)
    engine.link.start()
    until(lambda: bool(own.regions.of(SPACE)))
    other.copies_of(own.tcp)
    until(lambda: other.copies.held_bytes == len(KEYS) * SPACE.row_bytes)
    (copies,) = other.copies.of(SPACE)
    copies.rows[KEYS[2]][1][5] ^= 1
    stream = other.stream(SPACE)

    assert load(stream, SPACE, KEYS[1:4]) == [ROWS[1], None, ROWS[3]]
    assert other.copies.refused_rows == 1
    until(lambda: load(stream, SPACE, KEYS[2:3]) == ROWS[2:3])
    engine.link.close()


def test_a_bug_in_one_look_ends_no_later_one(
    agent: RowAgent,
    engine: RowEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows without checksums are served as they are, so the thread must not end."""
    monkeypatch.setattr(regions, "_RETRY_S", 0.01)
    sum_row, broken = EngineRegion.sum_row, [True]

    def once(self: EngineRegion, row: int, sequence: int, piece: memoryview) -> bytes | None:
        if broken.pop() if broken else False:
            raise AssertionError("a bug")
        return sum_row(self, row, sequence, piece)

    monkeypatch.setattr(EngineRegion, "sum_row", once)
    agent.sum_rows()
    until(lambda: not broken)
    engine.write(0, 1)

    until(lambda: region_of(agent).checksums.has(*region_of(agent)._rows[KEYS[0]]))
    assert "a bug ended a look" in caplog.text
