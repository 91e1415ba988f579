"""Lengths of prompts that came as texts."""

import pytest

from kvrs.core.books.prefills import PromptLengths
from kvrs.core.control import Attempt
from kvrs.core.model import events as ev
from kvrs.ids import StreamId
from kvrs_lab.sim.streams import Arrival, SimJournal, SimStream
from tests.core.test_core import Driver


def test_a_guess_is_corrected_by_the_prompts_of_the_same_model() -> None:
    """Long ones weigh more: of short ones the template is most."""
    lengths = PromptLengths()
    before = lengths.expected("code", 1000)
    for _ in range(20):
        lengths.observe("code", 1000, 1500)
        lengths.observe("code", 3, 30)

    assert before == 1000
    assert lengths.expected("code", 2000) == pytest.approx(3000, rel=0.03)
    assert lengths.expected("prose", 2000) == 2000


@pytest.mark.parametrize(("tokens", "expected"), [(100_000, 800), (1, 12)])
def test_no_prompt_makes_the_guess_absurd(tokens: int, expected: int) -> None:
    lengths = PromptLengths()

    lengths.observe("", 100, tokens)

    assert lengths.expected("", 100) == expected


def test_later_prompts_count_more() -> None:
    """Clients change what they send."""
    lengths = PromptLengths()
    for tokens in [100] * 200 + [200] * 200:
        lengths.observe("", 100, tokens)

    assert lengths.expected("", 100) == pytest.approx(200, rel=0.01)


def test_the_names_of_adapters_are_bounded() -> None:
    lengths = PromptLengths()

    for number in range(1_000):
        lengths.observe(str(number), 100, 200)

    assert [lengths.expected(str(number), 100) for number in (0, 999)] == [100, 200]


@pytest.mark.parametrize(("is_predictable", "expected"), [(True, 60), (False, 30)])
def test_what_prefill_answers_is_learned(is_predictable: bool, expected: int) -> None:
    """Where the time of a prefill follows from the prompt's text: pictures have other lengths."""
    driver = Driver()

    def arrives(name: str) -> tuple[SimStream, ev.StreamArrived]:
        journal = SimJournal(StreamId(name), Arrival(0.0, [*range(40)], 9), 0.0, 30)
        journal.is_predictable = is_predictable
        live = SimStream(journal.stream, journal=journal)
        driver.events.clear()
        driver.control.open(live, 0.0)
        event = driver.events[0]
        assert isinstance(event, ev.StreamArrived)
        return live, event

    live, before = arrives("first")
    assert live.attempt.plan is not None
    attempt = Attempt(driver.control, live, live.attempt.plan)
    attempt.begin()
    live.journal.prompt_ids = [*range(60)]
    attempt.prefilled(0.1)

    _, after = arrives("second")

    assert (before.prompt_tokens, after.prompt_tokens) == (30, expected)


def test_answers_without_ids_say_nothing_of_lengths() -> None:
    lengths = PromptLengths()
    lengths.observe("m", 1000, 0)
    assert lengths.expected("m", 1000) == 1000
