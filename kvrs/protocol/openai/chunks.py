"""Answers of the OpenAI API: whole responses, chunks of a stream, and errors.

The first part has what kvrs's engines write, the second what a proxy reads from any engine.

An engine's facts about a whole stream beside its token counts: details of the usage (reasoning,
modalities of the prompt), and other fields of the usage event.

Only an engine that has seen the whole stream has them, so a cut stream has none. The proxy counts
the tokens itself.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvrs.protocol.instance import KvTransferParams, TokenId

# Error code of a request longer than the model takes, by which clients fall back to another model.
TOO_LONG = "context_length_exceeded"
# Error code of a stream whose logits are not numbers: its weights or activations overflow.
NOT_A_NUMBER = "not_a_number"
# Error code of a stream whose output cannot be passed on in the form of the client's API.
UNDECODABLE = "undecodable"
# Texts by which vLLM's errors say that a request is too long, since they have no code.
_TOO_LONG = re.compile(r"maximum (context|model) length|max_model_len", re.IGNORECASE)

# Answers as kvrs's engines write them. In every choice `token_ids` stays last, so that a proxy can
# cut the ids out of the bytes by offset.


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None  # Prompt tokens found in the prefix cache; None: not reported.


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; None: the engine does not report the number."""
        details = self.prompt_tokens_details
        return details.cached_tokens if isinstance(details, PromptDetails) else None


def usage_of(prompt: int, produced: int, cached: int | None) -> Usage:
    details = msgspec.UNSET if cached is None else PromptDetails(cached)
    return Usage(prompt, produced, prompt + produced, details)


class Logprobs(msgspec.Struct):
    """Log probabilities of the tokens of a completion, or of one chunk of it.

    `text_offset[i]` is the position of token i in the characters of the whole output.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(msgspec.Struct):
    text: str
    index: int = 0
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """A whole completion, or a chunk of a streamed one. The last chunk alone has `usage`, if the
    client asked for it.
    """

    id: str
    created: int
    model: str
    choices: list[Choice]
    object: str = "text_completion"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: KvTransferParams | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str  # Arguments in JSON, as OpenAI writes them.


class ToolCall(msgspec.Struct):
    """A tool call of a message; in a chunk of a stream the call has an `index` too."""

    id: str
    function: FunctionCall
    type: str = "function"
    index: int | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """The part of the message that one chunk adds; unset fields are left out of the JSON."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """One chunk of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    # Ids of the prompt, in the first event only, and only if prefill has not returned them.
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """A whole chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: str = "chat.completion"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: KvTransferParams | msgspec.UnsetType = msgspec.UNSET


# Answers of any engine at either endpoint, as a proxy reads them. Every event that the relay cannot
# handle by searching its bytes is decoded to these structs, so fields that are seldom read stay
# undecoded.


class ReceivedDelta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # Newer name of `reasoning_content`, used by some engines.
    tool_calls: list[msgspec.Raw] | None = None


class ReceivedChoice(msgspec.Struct, gc=False):
    """A choice of a completion (`text`) or of a chat (`delta`)."""

    text: str = ""
    delta: ReceivedDelta = msgspec.field(default_factory=ReceivedDelta)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[TokenId] | None = None
    logprobs: msgspec.Raw = msgspec.Raw()  # Undecoded log probabilities; empty: absent.

    @property
    def plain_text(self) -> str:
        return self.text or self.delta.content or ""

    @property
    def is_parsed(self) -> bool:
        """True if the engine has parsed its output into tool calls or reasoning, so that the text
        alone is not the whole output.
        """
        return bool(self.delta.reasoning_content or self.delta.reasoning or self.delta.tool_calls)

    def logprob_lists(self) -> dict[str, list[msgspec.Raw] | None]:
        """Return the lists of log probabilities by name, with one element per token; empty: the
        choice has none.

        Raises:
            msgspec.DecodeError: they have another form.
        """
        # A shorter value is absent or null: no list fits into as few bytes.
        return _LOGPROBS.decode(self.logprobs) if len(self.logprobs) > len(b"null") else {}


# Finish reasons of an engine that gave the request up (vLLM: aborted, or its engine failed). Any
# other finish reason ends a complete answer.
BROKEN_REASONS = frozenset({"abort", "error"})


class ReceivedChunk(msgspec.Struct, gc=False):
    """One event of a stream: choices, usage or an error."""

    choices: list[ReceivedChoice] | None = None
    usage: Usage | None = None
    error: Any = None


CHUNK = msgspec.json.Decoder(ReceivedChunk)
_LOGPROBS = msgspec.json.Decoder(dict[str, list[msgspec.Raw] | None])


def error_body(
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> bytes:
    """Make the JSON of an error as OpenAI writes it, for the body of a 4xx or 5xx or for an SSE
    event.
    """
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    )


def refusal_body(error: Mapping[str, Any]) -> bytes:
    """Make an error body in OpenAI's form from an engine's refusal of a client's request, whatever
    type and code the engine gives (vLLM: `BadRequestError` and a number).
    """
    message, param, code = str(error.get("message")), error.get("param"), error.get("code")
    if not isinstance(code, str):
        code = TOO_LONG if _TOO_LONG.search(message) else None
    return error_body(message, param=param if isinstance(param, str) else None, code=code)


def failure_body(error: Mapping[str, Any]) -> bytes:
    """Make an error body in OpenAI's form from an engine's failure, with the engine's message,
    which only the client of that request gets.
    """
    message, param = str(error.get("message")), error.get("param")
    return error_body(message, kind="server_error", param=param if isinstance(param, str) else None)


def error_kind(error: Any) -> str:
    """Return type and code of a decoded error body or event, for logs.

    Its message is left out, because it may quote a prompt.
    """
    match error:
        case {"error": {"type": kind, "code": code}} if kind or code:
            return f" ({', '.join(str(part)[:80] for part in (kind, code) if part)})"
        case _:
            return ""


def sse(data: bytes) -> bytes:
    """Encode data as one server-sent event."""
    return b"data: " + data + b"\n\n"


DONE = sse(b"[DONE]")


_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_OF_PROMPT, _OF_OUTPUT = "prompt_tokens_details", "completion_tokens_details"
# Fields of a usage event that are kept: others may be parameters of transfers between instances.
_BESIDE = ("system_fingerprint", "service_tier", "metrics")


class EngineFacts(msgspec.Struct, frozen=True):
    """Facts of one stream: `details` go into the usage, `beside` into the answer."""

    details: dict[str, Any] = {}
    beside: dict[str, Any] = {}


NO_FACTS = EngineFacts()


def facts_of(event: Mapping[str, Any]) -> EngineFacts:
    """Return the facts in a decoded usage event, except the cached tokens, which the prefill
    instance counts.
    """
    details = _non_null(
        {name: each for name, each in event["usage"].items() if name not in _COUNTS}
    )
    for name in (_OF_PROMPT, _OF_OUTPUT):
        if not isinstance(each := details.get(name, {}), dict):
            del details[name]
        else:
            each.pop("cached_tokens", None)
    beside = {name: event[name] for name in _BESIDE if name in event}
    return EngineFacts(details, _non_null(beside))


def with_facts(usage: Usage, facts: EngineFacts) -> Mapping[str, Any]:
    """Return the usage that the client gets: `usage`, and the details that the engine reported."""
    counts: dict[str, Any] = msgspec.to_builtins(usage)
    details = dict(facts.details)
    of_prompt = {**details.pop(_OF_PROMPT, {}), **counts.pop(_OF_PROMPT, {})}
    return counts | ({_OF_PROMPT: of_prompt} if of_prompt else {}) | details


def facts_together(choices: Sequence[tuple[EngineFacts | None, bool]]) -> EngineFacts:
    """Merge the facts of several choices, each with whether it is the first choice of its prompt.
    None: a stream was cut.

    Numbers are added. Numbers about a prompt count once for its choices. Values that differ and
    cannot be added are left out.
    """
    found = [facts for facts, _ in choices if facts is not None]
    if len(found) < len(choices):
        return NO_FACTS
    if len(found) == 1:
        return found[0]
    of_prompt = [_part(facts, _OF_PROMPT) for facts, is_first in choices if is_first]
    others = [_without(facts.details, _OF_PROMPT) for facts in found]
    details = _together(others) | _together(of_prompt)
    beside = {
        name: value
        for name, value in found[0].beside.items()
        if all(facts.beside.get(name) == value for facts in found)
    }
    return EngineFacts(details, beside)


def _part(facts: EngineFacts | None, name: str) -> dict[str, Any]:
    details = {} if facts is None else facts.details
    return {name: details[name]} if name in details else {}


def _without(details: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {each: value for each, value in details.items() if each != name}


def _together(given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for each in given for name in each)
    made = {name: _sum(each[name] for each in given if name in each) for name in names}
    return _non_null(made)


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of numbers, or the value that all others equal; None: they differ and cannot
    be added.
    """
    first, *rest = values
    if isinstance(first, dict) and all(isinstance(each, dict) for each in rest):
        return _together([first, *rest])
    if all(type(each) in (int, float) for each in (first, *rest)):
        return sum(rest, start=first)
    return first if all(each == first for each in rest) else None


def _non_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without those that are null, in inner objects too."""
    return {
        name: _non_null(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }
