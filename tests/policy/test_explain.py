"""One decision taken apart."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.policy.config import PolicyName, PolicySettings
from kvrs.policy.costs import Option
from kvrs.policy.explain import Question, explain
from kvrs.profiles import catalog
from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.profiles.tables import PrefillTable
from tests.policy.policy_stories import GEOMETRY, TABLE

GBIT_S = 1e9 / 8
SEED = "opt-13b-a100-kvrs-seed"


def question(**changes: Any) -> Question:
    """The tiny geometry, 1 ms per token; a link on which a token takes 1 ms too."""
    fields: dict[str, Any] = {
        "geometry": GEOMETRY,
        "prefill": TABLE,
        "settings": PolicySettings(),
        "prompt_tokens": 320,
        "output_tokens": 20,
        "held_tokens": 320,
        "bytes_per_s": 2_048_000.0,
        "local_bytes_per_s": 2_048_000_000.0,
        "service_s": 0.1,
    }
    return Question(**fields | changes)


def named(name: PolicyName) -> PolicySettings:
    return PolicySettings(name=name)


questions = st.builds(
    question,
    settings=st.sampled_from(list(PolicyName)).map(named),
    prompt_tokens=st.integers(300, 5000),
    output_tokens=st.integers(0, 500),
    held_tokens=st.integers(0, 300),
    bytes_per_s=st.floats(1e4, 1e10),
    queue_s=st.floats(0, 5),
    target_queue_s=st.floats(0, 5),
)


def test_the_seeds_crossover_queue_depth() -> None:
    """Seed KVRS: q* = (KV bytes / bandwidth) / service time; 1.21 GB at 25 Gbit/s and 60 ms per request give 6.45."""
    asked = question(
        geometry=catalog.kv_geometry(SEED),
        prefill=catalog.prefill_table(SEED),
        prompt_tokens=1477,
        held_tokens=1477,
        bytes_per_s=25 * GBIT_S,
        service_s=0.06,
    )

    explanation = explain(asked)

    assert explanation.kv_bytes == pytest.approx(1.21e9, rel=1e-3)
    assert explanation.crossover.hand_off_queue_depth == pytest.approx(6.45, abs=0.01)


def test_the_seeds_crossover_bandwidth() -> None:
    """The seed's table and rule alone: break-even at 112 Gbit/s for OPT-13B."""
    asked = question(
        geometry=catalog.kv_geometry(SEED),
        prefill=catalog.prefill_table(SEED),
        prompt_tokens=1024,
        settings=named(PolicyName.ROM),
    )

    bytes_per_s = explain(asked).crossover.bytes_per_s

    assert bytes_per_s == pytest.approx(112 * GBIT_S, rel=2e-3)


@given(questions)
@settings(max_examples=100, deadline=None)
def test_the_terms_of_every_option_add_up(asked: Question) -> None:
    """What is shown is what was compared."""
    for weighed in explain(asked).options:
        assert sum(term.seconds for term in weighed.terms) == pytest.approx(weighed.total_s, rel=1e-9)
        assert all(term.seconds >= 0 for term in weighed.terms)


@given(questions)
@settings(max_examples=100, deadline=None)
def test_the_answer_changes_at_the_crossover_bandwidth(asked: Question) -> None:
    """Just below it recomputing is cheaper, just above it migrating; everything else as asked."""
    name = asked.settings.name
    rate = explain(asked).crossover.bytes_per_s
    if rate is None or name not in (PolicyName.ROM, PolicyName.AUTO):
        return

    below, above = (explain(question_at(asked, rate * factor)) for factor in (0.99, 1.01))

    assert (below.chosen, above.chosen) == (Option.RECOMPUTE, Option.MIGRATE)


def question_at(asked: Question, bytes_per_s: float) -> Question:
    fields = {name: getattr(asked, name) for name in Question.__slots__}
    return Question(**fields | {"bytes_per_s": bytes_per_s})


@given(questions)
@settings(max_examples=100, deadline=None)
def test_the_answer_changes_at_the_crossover_queue_depth(asked: Question) -> None:
    """With fewer requests ahead recomputing is cheaper, with more migrating."""
    depth = explain(asked).crossover.queue_depth
    if depth is None or depth < 0.01 or asked.settings.name is not PolicyName.AUTO:
        return
    fields = {name: getattr(asked, name) for name in Question.__slots__}

    fewer, more = (explain(Question(**fields | {"queue_s": factor * depth * asked.service_s})) for factor in (0.99, 1.01))

    assert (fewer.chosen, more.chosen) == (Option.RECOMPUTE, Option.MIGRATE)


def test_every_policys_answer_is_told() -> None:
    """A link on which recomputing is far cheaper: only who must migrate does."""
    explanation = explain(question(bytes_per_s=20_480.0))

    assert explanation.by_policy == {
        PolicyName.ALWAYS_MIGRATE: Option.MIGRATE,
        PolicyName.ALWAYS_RECOMPUTE: Option.RECOMPUTE,
        PolicyName.ROM: Option.RECOMPUTE,
        PolicyName.AUTO: Option.RECOMPUTE,
    }


def test_what_nobody_holds_cannot_be_migrated() -> None:
    """There is one option, and no crossover."""
    explanation = explain(question(held_tokens=15))

    assert [weighed.option for weighed in explanation.options] == [Option.RECOMPUTE]
    assert (explanation.crossover.bytes_per_s, explanation.crossover.queue_depth) == (None, None)


def test_a_prefix_within_a_table_of_two_dimensions_is_no_extrapolation() -> None:
    """The whole history is longer than any length in the table; its tail behind its prefix is not."""
    table = PrefillTable.from_grid("t", "s", PrefixGrid(100, 320, [[0.0, 0.1, 0.2], [0.0, 0.2, 0.4]]))

    explanation = explain(question(prefill=table))

    assert {weighed.option: weighed.extrapolated for weighed in explanation.options} == {
        Option.MIGRATE: False,
        Option.RECOMPUTE: True,
    }


def test_no_option_within_the_budget_is_an_abort() -> None:
    """As in a real decision; the options are shown all the same."""
    explanation = explain(question(budget_s=0.01))

    assert explanation.chosen is Option.ABORT
    assert len(explanation.options) == 2
