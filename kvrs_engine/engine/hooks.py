"""The interface between an engine's core and optional subsystems: ranks, anchored memory,
checkpoints, pace and drafts.
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
    """Base class of subsystems, which override the calls they need. Calls come from the event loop,
    return at once and do not raise, unless stated otherwise.
    """

    __slots__ = ()

    def place(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Choose the base of a new sequence, given the other runs' sequences."""

    def began(self, run: GenerationRun) -> None:
        """Handle a run that was accepted, or that restarts after a loss."""

    def before_batch(self, batch: Batch) -> None:
        """Handle a batch that is about to be computed.

        Raises:
            KvrsError: this process must not compute any more.
        """

    async def after_logits(self, batch: Batch, took_s: float) -> None:
        """Handle a computed batch before its tokens are emitted."""

    def filled(self, run: GenerationRun) -> None:
        """Handle new full pages of a run (computed, fetched, cached, or back after a preemption).

        Called after a batch, while the sequence owns the pages.
        """

    def held(self, run: GenerationRun) -> Mapping[InstanceId, int]:
        """Return the number of the run's leading full pages that each of its agents has."""
        return {}

    def replicated(self, run: GenerationRun) -> int:
        """Return the number of the run's leading full pages whose lost cells are at an instance
        that would lend the lost stage.
        """
        return 0

    def admits(self) -> bool:
        """True if runs may be admitted now."""
        return True

    def on_lost(self) -> None:
        """Wait, in the computing thread, until the worker can compute again after a loss of ranks.

        Raises:
            RanksLostError: the ranks are lost for good.
        """

    def on_restart(self) -> None:
        """Note that all runs have restarted, so that no page table has pages with lost cells."""

    def ended(self, run: GenerationRun) -> None:
        """Handle the end of a run, whose pages are at most leased or cached now."""


class DraftSource(StepHook):
    """Proposes next tokens as drafts. Drafts change the time of tokens, never the tokens."""

    @property
    @abstractmethod
    def active(self) -> bool:
        """True if drafts are available now."""

    @abstractmethod
    def propose(self, run: GenerationRun, most: int) -> collections.abc.Sequence[int]:
        """Return at most `most` tokens that may follow the run's tokens; 0: the step verifies no
        drafts of this run, and the source only learns its tokens.
        """

    @abstractmethod
    def verified(self, run: GenerationRun, proposed: int, accepted: int) -> None:
        """Note the number of proposed and accepted drafts of a step, after its tokens were
        appended.
        """


class PaceHook(StepHook):
    """Delays each batch to the time that a profile predicts."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    async def after_logits(self, batch: Batch, took_s: float) -> None:
        await asyncio.sleep(self._pace.batch_s([chunk for _, chunk in batch]) - took_s)
