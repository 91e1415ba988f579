"""The drafts of one engine: which source it has, and by when."""

from collections.abc import Callable

from kvrs.config.speculation import DraftSourceName, DraftTime, SpeculationSettings
from kvrs.ids import InstanceId
from kvrs.protocol.speculation import Reload, ReloadNotice, SpeculationReport
from kvrs_engine.engine.hooks import DraftSource
from kvrs_engine.engine.requests import GenerationRun, Vocabulary
from kvrs_engine.engine.speculation.lookup import PromptLookup
from kvrs_engine.engine.speculation.paired import PairedDrafts
from kvrs_engine.scheduling.assisted import DraftCounts


class ReloadNotices:
    """Other instances that are being started again, by their own notices."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._notices: dict[InstanceId, tuple[ReloadNotice, float]] = {}  # Until when.

    def note(self, notice: ReloadNotice) -> None:
        self._notices[notice.instance] = notice, self._clock() + notice.for_s

    def now(self) -> dict[InstanceId, Reload]:
        now_s = self._clock()
        return {
            name: notice.reload
            for name, (notice, until_s) in self._notices.items()
            if until_s > now_s
        }


class LookupDrafts(DraftSource):
    """Drafts by prompt lookup, always or while another instance is being started again."""

    def __init__(self, settings: SpeculationSettings, reloads: ReloadNotices) -> None:
        self._settings, self._reloads = settings, reloads
        self._lookups: dict[GenerationRun, PromptLookup] = {}
        self._counts = DraftCounts()

    @property
    def active(self) -> bool:
        return self._settings.when is DraftTime.ALWAYS or bool(self._reloads.now())

    def propose(self, run: GenerationRun, most: int) -> list[int]:
        lookup = self._lookups.setdefault(run, PromptLookup())
        return lookup.propose(run.sequence.token_ids, min(most, self._settings.depth))

    def verified(self, run: GenerationRun, proposed: int, accepted: int) -> None:
        self._counts.verified(proposed, accepted)
        if run in self._lookups:
            self._lookups[run].verified(accepted, len(run.sequence.token_ids))

    def ended(self, run: GenerationRun) -> None:
        self._lookups.pop(run, None)

    def report(self) -> SpeculationReport:
        return SpeculationReport(
            source=DraftSourceName.LOOKUP,
            active=self.active,
            steps=self._counts.steps,
            proposed=self._counts.proposed,
            accepted=self._counts.accepted,
        )


def draft_source(
    settings: SpeculationSettings, reloads: ReloadNotices, vocabulary: Vocabulary
) -> LookupDrafts | PairedDrafts | None:
    """None: no drafts are wanted."""
    match settings.source:
        case DraftSourceName.OFF:
            return None
        case DraftSourceName.LOOKUP:
            return LookupDrafts(settings, reloads)
        case DraftSourceName.DRAFT:
            return PairedDrafts(settings, vocabulary)
