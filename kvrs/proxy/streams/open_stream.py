"""An open stream of the proxy: its client, task, outcome, and time per phase."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvrs.core.fleet.self_tests import TestedProcess
from kvrs.core.model.streams import Complete, LiveStream
from kvrs.errors import UndecodableError
from kvrs.ids import InstanceId
from kvrs.process.eager_task import EagerTask
from kvrs.protocol.openai.chunks import UNDECODABLE, error_body
from kvrs.proxy.streams.clients import Client, ClientGoneError
from kvrs.proxy.wire.journal import Journal


class Failed(msgspec.Struct, frozen=True):
    """An error for the client: sent by the response's status before the first byte, as an event
    afterwards.
    """

    status: int
    body: bytes
    retry_after_s: float | None = None
    rejected: bool = False  # The request is at fault, not an instance or the proxy.
    is_final: bool = False  # Clients must not repeat the request, though none is at fault.


Outcome = Complete | Failed


CLIENT_GONE = Failed(499, error_body("the client is gone", kind="client_gone"))


def undecodable(error: UndecodableError) -> Failed:
    """Return the failure of a stream whose output cannot be passed on in the form of its API."""
    body = error_body(str(error), kind="server_error", code=UNDECODABLE)
    return Failed(502, body, is_final=True)


def failed_by(error: ClientGoneError | UndecodableError) -> Failed:
    """Return the failure of a stream whose client takes no more events."""
    return CLIENT_GONE if isinstance(error, ClientGoneError) else undecodable(error)


class StreamPhase(StrEnum):
    """Phase of a stream, as shown to people."""

    WAITING = "waiting"  # No attempt is running, or the attempt waits for a place at an instance.
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
    # Instance that runs the current phase; None: the stream waits.
    instance: InstanceId | None = None
    entered_s: float  # Time at which the current phase began.
    # The core still decides about the first attempt, whose task begins afterwards.
    is_opening: bool = True
    # Seconds spent in each phase before the current phase began, over all attempts, in the order of
    # the phases.
    spent_s: "array[float]" = field(default_factory=_NOTHING.__copy__)
    task: EagerTask[None] | None = None
    decoders: tuple[TestedProcess, ...] = ()  # Processes that computed output, the latest last.
    # Makes the current attempt report its next token as if it were its first; None: no decode call
    # runs.
    expect_token: Callable[[], None] | None = None
    # Latest refusal by an instance, which the client gets if no other instance takes the request.
    refusal: Failed | None = None
    # Instances that refused the request, until it is known whether the request is at fault.
    refused_by: tuple[InstanceId, ...] = ()

    def enter(self, phase: StreamPhase, instance: InstanceId | None) -> None:
        if phase is not self.phase:
            now_s = self.clock()
            self.spent_s[_PLACES[self.phase]] += now_s - self.entered_s
            self.entered_s = now_s
        self.phase, self.instance = phase, instance

    def phase_seconds(self, now_s: float) -> dict[StreamPhase, float]:
        """Return the seconds spent in each phase until now, over all attempts."""
        spent = dict(zip(_PLACES, self.spent_s, strict=True))
        spent[self.phase] += now_s - self.entered_s
        return spent
