"""Bodies of the prefill and the decode call of a stream: the client's fields, overridden by the
proxy's.
"""

from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, cast

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model.member import Member
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
    NOT_FOR_COMPLETIONS,
    NOT_FOR_IDS,
    NOT_FOR_PREFILL,
)
from kvrs.protocol.openai.requests import StreamOptions, encode_with_ids
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, REQUEST_ID, TRACEPARENT, RequestContext
from kvrs.transfer.meter import FetchedHandOff

# Fields that engines never get from the client: the proxy acts on them, or sets them in every call.
_NEVER_FORWARDED = frozenset(("n", "echo", "stream_options"))
_NOT_FOR_DECODE_OF_IDS = _NEVER_FORWARDED | NOT_FOR_IDS
_NOT_FOR_PREFILL = _NEVER_FORWARDED | NOT_FOR_PREFILL
_NOT_FOR_PREFILL_OF_IDS = _NOT_FOR_PREFILL | NOT_FOR_IDS
BYTES_PER_ID = 6  # Estimate of the bytes of one token id in JSON, with its comma.
_HANDED_OFF = msgspec.Raw(msgspec.json.encode(KvTransferParams(do_remote_decode=True)))


@dataclass(slots=True, eq=False)
class HandOff:
    """The KV of a history at a prefill instance, which one decode call fetches."""

    source: InstanceId
    node: NodeId
    tokens: int
    ranks: int  # Number of ranks of the prefill instance.
    transfer: msgspec.Raw
    prefilled_s: float
    is_sent: bool = False  # The decode call has been sent.
    # The fetch as the bandwidth meter of the link knows it; None: not measured.
    pull: FetchedHandOff | None = None

    def was_fetched(self, now_s: float) -> None:
        """Tell the bandwidth meter at the first token that the fetch is over."""
        if self.pull is not None:
            self.pull.over_s = now_s


@dataclass(slots=True, eq=False)
class RowLoad:
    """Rows of a history that a server with a CPU tier loads from `agents`, or on its own from a
    store. With neither, the server only keeps the stream's rows.
    """

    stream: StreamId
    attempt: int
    owner_epoch: int
    history_tokens: int
    agents: tuple[InstanceId, ...]
    pages: int  # Pages of the history that the agents or the store may have.
    # Node from which most rows are expected, or STORE; None: nothing is loaded.
    node: NodeId | None = None
    over_s: float | None = None  # Time of the first token or of the call's end; None: neither yet.

    @property
    def in_store(self) -> bool:
        return self.node == STORE


class Detached(StrEnum):
    """End of a detached pair, as a label of its counter."""

    BEGAN = "began"  # Decode had all KV.
    FAILED = "failed"  # Both servers have given up.
    LOST = "lost"  # A connection was lost in the transfer.
    HUNG = "hung"  # Neither, in TRANSFER_S.
    CLOSED = "closed"  # The proxy has stopped.
    DROPPED = "dropped"  # Too many pairs were detached: closed at once.


class Keeper(Protocol):
    """Takes what is left of an attempt at a decode server."""

    def begin(self) -> None:
        """Note that the calls begin: what their stream holds is held until `end` of both."""

    def end(self) -> None:
        """Note that both calls are over."""

    def keep(self, end: Coroutine[Any, Any, Detached]) -> bool:
        """Run `end` of a detached pair in the background; False: too many are kept already."""

    def doubt(self) -> None:
        """Note that a transfer to the decode server may go on, and nothing will show its end."""


@dataclass(slots=True, eq=False)
class Call:
    path: str
    fields: dict[str, Any]
    headers: str = ""  # Header lines, each with its line end.
    size_bytes: int = 0  # Approximate size of a large body; 0: not large.
    # Output limit to send where `max_tokens` is null; None: the context.
    most_tokens: int | None = None
    hand_off: HandOff | None = None  # Hand-off that the call fetches, marked when the call is sent.
    rows: RowLoad | None = None  # None: the server neither keeps nor loads rows.
    is_chat: bool = False  # The call continues a chat, or stands for a chat, as a completion.
    # Backend of the prefill server that is called at the same time; None: no other.
    beside: object = None
    # Called when that prefill call has ended, with the tokens that the prefill server had in its
    # cache.
    found: Callable[[int], None] | None = None
    # Keeps both calls if they are given up while KV may be moving; None: they are closed at once.
    keeper: Keeper | None = None

    def add_transfer(self, name: str, params: object) -> None:
        """Add an object to `kv_transfer_params`, beside those of a hand-off."""
        transfer = self.fields.get("kv_transfer_params")
        before = b"{" if transfer is None else bytes(transfer)[:-1] + b","
        added = msgspec.json.encode({name: params})[1:]
        self.fields["kv_transfer_params"] = msgspec.Raw(before + added)

    def spend(self) -> bytes:
        """Return the body and drop its fields, so that they take no memory while the
        answer comes.
        """
        body = encode_with_ids(self.fields)
        self.fields.clear()
        return body


def prefill_call(
    journal: Journal, attempt: int, plan: act.Plan, member: Member, traceparent: str | None = None
) -> Call:
    """Make the call by which a member computes and keeps the KV of the whole history, or of the
    prompt if the plan replays the output, and sends the pages to the plan's places.
    """
    sources = _load_source(plan.load)
    call = _call(journal, attempt, plan, member, sources, is_prefill=True, traceparent=traceparent)
    if member.shared.has_tier:
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
    plan: act.Plan,
    member: Member,
    transfer: msgspec.Raw | None = None,
    *,
    slot_token: int = 0,
    ids_text: msgspec.Raw | None = None,
    traceparent: str | None = None,
) -> Call:
    """Make the call of the plan's decode instance, whose response has the tokens after the history;
    if the plan replays the output, all of it, of which the known tokens are named to an engine with
    a processor for that. The call never contains a peer's host and port. `ids_text`: the prompt's
    ids in JSON, if known.
    """
    exact, replays = member.abilities.resumes_exactly, plan.replays
    load = plan.load if plan.prefill is None else None
    call = _call(
        journal,
        attempt,
        plan,
        member,
        _sources(plan.runs) if plan.runs else _load_source(load),
        slot_token=slot_token,
        traceparent=traceparent,
        ids_text=None if journal.output_ids else ids_text,
    )
    if member.shared.has_tier:
        call.rows = _row_load(journal, attempt, plan)
    fields = call.fields
    fields["stream"] = True
    # kvrs's engines are not asked for usage: the proxy counts all that they would report.
    if journal.wants_usage or (journal.asks_usage and not exact):
        fields["stream_options"] = StreamOptions(include_usage=True)
    if journal.seed is not None and (exact or journal.seed_is_needed):
        fields["seed"] = journal.seed
    if transfer is not None:
        fields["kv_transfer_params"] = transfer
    if replays and member.abilities.replays:
        fields["vllm_xargs"] = {REPLAY_KEY: journal.output_ids[:]}
    elif not replays and (journal.output_ids or journal.is_rendered) and not exact:
        _count_from_here(journal, fields)
        call.most_tokens = journal.default_left
    return call


def _call(
    journal: Journal,
    attempt: int,
    plan: act.Plan,
    member: Member,
    sources: list[SourceRange],
    *,
    is_prefill: bool = False,
    slot_token: int = 0,
    traceparent: str | None,
    ids_text: msgspec.Raw | None = None,
) -> Call:
    exact, replays = member.abilities.resumes_exactly, plan.replays
    endpoint = journal.parsed.endpoint
    history = journal.prompt_ids  # The prompt alone, since no output token exists yet.
    if history is not None and (journal.output_ids or not isinstance(history, array)):
        history = journal.prompt if replays else journal.history
    # Continued as a completion, which takes ids: a stock engine would render a chat's messages
    # again.
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
    if plan.places and member.abilities.checkpoints:
        params.checkpoints = [
            CheckpointTarget(place.holder, place.reserved_bytes) for place in plan.places
        ]
    if endpoint is CHAT:
        # Already JSON, which the encoder copies.
        params.token_ids = cast(list[int] | None, ids_text or history)
    elif has_ids:
        fields["prompt"] = ids_text or history
    headers = ""
    if (request := journal.request) is not None:
        # Engines take this id as the id of the request, so it must differ between choices and
        # attempts.
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
    """Make the load of the part of the history that the server's own store may have."""
    load = _row_load(journal, attempt)
    load.node, load.pages = STORE, (load.history_tokens - 1) // page_size_tokens
    return load


def _row_load(journal: Journal, attempt: int, plan: act.Plan | None = None) -> RowLoad:
    """Make the load of the rows that the plan expects at agents; None: of none."""
    runs, asked = ((), ()) if plan is None else (plan.runs, plan.asked)
    return RowLoad(
        journal.stream,
        attempt,
        journal.owner_epoch,
        len(journal.prompt_ids or ()) + len(journal.output_ids),
        tuple(dict.fromkeys((*asked, *(run.holder for run in runs)))),
        sum(run.pages for run in runs),
    )


def context_headers(
    request: RequestContext, request_id: str, traceparent: str | None = None
) -> str:
    """Make the header lines of a call. `request_id`: its id; `traceparent`: its span, or None for
    that of the client's request.
    """
    lines = f"{REQUEST_ID}: {request_id}\r\n"
    if (traceparent := traceparent or request.traceparent) is not None:
        lines += f"{TRACEPARENT}: {traceparent}\r\n"
    return lines


def _salt_since(journal: Journal, salt: msgspec.Raw | None) -> str:
    """Return a salt for this stream alone, different after each spoilt attempt, so that the engine
    finds no page computed before.
    """
    given = "" if salt is None else msgspec.json.decode(salt)
    return f"{given}/{journal.stream}/{journal.spoilt_attempt}"


def limited(call: Call, max_model_len: int) -> Call:
    """Return the call, with an explicit output limit if it continues a chat without a limit as a
    completion: stock engines fail at null, and an absent limit means 16 tokens.
    """
    fields, history = call.fields, call.fields.get("prompt")
    if not isinstance(history, array) or fields.get("max_tokens", 0) is not None:
        return call
    most = max_model_len - len(history)
    fields["max_tokens"] = max(1, most if call.most_tokens is None else min(most, call.most_tokens))
    return call


def _count_from_here(journal: Journal, fields: dict[str, Any]) -> None:
    """Reduce limits by the tokens already produced: the engine takes the history as a prompt and
    counts from its end. Stop strings are left out, since the proxy cuts the text at them.
    """
    produced = len(journal.output_ids)
    # Null for a chat without a limit: in a completion an absent field would mean 16 tokens.
    fields["max_tokens"] = journal.remaining_tokens
    fields["min_tokens"] = max(0, journal.parsed.request.min_tokens - produced)
    fields.pop("stop", None)
