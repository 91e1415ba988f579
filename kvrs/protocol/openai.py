"""The part of the OpenAI completions API that kvrs speaks, as a client, a proxy and an engine see it.

What is not supported is refused by name; nothing is silently ignored that would change the output.
"""

from typing import Any

import msgspec

from kvrs.errors import RequestError
from kvrs.protocol.instance import KvrsParams, KvTransferParams

MAX_STOP_STRINGS = 16


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class CompletionRequest(msgspec.Struct):
    """Body of `POST /v1/completions`. Ranges are checked by `parse_completion_request`."""

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens.
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str = ""
    n: int = 1
    best_of: int = 1
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    kv_transfer_params: KvTransferParams | None = None
    kvrs: KvrsParams | None = None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(msgspec.Struct):
    """`token_ids` stays last, so that a proxy can cut it out of the bytes by offset."""

    text: str
    index: int = 0
    logprobs: None = None
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


_DECODER = msgspec.json.Decoder(CompletionRequest)

# field: the one value that is allowed (it changes nothing)
_UNSUPPORTED: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "suffix": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}

# field: (lowest, highest) allowed value
_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 1 << 24),
    "min_tokens": (0, 1 << 24),
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1 << 24),
    "seed": (-(1 << 63), (1 << 63) - 1),
}


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Decode and check a request body.

    Raises:
        RequestError: malformed JSON, a wrong type, a value out of range, or a feature that is not supported.
    """
    try:
        request = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise RequestError(f"{message} (field {path.rstrip('`') or 'body'})", param=path.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    _check(request)
    return request


def _check(request: CompletionRequest) -> None:
    for name, neutral in _UNSUPPORTED.items():
        value = getattr(request, name)
        if value != neutral:
            raise RequestError(f"{name}={value!r} is not supported; allowed: {neutral!r}", param=name)
    for name, (lowest, highest) in _RANGES.items():
        value = getattr(request, name)
        if value is not None and not lowest <= value <= highest:
            raise RequestError(f"{name} must be in [{lowest}, {highest}], got {value!r}", param=name)
    if request.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens must be at most max_tokens ({request.max_tokens}), got {request.min_tokens}",
            param="min_tokens",
        )
    if len(request.prompt) == 0:
        raise RequestError("prompt must not be empty", param="prompt")
    if not isinstance(request.prompt, str) and min(request.prompt) < 0:
        raise RequestError(f"token ids must not be negative, got {min(request.prompt)}", param="prompt")
    if len(request.stop_strings) > MAX_STOP_STRINGS or "" in request.stop_strings:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop")


def error_body(message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of an OpenAI-style error, for a 4xx or 5xx body or an SSE event."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


DONE = sse(b"[DONE]")
