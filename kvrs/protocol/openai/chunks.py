"""Answers of the OpenAI API: whole responses, chunks of a stream, and errors.

The first part has what kvrs's engines write, the second what a proxy reads from any engine.
"""

import re
from collections.abc import Mapping
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
