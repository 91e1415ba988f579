"""`kvrs lab explain --draft`: what a draft model is worth while an instance loads again."""

import json

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs_engine.elastic.assistance import accepted_tokens, assistance, reload_times

MODEL, DRAFT = "llama-3.1-70b-a100-vllm-tp4", "llama-3.1-8b-a100-vllm-tp1"
ASKED = ["lab", "explain", "--profile", MODEL, "--draft", DRAFT]


@pytest.mark.parametrize(
    ("acceptance", "depth", "expected"), [(0.72, 2, 1.24), (0.60, 4, 1.31), (0.50, 8, 1.00)]
)
def test_accepted_drafts_are_those_of_the_paper(
    acceptance: float, depth: int, expected: float
) -> None:
    """LUMEN, table 5."""
    assert accepted_tokens(acceptance, depth) == pytest.approx(expected, abs=0.01)


def test_certain_drafts_are_all_accepted() -> None:
    assert accepted_tokens(1.0, 4) == 4
    assert accepted_tokens(0.0, 4) == 0


def test_a_model_is_read_after_the_draft_and_swapped_in_at_the_end() -> None:
    times = reload_times(16e9, 140e9, 2e9, draft_s=1.0, model_s=5.0)
    assert (times.loading_draft_s, times.assist_s, times.hotswap_s) == (9.0, 69.0, 5.0)
    assert times.full_service_s == 8.0 + 70.0 + 5.0, "the way into the GPU overlaps"
    assert times.is_worth_it
    assert not reload_times(140e9, 140e9, 2e9, 6.0, 5.0).is_worth_it


def test_a_slow_draft_gives_fewer_drafts_a_step() -> None:
    slow = assistance(lambda rows: 1.0, lambda rows: 0.4, 8, 0.6, 4)
    quick = assistance(lambda rows: 1.0, lambda rows: 0.1, 8, 0.6, 4)
    assert (slow.drafts, quick.drafts) == (2.5, 4.0)
    assert slow.accepted_tokens == pytest.approx(0.6 + 0.36 + 0.216 / 2)
    assert quick.gain == pytest.approx(1 + accepted_tokens(0.6, 4))


def test_a_question_is_answered_by_published_tables() -> None:
    found = CliRunner().invoke(app, [*ASKED, "--json"])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.output)["answer"]
    assert answer["is_worth_it"]
    assert answer["gain"] > 1.5
    with_draft_s, without_s = answer["full_service_s"], answer["full_service_without_draft_s"]
    assert with_draft_s - without_s == pytest.approx(16e9 / 2e9, rel=0.02), "the draft comes first"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--acceptance", "1.5"], "--acceptance: got 1.5; allowed: 0 to 1"),
        (["--acceptance", "nan"], "--acceptance: got nan; allowed: 0 to 1"),
        (["--depth", "0"], "--depth: got 0; allowed: 1 to 64"),
        (["--batch", "0"], "--batch: got 0; allowed"),
        (["--disk", "fast"], "--disk: got 'fast'; allowed: a rate"),
        (["--context", "x"], "--context: got 'x'; allowed"),
        (["--prompt-tokens", "8"], "--prompt-tokens: given with --draft, which does not use it"),
    ],
)
def test_wrong_options_are_named(more: list[str], says: str) -> None:
    found = CliRunner().invoke(app, [*ASKED, *more])
    assert says in str(found.exception)
