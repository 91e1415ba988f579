"""The two endpoints of the OpenAI API; a client's request with its id and trace; and the request's
share of the memory for bodies and of its tenant's streams. The core finds prompts with a common
beginning by hashes of their blocks, as received, without decoding (`core/model/cluster_view.py`).
"""

import re
from array import array
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Self

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvrs.core.books.tenants import RETRY_S, StreamShare, TenantMeter
from kvrs.core.model.cluster_view import NO_PREFIX, Prefix, chain
from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.net.connections import ByteBudget
from kvrs.net.routes import retry_after
from kvrs.protocol.openai.chunks import ChatChunkChoice, ChatDelta, Choice, Usage
from kvrs.protocol.openai.decoding import MAX_ELEMENTS
from kvrs.protocol.openai.fields import EMBEDDED, ApiKind
from kvrs.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    packed,
    read_prompt,
    read_request,
)
from kvrs.protocol.pages import salt_of
from kvrs.protocol.secrets import TenantSecret
from kvrs.text.output import TextDelta

_BYTES_PER_ID = 4

# Replace the decoded lists of admitted requests; the undecoded fields still have the values.
_NO_IDS: list[int] = []
_NO_WORDS: list[str] = []
_NO_BIASES: dict[int, float] = {}
_NO_FORMAT = msgspec.Raw()

_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])

TRACEPARENT = "traceparent"
REQUEST_ID = "X-Request-Id"


class RequestContext(msgspec.Struct, eq=False):
    id: str
    # `traceparent` for calls: the client's, or that of the request's own span; None: no trace.
    traceparent: str | None = None
    # RequestTrace of the request (kvrs/proxy/streams/spans.py); None: not traced.
    trace: Any = None
    picked: tuple[InstanceId, ...] = ()  # Instances named by a gateway's picker.
    served: InstanceId | None = None  # Decode instance of the last call; None: no call yet.


# Context of the request that the running task serves; None: no request.
CURRENT: ContextVar[RequestContext | None] = ContextVar("CURRENT", default=None)


def _chat_delta(delta: TextDelta) -> ChatDelta:
    return ChatDelta(content=delta.text)


class Endpoint(msgspec.Struct, frozen=True):
    """An endpoint of the OpenAI API: its path, the parser of its requests, and the form of its
    events.
    """

    path: str
    object: bytes  # Value of the field `object` in every event.
    api: ApiKind
    choice: Callable[[TextDelta], Choice | ChatChunkChoice]

    def event(
        self,
        head: bytes,
        choices: Sequence[Choice | ChatChunkChoice],
        usage: Usage | Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Make an event from a stream's head, choices and usage, with keys in the embedded engine's
        order; `beside`: further fields.
        """
        parts = [head, b',"choices":', msgspec.json.encode(choices)]
        # The heads of other engines contain `object` already.
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


class RequestUsage(msgspec.Struct, eq=False):
    """Bytes of the budget and a share of the tenant's limit of streams, which one request holds
    until its block ends. `meter` counts the tenant's streams; None: no limit.
    """

    budget: ByteBudget
    meter: TenantMeter | None = None
    size_bytes: int = 0
    # Share of the request's streams; other requests for the same stream may hold it too.
    share: StreamShare | None = None
    is_over: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Return the held bytes to the budget, and release the share of streams."""
        self.budget.held_bytes -= self.size_bytes
        self.size_bytes, self.is_over = 0, True
        share, self.share = self.share, None
        if share is not None:
            share.release()

    def allow(self, size_bytes: int) -> None:
        """Check that a body of this size is allowed now.

        Raises:
            RequestError: too long, or open requests leave no memory.
        """
        budget = self.budget
        if size_bytes > budget.max_body_bytes:
            raise RequestError(
                f"the body must be at most {budget.max_body_bytes} bytes "
                f"(proxy.max_body_bytes), got {size_bytes} or more",
                status=413,
            )
        lacking_bytes = size_bytes - self.size_bytes
        if lacking_bytes > 0 and budget.held_bytes + lacking_bytes > budget.total_bytes:
            raise RequestError(
                "the requests that are open, and unread responses, take up the memory for bodies",
                status=503,
                code="no_room",
            )

    def take(self, size_bytes: int) -> None:
        """Count a body of this size, instead of the size counted before. Raises RequestError, like
        `allow`.
        """
        budget = self.budget
        if (
            size_bytes > budget.max_body_bytes
            or budget.held_bytes + size_bytes > budget.total_bytes
        ):
            self.allow(size_bytes)
        budget.held_bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes

    def open(self, streams: int, key: str | None = None) -> None:
        """Take this number of streams from the tenant's limit, or hold the share of the open stream
        with this key. Raises RequestError: too few are left.
        """
        if self.meter is None:
            return
        assert self.share is None, "a request has one share"
        self.share = self.meter.take(streams, key)
        if self.share is None:
            raise RequestError(
                f"limit of streams reached: streams is {self.meter.limits.streams}",
                status=429,
                code="rate_limit_exceeded",
                kind="streams",
                headers={"Retry-After": retry_after(RETRY_S)},
            )


@dataclass(slots=True, eq=False)
class PackedFields(Mapping[str, msgspec.Raw]):
    """Undecoded fields of a request, stored as one JSON object to save memory: a dict has two
    objects per field.
    """

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
    """A client's request: the decoded `request`, and in `fields` the undecoded values for engines,
    which are slices of the body. Each of several prompts has an object of its own; the first has
    the others in `more`.
    """

    endpoint: Endpoint
    request: CompletionRequest | ChatRequest
    fields: Mapping[str, msgspec.Raw]
    size_bytes: int
    # Ids of the prompt; None until the client or an engine gives them.
    prompt_ids: "array[int] | None" = None
    # Requests of the other prompts, at the first prompt's request.
    more: "tuple[ParsedRequest, ...]" = ()
    # Share of the budget, reduced to the bytes that are kept; None: not admitted yet.
    held: RequestUsage | None = None
    counted_bytes: int = 0  # Number of bytes that the budget counts for this prompt.
    fields_bytes: int = 0  # Upper bound of the size of the values in `fields`.
    is_packed: bool = False  # `pack` has dropped the prompt's text.
    echo: bool = False
    prefix: Prefix | None = None  # Block hashes of the prompt; None: not computed yet.

    @property
    def prompts(self) -> "tuple[ParsedRequest, ...]":
        return self, *self.more

    def tokenised(self, ids: "array[int]") -> "array[int]":
        """Set the prompt's ids; return the ids already set, if equal, so that all choices share one
        array. In a completion the ids replace the text, which is kept until `pack`.
        """
        if self.prompt_ids is None:
            self.prompt_ids = ids
            return ids
        return self.prompt_ids if self.prompt_ids == ids else ids

    def pack(self) -> None:
        """Drop the text of a tokenised prompt, once the next call is made, and count the kept
        bytes.
        """
        if self.is_packed or self.prompt_ids is None:
            return
        self.is_packed = True
        if isinstance(self.request, CompletionRequest) and self.request.n == 1:
            self._drop_prompt()
        held = self.held
        if held is not None and not held.is_over:  # The budget counts only the bytes that are kept.
            grown_bytes = self.fields_bytes + _BYTES_PER_ID * len(self.prompt_ids)
            grown_bytes -= self.counted_bytes
            self.counted_bytes += grown_bytes
            held.size_bytes += grown_bytes
            held.budget.held_bytes += grown_bytes

    def hold(self, held: RequestUsage) -> None:
        """Drop the parts of the body that are not needed any more, and count only the kept bytes in
        `held`.
        """
        kept_bytes = 0
        for one in (self, *self.more):
            one.held, request = held, one.request
            # The undecoded `fields` still have the values of these lists.
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
        # Copy the remaining values: a slice of the body would keep the whole body in memory.
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
    """Make the request of another prompt than the first."""
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
    # A truncation changes the prompt; only the engine reports the ids that it leaves.
    return None if "truncate_prompt_tokens" in fields else given


def salted(parsed: ParsedRequest, secret: TenantSecret | None, adapter: str = "") -> ParsedRequest:
    """Return the request with the salt of its adapter and tenant, so that no other adapter or
    tenant finds its pages in a cache.
    """
    if secret is None and not adapter:
        return parsed
    salt = salt_of(parsed.request.cache_salt, adapter)
    found = msgspec.Raw(msgspec.json.encode(salt if secret is None else secret.salt(salt)))
    more = tuple(salted(each, secret, adapter) for each in parsed.more)
    return replace(parsed, fields={**parsed.fields, "cache_salt": found}, more=more)


# Fields on which the KV of every token depends. `cache_salt` is made of the tenant and the adapter.
_OF_ALL = (
    *("model", "cache_salt", "chat_template", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("mm_processor_kwargs", "media_io_kwargs", "truncate_prompt_tokens", "truncation_side"),
)
# Fields with text, in the order in which chat templates write them.
_TEXTS = ("tools", "documents", "messages", "prompt")
# Matches a picture or sound in the body, which has as many bytes as a book, but few tokens.
_BLOB = re.compile(rb'"(?:data:[\w.+/;=-]*,)?[A-Za-z0-9+/=_-]{512,}"')


def prefix_of(parsed: ParsedRequest, *, has_media: bool = False) -> Prefix:
    """Return the hash chain of a prompt; empty if engines use no prefix cache for the request.
    O(bytes). `has_media`: a message may hold more than text.
    """
    fields = dict(parsed.fields.items())
    # Engines bypass their prefix caches for these requests.
    if parsed.echo or "prompt_logprobs" in fields:
        return NO_PREFIX
    kinds = [parsed.endpoint.object, *map(fields.get, _OF_ALL, repeat(b""))]
    if (ids := parsed.prompt_ids) is not None:
        kinds.append(b"ids")
        text = ids.tobytes()
    else:
        text = b"".join(filter(None, map(fields.get, _TEXTS)))
        if has_media:
            text = _BLOB.sub(_hash_of, text)
    return Prefix(chain(xxh3_64_intdigest(b"\0".join(kinds)), text), len(text))


def _hash_of(blob: re.Match[bytes]) -> bytes:
    return xxh3_64_hexdigest(blob.group()).encode()
