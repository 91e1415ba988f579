"""The interface between DistServe's two stages and their server: a job goes in, its sink gets the
events.

Needs no DistServe: server code and its tests depend on this module alone.
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
    """The job was aborted, or its stage died, while a call waited for it. `failed` of the sink was
    called before, where a stage died.
    """


class Sink(Protocol):
    """The receiver of one job's events. All calls come on the event loop, and none after `token`
    returned False, `failed` or an abort.
    """

    def token(self, token_id: int) -> bool:
        """One more output token. Returns whether more are wanted; if not, the job ends in this
        very step.
        """

    def prefilled(self) -> None:
        """The context stage's blocks hold the KV of the whole history. Comes before token 0, while
        the job still owns them.
        """

    def failed(self, stage: Stage, cause: str) -> None:
        """That stage died and took the job with it, or could not carry it on. Nothing more
        comes.
        """


@dataclass(eq=False)
class Job:
    id: int  # Unique within the process.
    history: list[int]  # Prompt and what was produced before; never empty, never changed.
    max_new_tokens: int
    prefill_only: bool  # Ends with token 0, at the context stage.
    sink: Sink


@dataclass(eq=False)
class StageState:
    """State of one stage. The object stays the same; its fields change with every restart of the
    stage.
    """

    stage: Stage
    pages: PageManager  # Of this generation: a restarted stage has a new, empty one.
    alive: bool = False
    generation: int = 0  # Counts the starts; the first is 1.
    worker_pids: tuple[int, ...] = ()  # By pipeline rank, then tensor rank.
    workers_here: bool = False  # All of them run on this process' own node.
    queued: int = 0
    running: int = 0
    full: bool = False  # One more job would wait until another one has ended.
    step_s: float = 0.0  # Average time of recent steps, 0 before the first.
