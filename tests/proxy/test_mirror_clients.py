"""What a stream with a key gives to its client, without any engine, proxy or mirror."""

import asyncio
from collections.abc import Sequence

import pytest

from kvrs.ids import StreamId
from kvrs.protocol.mirror import Ack, Opening, Said
from kvrs.proxy.answers import WholeClient
from kvrs.proxy.config import ProxySettings
from kvrs.proxy.forms import COMPLETIONS, read
from kvrs.proxy.journal import Journal
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.mirroring import Mirror
from kvrs.proxy.mirror.records import Outbox, Record, RecordBook
from kvrs.proxy.streams import Failed
from kvrs.proxy.texts import Texts

S = StreamId("ab")


class Client(WholeClient):
    """Notes how much it is given at a time, or cannot take it."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.given: list[int] = []

    async def send(self, events: Sequence[bytes]) -> None:
        self.given.append(len(events))
        if self.error is not None:
            raise self.error


def keyed_stream(client: Client, events: int, stopped: list[Failed], after: int = -1) -> KeyedStream:
    journal = Journal(S, read(COMPLETIONS, b'{"prompt": [1], "stream": true}'), 0.0, marks=[])
    record = Record("k", S, Opening(b"digest", None, (None, None, None), 0.0, 0.0), 0.0, "a-1", 0)
    record.events = [Said(seq, [seq], b'{"choices":[]}') for seq in range(1, events + 1)]
    return KeyedStream(
        journal,
        client,
        Outbox(record),
        RecordBook("a-1"),
        after,
        sync=False,
        clock=lambda: 0.0,
        texts=Texts(None),
        changed=lambda _: None,
        kept=lambda: (),
        stop=stopped.append,
    )


@pytest.mark.parametrize("after", [-1, 3000])
async def test_a_long_record_goes_to_its_client_in_pieces(after: int) -> None:
    """Each of them waits for the client to read: what it does not read must not pile up, nor keep the proxy waiting for ever."""
    client = Client()
    keyed = keyed_stream(client, 5000, [], after)

    async with asyncio.timeout(5):
        await keyed.finish([])
    keyed.close()

    assert sum(client.given) == 5000 - max(after, 0)
    assert max(client.given) <= 256


async def test_a_bug_on_the_way_to_the_client_ends_its_stream() -> None:
    """Whoever waits for the client to have everything would wait for ever, and the engine with it."""
    stopped: list[Failed] = []
    keyed = keyed_stream(Client(ZeroDivisionError()), 3, stopped)

    async with asyncio.timeout(5):
        await keyed.finish([])

    assert [keyed.failure] == stopped
    assert keyed.failure is not None
    assert keyed.failure.status == 500


async def test_a_stream_that_is_over_is_not_kept_for_a_mirror_that_has_no_room() -> None:
    """Though there was something to tell, nobody is left to be told."""
    keyed = keyed_stream(Client(), 3, [])
    mirror = Mirror(
        ProxySettings(), "a-1", {}, lambda: 0.0, texts=Texts(None), kept=lambda _: (), stop=lambda *_: None, count=lambda _: None
    )
    keyed.outbox.assign("m")
    keyed.close()
    mirror._closing["k"] = keyed

    mirror._acknowledged(keyed, keyed.record.mirror_no, Ack(-1, full=True))

    assert mirror._closing == {}
