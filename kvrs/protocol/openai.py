"""The part of the OpenAI API that kvrs speaks, as a client, a proxy and an engine see it: completions and chat.

What is not supported is refused by name; nothing is silently ignored that would change the output.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from kvrs.errors import RequestError
from kvrs.protocol.instance import KvrsParams, KvTransferParams

MAX_STOP_STRINGS = 16
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20

# What clients send.


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # Refused, unless it is false: tokens are counted at the end.


class _Refused(msgspec.Struct, kw_only=True):
    """Fields that would change the output in ways that no engine of ours can continue, or knows. Allowed values: `_NEUTRAL`."""

    best_of: Any = None
    suffix: Any = None
    logit_bias: Any = None
    min_p: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    return_tokens_as_token_ids: Any = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    include_reasoning: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    documents: Any = None


class _SamplingRequest(_Refused, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    min_tokens: int = 0
    given_temperature: float | None = msgspec.field(default=None, name="temperature")
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens.
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str = ""
    user: str | None = None
    kv_transfer_params: KvTransferParams | None = None
    kvrs: KvrsParams | None = None

    @property
    def temperature(self) -> float:
        return 1.0 if self.given_temperature is None else self.given_temperature

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class CompletionRequest(_SamplingRequest, kw_only=True):
    """Body of `POST /v1/completions`. Ranges are checked by `parse_completion_request`."""

    prompt: str | list[int]
    max_tokens: int = 16
    add_special_tokens: Any = None  # Refused, unless it is true.
    echo: bool = False
    logprobs: int | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens are to be named beside each sampled one; None: no log probabilities."""
        return self.logprobs


class ChatRequest(_SamplingRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`. Ranges are checked by `parse_chat_request`.

    `messages` stays in the bytes it came in, since it may be long and only the engine's template reads it.
    """

    messages: msgspec.Raw
    add_special_tokens: Any = None  # Refused, unless it is false: a template writes the special tokens itself.
    echo: Any = None  # Refused: in other servers it repeats the last message.
    max_tokens: int | None = None  # None: whatever the prompt leaves of the engine's `max_model_len`.
    max_completion_tokens: int | None = None  # The newer name; None once parsed, `max_tokens` has it then.
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """As in `CompletionRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def may_call_tools(self) -> bool:
        """Whether `<tool_call>` in the output means a call, rather than text."""
        return bool(self.tools) and self.tool_choice != "none"


# What engines answer. In every choice `token_ids` stays last, so that a proxy can cut it out of the bytes by offset.


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Logprobs(msgspec.Struct):
    """Log probabilities of the tokens of a completion, or of one event of it.

    `text_offset[i]` is where token i begins, counted from the start of the stream's output.
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
    """A whole answer, or one chunk of a streamed one (then `usage` is set on the last chunk only, if asked for)."""

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
    arguments: str  # JSON, as OpenAI gives it.


class ToolCall(msgspec.Struct):
    """A call of the answer's message; in a delta it carries its `index` too."""

    id: str
    function: FunctionCall
    type: str = "function"
    index: int | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """What one chunk adds to the message. What it does not add is not named."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """One event of a streamed answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # Of the first event, where no other call has told them.


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
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: str = "chat.completion"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: KvTransferParams | msgspec.UnsetType = msgspec.UNSET


# From bytes to requests.


class _Message(msgspec.Struct):
    role: str


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PROMPTS = msgspec.json.Decoder(list[str | list[int]])
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_MESSAGES = msgspec.json.Decoder(list[_Message])

_MISSING = re.compile("Object missing required field `(.*)`")

# What a refused field may say, because it changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "min_p": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "include_reasoning": (True,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
}

# field: (lowest, highest) allowed value
_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 1 << 24),
    "min_tokens": (0, 1 << 24),
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1 << 24),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 2.0),
    "n": (1, MAX_CHOICES),
}
_LOGPROBS_RANGE = (0, MAX_TOP_LOGPROBS)

Request = TypeVar("Request", CompletionRequest, ChatRequest)


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Decode and check the body of `POST /v1/completions`.

    Raises:
        RequestError: malformed JSON, a wrong type, a value out of range, or a feature that is not supported.
    """
    request = _decode_body(_COMPLETION, body)
    _check(request)
    _check_neutral("add_special_tokens", request.add_special_tokens, (True,))
    _check_range("logprobs", request.logprobs, *_LOGPROBS_RANGE)
    if len(request.prompt) == 0:
        raise RequestError("prompt must not be empty", param="prompt")
    if not isinstance(request.prompt, str):
        _check_ids("prompt", request.prompt)
    if request.echo and request.logprobs is not None:
        raise RequestError("echo together with logprobs is not supported: use one of them", param="echo")
    return request


def parse_chat_request(body: bytes) -> ChatRequest:
    """Decode and check the body of `POST /v1/chat/completions`. What the messages hold is for the engine's template to judge.

    Raises:
        RequestError: as `parse_completion_request`.
    """
    request = _decode_body(_CHAT, body)
    _check_neutral("add_special_tokens", request.add_special_tokens, (False,))
    _check_neutral("echo", request.echo, (False,))
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise RequestError(
                f"max_completion_tokens ({request.max_completion_tokens}) and its older name max_tokens ({request.max_tokens}) "
                "contradict each other",
                param="max_completion_tokens",
            )
        request.max_tokens, request.max_completion_tokens = request.max_completion_tokens, None
    _check(request)
    _check_range("top_logprobs", request.top_logprobs, *_LOGPROBS_RANGE)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.tool_choice not in (None, "none", "auto"):
        raise RequestError(
            f"tool_choice={request.tool_choice!r:.80} needs guided decoding, which is not supported; allowed: 'none', 'auto'",
            param="tool_choice",
        )
    if not _decode(_MESSAGES, bytes(request.messages), "messages"):
        raise RequestError("messages must not be empty", param="messages")
    return request


Decoded = TypeVar("Decoded")


def _decode_body(decoder: msgspec.json.Decoder[Decoded], body: bytes) -> Decoded:
    """Decode what a client sent, in the other forms too in which clients say the same."""
    try:
        # What is passed on undecoded must be JSON as well, so that no engine stumbles over it.
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    try:
        return _decode(decoder, body)
    except RequestError:
        plain = _plainly(body)
        if plain is None:
            raise
    return _decode(decoder, plain)


def _plainly(body: bytes) -> bytes | None:
    """The body without fields that are null, which say nothing, and with one prompt where it has a list of one; None: it is
    no object.
    """
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    fields = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    if "prompt" in fields:
        fields["prompt"] = _only_prompt(fields["prompt"])
    return msgspec.json.encode(fields)


def _only_prompt(prompt: msgspec.Raw) -> msgspec.Raw:
    try:
        prompts = _PROMPTS.decode(prompt)
    except msgspec.DecodeError:
        return prompt
    if len(prompts) > 1:
        raise RequestError(f"{len(prompts)} prompts in one request are not supported; allowed: one", param="prompt")
    return msgspec.Raw(msgspec.json.encode(prompts[0])) if prompts else prompt


def _decode(decoder: msgspec.json.Decoder[Decoded], body: bytes, field: str = "") -> Decoded:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = (field + path.rstrip("`")).lstrip(".")
        if not path and (missing := _MISSING.match(message)):
            path = missing[1]
        raise RequestError(f"{message} (field {path or 'body'})", param=path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _check(request: CompletionRequest | ChatRequest) -> None:
    for name in _Refused.__struct_fields__:
        _check_neutral(name, getattr(request, name), _NEUTRAL.get(name, ()))
    if request.stream_options is not None:
        name = "stream_options.continuous_usage_stats"
        _check_neutral(name, request.stream_options.continuous_usage_stats, (False,))
    for name, (lowest, highest) in _RANGES.items():
        _check_range(name, getattr(request, name), lowest, highest)
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens must be at most max_tokens ({request.max_tokens}), got {request.min_tokens}",
            param="min_tokens",
        )
    if len(request.stop_strings) > MAX_STOP_STRINGS or "" in request.stop_strings:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop")
    if request.kvrs is not None and request.kvrs.token_ids is not None:
        _check_ids("kvrs.token_ids", request.kvrs.token_ids)


def _check_neutral(name: str, value: Any, neutral: Sequence[Any]) -> None:
    if value is not None and value not in neutral:
        allowed = " or ".join(msgspec.json.encode(value).decode() for value in (*neutral, None))
        raise RequestError(f"{name}={value!r:.80} is not supported; allowed: {allowed}", param=name)


def _check_range(name: str, value: float | None, lowest: float, highest: float) -> None:
    if value is not None and not lowest <= value <= highest:
        raise RequestError(f"{name} must be in [{lowest}, {highest}], got {value!r:.80}", param=name)


def _check_ids(name: str, token_ids: list[int]) -> None:
    if not token_ids:
        raise RequestError(f"{name} must not be empty", param=name)
    if min(token_ids) < 0:
        raise RequestError(f"token ids must not be negative, got {min(token_ids)}", param=name)


def error_body(message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of an OpenAI-style error, for a 4xx or 5xx body or an SSE event."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_kind(said: Any) -> str:
    """Of what kind a decoded error body or event is; for causes, which are logged: its message may quote a prompt."""
    match said:
        case {"error": {"type": kind, "code": code}} if kind or code:
            return f" ({', '.join(str(part)[:80] for part in (kind, code) if part)})"
        case _:
            return ""


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


DONE = sse(b"[DONE]")
