"""The two endpoints of the OpenAI API, a client's request at one of them with its context in the
cluster (its id and trace), and what it holds of the memory for bodies and of its tenant's streams.
"""

from array import array
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from kvrs.core.books.tenants import RETRY_S, TenantMeter
from kvrs.core.model.prefixes import Prefix
from kvrs.errors import RequestError
from kvrs.net.routes import retry_after
from kvrs.protocol.openai.chunks import (
    ChatChunkChoice,
    ChatDelta,
    Choice,
    Usage,
)
from kvrs.protocol.openai.fields import EMBEDDED, ApiKind
from kvrs.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    read_prompt,
    read_request,
)
from kvrs.protocol.openai.structure import MAX_ELEMENTS
from kvrs.protocol.tags import salt_of
from kvrs.protocol.tenants import TenantSecret
from kvrs.protocol.token_ids import packed
from kvrs.text.output import TextDelta

_BYTES_PER_ID = 4

# The list of requests that are admitted, whose own lists are in their fields.
_NO_IDS: list[int] = []
_NO_WORDS: list[str] = []
_NO_BIASES: dict[int, float] = {}
_NO_FORMAT = msgspec.Raw()

_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])

TRACEPARENT = "traceparent"
REQUEST_ID = "X-Request-Id"


class RequestContext(msgspec.Struct, eq=False):
    id: str
    traceparent: str | None = None  # Of the client, or of the span that it has here.
    trace: Any = None  # Its RequestTrace (kvrs/proxy/streams/spans.py), if it has one.


# The context of the request that the running task works on.
CURRENT: ContextVar[RequestContext | None] = ContextVar("CURRENT", default=None)


def _chat_delta(delta: TextDelta) -> ChatDelta:
    return ChatDelta(content=delta.text)


class Endpoint(msgspec.Struct, frozen=True):
    """One endpoint: its path, the parser of its requests, and the form of its events."""

    path: str
    object: bytes  # Value of `object` in every event.
    api: ApiKind
    choice: Callable[[TextDelta], Choice | ChatChunkChoice]

    def event(
        self,
        head: bytes,
        choices: Sequence[Choice | ChatChunkChoice],
        usage: Usage | Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> bytes:
        """An event with a stream's head, with its keys in the order of the embedded engine;
        `beside`: further fields.
        """
        parts = [head, b',"choices":', msgspec.json.encode(choices)]
        # The head of other engines contains the object.
        if b',"object":"' not in head:
            parts.append(b',"object":"' + self.object + b'"')
        if usage is not None:
            parts.append(b',"usage":' + msgspec.json.encode(usage))
        if beside:
            parts.append(b"," + msgspec.json.encode(beside)[1:-1])
        return b"".join((*parts, b"}"))


COMPLETIONS = Endpoint(
    path="/v1/completions",
    object=b"text_completion",
    api=ApiKind.COMPLETIONS,
    choice=lambda delta: Choice(text=delta.text),
)
CHAT = Endpoint(
    path="/v1/chat/completions",
    object=b"chat.completion.chunk",
    api=ApiKind.CHAT,
    choice=lambda delta: ChatChunkChoice(delta=_chat_delta(delta)),
)


class ByteBudget:
    """Bytes of all requests that are open. No body is longer than `max_body_bytes`."""

    def __init__(self, total_bytes: int, max_body_bytes: int) -> None:
        self.held_bytes = 0
        self.max_body_bytes = max_body_bytes
        self.total_bytes = total_bytes


class RequestUsage(msgspec.Struct, eq=False):
    """Bytes of the budget, and streams of its tenant's limit, that one request holds until its
    block is left. `meter`: of the tenant; None: it has no limit.
    """

    budget: ByteBudget
    meter: TenantMeter | None = None
    size_bytes: int = 0
    streams: int = 0
    is_over: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Give all of it back."""
        self.budget.held_bytes -= self.size_bytes
        self.size_bytes, self.is_over = 0, True
        if self.meter is not None:
            self.meter.give(self.streams)

    def allow(self, size_bytes: int) -> None:
        """Check that the body may have this size now.

        Raises:
            RequestError: it is too long, or there is no room for it.
        """
        budget = self.budget
        if size_bytes > budget.max_body_bytes:
            raise RequestError(
                f"the body must be at most {budget.max_body_bytes} bytes", status=413
            )
        lacking_bytes = size_bytes - self.size_bytes
        if lacking_bytes > 0 and budget.held_bytes + lacking_bytes > budget.total_bytes:
            raise RequestError(
                "the requests that are open take up the memory for bodies",
                status=503,
                code="no_room",
            )

    def take(self, size_bytes: int) -> None:
        """Hold a body of this size; raises RequestError: as `allow`."""
        budget = self.budget
        if (
            size_bytes > budget.max_body_bytes
            or budget.held_bytes + size_bytes > budget.total_bytes
        ):
            self.allow(size_bytes)
        budget.held_bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes

    def open(self, streams: int) -> None:
        """Take streams of the tenant's limit; raises RequestError: there are none left."""
        if self.meter is None:
            return
        if not self.meter.take(streams):
            raise RequestError(
                f"limit of streams reached: streams is {self.meter.limits.streams}",
                status=429,
                code="rate_limit_exceeded",
                kind="streams",
                headers={"Retry-After": retry_after(RETRY_S)},
            )
        self.streams = streams


@dataclass(slots=True, eq=False)
class PackedFields(Mapping[str, msgspec.Raw]):
    """Fields as one JSON object, where each by itself would take two objects."""

    text: bytes

    def items(self) -> ItemsView[str, msgspec.Raw]:
        return _FIELDS.decode(self.text).items()

    def values(self) -> ValuesView[msgspec.Raw]:
        return _FIELDS.decode(self.text).values()

    def __getitem__(self, name: str) -> msgspec.Raw:
        return _FIELDS.decode(self.text)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_FIELDS.decode(self.text))

    def __len__(self) -> int:
        return len(_FIELDS.decode(self.text))


class ParsedRequest(msgspec.Struct, eq=False):
    """A client's request, and undecoded those of its fields that engines get, which lie in the
    body. Of several prompts each has its own, of which the first is the request.
    """

    endpoint: Endpoint
    request: CompletionRequest | ChatRequest
    fields: Mapping[str, msgspec.Raw]
    size_bytes: int
    prompt_ids: "array[int] | None" = None  # None until the client or an engine has given them.
    more: "tuple[ParsedRequest, ...]" = ()  # Those of the prompts behind the first one.
    held: RequestUsage | None = None  # Follows what is kept.
    counted_bytes: int = 0  # What is kept, as far as the budget knows.
    fields_bytes: int = 0  # Of the values in `fields`, or more.
    is_packed: bool = False  # What is kept is no more than is needed.
    echo: bool = False
    prefix: Prefix | None = None  # Of the prompt, once it was asked for.

    @property
    def prompts(self) -> "tuple[ParsedRequest, ...]":
        return self, *self.more

    def tokenised(self, ids: "array[int]") -> "array[int]":
        """The ids of the prompt, once for all choices. Of a completion they take the place of the
        text, which is kept until `pack`.
        """
        if self.prompt_ids is None:
            self.prompt_ids = ids
            return ids
        return self.prompt_ids if self.prompt_ids == ids else ids

    def pack(self) -> None:
        """Keep no text of a prompt that is tokenised: the next call is made already."""
        if self.is_packed or self.prompt_ids is None:
            return
        self.is_packed = True
        if isinstance(self.request, CompletionRequest) and self.request.n == 1:
            self._drop_prompt()
        held = self.held
        if held is not None and not held.is_over:  # The budget follows what is kept.
            grown_bytes = self.fields_bytes + _BYTES_PER_ID * len(self.prompt_ids)
            grown_bytes -= self.counted_bytes
            self.counted_bytes += grown_bytes
            held.size_bytes += grown_bytes
            held.budget.held_bytes += grown_bytes

    def hold(self, held: RequestUsage) -> None:
        """Keep no more of the body than is needed, and have the budget follow that."""
        kept_bytes = 0
        for one in (self, *self.more):
            one.held, request = held, one.request
            # What was decoded to be checked is in `fields` as well.
            request.stop_token_ids, request.bad_words = _NO_IDS, _NO_WORDS
            request.response_format = _NO_FORMAT
            request.allowed_token_ids, request.logit_bias = None, _NO_BIASES
            request.user = None
            if isinstance(request, CompletionRequest):
                request.prompt = ""
                if one.prompt_ids is not None:
                    one.is_packed = True
                    one._drop_prompt()
            if not one.is_packed:
                one.fields_bytes = sum(map(len, one.fields.values()))
            one.counted_bytes = one.fields_bytes + _BYTES_PER_ID * len(one.prompt_ids or ())
            kept_bytes += one.counted_bytes
        held.budget.held_bytes += kept_bytes - held.size_bytes
        held.size_bytes = kept_bytes

    def _drop_prompt(self) -> None:
        # The others are copied: one that lies in the body keeps all of it.
        others = dict(self.fields.items())
        others.pop("prompt", None)
        self.fields = PackedFields(msgspec.json.encode(others))
        self.fields_bytes = sum(map(len, others.values()))


def read(
    endpoint: Endpoint, body: bytes, backend: str = EMBEDDED, max_elements: int = MAX_ELEMENTS
) -> ParsedRequest:
    """Parse and check a body.

    Raises:
        RequestError: it is malformed, or has a field that the backend does not take.
    """
    request, fields, prompts = read_request(body, endpoint.api, backend, max_elements)
    size_bytes = len(body) - sum(map(len, prompts))
    parsed = ParsedRequest(endpoint, request, fields, size_bytes, fields_bytes=size_bytes)
    if isinstance(request, CompletionRequest):
        parsed.echo = request.echo
        if not isinstance(request.prompt, str):
            parsed.prompt_ids = _given_ids(request.prompt, fields)
        if prompts:
            parsed.more = tuple(_with_prompt(parsed, each) for each in prompts)
    return parsed


def _with_prompt(first: ParsedRequest, prompt: msgspec.Raw) -> ParsedRequest:
    """The request of one of the prompts behind the first one."""
    given, fields = read_prompt(prompt), dict(first.fields) | {"prompt": prompt}
    size_bytes = first.size_bytes - len(first.fields["prompt"]) + len(prompt)
    return replace(
        first,
        request=replace(first.request, prompt=given),
        fields=fields,
        size_bytes=size_bytes,
        fields_bytes=size_bytes,
        prompt_ids=None if isinstance(given, str) else _given_ids(given, fields),
    )


def _given_ids(ids: list[int], fields: Mapping[str, msgspec.Raw]) -> "array[int] | None":
    try:
        given = packed(ids)
    except ValueError:
        raise RequestError("token ids must be below 2^32", param="prompt") from None
    # Which ids are left of those that are truncated, the engine reports.
    return None if "truncate_prompt_tokens" in fields else given


def salted(parsed: ParsedRequest, secret: TenantSecret | None, adapter: str = "") -> ParsedRequest:
    """The request with the salt of its adapter and of its tenant, so that neither another adapter
    nor another tenant finds its pages in a cache.
    """
    if secret is None and not adapter:
        return parsed
    salt = salt_of(parsed.request.cache_salt, adapter)
    found = msgspec.Raw(msgspec.json.encode(salt if secret is None else secret.salt(salt)))
    more = tuple(salted(each, secret, adapter) for each in parsed.more)
    return replace(parsed, fields={**parsed.fields, "cache_salt": found}, more=more)
