"""Speculation on the wire: counts of an instance, the notice of one that starts again, and drafts
that it makes for another one meanwhile.

Drafts go over a WebSocket at `GET /kvrs/v1/drafts` of the instance that verifies them, in msgpack:
first a `DraftOffer` of the other one, then lists of `MirrorUpdate` to it and of `Burst` from it.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated

import msgspec

from kvrs.ids import InstanceId

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
DraftId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

MAX_RELOAD_S = 60.0  # A notice counts.
MAX_READY_S = 1e6
MAX_REASON = 500  # Characters.
MOST_DRAFTS = 64  # Of one stream, ahead of what was verified.
MAX_MESSAGE_BYTES = 1 << 24
_MESSAGE_TOKENS = 1 << 18  # Of a list of updates, but for its last one.
# Either side asks the other one so often whether it is there, and leaves one that does not answer
# within half of that.
HEARTBEAT_S = 5.0


class ReloadState(StrEnum):
    """State of an instance that is started again (LUMEN, section 4.4)."""

    LOADING = "loading"  # Its model; it makes no drafts.
    LOADING_DRAFT = "loading_draft"
    ASSIST = "assist"  # It makes drafts, or asks others whether they want some.
    HOTSWAP = "hotswap"  # Its model is there.


class Reload(msgspec.Struct, frozen=True):
    """An instance that is being started again, as it says."""

    state: ReloadState = ReloadState.LOADING
    paired_with: InstanceId | None = None  # For which it makes drafts.
    ready_in_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_READY_S)] | None = None  # Not known.
    skipped: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""  # Why it makes no drafts.


class SpeculationReport(msgspec.Struct, frozen=True):
    """Drafts of an instance; counts are since its start."""

    source: str
    active: bool = False  # Drafts are made now.
    steps: _Natural = 0  # With drafts, of a stream each.
    proposed: _Natural = 0
    accepted: _Natural = 0
    stale: _Natural = 0  # That came and were not proposed: the stream had gone on otherwise.
    helper: InstanceId | None = None  # The instance that makes them.
    skipped: str = ""  # Why its own start made none for others.
    reloads: dict[InstanceId, Reload] = {}  # Of others.

    def since(self, before: "SpeculationReport") -> "SpeculationReport":
        """The counts after `before`, a report of the same process."""
        return SpeculationReport(
            self.source,
            active=self.active,
            steps=max(0, self.steps - before.steps),
            proposed=max(0, self.proposed - before.proposed),
            accepted=max(0, self.accepted - before.accepted),
            stale=max(0, self.stale - before.stale),
        )

    @property
    def wants_helper(self) -> bool:
        """It takes drafts of another instance."""
        return self.source == "draft"


class ReloadNotice(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/reload`: that instance is being started again, and serves nothing for
    so long, or until it says so again.
    """

    instance: InstanceId
    for_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_RELOAD_S)]
    reload: Reload = Reload()


class DraftOffer(msgspec.Struct, frozen=True):
    """An instance can make drafts. Its connection is closed, with the reason, where the model has
    another vocabulary or another instance makes them already.
    """

    instance: InstanceId
    vocabulary: str  # Digest of tokenizer and size.


class DraftChoice(msgspec.Struct, frozen=True):
    """How a stream's tokens are chosen; a draft that chooses so is more often right."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int


class MirrorUpdate(msgspec.Struct, frozen=True):
    """A stream has begun (`choice` is given), has further tokens, or has ended (neither)."""

    number: _Natural
    token_ids: list[DraftId] = []
    choice: DraftChoice | None = None


def in_messages(updates: Iterable[MirrorUpdate]) -> Iterator[list[MirrorUpdate]]:
    """The same in order, in lists of which each fits into a message: a helper is told all tokens
    of all streams at once as it comes.
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
    """Drafts for a stream: the position of the first one, and their ids. `begins_anew`: those that
    came before are wrong.
    """

    number: _Natural
    position: _Natural
    token_ids: Annotated[list[DraftId], msgspec.Meta(max_length=MOST_DRAFTS)]
    begins_anew: bool = False
