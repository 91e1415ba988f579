"""Fast path of usual tokens: a read of whole chunks, each with one event of one id, goes from the
engine's connection to the client's in one write. It does the work of `Relay` and both framings for
events that fit a template; all other events are left to them.
"""

import re
from collections.abc import Callable, Sequence

from kvrs.core.fleet.silence import Delivered, SilenceTimer
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.wire.event_template import EventTemplate, shared
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import TEXT

_MOST_BYTES = 2048  # Largest chunk with its frame; an event of one token has a few hundred bytes.
_MOST_TOKENS = 1 << 32  # Token limit for a request that names none.
_DATA = b"data: "
_END_OF_EVENT = b"\n\n"
_END_OF_CHUNK = b"\r\n"
_END = _END_OF_EVENT + _END_OF_CHUNK
_NO_HEAD = b"\n"  # Stands for a chunk's head where there is none: no chunk begins with these bytes.
_BEGINNING = re.compile(rb"([1-9a-f][0-9a-f]{0,2})\r\n" + _DATA)


def _heads() -> tuple[list[bytes], list[bytes]]:
    """Return heads of chunks by the size of the chunk; and heads with the start of an event, by the
    size of the chunk with its frame.
    """
    by_size, by_whole = [_NO_HEAD] * (_MOST_BYTES + 1), [_NO_HEAD] * (_MOST_BYTES + 1)
    for size in range(1, _MOST_BYTES + 1):
        by_size[size] = head = b"%x\r\n" % size
        whole = len(head) + size + len(_END_OF_CHUNK)
        if whole <= _MOST_BYTES:
            by_whole[whole] = head + _DATA
    return by_size, by_whole


_HEAD_BY_SIZE, _BEGINNING_BY_WHOLE = _heads()


class _Form:
    """The bytes that change when events of one template are written to the client."""

    __slots__ = (
        *("end", "framing_bytes", "ids_bytes", "is_beside_text", "opening", "part", "read"),
        "skipped_bytes",
    )

    def __init__(
        self, template: EventTemplate, journal: Journal, head_bytes: int, *, is_framed: bool
    ) -> None:
        assert journal.head is not None
        self.read = template.read
        self.part = template.part
        self.is_beside_text = template.part not in (None, TEXT)
        # `opening` replaces the event's first `skipped_bytes` if the client's head differs from the
        # engine's; below 0: the event's own frame stays, too.
        data = _DATA if is_framed else b""
        self.opening, self.skipped_bytes = b"", -len(data)
        if template.before[:head_bytes] != journal.head:
            self.opening, self.skipped_bytes = data + journal.head, head_bytes
        self.ids_bytes = template.ids_bytes
        end = b"" if journal.wants_ids else template.after[1:]
        self.end = shared(end + _END) if is_framed else end
        self.framing_bytes = len(self.opening) + len(self.end) - len(_END_OF_CHUNK)


class TokenPath:
    """Writes the usual tokens of one attempt to its client."""

    __slots__ = (
        "_client",
        "_counts_text",
        "_delivered",
        "_direct",
        "_form",
        "_forms",
        "_gathered",
        "_is_only_form",
        "_journal",
        "_most_tokens",
        "_now_s",
        "_number",
        "_parts",
        "_silence",
        "_take_token",
        "_transport",
        "_wait_for_room",
        "_wants_ids",
    )

    def __init__(
        self,
        journal: Journal,
        client: Client,
        templates: Sequence[EventTemplate],
        head_bytes: int,
        *,
        delivered: Delivered,
        silence: SilenceTimer,
        now_s: Callable[[], float],
        wait_for_room: Callable[[], None],
    ) -> None:
        """`head_bytes`: size of the events' head, which the stream's head replaces. Tokens are
        written to the connection of `client.direct`; None: `client.take_token` gets them.
        `wait_for_room` pauses reading from the engine; it is called after each write that leaves
        the client blocked.
        """
        self._journal = journal
        self._number = journal.attempt
        most = journal.parsed.request.max_tokens
        self._most_tokens = _MOST_TOKENS if most is None else most
        self._client = client
        self._take_token = client.take_token
        self._direct = direct = client.direct
        self._transport = None if direct is None else direct.transport
        self._delivered = delivered
        self._silence = silence
        self._now_s = now_s
        self._wait_for_room = wait_for_room
        self._wants_ids = journal.wants_ids
        self._counts_text = journal.text_sent is not None
        self._parts = journal.parts
        self._forms = [
            _Form(each, journal, head_bytes, is_framed=direct is not None) for each in templates
        ]
        self._form = self._forms[0]  # Form of the last event, tried first.
        self._is_only_form = len(self._forms) == 1
        # Bytes for the client while the chunks of one read are taken; None: each chunk is written.
        self._gathered: list[bytes] | None = None

    def close(self) -> None:
        """Relay nothing more; the relay itself handles further reads."""
        self._most_tokens = 0

    def take(self, data: bytes) -> bytes:
        """Relay the usual tokens at the start of a read; return the rest."""
        size, form = len(data), self._form
        if size > _MOST_BYTES or not data.startswith(beginning := _BEGINNING_BY_WHOLE[size]):
            return self._take_others(data)
        at, event_end = len(beginning), size - len(_END)
        found = form.read(data, at, event_end)
        if found is None or not data.endswith(_END):
            return data if self._is_only_form else self._take_others(data)
        token_id, text_end, text = found
        journal, transport, direct = self._journal, self._transport, self._direct
        ids, now_s = journal.output_ids, self._now_s()
        begin = at + form.skipped_bytes
        end = event_end if self._wants_ids else text_end + form.ids_bytes
        framed = form.framing_bytes + end - begin
        if (
            journal.attempt != self._number
            or journal.finish_reason is not None
            or len(ids) >= self._most_tokens
            or (transport is not None and transport.is_closing())
            or framed > _MOST_BYTES
            # A thought or a call behind an answer changes how the stream can be continued.
            or (form.is_beside_text and journal.answer_from is not None)
        ):
            return data
        ids.append(token_id)
        if self._counts_text and (part := form.part) is not None:
            if part == TEXT:
                assert journal.text_sent is not None
                journal.text_sent += len(text)
            if self._parts is not None:
                self._parts.add(part, text)
        if transport is not None and direct is not None:
            parts = (_HEAD_BY_SIZE[framed], form.opening, data[begin:end], form.end)
            if self._gathered is None:
                transport.write(b"".join(parts))
            else:
                self._gathered += parts
            direct.was_silent = False
        else:
            assert self._take_token is not None
            self._take_token(token_id, form.opening + data[begin:end] + form.end, now_s)
        if self._client.blocked:
            self._wait_for_room()
        self._silence.heard_s = self._delivered.last_s = now_s
        self._delivered.tokens += 1
        # Like `Journal.wrote`, without its first case: an event before those of the template has
        # been written.
        last_s, journal.last_write_s = journal.last_write_s, now_s
        assert last_s is not None
        if now_s - last_s > journal.longest_gap_s:
            journal.longest_gap_s = now_s - last_s
        return b""

    def _take_others(self, data: bytes) -> bytes:
        """Take a read of several chunks, or one event of another form."""
        if self._gathered is not None:
            return data
        done, size = 0, len(data)
        gathered: list[bytes] = []
        self._gathered = gathered
        try:
            while (match := _BEGINNING.match(data, done)) is not None:
                end = match.end() - len(_DATA) + int(match[1], 16) + len(_END_OF_CHUNK)
                if end > size or not self._take_any(data[done:end]):
                    break
                done = end
        finally:
            self._gathered = None
            if gathered:
                assert self._transport is not None
                self._transport.write(b"".join(gathered))
        if self._client.blocked:
            self._wait_for_room()
        return data[done:]

    def _take_any(self, chunk: bytes) -> bool:
        """Take a chunk that fits any known form; return whether it does."""
        if not self.take(chunk):
            return True
        before = self._form
        for form in self._forms:
            self._form = form
            if form is not before and not self.take(chunk):
                return True
        self._form = before
        return False
