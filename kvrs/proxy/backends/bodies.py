"""The bodies of a stream's two calls: the client's fields, overridden by the proxy's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from kvrs.policy.model.actions import PageRange, Place
from kvrs.protocol.instance import CheckpointTarget, KvrsParams, KvTransferParams, SourceRange
from kvrs.protocol.openai.fields import (
    NOT_AFTER_SEAM,
    NOT_FOR_COMPLETIONS,
    NOT_FOR_IDS,
    NOT_FOR_PREFILL,
)
from kvrs.protocol.openai.requests import StreamOptions
from kvrs.protocol.token_ids import encode
from kvrs.proxy.streams.journal import Journal
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS

# Done by the proxy itself, or set anew in every call.
_NEVER_FORWARDED = ("n", "echo", "stream_options")


@dataclass(frozen=True, slots=True)
class Call:
    path: str
    fields: dict[str, Any]

    def spend(self) -> bytes:
        """The body, after which the call holds nothing: its answer may take minutes."""
        body = encode(self.fields)
        self.fields.clear()
        return body


def prefill_call(journal: Journal, attempt: int, places: Sequence[Place], *, exact: bool) -> Call:
    """The call that computes and retains the KV of the whole history, and sends its pages to
    `places`.
    """
    call = _call(journal, attempt, places, exact=exact, sources=[])
    _drop(call.fields, NOT_FOR_PREFILL)
    call.fields.update(
        max_tokens=1,
        temperature=0,
        stream=False,
        kv_transfer_params=KvTransferParams(do_remote_decode=True),
    )
    return call


def decode_call(
    journal: Journal,
    attempt: int,
    runs: Sequence[PageRange],
    places: Sequence[Place],
    transfer: msgspec.Raw | None,
    *,
    exact: bool,
    slot_token: int = 0,
) -> Call:
    """The call that streams the tokens after the history. It never has a peer's host and port."""
    sources = [SourceRange(run.holder, run.first_page, run.pages, run.generation) for run in runs]
    call = _call(journal, attempt, places, exact=exact, sources=sources, slot_token=slot_token)
    fields = call.fields
    fields["stream"] = True
    if journal.wants_usage:
        fields["stream_options"] = StreamOptions(include_usage=True)
    if journal.seed is not None and (exact or journal.seed_is_needed):
        fields["seed"] = journal.seed
    if transfer is not None:
        fields["kv_transfer_params"] = transfer
    if journal.output_ids and not exact:
        _count_from_here(journal, fields)
    return call


def _call(
    journal: Journal,
    attempt: int,
    places: Sequence[Place],
    *,
    exact: bool,
    sources: list[SourceRange],
    slot_token: int = 0,
) -> Call:
    endpoint, history = journal.parsed.endpoint, journal.history
    fields: dict[str, Any] = dict(journal.parsed.fields)
    _drop(fields, _NEVER_FORWARDED)
    fields["return_token_ids"] = True
    checkpoints = [CheckpointTarget(place.holder, place.reserved_bytes) for place in places]
    params = KvrsParams(
        journal.stream,
        attempt,
        journal.prompt_tokens,
        owner_epoch=journal.owner_epoch,
        sources=sources,
        checkpoints=checkpoints,
        slot_token=slot_token,
    )
    fields["kvrs"] = params
    # A plain engine would render a chat's messages again; it takes ids in completions only.
    if endpoint is CHAT and not exact and journal.output_ids:
        endpoint = COMPLETIONS
        _drop(fields, NOT_FOR_COMPLETIONS)
    if endpoint is CHAT:
        params.token_ids = cast(list[int] | None, history)  # Encoded as one.
    elif history is not None:
        fields["prompt"] = history
        _drop(fields, NOT_FOR_IDS)
    return Call(endpoint.path, fields)


def _count_from_here(journal: Journal, fields: dict[str, Any]) -> None:
    """Adjust limits for an engine that counts from the end of the history, which it takes as a
    prompt; the proxy cuts the text at stop strings itself.
    """
    produced = len(journal.output_ids)
    # Null if a chat has no limit: an absent field would be a limit in a completion.
    fields["max_tokens"] = journal.remaining_tokens
    fields["min_tokens"] = max(0, journal.parsed.request.min_tokens - produced)
    fields.pop("stop", None)
    _drop(fields, NOT_AFTER_SEAM)


def _drop(fields: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        fields.pop(name, None)
