"""The interface between DistServe's stages and their server: a job goes in, its sink gets events.

The module needs no DistServe: server code and its tests depend on this module alone.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvrs.errors import KvrsError
from kvrs_engine.scheduling.pages import PageManager


class Stage(StrEnum):
    CONTEXT = "context"
    DECODING = "decoding"


class JobEnded(KvrsError):  # noqa: N818  # An event, and mostly no error.
    """The job was aborted or its stage died while a call waited. After a death, `failed` of the
    sink was called before.
    """


class Sink(Protocol):
    """The receiver of one job's events. All calls are on the event loop. No call follows `failed`,
    an abort, or a `token` that returned False.
    """

    def token(self, token_id: int) -> bool:
        """Take an output token. Return whether more tokens are wanted; False ends the job in this
        step.
        """

    def prefilled(self) -> None:
        """Handle that the context stage's blocks hold the KV of the whole history. The call comes
        before token 0, while the job owns the blocks.
        """

    def failed(self, stage: Stage, cause: str) -> None:
        """Handle that a stage died with the job, or could not continue it. No call follows."""


@dataclass(eq=False)
class Job:
    id: int  # Unique within the process.
    history: list[int]  # Prompt and earlier output; never empty, never changed.
    max_new_tokens: int
    prefill_only: bool  # The context stage ends the job with token 0.
    sink: Sink


@dataclass(eq=False)
class StageState:
    """State of one stage, in one object, whose fields change with every restart of the stage."""

    stage: Stage
    pages: PageManager  # New and empty after each restart.
    alive: bool = False
    death: str = ""  # Cause of the last death.
    generation: int = 0  # Number of starts.
    worker_pids: tuple[int, ...] = ()  # Ordered by pipeline rank, then tensor rank.
    workers_here: bool = False  # All workers run on this process's node.
    queued: int = 0
    running: int = 0
    full: bool = False  # Another job would wait for the end of a job.
    step_s: float = 0.0  # Average time of recent steps, 0 before the first.
