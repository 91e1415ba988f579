"""The new part of the events of an engine that makes known output again."""

import json
from typing import Any

import pytest

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.openai.chunks import CHUNK, ReceivedChoice
from kvrs.proxy.streams.continuation import ReplayedOutput
from kvrs.proxy.wire.errors import DifferentOutputError
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import MessageParts
from kvrs.proxy.wire.requests import CHAT, read

BODY = b'{"model":"m","messages":[{"role":"user","content":"a"}]}'


def call(index: int, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    begins = {} if name is None else {"id": f"call-{index}", "type": "function"}
    return {"index": index, **begins, "function": {"name": name, "arguments": arguments}}


def event(ids: list[int], finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids}
    return json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode()


def choice_of(data: bytes) -> ReceivedChoice:
    return (CHUNK.decode(data).choices or [])[0]


def journal_of(*events: bytes) -> Journal:
    """That of a stream of which the client has these events."""
    journal = Journal(StreamId("s"), read(CHAT, BODY, "vllm"), 0.0, prompt_ids=[1, 2], text_sent=0)
    journal.parts = MessageParts()
    for each in events:
        choice = choice_of(each)
        journal.output_ids.extend(choice.token_ids or ())
        journal.note_text(choice, len(choice.token_ids or ()))
    return journal


def news(journal: Journal, *events: bytes) -> list[dict[str, Any]]:
    replayed = ReplayedOutput(journal)
    found = []
    for each in events:
        choice = choice_of(each)
        found += [json.loads(data)["choices"][0] for data, _ in replayed.take(each, choice)]
    assert replayed.is_over
    return found


def test_events_behind_those_that_are_known_are_left_as_they_are() -> None:
    """Byte by byte, wherever the replay ends at the end of an event."""
    known, new = (event([7], content="ab"), event([8], content="c")), event([9], content="d")
    replayed = ReplayedOutput(journal_of(*known))

    taken = [replayed.take(each, choice_of(each)) for each in (*known, new)]

    assert not taken[0]
    assert not taken[1]
    ((data, _),) = taken[2]
    assert data is new


def test_an_event_across_the_cut_is_divided() -> None:
    """Its ids by their number, its text by what the client has of it: the engine before may have
    held back more of it, or less.
    """
    journal = journal_of(event([7], content="abc"))

    (new,) = news(journal, event([7, 8], content="abcde"))
    assert (new["token_ids"], new["delta"]["content"]) == ([8], "de")

    late = news(journal, event([7], content="a"), event([8], content="bcde"))
    assert [(each["token_ids"], each["delta"]["content"]) for each in late] == [([8], "de")]


def test_reasoning_and_calls_are_divided_each_by_itself() -> None:
    """A call that the client knows keeps its id; one that is new comes with its own."""
    journal = journal_of(
        event([7], reasoning="think"), event([8], tool_calls=[call(0, "put", '{"a"')])
    )

    new = news(
        journal,
        event([7], reasoning="think"),
        event([8, 9], tool_calls=[call(0, "put"), call(0, None, '{"a":1}'), call(1, "get")]),
    )

    (rest, second) = new[0]["delta"]["tool_calls"]
    assert rest["function"]["arguments"] == ":1}"
    assert "id" not in rest
    assert second["id"] == "call-1"
    assert new[0]["token_ids"] == [9]


@pytest.mark.parametrize(
    ("has", "again"),
    [
        ([event([7], tool_calls=[call(0, "put")])], event([7], tool_calls=[call(0, "put_all")])),
        (
            [event([7], reasoning="think"), event([8], content="x")],
            event([7], reasoning="thinking"),
        ),
        (
            [event([7], content="Look"), event([8], tool_calls=[call(0, "put", "{")])],
            event([7], content="Look at"),
        ),
        ([event([7], content="Look")], event([7], content="Loom")),
        (
            [event([7], tool_calls=[call(0, "put", '{"a')])],
            event([7], tool_calls=[call(0, "put", '{"b')]),
        ),
    ],
    ids=["name", "more of a thought", "more of a text", "text", "arguments"],
)
def test_equal_ids_with_another_text_are_another_output(has: list[bytes], again: bytes) -> None:
    """Parsers depend on how tokens are packed. More of a part belongs before what came since."""
    with pytest.raises(DifferentOutputError):
        news(journal_of(*has), again)


def test_nothing_is_told_before_all_that_is_known_has_come_again() -> None:
    """Text that comes earlier than before waits, and each event keeps its own ids."""
    journal = journal_of(event([7], content="a"), event([8]), event([9], content="bc"))
    replayed = ReplayedOutput(journal)

    early = [
        replayed.take(each, choice_of(each))
        for each in (event([7], content="ab"), event([8], content="cd"))
    ]
    held = replayed.take(last := event([9, 10], content="e"), choice_of(last))

    assert not any(early)
    told = [json.loads(data)["choices"][0] for data, _ in held]
    assert [(each["delta"]["content"], each["token_ids"]) for each in told] == [
        ("d", []),
        ("e", [10]),
    ]


def test_log_probabilities_are_those_of_the_new_tokens() -> None:
    given = json.loads(event([7, 8], content="ab"))
    given["choices"][0]["logprobs"] = {"content": [{"token": "a"}, {"token": "b"}]}

    (new,) = news(journal_of(event([7], content="a")), json.dumps(given).encode())

    assert new["logprobs"] == {"content": [{"token": "b"}]}


@pytest.mark.parametrize(
    "wrong",
    [
        event([8], content="x"),
        event([7], finish="stop", content=""),
        event([7])[:-1] + b',"prompt_token_ids":[1,3]}',
    ],
    ids=["token", "end", "prompt"],
)
def test_an_engine_that_makes_something_else_is_found_out(wrong: bytes) -> None:
    """Before anything of it reaches the client."""
    journal = journal_of(event([7], content="a"), event([9], content="b"))

    with pytest.raises(UpstreamError):
        news(journal, wrong)
