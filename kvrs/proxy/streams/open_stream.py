"""An open stream of the proxy: its client, its task, its outcome, and where it spends its time."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvrs.core.fleet.self_tests import TestedProcess
from kvrs.core.model.live_stream import Complete, LiveStream
from kvrs.ids import InstanceId
from kvrs.process.eager_task import EagerTask
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.wire.journal import Journal


class Failed(msgspec.Struct, frozen=True):
    """The client gets this error: as the status before its first byte, as an event after it."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    rejected: bool = False  # For a fault of the request, which is none of the cluster.


Outcome = Complete | Failed


class StreamPhase(StrEnum):
    """A stream spends its time in one of these, as people are shown it."""

    WAITING = "waiting"  # No attempt is running: it has no place yet.
    PREFILL = "prefill"
    DECODE = "decode"


_PLACES = {phase: place for place, phase in enumerate(StreamPhase)}
_NOTHING = array("d", [0.0] * len(_PLACES))


@dataclass(slots=True, eq=False, kw_only=True)
class OpenStream(LiveStream):
    journal: Journal
    client: Client
    outcome: asyncio.Future[Outcome]
    clock: Callable[[], float]
    phase: StreamPhase = StreamPhase.WAITING
    instance: InstanceId | None = None  # Where it runs.
    entered_s: float  # When the current phase began.
    is_opening: bool = True  # The decision about its first attempt is being carried out.
    # In each phase before, in all attempts together, in the order of the phases.
    spent_s: "array[float]" = field(default_factory=_NOTHING.__copy__)
    task: EagerTask[None] | None = None
    decoded_by: TestedProcess | None = None  # The one that gave the last output.
    # Has the current attempt report its next token as if it were its first.
    expect_token: Callable[[], None] | None = None
    refusal: Failed | None = None  # The last one of an instance, for the client if it stands.
    # Instances that refused it, until it is known whose fault that is.
    refused_by: tuple[InstanceId, ...] = ()

    def enter(self, phase: StreamPhase, instance: InstanceId | None) -> None:
        if phase is not self.phase:
            now_s = self.clock()
            self.spent_s[_PLACES[self.phase]] += now_s - self.entered_s
            self.entered_s = now_s
        self.phase, self.instance = phase, instance

    def phase_seconds(self, now_s: float) -> dict[StreamPhase, float]:
        """The time spent in each phase, in all attempts together."""
        spent = dict(zip(_PLACES, self.spent_s, strict=True))
        spent[self.phase] += now_s - self.entered_s
        return spent
