"""The re-forming of an instance after a change of its ranks, as its load report predicts it."""

from dataclasses import dataclass

from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LoadReport, ReformingReport


@dataclass(slots=True, eq=False)
class PredictedReforming:
    """A re-forming by the last report that changed its prediction. The instance restores the
    streams that stay in the order of their decisions.
    """

    report: ReformingReport
    ready_s: float
    token_s: float  # Mean time between two tokens of a stream before the change; 0: not known.
    queue_s: float  # The instance's queue, by the same report.
    ahead_s: float = 0.0  # Time to restore the streams that were decided to stay.

    @property
    def option(self) -> Option:
        """The option of the streams that stay; each option has its own learned correction."""
        is_substitution = self.report.way == Option.SUBSTITUTE.value
        return Option.SUBSTITUTE if is_substitution else Option.IN_PLACE

    @property
    def step_s(self) -> float:
        """Predicted time of a decode step with the new ranks."""
        return self.report.decode_factor * self.token_s

    def pages_of(self, stream: StreamId) -> tuple[int, int]:
        """Return the number of pages with lost cells, and the number among them that are repaired
        by fetching the lost cells only.
        """
        missing = self.report.missing_pages.get(stream, 0)
        return missing, min(self.report.held_pages.get(stream, 0), missing)

    def restore_s(self, stream: StreamId) -> float:
        """Return the predicted time to restore the lost cells of a stream's pages."""
        missing, held = self.pages_of(stream)
        return held * self.report.held_page_s + (missing - held) * self.report.page_s


def factors_of(report: LoadReport) -> tuple[float, float]:
    """Return the step times of decode and prefill relative to those with all ranks: the reported
    factors, else the ratio of the degrees.
    """
    by_ranks = report.full_degree / report.degree if report.degree else 1.0
    return report.decode_factor or by_ranks, report.prefill_factor or by_ranks


def cause_of(instance: InstanceId, report: ReformingReport) -> str:
    if not report.lost:
        return f"{instance} re-forms: {report.way}"
    ranks = ", ".join(map(str, report.lost))
    what = f"rank {ranks}" if len(report.lost) == 1 else f"ranks {ranks}"
    return f"{what} of {instance} lost: {report.way}"
