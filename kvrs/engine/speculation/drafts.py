"""The drafts of one engine: when it makes some, for which streams, and what became of them."""

from collections.abc import Callable

from kvrs.config.speculation import DraftSourceName, DraftTime, SpeculationSettings
from kvrs.engine.hooks import DraftSource
from kvrs.engine.requests import GenerationRun
from kvrs.engine.speculation.lookup import PromptLookup
from kvrs.ids import InstanceId
from kvrs.protocol.speculation import ReloadNotice, SpeculationReport


class LookupDrafts(DraftSource):
    """Drafts by prompt lookup, always or while another instance is being started again."""

    def __init__(self, settings: SpeculationSettings, clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._reloads: dict[InstanceId, float] = {}  # Until when.
        self._lookups: dict[GenerationRun, PromptLookup] = {}
        self._steps = self._proposed = self._accepted = 0

    def reloading(self, notice: ReloadNotice) -> None:
        self._reloads[notice.instance] = self._clock() + notice.for_s

    @property
    def active(self) -> bool:
        if self._settings.when is DraftTime.ALWAYS:
            return True
        now_s = self._clock()
        return any(until_s > now_s for until_s in self._reloads.values())

    def propose(self, run: GenerationRun, most: int) -> list[int]:
        lookup = self._lookups.setdefault(run, PromptLookup())
        return lookup.propose(run.sequence.token_ids, min(most, self._settings.depth))

    def verified(self, run: GenerationRun, proposed: int, accepted: int) -> None:
        self._steps += 1
        self._proposed += proposed
        self._accepted += accepted
        if run in self._lookups:
            self._lookups[run].verified(accepted, len(run.sequence.token_ids))

    def ended(self, run: GenerationRun) -> None:
        self._lookups.pop(run, None)

    def report(self) -> SpeculationReport:
        return SpeculationReport(
            source=DraftSourceName.LOOKUP,
            active=self.active,
            steps=self._steps,
            proposed=self._proposed,
            accepted=self._accepted,
        )


def draft_source(settings: SpeculationSettings, clock: Callable[[], float]) -> LookupDrafts | None:
    """None: no drafts are wanted."""
    return None if settings.source is DraftSourceName.OFF else LookupDrafts(settings, clock)
