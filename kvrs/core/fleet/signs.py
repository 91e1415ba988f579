"""Signs of life of an instance, and what follows where a question of its watch fails.

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
