"""Bytes of events: split wherever chunks end, trimmed by offset, relayed once."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.openai.chunks import (
    CHUNK,
    ChatChunkChoice,
    ChatDelta,
    Choice,
    Completion,
    FunctionCall,
    Logprobs,
    ToolCall,
    error_body,
    sse,
)
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.streams.continuation import EngineText
from kvrs.proxy.streams.open_stream import SseClient, TakeToken
from kvrs.proxy.streams.relay import Relay
from kvrs.proxy.wire.errors import NotANumberError
from kvrs.proxy.wire.events import (
    PROMPT_TOKEN_IDS,
    TOKEN_IDS,
    EventSplitter,
    EventTemplate,
    cut_list,
    head_of,
    next_token_ids,
    number_choice,
)
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs.proxy.wire.upstream import Need
from kvrs_testkit.allocations import allocated_bytes
from kvrs_testkit.answered import AnsweredAttempt
from kvrs_testkit.examples import examples

IDS = st.lists(st.integers(0, 1 << 20), max_size=5)
# Texts that look like what is searched for, quotes, backslashes and all.
TEXTS = st.text(max_size=20) | st.lists(
    st.sampled_from(
        [
            ',"token_ids":[1]',
            ',"finish_reason":null',
            ',"choices":[',
            "\\",
            '"',
            "]",
            "}",
            ":",
            "é",
            "x",
            ",",
        ]
    ),
    max_size=8,
).map("".join)
SETTINGS = examples(300)


def event(
    text: str,
    ids: list[int] | None,
    prompt_ids: list[int] | None = None,
    finish: str | None = None,
    **head: str,
) -> bytes:
    choice = Choice(text=text, finish_reason=finish, stop_reason=text if finish else None)
    if prompt_ids is not None:
        choice.prompt_token_ids = prompt_ids
    if ids is not None:
        choice.token_ids = ids
    return msgspec.json.encode(
        Completion(head.get("id", "cmpl-1"), 1, head.get("model", "m"), [choice])
    )


@SETTINGS
@given(text=TEXTS, model=TEXTS, ids=IDS, prompt_ids=IDS, finish=st.sampled_from([None, "stop"]))
def test_cutting_ids_equals_encoding_without_them(
    text: str, model: str, ids: list[int], prompt_ids: list[int], finish: str | None
) -> None:
    """For any text, the cut removes the field and nothing else."""
    data = event(text, ids, prompt_ids, finish, model=model)

    assert cut_list(data, TOKEN_IDS) == event(text, None, prompt_ids, finish, model=model)
    assert cut_list(data, PROMPT_TOKEN_IDS) == event(text, ids, None, finish, model=model)
    assert cut_list(event(text, None, finish=finish, model=model), TOKEN_IDS) == event(
        text, None, finish=finish, model=model
    )


def chat_event(text: str, ids: list[int], finish: str | None = None) -> bytes:
    choice = ChatChunkChoice(
        delta=ChatDelta(content=text), finish_reason=finish, token_ids=ids or msgspec.UNSET
    )
    chunk = {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [choice], "object": "c"}
    return msgspec.json.encode(chunk)


# What another event of the same stream may differ in, and what only looks like an id.
_CHANGES = [
    (b"", b""),
    (b"null", b'"stop"'),
    (b'"logprobs":null', b'"logprobs":{"tokens":["a"]}'),
    (b'"model":"m"', b'"model":"n"'),
    (b'"cmpl-1"', b'"cmpl-2"'),
    (b"]}]", b',8]}],"usage":null'),
    *(
        (TOKEN_IDS, TOKEN_IDS + more)
        for more in (b"-", b"0", b"+", b" ", b"1_", b"4294967", b'"', b"1.")
    ),
    (b'"index":0', b'"text":"","index":0'),
]


@SETTINGS
@given(
    is_chat=st.booleans(),
    first=st.tuples(TEXTS, IDS),
    texts=st.lists(st.tuples(TEXTS, st.integers(0, 1 << 33)), max_size=4),
    change=st.sampled_from(_CHANGES),
)
def test_a_template_reads_what_the_exact_reader_reads_or_nothing(
    is_chat: bool,
    first: tuple[str, list[int]],
    texts: list[tuple[str, int]],
    change: tuple[bytes, bytes],
) -> None:
    """Events that do not fit it to the byte are left to the exact reader."""
    make = chat_event if is_chat else event
    learnt = make(*first)
    template = EventTemplate.of(learnt, len(head_of(learnt))) if next_token_ids(learnt) else None

    for text, token_id in texts:
        data = make(text, [token_id]).replace(*change)
        found = None if template is None else template.read(b"before" + data, 6, 6 + len(data))
        if found is not None:
            assert template is not None
            token_id, text_end, read = found
            assert next_token_ids(data) == ([token_id], cut_list(data, TOKEN_IDS))
            ids_at = text_end - 6 + template.ids_bytes
            assert cut_list(data, TOKEN_IDS) == data[:ids_at] + template.after[1:]
            choices = CHUNK.decode(data).choices or []
            assert [read] == [each.plain_text for each in choices] == [text]


@pytest.mark.parametrize(
    "unusual",
    [
        (b'"text":"a"', b'"text":"a","delta":{"reasoning":"b"}'),
        (b'"text":"a"', b'"text":"","delta":{"content":"b"}'),
        (b'"finish_reason":null', b'"finish_reason":"stop"'),
        (b'"token_ids":[1]', b'"token_ids":[1],"finish_reason":"stop"'),
        (b'"text":"a"', b'"text":"a"}, {"text":"b"'),
    ],
)
def test_an_event_that_adds_to_two_parts_is_no_template(unusual: tuple[bytes, bytes]) -> None:
    """Characters of the other part would not be counted."""
    plain = event("a", [1])
    data = plain.replace(*unusual)

    assert data != plain
    assert EventTemplate.of(plain, len(head_of(plain))) is not None
    assert EventTemplate.of(data, len(head_of(data))) is None


def test_a_template_fits_the_plain_events_of_its_stream() -> None:
    """Those that are not plain do not fit."""
    for make in (event, chat_event):
        learnt = make("a", [1])
        template = EventTemplate.of(learnt, len(head_of(learnt)))
        assert template is not None

        def read(data: bytes, template: EventTemplate = template) -> str | None:
            found = template.read(data, 0, len(data))
            return None if found is None else found[2]

        assert read(make(" word", [70000])) == " word"
        assert read(make("", [7])) == ""
        assert read(make('"\\\n\u20ac\U0001f600', [7])) == '"\\\n\u20ac\U0001f600'
        assert read(make("a", [1, 2])) is None
        assert read(make("a", [1], finish="stop")) is None


@SETTINGS
@given(text=TEXTS, model=TEXTS, ids=IDS, finish=st.sampled_from([None, "stop"]))
def test_ids_and_head_are_found_by_offset(
    text: str, model: str, ids: list[int], finish: str | None
) -> None:
    """A plain event gives its ids; one that finishes is left to the full decoder."""
    data = event(text, ids, finish=finish, model=model)

    without_ids = event(text, None, finish=finish, model=model)
    assert next_token_ids(data) == ((ids, without_ids) if ids and finish is None else None)
    assert msgspec.json.decode(head_of(data) + b"}") == {
        "id": "cmpl-1",
        "created": 1,
        "model": model,
    }


@SETTINGS
@given(text=TEXTS, index=st.integers(0, 15), position=st.integers(0, 3))
def test_a_choice_is_numbered_and_nothing_else(text: str, index: int, position: int) -> None:
    """Tool calls have an index too; texts may look like one. Both orders of keys that engines use
    are known.
    """
    calls = [ToolCall("c", FunctionCall("f", text), index=position)]
    delta = ChatDelta(content='{"index":0,"delta":' + text, tool_calls=calls)

    def chat(number: int) -> bytes:
        return msgspec.json.encode([ChatChunkChoice(index=number, delta=delta, token_ids=[0])])

    def completion(number: int) -> bytes:
        logprobs = Logprobs([text], [0.0], [{"index": 0.0}], [0])
        return msgspec.json.encode(
            [Choice(text=text + ',"index":0,"logprobs":', index=number, logprobs=logprobs)]
        )

    def foreign(number: int) -> bytes:
        return b'[{"index":%d,"text":%s,"logprobs":null}]' % (number, msgspec.json.encode(text))

    for encode in (chat, completion, foreign):
        assert number_choice(encode(0), index) == encode(index)


@SETTINGS
@given(
    texts=st.lists(TEXTS, max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=10),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    beside=st.lists(
        st.sampled_from([b"", b"\n", b"event: x\n", b"id: 1\n", b": c\n", b"\n\n"]), min_size=5
    ),
)
def test_events_are_whole_wherever_chunks_end(
    texts: list[str], cuts: list[int], newline: bytes, beside: list[bytes]
) -> None:
    """TCP promises no boundaries; and an event may have more lines than its data, and blank ones
    before it.
    """
    payloads = [event(text, [1]) for text in texts]
    events = b"".join([more + sse(data) for data, more in zip(payloads, beside, strict=False)])
    stream = (b": a comment\n\n" + events).replace(b"\n", newline)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = EventSplitter()

    got = [
        payload for start, end in pairwise(edges) for payload in splitter.feed(stream[start:end])
    ]

    assert got == payloads


def split(stream: bytes, cuts: Iterable[int], limit: int) -> tuple[list[bytes], str | None]:
    """The payloads of a stream that comes in pieces which end at `cuts`, and the error that ends
    it; of the payloads before an error those of earlier pieces.
    """
    splitter, payloads = EventSplitter(limit), list[bytes]()
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    try:
        for start, end in pairwise(edges):
            payloads += splitter.feed(stream[start:end])
    except UpstreamError as error:
        return payloads, str(error)
    return payloads, None


@SETTINGS
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *(
                    b"\r",
                    b"\n",
                    b"\r\n",
                    b"\n\n",
                    b"\r\r",
                    b"data: {}\n\n",
                    b'data: {"a":1}\r\n\r\n',
                ),
                *(b"data:", b"x" * 9, b": c\n", b"\xef\xbb\xbf", b"data: 1\rdata: 2\r\r"),
            ]
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(1, 120), max_size=12),
    # An event that is one whole read is smaller than any limit.
    limit=st.integers(8, 60),
)
def test_any_division_of_a_stream_brings_the_same_events_or_the_same_error(
    pieces: list[bytes], cuts: list[int], limit: int
) -> None:
    """Byte order mark, line ends of two bytes and the limit do not depend on where reads end."""
    stream = b"".join(pieces)

    whole, divided = split(stream, [], limit), split(stream, cuts, limit)
    by_bytes, error = split(stream, range(1, len(stream)), limit)

    assert divided[1] == whole[1] == error
    assert divided[0] == by_bytes[: len(divided[0])]
    assert error is not None or whole[0] == divided[0] == by_bytes


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_a_byte_of_a_long_event_costs_no_more_than_one_of_a_short_event(end: bytes) -> None:
    """A read costs its own bytes: an engine that sends a long event byte by byte delays nobody."""
    event = b'data: {"a":"' + b"x" * 4_000_000 + b'"}'
    splitter = EventSplitter()
    splitter.feed(event[:-1000])

    moved_bytes = allocated_bytes(splitter.feed, [event[at:][:1] for at in range(-1000, 0)])
    payloads = splitter.feed(end * 2)

    assert moved_bytes < 2 * len(event)  # The buffer may have grown once.
    assert payloads == [event[6:]]


def test_an_event_of_many_lines_is_refused() -> None:
    """Lines are split at the end of the event, all of them in one call."""
    splitter = EventSplitter()
    splitter.feed(b"data: 1\n" * 10_001)

    with pytest.raises(UpstreamError, match="more than 10000 lines"):
        splitter.feed(b"data: 1\n\n")


def test_data_in_several_lines_is_one_line_of_json() -> None:
    """So that it is one line of the client's event too."""
    splitter = EventSplitter()

    assert splitter.feed(b'data: {"a":\ndata: 1}\nid: 7\n\nid: 8\n\n') == [b'{"a": 1}']


def test_the_ids_of_a_long_prompt_fit_into_an_event() -> None:
    """Engines repeat them in their first event; a stream must not fail at every attempt because its
    prompt is long.
    """
    first = event("a", [1], list(range(100_000, 400_000)))
    splitter = EventSplitter()
    sent = sse(first)

    got = [
        payload
        for at in range(0, len(sent), 65_536)
        for payload in splitter.feed(sent[at : at + 65_536])
    ]

    assert len(first) > 2_000_000
    assert got == [first]


def test_an_endless_event_is_refused() -> None:
    """An engine cannot fill the proxy's memory with one event."""
    splitter = EventSplitter(max_event_bytes=100)

    with pytest.raises(UpstreamError, match="more than 100 bytes"):
        splitter.feed(b"data: " + b"x" * 200)


class Collector:
    blocked = False
    direct: SseClient | None = None
    take_token: TakeToken | None = None

    def __init__(self) -> None:
        self.events: list[bytes] = []

    def send(self, events: Sequence[bytes]) -> None:
        self.events += events

    def when_free(self, resume: Callable[[], None]) -> None:
        raise AssertionError("it is never blocked")


def journal_of(max_tokens: int = 10) -> Journal:
    body = msgspec.json.encode({"prompt": [1], "max_tokens": max_tokens, "stream": True})
    parsed = read(COMPLETIONS, body)
    return Journal(
        StreamId("1"), parsed, arrived_s=0.0, wants_usage=True, prompt_ids=[1], attempt=1
    )


def relay(
    journal: Journal, *chunks: bytes, attempt: int = 1, client: Collector | None = None
) -> list[bytes]:
    client = client or Collector()
    copier = Relay(journal, client, AnsweredAttempt(attempt))
    for chunk in chunks:
        if copier.feed(chunk) is not Need.MORE:
            break
    copier.check_end()
    return client.events


def test_a_late_token_of_an_older_attempt_is_dropped() -> None:
    """One writer per stream: the journal's attempt."""
    journal, client = journal_of(), Collector()
    copier = Relay(journal, client, AnsweredAttempt())
    copier.feed(sse(event("a", [1])))
    journal.attempt = 2

    need = copier.feed(sse(event("late", [2])))

    assert need is Need.NOTHING
    assert journal.output_ids.tolist() == [1]
    assert len(client.events) == 1


def test_an_attempt_has_resumed_once_its_first_token_is_written() -> None:
    """The books of the core take no part of the time to the token."""
    journal, told = journal_of(), list[str]()

    class Telling(Collector):
        def send(self, events: Sequence[bytes]) -> None:
            told.append("sending")
            super().send(events)

    copier = Relay(journal, Telling(), AnsweredAttempt(told=told))
    for chunk in (sse(event("a", [1])), sse(event("b", [2], finish="stop")), sse(b"[DONE]")):
        copier.feed(chunk)

    assert told == ["sending", "resumed", "sending", "completed"]


class Tap:
    """A source that notes whether it may flow."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def pause(self) -> None:
        self.said.append("pause")

    def resume(self) -> None:
        self.said.append("resume")


def test_a_client_that_does_not_read_stops_the_engines_bytes_until_it_does() -> None:
    """The proxy holds no more of a stream than its client's buffer; and a client that reads again
    does not wake the connection of an attempt that is over.
    """
    journal, tap = journal_of(), Tap()
    waiting: list[Callable[[], None]] = []

    class Slow(Collector):
        blocked = True

        def when_free(self, resume: Callable[[], None]) -> None:
            waiting.append(resume)

    copier = Relay(journal, Slow(), AnsweredAttempt())
    copier.flow = cast(Any, tap)
    copier.feed(sse(event("a", [1])))
    said = list(tap.said)
    waiting[0]()
    copier.leave()
    waiting[0]()

    assert said == ["pause"]
    assert tap.said == ["pause", "resume"]


def test_an_error_event_tells_of_logits_that_are_no_numbers() -> None:
    event = sse(error_body("got nan", kind="server_error", code="not_a_number"))

    with pytest.raises(NotANumberError, match=r"error event \(server_error, not_a_number\)$"):
        relay(journal_of(), event)


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        (sse(b"[DONE]"), "without a finish reason"),
        (sse(event("x", [1], finish="abort")) + sse(b"[DONE]"), "finished with 'abort'"),
        (sse(event("x", [1])) + sse(event("x", None)), "without token ids behind"),
        (sse(event("x", list(range(11)))), "more than max_tokens"),
        (sse(event("x", [1], finish="stop")) + sse(event("y", [2])), "went on after its finish"),
        (
            sse(error_body("boom", kind="overloaded")) + sse(b"[DONE]"),
            r"error event \(overloaded\)$",
        ),
        (sse(b"[1]"), "not a completion chunk"),
        (sse(event("x", [1])), "ended without"),
        (sse(event("x", [1]).replace(b"[1]", b'["a"]')), "not a list of integers"),
    ],
)
def test_what_an_engine_must_not_do_is_a_failure(chunk: bytes, fault: str) -> None:
    """`[DONE]` is not success, and an engine is not believed."""
    with pytest.raises(UpstreamError, match=fault):
        relay(journal_of(), chunk)


def test_tokens_before_a_fault_in_the_same_chunk_reach_the_client() -> None:
    """Journal and client never disagree."""
    journal, client = journal_of(), Collector()

    with pytest.raises(UpstreamError):
        relay(journal, sse(event("a", [1])) + sse(b'{"error":"x"}'), client=client)

    assert journal.output_ids.tolist() == [1]
    assert len(client.events) == 1


def test_a_token_that_cannot_be_passed_on_is_not_in_the_journal() -> None:
    """Else the next attempt would go on behind it, and the client never get its text."""
    body = {"prompt": [1], "max_tokens": 10, "stream": True, "logprobs": 1}
    parsed = read(COMPLETIONS, msgspec.json.encode(body))
    journal, client = Journal(StreamId("1"), parsed, arrived_s=0.0, attempt=2), Collector()
    journal.head, journal.output_ids, journal.text_sent = head_of(event("a", [1])), packed([1]), 1
    copier = Relay(
        journal,
        client,
        AnsweredAttempt(2),
        exact=False,
        continuation=EngineText(journal),
    )

    with pytest.raises(UpstreamError, match="log probabilities"):
        copier.feed(sse(event("b", [2], finish="stop")))

    assert (journal.output_ids.tolist(), journal.text_sent, journal.finished) == ([1], 1, False)
    assert client.events == []


def test_an_empty_opening_of_a_later_attempt_is_not_passed_on() -> None:
    """The stream was opened long ago."""
    journal = journal_of()
    journal.head, journal.output_ids = head_of(event("a", [1])), packed([1])

    events = relay(
        journal, sse(event("", [], [1, 1])), sse(event("b", [2], finish="stop")), sse(b"[DONE]")
    )

    assert events == [event("b", None, finish="stop")]
