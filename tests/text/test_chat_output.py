"""A chat's text is split into content, reasoning and calls: once, and the same however it is
resumed.
"""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvrs.ids import StreamId
from kvrs.text.chat import ChatOutput, ChatSplitter
from kvrs.text.output import TextDelta
from kvrs_testkit.examples import examples

STREAM = StreamId("stream")
WEATHER = (
    '<tool_call>{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}</tool_call>'
)
WEATHER_ARGUMENTS = '{"city": "Zürich", "days": [1, 2]}'


def split(
    pieces: list[str], *, reasoning: bool = False, tools: bool = True, parallel: bool = True
) -> TextDelta:
    """All parts of a text that arrives in pieces."""
    splitter = ChatSplitter(STREAM, reasoning=reasoning, tools=tools, parallel_tool_calls=parallel)
    total = TextDelta("")
    for piece in pieces:
        total = total.then(splitter.feed(piece))
    return total.then(splitter.finish())


def machine(tokenizer: Tokenizer, prompt: str = "hello", stops: tuple[str, ...] = ()) -> ChatOutput:
    return ChatOutput(
        tokenizer, stops, stream=STREAM, prompt_ids=tokenizer.encode(prompt).ids, tools=True
    )


def deltas(output: ChatOutput, token_ids: list[int]) -> list[TextDelta]:
    """The deltas of the ids, and at the end that of the text that was held back."""
    found: list[TextDelta] = []
    for token_id in token_ids:
        found.append(output.feed(token_id))
        if found[-1].stopped is not None:
            return found
    return [*found, output.finish()]


def calls_of(delta: TextDelta) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in delta.tool_calls]


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("hello", "hello", "", []),
        ("<think>hm</think>hello", "hello", "hm", []),
        ("\n <think>\nhm\n</think>\n\nhello", "\n\nhello", "\nhm\n", []),
        ("a <think>hm</think>", "a <think>hm</think>", "", []),
        ("<think>a</think>b<think>c</think>", "b<think>c</think>", "a", []),
        ("<think>never closed", "", "never closed", []),
        ("<thin", "<thin", "", []),
        (WEATHER, "", "", [("weather", WEATHER_ARGUMENTS)]),
        (f"<think>x</think>\n\n{WEATHER}\n", "", "x", [("weather", WEATHER_ARGUMENTS)]),
        (
            f"Let me see.\n{WEATHER}\n{WEATHER}",
            "Let me see.\n",
            "",
            [("weather", WEATHER_ARGUMENTS)] * 2,
        ),
        (f"{WEATHER} and more", " and more", "", [("weather", WEATHER_ARGUMENTS)]),
        ('<tool_call>{"name": "f"}</tool_call>', "", "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", "", [("f", "{}")]),
        ("<tool_call>no json</tool_call>x", "<tool_call>no json</tool_call>x", "", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', "", []),
        (
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            "",
            [],
        ),
        # Half a surrogate pair cannot be sent.
        (
            '<tool_call>{"name": "f", "arguments": {"a": "é\\ud800"}}</tool_call>',
            "",
            "",
            [("f", '{"a": "\\u00e9\\ud800"}')],
        ),
        *(
            (f"<tool_call>{call}</tool_call>", f"<tool_call>{call}</tool_call>", "", [])
            for call in ('{"name": "\\ud800"}', '{"name": "f", "arguments": "\\udc00"}')
        ),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, "", []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', "", []),
        ("1 < 2 <tool", "1 < 2 <tool", "", []),
    ],
)
def test_a_message_has_these_parts(
    text: str, content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    """Text that only looks like a marker or a call stays content, to the last character."""
    whole = split([text])

    assert (whole.text, whole.reasoning, calls_of(whole)) == (content, reasoning, calls)


fragments = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"a": 1}}',
        WEATHER,
        "<",
        "a",
        " ",
        "\n" * 70,
    ]
)


@examples(200)
@given(
    parts=st.lists(fragments, max_size=8),
    cuts=st.lists(st.integers(0, 300), max_size=10),
    reasoning=st.booleans(),
)
def test_parts_do_not_depend_on_how_the_text_arrives(
    parts: list[str], cuts: list[int], reasoning: bool
) -> None:
    """A step of an engine may bring one token or several."""
    text = "".join(parts)
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})

    in_pieces = split([text[start:end] for start, end in pairwise(ends)], reasoning=reasoning)
    by_character = split(list(text), reasoning=reasoning)

    assert in_pieces == by_character == split([text], reasoning=reasoning)


@examples(100)
@given(
    text=st.text("<>/think ol_ca\n", max_size=60).filter(
        lambda text: "<think>" not in text and "<tool_call>" not in text
    )
)
def test_without_markers_all_text_is_content(text: str) -> None:
    """Half a marker is held back only until it is clear that it is none."""
    assert split(list(text)) == TextDelta(text)


def test_calls_are_text_where_no_tools_were_offered() -> None:
    """Such calls could not be answered."""
    assert split([WEATHER], tools=False) == TextDelta(WEATHER)


def test_one_call_where_parallel_calls_are_not_wanted() -> None:
    """`parallel_tool_calls: false` means one at most."""
    assert len(split([WEATHER * 3], parallel=False).tool_calls) == 1


def test_calls_have_ids_that_another_engine_gives_too() -> None:
    """A client answers a call by its id, whichever engine wrote it."""
    first, second = split([WEATHER * 2]).tool_calls

    assert [first.index, second.index] == [0, 1]
    assert first.id != second.id
    assert first.id == "call_7267aa8d94c5c99e1fa84fd5", (
        "the ids are part of the protocol between engines: they never change"
    )


def test_endless_white_space_is_not_held_back_for_ever() -> None:
    """A client must see that the stream is alive."""
    splitter = ChatSplitter(STREAM, reasoning=False, tools=True)

    assert splitter.feed("\n" * 64).text == ""
    assert splitter.feed("\n").text == "\n" * 65


OUTPUTS = [
    "<think>日本? 🙂 é</think>\n\nThe answer: 42 🚀.",
    f"<think>call it</think>\n{WEATHER}\n{WEATHER}",
    f"Text first. {WEATHER}",
    "<tool_call>broken 🙂</tool_call> <think> nothing",
    'say <tool_call>{"name": "half',
]


@pytest.mark.parametrize("text", OUTPUTS)
@pytest.mark.parametrize("prompt", ["user: x\nassistant: ", "assistant: <think>\n"])
@pytest.mark.parametrize("stops", [(), ("42",), ("ü", "first.")])
def test_every_cut_continues_exactly(
    tokenizer: Tokenizer, text: str, prompt: str, stops: tuple[str, ...]
) -> None:
    """An engine that takes over feeds the ids sent so far, drops what comes out, and goes on, in
    the middle of anything.
    """
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = deltas(machine(tokenizer, prompt, stops), token_ids)

    for cut in range(len(whole)):
        resumed = machine(tokenizer, prompt, stops)
        for token_id in token_ids[:cut]:
            resumed.feed(token_id)

        assert deltas(resumed, token_ids[cut:]) == whole[cut:]


def test_a_template_may_have_opened_the_reasoning(tokenizer: Tokenizer) -> None:
    """Then the output begins inside of it; a template that opened and closed it asks for
    content.
    """
    token_ids = tokenizer.encode("hm</think>yes", add_special_tokens=False).ids

    opened = deltas(machine(tokenizer, "assistant: <think>\n"), token_ids)
    closed = deltas(machine(tokenizer, "assistant: <think>\n\n</think>\n\n"), token_ids)

    assert (
        "".join(delta.reasoning for delta in opened),
        "".join(delta.text for delta in opened),
    ) == ("hm", "yes")
    assert "".join(delta.text for delta in closed) == "hm</think>yes"


def test_a_call_makes_the_finish_reason_of_the_message(tokenizer: Tokenizer) -> None:
    """Clients look at it to know that it is their turn to act."""
    output = machine(tokenizer)

    assert not output.called
    deltas(output, tokenizer.encode(WEATHER, add_special_tokens=False).ids)
    assert output.called


def test_markers_that_are_special_tokens_count_all_the_same() -> None:
    """Some vocabularies mark `<think>` and its like as special, and decoding drops those."""
    body = json.dumps({"name": "f", "arguments": {}})
    words = {"hm": 0, "yes": 1, body: 2, "</s>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    markers = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<other>"]
    tokenizer.add_special_tokens(
        [AddedToken(marker, special=True) for marker in (*markers, "</s>")]
    )
    think, think_end, call, call_end, other = tokenizer.encode("".join(markers)).ids
    output = ChatOutput(tokenizer, (), stream=STREAM, prompt_ids=[1], tools=True)

    found = deltas(output, [think, 0, other, think_end, 1, call, 2, call_end, 3])
    total = TextDelta("")
    for delta in found:
        total = total.then(delta)

    assert (total.reasoning, total.text, calls_of(total)) == ("hm", "yes", [("f", "{}")])
