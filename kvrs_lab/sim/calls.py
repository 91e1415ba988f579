"""Calls of proxies to a simulated instance, and its answers."""

from abc import abstractmethod
from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from zlib import crc32

from kvrs.core.model import actions as act
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.tags import Tag
from kvrs.transfer.checkpoint_backlog import CheckpointBacklog
from kvrs.transfer.meter import LinkMeter
from kvrs_engine.scheduling.admission_wait import AdmissionWaitEstimator
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_engine.scheduling.sequences import Chunk, Sequence
from kvrs_engine.scheduling.sources import PullSource
from kvrs_lab.sim.flows import TokenFlow
from kvrs_lab.sim.process import SimProcess, Step

Batch = list[tuple[Sequence, Chunk]]

VOCABULARY = 50_000
TOKEN_STRIDE = 7919  # Has no divisor in common with it.
# A stream's tokens are consecutive ones of this cycle, which is here twice.
_CYCLE = array("H", (TOKEN_STRIDE * place % VOCABULARY for place in range(VOCABULARY))) * 2
_PLACES_APART = pow(TOKEN_STRIDE, -1, VOCABULARY)  # Of two tokens that differ by one.


@lru_cache(maxsize=1 << 14)
def first_token(stream: StreamId) -> int:
    return crc32(stream.encode()) % VOCABULARY


def token_at(stream: StreamId, position: int) -> int:
    """The model's token at a position: every attempt gets the same, as with greedy decoding, and
    no two positions of a stream have the same.
    """
    return (first_token(stream) + TOKEN_STRIDE * position) % VOCABULARY


def tokens_at(stream: StreamId, position: int, count: int) -> "array[int]":
    """Those from a position on, at most a whole cycle."""
    assert count <= VOCABULARY
    place = (first_token(stream) * _PLACES_APART + position) % VOCABULARY
    return _CYCLE[place : place + count]


class Asker(Protocol):
    """A proxy."""

    def answered(
        self, instance: InstanceId, tokens: "list[Answer]", flow: TokenFlow | None
    ) -> None:
        """Tokens of one batch of the instance are on their way, those of a flow among them."""

    def arrives_s(self, name: InstanceId) -> float:
        """When a message to or from the process arrives that is sent now."""


class Reply(Protocol):
    """The connection on which a call is answered."""

    asker: Asker

    def new_flow(self) -> TokenFlow:
        """One from this instance to this proxy."""

    def join(self, flow: TokenFlow) -> bool:
        """Its tokens come by the flow from now on; False: they cannot."""

    def leave(self) -> None:
        """They come by themselves again."""

    def prefilled(self, history_tokens: int, cached_tokens: int) -> None: ...

    def broke(self, cause: str) -> None: ...


# A token on its way to a proxy: the connection, position, token, and if it is the last.
Answer = tuple[Any, int, int, bool]


@dataclass(frozen=True, slots=True)
class SimCall:
    """One request of a proxy."""

    stream: StreamId
    number: tuple[int, int]  # Owner epoch, attempt.
    token_ids: "array[int]"  # The history; the instance adds what it computes.
    prompt_tokens: int
    max_tokens: int
    prefill_only: bool
    sources: tuple[PullSource, ...]
    places: tuple[act.Place, ...]
    reply: Reply
    slot_token: int = 0
    is_poison: bool = False  # The decode instance ends when it works on it.


@dataclass(slots=True, eq=False)
class SimRun:
    call: SimCall
    sequence: Sequence
    noted_pages: int = 0


def checkpoints_of(call: SimCall, page_size_tokens: int, page_bytes: int) -> list[CheckpointTarget]:
    """The agents that get the call's pages, with room for all that it may come to."""
    need_bytes = (call.prompt_tokens + call.max_tokens) // page_size_tokens * page_bytes
    return [
        CheckpointTarget(place.holder, max(place.reserved_bytes, need_bytes))
        for place in call.places
    ]


class RankedEngine(SimProcess):
    """An instance that may have ranks."""

    scheduler: BatchScheduler
    pages: PageManager
    places: AdmissionWaitEstimator
    backlog: CheckpointBacklog
    meter: LinkMeter
    runs: dict[Sequence, SimRun]
    unverified: set[Sequence]  # Of them, those whose pages are looked at with their next chunk.
    contents: list[Tag | None]
    flights: list[Batch]  # Under way.
    reporting: list[Step]
    given_up: Step | None  # Ends the process.
    draining: bool

    def report(self) -> None:
        """Report at once."""
        for report in list(self.reporting):
            report()

    @abstractmethod
    def look(self) -> None:
        """Begin whatever can be begun."""
