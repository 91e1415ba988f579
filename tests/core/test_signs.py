"""Questions of a watch that fail: each has its own consequence."""

import pytest

from kvrs.core.model.reports import Consequence, has_figures, takes_requests, worst
from kvrs.protocol.instance import FailedQuestion, Fails, LoadReport, WatchQuestion

NONE, DEAD = Consequence.NONE, Consequence.DEAD
NO_FIGURES, NO_REQUESTS = Consequence.NO_FIGURES, Consequence.NO_REQUESTS
SILENT, UNUSABLE = Consequence.SILENT, Consequence.UNUSABLE


def report(**failing: Fails) -> LoadReport:
    found = {WatchQuestion[name]: FailedQuestion(by, name) for name, by in failing.items()}
    return LoadReport(1, 0, 0, 0, 0.0, [], failing=found)


@pytest.mark.parametrize(
    ("question", "with_tokens", "without"),
    [
        # Without tokens: by an error, without an answer, by a lost connection, by another server.
        ("HEALTH", NO_REQUESTS, (DEAD, SILENT, DEAD, UNUSABLE)),
        ("LOADS", NO_REQUESTS, (DEAD, SILENT, DEAD, UNUSABLE)),
        ("METRICS", NO_FIGURES, (NO_FIGURES,) * 4),
        ("MODELS", NONE, (NONE, NONE, NONE, NONE)),
        ("ENGINES", NONE, (NONE, NONE, NONE, NONE)),
        ("READY", NONE, (NONE, NONE, NONE, NONE)),
        ("PROCESS", NONE, (NONE, NONE, NONE, UNUSABLE)),
    ],
)
def test_a_question_that_fails_has_its_own_consequence(
    question: str, with_tokens: Consequence, without: tuple[Consequence, ...]
) -> None:
    """Tokens that arrive are life, whatever fails."""
    kinds = (Fails.ERROR, Fails.LATE, Fails.LOST, Fails.OTHER)
    reports = [report(**{question: by}) for by in kinds]

    assert {worst(each, has_tokens=True)[0] for each in reports} == {with_tokens}
    assert tuple(worst(each, has_tokens=False)[0] for each in reports) == without


def test_the_gravest_consequence_counts_and_has_its_cause() -> None:
    failing = report(METRICS=Fails.ERROR, HEALTH=Fails.ERROR, MODELS=Fails.LATE)

    assert worst(failing, has_tokens=False) == (DEAD, "HEALTH")
    assert worst(report(), has_tokens=False) == (NONE, "")


def test_figures_and_requests_depend_on_their_own_questions() -> None:
    """An instance whose load is not known serves as well as others."""
    assert takes_requests(report(METRICS=Fails.LATE, MODELS=Fails.ERROR))
    assert not has_figures(report(METRICS=Fails.LATE))
    assert not takes_requests(report(HEALTH=Fails.LATE))
    assert has_figures(report(MODELS=Fails.ERROR))
