"""The filter for load reports: instances report several times a second, and most reports change no
decision.
"""

from kvrs.core.model.member import Member
from kvrs.protocol.instance import LoadReport

# A changed queue changes no decision if the difference is below this share of the queue, or below
# `_QUEUE_STEP_S`.
_QUEUE_STEP = 0.1
_QUEUE_STEP_S = 0.005
_READY_STEP_S = 0.02  # Smaller changes of a predicted end of re-forming change no decision.


def is_repeated(report: LoadReport, before: LoadReport | None) -> bool:
    """Return whether the report equals the previous one and has no time-dependent part."""
    if report is before:
        return True
    is_timeless = not (report.draining or report.links or report.fetches or report.restarts)
    return is_timeless and report.reforming is None and not report.replicas and report == before


def changes_decision(
    member: Member, report: LoadReport, now_s: float, *, has_peers: bool, waiting: bool
) -> bool:
    """Return whether the report must be passed to the policy.

    Every report is passed on while streams wait for an instance, and while a draining instance
    still runs streams: each may now find a place.
    """
    told = member.told
    if told is None or waiting or changes_ranks(member, report, now_s):
        return True
    # The rest of the re-forming is shorter than at the last report.
    if member.reforming is not None:
        return True
    if report.failing.keys() != told.failing.keys():
        return True
    if report.draining and (member.running or not told.draining):
        return True
    if has_peers and told.queued + told.running != report.queued + report.running:
        return True
    if member.times.has_other_steps(report):
        return True
    before_s, delay_s = told.queue_delay_s, report.queue_delay_s
    step_s = max(_QUEUE_STEP_S, _QUEUE_STEP * before_s)
    return delay_s != before_s and (delay_s <= 0 or abs(delay_s - before_s) > step_s)


def changes_ranks(member: Member, report: LoadReport, now_s: float) -> bool:
    """Return whether the report tells of a re-forming that began, ended or moved in time."""
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
    if told is None:  # The instance may have lost ranks before this proxy started.
        return report.degree != report.full_degree
    return (told.layout_number, told.degree) != (report.layout_number, report.degree)
