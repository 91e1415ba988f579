"""The bodies of a stream's two calls: the client's fields, overridden by the proxy's."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from kvrs.core.model import actions as act
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import (
    REPLAY_KEY,
    STORE,
    CheckpointTarget,
    KvrsParams,
    KvTransferParams,
    SourceRange,
)
from kvrs.protocol.openai.fields import (
    NOT_AFTER_SEAM,
    NOT_FOR_COMPLETIONS,
    NOT_FOR_IDS,
    NOT_FOR_PREFILL,
)
from kvrs.protocol.openai.requests import StreamOptions
from kvrs.protocol.token_ids import encode
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, REQUEST_ID, TRACEPARENT, RequestContext
from kvrs.transfer.hand_offs import FetchedHandOff

# Done by the proxy itself, or set anew in every call.
_NEVER_FORWARDED = frozenset(("n", "echo", "stream_options"))
_NOT_FOR_DECODE_OF_IDS = _NEVER_FORWARDED | NOT_FOR_IDS
_NOT_FOR_PREFILL = _NEVER_FORWARDED | NOT_FOR_PREFILL
_NOT_FOR_PREFILL_OF_IDS = _NOT_FOR_PREFILL | NOT_FOR_IDS
BYTES_PER_ID = 6  # In JSON.
_HANDED_OFF = msgspec.Raw(msgspec.json.encode(KvTransferParams(do_remote_decode=True)))


@dataclass(slots=True, eq=False)
class HandOff:
    """The KV of one history at a prefill instance, which one decode call fetches."""

    source: InstanceId
    node: NodeId
    tokens: int
    ranks: int  # Of the prefill instance.
    transfer: msgspec.Raw
    prefilled_s: float
    is_sent: bool = False  # A server has the decode call.
    pull: FetchedHandOff | None = None  # As the link's meter sees it.

    def was_fetched(self) -> None:
        """The first token has come."""
        if self.pull is not None:
            self.pull.is_over = True


@dataclass(slots=True, eq=False)
class RowLoad:
    """Rows of a history that a server with its own CPU tier is to load from agents; with no agent
    it is only to keep those of the stream. From a store it loads by itself.
    """

    stream: StreamId
    attempt: int
    owner_epoch: int
    history_tokens: int
    agents: tuple[InstanceId, ...]
    pages: int  # That these have.
    node: NodeId | None = None  # Of the first agent, or STORE.
    over_s: float | None = None  # When a token came, or the call ended; None: neither.

    @property
    def in_store(self) -> bool:
        return self.node == STORE


@dataclass(slots=True, eq=False)
class Call:
    path: str
    fields: dict[str, Any]
    headers: str = ""  # Lines, each with its end.
    size_bytes: int = 0  # About how long the body is, where it may be long.
    most_tokens: int | None = None  # Where `max_tokens` is null: the engine's own limit.
    hand_off: HandOff | None = None  # It is told as the call is sent.
    rows: RowLoad | None = None  # None: the server keeps none, and loads none.
    is_chat: bool = False  # It goes on with a chat, or stands for one, as a completion.
    beside: object = None  # The backend of the prefill that is called together with decode.
    # Told how many tokens that prefill had in its cache, once its call has ended.
    found: Callable[[int], None] | None = None

    def add_transfer(self, name: str, params: object) -> None:
        """Put an object into `kv_transfer_params`, beside those of a hand-off."""
        transfer = self.fields.get("kv_transfer_params")
        before = b"{" if transfer is None else bytes(transfer)[:-1] + b","
        added = msgspec.json.encode({name: params})[1:]
        self.fields["kv_transfer_params"] = msgspec.Raw(before + added)

    def spend(self) -> bytes:
        """The body, after which the call holds nothing: its answer may take minutes."""
        body = encode(self.fields)
        self.fields.clear()
        return body


def prefill_call(
    journal: Journal,
    attempt: int,
    places: Sequence[act.Place],
    *,
    exact: bool,
    replays: bool = False,
    load: act.PromptLoad | None = None,
    has_rows: bool = False,
    traceparent: str | None = None,
) -> Call:
    """The call that computes and retains the KV of the whole history, or with `replays` of the
    prompt, and sends its pages to `places`.
    """
    call = _call(
        journal,
        attempt,
        places,
        exact=exact,
        replays=replays,
        is_prefill=True,
        sources=_load_source(load),
        traceparent=traceparent,
    )
    if has_rows:
        call.rows = _row_load(journal, attempt)
    fields = call.fields
    fields["max_tokens"] = 1
    fields["temperature"] = 0
    fields["stream"] = False
    fields["kv_transfer_params"] = _HANDED_OFF
    return call


def decode_call(
    journal: Journal,
    attempt: int,
    runs: Sequence[act.PageRange],
    places: Sequence[act.Place],
    transfer: msgspec.Raw | None,
    *,
    exact: bool,
    replays: bool = False,
    load: act.PromptLoad | None = None,
    slot_token: int = 0,
    has_rows: bool = False,
    traceparent: str | None = None,
    ids_text: msgspec.Raw | None = None,
) -> Call:
    """The call that streams the tokens after the history, with `replays` all of the output. It
    never has a peer's host and port. `ids_text`: the ids of the prompt in JSON, if they are known.
    """
    call = _call(
        journal,
        attempt,
        places,
        exact=exact,
        replays=replays,
        sources=_sources(runs) if runs else _load_source(load),
        slot_token=slot_token,
        traceparent=traceparent,
        ids_text=None if journal.output_ids else ids_text,
    )
    if has_rows:
        call.rows = _row_load(journal, attempt, runs)
    fields = call.fields
    fields["stream"] = True
    # Engines of kvrs say no more of a stream than is counted here.
    if journal.wants_usage or (journal.asks_usage and not exact):
        fields["stream_options"] = StreamOptions(include_usage=True)
    if journal.seed is not None and (exact or journal.seed_is_needed):
        fields["seed"] = journal.seed
    if transfer is not None:
        fields["kv_transfer_params"] = transfer
    if replays:
        fields["vllm_xargs"] = {REPLAY_KEY: journal.output_ids[:]}
    elif (journal.output_ids or journal.is_rendered) and not exact:
        _count_from_here(journal, fields)
        call.most_tokens = journal.default_left
    return call


def _call(
    journal: Journal,
    attempt: int,
    places: Sequence[act.Place],
    *,
    exact: bool,
    replays: bool,
    is_prefill: bool = False,
    sources: list[SourceRange],
    slot_token: int = 0,
    traceparent: str | None,
    ids_text: msgspec.Raw | None = None,
) -> Call:
    endpoint = journal.parsed.endpoint
    history = journal.prompt_ids  # All of it, where there is no output.
    if history is not None and (journal.output_ids or not isinstance(history, array)):
        history = journal.prompt if replays else journal.history
    # A plain engine would render a chat's messages again; it takes ids in completions only.
    is_continued_chat = (
        endpoint is CHAT
        and not exact
        and not replays
        and (bool(journal.output_ids) or journal.is_rendered)
    )
    if is_continued_chat:
        endpoint = COMPLETIONS
    has_ids = endpoint is not CHAT and history is not None
    if is_prefill:
        left_out = _NOT_FOR_PREFILL_OF_IDS if has_ids else _NOT_FOR_PREFILL
    else:
        left_out = _NOT_FOR_DECODE_OF_IDS if has_ids else _NEVER_FORWARDED
    if is_continued_chat:
        left_out |= NOT_FOR_COMPLETIONS
    fields: dict[str, Any] = dict(journal.parsed.fields.items())
    for name in left_out.intersection(fields):
        del fields[name]
    fields["return_token_ids"] = True
    if journal.spoilt_attempt:
        fields["cache_salt"] = _salt_since(journal, fields.get("cache_salt"))
    fields["kvrs"] = params = KvrsParams(
        journal.stream,
        attempt,
        len(journal.prompt_ids or ()),
        owner_epoch=journal.owner_epoch,
        sources=sources,
        slot_token=slot_token,
    )
    if places:
        params.checkpoints = [
            CheckpointTarget(place.holder, place.reserved_bytes) for place in places
        ]
    if endpoint is CHAT:
        params.token_ids = cast(list[int] | None, ids_text or history)  # Encoded as one.
    elif has_ids:
        fields["prompt"] = ids_text or history
    headers = ""
    if (request := journal.request) is not None:
        # Engines take the id for that of their own request, which must differ from those of other
        # choices and attempts.
        headers = context_headers(
            request, f"{request.id}-{journal.stream[:8]}-{attempt}", traceparent
        )
    size_bytes = journal.parsed.fields_bytes
    if history is not None:
        size_bytes += BYTES_PER_ID * len(history)
    return Call(endpoint.path, fields, headers, size_bytes, is_chat=is_continued_chat)


def _sources(runs: Sequence[act.PageRange]) -> list[SourceRange]:
    return [SourceRange(run.holder, run.first_page, run.pages, run.generation) for run in runs]


def _load_source(load: act.PromptLoad | None) -> list[SourceRange]:
    if load is None:
        return []
    return [SourceRange(load.agent, 0, load.pages, load.generation, load.within_s)]


def store_load(journal: Journal, attempt: int, page_size_tokens: int) -> RowLoad:
    """The part of the history that a server may load from its store by itself."""
    load = _row_load(journal, attempt)
    load.node, load.pages = STORE, (load.history_tokens - 1) // page_size_tokens
    return load


def _row_load(journal: Journal, attempt: int, runs: Sequence[act.PageRange] = ()) -> RowLoad:
    return RowLoad(
        journal.stream,
        attempt,
        journal.owner_epoch,
        len(journal.prompt_ids or ()) + len(journal.output_ids),
        tuple(dict.fromkeys(run.holder for run in runs)),
        sum(run.pages for run in runs),
    )


def context_headers(
    request: RequestContext, request_id: str, traceparent: str | None = None
) -> str:
    """Lines for a call of that id; `traceparent`: of the call's own span."""
    lines = f"{REQUEST_ID}: {request_id}\r\n"
    if (traceparent := traceparent or request.traceparent) is not None:
        lines += f"{TRACEPARENT}: {traceparent}\r\n"
    return lines


def _salt_since(journal: Journal, salt: msgspec.Raw | None) -> str:
    """A salt of the stream's own, by which no page that was made before the end of its spoilt
    attempt is found.
    """
    given = "" if salt is None else msgspec.json.decode(salt)
    return f"{given}/{journal.stream}/{journal.spoilt_attempt}"


def limited(call: Call, max_model_len: int) -> Call:
    """The call with a limit, if it is a completion that goes on with a chat without one: stock
    engines fail at a null, and an absent limit means 16 tokens.
    """
    fields, history = call.fields, call.fields.get("prompt")
    if not isinstance(history, array) or fields.get("max_tokens", 0) is not None:
        return call
    most = max_model_len - len(history)
    fields["max_tokens"] = max(1, most if call.most_tokens is None else min(most, call.most_tokens))
    return call


def _count_from_here(journal: Journal, fields: dict[str, Any]) -> None:
    """Adjust limits for an engine that counts from the end of the history, which it takes as a
    prompt; the proxy cuts the text at stop strings itself.
    """
    produced = len(journal.output_ids)
    # Null if a chat has no limit: an absent field would be a limit in a completion.
    fields["max_tokens"] = journal.remaining_tokens
    fields["min_tokens"] = max(0, journal.parsed.request.min_tokens - produced)
    fields.pop("stop", None)
    for name in NOT_AFTER_SEAM if produced else ():
        fields.pop(name, None)
