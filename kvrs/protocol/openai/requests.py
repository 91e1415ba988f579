"""Completion and chat completion requests of the OpenAI API, as far as kvrs supports them.

Fields that a backend does not take are refused by their names (`fields.py`).

Token ids are packed: four bytes each, where a list takes forty. Long lists are decoded and encoded
in steps, because a call of the decoder or encoder holds the interpreter, whichever thread calls it.
"""

import re
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from kvrs.errors import RequestError
from kvrs.protocol.instance import KvrsParams, KvTransferParams, TokenId
from kvrs.protocol.openai.decoding import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    check_structure,
    decode_as,
    with_whole_numbers,
)
from kvrs.protocol.openai.fields import (
    EMBEDDED,
    VLLM,
    ApiKind,
    check_fields,
    kept_as_they_are,
    takes,
)

_STEP = 1 << 14  # Objects encoded in one step, and bytes decoded in one step.
_STEP_BYTES = 1 << 17
_TOKEN_IDS = msgspec.json.Decoder(list[TokenId])


def packed(ids: Iterable[int]) -> "array[int]":
    """Pack token ids. Raises ValueError: negative, or longer than four bytes."""
    try:
        return array("I", ids)
    except OverflowError:
        raise ValueError("a token id is out of range") from None


def decode_ids(text: bytes) -> "array[int]":
    """Decode a JSON list of token ids. Raises msgspec.ValidationError: the text is not
    such a list.
    """
    text = text.strip()
    end = len(text) - 1
    if end < _STEP_BYTES:
        return packed(_TOKEN_IDS.decode(text))
    ids, at = array("I"), 1
    try:
        while at < end:
            comma = text.find(b",", at + _STEP_BYTES, end)
            after = end if comma < 0 else comma
            ids.extend(packed(_TOKEN_IDS.decode(b"[%b]" % text[at:after])))
            at = after + 1
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:  # The end of a step has cut a value that is not an id.
        raise msgspec.ValidationError("Expected `array` of ids") from None
    return ids


def _encodable(value: Any) -> Any:
    """The hook of msgspec for foreign types. By its contract it raises NotImplementedError for
    types that it cannot encode.
    """
    if not isinstance(value, array):
        raise NotImplementedError(f"{type(value).__name__} has no place in JSON with ids")
    if len(value) <= _STEP:
        return value.tolist()
    steps = (value[at : at + _STEP].tolist() for at in range(0, len(value), _STEP))
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(step)[1:-1] for step in steps) + b"]")


# Encode a value as JSON, with packed ids as lists of integers.
encode_with_ids = msgspec.json.Encoder(enc_hook=_encodable).encode


MAX_STOP_STRINGS = 16
MAX_CHOICES = 16
MAX_STREAMS = 128  # Most streams of one request: its prompts times the choices of each.
MAX_TOP_LOGPROBS = 20
# Most elements of a list of stop words, bad words or biases: each costs time at every token.
MAX_LISTED = 1024
# Most characters of all stop words and bad words together, because the engine tokenises them on its
# event loop.
MAX_WORDS = 1 << 14


Fields = dict[str, msgspec.Raw]

# Undecoded value of an absent field.
_NULL = msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _SamplingRequest(msgspec.Struct, kw_only=True):
    """Fields that completions and chats have in common."""

    model: str | None = None
    min_tokens: int = 0
    given_temperature: float | None = msgspec.field(default=None, name="temperature")
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens.
    # Least probability of a token that may be chosen, as a fraction of the likeliest token's.
    min_p: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    response_format: msgspec.Raw = _NULL  # Not decoded here, but by the engine.
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
    def wants_usage(self) -> bool:
        """True if the client wants a last event with the stream's token counts."""
        options = self.stream_options
        return self.stream and options is not None and bool(options.include_usage)

    @property
    def wants_each_usage(self) -> bool:
        """True if the client wants the token counts so far of a choice in each other event too."""
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


class CompletionRequest(_SamplingRequest, kw_only=True):
    """Body of `POST /v1/completions`. Ranges are checked by `parse_completion_request`."""

    prompt: str | list[int]
    max_tokens: int = 16
    echo: bool = False
    logprobs: int | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of alternatives to return with each sampled token; None: no log probabilities."""
        return self.logprobs


class ChatRequest(_SamplingRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`. Ranges are checked by `parse_chat_request`.

    Messages, tools and template arguments stay undecoded, since they may be large and only the
    engine's template reads them.
    """

    messages: msgspec.Raw
    max_tokens: int | None = None  # None: the rest of the context behind the prompt.
    # Newer name of `max_tokens`, which takes precedence; parsing moves its value to `max_tokens`.
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: msgspec.Raw = _NULL
    tool_choice: str | dict[str, msgspec.Raw] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: msgspec.Raw = _NULL
    documents: msgspec.Raw = _NULL
    add_generation_prompt: bool = True

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of alternatives to return with each token; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_bytes(self) -> int:
        """Bytes of JSON that the chat's template reads."""
        read = (self.messages, self.tools, self.chat_template_kwargs, self.documents)
        return sum(map(len, read))

    @property
    def may_call_tools(self) -> bool:
        """True if `<tool_call>` in the output begins a tool call; False: it is plain text."""
        return not _NO_TOOLS.fullmatch(self.tools) and self.tool_choice != "none"


class _Message(msgspec.Struct):
    role: str


_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PROMPT = msgspec.json.Decoder(str | list[int])
_PROMPTS = msgspec.json.Decoder(list[msgspec.Raw])
_LIST_OF_PROMPTS = re.compile(rb'\s*\[\s*["\[]')
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_MESSAGES = msgspec.json.Decoder(list[_Message])

_NO_TOOLS = re.compile(rb"null|\[\s*\]")
_EMPTY_OBJECT = re.compile(rb"\{\s*\}")
HIGHEST_ID = (1 << 32) - 1  # Highest token id: ids are stored in 4 bytes.

# Fields with which a completion with `echo` is answered whole by one engine.
ECHOED_BY_ENGINE = ("logprobs", "truncate_prompt_tokens")

# Lowest and highest allowed value of each numeric field.
RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 1 << 24),
    "min_tokens": (0, 1 << 24),
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1 << 24),
    "min_p": (0.0, 1.0),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 2.0),
    "n": (1, MAX_CHOICES),
}
# Attributes whose name is not that of their field.
_ATTRIBUTES = {"temperature": "given_temperature"}
LOGPROBS_RANGE = (0, MAX_TOP_LOGPROBS)


def parse_completion_request(body: bytes, backend: str = EMBEDDED) -> CompletionRequest:
    """Decode and check the body of `POST /v1/completions`.

    Raises:
        RequestError: malformed JSON, a wrong type, a value out of range, or a field that the
            backend does not take.
    """
    request, _, more = read_request(body, ApiKind.COMPLETIONS, backend)
    assert isinstance(request, CompletionRequest)
    if more:
        raise RequestError(
            f"{1 + len(more)} prompts in one request are not supported; allowed: one",
            param="prompt",
        )
    return request


def read_prompt(prompt: msgspec.Raw) -> str | list[int]:
    """Decode one prompt of a list: text or token ids.

    Raises:
        RequestError: an empty prompt, or neither text nor token ids.
    """
    read: str | list[int] = decode_as(_PROMPT, bytes(prompt), "prompt")
    _check_prompt(read)
    return read


def _check_prompt(prompt: str | list[int]) -> None:
    if len(prompt) == 0:
        raise RequestError("prompt must not be empty", param="prompt")
    if not isinstance(prompt, str):
        _check_ids("prompt", prompt)


def parse_chat_request(body: bytes, backend: str = EMBEDDED) -> ChatRequest:
    """Decode and check the body of `POST /v1/chat/completions`. The engine checks the fields that
    its template reads.

    Raises:
        RequestError: as `parse_completion_request`.
    """
    request, _, _ = read_request(body, ApiKind.CHAT, backend)
    assert isinstance(request, ChatRequest)
    return request


Request = CompletionRequest | ChatRequest


def read_request(
    body: bytes, api: ApiKind, backend: str, max_elements: int = MAX_ELEMENTS
) -> tuple[Request, Fields, list[msgspec.Raw]]:
    """Decode and check a body, also in the equivalent forms that `_plainly` knows. Return the
    request, the backend's fields, undecoded, and the prompts behind the first one, for
    `read_prompt`. The structure is checked first, so that no step takes long.

    Raises:
        RequestError: as `parse_completion_request`.
    """
    # A short body with few brackets needs no scan.
    is_long = len(body) >= max_elements or body.count(b"[") + body.count(b"{") > MAX_DEPTH
    if is_long or not body.isascii():
        _check_text(body, max_elements if is_long else None)
    more: list[msgspec.Raw] = []
    decoder = _CHAT if api is ApiKind.CHAT else _COMPLETION
    try:
        request, fields = decoder.decode(body), _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        request, fields, more = _read_otherwise(decoder, body)
    if not kept_as_they_are(api, backend).issuperset(fields) or _NULL in fields.values():
        fields = check_fields(fields, api, backend)
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        request.max_tokens, request.max_completion_tokens = request.max_completion_tokens, None
        _check_range("max_tokens", request.max_tokens, *RANGES["max_tokens"])
    options = fields.get("stream_options")
    if options is not None and not request.stream and not _EMPTY_OBJECT.fullmatch(options):
        raise RequestError("stream_options needs stream=true", param="stream_options")
    for name in fields:  # Only given fields are checked, since defaults are in range.
        if (allowed := RANGES.get(name)) is not None:
            value, (lowest, highest) = getattr(request, _ATTRIBUTES.get(name, name)), allowed
            if value is None or lowest <= value <= highest:
                continue
            # With `echo` vLLM accepts `max_tokens` 0.
            echoes = backend == VLLM and isinstance(request, CompletionRequest) and request.echo
            if not (echoes and name == "max_tokens" and value == 0):
                raise _out_of_range(name, value, lowest, highest)
    if request.kvrs is not None or not _CHECKED.isdisjoint(fields):
        _check(request)
    if isinstance(request, ChatRequest):
        _check_chat(request, backend)
    elif (
        more
        or not _CHECKED_OF_COMPLETIONS.isdisjoint(fields)
        or not (isinstance(request.prompt, str) and request.prompt)
    ):
        _check_completion(request, fields, more, backend)
    return request, fields, more


def _check_text(body: bytes, max_elements: int | None) -> None:
    """Check that the body is valid UTF-8 and, if it is an object, that its structure is within
    limits, also in fields that no decoder here reads. `max_elements` None: the structure is not
    checked.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if max_elements is not None and body.lstrip().startswith(b"{"):
        check_structure(body, max_elements=max_elements)


def _check_completion(
    request: CompletionRequest, given: Fields, more: list[msgspec.Raw], backend: str
) -> None:
    _check_range("logprobs", request.logprobs, *LOGPROBS_RANGE)
    if request.n * (1 + len(more)) > MAX_STREAMS:
        raise RequestError(
            f"prompt has {1 + len(more)} prompts for {request.n} choices each; allowed: at most "
            f"{MAX_STREAMS} choices in all",
            param="prompt",
        )
    _check_prompt(request.prompt)
    for other in ECHOED_BY_ENGINE:
        if request.echo and other in given and backend != VLLM:
            raise RequestError(
                f"echo together with {other} is not supported: use one of them", param="echo"
            )


def _check_chat(request: ChatRequest, backend: str) -> None:
    _check_range("top_logprobs", request.top_logprobs, *LOGPROBS_RANGE)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    is_guided = not {"structured_outputs", "regex"}.isdisjoint(takes(ApiKind.CHAT, backend))
    if request.tool_choice not in (None, "none", "auto") and not is_guided:
        given = msgspec.json.encode(request.tool_choice)[:80].decode(errors="replace")
        raise RequestError(
            f"tool_choice={given} needs guided decoding, which is not supported; allowed: 'none', "
            "'auto'",
            param="tool_choice",
        )
    for name, value, opening, what in (
        ("tools", request.tools, b"[", "a list"),
        ("documents", request.documents, b"[", "a list"),
        ("chat_template_kwargs", request.chat_template_kwargs, b"{", "an object"),
    ):
        if bytes(memoryview(value)[:1]) not in (opening, b"n"):
            raise RequestError(f"{name} must be {what}", param=name)
    if not decode_as(_MESSAGES, bytes(request.messages), "messages"):
        raise RequestError("messages must not be empty", param="messages")


def _read_otherwise(
    decoder: msgspec.json.Decoder[Any], body: bytes
) -> tuple[Request, Fields, list[msgspec.Raw]]:
    more: list[msgspec.Raw] = []
    if (plain := _plainly(body)) is None:
        given = body  # Leave the body to the decoder below, which refuses it.
    else:
        fields, more = plain
        given = msgspec.json.encode(fields)
    request: Request = decode_as(decoder, given)
    if not more:
        fields = with_whole_numbers(decode_as(_FIELDS, body))
    return request, fields, more


def _plainly(body: bytes) -> tuple[Fields, list[msgspec.Raw]] | None:
    """Return the body's fields without nulls, with whole numbers as integers and with only the
    first prompt of a list; and the other prompts. None: the body is no JSON object.
    """
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    given = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    fields = with_whole_numbers(given)
    more: list[msgspec.Raw] = []
    prompt = fields.get("prompt", _NULL)
    if _LIST_OF_PROMPTS.match(prompt):
        fields["prompt"], *more = _PROMPTS.decode(prompt)
    return fields, more


# Fields that need more checks than a range of values.
_CHECKED = frozenset(("min_tokens", "stop", "logit_bias", "bad_words", "allowed_token_ids"))
_CHECKED_OF_COMPLETIONS = frozenset(("logprobs", "echo"))


def _check(request: Request) -> None:
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens must be at most max_tokens ({request.max_tokens}), got "
            f"{request.min_tokens}",
            param="min_tokens",
        )
    stop = None if request.stop is None else request.stop_strings
    if stop and (len(stop) > MAX_STOP_STRINGS or "" in stop):
        raise RequestError(
            f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop"
        )
    if request.logit_bias:
        _check_biases(request)
    if request.bad_words:
        _check_words(request)
    if request.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", request.allowed_token_ids)
    if request.kvrs is not None and request.kvrs.token_ids is not None:
        _check_ids("kvrs.token_ids", request.kvrs.token_ids)


def _check_biases(request: Request) -> None:
    for token_id, bias in request.logit_bias.items():
        _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
    if len(request.logit_bias) > MAX_LISTED or min(request.logit_bias, default=0) < 0:
        raise RequestError(
            f"logit_bias takes at most {MAX_LISTED} token ids, none of them negative",
            param="logit_bias",
        )


def _check_words(request: Request) -> None:
    characters = sum(map(len, request.bad_words))
    if len(request.bad_words) > MAX_LISTED or characters > MAX_WORDS or "" in request.bad_words:
        raise RequestError(
            f"bad_words takes at most {MAX_LISTED} strings of {MAX_WORDS} characters together, "
            "none of them empty",
            param="bad_words",
        )


def _check_range(name: str, value: float | None, lowest: float, highest: float) -> None:
    if value is not None and not lowest <= value <= highest:
        raise _out_of_range(name, value, lowest, highest)


def _out_of_range(name: str, value: float, lowest: float, highest: float) -> RequestError:
    allowed = f"in [{lowest}, {highest}]"
    if name == "max_tokens":
        # Parsing does not know the model: its context is the true upper limit, not `highest`.
        allowed = (
            f"at least {lowest:g}, and with the prompt at most the model's context "
            "(max_model_len in /v1/models)"
        )
    return RequestError(f"{name} must be {allowed}, got {value!r:.80}", param=name)


def _check_ids(name: str, token_ids: list[int]) -> None:
    if not token_ids:
        raise RequestError(f"{name} must not be empty", param=name)
    try:
        packed(token_ids)
        return
    except ValueError:
        pass  # Leave the fault to the slow path below, whose error names it.
    if min(token_ids) < 0:
        raise RequestError(f"token ids must not be negative, got {min(token_ids)}", param=name)
    if max(token_ids) > HIGHEST_ID:
        raise RequestError(
            f"token ids must be at most {HIGHEST_ID}, got {max(token_ids)}", param=name
        )
