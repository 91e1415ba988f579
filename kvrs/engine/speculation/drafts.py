"""The drafts of one engine: which streams get some, and what became of them."""

from dataclasses import dataclass

from kvrs.config.speculation import SpeculationSettings
from kvrs.engine.hooks import DraftSource
from kvrs.engine.requests import GenerationRun
from kvrs.engine.speculation.lookup import PromptLookup


@dataclass(slots=True)
class DraftCounts:
    """Since the start."""

    steps: int = 0  # With drafts, of a stream each.
    proposed: int = 0
    accepted: int = 0


class LookupDrafts(DraftSource):
    """Drafts by prompt lookup."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self.counts = DraftCounts()
        self._depth = settings.depth
        self._lookups: dict[GenerationRun, PromptLookup] = {}

    def propose(self, run: GenerationRun, most: int) -> list[int]:
        lookup = self._lookups.setdefault(run, PromptLookup())
        return lookup.propose(run.sequence.token_ids, min(most, self._depth))

    def verified(self, run: GenerationRun, proposed: int, accepted: int) -> None:
        self.counts.steps += 1
        self.counts.proposed += proposed
        self.counts.accepted += accepted
        self._lookups[run].verified(accepted, len(run.sequence.token_ids))

    def ended(self, run: GenerationRun) -> None:
        self._lookups.pop(run, None)
