"""News in the load reports of instances, and the re-forming that one tells of.

Reports come several times a second, and most of them change no decision.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LoadReport, ReformingReport

if TYPE_CHECKING:
    from kvrs.core.model.cluster_view import Member

# Smaller changes of a queue change no decision.
_QUEUE_STEP = 0.1
_QUEUE_STEP_S = 0.005
# Nor does a prediction that moves by less.
_READY_STEP_S = 0.02


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


def changes_decision(
    member: "Member", report: LoadReport, now_s: float, *, has_peers: bool, waiting: bool
) -> bool:
    """The report has to be passed to the policy. While streams wait for a place every report is a
    sign of life, after which they may find one; while some run on an instance that is about to end,
    others may be able to take them since the report before.
    """
    told = member.told
    if told is None or waiting or changes_ranks(member, report, now_s):
        return True
    if member.reforming is not None:  # What is left of its pause is less than before.
        return True
    if report.draining and (member.running or not told.draining):
        return True
    if has_peers and told.queued + told.running != report.queued + report.running:
        return True
    before_s, delay_s = told.queue_delay_s, report.queue_delay_s
    step_s = max(_QUEUE_STEP_S, _QUEUE_STEP * before_s)
    return delay_s != before_s and (delay_s <= 0 or abs(delay_s - before_s) > step_s)


def changes_ranks(member: "Member", report: LoadReport, now_s: float) -> bool:
    """The instance re-forms, has re-formed, or will later than it said."""
    if not report.full_degree:
        return False
    now, before, told = report.reforming, member.reforming, member.told
    if now is not None:
        return (
            before is None
            or (before.report.number, before.report.way) != (now.number, now.way)
            or abs(now_s + now.ready_in_s - before.ready_s) > _READY_STEP_S
            or before.report.missing_pages != now.missing_pages
        )
    if before is not None:
        return True
    if told is None:  # A proxy that comes later finds an instance that has lost ranks before.
        return report.degree != report.full_degree
    return (told.layout_number, told.degree) != (report.layout_number, report.degree)


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
