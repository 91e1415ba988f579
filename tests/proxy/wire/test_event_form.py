"""Events of the same meaning in another form: each is passed on as in the usual one."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.proxy.api.choices import ChoiceClient, Merger
from kvrs.proxy.streams.open_stream import SseClient, TakeToken
from kvrs.proxy.streams.relay import Relay
from kvrs.proxy.wire.events import (
    EventForm,
    EventSplitter,
    LacksIdsError,
    check_events,
    number_choice,
)
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, read
from kvrs.proxy.wire.upstream import Need
from kvrs_testkit.answered import AnsweredAttempt
from kvrs_testkit.examples import examples

Event = dict[str, Any]
Form = Callable[[Event], bytes]
PROMPT = [7, 8]
TEXTS = ["a", ' "b"', ',"token_ids":[1]', "token_ids", "é🙂", "\\"]


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


def stream_of(*, is_chat: bool, name: str = "cmpl-1") -> list[Event]:
    """Opening, tokens, a tool call in a chat, finish, and usage."""
    kind = "chat.completion.chunk" if is_chat else "text_completion"  # As each engine says.
    head = {"id": name, "object": kind, "created": 5, "model": "a model"}

    def one(text: str, ids: list[int] | None, finish: str | None = None, **more: Any) -> Event:
        said = {"delta": {"content": text}} if is_chat else {"text": text}
        logprobs = {"top_logprobs": [{"x": -1.0, "token_ids": -1.5}]} if ids == [22] else None
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": finish, **more}
        return head | {"choices": [choice | ({} if ids is None else {"token_ids": ids})]}

    opening = one("", None if is_chat else [])
    (opening if is_chat else opening["choices"][0])["prompt_token_ids"] = PROMPT
    events = [opening, *(one(text, [20 + place]) for place, text in enumerate(TEXTS))]
    if is_chat:
        call = {"index": 1, "id": "c", "function": {"name": "f", "arguments": '{"index":0}'}}
        events.append(one("", [30]))
        events[-1]["choices"][0]["delta"] = {"tool_calls": [call]}
    usage = {"prompt_tokens": 2, "total_tokens": 9, "completion_tokens": 7}
    return [*events, one("", [31], "stop"), head | {"choices": [], "usage": usage}]


def compact(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()


def blanks(event: Event) -> bytes:
    return json.dumps(event).encode()


def indented(event: Event) -> bytes:
    """In several lines, each of which is a line of data."""
    return json.dumps(event, indent=1).replace("\n", "\ndata: ").encode()


def _turned(value: Any, turn: Callable[[list[Any]], list[Any]]) -> Any:
    match value:
        case dict():
            return {name: _turned(each, turn) for name, each in turn([*value.items()])}
        case [{}, *_]:
            return [_turned(each, turn) for each in value]
        case _:
            return value


def reversed_keys(event: Event) -> bytes:
    made: Event = _turned(event, lambda items: items[::-1])
    return compact(made)


def sorted_keys(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":"), sort_keys=True).encode()


def ids_first(event: Event) -> bytes:
    def turn(items: list[Any]) -> list[Any]:
        return sorted(items, key=lambda item: not item[0].endswith("token_ids"))

    made: Event = _turned(event, turn)
    return compact(made)


def usage_in_the_head(event: Event) -> bytes:
    return compact({"usage": None} | event)


def escaped_keys(event: Event) -> bytes:
    return (
        compact(event)
        .replace(b'"token_ids":[2', b'"token\\u005fids":[2')
        .replace(b'"prompt_token_ids":[7', b'"prompt\\u005ftoken_ids":[7')
    )


def object_at_the_end(event: Event) -> bytes:
    """The object behind the choices, as engines of kvrs have it, and blanks."""
    rest = {name: value for name, value in event.items() if name != "object"}
    return blanks(rest | {"object": event["object"]})


def nulls(event: Event) -> bytes:
    """Every field that vLLM knows, as versions of it write them."""
    full = event | {"system_fingerprint": None, "metrics": None}
    full["choices"] = [{"prompt_token_ids": None, "token_ids": None} | c for c in event["choices"]]
    return compact(full)


FORMS: list[Form] = [
    *(blanks, indented, reversed_keys, sorted_keys, ids_first, usage_in_the_head),
    *(escaped_keys, nulls, object_at_the_end),
]


def journal_of(*, is_chat: bool, ids: bool, each_usage: bool = False) -> Journal:
    body: Event = {"max_tokens": 20, "stream": True, "return_token_ids": ids}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": each_usage}
    body |= {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    parsed = read(CHAT if is_chat else COMPLETIONS, json.dumps(body).encode())
    return Journal(StreamId("1"), parsed, arrived_s=0.0, wants_usage=True, attempt=1)


def relayed(
    journal: Journal, events: Sequence[bytes], end: bytes = b"\n", index: int = 0, lead: bytes = b""
) -> list[Any]:
    """The events of the client, decoded."""
    client = Collector()
    journal.wants_usage = index == 0  # That of several choices is counted together.
    to = client if index == 0 else ChoiceClient(client, Merger(), index, journal, None)
    relay = Relay(journal, to, AnsweredAttempt(journal.attempt))
    for each in [*events, b"[DONE]"]:
        chunk = lead + (b"data: " + each + b"\n\n").replace(b"\n", end)
        lead = b""
        if relay.feed(chunk) is not Need.MORE:
            break
    relay.check_end()
    return [json.loads(each) for each in client.events]


def pruned(value: Any) -> Any:
    """Without what `nulls` and `usage_in_the_head` add, which is null."""
    match value:
        case dict():
            return {k: pruned(v) for k, v in value.items() if v is not None}
        case list():
            return [pruned(each) for each in value]
        case _:
            return value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("each_usage", [False, True])
def test_another_form_is_passed_on_as_the_usual_one(
    form: Form, is_chat: bool, ids: bool, index: int, each_usage: bool
) -> None:
    """To one choice or another, with and without ids, and with the counts of each event."""
    events = stream_of(is_chat=is_chat)
    usual, other = (journal_of(is_chat=is_chat, ids=ids, each_usage=each_usage) for _ in range(2))
    wanted = relayed(usual, [*map(compact, events)], index=index)

    found = relayed(other, [*map(form, events)], index=index)

    assert pruned(found) == pruned(wanted)
    assert other.output_ids == usual.output_ids
    assert [*(other.prompt_ids or ())] == PROMPT
    keys = {key for event in pruned(found) for each in event["choices"] for key in each}
    assert ("token_ids" in keys) is ids
    assert ids or "prompt_token_ids" not in {*keys, *(key for event in found for key in event)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_later_attempt_may_have_another_form(form: Form, is_chat: bool) -> None:
    """Its events get the head of the stream, whichever of the two forms either has."""
    for first, second in ((form, compact), (compact, form), (form, form)):
        journal = journal_of(is_chat=is_chat, ids=False)
        begun = [*map(first, stream_of(is_chat=is_chat)[:3])]
        with pytest.raises(UpstreamError, match="DONE"):
            relayed(journal, begun)
        journal.attempt = 2
        rest = stream_of(is_chat=is_chat, name="cmpl-of-another")[3:]
        rest[0]["prompt_token_ids"] = PROMPT

        found = relayed(journal, [*map(second, rest)])

        assert {event["id"] for event in found} == {"cmpl-1"}
        assert journal.output_ids.tolist()[:2] == [20, 21]
        assert "token_ids" not in json.dumps([event for event in found if "b" not in str(event)])


@examples(200)
@given(seeds=st.lists(st.integers(0, 1 << 30), min_size=12, max_size=12), is_chat=st.booleans())
def test_each_event_may_have_an_order_of_its_own(seeds: list[int], is_chat: bool) -> None:
    """Whatever the order of keys, at any depth, and with blanks anywhere."""
    events = stream_of(is_chat=is_chat)

    def shuffled(event: Event, seed: int) -> bytes:
        draw = random.Random(seed)
        made = _turned(event, lambda items: draw.sample(items, len(items)))
        return json.dumps(made, separators=draw.choice([(",", ":"), (" , ", " : ")])).encode()

    wanted = relayed(journal_of(is_chat=is_chat, ids=False), [*map(compact, events)])
    made = [shuffled(event, seed) for event, seed in zip(events, seeds, strict=False)]

    assert relayed(journal_of(is_chat=is_chat, ids=False), made) == wanted


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("form", [compact, indented])
def test_lines_end_in_any_way_that_the_specification_allows(end: bytes, form: Form) -> None:
    """With CR alone too, and behind a byte order mark."""
    events = stream_of(is_chat=False)
    wanted = relayed(journal_of(is_chat=False, ids=False), [*map(compact, events)])

    found = relayed(
        journal_of(is_chat=False, ids=False), [*map(form, events)], end, lead=b"\xef\xbb\xbf"
    )

    assert found == wanted


@examples(300)
@given(
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=8, max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_events_are_whole_wherever_reads_and_lines_end(
    ends: list[bytes], cuts: list[int], mark: bytes
) -> None:
    """A CR at the end of a read may be the first half of a line's end; so may a mark be cut."""
    lines = [b"data: 1", b"", b": c", b"data: 2", b"data: 3", b"", b"data:4", b""]
    for place, (before, line) in enumerate(pairwise(ends)):
        if (before, line, lines[place + 1]) == (b"\r", b"\n", b""):  # Together one end of a line.
            ends[place + 1] = b"\r\n"
    stream = mark + b"".join(line + end for line, end in zip(lines, ends, strict=True))
    edges = [0, *sorted(cuts), len(stream)]
    splitter = EventSplitter()

    found = [
        payload for start, end in pairwise(edges) for payload in splitter.feed(stream[start:end])
    ]

    assert found == [b"1", b"2 3", b"4"]


def test_the_usual_form_is_left_as_it_is() -> None:
    """No event of vLLM or of kvrs is decoded for it."""
    for is_chat, at_end in product((False, True), (False, True)):
        form = EventForm()
        for event in stream_of(is_chat=is_chat):
            if at_end:  # As engines of kvrs have it.
                event["object"] = event.pop("object")
            data = compact(event)
            assert form.usual(data) is data


def test_what_is_no_event_with_choices_is_left_as_it_is() -> None:
    """The relay says what is wrong with it."""
    form = EventForm()

    for data in (b"", b"{", b"[]", b"1", b'{"error":{}}', b'{"choices":1}', b'{"choices":[1]}'):
        assert form.usual(data) == data


def test_a_choice_is_numbered_behind_the_calls_in_it() -> None:
    """The index of a tool call stays."""
    data = b',"choices":[{"delta":{"tool_calls":[{"index":0}]},"index": 0}]}'

    numbered = json.loads(b"{" + number_choice(data, 3)[1:])

    assert numbered["choices"] == [{"delta": {"tool_calls": [{"index": 0}]}, "index": 3}]


@pytest.mark.parametrize("form", [compact, *FORMS])
def test_the_probe_takes_every_form_that_is_passed_on(form: Form) -> None:
    """It reads by the code of the relay."""
    payloads = EventSplitter().feed(
        b"".join(b"data: " + form(each) + b"\n\n" for each in stream_of(is_chat=False))
    )

    check_events([*payloads, b"[DONE]"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda events: events[1:], "without prompt_token_ids"),
        (lambda events: [*events[:3], events[-1]], "without a finish reason"),
        (lambda events: [{"choices": each["choices"]} for each in events], "without choices"),
        (lambda events: [*events, {"error": {"message": "no"}}], "error event"),
        (lambda events: [*events, {"choices": 3}], "not a completion"),
    ],
)
def test_the_probe_refuses_what_a_relay_could_not_pass_on(
    change: Callable[[list[Event]], list[Event]], says: str
) -> None:
    """Rather than every stream of clients."""
    made = [compact(each) for each in change(stream_of(is_chat=False))]

    with pytest.raises(UpstreamError, match=says):
        check_events([*made, b"[DONE]"])
    with pytest.raises(UpstreamError, match="DONE"):
        check_events([*map(compact, stream_of(is_chat=False))])
    with pytest.raises(LacksIdsError):
        check_events([b"[DONE]"])
