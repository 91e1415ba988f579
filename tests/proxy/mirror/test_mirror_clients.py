"""Events that reach the client of a stream with a key, without any engine, proxy or mirror."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.file import Config
from kvrs.config.proxy import ProxySettings
from kvrs.ids import StreamId
from kvrs.protocol.mirror import (
    AckStatus,
    StreamEvent,
    StreamHeader,
    UpdateAck,
    pack_ids,
)
from kvrs.proxy.mirror.book import Outbox, RecordBook
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.open_stream import ClientGoneError, Failed, SseClient
from kvrs.proxy.streams.whole_answers import WholeClient
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs_testkit.examples import examples
from kvrs_testkit.proxy_cluster import WITHIN_S

S = StreamId("ab")


class Client(WholeClient):
    """Records the number of events per write, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.given: list[int] = []

    def send(self, events: Sequence[bytes]) -> None:
        self.given.append(len(events))
        if self.error is not None:
            raise self.error


class Connection(SseClient):
    """Keeps what would be written; blocked and lost as it is told."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.blocked = self.is_lost = False
        self.resumes: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        return not self.is_lost

    def when_free(self, resume: Callable[[], None]) -> None:
        self.resumes.append(resume)

    def free(self) -> None:
        self.blocked, resumes, self.resumes = False, self.resumes, []
        for resume in resumes:
            resume()

    def send_framed(self, data: bytes, *, is_last: bool = False) -> None:
        if self.is_lost:
            raise ClientGoneError("lost")
        self.written.append(data)


def keyed_stream(
    client: Client | Connection,
    events: int,
    stopped: list[Failed],
    after: int = -1,
    *,
    sync: bool = False,
    clock: Callable[[], float] = lambda: 0.0,
) -> KeyedStream:
    journal = Journal(S, read(COMPLETIONS, b'{"prompt": [1], "stream": true}'), 0.0, marks=[])
    record = Record(
        "k", S, StreamHeader(b"digest", None, (None, None, None), 0.0, 0.0), 0.0, "a-1", 0
    )
    for seq in range(1, events + 1):
        record.add(StreamEvent(seq, pack_ids([seq]), b'{"choices":[]}'))
    driver = Driver(Config(), {}, {}, Metrics(), clock, clock)
    driver.end_early = lambda stream, failure: stopped.append(failure)  # type: ignore[method-assign]
    return KeyedStream(
        journal,
        client,
        Outbox(record),
        RecordBook(),
        after,
        driver,
        sync=sync,
        changed=lambda _: None,
    )


STEPS = [
    "token",
    "token",
    "token",
    "update",
    "ack",
    "wait",
    "block",
    "free",
    "lose mirror",
    "leave",
    "close",
]


@examples(300)
@given(
    steps=st.lists(st.sampled_from(STEPS), max_size=40),
    sync=st.booleans(),
    is_mirrored=st.booleans(),
    is_answered=st.booleans(),
    after=st.integers(-1, 5),
)
def test_a_token_alone_goes_as_one_among_others_does(
    steps: list[str], sync: bool, is_mirrored: bool, is_answered: bool, after: int
) -> None:
    """To the record, the mirror and the client: also where that has to wait for an answer of the
    mirror, does not read, or is gone.
    """
    now_s = 0.0
    sides: list[tuple[KeyedStream, Connection, list[object]]] = []
    for _ in range(2):
        connection = Connection()
        keyed = keyed_stream(connection, 3, [], after, sync=sync, clock=lambda: now_s)
        keyed.outbox.assign("m" if is_mirrored else None)
        keyed.journal.output_ids.extend([1, 2, 3])
        keyed._recorded_ids = 3
        sides.append((keyed, connection, []))
        keyed.wake()

    for number, step in enumerate([*(["update", "ack"] if is_answered else []), *steps]):
        now_s += 0.3 if step == "wait" else 0.0
        for is_alone, (keyed, connection, seen) in zip((True, False), sides, strict=True):
            try:
                _take_step(step, keyed, connection, 100 + number, is_alone=is_alone, now_s=now_s)
            except ClientGoneError as error:
                seen.append(str(error))
            keyed.note_state()
            seen.append((keyed.blocked, keyed.outbox.dirty, b"".join(connection.written)))

    (alone, _, seen_alone), (among, _, seen_among) = sides
    assert seen_alone == seen_among
    assert alone.record.events == among.record.events
    assert alone.record.size_bytes == among.record.size_bytes
    assert alone.record.state == among.record.state


def _take_step(
    step: str,
    keyed: KeyedStream,
    connection: Connection,
    token: int,
    *,
    is_alone: bool,
    now_s: float,
) -> None:
    outbox = keyed.outbox
    match step:
        case "token":
            _give_token(keyed, token, is_alone=is_alone, now_s=now_s)
        case "update" if outbox.dirty:
            outbox.next(now_s)
        case "ack" if outbox.mirror is not None:
            outbox.take(UpdateAck(AckStatus.STORED, len(outbox.record.events)))
            keyed.wake()
        case "block":
            connection.blocked = True
        case "free":
            connection.free()
        case "lose mirror" if outbox.mirror is not None:
            outbox.assign(None)
            keyed.wake()
        case "close":
            keyed.close()
        case "leave":
            connection.is_lost = True
        case _:  # Nothing to do.
            pass


def _give_token(keyed: KeyedStream, token: int, *, is_alone: bool, now_s: float) -> None:
    journal, event = keyed.journal, b'{"token":%d}' % token
    journal.output_ids.append(token)
    if is_alone:
        keyed.take_token(token, event, now_s)
    else:
        assert journal.marks is not None
        journal.marks.append(journal.seq)
        keyed.send([event])


@pytest.mark.parametrize("after", [-1, 3000])
async def test_a_long_record_is_sent_to_its_client_in_pieces(after: int) -> None:
    """Each piece waits for the client to read: unread events neither pile up nor block the
    proxy.
    """
    client = Client()
    keyed = keyed_stream(client, 5000, [], after)

    async with asyncio.timeout(WITHIN_S):
        await keyed.finish([])
    keyed.close()

    assert sum(client.given) == 5000 - max(after, 0)
    assert max(client.given) <= 256


async def test_an_internal_error_while_writing_ends_the_stream() -> None:
    """Otherwise `finish`, and the engine, would wait for ever."""
    stopped: list[Failed] = []
    keyed = keyed_stream(Client(ZeroDivisionError()), 3, stopped)

    async with asyncio.timeout(WITHIN_S):
        await keyed.finish([])

    assert [keyed.failure] == stopped
    assert keyed.failure is not None
    assert keyed.failure.status == 500


async def test_an_ended_stream_is_not_kept_for_a_full_mirror() -> None:
    """It has an unsent update, but no mirror any more."""
    keyed = keyed_stream(Client(), 3, [])
    driver = Driver(Config(), {}, {}, Metrics(), lambda: 0.0, lambda: 0.0)
    mirror = Mirror(ProxySettings(), driver, Metrics(), {})
    keyed.outbox.assign("m")
    keyed.close()
    mirror._closing["k"] = keyed

    mirror._acknowledged(keyed, keyed.record.mirror_no, UpdateAck(AckStatus.FULL))

    assert mirror._closing == {}
