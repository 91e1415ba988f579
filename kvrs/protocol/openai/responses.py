"""Translation of OpenAI's Responses API to chat: a request becomes a chat's request, and its output
items and events a pure function of the chat's events, so any proxy with these makes the same ones.

A response runs as a chat stream whose key is made of the response's id. The client does not send
the request again, so the header of the stream's record holds it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrs.errors import RequestError, UndecodableError
from kvrs.protocol.openai.chunks import ReceivedChoice
from kvrs.protocol.openai.decoding import MAX_ELEMENTS
from kvrs.protocol.openai.translated import (
    AS_IN_CHAT,
    BegunCall,
    CallLog,
    Event,
    Fields,
    chunk_of,
    list_of,
    made_of,
    not_supported,
    read_error,
    read_fields,
    string_of,
)

PATH = "/v1/responses"
ID = re.compile(r"resp_[0-9a-f]{48}", re.ASCII)
CANCELLED = "cancelled"  # Error code of a response that its client cancelled.

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_IGNORED = {
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "stream_options", "user"),
}
_OWN = {"input", "instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice"}
_SWITCHES = ("stream", "background", "store")
_AS_IN_CHAT = AS_IN_CHAT | {"parallel_tool_calls", "stop"}
_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
# Finish reasons of a chat that cut its output, with the reasons of the incomplete response.
_CUTS = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Stored(msgspec.Struct, frozen=True):
    """Data of a response that a proxy needs beside the record of its stream."""

    id: str
    created_at: int
    body: bytes  # Body of the request.

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Stored":
        return msgspec.msgpack.decode(data, type=cls)


class ResponseRequest(msgspec.Struct, frozen=True):
    """A checked request for a response."""

    fields: Fields
    chat: bytes  # Body of the chat completion that produces the response.

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def background(self) -> bool:
        return bool(self.fields.get("background"))

    @property
    def store(self) -> bool:
        return self.fields.get("store") is not False


def parse_response_request(body: bytes, max_elements: int = MAX_ELEMENTS) -> ResponseRequest:
    """Check a request body. Raises RequestError: malformed, or an unsupported field or item."""
    allowed = {*_IGNORED, *_OWN, *_AS_IN_CHAT, *_SWITCHES}
    fields = read_fields(body, allowed, _NEUTRAL, max_elements)
    for name in _SWITCHES:
        if not isinstance(fields.get(name, False), bool):
            raise not_supported(name, fields[name], "true or false")
    if fields.get("background") and fields.get("store") is False:
        raise RequestError("a response in the background needs store", param="store")
    chat: Fields = {name: fields[name] for name in fields if name in _AS_IN_CHAT}
    chat["messages"] = _messages(fields)
    if fields.get("stream"):
        chat["stream"] = True
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    chat |= _tools(fields) | _reasoning(fields) | _format(fields)
    return ResponseRequest(fields, msgspec.json.encode(chat))


def _messages(fields: Fields) -> list[Fields]:
    messages = list[Fields]()
    instructions = fields.get("instructions", "")
    if not isinstance(instructions, str):
        raise not_supported("instructions", instructions, "a string")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given := fields.get("input"), str):
        return [*messages, {"role": "user", "content": given}]
    for place, item in enumerate(list_of(fields, "input", "a string or a list of items")):
        param = f"input[{place}]"
        if not isinstance(item, dict):
            raise not_supported(param, item, "an object")
        match item.get("type", "message"):
            case "message":
                messages.append(_message(item, param))
            case "function_call":
                call = {
                    "id": string_of(item, "call_id", param),
                    "type": "function",
                    "function": {
                        "name": string_of(item, "name", param),
                        "arguments": string_of(item, "arguments", param),
                    },
                }
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = _text(item.get("output"), f"{param}.output")
                call_id = string_of(item, "call_id", param)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "reasoning":
                pass  # Left out, as chat templates leave out the reasoning of earlier turns.
            case kind:
                allowed = "message, function_call, function_call_output, reasoning"
                raise not_supported(f"{param}.type", kind, allowed)
    return messages


def _message(item: Fields, param: str) -> Fields:
    role = item.get("role")
    if role not in _ROLES:
        raise not_supported(f"{param}.role", role, ", ".join(_ROLES))
    content = _text(item.get("content"), f"{param}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise not_supported(param, content, "a string or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise not_supported(param, part, "a string or a list of parts")
        if (kind := part.get("type")) not in _TEXTS:
            raise not_supported(f"{param}.type", kind, ", ".join(_TEXTS))
        texts.append(string_of(part, "text", param))
    return "".join(texts)


def _tools(fields: Fields) -> Fields:
    made: Fields = {}
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise not_supported("tools", tools, "a list")
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise not_supported(f"tools[{place}]", tool, "an object")
        if (kind := tool.get("type")) != "function":
            raise not_supported(f"tools[{place}].type", kind, "function")
        function = {name: value for name, value in tool.items() if name not in ("type", "strict")}
        made.setdefault("tools", []).append({"type": "function", "function": function})
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return made if choice is None else made | {"tool_choice": choice}


def _reasoning(fields: Fields) -> Fields:
    reasoning = fields.get("reasoning", {})
    if not isinstance(reasoning, dict) or reasoning.keys() - {"effort", "summary"}:
        raise not_supported("reasoning", reasoning, "an object with effort")
    if reasoning.get("summary") is not None:
        raise not_supported("reasoning.summary", reasoning["summary"], "null")
    effort = reasoning.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _format(fields: Fields) -> Fields:
    text = fields.get("text", {})
    if not isinstance(text, dict) or text.keys() - {"format", "verbosity"}:
        raise not_supported("text", text, "an object with format")
    if text.get("verbosity") not in (None, "medium"):
        raise not_supported("text.verbosity", text["verbosity"], "medium")
    match text.get("format"):
        case None | {"type": "text"}:
            return {}
        case {"type": "json_schema", **schema}:
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case {"type": "json_object"}:
            return {"response_format": {"type": "json_object"}}
        case given:
            raise not_supported("text.format", given, "text, json_object, json_schema")


# Classes and functions that make a response's output and events.


class Tokens(msgspec.Struct, frozen=True):
    prompt: int
    output: int
    cached: int
    input_details: Mapping[str, Any] = {}
    output_details: Mapping[str, Any] = {}


@dataclass(slots=True)
class _Item:
    """One item of a response's output; `texts` are the pieces of its text or reasoning in order,
    and `call` is the call that it is.
    """

    kind: str
    id: str
    index: int
    call: BegunCall | None = None
    texts: list[str] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts) if self.call is None else self.call.arguments

    def part(self, text: str) -> Fields:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def described(self, *, is_new: bool = False) -> Fields:
        made: Fields = {"type": self.kind, "id": self.id, "status": self.status}
        text = "" if is_new else self.text
        if self.call is not None:
            return made | {"call_id": self.call.id, "name": self.call.name, "arguments": text}
        content = [] if is_new else [self.part(text)]
        if self.kind == "reasoning":
            return made | {"summary": [], "content": content}
        return made | {"role": "assistant", "content": content}


class Translator:
    """Translates a chat's events to events of one response, numbered in order. A response that ends
    with an error, or with a fault, fails, and its last item is incomplete.
    """

    def __init__(self, stored: Stored, asked: ResponseRequest, model: str) -> None:
        self._stored = stored
        self._asked = asked
        self._model = model
        self._number = 0
        # Reason why the chat cannot be translated any further; None: it can.
        self.fault: str | None = None
        self._items: list[_Item] = []
        self._text = ""  # Text that has come within an open call, and belongs behind it.
        self._calls = CallLog()
        self._finish_reason: str | None = None
        self._error: Mapping[str, Any] | None = None

    def begin(self) -> list[Event]:
        response = self.response(None)
        events = [self._event("response.created", response=response)]
        return [*events, self._event("response.in_progress", response=response)]

    def take(self, data: bytes) -> list[Event]:
        """Return the response's events that one event of the chat causes; none after a fault."""
        return self._made(self._taken(data))

    def end(self, tokens: Tokens) -> list[Event]:
        """Return the response's last events, after the chat's stream is complete."""
        events = [] if self._error is not None else self._made(self._finished())
        if (item := self._current) is not None:
            item.status = "incomplete"
        kind = {"completed": "completed", "failed": "failed"}.get(self.status, "incomplete")
        return [*events, self._event(f"response.{kind}", response=self.response(tokens))]

    @property
    def status(self) -> str:
        if self._error is not None:
            return CANCELLED if self._error.get("code") == CANCELLED else "failed"
        if self._finish_reason is None:
            return "in_progress"
        return "incomplete" if self._finish_reason in _CUTS else "completed"

    def response(self, tokens: Tokens | None, *, is_queued: bool = False) -> Fields:
        """Return the response's object as it is now. `tokens`: the counts of an ended response;
        None: not ended.
        """
        asked, status = self._asked.fields, self.status if tokens else "in_progress"
        usage = None
        if tokens is not None:
            usage = {
                "input_tokens": tokens.prompt,
                "input_tokens_details": {**tokens.input_details, "cached_tokens": tokens.cached},
                "output_tokens": tokens.output,
                "output_tokens_details": {"reasoning_tokens": 0, **tokens.output_details},
                "total_tokens": tokens.prompt + tokens.output,
            }
        error = None
        if status == "failed" and self._error is not None:
            error = {"code": "server_error", "message": self._error["message"]}
        return {
            "id": self._stored.id,
            "object": "response",
            "created_at": self._stored.created_at,
            "status": "queued" if is_queued and status == "in_progress" else status,
            "background": self._asked.background,
            "error": error,
            "incomplete_details": {"reason": _CUTS[self._finish_reason or ""]}
            if status == "incomplete"
            else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata", {}),
            "model": self._model,
            "output": [item.described() for item in self._items],
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": asked.get("reasoning", {}).get("effort"), "summary": None},
            "store": self._asked.store,
            "temperature": asked.get("temperature", 1.0),
            "text": asked.get("text", {"format": {"type": "text"}}),
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "top_p": asked.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": usage,
            "user": asked.get("user"),
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _made(self, events: Iterable[Event]) -> list[Event]:
        made, fault = made_of(events)
        if fault is not None:
            self.fault, self._error = fault, {"message": fault}
        return made

    def _taken(self, data: bytes) -> Iterable[Event]:
        if self._error is not None:
            return
        chunk = chunk_of(data)
        if chunk.error is not None:
            message, _, code = read_error(chunk.error)
            self._error = {"message": message, "code": code}
            return
        for choice in chunk.choices or ():
            yield from self._take(choice)

    def _finished(self) -> Iterable[Event]:
        if self._finish_reason is None:
            raise UndecodableError("the chat ended without a finish reason")
        yield from self._add_text(is_behind_call=True)
        yield from self._close()
        if not self._items:
            yield from self._open("message")
            yield from self._close()

    def _take(self, choice: ReceivedChoice) -> Iterable[Event]:
        reasoning = choice.delta.reasoning_content or choice.delta.reasoning
        if reasoning:
            yield from self._add("reasoning", reasoning, "response.reasoning_text.delta")
        self._text += choice.plain_text
        yield from self._add_text()
        for raw in choice.delta.tool_calls or ():
            yield from self._add_call(raw)
        yield from self._add_text()
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
            self._check_complete()

    @property
    def _current(self) -> _Item | None:
        """Return the item that is not done; None: all are."""
        return self._items[-1] if self._items and self._items[-1].status == "in_progress" else None

    def _add(self, kind: str, text: str, delta: str) -> Iterable[Event]:
        if (item := self._current) is None or item.kind != kind:
            yield from self._open(kind)
            item = self._items[-1]
        item.texts.append(text)
        logprobs: Fields = {"logprobs": []} if kind == "message" else {}
        yield self._event(delta, **self._place(item), content_index=0, delta=text, **logprobs)

    def _add_text(self, *, is_behind_call: bool = False) -> Iterable[Event]:
        """Add the text that has come; text within a call waits for the call's end."""
        call = None if self._current is None else self._current.call
        if self._text and (is_behind_call or call is None or not call.goes_on):
            text, self._text = self._text, ""
            yield from self._add("message", text, "response.output_text.delta")

    def _add_call(self, raw: msgspec.Raw) -> Iterable[Event]:
        call, arguments = self._calls.take(raw)
        if call.is_closed:
            return
        if (item := self._current) is None or item.call is not call:
            call.check_named()
            yield from self._add_text(is_behind_call=True)
            yield from self._open("function_call", call)
            item = self._items[-1]
        if arguments:
            kind = "response.function_call_arguments.delta"
            yield self._event(kind, **self._place(item), delta=arguments)

    def _open(self, kind: str, call: BegunCall | None = None) -> Iterable[Event]:
        yield from self._close()
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        index = len(self._items)
        item = _Item(kind, f"{prefix}_{self._stored.id[5:]}{index:02}", index, call)
        self._items.append(item)
        described = item.described(is_new=True)
        yield self._event("response.output_item.added", output_index=index, item=described)
        if kind != "function_call":
            part, place = item.part(""), self._place(item)
            yield self._event("response.content_part.added", **place, content_index=0, part=part)

    def _check_complete(self) -> bool:
        """Return whether the item that is not done is complete: a call may not be, in a chat whose
        output was cut.

        Raises:
            UndecodableError: it is a call that is not complete, and the chat was not cut.
        """
        item = self._current
        try:
            if item is not None and item.call is not None:
                item.call.check_complete()
        except UndecodableError:
            if self._finish_reason not in _CUTS:
                raise
            return False
        return True

    def _close(self) -> Iterable[Event]:
        if (item := self._current) is None:
            return
        item.status = "completed" if self._check_complete() else "incomplete"
        text, place = item.text, self._place(item)
        if item.call is None:
            more: Fields = {"logprobs": []} if item.kind == "message" else {}
            kind = "output_text" if item.kind == "message" else "reasoning_text"
            done, part = f"response.{kind}.done", item.part(text)
            yield self._event(done, **place, content_index=0, text=text, **more)
            done = "response.content_part.done"
            yield self._event(done, **place, content_index=0, part=part)
        else:
            item.call.is_closed = True
            if item.status == "completed":
                kind, name = "response.function_call_arguments.done", item.call.name
                yield self._event(kind, **place, name=name, arguments=text)
        done = "response.output_item.done"
        yield self._event(done, output_index=item.index, item=item.described())

    def _place(self, item: _Item) -> Fields:
        return {"item_id": item.id, "output_index": item.index}


def encoded(events: Iterable[Event], after: int, write: Callable[[bytes], None]) -> None:
    """Write the events numbered above `after` as server-sent events, by one call of `write`."""
    data = b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        for event in events
        if event["sequence_number"] > after
    )
    if data:
        write(data)
