"""Translation of Anthropic's Messages API to chat: a request becomes a chat's request, and a
message and its events a pure function of the chat's, so any proxy makes the same ones.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from kvrs.errors import RequestError, UndecodableError
from kvrs.protocol.openai.chunks import NOT_A_NUMBER, UNDECODABLE, ReceivedChoice, Usage
from kvrs.protocol.openai.decoding import MAX_ELEMENTS, UNREADABLE
from kvrs.protocol.openai.translated import (
    AS_IN_CHAT,
    BegunCall,
    CallLog,
    CallPiece,
    Event,
    Fields,
    arguments_of,
    chunk_of,
    list_of,
    made_of,
    not_supported,
    read_error,
    read_fields,
    string_of,
)

OVERLOADED = 529  # Status of Anthropic's API for what is 503 elsewhere.
# Code of an error by which Anthropic's SDK knows that it has to hold the conversation itself.
NO_THREADS = "thread_unsupported_request"

# Type of an error with a status; others are `invalid_request_error` below 500, else `api_error`.
_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Type of an error that ends a stream: by the code of the chat's error, else by the chat's type,
# else `invalid_request_error`. Agents repeat a message after `overloaded_error`, so an error that
# would come again has another type.
_OF_CODE = {
    "denied": "api_error",
    "superseded": "api_error",  # The client itself goes on with the stream, at another proxy.
    "poison": "api_error",
    NOT_A_NUMBER: "api_error",
    UNDECODABLE: "api_error",
}
_OF_KIND = {"rate_limit_error": "overloaded_error", "server_error": "overloaded_error"}

_OBJECT = msgspec.json.Decoder(dict[str, Any])


def error_of(body: bytes, status: int, request_id: str) -> tuple[int, bytes]:
    """Return status and body of an error in Anthropic's form, from those of OpenAI's."""
    error = _OBJECT.decode(body)["error"]
    kind = _OF_STATUS.get(status, "invalid_request_error" if status < 500 else "api_error")
    made = {"type": kind, "message": error["message"]}
    if error.get("code") == NO_THREADS:
        made["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    encoded = msgspec.json.encode({"type": "error", "error": made, "request_id": request_id})
    return OVERLOADED if status == 503 else status, encoded


def error_event(error: Any) -> Event:
    """Return the event with which a message's stream ends, from the error of the chat's stream."""
    message, kind, code = read_error(error)
    ended = _OF_CODE.get(code) or _OF_KIND.get(kind, "invalid_request_error")
    return {"type": "error", "error": {"type": ended, "message": message}}


def fault_event(fault: str) -> Event:
    """Return the event with which a stream ends whose chat cannot be translated."""
    return error_event({"message": fault, "type": "server_error", "code": UNDECODABLE})


_NEUTRAL: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
# Accepted without effect. Whether a model thinks is up to its template (`chat_template_kwargs`).
_IGNORED = {
    *("cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"),
    *("thinking", "user_profile_id", "workspace_id"),
}
_OWN = {
    *("context_management", "max_tokens", "messages", "output_config", "stop_sequences", "stream"),
    *("system", "thread", "tool_choice", "tools"),
}
_ALLOWED = _IGNORED | _OWN | AS_IN_CHAT
# Fields of a chat that its prompt depends on.
_OF_PROMPT = {
    *("chat_template_kwargs", "messages", "model", "reasoning_effort", "tool_choice", "tools"),
}
_CHOICES: dict[Any, str] = {"auto": "auto", "any": "required", "none": "none"}
# Claude Code begins its instructions with this block, whose number differs from request to request,
# so that no cache would find the prompt.
_BILLING = "x-anthropic-billing-header"

_FINISHES = {"length": "max_tokens", "content_filter": "refusal"}


def chat_of(body: bytes, max_elements: int = MAX_ELEMENTS) -> bytes:
    """Return the body of the chat completion that produces a message.

    Raises:
        RequestError: malformed, or an unsupported field or block.
    """
    fields, chat = _read(body, max_elements)
    if "max_tokens" not in fields:
        raise RequestError("max_tokens is missing", param="max_tokens")
    chat["max_tokens"] = fields["max_tokens"]
    if "stop_sequences" in fields:
        chat["stop"] = fields["stop_sequences"]
    if fields.get("stream", False) is not False:
        chat |= {"stream": fields["stream"], "stream_options": {"include_usage": True}}
    return msgspec.json.encode(chat)


def prompt_of(body: bytes, max_elements: int = MAX_ELEMENTS, **more: int) -> bytes:
    """Return the body of a chat completion with the prompt of a message, and `more` fields.

    Raises:
        RequestError: like `chat_of`.
    """
    _, chat = _read(body, max_elements)
    return msgspec.json.encode({name: chat[name] for name in chat if name in _OF_PROMPT} | more)


def _read(body: bytes, max_elements: int) -> tuple[Fields, Fields]:
    """Return the fields of a body, and those of the chat without its stream and length."""
    fields = read_fields(body, _ALLOWED, _NEUTRAL, max_elements)
    _check_context(fields)
    _check_thread(fields)
    chat: Fields = {name: fields[name] for name in fields if name in AS_IN_CHAT}
    return fields, chat | {"messages": _messages(fields)} | _tools(fields) | _output(fields)


def _messages(fields: Fields) -> list[Fields]:
    system = _texts(fields.get("system", []), "system")
    system = [text for text in system if not text.startswith(_BILLING)]
    messages = list[Fields]()
    for place, message in enumerate(list_of(fields, "messages", "a list of messages")):
        param = f"messages[{place}]"
        if not isinstance(message, dict):
            raise not_supported(param, message, "an object with role and content")
        content, where = message.get("content"), f"{param}.content"
        match message.get("role"):
            case "system":
                # Chat templates accept instructions in the first message only.
                system += _texts(content, where)
            case "user":
                messages += _of_user(_blocks(content, where))
            case "assistant":
                messages.append(_of_assistant(_blocks(content, where)))
            case role:
                raise not_supported(f"{param}.role", role, "user, assistant, system")
    if messages and messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages must not end with role assistant: a begun answer is not continued",
            param="messages",
        )
    return [{"role": "system", "content": "\n".join(system)}, *messages] if system else messages


def _blocks(content: Any, param: str) -> Iterable[tuple[Fields, str]]:
    """Yield the blocks of a content, each with its place."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise not_supported(param, content, "a string or a list of blocks")
    for place, block in enumerate(content):
        if not isinstance(block, dict):
            raise not_supported(f"{param}[{place}]", block, "an object")
        yield block, f"{param}[{place}]"


def _texts(content: Any, param: str) -> list[str]:
    return [_text(block, where) for block, where in _blocks(content, param)]


def _text(block: Fields, param: str) -> str:
    if block.get("type") != "text":
        raise not_supported(f"{param}.type", block.get("type"), "text")
    return string_of(block, "text", param)


def _of_user(blocks: Iterable[tuple[Fields, str]]) -> list[Fields]:
    """Return the messages of one turn: results of tools first, as in Anthropic's requests."""
    results, parts = list[Fields](), list[Fields]()
    for block, param in blocks:
        match block.get("type"):
            case "text" | "image":
                parts.append(_part(block, param))
            case "tool_result":
                inner = [_part(*each) for each in _blocks(block.get("content") or [], param)]
                texts = [part["text"] for part in inner if part["type"] == "text"]
                parts += [part for part in inner if part["type"] != "text"]
                call_id = string_of(block, "tool_use_id", param)
                text = "\n".join(texts)
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case kind:
                raise not_supported(f"{param}.type", kind, "text, image, tool_result")
    if not parts and results:
        return results
    content: Any = parts
    if all(part["type"] == "text" for part in parts):
        content = "\n".join(part["text"] for part in parts)
    return [*results, {"role": "user", "content": content}]


def _part(block: Fields, param: str) -> Fields:
    if block.get("type") != "image":
        return {"type": "text", "text": _text(block, param)}
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            url = f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise not_supported(f"{param}.source", block.get("source"), "of type base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _of_assistant(blocks: Iterable[tuple[Fields, str]]) -> Fields:
    texts, calls = list[str](), list[Fields]()
    for block, param in blocks:
        match block.get("type"):
            case "text":
                texts.append(string_of(block, "text", param))
            case "tool_use":
                arguments = msgspec.json.encode(block.get("input", {})).decode()
                function: Fields = {"name": string_of(block, "name", param), "arguments": arguments}
                call_id = string_of(block, "id", param)
                calls.append({"id": call_id, "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                pass  # Left out, as chat templates leave out the reasoning of earlier turns.
            case kind:
                raise not_supported(f"{param}.type", kind, "text, tool_use, thinking")
    content = "".join(texts) if texts or not calls else None
    made: Fields = {"role": "assistant", "content": content}
    return made | {"tool_calls": calls} if calls else made


def _tools(fields: Fields) -> Fields:
    made: Fields = {}
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise not_supported("tools", tools, "a list")
    for place, tool in enumerate(tools):
        param = f"tools[{place}]"
        if not isinstance(tool, dict):
            raise not_supported(param, tool, "an object")
        if tool.get("type") not in (None, "custom"):
            raise not_supported(f"{param}.type", tool["type"], "custom")
        if not isinstance(schema := tool.get("input_schema"), dict):
            raise not_supported(f"{param}.input_schema", schema, "an object")
        function: Fields = {"name": string_of(tool, "name", param), "parameters": schema}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        if (strict := tool.get("strict")) is not None:
            if not isinstance(strict, bool):
                raise not_supported(f"{param}.strict", strict, "true or false")
            function["strict"] = strict
        made.setdefault("tools", []).append({"type": "function", "function": function})
    match fields.get("tool_choice"):
        case None:
            return made
        case {"type": "tool", "name": str(name)}:
            made["tool_choice"] = {"type": "function", "function": {"name": name}}
        case {"type": "auto" | "any" | "none" as kind}:
            made["tool_choice"] = _CHOICES[kind]
        case choice:
            raise not_supported("tool_choice", choice, "of type auto, any, none, or tool with name")
    if fields["tool_choice"].get("disable_parallel_tool_use"):
        made["parallel_tool_calls"] = False
    return made


def _output(fields: Fields) -> Fields:
    config, made = fields.get("output_config", {}), Fields()
    if not isinstance(config, dict) or config.keys() - {"effort", "format"}:
        raise not_supported("output_config", config, "an object with effort, format")
    if config.get("effort") is not None:
        made["reasoning_effort"] = config["effort"]
    match config.get("format"):
        case None:
            pass
        case {"type": "json_schema", "schema": schema}:
            form = {"name": "output", "schema": schema}
            made["response_format"] = {"type": "json_schema", "json_schema": form}
        case given:
            raise not_supported("output_config.format", given, "json_schema with schema")
    return made


def _check_context(fields: Fields) -> None:
    """Refuse edits of the context other than those that the translation makes anyway: it leaves out
    the thinking of earlier turns.
    """
    match fields.get("context_management"):
        case None:
            return
        case {"edits": list(edits)} if all(
            isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking")
            for edit in edits
        ):
            return
        case given:
            raise not_supported("context_management", given, "edits of type clear_thinking")


def _check_thread(fields: Fields) -> None:
    """Refuse a conversation that the server is to hold, with the code by which a client knows to
    send each request whole: without a refusal it would send only what is new.
    """
    if "thread" in fields:
        raise RequestError(
            "thread is not supported; allowed: all messages in each request",
            param="thread",
            code=NO_THREADS,
        )


# Classes and functions that make a message and its events.


class MessageTranslator:
    """Translates a chat's events to events of one message. A message that ends with an error, or
    with a fault, has neither the end of its open block nor its own end.
    """

    def __init__(self) -> None:
        self.has_begun = False
        # Reason why the chat cannot be translated any further; None: it can.
        self.fault: str | None = None
        # Open content block: its kind, or its tool call; None: no block is open.
        self._block: str | BegunCall | None = None
        self._text = ""  # Text that has come within an open call, and belongs behind it.
        self._index = -1  # Index of the latest block.
        self._finish: ReceivedChoice | None = None
        self._calls = CallLog()
        self._usage: Usage | None = None

    def begin(self, head: bytes, prompt_tokens: int) -> list[Event]:
        """Return the first event. `head`: as in `Journal`."""
        self.has_begun = True
        try:
            found = _HEAD.decode(head + b"}")
        except UNREADABLE:
            self.fault = "the engine's first event has no id and model"
            return []
        message = _message(found, [], None, None, Usage(prompt_tokens, 0, prompt_tokens))
        return [{"type": "message_start", "message": message}]

    def take(self, data: bytes) -> list[Event]:
        """Return the message's events that one event of the chat causes; after a fault only an
        error causes one.
        """
        return self._made(self._taken(data))

    def end(self) -> list[Event]:
        """Return the message's last events, after the chat's stream is complete; those of a chat
        with a fault are an error.
        """
        events = self._made(self._ended())
        return events if self.fault is None else [fault_event(self.fault)]

    def _ended(self) -> Iterable[Event]:
        if (finish := self._finish) is None:
            raise UndecodableError("the chat ended without a finish reason")
        yield from self._add_text(is_behind_call=True)
        yield from self._close()
        calls = bool(self._calls.calls)
        reason, sequence = _stop(finish.finish_reason, finish.stop_reason, calls=calls)
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _usage(self._usage or Usage(0, 0, 0))
        yield {"type": "message_delta", "delta": ended, "usage": usage}
        yield {"type": "message_stop"}

    def _made(self, events: Iterable[Event]) -> list[Event]:
        made, fault = made_of(events)
        self.fault = self.fault or fault
        return made

    def _taken(self, data: bytes) -> Iterable[Event]:
        chunk = chunk_of(data)
        if chunk.error is not None:
            yield error_event(chunk.error)
        elif self.fault is None:
            self._usage = chunk.usage or self._usage
            for choice in chunk.choices or ():
                yield from self._take(choice)

    def _take(self, choice: ReceivedChoice) -> Iterable[Event]:
        if thought := choice.delta.reasoning_content or choice.delta.reasoning:
            delta = {"type": "thinking_delta", "thinking": thought}
            yield from self._add("thinking", _thinking(""), delta)
        self._text += choice.plain_text
        yield from self._add_text()
        for raw in choice.delta.tool_calls or ():
            call, arguments = self._calls.take(raw)
            if not call.is_closed:
                call.check_named()
                if call is not self._block:
                    yield from self._add_text(is_behind_call=True)
                delta = {"type": "input_json_delta", "partial_json": arguments}
                yield from self._add(call, _tool_use(call.id, call.name, {}), delta)
        yield from self._add_text()
        if choice.finish_reason is not None:
            self._finish = choice
            self._check_complete()

    def _add_text(self, *, is_behind_call: bool = False) -> Iterable[Event]:
        """Add the text that has come; text within a call waits for the call's end."""
        if not self._text:
            return
        is_within = isinstance(self._block, BegunCall) and self._block.goes_on
        if is_behind_call or not is_within:
            text, self._text = self._text, ""
            delta = {"type": "text_delta", "text": text}
            yield from self._add("text", {"type": "text", "text": ""}, delta)

    def _add(self, block: str | BegunCall, begun: Fields, delta: Fields) -> Iterable[Event]:
        if block != self._block:
            yield from self._close()
            self._block = block
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": begun}
        yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _check_complete(self) -> None:
        """Raise UndecodableError: the open block is a call that is not complete, and no limit has
        cut the chat.
        """
        is_cut = self._finish is not None and self._finish.finish_reason in _FINISHES
        if isinstance(self._block, BegunCall) and not is_cut:
            self._block.check_complete()

    def _close(self) -> Iterable[Event]:
        if self._block is not None:
            self._check_complete()
            if isinstance(self._block, BegunCall):
                self._block.close()
            self._block = None
            yield {"type": "content_block_stop", "index": self._index}


class _Head(msgspec.Struct):
    id: str
    model: str


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPiece] | None = None


class _Choice(msgspec.Struct):
    message: _ChatMessage
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Chat(_Head):
    choices: list[_Choice]
    usage: Usage


class _Count(msgspec.Struct):
    count: int | None = None
    usage: Usage | None = None


_HEAD = msgspec.json.Decoder(_Head)
_CHAT = msgspec.json.Decoder(_Chat)
_COUNT = msgspec.json.Decoder(_Count)


def message_of(completion: bytes) -> bytes:
    """Return the body of the message that a whole chat completion is. Raises UndecodableError: it
    is no chat completion, or a call of it is not complete.
    """
    try:
        chat = _CHAT.decode(completion)
        (choice,) = chat.choices
    except (*UNREADABLE, ValueError):
        raise UndecodableError("the engine's answer is not a chat with one choice") from None
    said, content = choice.message, list[Fields]()
    if thought := said.reasoning_content or said.reasoning:
        content.append(_thinking(thought))
    if said.content:
        content.append({"type": "text", "text": said.content})
    calls = said.tool_calls or []
    for call in calls:
        given = _input(call.arguments, is_cut=choice.finish_reason in _FINISHES)
        content.append(_tool_use(call.id or "", call.said.name or "", given))
    reason, sequence = _stop(choice.finish_reason, choice.stop_reason, calls=bool(calls))
    return msgspec.json.encode(_message(chat, content, reason, sequence, chat.usage))


def count_of(answer: bytes) -> bytes:
    """Return the body of a count of tokens, from a whole chat completion with the same prompt, or
    from an answer to `/tokenize`.
    """
    found = _COUNT.decode(answer)
    tokens = found.count if found.usage is None else found.usage.prompt_tokens
    assert tokens is not None
    return msgspec.json.encode({"input_tokens": tokens})


def _stop(
    finish_reason: str | None, stopped_by: str | int | None, *, calls: bool
) -> tuple[str, str | None]:
    """Return a message's `stop_reason` and `stop_sequence`."""
    if finish_reason in _FINISHES:
        return _FINISHES[finish_reason], None
    if isinstance(stopped_by, str):
        return "stop_sequence", stopped_by
    return "tool_use" if calls else "end_turn", None


def _message(
    head: _Head, content: list[Fields], reason: str | None, sequence: str | None, usage: Usage
) -> Fields:
    return {
        "id": f"msg_{head.id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> Fields:
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _thinking(text: str) -> Fields:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call_id: str, name: str, given: Fields) -> Fields:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def _input(arguments: str, *, is_cut: bool) -> Fields:
    """Return a call's arguments. Those that are no JSON object in a chat that was cut, by
    `max_tokens`, are kept as text, because a call without arguments may be another valid call.
    Raises UndecodableError: they are no JSON object, and the chat was not cut.
    """
    try:
        return arguments_of(arguments)
    except UndecodableError:
        if not is_cut:
            raise
        return {"arguments": arguments}
