"""A keyed stream that runs at this proxy.

Its events go into its record, and from the record to the client, as far as the mirror has them. So
the client gets the record's events, at whichever proxy.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from tokenizers import Tokenizer

from kvrs.errors import ConfigError, UndecodableError
from kvrs.protocol.mirror import BYTES_PER_ID, KvLocation, StreamEvent, pack_ids, unpack_ids
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.mirror.book import Delivery, Outbox, RecordBook, delivery_of
from kvrs.proxy.mirror.headers import BROKEN, CUT
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.streams.continuation import Continuation
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.open_stream import (
    CLIENT_GONE,
    Client,
    ClientGoneError,
    Failed,
    SseClient,
    undecodable,
)
from kvrs.proxy.wire.journal import Journal

log = logging.getLogger(__name__)

# Number of events by which a client or mirror may lag before the engine must wait.
_MAX_UNSENT = 256
# Most events per write: when a long record is sent again, its client must read in between.
_MAX_AT_ONCE = 256


class KeyedStream:
    """Takes a keyed stream's events from the driver, records them, and sends them to the client."""

    direct = None

    def __init__(
        self,
        journal: Journal,
        inner: Client,
        outbox: Outbox,
        book: RecordBook,
        after: int,
        driver: Driver,
        *,
        sync: bool,
        changed: Callable[["KeyedStream"], None],
    ) -> None:
        self.journal = journal
        self.outbox = outbox
        self.failure: Failed | None = None
        self._inner = inner
        self._book = book
        self.after = after  # Position up to which the client has the stream; -1: nothing.
        self.sync = sync  # True: the client gets only events that the mirror has.
        self._driver = driver
        # Tokenizer by which events are cut; None: not needed yet.
        self._tokenizer: Tokenizer | None = None
        self._changed = changed
        self._name = journal.stream.encode()
        self._recorded_ids = len(journal.output_ids)
        self._cursor = 0
        self._progress = asyncio.Event()
        self._waiting: list[Callable[[], None]] = []
        # The client has no part of the events from the cursor on.
        self._is_past_client = after < 0
        # Reason why the client gets nothing any more; None: it still gets events.
        self._gone: str | None = None
        self._is_sending = False
        self._is_closed = False
        # Task that loads the tokenizer, before an event can be cut; None: not needed yet.
        self._loading: asyncio.Task[None] | None = None

    @property
    def record(self) -> Record:
        return self.outbox.record

    @property
    def blocked(self) -> bool:
        lags = len(self.record.events) - self._cursor > _MAX_UNSENT
        return self._gone is None and (lags or self._inner.blocked)

    def when_free(self, resume: Callable[[], None]) -> None:
        self._waiting.append(resume)

    @property
    def given(self) -> list[StreamEvent]:
        """Return the events that the client has received, here or before."""
        return self.record.events[: self._cursor]

    def send(self, events: Sequence[bytes]) -> None:
        journal = self.journal
        assert journal.marks is not None
        # Events without a mark come first: such an event, an echo of the prompt, has no output
        # tokens.
        marks = [0] * (len(events) - len(journal.marks)) + journal.marks
        journal.marks = []
        for event, mark in zip(events, marks, strict=True):
            self._record_event(event, mark)
        self.mark_dirty()
        if self._gone is not None:
            raise ClientGoneError(self._gone)

    def _record_event(self, event: bytes, mark: int) -> None:
        journal, record = self.journal, self.record
        if record.head is None:
            record.head = journal.head
            self._book.set_prompt(record, pack_ids(journal.prompt_ids or ()))
        reached = min(mark, len(journal.output_ids))
        ids = journal.output_ids[self._recorded_ids : reached]
        self._recorded_ids = max(self._recorded_ids, reached)
        self._book.add(record, StreamEvent(mark, ids.tobytes(), event))

    def take_token(self, token_id: int, event: bytes, now_s: float) -> None:
        """Send an event of one token as `send` does; write it directly if no other event waits, and
        no mirror must have it first.
        """
        record, outbox, inner = self.outbox.record, self.outbox, self._inner
        is_level = self._cursor == len(record.events) and self._is_past_client
        self._recorded_ids = seq = len(self.journal.output_ids)
        ids = token_id.to_bytes(BYTES_PER_ID, "little")
        self._book.add(record, StreamEvent(seq, ids, event))
        if (
            is_level
            and isinstance(inner, SseClient)
            and not inner.blocked
            and inner.is_open
            and not self._is_closed
            and not outbox.waits(now_s, sync=self.sync)
        ):
            inner.send_framed(b"id: %b:%d\ndata: %b\n\n" % (self._name, seq, event))
            self._cursor += 1
            if not outbox.dirty and outbox.mirror is not None:
                outbox.dirty = True
                self._changed(self)
            return
        self.mark_dirty()
        if self._gone is not None:
            raise ClientGoneError(self._gone)

    def note_state(self) -> None:
        """Update the record's state from the journal, before the record is sent."""
        journal, before = self.journal, self.record.state
        kept = self._driver.control.policy.kept(journal.stream)
        locations = tuple(KvLocation(each.holder, each.epoch, each.pages) for each in kept)
        self.record.state = msgspec.structs.replace(
            before,
            finish_reason=journal.finish_reason,
            stop_reason=journal.stop_reason,
            text_sent=journal.text_sent,
            usage_sent=journal.usage_sent,
            cached_tokens=journal.cached_tokens,
            facts=journal.facts,
            inexact=journal.exactness.elsewhere,
            lacks_ids=journal.lacks_ids,
            kv_locations=locations or before.kv_locations,
        )

    def mark_dirty(self) -> None:
        self.outbox.dirty = self.outbox.mirror is not None
        self.wake()
        self._changed(self)

    async def finish(self, missing: Sequence[bytes]) -> None:
        """Append the last events, and wait until the client has received everything.

        Raises:
            ClientGoneError: the client is gone.
        """
        for event in missing:
            self._record_event(event, self.journal.seq)
        self._set_state(complete=True)
        while self._cursor < len(self.record.events):
            if self._gone is not None:
                raise ClientGoneError(self._gone)
            if self.failure is not None:
                return
            self._progress.clear()
            await self._progress.wait()

    def end_with(self, error: bytes) -> None:
        """End the stream with an error as its last event."""
        self._record_event(error, self.journal.seq)
        self._set_state(complete=True)

    def release(self) -> None:
        """Mark the stream as released, so that the next claim succeeds at once."""
        if not self.record.state.released:
            self._set_state(released=True)

    def _set_state(self, **changes: bool) -> None:
        """Record a change of the stream's end in its state, and schedule an update
        of the mirror.
        """
        self.record.state = msgspec.structs.replace(self.record.state, **changes)
        self.note_state()
        self.mark_dirty()

    async def flushed(self, timeout_s: float) -> None:
        """Wait until the client, and the mirror if any, have everything, for at
        most `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self.outbox.settled or (
                    self._cursor < len(self.record.events) and self._gone is None
                ):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return

    def fail(self, failure: Failed) -> None:
        if self.failure is None:
            self.failure = failure
            self._progress.set()
            self._driver.end_early(self.journal.stream, failure)

    def close(self) -> None:
        self._is_closed = True
        if self._loading is not None:
            self._loading.cancel()

    def wake(self) -> None:
        """Send the events that may be sent now, because events, acknowledgements or
        room have come.
        """
        if not self._is_sending and self._cursor < len(self.record.events):
            self._is_sending = True
            try:
                self._send_ready()
            except ClientGoneError as error:
                self._gone = str(error)
                self._driver.end_early(self.journal.stream, CLIENT_GONE)
            except UndecodableError as error:
                self.fail(undecodable(error))
            except Exception:
                # Without `_gone`, `finish` would wait for a client that gets nothing any more.
                log.exception("internal error while writing to a client")
                self._gone = "the proxy failed"
                self.fail(BROKEN)
            finally:
                self._is_sending = False
        self._progress.set()
        if self._waiting and not self.blocked:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()

    def _send_ready(self) -> None:
        inner = self._inner
        while not self._is_closed and self._gone is None and self._loading is None:
            if inner.blocked:
                inner.when_free(self.wake)
                return
            batch = self._next_batch()
            if batch is None:
                self._loading = asyncio.create_task(self._load_tokenizer())
                self._loading.add_done_callback(self._loaded)
                return
            if not batch:
                return
            if isinstance(inner, SseClient):
                inner.send_numbered(self.journal.stream, batch)
            else:
                inner.send([event.data for event in batch])

    def _loaded(self, loading: asyncio.Task[None]) -> None:
        if loading.cancelled():
            return
        if (error := loading.exception()) is not None:
            log.error("internal error while loading a tokenizer", exc_info=error)
            self.fail(BROKEN)
        elif self._tokenizer is None:
            self.fail(CUT)
        else:
            self._loading = None
            self.wake()

    def _next_batch(self) -> list[StreamEvent] | None:
        """Return the events that may go to the client now; None: the next event must be cut, which
        needs the tokenizer.
        """
        events, batch = self.record.events, []
        before = events[self._cursor - 1].seq if self._cursor else -1
        until = self.outbox.sendable(self._driver.clock(), sync=self.sync)
        if self._is_past_client or before > self.after:
            self._is_past_client = True
            batch = events[self._cursor : min(until, self._cursor + _MAX_AT_ONCE)]
            self._cursor += len(batch)
            return batch
        for event in events[
            self._cursor : self.outbox.sendable(self._driver.clock(), sync=self.sync)
        ]:
            delivery = delivery_of(before, event, self.after)
            if delivery is Delivery.CUT and self._tokenizer is None:
                return None
            if delivery is not Delivery.SKIP:
                batch.append(self._rest_of(event, before) if delivery is Delivery.CUT else event)
            before = event.seq
            self._cursor += 1
            if len(batch) == _MAX_AT_ONCE:
                break
        return batch

    def _rest_of(self, event: StreamEvent, before: int) -> StreamEvent:
        assert self._tokenizer is not None
        before_ids = b"".join(each.ids for each in self.record.events[: self._cursor])
        has = min(self.after - max(before, 0), len(event.ids) // BYTES_PER_ID)
        return _rest_of(event, unpack_ids(before_ids), has, self.journal, self._tokenizer)

    async def _load_tokenizer(self) -> None:
        """Load the model's tokenizer, by which events of kvrs engines can be cut."""
        if self.journal.text_sent is not None or not self._driver.tokenizer.available:
            return
        try:
            self._tokenizer = await self._driver.tokenizer.load()
        except ConfigError as error:
            log.warning(
                "event cannot be cut", extra={"stream": self.journal.stream, "cause": str(error)}
            )


def _rest_of(
    event: StreamEvent, ids: Sequence[int], has: int, journal: Journal, tokenizer: Tokenizer
) -> StreamEvent:
    """Return the rest of an event behind its first `has` ids, as a kvrs engine would have sent it.
    `ids` is the stream's output before the event.

    The text comes from the code that made the event (`kvrs.text`), so both parts join to the whole.
    """
    assert journal.head is not None
    received = CHUNK.decode(event.data)
    assert received.choices
    whole, own = received.choices[0], unpack_ids(event.ids).tolist()
    continuation = Continuation(
        replace(journal, output_ids=packed([*ids, *own[:has]]), text_sent=None, parts=None),
        tokenizer,
    )
    missing = own[has:]
    piece = (
        continuation.end()
        if continuation.ended
        else continuation.take(missing, whole.finish_reason, whole.stop_reason)
    )
    choice: Any = journal.parsed.endpoint.choice(piece.delta)
    choice.finish_reason, choice.stop_reason = whole.finish_reason, whole.stop_reason
    if logprobs := whole.logprob_lists():
        choice.logprobs = {name: values and values[has:] for name, values in logprobs.items()}
    if journal.wants_ids:
        choice.token_ids = missing
    data = journal.parsed.endpoint.event(journal.head, [choice], received.usage)
    return StreamEvent(event.seq, pack_ids(missing), data)
