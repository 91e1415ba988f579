"""Rows are the same from whatever holds them: the agent of the own node, that of another node over
TCP, and the second copy at a third.
"""

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from kvrs.protocol import rows
from kvrs.protocol.rows import Space
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.connections import RowStream, dial_tcp
from kvrs.transfer.rows.tags import RowTags
from kvrs_testkit.row_agent import SECRET, RowAgent, until
from kvrs_testkit.row_engine import AGENT, RowEngine, key_of, row_of
from kvrs_testkit.row_relay import Relay

pytestmark = pytest.mark.network

SPACE = Space(bytes(31) + b"s", 8192)
KEYS = [key_of(number) for number in range(1, 9)]


class Source(NamedTuple):
    """A holder of the rows with KEYS that an engine has written."""

    client: Callable[[Space], RowClient]
    engine: RowEngine
    settle: Callable[[], None]  # Waits until what the engine has done is known.
    tag_bytes: int = rows.TAG_BYTES  # In front of a row.


@pytest.fixture
def engine(agents: list[RowAgent]) -> Iterator[RowEngine]:
    engine = RowEngine(agents[0].path, SECRET, SPACE.namespace, len(KEYS), SPACE.row_bytes)
    for row in range(len(KEYS)):
        engine.write(row, row + 1)
        engine.ledger.protect(row, protected=True)
    engine.link.start()
    until(lambda: bool(agents[0].regions.of(SPACE)))
    yield engine
    engine.link.close()


@pytest.fixture(params=["own", "tcp", "copy"])
def source(request: pytest.FixtureRequest, agents: list[RowAgent], engine: RowEngine) -> Source:
    own, other = agents
    if request.param == "own":
        return Source(own.client, engine, lambda: None, rows.CHECKSUM_BYTES)
    if request.param == "tcp":
        return Source(lambda space: other.client(space, own.tcp), engine, lambda: None)
    other.copies_of(own.tcp)
    until(lambda: copied(other) == len(KEYS))

    def settle() -> None:
        wanted = set(own.regions.protected(0.0).get(SPACE, ()))
        until(lambda: {*keys_of(other)} == wanted)

    return Source(lambda space: other.client(space, other.tcp), engine, settle)


def keys_of(agent: RowAgent, space: Space = SPACE) -> list[bytes]:
    return [key for copies in agent.copies.of(space) for key in list(copies.rows)]


def copied(agent: RowAgent, space: Space = SPACE) -> int:
    return len(keys_of(agent, space))


def load(client: RowClient, keys: Sequence[bytes], timeout_s: float = 10.0) -> list[bytes]:
    """The rows that are there, before the first that is not."""
    memory = [bytearray(SPACE.row_bytes) for _ in keys]
    try:
        wanted = [(key, memoryview(row)) for key, row in zip(keys, memory, strict=True)]
        return [bytes(row) for row in memory[: client.load(wanted, timeout_s)]]
    finally:
        client.close()


def of(keys: Sequence[bytes]) -> list[bytes]:
    return [row_of(key, SPACE.row_bytes) for key in keys]


def test_all_rows_are_found_and_loaded_in_any_order(source: Source) -> None:
    client = source.client(SPACE)
    assert list(client.find([*KEYS, key_of(99)], 10.0)) == [True] * len(KEYS) + [False]
    assert load(client, KEYS[::-1]) == of(KEYS[::-1])


def test_a_second_load_has_the_same_rows(source: Source) -> None:
    client = source.client(SPACE)
    assert load(client, KEYS) == load(client, KEYS) == of(KEYS)


def test_nothing_behind_a_row_that_is_gone_counts(source: Source) -> None:
    assert load(source.client(SPACE), [*KEYS[:3], key_of(99), *KEYS[3:]]) == of(KEYS[:3])


def test_another_namespace_or_size_has_no_rows(source: Source) -> None:
    for space in (Space(bytes(32), SPACE.row_bytes), Space(SPACE.namespace, 4096)):
        client = source.client(space)
        assert not any(client.find(KEYS, 10.0))
        assert load(client, KEYS) == []


def test_a_row_that_is_given_to_another_key_is_gone(source: Source) -> None:
    assert load(source.client(SPACE), KEYS) == of(KEYS)
    source.engine.write(0, 50)
    source.settle()
    assert load(source.client(SPACE), KEYS[:1]) == []
    assert load(source.client(SPACE), KEYS[1:]) == of(KEYS[1:])


def test_a_closed_ledger_has_no_rows(source: Source) -> None:
    """A change of weights closes it."""
    source.engine.ledger.close()
    source.settle()
    assert load(source.client(SPACE), KEYS) == []


def test_a_client_of_another_secret_gets_nothing(source: Source) -> None:
    client = source.client(SPACE)
    client._key = scoped_key(bytes(32), Scope.ROWS, AGENT)
    assert not any(client.find(KEYS, 10.0))
    assert load(client, KEYS) == []


@pytest.mark.parametrize("at", [0, 7, SPACE.row_bytes - 1])
def test_a_bit_that_flips_on_the_way_is_no_row(source: Source, at: int) -> None:
    """Whichever byte of the third row it is in, or in its tag."""
    damage = rows.HEAD_BYTES + 2 * (rows.HEAD_BYTES + source.tag_bytes + SPACE.row_bytes)
    for offset in (damage + at, damage + source.tag_bytes + at):
        client = source.client(SPACE)
        relay = Relay(client._dial)
        relay.flip_in, client._dial = offset, relay.connect
        assert load(client, KEYS) == of(KEYS[:2])
        relay.close()


def test_a_row_that_changed_in_the_memory_of_the_first_agent_is_no_row(
    agents: list[RowAgent], engine: RowEngine
) -> None:
    """Its tag was made at the first read by another node."""
    client = agents[1].client(SPACE, agents[0].tcp)
    assert load(client, KEYS) == of(KEYS)
    engine.spoil(row=2)
    assert load(client, KEYS) == of(KEYS[:2])


def test_rows_of_a_dead_engine_that_were_read_before_go_from_its_memory(
    agents: list[RowAgent], engine: RowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def client() -> RowClient:
        return agents[0].client(SPACE, agents[0].tcp)

    assert load(client(), KEYS[:6]) == of(KEYS[:6])
    (region,) = agents[0].regions.of(SPACE)
    region.adopt(time.monotonic())
    monkeypatch.setattr(RowStream, "send_file", sent := Noted(RowStream.send_file))
    assert load(client(), KEYS) == of(KEYS)
    assert sent.count == 0  # Each is compared with its checksum once more.
    assert load(client(), KEYS[:6]) == of(KEYS[:6])
    assert sent.count == 6
    engine.spoil(row=2)
    assert load(client(), KEYS) == of(KEYS[:2])
    os.ftruncate(engine.memory, 0)
    assert load(client(), KEYS) == []


class Noted:
    """A method that counts its calls."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method, self.count = method, 0

    def __get__(self, stream: RowStream, _: type) -> Callable[..., None]:
        self.count += 1
        return functools.partial(self._method, stream)


def test_a_row_that_changed_in_the_second_copy_is_no_row(
    agents: list[RowAgent], engine: RowEngine
) -> None:
    agents[1].copies_of(agents[0].tcp)
    until(lambda: copied(agents[1]) == len(KEYS))
    (copies,) = agents[1].copies.of(SPACE)
    copies.rows[KEYS[2]][1][5] ^= 1
    assert load(agents[1].client(SPACE), KEYS) == of(KEYS[:2])


def test_while_a_secret_is_rotated_rows_of_either_are_right(
    tmp_path: Path, engine: RowEngine, agents: list[RowAgent]
) -> None:
    newer = b"n" * 32
    client = agents[1].client(SPACE, agents[0].tcp)
    client._tags = RowTags([newer, SECRET])
    assert load(client, KEYS) == of(KEYS)
    client._tags = RowTags([newer])
    assert load(client, KEYS) == []


def test_an_agent_that_hangs_in_a_load_costs_the_time_of_the_load(source: Source) -> None:
    client = source.client(SPACE)
    relay = Relay(client._dial)
    relay.stop_in, client._dial = 3 * SPACE.row_bytes, relay.connect
    found = load(client, KEYS, 0.5)
    assert found == of(KEYS[: len(found)])
    assert len(found) < 3
    relay.close()


def test_a_name_that_is_not_looked_up_in_time_costs_no_more(
    monkeypatch: pytest.MonkeyPatch, agents: list[RowAgent]
) -> None:
    forever, over = threading.Event(), list[bool]()

    def hanging(*_: object, **__: object) -> None:
        over.append(forever.wait(20))
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    client = RowClient(
        "far",
        lambda timeout_s: dial_tcp("far", 1, timeout_s),
        agents[0].key,
        SPACE,
        RowTags([SECRET]),
    )
    assert not any(client.find(KEYS, 0.2))
    assert over == []
    forever.set()
