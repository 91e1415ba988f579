"""Request headers of a stream that can be resumed: its key, and the client's position.

Errors of keyed streams that clients get.
"""

import re
from collections.abc import Callable
from hashlib import blake2b

import msgspec
from multidict import CIMultiDictProxy

from kvrs.core.model import events as ev
from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.protocol.mirror import Refusal, unpack_ids
from kvrs.protocol.openai.chunks import error_body
from kvrs.protocol.secrets import TenantSecret
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.streams.open_stream import Failed
from kvrs.proxy.wire.journal import Exactness, Journal
from kvrs.proxy.wire.requests import ParsedRequest


def _ended(status: int, code: str, message: str, retry_after_s: float | None = None) -> Failed:
    return Failed(status, error_body(message, kind="server_error", code=code), retry_after_s)


SUPERSEDED = _ended(409, "superseded", "the stream goes on elsewhere: its client has resumed it")
HANDED_OVER = _ended(
    503,
    "handed_over",
    "the proxy is shutting down: resume at another one, with the same key",
    retry_after_s=1.0,
)
CUT = _ended(409, "inexact", "what the client has ends within a piece that cannot be cut")
BROKEN = Failed(500, error_body("internal error of the proxy; see its log", kind="server_error"))

_REFUSALS = {
    Refusal.BUSY: (409, "resume_conflict", "the stream has just been resumed by another request"),
    Refusal.OTHER_BODY: (
        422,
        "idempotency_mismatch",
        "the key belongs to a request with another body",
    ),
    Refusal.OTHER_STREAM: (
        404,
        "unknown_stream",
        "the key belongs to another stream than Last-Event-ID",
    ),
    Refusal.INEXACT: (
        409,
        "inexact",
        "what the client has beyond the mirror cannot be regenerated exactly",
    ),
    Refusal.BEYOND: (400, "beyond_end", "Last-Event-ID lies behind the end of the stream"),
}


def refused(refusal: Refusal | None) -> RequestError | None:
    """Return the error for a refused claim; None: the proxy has lost the record, which must be
    looked up again.
    """
    return _error(*_REFUSALS[refusal]) if refusal in _REFUSALS else None


def inexact() -> RequestError:
    return _error(*_REFUSALS[Refusal.INEXACT])


def unknown_stream() -> RequestError:
    return _error(404, "unknown_stream", "no proxy has a record of the stream")


def unreachable(cause: str) -> RequestError:
    return _error(503, "mirror_unreachable", cause)


def _error(status: int, code: str, message: str) -> RequestError:
    return RequestError(message, status=status, code=code)


KEY = "Idempotency-Key"
LAST_EVENT = "Last-Event-ID"
_KEY = re.compile(r"[\x21-\x7e]{1,255}", re.ASCII)
_EVENT = re.compile(r"([0-9a-f]{1,64}):([0-9]{1,9})", re.ASCII)


class ResumeRequest(msgspec.Struct, frozen=True):
    """A request for a keyed stream. `keys` are the record's keys under the present and the former
    secrets, which include the tenant: another tenant's client cannot have them.
    """

    keys: tuple[str, ...]
    digest: bytes
    stream: StreamId | None = None  # Stream to resume; None: the key's stream, from its beginning.
    after: int = -1
    tenant: str = ""  # Mark of the tenant's secret; empty: no tenant.
    # The request's body, kept in the record for clients that do not send it again.
    request: bytes = b""


def parse_resume_headers(
    headers: CIMultiDictProxy[str],
    path: str,
    body: bytes,
    parsed: ParsedRequest,
    secret_of_tenant: Callable[[], TenantSecret],
) -> ResumeRequest | None:
    """Return what the headers ask for; None: no key, as in most requests.

    Raises:
        RequestError: a malformed header, or a form of request that cannot be resumed.
    """
    if KEY not in headers:
        if LAST_EVENT in headers:
            raise RequestError(f"{LAST_EVENT} needs the {KEY} of the request", param=LAST_EVENT)
        return None
    key = ", ".join(headers.getall(KEY))
    if _KEY.fullmatch(key) is None:
        raise RequestError(
            f"got {len(key)} characters; allowed: 1 to 255 visible ASCII characters", param=KEY
        )
    if parsed.request.n != 1:
        raise RequestError(f"n must be 1 with {KEY}, got {parsed.request.n}", param="n")
    if parsed.more:
        raise RequestError(f"{KEY} allows one prompt, got {len(parsed.prompts)}", param="prompt")
    digest = blake2b(path.encode() + b"\0" + body, digest_size=32).digest()
    secret = secret_of_tenant()
    keys = tuple(secret.record_keys(key))
    if LAST_EVENT not in headers:
        return ResumeRequest(keys, digest, tenant=secret.mark)
    value = headers[LAST_EVENT]
    if not parsed.request.stream:
        raise RequestError(f"{LAST_EVENT} needs stream=true", param=LAST_EVENT)
    if (found := _EVENT.fullmatch(value)) is None:
        raise RequestError(
            f"{LAST_EVENT} has {len(value)} characters that are no position in a stream; allowed: "
            "the id of a streamed event, STREAM:NUMBER",
            param=LAST_EVENT,
        )
    return ResumeRequest(keys, digest, StreamId(found[1]), int(found[2]), secret.mark)


def reopened(record: Record, parsed: ParsedRequest, now_s: float) -> Journal:
    """Make the journal of a found stream, for the stream's next owner."""
    header, state = record.header_at(now_s), record.state
    return Journal(
        stream=record.stream,
        parsed=parsed,
        arrived_s=now_s - header.age_s,
        seed=header.seed,
        wants_usage=parsed.request.wants_usage,
        asks_usage=not parsed.request.stream or parsed.request.wants_usage,
        facts=state.facts,
        prompt_ids=unpack_ids(record.prompt_ids) if record.prompt_ids else parsed.prompt_ids,
        cached_tokens=state.cached_tokens,
        output_ids=record.output_ids,
        owner_epoch=record.owner_epoch,
        head=record.head,
        finish_reason=state.finish_reason,
        stop_reason=state.stop_reason,
        usage_sent=state.usage_sent,
        text_sent=state.text_sent,
        deadlines=ev.Deadlines(*header.deadlines),
        exactness=Exactness(state.inexact),
        lacks_ids=state.lacks_ids,
        textual=max(0, record.seq - (state.finish_reason is not None) - state.usage_sent)
        if state.lacks_ids
        else 0,
        kept=tuple(ev.Kept(each.holder, each.epoch, each.pages) for each in state.kv_locations),
        marks=[],
    )
