"""An oracle that reads a client's bytes by itself, and compares an answer with calm runs.

Nothing of kvrs is imported here: each API is read as its documentation describes it, event by
event, and every departure from that is noted as `broken`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# Finish reasons of a complete answer with calls, and of one without.
_CALLED, _PLAIN = ("tool_calls", "tool_use", "called"), ("stop", "end_turn", "completed")
_WORDS = 12  # Characters of a thought that show it in other text.


@dataclass
class Call:
    """A tool call, as far as the client has it."""

    name: str = ""
    arguments: str = ""
    is_closed: bool = False  # The API says that it is complete.


@dataclass
class Answer:
    """All that a client has of one answer."""

    content: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None  # The reason of an answer that is shown as complete.
    error: str | None = None  # Code and type of an explicit error.
    broken: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # Blocks or items, by kind.
    tokens: int | None = None  # Of the output, as its usage says.
    is_over: bool = False  # The API's last event has come.

    @property
    def parts(self) -> list[str]:
        """The texts of all parts."""
        called = [text for call in self.calls for text in (call.name, call.arguments)]
        return [self.content, self.thought, *called]

    def fault(self, what: str) -> None:
        self.broken.append(what)


# Readers.


def read(api: str, *, is_stream: bool, status: int, body: bytes, ended: str) -> Answer:
    """Read an answer. `ended`: the error of a connection that broke, or nothing."""
    answer = Answer()
    if ended:
        answer.fault(f"the connection broke: {ended}")
    try:
        if status != 200:
            _read_status(answer, status, body)
        elif is_stream:
            _STREAMS[api](answer, list(_events(answer, body)))
        else:
            _WHOLE[api](answer, json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        answer.fault(f"no answer of {api}: {error!r}")
    return answer


def _read_status(answer: Answer, status: int, body: bytes) -> None:
    answer.is_over = True
    try:
        error = json.loads(body)["error"]
        answer.error = f"{status} {error.get('code') or ''} {error['type']}"
    except (ValueError, KeyError, TypeError):
        answer.fault(f"HTTP {status} without an error")


def _events(answer: Answer, body: bytes) -> Iterable[tuple[str | None, Any]]:
    """Yield names and decoded data of server-sent events; `[DONE]` is yielded as text."""
    blocks = body.decode("utf-8", "replace").split("\n\n")
    if blocks[-1]:
        answer.fault(f"half an event at the end: {blocks[-1][:60]!r}")
    for block in blocks[:-1]:
        name, data = None, []
        for line in block.split("\n"):
            kind, _, value = line.partition(":")
            if kind == "data":
                data.append(value.removeprefix(" "))
            elif kind == "event":
                name = value.strip()
            elif kind not in ("", "id", "retry"):
                answer.fault(f"a line that is no field: {line[:60]!r}")
        if not data:
            continue
        if data == ["[DONE]"]:
            yield name, "[DONE]"
            continue
        try:
            yield name, json.loads("\n".join(data))
        except ValueError:
            answer.fault(f"data that is no JSON: {data[0][:60]!r}")


def _read_chat(answer: Answer, events: Sequence[tuple[str | None, Any]]) -> None:
    heads = set()
    for _, event in events:
        if answer.is_over:
            answer.fault("an event behind the end")
        if event == "[DONE]":
            answer.is_over = True
            if answer.finish is None:
                answer.fault("[DONE] without a finish reason")
            continue
        if "error" in event:
            answer.error = f"{event['error'].get('code')} {event['error']['type']}"
            answer.is_over = True
            continue
        heads.add((event["id"], event["created"], event["model"]))
        for choice in event["choices"]:
            if answer.finish is not None and any((choice.get("delta") or {}).values()):
                answer.fault("output behind the finish reason")
            _add_delta(answer, choice.get("delta") or {})
            answer.finish = choice.get("finish_reason") or answer.finish
        if usage := event.get("usage"):
            answer.tokens = usage["completion_tokens"]
    if len(heads) > 1:
        answer.fault("events of more than one answer")
    if not answer.is_over:
        answer.fault("an end without [DONE] or an error")
    for call in answer.calls:
        call.is_closed = answer.finish is not None


def _add_delta(answer: Answer, delta: dict[str, Any]) -> None:
    answer.content += delta.get("content") or ""
    answer.thought += delta.get("reasoning") or delta.get("reasoning_content") or ""
    for piece in delta.get("tool_calls") or ():
        index, function = piece.get("index") or 0, piece.get("function") or {}
        if index > len(answer.calls):
            answer.fault(f"call {index} behind {len(answer.calls)} calls")
        while len(answer.calls) <= index:
            answer.calls.append(Call())
        call = answer.calls[index]
        # Clients add a name's pieces together, so a second copy is as wrong as other text.
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""


def _read_whole_chat(answer: Answer, whole: dict[str, Any]) -> None:
    answer.is_over = True
    (choice,) = whole["choices"]
    message = choice["message"]
    answer.content = message.get("content") or ""
    answer.thought = message.get("reasoning") or message.get("reasoning_content") or ""
    answer.finish = choice["finish_reason"]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        answer.calls.append(Call(function["name"], function["arguments"], is_closed=True))
    answer.tokens = whole["usage"]["completion_tokens"]


def _check_name(answer: Answer, name: str | None, kind: str) -> None:
    if name != kind:
        answer.fault(f"event {name} with the type {kind}")
    if answer.is_over:
        answer.fault(f"{kind} behind the end")


class _Messages:
    """Reader of a stream of Anthropic's API."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.blocks = 0
        self.open: int | None = None
        self.kind = ""
        self.is_begun = False

    def take(self, name: str | None, event: dict[str, Any]) -> None:
        answer, kind = self.answer, event["type"]
        _check_name(answer, name, kind)
        if kind not in ("message_start", "ping", "error") and not self.is_begun:
            answer.fault(f"{kind} before message_start")
        match kind:
            case "message_start":
                self.is_begun = True
            case "content_block_start":
                self._start(event)
            case "content_block_delta":
                self._delta(event)
            case "content_block_stop":
                self._stop(event)
            case "message_delta":
                if self.open is not None:
                    answer.fault("message_delta with an open block")
                answer.finish = event["delta"]["stop_reason"]
                answer.tokens = event["usage"]["output_tokens"]
            case "message_stop":
                answer.is_over = True
                if answer.finish is None:
                    answer.fault("message_stop without a stop reason")
            case "error":
                answer.is_over, answer.error = True, event["error"]["type"]
            case _ if kind != "ping":
                answer.fault(f"unknown event {kind}")
            case _:
                pass

    def _start(self, event: dict[str, Any]) -> None:
        if self.open is not None or event["index"] != self.blocks:
            self.answer.fault(f"block {event['index']} begins behind {self.blocks} blocks")
        self.open, block = event["index"], event["content_block"]
        self.blocks += 1
        self.kind = block["type"]
        self.answer.order.append(self.kind)
        if self.kind == "tool_use":
            self.answer.calls.append(Call(block["name"]))
            if block["input"]:
                self.answer.calls[-1].arguments = json.dumps(block["input"])

    def _delta(self, event: dict[str, Any]) -> None:
        if self.open is None or self.open != event["index"]:
            self.answer.fault("a delta outside its block")
        match event["delta"]:
            case {"type": "text_delta", "text": text} if self.kind == "text":
                self.answer.content += text
            case {"type": "thinking_delta", "thinking": text} if self.kind == "thinking":
                self.answer.thought += text
            case {"type": "input_json_delta", "partial_json": text} if self.kind == "tool_use":
                self.answer.calls[-1].arguments += text
            case {"type": "signature_delta"} if self.kind == "thinking":
                pass
            case other:
                self.answer.fault(f"a delta {other.get('type')} in a block {self.kind}")

    def _stop(self, event: dict[str, Any]) -> None:
        if self.open is None or self.open != event["index"]:
            self.answer.fault("a block ends that is not open")
        if self.kind == "tool_use":
            self.answer.calls[-1].is_closed = True
        self.open = None


def _read_messages(answer: Answer, events: Sequence[tuple[str | None, Any]]) -> None:
    reader = _Messages(answer)
    for name, event in events:
        if isinstance(event, str):
            answer.fault("[DONE] in a stream of messages")
        else:
            reader.take(name, event)
    if not answer.is_over:
        answer.fault("an end without message_stop or an error")


def _read_whole_message(answer: Answer, whole: dict[str, Any]) -> None:
    answer.is_over = True
    answer.finish, answer.tokens = whole["stop_reason"], whole["usage"]["output_tokens"]
    for block in whole["content"]:
        answer.order.append(block["type"])
        match block:
            case {"type": "text", "text": text}:
                answer.content += text
            case {"type": "thinking", "thinking": text}:
                answer.thought += text
            case {"type": "tool_use", "name": name, "input": given}:
                answer.calls.append(Call(name, json.dumps(given), is_closed=True))
            case _:
                answer.fault(f"unknown block {block['type']}")


class _Responses:
    """Reader of a stream of OpenAI's Responses: items by place, and their deltas."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.number = 0
        self.calls: dict[int, Call] = {}  # By place in the output.
        self.texts: dict[int, str] = {}  # Deltas of other items, by place.
        self.open: dict[int, str] = {}

    def take(self, name: str | None, event: dict[str, Any]) -> None:
        answer, kind = self.answer, event["type"]
        _check_name(answer, name, kind)
        if kind == "error":
            answer.is_over, answer.error = True, f"{event.get('code')} error"
            return
        if event.get("sequence_number") != self.number:
            answer.fault(f"event {event.get('sequence_number')} in place {self.number}")
        self.number += 1
        match kind:
            case "response.output_item.added":
                self._added(event["output_index"], event["item"])
            case "response.output_text.delta":
                self._delta(event, "message")
                answer.content += event["delta"]
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self._delta(event, "reasoning")
                answer.thought += event["delta"]
            case "response.function_call_arguments.delta":
                self._delta(event, "function_call")
                self.calls[event["output_index"]].arguments += event["delta"]
            case "response.function_call_arguments.done":
                self._same(self.calls[event["output_index"]].arguments, event["arguments"])
                self.calls[event["output_index"]].is_closed = True
            case "response.output_text.done" | "response.reasoning_text.done":
                self._same(self.texts[event["output_index"]], event["text"])
            case "response.output_item.done":
                self._done(event["output_index"], event["item"])
            case "response.completed" | "response.incomplete" | "response.failed":
                self._end(event["response"])
            case _:  # Others repeat what these have.
                pass

    def _added(self, place: int, item: dict[str, Any]) -> None:
        self.open[place] = item["type"]
        self.texts[place] = ""
        self.answer.order.append(item["type"])
        if item["type"] == "function_call":
            self.calls[place] = Call(item["name"], item.get("arguments") or "")
            self.answer.calls.append(self.calls[place])

    def _delta(self, event: dict[str, Any], kind: str) -> None:
        if self.open.get(event["output_index"]) != kind:
            self.answer.fault(f"a delta of {kind} outside its item")
        self.texts[event["output_index"]] = (
            self.texts.get(event["output_index"], "") + event["delta"]
        )

    def _same(self, streamed: str, told: str) -> None:
        if streamed != told:
            self.answer.fault(f"done with {told[:40]!r} behind deltas {streamed[:40]!r}")

    def _done(self, place: int, item: dict[str, Any]) -> None:
        if self.open.pop(place, None) != item["type"]:
            self.answer.fault("an item ends that is not open")
        if item["type"] == "function_call":
            self._same(self.calls[place].arguments, item["arguments"])
            self.calls[place].is_closed |= item["status"] == "completed"

    def _end(self, response: dict[str, Any]) -> None:
        answer = self.answer
        answer.is_over = True
        whole = Answer()
        _read_output(whole, response["output"])
        if response["status"] == "failed":
            answer.error = f"{response['error']['code']} failed"
        else:
            answer.finish = _finish_of(response)
            answer.tokens = response["usage"]["output_tokens"]
            if self.open:
                answer.fault("a complete response with open items")
        if whole.parts != answer.parts:
            answer.fault("the response has other output than its events")
        for call, told in zip(answer.calls, whole.calls, strict=False):
            call.is_closed |= told.is_closed


def _finish_of(response: dict[str, Any]) -> str:
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return "called" if calls and response["status"] == "completed" else response["status"]


def _read_output(answer: Answer, output: list[dict[str, Any]]) -> None:
    for item in output:
        answer.order.append(item["type"])
        match item:
            case {"type": "message", "content": content}:
                answer.content += "".join(part["text"] for part in content)
            case {"type": "reasoning"}:
                parts = (item.get("content") or []) + (item.get("summary") or [])
                answer.thought += "".join(part["text"] for part in parts)
            case {"type": "function_call", "name": name, "arguments": arguments}:
                answer.calls.append(Call(name, arguments, item["status"] == "completed"))
            case _:
                answer.fault(f"unknown item {item['type']}")


def _read_responses(answer: Answer, events: Sequence[tuple[str | None, Any]]) -> None:
    reader = _Responses(answer)
    for name, event in events:
        if isinstance(event, str):
            answer.fault("[DONE] in a stream of a response")
        else:
            reader.take(name, event)
    if not answer.is_over:
        answer.fault("an end without the response's end")


def _read_whole_response(answer: Answer, whole: dict[str, Any]) -> None:
    answer.is_over = True
    _read_output(answer, whole["output"])
    if whole["status"] == "failed":
        answer.error = f"{whole['error']['code']} failed"
    else:
        answer.finish = _finish_of(whole)
        answer.tokens = whole["usage"]["output_tokens"]


_STREAMS = {CHAT: _read_chat, MESSAGES: _read_messages, RESPONSES: _read_responses}
_WHOLE = {
    CHAT: _read_whole_chat,
    MESSAGES: _read_whole_message,
    RESPONSES: _read_whole_response,
}


# Verdict.


@dataclass(frozen=True, slots=True)
class Verdict:
    """The faults of one answer by kind, which the result counts."""

    half_calls: tuple[str, ...] = ()
    other_text: tuple[str, ...] = ()
    thoughts_in_content: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    is_whole: bool = False  # Complete and equal to a calm run.
    other_usage: bool = False
    error: str | None = None

    @property
    def is_wrong(self) -> bool:
        return bool(self.half_calls or self.other_text or self.thoughts_in_content or self.broken)

    @property
    def faults(self) -> tuple[str, ...]:
        return (*self.half_calls, *self.other_text, *self.thoughts_in_content, *self.broken)


def judge(got: Answer, calm: Sequence[Answer]) -> Verdict:
    """Compare an answer with calm runs of the same request, each at a server that may have been the
    one that completed it; the first one is that of the server that died.
    """
    verdicts = [_judge(got, each) for each in calm]
    return min(verdicts, key=lambda each: (len(each.faults), not each.is_whole))


def _judge(got: Answer, calm: Answer) -> Verdict:
    half, other = list[str](), list[str]()
    is_complete = got.finish is not None and got.error is None
    for number, call in enumerate(got.calls):
        meant = calm.calls[number] if number < len(calm.calls) else Call()
        if call.is_closed and not _is_same_call(call, meant):
            half.append(f"call {number} is shown as complete: {call.arguments[:80]!r}")
        elif not _begins(meant.name, call.name) or not _begins(meant.arguments, call.arguments):
            other.append(
                f"call {number}: {call.name} {_difference(meant.arguments, call.arguments)}"
            )
    if got.finish in _CALLED and [c.name for c in got.calls] != [c.name for c in calm.calls]:
        half.append(f"finish {got.finish} with {len(got.calls)} of {len(calm.calls)} calls")
    thoughts: list[str] = []
    if not _begins(calm.content, got.content):
        what = _difference(calm.content, got.content)
        (thoughts if _has_thought(got, calm) else other).append(f"content: {what}")
    if not _begins(calm.thought, got.thought):
        other.append(f"thought: {_difference(calm.thought, got.thought)}")
    if is_complete and not half and not other and not thoughts:
        if got.parts != calm.parts or got.finish != calm.finish:
            other.append(f"complete ({got.finish}) with less than the calm run ({calm.finish})")
        if got.order != calm.order:
            other.append(f"blocks {got.order}, calm {calm.order}")
    if not is_complete and got.error is None and not got.broken:
        got.fault("neither complete nor an error")
    is_whole = is_complete and not (half or other or thoughts or got.broken)
    return Verdict(
        tuple(half),
        tuple(other),
        tuple(thoughts),
        tuple(got.broken),
        is_whole=is_whole,
        other_usage=is_whole and got.tokens != calm.tokens,
        error=got.error,
    )


def _begins(whole: str, part: str) -> bool:
    return whole.startswith(part)


def _is_same_call(call: Call, meant: Call) -> bool:
    """True if a call that is shown as complete is the calm run's, whose arguments are JSON."""
    if (call.name, call.arguments) == (meant.name, meant.arguments):
        return True
    try:
        return call.name == meant.name and json.loads(call.arguments or "{}") == json.loads(
            meant.arguments or "{}"
        )
    except ValueError:
        return False


def _has_thought(got: Answer, calm: Answer) -> bool:
    """True if the content has a piece of the thought behind what the calm run has too."""
    behind = got.content[len(_common(calm.content, got.content)) :]
    pieces = (calm.thought[n : n + _WORDS] for n in range(max(1, len(calm.thought) - _WORDS)))
    return "think" in behind or any(len(each) == _WORDS and each in behind for each in pieces)


def _common(one: str, other: str) -> str:
    length = min(len(one), len(other))
    at = next((n for n in range(length) if one[n] != other[n]), length)
    return one[:at]


def _difference(meant: str, got: str) -> str:
    at = len(_common(meant, got))
    return f"at {at} {got[at : at + 40]!r}, calm {meant[at : at + 40]!r}"


def counted(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Count the answers with each kind of fault, the whole ones, and the errors by code."""
    them = list(verdicts)
    return {
        "deaths": len(them),
        "half calls shown as complete": sum(bool(each.half_calls) for each in them),
        "twice or other text": sum(bool(each.other_text) for each in them),
        "thought in content": sum(bool(each.thoughts_in_content) for each in them),
        "broken connections": sum(bool(each.broken) for each in them),
        "whole and equal": sum(each.is_whole for each in them),
        "whole, other count of tokens": sum(each.other_usage for each in them),
        "explicit errors": dict(
            Counter(each.error for each in them if each.error and not each.is_wrong).most_common()
        ),
    }
