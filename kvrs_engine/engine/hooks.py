"""The interface of an engine's core to the subsystems that an instance may have: ranks, anchored
memory, checkpoints, pace and drafts.
"""

import asyncio
import collections.abc
from abc import abstractmethod
from collections.abc import Iterable, Mapping

from kvrs.ids import InstanceId
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk, Sequence

Batch = list[tuple[Sequence, Chunk]]


class StepHook:
    """A subsystem, which implements what it needs of this. Calls come from the event loop, return
    at once and do not fail, except where they say otherwise.
    """

    __slots__ = ()

    def place(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Choose the base of a new sequence beside those of the other runs."""

    def began(self, run: GenerationRun) -> None:
        """A run was accepted, or starts anew after a loss, and is about to be computed."""

    def before_batch(self, batch: Batch) -> None:
        """A batch is about to be computed.

        Raises:
            KvrsError: this process must not compute any more.
        """

    async def after_logits(self, batch: Batch, took_s: float) -> None:
        """A batch was computed; its tokens are emitted after this."""

    def filled(self, run: GenerationRun) -> None:
        """The run has more full pages than before (computed, fetched or found here), or has them
        again after a preemption.

        Called after a batch, while the sequence owns them.
        """

    def held(self, run: GenerationRun) -> Mapping[InstanceId, int]:
        """How many leading full pages of the run each of its agents has stored."""
        return {}

    def replicated(self, run: GenerationRun) -> int:
        """How many leading full pages of the run have, at an instance that would lend a lost stage,
        what is lost here.
        """
        return 0

    def admits(self) -> bool:
        """Runs may get pages now."""
        return True

    def on_lost(self) -> None:
        """Wait, in the computing thread, until lost ranks do not keep the worker from computing.

        Raises:
            RanksLostError: it cannot compute any more.
        """

    def on_restart(self) -> None:
        """All runs have started anew: no book has pages with lost cells any more."""

    def ended(self, run: GenerationRun) -> None:
        """Nothing more is computed for the sequence; its pages are at most leased or cached."""


class DraftSource(StepHook):
    """Proposes tokens that may come next. What it proposes changes when tokens come, never
    which.
    """

    @property
    @abstractmethod
    def active(self) -> bool:
        """Drafts are wanted now."""

    @abstractmethod
    def propose(self, run: GenerationRun, most: int) -> collections.abc.Sequence[int]:
        """At most `most` (> 0) tokens behind those that the run has."""

    @abstractmethod
    def verified(self, run: GenerationRun, proposed: int, accepted: int) -> None:
        """A step has verified proposals: so many leading ones were right. The run has the step's
        tokens.
        """


class PaceHook(StepHook):
    """Makes each batch last as long as on the machine of a profile."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    async def after_logits(self, batch: Batch, took_s: float) -> None:
        await asyncio.sleep(self._pace.batch_s([chunk for _, chunk in batch]) - took_s)
