"""The two endpoints of the OpenAI API, as far as a proxy has to tell them apart, and a client's request at one of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvrs.errors import RequestError
from kvrs.protocol.openai import (
    ChatChunkChoice,
    ChatRequest,
    Choice,
    CompletionRequest,
    Delta,
    FunctionCall,
    ToolCall,
    Usage,
    parse_chat_request,
    parse_completion_request,
)
from kvrs.text.output import TextDelta

# Only a proxy says these; a client's own go nowhere.
_OURS = ("kvrs", "kv_transfer_params")
# vLLM's. In the first two it finds what only a proxy may say, such as `kv_transfer_params`; the others count its own output.
_REFUSED = ("vllm_xargs", "ec_transfer_params", "thinking_token_budget", "repetition_detection")
# A text prompt's length in tokens until prefill has counted it.
_BYTES_PER_TOKEN = 4

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _chat_delta(delta: TextDelta) -> Delta:
    calls = [ToolCall(call.id, FunctionCall(call.name, call.arguments), index=call.index) for call in delta.tool_calls]
    return Delta(content=delta.text or None, reasoning_content=delta.reasoning or None, tool_calls=calls)


@dataclass(frozen=True, slots=True)
class Form:
    """One endpoint: where it is, how its requests are read, and what its events look like."""

    path: str
    object: bytes  # What every event says that it is.
    parse: Callable[[bytes], CompletionRequest | ChatRequest]
    choice: Callable[[TextDelta], Choice | ChatChunkChoice]

    def event(self, head: bytes, choices: Sequence[Choice | ChatChunkChoice], usage: Usage | None = None) -> bytes:
        """An event under a stream's head, with its keys in the order that engines of ours use."""
        parts = [head, b',"choices":', msgspec.json.encode(choices)]
        # Other engines name the object in the head already.
        if b',"object":"' not in head:
            parts.append(b',"object":"' + self.object + b'"')
        if usage is not None:
            parts.append(b',"usage":' + msgspec.json.encode(usage))
        return b"".join((*parts, b"}"))


COMPLETIONS = Form(
    path="/v1/completions",
    object=b"text_completion",
    parse=parse_completion_request,
    choice=lambda delta: Choice(text=delta.text),
)
CHAT = Form(
    path="/v1/chat/completions",
    object=b"chat.completion.chunk",
    parse=parse_chat_request,
    choice=lambda delta: ChatChunkChoice(delta=_chat_delta(delta)),
)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A client's request: what the proxy reads of it, and its fields as they came, which is how engines get them."""

    form: Form
    request: CompletionRequest | ChatRequest
    fields: Mapping[str, msgspec.Raw]
    size_bytes: int

    @property
    def tokens_guess(self) -> int:
        return self.size_bytes // _BYTES_PER_TOKEN + 1

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt's ids, if the client gave them itself."""
        match self.request:
            case CompletionRequest(prompt=list(ids)):
                return ids
            case _:
                return None

    @property
    def echo(self) -> bool:
        return isinstance(self.request, CompletionRequest) and self.request.echo

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for a last event that counts tokens."""
        options = self.request.stream_options
        return self.request.stream and options is not None and bool(options.include_usage)


def read(form: Form, body: bytes) -> Asked:
    """Check a body and take it apart.

    Raises:
        RequestError: it is malformed, or asks for what is not supported.
    """
    request = form.parse(body)
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    # A null says nothing, yet not every engine takes it.
    fields = {name: value for name, value in fields.items() if name not in _OURS and bytes(value) != b"null"}
    for name in _REFUSED:
        if name in fields:
            raise RequestError(f"{name} is not supported; allowed: null", param=name)
    return Asked(form, request, fields, len(body))
