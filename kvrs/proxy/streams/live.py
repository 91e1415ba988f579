"""An open stream of the proxy: its client, the task of its attempt, and its outcome."""

import asyncio
from dataclasses import dataclass

from kvrs.control.live import Complete, LiveStream
from kvrs.control.self_tests import TestedProcess
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.streams.journal import Journal


@dataclass(frozen=True, slots=True)
class Failed:
    """The client gets this error: as the status before its first byte, as an event after it."""

    status: int
    body: bytes
    retry_after_s: float | None = None


Outcome = Complete | Failed


@dataclass(slots=True, eq=False, kw_only=True)
class OpenStream(LiveStream):
    journal: Journal
    client: Client
    outcome: asyncio.Future[Outcome]
    task: asyncio.Task[None] | None = None
    decoded_by: TestedProcess | None = None  # The one that gave the last output.
    refusal: Failed | None = None  # The last one of an instance, for the client if it stands.

    def end_task(self) -> None:
        """Cancel the running attempt; its connection is closed as its task ends."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def resolve(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
