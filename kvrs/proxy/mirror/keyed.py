"""A stream that its client can resume elsewhere, while it lives here.

Its events go into its record, and from there to the client as the mirror allows: the record is what a client of this stream,
wherever it asks, has had or will get.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
from tokenizers import Tokenizer

from kvrs.errors import ConfigError
from kvrs.policy.events import Kept
from kvrs.protocol.mirror import Held, Said
from kvrs.protocol.openai import error_body
from kvrs.proxy.answers import WholeClient
from kvrs.proxy.clients import ClientGoneError, SseClient
from kvrs.proxy.journal import Journal
from kvrs.proxy.mirror.cutting import rest_of
from kvrs.proxy.mirror.records import Fate, Outbox, Record, RecordBook, fate_of
from kvrs.proxy.streams import Failed
from kvrs.proxy.texts import Texts

log = logging.getLogger(__name__)

# A client, or a mirror, that lags so many events behind makes the engine wait.
_MOST_UNSENT = 256
_MOST_AT_ONCE = 256  # Of a long stream that its client wants once more: it waits for the client to read every so many events.

TORN = Failed(
    409,
    error_body("what the client has ends within a piece that cannot be cut", kind="server_error", code="inexact"),
)
BROKEN = Failed(500, error_body("the proxy failed; its log says more", kind="server_error"))


class KeyedStream:
    """The driver's client of such a stream. `stop` ends the stream for a reason that is not the engines'."""

    def __init__(
        self,
        journal: Journal,
        inner: SseClient | WholeClient,
        outbox: Outbox,
        book: RecordBook,
        after: int,
        *,
        sync: bool,
        clock: Callable[[], float],
        texts: Texts,
        changed: Callable[["KeyedStream"], None],
        kept: Callable[[], tuple[Kept, ...]],
        stop: Callable[[Failed], None],
    ) -> None:
        self.journal = journal
        self.outbox = outbox
        self.failure: Failed | None = None
        self._inner = inner
        self._book = book
        self.after = after  # Where the client stands.
        self._sync = sync
        self._clock = clock
        self._texts = texts
        self._tokenizer: Tokenizer | None = None  # Once it is needed.
        self._changed = changed
        self._kept = kept
        self._stop = stop
        self._recorded_ids = len(journal.output_ids)
        self._cursor = 0
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._waiting = 0
        self._gone: ClientGoneError | None = None
        self._pumping = asyncio.get_running_loop().create_task(self._pump())
        self._pumping.add_done_callback(self._pump_ended)

    @property
    def record(self) -> Record:
        return self.outbox.record

    @property
    def blocked(self) -> bool:
        return self._inner.blocked or self._waiting > 0

    # From the driver.

    async def send(self, events: Sequence[bytes]) -> None:
        journal = self.journal
        assert journal.marks is not None
        # An echo of the prompt comes before the first of them, and brings nothing.
        marks = [0] * (len(events) - len(journal.marks)) + journal.marks
        journal.marks = []
        for event, mark in zip(events, marks, strict=True):
            self._note(event, mark)
        self._announce()
        self._waiting += 1
        try:
            while len(self.record.events) - self._cursor > _MOST_UNSENT and self._gone is None:
                self._progress.clear()
                await self._progress.wait()
        finally:
            self._waiting -= 1
        if self._gone is not None:
            raise self._gone

    def _note(self, event: bytes, mark: int) -> None:
        journal, record = self.journal, self.record
        if record.head is None:
            record.head, record.prompt_ids = journal.head, journal.prompt_ids
        reached = min(mark, len(journal.output_ids))
        ids = journal.output_ids[self._recorded_ids : reached]
        self._recorded_ids = max(self._recorded_ids, reached)
        self._book.add(record, Said(mark, ids, event))

    def _announce(self) -> None:
        """Have the mirror told how the stream stands."""
        journal, record = self.journal, self.record
        held = tuple(Held(each.holder, each.epoch, each.pages) for each in self._kept())
        record.standing = msgspec.structs.replace(
            record.standing,
            finish_reason=journal.finish_reason,
            stop_reason=journal.stop_reason,
            text_sent=journal.text_sent,
            usage_sent=journal.usage_sent,
            inexact=journal.inexact,
            held=held or record.standing.held,
        )
        self.touch()

    def touch(self) -> None:
        self.outbox.dirty = self.outbox.mirror is not None
        self.wake()
        self._changed(self)

    # The end of it here.

    async def finish(self, missing: Sequence[bytes]) -> None:
        """All has come, but for these events; wait until the client has it.

        Raises:
            ClientGoneError: nobody reads any more.
        """
        for event in missing:
            self._note(event, self.journal.seq)
        self.record.standing = msgspec.structs.replace(self.record.standing, complete=True)
        self._announce()
        while self._cursor < len(self.record.events):
            if self._gone is not None:
                raise self._gone
            if self.failure is not None:
                return
            self._progress.clear()
            await self._progress.wait()

    def release(self) -> None:
        """Whoever asks for it next may have it at once."""
        if not self.record.standing.released:
            self.record.standing = msgspec.structs.replace(self.record.standing, released=True)
            self._announce()

    async def flushed(self, timeout_s: float) -> None:
        """Until the mirror, if there is one, knows all that the client is to have, and the client has it."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.outbox.settled or (self._cursor < len(self.record.events) and self._gone is None):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return

    def fail(self, failure: Failed) -> None:
        if self.failure is None:
            self.failure = failure
            self._progress.set()
            self._stop(failure)

    def close(self) -> None:
        self._pumping.cancel()

    # To the client.

    def wake(self) -> None:
        """Something has come, or may go."""
        self._wake.set()
        self._progress.set()

    async def _pump(self) -> None:
        try:
            while True:
                self._wake.clear()
                batch = self._next_batch()
                if batch is None and not await self._learn_to_cut():
                    self.fail(TORN)
                    return
                if batch is None:
                    continue
                if batch and isinstance(self._inner, SseClient):
                    await self._inner.send_numbered(self.journal.stream, batch)
                elif batch:
                    await self._inner.send([event.data for event in batch])
                self._progress.set()
                if not batch:
                    await self._wake.wait()
        except ClientGoneError as error:
            self._gone = error
            self._progress.set()
            self._stop(Failed(499, error_body("the client is gone", kind="client_gone")))

    def _pump_ended(self, pumping: asyncio.Task[None]) -> None:
        if not pumping.cancelled() and (error := pumping.exception()) is not None:
            # A bug of ours: nobody is to wait for a client that gets nothing any more.
            log.error("the way to a client ended by a bug", exc_info=error)
            self.fail(BROKEN)

    def _next_batch(self) -> list[Said] | None:
        """What may go to the client now; None: a part of an event, which cannot be cut yet."""
        events, batch = self.record.events, []
        before = events[self._cursor - 1].seq if self._cursor else -1
        for event in events[self._cursor : self.outbox.sendable(self._clock(), sync=self._sync)]:
            fate = fate_of(before, event, self.after)
            if fate is Fate.TORN and self._tokenizer is None:
                return None
            if fate is not Fate.SKIP:
                batch.append(self._rest_of(event, before) if fate is Fate.TORN else event)
            before = event.seq
            self._cursor += 1
            if len(batch) == _MOST_AT_ONCE:
                break
        return batch

    def _rest_of(self, event: Said, before: int) -> Said:
        assert self._tokenizer is not None
        ids = [token_id for each in self.record.events[: self._cursor] for token_id in each.ids]
        has = min(self.after - max(before, 0), len(event.ids))
        return rest_of(event, ids, has, self.journal, self._tokenizer)

    async def _learn_to_cut(self) -> bool:
        """Whether the proxy can make the text of such events itself: of our own engines, whose machine it has."""
        if self.journal.text_sent is not None or not self._texts.available:
            return False
        try:
            self._tokenizer = await self._texts.tokenizer()
        except ConfigError as error:
            log.warning("stream cannot be cut", extra={"stream": self.journal.stream, "cause": str(error)})
        return self._tokenizer is not None
