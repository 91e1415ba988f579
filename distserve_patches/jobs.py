"""The seam between DistServe's two stages and what serves them: a job goes in, its sink hears of it.

Needs no DistServe: server code and its tests stand on this module alone.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvrs.errors import KvrsError
from kvrs.scheduling.pages import PageManager


class Stage(StrEnum):
    CONTEXT = "context"
    DECODING = "decoding"


class JobEnded(KvrsError):  # noqa: N818  # An event, and mostly nobody's error.
    """The job was aborted, or its stage died, while somebody waited for it. The sink has heard of a death already."""


class Sink(Protocol):
    """Who hears of one job. All calls come on the event loop, and none after `token` answered False, `failed` or an abort."""

    def token(self, token_id: int) -> bool:
        """One more output token. False when the request wants no more: the job then ends in this very step."""

    def prefilled(self) -> None:
        """The context stage's blocks hold the KV of the whole history. Comes before token 0, while the job still owns them."""

    def failed(self, stage: Stage, cause: str) -> None:
        """That stage died and took the job with it, or could not carry it on. Nothing more comes."""


@dataclass(eq=False)
class Job:
    id: int  # Unique for the life of the process.
    history: list[int]  # Prompt and what was produced before; never empty, never changed.
    max_new_tokens: int
    prefill_only: bool  # Ends with token 0, at the context stage.
    sink: Sink


@dataclass(eq=False)
class StageState:
    """What is known of one stage. The object stays the same; its fields change with every life of the stage."""

    stage: Stage
    pages: PageManager  # Of this life: a stage that returns has a new one, and nothing in it.
    alive: bool = False
    generation: int = 0  # Which life this is or was; the first is 1.
    worker_pids: tuple[int, ...] = ()  # By pipeline rank, then tensor rank.
    workers_here: bool = False  # All of them run on this process' own node.
    queued: int = 0
    running: int = 0
    step_s: float = 0.0  # Average time of recent steps, 0 before the first.
