"""The way of the usual token: a read that is one chunk with one event with one id goes from the
engine's connection to the client's in one write. It is the work of `Relay` and of both framings for
bytes that fit the stream's template; everything else is left to them.
"""

from collections.abc import Callable

from kvrs.core.fleet.silence import Delivered, SilenceTimer
from kvrs.proxy.streams.clients import Client, SseClient
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.sse import EventTemplate, shared

_MOST_BYTES = 2048  # Of a chunk with its frame; an event of one token has a few hundred.
_MOST_TOKENS = 1 << 32  # Where the client names no number.
_DATA = b"data: "
_END_OF_EVENT = b"\n\n"
_END_OF_CHUNK = b"\r\n"
_ZERO = ord("0")
_NO_HEAD = b"\n"  # With which no chunk begins.


def _heads() -> tuple[list[bytes], list[bytes]]:
    """The heads of chunks: by the size of the chunk, and, with the beginning of an event, by that
    of the chunk with its frame.
    """
    by_size, by_whole = [_NO_HEAD] * (_MOST_BYTES + 1), [_NO_HEAD] * (_MOST_BYTES + 1)
    for size in range(1, _MOST_BYTES + 1):
        by_size[size] = head = b"%x\r\n" % size
        whole = len(head) + size + len(_END_OF_CHUNK)
        if whole <= _MOST_BYTES:
            by_whole[whole] = head + _DATA
    return by_size, by_whole


_HEAD_BY_SIZE, _BEGINNING_BY_WHOLE = _heads()


class TokenPath:
    """The token path of one attempt at a stream."""

    __slots__ = (
        "_after",
        "_after_bytes",
        "_attempt",
        "_before",
        "_before_bytes",
        "_between",
        "_between_bytes",
        "_client",
        "_clock",
        "_delivered",
        "_direct",
        "_event_end",
        "_framing_bytes",
        "_ids_bytes",
        "_journal",
        "_max_bytes",
        "_most_tokens",
        "_opening",
        "_silence",
        "_skipped_bytes",
        "_take_token",
        "_transport",
        "_wait_for_room",
        "_wants_ids",
    )

    def __init__(
        self,
        journal: Journal,
        template: EventTemplate,
        head_bytes: int,
        client: Client,
        direct: SseClient | None,
        *,
        delivered: Delivered,
        silence: SilenceTimer,
        clock: Callable[[], float],
        wait_for_room: Callable[[], None],
    ) -> None:
        """`head_bytes`: of the events' head, in the place of which the client gets the stream's;
        `direct`: as of `client`; `wait_for_room`: of the relay, once the client is blocked.
        """
        assert journal.head is not None
        self._journal = journal
        self._attempt = journal.attempt
        most = journal.parsed.request.max_tokens
        self._most_tokens = _MOST_TOKENS if most is None else most
        self._client = client
        self._take_token = client.take_token
        self._direct = direct
        self._transport = None if direct is None else direct.transport
        self._delivered = delivered
        self._silence = silence
        self._clock = clock
        self._wait_for_room = wait_for_room
        self._before = template.before
        self._before_bytes = len(template.before)
        self._between = template.between
        self._between_bytes = len(template.between)
        self._after = shared(template.after + _END_OF_EVENT + _END_OF_CHUNK)
        self._after_bytes = len(self._after)
        # The bytes for the client: the opening, what lies between that and the ids, and the end.
        self._wants_ids = journal.parsed.request.return_token_ids
        data = b"" if direct is None else _DATA
        self._opening, self._skipped_bytes = b"", -len(data)
        if template.before[:head_bytes] != journal.head:
            self._opening, self._skipped_bytes = data + journal.head, head_bytes
        self._ids_bytes = template.ids_bytes
        self._event_end = b"" if self._wants_ids else template.rest
        if direct is not None:
            self._event_end = shared(self._event_end + _END_OF_EVENT + _END_OF_CHUNK)
        self._framing_bytes = len(self._opening) + len(self._event_end) - len(_END_OF_CHUNK)
        self._max_bytes = _MOST_BYTES - self._framing_bytes

    def close(self) -> None:
        """Relay nothing more: what comes next is read by the relay itself."""
        self._most_tokens = 0

    def take(self, data: bytes) -> bool:
        """Relay a read; False: it is not of the usual form, and nothing has happened."""
        size = len(data)
        if size > self._max_bytes:
            return False
        beginning = _BEGINNING_BY_WHOLE[size]
        at = len(beginning)
        if not (
            data.startswith(beginning)
            and data.startswith(self._before, at)
            and data.endswith(self._after)
        ):
            return False
        # A quote within the text would be escaped: so this is the text's end.
        text_at = at + self._before_bytes
        text_end = data.find(b'"', text_at)
        if not data.startswith(self._between, text_end) or data.find(b"\n", text_at, text_end) >= 0:
            return False
        digits = data[text_end + self._between_bytes : size - self._after_bytes]
        # JSON numbers that need no further check: natural, below 2^32.
        if not digits.isdigit() or len(digits) > 9 or digits[0] == _ZERO:
            return False
        journal, transport, direct = self._journal, self._transport, self._direct
        ids = journal.output_ids
        if (
            journal.attempt != self._attempt
            or journal.finish_reason is not None
            or len(ids) >= self._most_tokens
            or (transport is not None and transport.is_closing())
        ):
            return False
        token_id, now_s = int(digits), self._clock()
        ids.append(token_id)
        begin = at + self._skipped_bytes
        end = size - 4 if self._wants_ids else text_end + self._ids_bytes
        if transport is not None and direct is not None:
            chunk_head = _HEAD_BY_SIZE[self._framing_bytes + end - begin]
            parts = (chunk_head, self._opening, data[begin:end], self._event_end)
            transport.write(b"".join(parts))
            direct.was_silent = False
        else:
            assert self._take_token is not None
            self._take_token(token_id, self._opening + data[begin:end] + self._event_end, now_s)
        if self._client.blocked:
            self._wait_for_room()
        self._silence.heard_s = self._delivered.last_s = now_s
        self._delivered.tokens += 1
        # As `Journal.wrote`. The event that the template was learnt from has been written.
        last_s, journal.last_write_s = journal.last_write_s, now_s
        assert last_s is not None
        if now_s - last_s > journal.longest_gap_s:
            journal.longest_gap_s = now_s - last_s
        return True
