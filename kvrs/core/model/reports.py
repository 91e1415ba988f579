"""The filter for load reports: instances report several times a second, and most reports change no
decision.

Signs of life of an instance, and what follows where a question of its watch fails.

| sign                         | says                                                            |
| ---------------------------- | --------------------------------------------------------------- |
| tokens of its streams        | it computes and answers: no other sign outweighs them for       |
|                              | `TOKENS_S`                                                      |
| reports, heartbeats          | of engines of kvrs: the process lives, its event loop may stall |
| an idle connection           | its kernel ends it with the process; then all is asked at once  |
| answers to the questions     | see below; the questions are independent of each other          |
| a connection of a stream     | its end is the stream's own failure, and the instance's if the  |
|                              | questions fail too                                              |

| question                  | fails by      | while tokens arrive   | without tokens            |
| ------------------------- | ------------- | --------------------- | ------------------------- |
| `/health` (vLLM),         | error, lost   | no new requests       | dead                      |
| `/v1/loads` (SGLang)      | late          | no new requests       | silent: dead at the limit |
|                           | other answer  | no new requests       | unusable: another server  |
| `/metrics`                | any           | no load figures       | no load figures           |
| `/v1/models`              | any           | its names stay        | its names stay            |
| `/fault_tolerance/status` | any           | not known             | not known                 |
| `/ready` (SGLang)         | any           | not known             | not known                 |
| is it the same server,    | two other     | the same              | unusable                  |
| once the idle connection  | answers       |                       |                           |
| has ended                 |               |                       |                           |

Where only `/metrics` fail then, the process counts as the same until they say which one it is: the
streams of another one have ended with their connections. A refused connection is death at once if
the idle connection has ended too. An answer of `/fault_tolerance/status` that names a stopped
engine is no failed question: the instance is dead.

A hung process (SIGSTOP) sends no token and answers nothing. If it runs streams, the first that is
silent for too long ends it, as no question has been answered for a second either. If it is idle,
the unanswered `/health` makes it silent. An engine that hangs behind an HTTP server whose `/health`
answers is found by its streams alone, so an idle one by its next request or self-test.
"""

from enum import Enum, auto

from kvrs.core.model.member import Member
from kvrs.protocol.instance import Fails, LoadReport, WatchQuestion

# Time after its last token for which an instance counts as delivering tokens, and is not dead
# whatever its answers are.
TOKENS_S = 2.0


class Consequence(Enum):
    NONE = auto()  # The instance stays as it is known.
    NO_FIGURES = auto()
    NO_REQUESTS = auto()  # The instance gets no new request while another one takes some.
    SILENT = auto()  # The report is no sign of life.
    DEAD = auto()
    UNUSABLE = auto()


_OF_LIFE = {
    Fails.ERROR: Consequence.DEAD,
    Fails.LOST: Consequence.DEAD,
    Fails.LATE: Consequence.SILENT,
    Fails.OTHER: Consequence.UNUSABLE,
}
_NOTHING = dict.fromkeys(Fails, Consequence.NONE)
# By question: the consequence while tokens arrive, and those without tokens.
_TABLE: dict[WatchQuestion, tuple[Consequence, dict[Fails, Consequence]]] = {
    WatchQuestion.HEALTH: (Consequence.NO_REQUESTS, _OF_LIFE),
    WatchQuestion.LOADS: (Consequence.NO_REQUESTS, _OF_LIFE),
    WatchQuestion.METRICS: (
        Consequence.NO_FIGURES,
        dict.fromkeys(Fails, Consequence.NO_FIGURES),
    ),
    WatchQuestion.MODELS: (Consequence.NONE, _NOTHING),
    WatchQuestion.ENGINES: (Consequence.NONE, _NOTHING),
    WatchQuestion.READY: (Consequence.NONE, _NOTHING),
    WatchQuestion.PROCESS: (Consequence.NONE, {**_NOTHING, Fails.OTHER: Consequence.UNUSABLE}),
}


def worst(report: LoadReport, *, has_tokens: bool) -> tuple[Consequence, str]:
    """Return the gravest consequence of a report's failed questions, with its cause. `has_tokens`:
    tokens of the instance arrive.
    """
    found = []
    for question, failed in report.failing.items():
        with_tokens, without = _TABLE[question]
        found.append((with_tokens if has_tokens else without[failed.by], failed.cause))
    return max(found, key=lambda each: each[0].value, default=(Consequence.NONE, ""))


def takes_requests(report: LoadReport) -> bool:
    """Return whether no failed question keeps new requests from the instance."""
    return not any(_TABLE[each][0] is Consequence.NO_REQUESTS for each in report.failing)


def has_figures(report: LoadReport) -> bool:
    """Return whether the report's figures of load were just read."""
    return WatchQuestion.METRICS not in report.failing and takes_requests(report)


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
