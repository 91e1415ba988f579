"""One decision taken apart."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.policy import Handoff, PolicyName, PolicySettings
from kvrs.core.model.estimates import Option
from kvrs.profiles import catalog
from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.profiles.tables import PrefillTable
from kvrs_lab.explain.explanation import CheckpointAt, Explanation, Question, explain
from kvrs_testkit.examples import examples
from tests.core.policy_harness import GEOMETRY, TABLE

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
    checkpoint_tokens=st.integers(0, 800),
    checkpoint_at=st.sampled_from(CheckpointAt),
    reused_tokens=st.sampled_from([0, 10, 100, 400]),
    prefix_cache=st.booleans(),
)


def test_the_seeds_crossover_queue_depth() -> None:
    """Seed KVRS: q* = (KV bytes / bandwidth) / service time; 1.21 GB at 25 Gbit/s and 60 ms per
    request give 6.45.
    """
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


def total_s(explanation: Explanation, option: Option) -> float:
    return next(weighed.total_s for weighed in explanation.options if weighed.option is option)


@given(questions, st.sampled_from([0.0, 0.5, 11.0]))
@examples(200)
def test_the_terms_of_every_option_add_up(asked: Question, others: float) -> None:
    """The terms that are shown add up to the cost that was compared, and none is negative."""
    for weighed in explain(replace(asked, others=others)).options:
        assert sum(term.seconds for term in weighed.terms) == pytest.approx(
            weighed.total_s, rel=1e-9
        )
        assert all(term.seconds >= 0 for term in weighed.terms)


def test_a_choice_is_shown_with_what_other_victims_wait_for_it() -> None:
    """Only where the policy counts that: a split is for few."""
    alone, many = (explain(question(others=count, queue_s=1.0)) for count in (0.0, 7.0))
    by_rom = explain(question(others=7.0, queue_s=1.0, settings=named(PolicyName.ROM)))

    (split,) = (each for each in many.options if each.option is Option.SPLIT)
    (term,) = (term for term in split.terms if term.name == "others wait")
    assert (alone.chosen, many.chosen) == (Option.SPLIT, Option.MIGRATE)
    assert term.how.startswith("7 victims, for ")
    assert not any(term.name == term_.name for each in by_rom.options for term_ in each.terms)


@given(questions)
@examples(100)
def test_the_answer_changes_at_the_crossover_bandwidth(asked: Question) -> None:
    """Just below it recomputing is cheaper, just above it migrating, all else equal."""
    asked = replace(asked, checkpoint_tokens=0, reused_tokens=0)
    rate = explain(asked).crossover.bytes_per_s
    if rate is None:
        return

    below, above = (explain(replace(asked, bytes_per_s=rate * factor)) for factor in (0.99, 1.01))

    assert total_s(below, Option.RECOMPUTE) < total_s(below, Option.MIGRATE)
    assert total_s(above, Option.RECOMPUTE) > total_s(above, Option.MIGRATE)


@given(questions)
@examples(100)
def test_the_answer_changes_at_the_crossover_queue_depth(asked: Question) -> None:
    """With fewer requests ahead of the prefill instance recomputing is cheaper, with more
    migrating.
    """
    asked = replace(asked, checkpoint_tokens=0, reused_tokens=0)
    depth = explain(asked).crossover.queue_depth
    if depth is None or depth < 0.01:
        return

    fewer, more = (
        explain(replace(asked, queue_s=factor * depth * asked.service_s)) for factor in (0.99, 1.01)
    )

    assert total_s(fewer, Option.RECOMPUTE) < total_s(fewer, Option.MIGRATE)
    assert total_s(more, Option.RECOMPUTE) > total_s(more, Option.MIGRATE)


def test_there_is_such_a_depth_until_the_target_itself_would_compute_sooner() -> None:
    """Both sides of the rule above really occur."""
    asked = question(target_queue_s=0.0, bytes_per_s=4_096_000.0, local_bytes_per_s=inf)

    slow = explain(
        replace(asked, prefill=PrefillTable("slow", "made up", 100, [0.0, 0.1, 0.2, 0.3, 0.4]))
    )
    busy = explain(replace(asked, bytes_per_s=409_600.0))

    assert slow.crossover.queue_depth == 0.0
    assert busy.crossover.queue_depth is None


@pytest.mark.parametrize(("factor", "is_own"), [(0.99, True), (1.01, False)])
def test_the_hand_off_by_rom_leaves_at_the_crossover_queue_depth(
    factor: float, is_own: bool
) -> None:
    """Seed KVRS: beyond q* requests in the own queue an idle remote instance is sooner."""
    asked = question(bytes_per_s=1e6)
    depth = explain(asked).crossover.hand_off_queue_depth

    by_rom, by_auto = explain(
        replace(asked, own_queue_s=factor * depth * asked.service_s)
    ).hand_offs

    assert (by_rom.how, by_rom.is_own) == (Handoff.ROM, is_own)
    assert by_auto.how is Handoff.AUTO


def test_vllm_restores_rows_of_agents_and_fetches_none_of_instances() -> None:
    """A checkpoint in question stands for the rows; without them nothing is fetched. Migrating
    goes by the prefix cache all the same, and nothing is split.
    """
    asked = question(prefix_cache=True, host_to_device_bytes_per_s=2_048_000_000.0)

    plain, connected = explain(asked), explain(replace(asked, checkpoint_tokens=320))

    options = [Option.RECOMPUTE, Option.MIGRATE]
    assert {each.option for each in plain.options} == {*options}
    assert {each.option for each in connected.options} == {*options, Option.RESTORE}
    assert total_s(connected, Option.RESTORE) == pytest.approx(0.002 + 320e-6 + 0.020)
    for option in options:
        assert total_s(plain, option) == total_s(connected, option)


def test_a_checkpoint_beside_the_target_comes_from_host_memory() -> None:
    """And one elsewhere over a link."""
    asked = question(
        checkpoint_tokens=320, held_tokens=0, host_to_device_bytes_per_s=2_048_000_000.0
    )

    beside, elsewhere = (explain(replace(asked, checkpoint_at=at)) for at in CheckpointAt)

    assert total_s(beside, Option.RESTORE) == pytest.approx(0.002 + 320e-6 + 0.020)
    assert total_s(elsewhere, Option.RESTORE) == pytest.approx(0.002 + 320e-3 + 0.020)
    assert (beside.chosen, elsewhere.by_policy[PolicyName.ALWAYS_RESTORE]) == (
        Option.RESTORE,
        Option.RESTORE,
    )


def test_a_checkpoint_moves_no_crossover() -> None:
    """They are between migrating and recomputing, also where an agent could go on when the holder
    has no more.
    """
    asked = question(held_tokens=160, target_queue_s=0.3)

    extended = explain(replace(asked, checkpoint_tokens=320))

    assert total_s(extended, Option.MIGRATE) < total_s(explain(asked), Option.MIGRATE)
    assert extended.crossover == explain(asked).crossover


def test_what_the_target_has_costs_only_its_tail() -> None:
    """320 of 340 tokens are there."""
    explanation = explain(question(reused_tokens=320))

    assert explanation.chosen is Option.REUSE
    assert total_s(explanation, Option.REUSE) == pytest.approx(0.020)


def test_a_split_shows_where_it_splits() -> None:
    """A link and a table that take a millisecond per token each meet in the middle: of 20 pages 10
    are computed.
    """
    explanation = explain(question())

    (split,) = [weighed for weighed in explanation.options if weighed.option is Option.SPLIT]
    assert split.first_page == 10
    assert explanation.chosen is Option.SPLIT
    assert split.total_s == pytest.approx(0.002 + 0.160 + 0.020)
    assert "the first 10 pages" in next(
        term.how for term in split.terms if term.name == "fetch and front"
    )


def test_the_choice_of_every_policy_is_shown() -> None:
    """A link on which recomputing is far cheaper: only a policy that must migrate does."""
    explanation = explain(question(bytes_per_s=20_480.0))

    assert explanation.by_policy == {
        PolicyName.ALWAYS_MIGRATE: Option.MIGRATE,
        PolicyName.ALWAYS_RECOMPUTE: Option.RECOMPUTE,
        PolicyName.ALWAYS_RESTORE: Option.RECOMPUTE,
        PolicyName.ROM: Option.RECOMPUTE,
        PolicyName.AUTO: Option.RECOMPUTE,
    }


def test_without_a_holder_nothing_is_migrated() -> None:
    """There is one option, and no crossover."""
    explanation = explain(question(held_tokens=15))

    assert {weighed.option for weighed in explanation.options} == {Option.RECOMPUTE}
    assert (explanation.crossover.bytes_per_s, explanation.crossover.queue_depth) == (None, None)


def test_a_prefix_within_a_table_of_two_dimensions_is_no_extrapolation() -> None:
    """The whole history is longer than any length in the table; its tail behind its prefix is
    not.
    """
    table = PrefillTable.from_grid(
        "t", "s", PrefixGrid(100, 320, [[0.0, 0.1, 0.2], [0.0, 0.2, 0.4]])
    )

    explanation = explain(question(prefill=table))

    extrapolated = {weighed.option: weighed.extrapolated for weighed in explanation.options}
    assert (extrapolated[Option.MIGRATE], extrapolated[Option.RECOMPUTE]) == (False, True)


def test_no_option_within_the_budget_is_an_abort() -> None:
    """The explanation aborts like a real decision; the options are shown all the same."""
    explanation = explain(question(budget_s=0.01))

    assert explanation.chosen is Option.ABORT
    assert {Option.MIGRATE, Option.RECOMPUTE} <= {weighed.option for weighed in explanation.options}
