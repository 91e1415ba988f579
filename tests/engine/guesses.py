"""A source of drafts that knows the outputs of streams."""

from collections.abc import Sequence
from random import Random

from kvrs_engine.engine.hooks import DraftSource
from kvrs_engine.engine.requests import GenerationRun


class Guesses(DraftSource):
    """Drafts of random length, of which most go on as a calm stream did, and some do not."""

    def __init__(self, outputs: Sequence[list[int]]) -> None:
        self.outputs = outputs
        self.random = Random(3)
        self.proposed = self.accepted = 0
        self.not_verified = 0  # Calls for steps that verify no drafts.

    @property
    def active(self) -> bool:
        return True

    def propose(self, run: GenerationRun, most: int) -> list[int]:
        self.not_verified += most == 0
        here = run.sequence.token_ids[run.sequence.prompt_tokens :]
        calm = next((ids for ids in self.outputs if ids[: len(here)] == here), here)
        drafts = calm[len(here) : len(here) + self.random.randint(0, min(most, 8))]
        return [
            token_id if self.random.random() < 0.8 else self.random.randrange(512)
            for token_id in drafts
        ]

    def verified(self, run: GenerationRun, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted
