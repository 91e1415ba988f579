"""A stream while it lives: its journal, its client, and the one attempt that may write to it."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Plan
from kvrs.proxy.clients import Client
from kvrs.proxy.journal import Journal


class Stage(StrEnum):
    WAITING = "waiting"  # No attempt is running: the policy has not found it a place yet.
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Complete:
    """Every token, the finish and the usage were sent; only the formal end is left."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The client gets this error: as the status before its first byte, as an event after it."""

    status: int
    body: bytes
    retry_after_s: float | None = None


Outcome = Complete | Failed


@dataclass(slots=True, eq=False)
class Copy:
    """What an agent keeps of a stream."""

    pages: int = 0  # Leading full ones.
    lost: str | None = None  # Why it keeps nothing.


@dataclass(slots=True, eq=False)
class LiveStream:
    journal: Journal
    client: Client
    outcome: asyncio.Future[Outcome]
    plan: Plan | None = None
    stage: Stage = Stage.WAITING
    instance: InstanceId | None = None  # Where the current stage runs.
    task: asyncio.Task[None] | None = None
    prefilled_at: set[InstanceId] = field(default_factory=set)  # May retain pages of this stream.
    copies: dict[InstanceId, Copy] = field(default_factory=dict)  # By the agents that were to keep checkpoints of it.

    @property
    def id(self) -> StreamId:
        return self.journal.stream

    @property
    def resumable(self) -> bool:
        """Whether its client may go on with it at another proxy."""
        return self.journal.marks is not None and not self.journal.finished

    def enter(self, stage: Stage, instance: InstanceId | None) -> None:
        self.stage = stage
        self.instance = instance

    def halt(self) -> None:
        """From now on nobody writes; the connection of whoever did is closed as its task ends."""
        self.enter(Stage.WAITING, None)
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def resolve(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
