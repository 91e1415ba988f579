"""`ChatText` turns output ids into the parts of a chat message: content, reasoning and tool calls.

A deterministic function of the ids fed, like `OutputText` below it: an engine that takes over feeds
the history and goes on.

Reasoning stands between `<think>` and `</think>`; a template may have opened it already. Tool calls
are written as Hermes and Qwen models do: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
What only looks like a call stays content.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from hashlib import blake2b
from typing import assert_never

from tokenizers import Tokenizer

from kvrs.ids import StreamId
from kvrs.text.output import OutputText, ParsedToolCall, TextDelta, possible_beginning

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_OPENING_TOKENS = 16  # More than any tokenizer needs for `<think>` and the white space after it.
_HELD_BLANKS = 64  # At most this much white space is held back.


class ChatOutput:
    """Detokeniser, stop-string watch and splitter of one chat stream. Stop strings count in the raw
    text, markers and all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        stream: StreamId,
        prompt_ids: Sequence[int],
        tools: bool,
        parallel_tool_calls: bool = True,
    ) -> None:
        self._output = OutputText(
            tokenizer, stop_strings, visible=(THINK, THINK_END, CALL, CALL_END)
        )
        opening = tokenizer.decode(list(prompt_ids[-_OPENING_TOKENS:]), skip_special_tokens=False)
        self.reasons_first = opening.rstrip().endswith(THINK)  # The template opens the reasoning.
        self._splitter = ChatSplitter(
            stream,
            reasoning=self.reasons_first,
            tools=tools,
            parallel_tool_calls=parallel_tool_calls,
        )

    @property
    def characters(self) -> int:
        """Number of characters, as `OutputText` counts them."""
        return self._output.characters

    @property
    def called(self) -> bool:
        """The message has tool calls: its finish reason is `tool_calls` rather than `stop`."""
        return self._splitter.calls > 0

    def feed(self, token_id: int) -> TextDelta:
        """Take one output id; not to be called after a stop string was found."""
        raw = self._output.feed(token_id)
        delta = self._splitter.feed(raw.text)
        if raw.stopped is None:
            return delta
        return delta.then(self._splitter.finish()).then(TextDelta("", raw.stopped))

    def finish(self) -> TextDelta:
        """Return the text that was held back; nothing after a stop string was found."""
        return self._splitter.feed(self._output.finish().text).then(self._splitter.finish())


class _Mode(Enum):
    OPENING = auto()  # Only white space so far: the model may begin to think.
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class ChatSplitter:
    """Splits a text, however it arrives in pieces."""

    def __init__(
        self, stream: StreamId, *, reasoning: bool, tools: bool, parallel_tool_calls: bool = True
    ) -> None:
        self._stream = stream
        self._tools = tools
        self._parallel = parallel_tool_calls
        self._mode = _Mode.REASONING if reasoning else _Mode.OPENING
        self._held = ""  # Not decided yet.
        self._searched = 0  # So far no end of a call begins in `_held`.
        # The content since the last marker is white space, which stays in `_held`.
        self._blank = True
        self._delta = TextDelta("")
        self.calls = 0

    def feed(self, text: str) -> TextDelta:
        self._held += text
        while self._advance():
            pass
        return self._taken()

    def finish(self) -> TextDelta:
        """Return the text that was held back."""
        match self._mode:
            case _Mode.REASONING:
                self._add(reasoning=self._take(len(self._held)))
            case _Mode.CALL:
                # Some models end their turn instead of closing the call.
                self._call(self._take(len(self._held)), "")
            case _Mode.OPENING | _Mode.CONTENT:
                rest = self._take(len(self._held))
                if not (self.calls and rest.isspace()):
                    self._add(text=rest)
            case _:
                assert_never(self._mode)
        return self._taken()

    def _advance(self) -> bool:
        """Decide about the front of what is held; whether to go on with the rest."""
        match self._mode:
            case _Mode.OPENING:
                return self._open()
            case _Mode.REASONING:
                return self._reason()
            case _Mode.CONTENT:
                return self._say()
            case _Mode.CALL:
                return self._complete_call()
            case _:
                assert_never(self._mode)

    def _open(self) -> bool:
        text = self._held.lstrip()
        few_blanks = len(self._held) - len(text) <= _HELD_BLANKS
        if few_blanks and text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._mode = _Mode.REASONING
            return True
        if few_blanks and THINK.startswith(text):
            return False
        self._mode = _Mode.CONTENT
        return True

    def _reason(self) -> bool:
        at = self._held.find(THINK_END)
        if at < 0:
            self._add(
                reasoning=self._take(len(self._held) - possible_beginning(self._held, [THINK_END]))
            )
            return False
        self._add(reasoning=self._take(at))
        self._take(len(THINK_END))
        self._mode, self._blank = _Mode.CONTENT, True
        return True

    def _say(self) -> bool:
        if not self._tools:
            self._add(text=self._take(len(self._held)))
            return False
        at = self._held.find(CALL)
        end = at if at >= 0 else len(self._held) - possible_beginning(self._held, [CALL])
        # White space that only separates calls from what is before and after them is not content.
        if not self._blank or end > _HELD_BLANKS or self._held[:end].strip():
            self._blank = False
            self._add(text=self._take(end))
            end = 0
        if at < 0:
            return False
        self._take(end + len(CALL))
        self._mode, self._searched = _Mode.CALL, 0
        return True

    def _complete_call(self) -> bool:
        at = self._held.find(CALL_END, self._searched)
        if at < 0:
            self._searched = max(0, len(self._held) - len(CALL_END) + 1)
            return False
        body = self._take(at)
        self._take(len(CALL_END))
        self._mode, self._blank = _Mode.CONTENT, True
        self._call(body, CALL_END)
        return True

    def _call(self, body: str, end: str) -> None:
        found = _function(body)
        if found is None:
            self._add(text=CALL + body + end)
            return
        if self.calls and not self._parallel:
            return
        name, arguments = found
        self._add(
            call=ParsedToolCall(self.calls, _call_id(self._stream, self.calls), name, arguments)
        )
        self.calls += 1

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _add(self, text: str = "", reasoning: str = "", call: ParsedToolCall | None = None) -> None:
        self._delta = self._delta.then(
            TextDelta(text, None, reasoning, () if call is None else (call,))
        )

    def _taken(self) -> TextDelta:
        is_content = self._mode in (_Mode.OPENING, _Mode.CONTENT) and not self._held
        delta = replace(self._delta, is_content=is_content and not self.calls)
        self._delta = TextDelta("")
        return delta


def _function(body: str) -> tuple[str, str] | None:
    """Name and arguments of what stands inside a call; None if it is no call."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    match call.get("arguments", {}):
        case str() as arguments:
            pass
        case dict() as given:
            arguments = json.dumps(given, ensure_ascii=False)
            if not _is_text(arguments):
                arguments = json.dumps(given)  # Half a surrogate pair stays escaped.
        case _:
            return None
    return (call["name"], arguments) if _is_text(call["name"] + arguments) else None


def _is_text(decoded: str) -> bool:
    """The string can be sent: JSON can name half a surrogate pair, which is no character."""
    try:
        decoded.encode()
    except UnicodeEncodeError:
        return False
    return True


def _call_id(stream: StreamId, index: int) -> str:
    """The same after a recovery, and as unguessable as the stream's own id."""
    return (
        "call_"
        + blake2b(f"{stream}:{index}".encode(), digest_size=12, person=b"kvrs-call").hexdigest()
    )
