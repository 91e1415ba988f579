"""A scripted model that drives an agent through a task of five tool calls.

What it writes is a function of the conversation so far: a turn has a thought, text and one call,
the sixth turn a text alone. Each text names a digest of the conversation, so that a turn which a
client has seen otherwise than calm shows in all turns behind it. The events have the form of the
recordings of vLLM with `--tool-call-parser hermes --reasoning-parser qwen3`.
"""

import functools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec

from kvrs_testkit.engine_streams import Recording
from kvrs_testkit.engine_streams.vocabulary import end_id, tokenizer

CALLS = 5
TURNS = CALLS + 1
_TASK = re.compile(r"task number (\d+)")
_WORDS = ("Ärger", "a.tmp", "日本.tmp", "b tmp", "🎉 ok", 'a"b', "a\\b", "Jürgen")


class Phase(StrEnum):
    """The part of a turn in which its decode server dies."""

    FIRST = "before the first event"
    THOUGHT = "in the thought"
    TEXT = "in the text"
    NAME = "behind the call's name"
    ARGUMENTS = "in the arguments"
    BEHIND = "behind the arguments"
    FINISH = "before the finish"


OF_THE_LAST_TURN = (Phase.FIRST, Phase.THOUGHT, Phase.TEXT, Phase.FINISH)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name, and its arguments as an object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer of the model; the last one has no call."""

    thought: str
    text: str
    call: Call | None

    @property
    def output(self) -> str:
        """The text of its tokens, without the last one."""
        if self.call is None:
            return f"{self.thought}</think>{self.text}"
        arguments = json.dumps(self.call.arguments, ensure_ascii=False)
        called = f'{{"name": "{self.call.name}", "arguments": {arguments}}}'
        return f"{self.thought}</think>{self.text}\n<tool_call>\n{called}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Played:
    """A turn as a server streams it; `dies_at`: how many tokens come before each death."""

    recording: Recording
    turn: int
    dies_at: dict[Phase, int]


def question(task: int) -> str:
    """The message of the user that begins a task."""
    return f"Please do task number {task}."


def calls_of(task: int) -> list[Call]:
    """The calls of a task; all tools come in each."""
    draw = random.Random(f"task {task}")

    def words(count: int) -> list[str]:
        return draw.sample(_WORDS, count)

    pairs = [dict(zip(("old", "new"), words(2), strict=True)) for _ in range(2)]
    tags = {word: words(2) for word in words(2)}
    called = [
        Call("delete_files", {"files": words(3), "recursive": draw.random() < 0.5}),
        Call("send_note", {"to": words(1)[0], "text": " ".join(words(4))}),
        Call("tag_files", {"tags": tags, "limit": draw.randrange(1000)}),
        Call("rename_files", {"pairs": pairs}),
        Call("delete_files", {"files": [*words(2), f"of {task}"], "recursive": False}),
    ]
    draw.shuffle(called)
    return called


def turn_of(messages: list[dict[str, Any]]) -> tuple[int, Turn]:
    """The number of the turn that answers a conversation, and the turn."""
    said = conversation(messages)
    number = sum(each["role"] == "tool" for each in said)
    task = _TASK.search(" ".join(each["text"] for each in said if each["role"] == "user"))
    calls = calls_of(int(task[1])) if task else []
    digest = blake2b(msgspec.json.encode(said), digest_size=3).hexdigest()
    thought = f"Three files, Vorsicht 🤔 only temporary ones {digest}."
    if number >= len(calls):
        return number, Turn(thought, f"Done 🎉 ok {digest}.", None)
    return number, Turn(thought, f"I tidy up, für dich {digest}.", calls[number])


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as a template of a reasoning model has it: without thoughts, and without
    the ids of calls.
    """
    return [
        {
            "role": each["role"],
            "text": _text(each.get("content")),
            "calls": [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in each.get("tool_calls") or ()
            ],
        }
        for each in messages
    ]


def _text(content: Any) -> str:
    """The text of a message's content, whose parts clients cut differently."""
    if content is None or isinstance(content, str):
        return (content or "").strip()
    return "".join(part.get("text") or "" for part in content).strip()


def played(messages: list[dict[str, Any]], call_id: str) -> Played:
    """The turn that answers a conversation; ids of calls are an engine's own."""
    number, turn = turn_of(messages)
    prompt = json.dumps(conversation(messages), ensure_ascii=False) + "<think>"
    ids = _encoded(turn.output)
    texts = _texts(ids)
    spans = _Spans.of(turn)
    events = [_OPENING % json.dumps(_encoded(prompt))]
    dies_at = dict.fromkeys([Phase.FIRST], 0)
    seen = 0
    for at, text in enumerate(texts):
        delta = spans.delta(seen, seen + len(text), call_id)
        seen += len(text)
        events.append(
            _EVENT % (json.dumps(delta, ensure_ascii=False, separators=(",", ":")), ids[at])
        )
        for phase, place in spans.deaths.items():
            if seen >= place:
                dies_at.setdefault(phase, at + 1)
    events.append(_FINISH % ("stop" if turn.call is None else "tool_calls", end_id()))
    dies_at[Phase.FINISH] = len(ids)
    recording = Recording(
        command="",
        engine="vllm",
        version="0.32.0",
        tool_parser="hermes",
        reasoning_parser="qwen3",
        tool_choice="auto",
        tokens_per_event=1,
        request={},
        prompt_ids=_encoded(prompt),
        ids=[*ids, end_id()],
        texts=[*texts, ""],
        covered=list(range(len(ids) + 2)),
        whole=msgspec.Raw(b"{}"),
        frames=[],
        events=[msgspec.Raw(each.encode()) for each in events],
    )
    return Played(recording, number, dies_at)


_OPENING = (
    '{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    '"finish_reason":null}],"prompt_token_ids":%s,"prompt_text":null}'
)
_EVENT = (
    '{"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":null,"token_ids":[%d]}]}'
)
_FINISH = (
    '{"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"%s","stop_reason":null,'
    '"token_ids":[%d]}]}'
)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Where the parts of a turn lie in its output, in characters."""

    output: str
    thought: range
    text: range
    name: str
    named_at: int  # Behind the quote that ends the name.
    arguments: range

    @staticmethod
    def of(turn: Turn) -> "_Spans":
        output = turn.output
        behind = len(turn.thought) + len("</think>")
        thought = range(len(turn.thought))
        if turn.call is None:
            return _Spans(output, thought, range(behind, len(output)), "", 0, range(0))
        text = range(behind, output.index("<tool_call>"))
        begins = output.index('"arguments": ') + len('"arguments": ')
        arguments = range(begins, output.rindex("}\n</tool_call>"))
        named_at = output.index('", "arguments"') + 1
        return _Spans(output, thought, text, turn.call.name, named_at, arguments)

    @property
    def deaths(self) -> dict[Phase, int]:
        """How much of the output comes before each death within it."""
        found = {Phase.THOUGHT: _middle(self.thought), Phase.TEXT: _middle(self.text)}
        if self.name:
            found[Phase.NAME] = self.named_at + 1
            found[Phase.ARGUMENTS] = _middle(self.arguments)
            found[Phase.BEHIND] = self.arguments.stop
        return found

    def delta(self, begin: int, end: int, call_id: str) -> dict[str, Any]:
        """The delta of the event of a token: the parsed form of its text."""
        if thought := self._part(self.thought, begin, end):
            return {"reasoning": thought}
        if text := self._part(self.text, begin, end):
            return {"content": text}
        if self.name and begin < self.named_at <= end:
            function = {"name": self.name}
            call = {"id": call_id, "type": "function", "index": 0, "function": function}
            return {"content": None, "tool_calls": [call]}
        if arguments := self._part(self.arguments, begin, end):
            return {
                "content": None,
                "tool_calls": [{"index": 0, "function": {"arguments": arguments}}],
            }
        return {}

    def _part(self, span: range, begin: int, end: int) -> str:
        return self.output[max(begin, span.start) : min(end, span.stop)]


def _middle(span: range) -> int:
    return (span.start + span.stop) // 2


def _encoded(text: str) -> list[int]:
    return [int(one) for one in tokenizer().encode(text, add_special_tokens=False).ids]


def _texts(ids: list[int]) -> list[str]:
    """The text that each id adds; that of a character comes with the last of its bytes."""
    return list(_pieces(tuple(ids)))


@functools.lru_cache(maxsize=64)
def _pieces(ids: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(_decoded(ids))


def _decoded(ids: tuple[int, ...]) -> Iterator[str]:
    held: list[int] = []
    for one in ids:
        held.append(one)
        text = tokenizer(shows_special=True).decode(held, skip_special_tokens=False)
        if text.endswith("\ufffd"):
            yield ""
            continue
        held = []
        yield text
