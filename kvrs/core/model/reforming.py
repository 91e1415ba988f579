"""The re-forming of an instance as a load report predicts it."""

from dataclasses import dataclass

from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LoadReport, ReformingReport


@dataclass(slots=True, eq=False)
class PredictedReforming:
    """A re-forming by the last report of it that changed anything. The instance restores the
    streams that stay in the order in which they were booked here.
    """

    report: ReformingReport
    ready_s: float
    token_s: float  # Mean time between two tokens of a stream there, before it; 0: not known.
    queue_s: float  # Its queue, as it reports it beside.
    ahead_s: float = 0.0  # What restoring the streams takes that stay, as far as they are decided.

    @property
    def option(self) -> Option:
        """The option of the streams that stay: ways of different costs are learned apart."""
        is_substitution = self.report.way == Option.SUBSTITUTE.value
        return Option.SUBSTITUTE if is_substitution else Option.IN_PLACE

    @property
    def step_s(self) -> float:
        """A step of decoding, with the ranks that will serve."""
        return self.report.decode_factor * self.token_s

    def pages_of(self, stream: StreamId) -> tuple[int, int]:
        """Pages with lost cells, and those of them of which only the cells are fetched."""
        missing = self.report.missing_pages.get(stream, 0)
        return missing, min(self.report.held_pages.get(stream, 0), missing)

    def restore_s(self, stream: StreamId) -> float:
        """Seconds until the lost cells of a stream's pages are there again."""
        missing, held = self.pages_of(stream)
        return held * self.report.held_page_s + (missing - held) * self.report.page_s


def factors_of(report: LoadReport) -> tuple[float, float]:
    """Step times of decoding and prefill over those of all ranks, of an instance that serves: as it
    says, or by its ranks alone.
    """
    by_ranks = report.full_degree / report.degree if report.degree else 1.0
    return report.decode_factor or by_ranks, report.prefill_factor or by_ranks


def cause_of(instance: InstanceId, report: ReformingReport) -> str:
    if not report.lost:
        return f"{instance} re-forms: {report.way}"
    ranks = ", ".join(map(str, report.lost))
    what = f"rank {ranks}" if len(report.lost) == 1 else f"ranks {ranks}"
    return f"{what} of {instance} lost: {report.way}"
