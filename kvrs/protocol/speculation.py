"""Messages of speculative decoding: an instance's counts, the notice of its reload, and the drafts
that a reloading instance makes for another one.

The helper connects to the verifying instance by WebSocket (`GET /kvrs/v1/drafts`, msgpack): it
sends a `DraftOffer`, then receives lists of `MirrorUpdate` and sends lists of `Burst`.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated

import msgspec

from kvrs.ids import InstanceId

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
DraftId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

MAX_RELOAD_S = 60.0  # Most seconds that a reload notice may be valid.
MAX_READY_S = 1e6
MAX_REASON = 500  # Most characters of a reason in a report.
MOST_DRAFTS = 64  # Most drafts of one stream beyond its verified tokens.
MAX_MESSAGE_BYTES = 1 << 24
# Number of tokens at which a list of updates ends and the next one begins.
_MESSAGE_TOKENS = 1 << 18
# Seconds between pings of both sides; a peer that does not answer within half of it is dropped.
HEARTBEAT_S = 5.0


class ReloadState(StrEnum):
    """State of a reloading instance (LUMEN, section 4.4)."""

    LOADING = "loading"  # The model is loading; the instance makes no drafts.
    LOADING_DRAFT = "loading_draft"
    ASSIST = "assist"  # The instance makes drafts, or offers them to others.
    HOTSWAP = "hotswap"  # The model is loaded; the instance is about to serve.


class Reload(msgspec.Struct, frozen=True):
    """State of a reloading instance, as it reports it."""

    state: ReloadState = ReloadState.LOADING
    # The instance that gets its drafts; None: no other instance does.
    paired_with: InstanceId | None = None
    # Predicted seconds until the instance serves; None: not known.
    ready_in_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_READY_S)] | None = None
    # Reason why the instance makes no drafts; empty: it makes some, or has not decided.
    skipped: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class SpeculationReport(msgspec.Struct, frozen=True):
    """Counts of drafts since the start of an instance."""

    source: str
    active: bool = False  # True while drafts are made.
    steps: _Natural = 0  # Steps that verified drafts; a step of n streams counts n times.
    proposed: _Natural = 0
    accepted: _Natural = 0
    # Received drafts that were not proposed, because the stream had continued otherwise.
    stale: _Natural = 0
    helper: InstanceId | None = None  # Instance that makes the drafts; None: no other instance.
    skipped: str = ""  # Reason why this instance, at its start, made no drafts for others.
    reloads: dict[InstanceId, Reload] = {}  # Reloads that other instances have announced.

    @property
    def wants_helper(self) -> bool:
        """True if the instance verifies drafts that another instance makes."""
        return self.source == "draft"


class ReloadNotice(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/reload`: an instance reloads and serves nothing for `ready_in_s`, or
    until its next notice.
    """

    instance: InstanceId
    for_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_RELOAD_S)]
    reload: Reload = Reload()


class DraftOffer(msgspec.Struct, frozen=True):
    """An instance's offer of drafts. The verifier closes the connection, with the reason, if the
    vocabularies differ or another instance already makes its drafts.
    """

    instance: InstanceId
    vocabulary: str  # Digest of the tokenizer, and of its number of ids.


class DraftChoice(msgspec.Struct, frozen=True):
    """Sampling parameters of a stream, which the draft model uses too, because its drafts are then
    right more often.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int


class MirrorUpdate(msgspec.Struct, frozen=True):
    """News of a stream for the helper: the begin of the stream (`choice` is given), further tokens,
    or the end (neither).
    """

    number: _Natural
    token_ids: list[DraftId] = []
    choice: DraftChoice | None = None


def in_messages(updates: Iterable[MirrorUpdate]) -> Iterator[list[MirrorUpdate]]:
    """Split the updates, in order, into lists that each fit into a message: a new helper gets all
    tokens of all streams at once.
    """
    message: list[MirrorUpdate] = []
    tokens = 0
    for update in updates:
        message.append(update)
        tokens += len(update.token_ids)
        if tokens >= _MESSAGE_TOKENS:
            yield message
            message, tokens = [], 0
    if message:
        yield message


class Burst(msgspec.Struct, frozen=True):
    """Drafts for a stream, from `position` of its tokens on. `begins_anew`: earlier drafts are
    wrong.
    """

    number: _Natural
    position: _Natural
    token_ids: Annotated[list[DraftId], msgspec.Meta(max_length=MOST_DRAFTS)]
    begins_anew: bool = False
