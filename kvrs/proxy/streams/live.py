"""An open stream of the proxy: its client, the task of its attempt, and its outcome."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrs.control.live import Complete, LiveStream, StreamStage
from kvrs.control.self_tests import TestedProcess
from kvrs.ids import InstanceId
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.streams.journal import Journal


@dataclass(frozen=True, slots=True)
class Failed:
    """The client gets this error: as the status before its first byte, as an event after it."""

    status: int
    body: bytes
    retry_after_s: float | None = None


Outcome = Complete | Failed


@dataclass(frozen=True, slots=True)
class EnteredStage:
    at_s: float
    stage: StreamStage
    worker: InstanceId | None
    attempt: int


@dataclass(slots=True, eq=False, kw_only=True)
class OpenStream(LiveStream):
    journal: Journal
    client: Client
    outcome: asyncio.Future[Outcome]
    clock: Callable[[], float]
    entered: list[EnteredStage] = field(default_factory=list)  # All stages, one after another.
    task: asyncio.Task[None] | None = None
    decoded_by: TestedProcess | None = None  # The one that gave the last output.
    # Has the current attempt report its next token as if it were its first.
    expect_token: Callable[[], None] | None = None
    refusal: Failed | None = None  # The last one of an instance, for the client if it stands.

    def __post_init__(self) -> None:
        self._note_stage()

    def enter(self, stage: StreamStage, instance: InstanceId | None) -> None:
        LiveStream.enter(self, stage, instance)  # `super` does not work in a class with slots.
        self._note_stage()

    def _note_stage(self) -> None:
        attempt = self.journal.attempt
        self.entered.append(EnteredStage(self.clock(), self.stage, self.instance, attempt))

    def stage_seconds(self, now_s: float) -> dict[StreamStage, float]:
        """The time spent in each stage, in all attempts together."""
        spent = dict.fromkeys(StreamStage, 0.0)
        ends = [*(later.at_s for later in self.entered[1:]), now_s]
        for entered, end_s in zip(self.entered, ends, strict=True):
            spent[entered.stage] += end_s - entered.at_s
        return spent

    def end_task(self) -> None:
        """Cancel the running attempt; its connection is closed as its task ends."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def resolve(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
