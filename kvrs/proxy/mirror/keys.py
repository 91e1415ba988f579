"""What a client says in headers of a stream that it may have to resume: its key, and what it has of it."""

import re
from dataclasses import dataclass
from hashlib import blake2b

from multidict import CIMultiDictProxy

from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.policy.events import Deadlines, Kept
from kvrs.proxy.forms import Asked
from kvrs.proxy.journal import Journal
from kvrs.proxy.mirror.records import Record

KEY = "Idempotency-Key"
LAST_EVENT = "Last-Event-ID"
_KEY = re.compile(r"[\x21-\x7e]{1,255}", re.ASCII)
_EVENT = re.compile(r"([0-9a-f]{1,64}):([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Asking:
    key: str
    digest: bytes
    stream: StreamId | None = None  # None: the client wants all of it.
    after: int = -1


def asking_of(headers: CIMultiDictProxy[str], path: str, body: bytes, asked: Asked) -> Asking | None:
    """None for nearly every request: it has no key.

    Raises:
        RequestError: a header is malformed, or the request has a form that cannot be resumed.
    """
    if KEY not in headers:
        if LAST_EVENT in headers:
            raise RequestError(f"{LAST_EVENT} wants the {KEY} of the request", param=LAST_EVENT)
        return None
    key = ", ".join(headers.getall(KEY))
    if _KEY.fullmatch(key) is None:
        raise RequestError(f"got {key!r:.80}; allowed: 1 to 255 visible ASCII characters", param=KEY)
    if path == "/generate":
        raise RequestError(f"{KEY} is not supported at {path}", param=KEY)
    if asked.request.n != 1:
        raise RequestError(f"n must be 1 with {KEY}, got {asked.request.n}", param="n")
    digest = blake2b(path.encode() + b"\0" + body, digest_size=32).digest()
    if LAST_EVENT not in headers:
        return Asking(key, digest)
    said = headers[LAST_EVENT]
    if (found := _EVENT.fullmatch(said)) is None or not asked.request.stream:
        raise RequestError(f"got {said!r:.80}; allowed: the id of an event, of a request that streams", param=LAST_EVENT)
    return Asking(key, digest, StreamId(found[1]), int(found[2]))


def reopened(record: Record, asked: Asked, now_s: float) -> Journal:
    """The journal of a stream that was found, for its next owner."""
    opening, standing = record.open_again(now_s), record.standing
    return Journal(
        stream=record.stream,
        asked=asked,
        arrived_s=now_s - opening.age_s,
        seed=opening.seed,
        wants_usage=asked.wants_usage,
        prompt_ids=record.prompt_ids or asked.prompt_ids,
        output_ids=record.output_ids,
        owner_epoch=record.owner_epoch,
        head=record.head,
        finish_reason=standing.finish_reason,
        stop_reason=standing.stop_reason,
        usage_sent=standing.usage_sent,
        text_sent=standing.text_sent,
        deadlines=Deadlines(*opening.deadlines),
        inexact=standing.inexact,
        kept=tuple(Kept(held.holder, held.epoch, held.pages) for held in standing.held),
        marks=[],
    )
