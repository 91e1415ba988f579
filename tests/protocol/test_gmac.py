"""Macs of pages and rows: what they cover, and that no number is used twice under a key."""

import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import DamagedPageError
from kvrs.protocol import rows
from kvrs.protocol.frames import AnswerHeader, Bytes, FrameType, Gmac, Session
from kvrs.protocol.rows import Space
from kvrs.transfer.rows.tags import SALT_BYTES, RowTagger, RowTags

SPACE = Space(bytes(32), 100)
KEY, ROW = b"key of a row", memoryview(bytes(range(100)))
SECRET = b"s" * 32
ANSWER = AnswerHeader(FrameType.PAGE, 1, 0, 2, len(ROW))
PARTS = st.tuples(st.integers(0, 3), st.binary(max_size=4), st.binary(max_size=4))


@given(one=PARTS, other=PARTS)
def test_a_mac_is_of_its_number_its_head_and_its_body(
    one: tuple[int, bytes, bytes], other: tuple[int, bytes, bytes]
) -> None:
    """Also where a byte goes from the one part to the other."""
    gmac = Gmac(bytes(32))

    assert (gmac.mac(*one) == gmac.mac(*other)) == (one == other)


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often each number was used under a key."""
    used: Counter[tuple[int, int]] = Counter()
    original = Gmac.mac

    def noted(gmac: Gmac, number: int, head: bytes, body: Bytes) -> bytes:
        used[id(gmac), number] += 1
        return original(gmac, number, head, body)

    monkeypatch.setattr(Gmac, "mac", noted)
    return used


def test_a_connection_uses_no_number_twice(numbers: Counter[tuple[int, int]]) -> None:
    """Whatever is sealed, by either end."""
    ends = [Session(SECRET, is_client=each) for each in (True, False)]

    macs = [end.seal(ROW) for end in ends for _ in range(3)]
    macs += [end.answer(ANSWER, ROW) for end in ends for _ in range(3)]

    assert len(set(macs)) == len(macs)
    assert set(numbers.values()) == {1}


def test_a_message_that_comes_twice_or_late_is_refused() -> None:
    client, server = (Session(SECRET, is_client=each) for each in (True, False))
    macs = [client.seal(ROW) for _ in range(3)]

    server.check(macs[0], ROW)
    for mac in (macs[0], macs[0]):  # Those of numbers 1 and 2 are due.
        with pytest.raises(DamagedPageError):
            server.check(mac, ROW)


def test_an_answer_of_another_start_is_refused() -> None:
    client, server = (Session(SECRET, is_client=each) for each in (True, False))
    mac = server.answer(ANSWER, ROW)[-16:]

    with pytest.raises(DamagedPageError):
        client.check_answer(mac, AnswerHeader(FrameType.PAGE, 1, 1, 2, len(ROW)), ROW)


def test_makers_of_row_tags_use_no_number_twice(numbers: Counter[tuple[int, int]]) -> None:
    """Threads of one maker share its counter, and each salt makes another key."""
    makers = [RowTagger(SECRET, bytes(SALT_BYTES)), RowTagger(SECRET, b"1" * SALT_BYTES)]

    with ThreadPoolExecutor(8) as pool:
        tags = [*pool.map(lambda at: makers[at % 2].make(SPACE, KEY, ROW), range(400))]

    assert len({tag[-16:] for tag in tags}) == len(tags)  # Of one row.
    assert set(numbers.values()) == {1}


@given(at=st.integers(0, rows.TAG_BYTES + len(ROW) - 1), bit=st.integers(0, 7))
def test_a_row_or_a_tag_that_was_changed_is_not_right(at: int, bit: int) -> None:
    tag = RowTagger(SECRET, secrets.token_bytes(SALT_BYTES)).make(SPACE, KEY, ROW)
    damaged = bytearray(tag + bytes(ROW))
    damaged[at] ^= 1 << bit
    tags = RowTags([SECRET])

    assert tags.is_right(tag, SPACE, KEY, ROW)
    changed_tag, changed_row = damaged[: rows.TAG_BYTES], damaged[rows.TAG_BYTES :]
    assert not tags.is_right(bytes(changed_tag), SPACE, KEY, changed_row)


def test_a_tag_of_another_key_space_or_cluster_is_not_right() -> None:
    tag = RowTagger(SECRET, secrets.token_bytes(SALT_BYTES)).make(SPACE, KEY, ROW)
    tags = RowTags([secrets.token_bytes(32), SECRET])

    assert tags.is_right(tag, SPACE, KEY, ROW)
    assert not tags.is_right(tag, SPACE, KEY + b"1", ROW)
    assert not tags.is_right(tag, Space(b"1" * 32, 100), KEY, ROW)
    assert not RowTags([b"x" * 32]).is_right(tag, SPACE, KEY, ROW)


def test_a_checksum_from_another_node_is_no_tag() -> None:
    """An agent of another node cannot pass a row by what holds within a node alone."""
    assert not RowTags([SECRET]).is_right(rows.checksum(ROW), SPACE, KEY, ROW)
