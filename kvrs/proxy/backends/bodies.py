"""The bodies of a stream's two calls: the client's own fields, and over them what only the proxy knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrs.policy.actions import Place, Run
from kvrs.protocol.instance import Checkpoint, KvrsParams, KvTransferParams, PageRun
from kvrs.protocol.openai import StreamOptions
from kvrs.proxy.forms import CHAT, COMPLETIONS
from kvrs.proxy.journal import Journal

# The proxy's own work, or said anew in every call.
_NEVER_FORWARDED = ("n", "best_of", "echo", "stream_options")
# Prefill produces nothing, so nothing needs to be said of how.
_NOT_FOR_PREFILL = (
    "max_completion_tokens",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
# Of a chat, when it goes on as a completion.
_ONLY_FOR_CHAT = (
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "chat_template_kwargs",
)


@dataclass(frozen=True, slots=True)
class Call:
    path: str
    fields: dict[str, Any]

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.fields)


def prefill_call(journal: Journal, attempt: int, places: Sequence[Place], *, exact: bool) -> Call:
    """Compute and retain the KV of the whole history, and send its pages to `places`."""
    call = _call(journal, attempt, places, exact=exact, sources=[])
    for name in _NOT_FOR_PREFILL:
        call.fields.pop(name, None)
    call.fields.update(max_tokens=1, temperature=0, stream=False, kv_transfer_params=KvTransferParams(do_remote_decode=True))
    return call


def decode_call(
    journal: Journal,
    attempt: int,
    runs: Sequence[Run],
    places: Sequence[Place],
    transfer: msgspec.Raw | None,
    *,
    exact: bool,
    slot_token: int = 0,
) -> Call:
    """Stream the tokens after the history. Host and port of a peer are never in it."""
    sources = [PageRun(run.holder, run.first_page, run.pages, run.generation) for run in runs]
    call = _call(journal, attempt, places, exact=exact, sources=sources, slot_token=slot_token)
    fields = call.fields
    fields["stream"] = True
    if journal.wants_usage:
        fields["stream_options"] = StreamOptions(include_usage=True)
    if journal.seed is not None:
        fields["seed"] = journal.seed
    if transfer is not None:
        fields["kv_transfer_params"] = transfer
    if journal.output_ids and not exact:
        _count_from_here(journal, fields)
    return call


def _call(
    journal: Journal, attempt: int, places: Sequence[Place], *, exact: bool, sources: list[PageRun], slot_token: int = 0
) -> Call:
    form, history = journal.asked.form, journal.history
    fields: dict[str, Any] = dict(journal.asked.fields)
    for name in _NEVER_FORWARDED:
        fields.pop(name, None)
    fields["return_token_ids"] = True
    checkpoints = [Checkpoint(place.holder, place.reserved_bytes) for place in places]
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
    # A plain engine would render a chat's messages again, and knows no other way to take ids than as a completion.
    if form is CHAT and not exact and journal.output_ids:
        form = COMPLETIONS
        for name in _ONLY_FOR_CHAT:
            fields.pop(name, None)
    if form is CHAT:
        params.token_ids = history
    elif history is not None:
        fields["prompt"] = history
    return Call(form.path, fields)


def _count_from_here(journal: Journal, fields: dict[str, Any]) -> None:
    """An engine that takes the history for a prompt counts from its end, and the proxy cuts the text at stop strings."""
    produced = len(journal.output_ids)
    # Null where a chat has no limit; without the field a completion would have one.
    fields["max_tokens"] = journal.remaining_tokens
    fields["min_tokens"] = max(0, journal.asked.request.min_tokens - produced)
    fields.pop("stop", None)
