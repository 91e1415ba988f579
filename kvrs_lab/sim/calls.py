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
from kvrs.protocol.pages import Tag
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
TOKEN_STRIDE = 7919  # Coprime to the vocabulary's size.
# The cycle of tokens, twice: the tokens of a stream are consecutive in the cycle.
_CYCLE = array("H", (TOKEN_STRIDE * place % VOCABULARY for place in range(VOCABULARY))) * 2
_PLACES_APART = pow(TOKEN_STRIDE, -1, VOCABULARY)  # Distance of two tokens that differ by 1.


@lru_cache(maxsize=1 << 14)
def first_token(stream: StreamId) -> int:
    return crc32(stream.encode()) % VOCABULARY


def token_at(stream: StreamId, position: int) -> int:
    """The model's token at a position. Every attempt gets the same token, as with greedy decoding,
    and two positions of a stream have different tokens.
    """
    return (first_token(stream) + TOKEN_STRIDE * position) % VOCABULARY


def tokens_at(stream: StreamId, position: int, count: int) -> "array[int]":
    """The model's tokens from a position on, at most a whole cycle."""
    assert count <= VOCABULARY
    place = (first_token(stream) * _PLACES_APART + position) % VOCABULARY
    return _CYCLE[place : place + count]


class Asker(Protocol):
    """The proxy of a call."""

    def answered(
        self, instance: InstanceId, tokens: "list[Answer]", flow: TokenFlow | None
    ) -> None:
        """Take the tokens of one batch of the instance, some of them in `flow`."""

    def arrives_s(self, name: InstanceId) -> float:
        """Arrival time of a message that is sent now to or from the process."""


class Reply(Protocol):
    """The connection on which a call is answered."""

    asker: Asker

    def new_flow(self) -> TokenFlow:
        """Create a flow of tokens from this instance to this proxy."""

    def join(self, flow: TokenFlow) -> bool:
        """Send the call's tokens by the flow from now on; False: impossible."""

    def leave(self) -> None:
        """Send the call's tokens one by one again."""

    def prefilled(self, history_tokens: int, cached_tokens: int) -> None: ...

    def broke(self, cause: str) -> None: ...


# A token on its way to a proxy: connection, position, token, and whether it is the last token.
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
    is_poison: bool = False  # The request ends its decode instance.


@dataclass(slots=True, eq=False)
class SimRun:
    call: SimCall
    sequence: Sequence
    noted_pages: int = 0


def checkpoints_of(call: SimCall, page_size_tokens: int, page_bytes: int) -> list[CheckpointTarget]:
    """The agents that get the call's pages, with room for the call's longest history."""
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
    unverified: set[Sequence]  # Runs whose pages are checked with their next chunk.
    contents: list[Tag | None]
    flights: list[Batch]  # Batches in flight.
    reporting: list[Step]
    given_up: Step | None  # Ends the process.
    draining: bool

    def report(self) -> None:
        """Send a report to every proxy at once."""
        for report in list(self.reporting):
            report()

    @abstractmethod
    def look(self) -> None:
        """Begin all work that can begin."""
