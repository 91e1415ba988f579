"""The way of the usual token: shorter, and the same in everything that can be seen."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench_proxy.texts import TEXTS as TEXTS_OF_TOKENS
from experiments.bench_proxy.texts import Text
from kvrs.core.fleet.silence import Delivered, SilenceTimer
from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.openai.chunks import ChatChunkChoice, ChatDelta, Choice, sse
from kvrs.proxy.streams.open_stream import ClientGoneError, SseClient, TakeToken
from kvrs.proxy.streams.relay import Relay
from kvrs.proxy.wire.events import head_of
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, read
from kvrs.proxy.wire.upstream import HttpResponse, Need, Shortcut, Upstream, end_of_chunk
from kvrs_testkit.answered import AnsweredAttempt
from kvrs_testkit.examples import examples

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SETTINGS = examples(400)
TEXTS = st.text(max_size=20) | st.sampled_from(
    ['"', "\\", '",', '\\",', ',"token_ids":[1]', "]}", "\n", "\r\n\r\n", "", "x" * 3000]
)


@pytest.fixture
def loop_of_a_test() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Wire:
    """The part of a client's connection that a stream uses."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_lost = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.is_lost


class Client:
    """Frames events as a response in chunks does."""

    take_token: TakeToken | None = None

    def __init__(self, wire: Wire, *, is_direct: bool) -> None:
        self.wire = wire
        self.blocked = False
        self.was_silent = True
        self.transport = wire
        self.direct = cast(SseClient, self) if is_direct else None

    def send(self, events: Sequence[bytes]) -> None:
        if self.wire.is_lost:
            return
        self.was_silent = False
        for data in map(sse, events):
            self.wire.write(b"%x\r\n%b\r\n" % (len(data), data))

    def when_free(self, resume: Callable[[], None]) -> None:
        pass


class Way:
    """That of a stream's bytes from the engine's connection to the client's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        journal: Journal,
        *,
        is_short: bool,
        is_plain: bool = False,
    ) -> None:
        self.journal = journal
        self.wire = Wire()
        self.client = Client(self.wire, is_direct=is_short)
        self.delivered, self.silence = Delivered(), SilenceTimer(0.0)
        self.reads = 0  # Each comes later after the one before it than that did.
        self.taken = 0  # Tokens that were shortened.
        self.said: list[str] = []
        self.relay = Relay(
            journal,
            self.client,
            AnsweredAttempt(
                journal.attempt, lambda: float(self.reads**2), self.delivered, self.silence
            ),
            exact=not is_plain,
        )
        self.relay.flow = cast(Any, self)
        self._response = HttpResponse(loop)
        self._response.feed(HEAD)

    def pause(self) -> None:
        self.said.append("pause")

    def resume(self) -> None:
        self.said.append("resume")

    def read(self, data: bytes) -> None:
        """Feed data like the connection of the call, to the end or a fault."""
        if self.said:
            return
        self.reads += 1
        while (shortcut := self._shortcut) is not None:
            before = len(self.journal.output_ids)
            data = shortcut(data)
            self.taken += len(self.journal.output_ids) - before
            if not data:
                return
            end = end_of_chunk(data)
            if not 0 < end < len(data) - 64:
                break
            self._read(data[:end])
            data = data[end:]
            if self.said:
                return
        self._read(data)

    @property
    def _shortcut(self) -> Shortcut | None:
        return self.relay.shortcut if self._response.is_between_chunks else None

    def _read(self, data: bytes) -> None:
        try:
            if (body := self._response.feed(data)) and self.relay.feed(body) is not Need.MORE:
                self.said.append("complete")
        except (UpstreamError, ClientGoneError) as error:
            self.said.append(str(error))

    @property
    def seen(self) -> tuple[object, ...]:
        journal = self.journal
        return (
            self.wire.sent,
            self.said,
            self.client.was_silent,
            journal.output_ids.tolist(),
            journal.finish_reason,
            (journal.first_write_s, journal.last_write_s, journal.longest_gap_s),
            self.delivered,
            (journal.text_sent, texts_of(journal), journal.exactness.replayed, journal.inexact),
            (journal.answer_from, journal.only_replay),
        )


def event(
    text: str, ids: list[int] | None, finish: str | None = None, *, name: str, is_chat: bool
) -> bytes:
    token_ids = msgspec.UNSET if ids is None else ids
    choice = (
        ChatChunkChoice(delta=ChatDelta(content=text), finish_reason=finish, token_ids=token_ids)
        if is_chat
        else Choice(text=text, finish_reason=finish, token_ids=token_ids)
    )
    head = {"id": name, "created": 1, "model": "m"}
    return msgspec.json.encode(head | {"choices": [choice], "object": "o"})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def journal_of(*, is_chat: bool, wants_ids: bool = False, max_tokens: int = 50) -> Journal:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": [1]}
    body = {"max_tokens": max_tokens, "stream": True, "return_token_ids": wants_ids} | prompt
    parsed = read(CHAT if is_chat else COMPLETIONS, msgspec.json.encode(body))
    return Journal(StreamId("1"), parsed, arrived_s=0.0, prompt_ids=[1], attempt=1)


def texts_of(journal: Journal) -> dict[str, str] | None:
    parts = journal.parts
    return None if parts is None else {name: parts.text(name) for name in parts.names()}


EVENTS = st.tuples(TEXTS, st.integers(0, 1 << 30))


@SETTINGS
@given(
    is_plain=st.booleans(),
    is_chat=st.booleans(),
    wants_ids=st.booleans(),
    is_later=st.booleans(),
    events=st.lists(EVENTS, max_size=8),
    joined=st.sets(st.integers(0, 8)),
    max_tokens=st.integers(1, 10),
)
def test_the_short_way_gives_what_the_long_one_gives(
    is_plain: bool,
    is_chat: bool,
    wants_ids: bool,
    is_later: bool,
    events: list[tuple[str, int]],
    joined: set[int],
    max_tokens: int,
) -> None:
    """Bytes for the client, ids in the journal, faults: wherever reads end."""
    reads = [chunk(sse(event("a", [7], name="name", is_chat=is_chat)))] * 2
    for number, (text, token_id) in enumerate(events):
        data = chunk(sse(event(text, [token_id], name="name", is_chat=is_chat)))
        if number in joined:
            reads[-1] += data
        else:
            reads.append(data)

    def journal() -> Journal:
        made = journal_of(is_chat=is_chat, wants_ids=wants_ids, max_tokens=max_tokens)
        if is_later and not is_plain:
            made.output_ids.append(5)
            made.head = head_of(event("", None, name="first", is_chat=is_chat))
        return made

    check_both_ways(journal, reads, is_plain=is_plain)


def check_both_ways(
    journal: Callable[[], Journal], reads: Sequence[bytes], *, is_plain: bool = False
) -> Way:
    """The short way, when it has done what the long one does."""
    loop = asyncio.new_event_loop()
    short, long = (
        Way(loop, journal(), is_short=is_short, is_plain=is_plain) for is_short in (True, False)
    )
    loop.close()
    for data in reads:
        short.read(data)
        long.read(data)
    assert short.seen == long.seen
    assert long.taken == 0
    return short


PARTS = ("content", "reasoning", "reasoning_content", "arguments", "other arguments", "nothing")
DELTAS = st.tuples(st.sampled_from(PARTS), TEXTS, st.integers(1, 1 << 30))


def delta_event(part: str, text: str, token_id: int, finish: str | None = None) -> bytes:
    """An event of a chat in vLLM's form."""
    delta: dict[str, Any] = {part: text}
    if part.endswith("arguments"):
        call = {"index": int(part != "arguments"), "function": {"arguments": text}}
        delta = {"tool_calls": [call]}
    if part == "nothing":
        delta = {}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "name", "object": "o", "created": 1, "model": "m"}
    return msgspec.json.encode(head | {"choices": [choice | {"token_ids": [token_id]}]})


@SETTINGS
@given(
    deltas=st.lists(DELTAS, max_size=12),
    repeats=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 6000), max_size=6),
    is_plain=st.booleans(),
    wants_ids=st.booleans(),
)
def test_parts_of_a_message_are_counted_as_the_whole_decode_counts_them(
    deltas: list[tuple[str, str, int]],
    repeats: int,
    cuts: list[int],
    is_plain: bool,
    wants_ids: bool,
) -> None:
    """Text, reasoning and the arguments of each call, with any characters and in any order."""
    first = chunk(sse(delta_event("content", "", 3)))
    data = b"".join(chunk(sse(delta_event(*delta))) for delta in deltas for _ in range(repeats))
    last = chunk(sse(delta_event("content", "", 4, "stop")) + b"data: [DONE]\n\n")
    data = first + data + last + b"0\r\n\r\n"
    at = sorted({0, len(first), *(cut for cut in cuts if cut < len(data)), len(data)})

    check_both_ways(
        lambda: journal_of(is_chat=True, wants_ids=wants_ids),
        [data[begin:end] for begin, end in pairwise(at)],
        is_plain=is_plain,
    )


def events_of(text: Text) -> list[bytes]:
    """Events of a vLLM, each with a line of the text."""
    kind = "chat.completion.chunk" if text.is_chat else "text_completion"
    more = "" if text.is_chat else ',"stop_reason":null'
    return [
        f'{{"id":"name","object":"{kind}","created":1,"model":"m","choices":[{{"index":0,{line},'
        f'"logprobs":null,"finish_reason":null{more},"token_ids":[{number}]}}]}}'.encode()
        for number, line in enumerate(text.lines, 1)
    ]


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("text", TEXTS_OF_TOKENS, ids=[text.name for text in TEXTS_OF_TOKENS])
def test_reads_may_be_cut_at_every_byte(text: Text, is_plain: bool) -> None:
    """Bytes, ids, counted characters and the journal are the same at every cut."""
    some = [chunk(sse(data)) for data in events_of(text)[1:6]]
    data = b"".join(some)

    def journal() -> Journal:
        return journal_of(is_chat=text.is_chat)

    for cut in range(len(data)):
        check_both_ways(journal, [data[:cut], data[cut:]], is_plain=is_plain)
        check_both_ways(journal, [*some[:4], data[:cut], data[cut:]], is_plain=is_plain)


@pytest.mark.parametrize("per_read", [1, 3, 20])
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("text", TEXTS_OF_TOKENS, ids=[text.name for text in TEXTS_OF_TOKENS])
def test_nearly_all_tokens_are_taken(text: Text, is_plain: bool, per_read: int) -> None:
    """The short way takes every kind of text, from a plain vLLM too, and those behind an unusual
    event, as the name of a tool call is, in one read with it.
    """
    chunks = [chunk(sse(data)) for data in events_of(text) * 4]
    reads = [*chunks[:4]]
    reads += [
        b"".join(chunks[first : first + per_read]) for first in range(4, len(chunks), per_read)
    ]

    way = check_both_ways(
        lambda: journal_of(is_chat=text.is_chat, max_tokens=5000), reads, is_plain=is_plain
    )

    assert len(way.journal.output_ids) == len(chunks)
    assert way.taken >= 0.95 * len(chunks)


USUAL = sse(event("Q", [77], name="name", is_chat=False))
CHANGES = [
    *(
        (b"Q", text)
        for text in (b"\n", b"\n\n", b"a\r\n\r\nb", b'"', b'\\"', b"\\", b"\xff", b"\\u")
    ),
    *((b"[77", b"[" + ids) for ids in (b"077", b"-7", b" 7", b"+7", b"7.0", b"7e1", b'"7"', b"")),
    *(
        (b"[77", b"[" + ids)
        for ids in (b"4294967295", b"4294967296", b"0", b"7,8", b"null", b"7_7")
    ),
    (b"null", b'"stop"'),
    (b'"finish_reason":null', b'"finish_reason":"no"'),
    (b"data: ", b"data:"),
    (b"data: ", b"data:  "),
    (b"data: ", b"event: "),
    (b'"m"', b'"n"'),
    (b'"name"', b'"other"'),
    (b'"index":0', b'"index":1'),
    (b"}\n\n", b"}\r\n\r\n"),
    (b"}\n\n", b"}\n"),
    (b"}\n\n", b"}\n\n "),
    (b"}\n\n", b'}\n\ndata: {"error":"x"}\n\n'),
    (b"}\n\n", b"}\n\ndata: [DONE]\n\n"),
]
FRAMES = [
    *((b"\r\n", mark) for mark in (b"\n", b";x\r\n", b"\r\n ", b"0\r\n", b"\r\n\r\n")),
    (b"data", b"dat"),
    (b"data", b"Data"),
    (chunk(USUAL)[:2], b"%x" % (len(USUAL) - 1)),
    (chunk(USUAL)[:2], b"%x" % (len(USUAL) + 1)),
    (chunk(USUAL)[:2], b"+9"),
    (b"\n\n\r\n", b"\n\n\n\n"),
    (b"\n\n\r\n", b"\n\n"),
    (b"\n\n\r\n", b"\n\n\r\n\r\n"),
    (b"\n\n\r\n", b"\n\n\r\n0\r\n\r\n"),
]


@pytest.mark.parametrize("name", ["b", "name", "a longer name"])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_head_of_another_length_than_the_first_event_s_is_cut_where_it_ends(
    name: str, is_later: bool
) -> None:
    """The form of a stream's events is learnt from later ones than the first."""

    def journal() -> Journal:
        made = journal_of(is_chat=False)
        if is_later:
            made.output_ids.append(5)
            made.head = head_of(event("", None, name="first", is_chat=False))
        return made

    first = chunk(sse(event("a", [7], name="name", is_chat=False)))
    later = chunk(sse(event("b", [8], name=name, is_chat=False)))

    check_both_ways(journal, [first, later, later, later])


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("wants_ids", [False, True])
@pytest.mark.parametrize(
    "unusual",
    [
        *(chunk(USUAL.replace(*change)) for change in CHANGES),
        *(chunk(USUAL).replace(*change, 1) for change in FRAMES),
        chunk(USUAL).upper(),
        b"0" + chunk(USUAL),
        *(chunk(USUAL)[:size] for size in (1, 3, 20, -30, -3, -1)),
    ],
)
def test_the_short_way_takes_nothing_that_the_long_one_would_not(
    unusual: bytes, wants_ids: bool, is_plain: bool
) -> None:
    """An engine's events and frames are not believed because those before them were plain."""
    usual = chunk(USUAL)

    check_both_ways(
        lambda: journal_of(is_chat=False, wants_ids=wants_ids),
        [usual, usual, usual, unusual, usual, usual],
        is_plain=is_plain,
    )
    check_both_ways(
        lambda: journal_of(is_chat=False, wants_ids=wants_ids),
        [usual, usual, usual, usual + unusual + usual, usual],
        is_plain=is_plain,
    )


@pytest.mark.parametrize("is_plain", [True, False])
def test_the_usual_tokens_are_taken(
    loop_of_a_test: asyncio.AbstractEventLoop, is_plain: bool
) -> None:
    """All but the event from which their form is learnt; and of a client that does not read none
    are lost.
    """
    way = Way(loop_of_a_test, journal_of(is_chat=False), is_short=True, is_plain=is_plain)
    for number in range(20):
        way.read(chunk(sse(event(f" {number}", [number + 5], name="name", is_chat=False))))

    assert way.taken == 19
    assert way.journal.output_ids.tolist() == list(range(5, 25))
    assert way.delivered == Delivered(20.0**2, 20)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attempt": 2}, "complete"),
        ({"finish_reason": "stop"}, "went on after its finish reason"),
    ],
)
def test_a_token_that_must_not_come_is_left_to_the_long_way(
    loop_of_a_test: asyncio.AbstractEventLoop, change: dict[str, Any], said: str
) -> None:
    """The token is of a superseded attempt, or behind the end."""
    way = Way(loop_of_a_test, journal_of(is_chat=False), is_short=True)
    usual = chunk(sse(event("a", [7], name="name", is_chat=False)))
    for _ in range(3):
        way.read(usual)
    sent = way.wire.sent
    for name, value in change.items():
        setattr(way.journal, name, value)

    way.read(usual)

    assert way.taken == 2
    assert way.said == [said]
    assert way.wire.sent == sent
    assert len(way.journal.output_ids) == 3


@pytest.mark.parametrize("is_plain", [False, True])
async def test_a_token_takes_few_calls_from_connection_to_client(is_plain: bool) -> None:
    """The CPU that a token costs in Python depends on the number of calls."""
    loop, wire = asyncio.get_running_loop(), Wire()
    way = Way(loop, journal_of(is_chat=False), is_short=True, is_plain=is_plain)
    upstream = Upstream(loop, lambda *_: None)
    upstream.connection_made(cast(asyncio.Transport, wire))
    await upstream.send(b"request", b"", way.relay)
    usual = chunk(sse(event("a", [7], name="name", is_chat=False)))
    for data in (HEAD, usual, usual, usual):
        upstream.data_received(data)
    called: list[str] = []

    def note(frame: FrameType, what: str, _: Any) -> None:
        if what == "call" and frame.f_code.co_filename != __file__:
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    upstream.data_received(usual)
    sys.setprofile(None)

    assert called == ["Upstream.data_received", "TokenPath.take", "EventTemplate.read"]
    assert len(way.journal.output_ids) == 4


def test_a_client_without_room_stops_the_engines_bytes(
    loop_of_a_test: asyncio.AbstractEventLoop,
) -> None:
    """On the short way as on the long one; and one that has gone gets nothing."""
    way = Way(loop_of_a_test, journal_of(is_chat=False), is_short=True)
    usual = chunk(sse(event("a", [7], name="name", is_chat=False)))
    for _ in range(3):
        way.read(usual)

    way.wire.is_lost = True
    way.read(usual)
    way.wire.is_lost, way.client.blocked = False, True
    way.read(usual)

    assert way.taken == 3
    assert way.said == ["pause"]


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("kind", ["an empty reasoning", "no ids"])
def test_an_event_that_begins_nothing_teaches_no_form(kind: str, is_plain: bool) -> None:
    """vLLM sends an empty reasoning where its first token is a part of a character; some engines
    send a text with an empty list of ids.
    """
    opening = delta_event("content", "", 1).replace(b',"token_ids":[1]', b"")
    part, first = "reasoning", delta_event("reasoning", "", 5)
    if kind == "no ids":
        part, first = "content", delta_event("content", "a", 5).replace(b"[5]", b"[]")
    events = [opening, first, *(delta_event(part, text, 6) for text in ("a", "b", "c", "d"))]
    way = check_both_ways(
        lambda: journal_of(is_chat=True), [chunk(sse(each)) for each in events], is_plain=is_plain
    )
    assert way.taken > 0
