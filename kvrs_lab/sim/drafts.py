"""Drafts of a simulated instance: proposals, verification, and updates for the helper."""

import collections.abc
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

from kvrs.config.sections import DraftSourceName
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Burst, DraftChoice, MirrorUpdate, SpeculationReport
from kvrs_engine.scheduling.assisted import AssistedStreams, DraftCounts
from kvrs_engine.scheduling.drafts import Proposals
from kvrs_engine.scheduling.sequences import Chunk, Sequence
from kvrs_lab.sim.calls import SimRun, token_at
from kvrs_lab.sim.process import Clock
from kvrs_lab.sim.site import LATENCY_S

_GREEDY = DraftChoice(0.0, 1.0, 0, 0.0, 0)


class Helper(Protocol):
    id: InstanceId

    def receive(self, updates: list[MirrorUpdate]) -> None: ...


class SimDrafts:
    def __init__(self, depth: int, clock: Clock) -> None:
        self.assisted, self.counts = AssistedStreams(depth), DraftCounts()
        self.helper: Helper | None = None
        # Decode steps of streams while there is a helper, and of those the steps with drafts.
        self.asked = self.given = 0
        self._clock = clock

    def proposals(self, runs: Mapping[Sequence, SimRun]) -> Proposals | None:
        return None if self.helper is None else partial(self._propose, runs)

    def tell(self) -> None:
        """Send the changes to the helper."""
        if self.helper is not None and (updates := self.assisted.take_updates()):
            self._clock.after(LATENCY_S, partial(self.helper.receive, updates))

    def came(self, helper: Helper, bursts: Iterable[Burst]) -> None:
        if helper is self.helper:
            self.assisted.came(bursts)

    def ended(self, sequence: Sequence) -> None:
        self.assisted.ended(sequence)

    def left(self) -> None:
        self.helper = None
        self.assisted.left()

    def report(self) -> SpeculationReport:
        counts = self.counts
        return SpeculationReport(
            source=DraftSourceName.DRAFT,
            active=self.helper is not None,
            steps=counts.steps,
            proposed=counts.proposed,
            accepted=counts.accepted,
            stale=self.assisted.stale,
            helper=None if self.helper is None else self.helper.id,
        )

    def _propose(
        self, runs: Mapping[Sequence, SimRun], sequence: Sequence, most: int
    ) -> collections.abc.Sequence[int]:
        call = runs[sequence].call
        produced = len(sequence.token_ids) - sequence.prompt_tokens
        # The last wanted token needs no draft behind it.
        most = min(most, call.max_tokens - produced - 1)
        drafts = self.assisted.propose(sequence, _GREEDY, most)
        self.asked += 1
        self.given += bool(drafts)
        return drafts


def chosen_tokens(sequence: Sequence, chunk: Chunk) -> list[int]:
    """The model's tokens behind a chunk with drafts, up to the first wrong draft."""
    found: list[int] = []
    for draft in (*chunk.token_ids[len(chunk.token_ids) - chunk.drafts :], None):
        found.append(token_at(sequence.stream, len(sequence.token_ids) + len(found)))
        if found[-1] != draft:
            break
    return found
