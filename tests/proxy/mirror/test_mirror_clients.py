"""What a stream with a key sends to its client, without any engine, proxy or mirror."""

import asyncio
from collections.abc import Sequence

import pytest

from kvrs.config.proxy import ProxySettings
from kvrs.ids import StreamId
from kvrs.protocol.mirror import AckStatus, StreamEvent, StreamHeader, UpdateAck, pack_ids
from kvrs.proxy.mirror.book import RecordBook
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.outbox import Outbox
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.streams.journal import Journal
from kvrs.proxy.streams.live import Failed
from kvrs.proxy.streams.responses import WholeClient
from kvrs.proxy.streams.tokenizer import LazyTokenizer
from kvrs.proxy.wire.requests import COMPLETIONS, read

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


def keyed_stream(
    client: Client, events: int, stopped: list[Failed], after: int = -1
) -> KeyedStream:
    journal = Journal(S, read(COMPLETIONS, b'{"prompt": [1], "stream": true}'), 0.0, marks=[])
    record = Record(
        "k", S, StreamHeader(b"digest", None, (None, None, None), 0.0, 0.0), 0.0, "a-1", 0
    )
    record.events = [
        StreamEvent(seq, pack_ids([seq]), b'{"choices":[]}') for seq in range(1, events + 1)
    ]
    return KeyedStream(
        journal,
        client,
        Outbox(record),
        RecordBook(),
        after,
        sync=False,
        clock=lambda: 0.0,
        texts=LazyTokenizer(None),
        changed=lambda _: None,
        kept=lambda: (),
        stop=stopped.append,
    )


@pytest.mark.parametrize("after", [-1, 3000])
async def test_a_long_record_is_sent_to_its_client_in_pieces(after: int) -> None:
    """Each piece waits for the client to read: unread events neither pile up nor block the
    proxy.
    """
    client = Client()
    keyed = keyed_stream(client, 5000, [], after)

    async with asyncio.timeout(5):
        await keyed.finish([])
    keyed.close()

    assert sum(client.given) == 5000 - max(after, 0)
    assert max(client.given) <= 256


async def test_an_internal_error_while_writing_ends_the_stream() -> None:
    """Otherwise `finish`, and the engine, would wait for ever."""
    stopped: list[Failed] = []
    keyed = keyed_stream(Client(ZeroDivisionError()), 3, stopped)

    async with asyncio.timeout(5):
        await keyed.finish([])

    assert [keyed.failure] == stopped
    assert keyed.failure is not None
    assert keyed.failure.status == 500


async def test_an_ended_stream_is_not_kept_for_a_full_mirror() -> None:
    """It has an unsent update, but no mirror any more."""
    keyed = keyed_stream(Client(), 3, [])
    mirror = Mirror(
        ProxySettings(),
        "a-1",
        {},
        lambda: 0.0,
        texts=LazyTokenizer(None),
        kept=lambda _: (),
        stop=lambda *_: None,
        count=lambda _: None,
    )
    keyed.outbox.assign("m")
    keyed.close()
    mirror._closing["k"] = keyed

    mirror._acknowledged(keyed, keyed.record.mirror_no, UpdateAck(AckStatus.FULL))

    assert mirror._closing == {}
