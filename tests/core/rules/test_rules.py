"""The registry of policies, and which estimate each one takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrs.config.policy import PolicyName, PolicySettings
from kvrs.core import rules
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.streams import Holder, Stream
from kvrs.core.options import base
from kvrs.core.rules.auto import AUTO
from kvrs.core.rules.base import cases_of, cheapest, sources_of
from kvrs.core.rules.rom import ROM, rom_migrate, rom_recompute
from kvrs.core.state import CoreSettings, State
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles import catalog
from kvrs.profiles.tables import PrefillTable
from tests.core.policy_harness import member

SEED = "opt-13b-a100-kvrs-seed"
GBIT_S = 1e9 / 8
OPT_13B = member("d1", geometry=catalog.kv_geometry(SEED), prefill=catalog.prefill_table(SEED))
D = InstanceId("d1")


def test_every_name_that_the_configuration_allows_is_a_policy() -> None:
    """`policy.name` is checked against `PolicyName`, which the configuration can name without the
    policies.
    """
    assert [rule.name for rule in rules.ALL] == list(PolicyName)
    assert all(rules.BY_NAME[name].name is name for name in PolicyName)


def test_1_21_gb_take_387_ms_at_25_gbit_s() -> None:
    """Seed KVRS: the inter-node cost of a 1.21 GB cache (1,477 tokens of OPT-13B) at 25 Gbit/s."""
    tokens = round(1.21e9 / OPT_13B.abilities.bytes_per_token)

    estimate = rom_migrate(OPT_13B, prompt_tokens=tokens, bytes_per_s=25 * GBIT_S)

    assert tokens == 1477
    assert estimate.total_s == pytest.approx(0.387, abs=5e-4)


@pytest.mark.parametrize("prompt_tokens", [512, 1024, 2048])
@pytest.mark.parametrize(("gbit_s", "expected"), [(111, Option.RECOMPUTE), (113, Option.MIGRATE)])
def test_the_seeds_rule_flips_at_112_gbit_s_for_every_listed_length(
    prompt_tokens: int, gbit_s: float, expected: Option
) -> None:
    """The seed's table is a straight line, so bandwidth alone decides: 819,200 bytes per token
    against 58.6 us per token.
    """
    estimates = [
        rom_migrate(OPT_13B, prompt_tokens=prompt_tokens, bytes_per_s=gbit_s * GBIT_S),
        rom_recompute(OPT_13B, OPT_13B, prompt_tokens=prompt_tokens),
    ]

    assert ROM.decide(estimates).option is expected


@pytest.mark.parametrize("name", [PolicyName.ROM, PolicyName.AUTO])
def test_a_tie_goes_to_migrate(name: PolicyName) -> None:
    """The seed's rule."""
    estimates = [Estimate(Option.RECOMPUTE, D, 1.0), Estimate(Option.MIGRATE, D, 1.0)]

    assert rules.BY_NAME[name].decide(estimates).option is Option.MIGRATE


def test_an_always_policy_takes_its_option_when_it_can_and_the_other_when_it_cannot() -> None:
    """A fixed policy is no reason to lose a stream."""
    migrate, recompute = Estimate(Option.MIGRATE, D, 9.0), Estimate(Option.RECOMPUTE, D, 1.0)

    assert rules.BY_NAME[PolicyName.ALWAYS_MIGRATE].decide([migrate, recompute]) == migrate
    assert rules.BY_NAME[PolicyName.ALWAYS_MIGRATE].decide([recompute]) == recompute
    assert rules.BY_NAME[PolicyName.ALWAYS_RECOMPUTE].decide([migrate, recompute]) == recompute
    assert rules.BY_NAME[PolicyName.ALWAYS_RECOMPUTE].decide([migrate]) == migrate


def test_no_option_within_the_budget_means_abort() -> None:
    """Abort only when every option is too slow, not merely the policy's favourite."""
    estimates = [Estimate(Option.MIGRATE, D, 3.0), Estimate(Option.RECOMPUTE, D, 2.0)]

    assert rules.BY_NAME[PolicyName.AUTO].decide(estimates, budget_s=1.9) == Estimate(
        Option.ABORT, D, 2.0
    )
    assert (
        rules.BY_NAME[PolicyName.ALWAYS_MIGRATE].decide(estimates, budget_s=2.0).option
        is Option.MIGRATE
    )


def test_tokens_at_a_slower_instance_count_for_the_choice_and_not_for_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget is that of the next token."""
    monkeypatch.setattr(base, "LOOKAHEAD_TOKENS", 4)
    state, target = State(CoreSettings()), member("d1")
    stream = Stream(StreamId("s"), 0, 64, 0.0, produced_tokens=8, prefilled=True)
    (usual,) = AUTO.weigh(state, stream, [target], 0.0)

    target.times.set_pace(2.0, 1.0, token_s=0.5)
    (slower,) = AUTO.weigh(state, stream, [target], 0.0)

    assert slower.lookahead_s == 2.0
    assert slower.next_token_s == pytest.approx(usual.total_s)
    later = Estimate(Option.MIGRATE, D, 3.0, lookahead_s=2.0)
    computed = Estimate(Option.RECOMPUTE, D, 2.9, at_target_s=1.0)
    assert AUTO.decide([later, computed], 2.95, others=1) == later


TIMES_S = st.floats(0, 100)
ESTIMATES = st.lists(
    st.builds(
        Estimate,
        st.sampled_from([Option.MIGRATE, Option.SPLIT, Option.RECOMPUTE]),
        st.just(D),
        TIMES_S,
        at_target_s=TIMES_S,
    ),
    min_size=1,
)
OTHERS = st.floats(0, 1000)


def test_many_victims_spare_the_target_and_one_does_not() -> None:
    """A split is faster for its stream, but the target computes its front while others wait."""
    migrate = Estimate(Option.MIGRATE, D, 0.10, at_target_s=0.01)
    split = Estimate(Option.SPLIT, D, 0.06, at_target_s=0.03)

    assert AUTO.decide([migrate, split]) == split
    assert AUTO.decide([migrate, split], others=1) == split
    assert AUTO.decide([migrate, split], others=3) == migrate


@given(ESTIMATES, OTHERS)
def test_the_choice_costs_all_victims_together_least(
    estimates: list[Estimate], others: float
) -> None:
    """Its own cost, and what the others wait for it at the target. Alone: the cheapest."""
    chosen = AUTO.decide(estimates, others=others)

    least = min(each.total_s + others * each.at_target_s for each in estimates)
    assert chosen.total_s + others * chosen.at_target_s == least
    assert AUTO.decide(estimates) == cheapest(estimates)


@given(ESTIMATES, OTHERS, OTHERS)
def test_more_victims_never_have_the_target_compute_more(
    estimates: list[Estimate], some: float, more: float
) -> None:
    """The more other victims there are, the more their waiting counts."""
    few, many = sorted((some, more))

    at_target_s = [AUTO.decide(estimates, others=n).at_target_s for n in (few, many)]

    assert at_target_s[1] <= at_target_s[0] or few == many


@given(ESTIMATES, OTHERS, TIMES_S)
def test_what_others_wait_for_makes_no_victim_late(
    estimates: list[Estimate], others: float, budget_s: float
) -> None:
    """A stream that can be back in time is, whatever its choice costs the others."""
    chosen = AUTO.decide(estimates, budget_s, others)

    can_be = min(each.total_s for each in estimates) <= budget_s
    assert (chosen.option is not Option.ABORT) == can_be
    assert not can_be or chosen.total_s <= budget_s


def test_targets_with_the_same_table_share_one_look_up_and_others_have_their_own() -> None:
    """The time that a history takes is looked up again only where the table is another one."""
    looked_up: list[tuple[str, int]] = []

    class Table(PrefillTable):
        def seconds_for(self, tokens: int) -> float:
            looked_up.append((self.label, tokens))
            return super().seconds_for(tokens)

    slow = Table("slow", "test", 100, [0.0, 1.0, 2.0])
    fast = Table("fast", "test", 100, [0.0, 0.1, 0.2])
    long = Table("long", "test", 100, [0.0, 0.1, 0.2, 0.3])
    tables = (slow, slow, fast, slow, long)
    targets = [member(f"d{number}", prefill=table) for number, table in enumerate(tables)]

    cases = cases_of(State(CoreSettings()), Stream(StreamId("s"), 0, 300, 0.0), targets, 0.0)

    assert [case.history_s for case in cases] == pytest.approx([3.0, 3.0, 0.3, 3.0, 0.3])
    assert [case.extrapolated for case in cases] == [True, True, True, True, False]
    assert looked_up == [(name, 300) for name in ("slow", "fast", "slow", "long")]


def test_weighing_a_link_makes_no_record_of_it() -> None:
    """A link that was neither measured nor used has the assumed rate, and is not shown: in a large
    cluster there would be one for each pair of nodes.
    """
    state = State(CoreSettings(PolicySettings(assumed_link_bytes_per_s=1e9)))
    holder, target = member("p1"), member("d2")
    stream = Stream(StreamId("s"), 0, 300, 0.0)
    stream.holders[holder.id] = Holder(holder, 3)

    (source,) = sources_of(state, stream, target, 3)

    assert source.page_s == pytest.approx(target.abilities.page_bytes / 1e9)
    assert not state.view.links


def test_a_single_victim_takes_no_split_at_the_expense_of_the_streams_there() -> None:
    """Its front is computed where they decode; streams that wait for a token count for any."""
    auto = rules.BY_NAME[PolicyName.AUTO]
    migrate = Estimate(Option.MIGRATE, D, 0.10, at_target_s=0.01)
    split = Estimate(Option.SPLIT, D, 0.06, at_target_s=0.03)
    computed = Estimate(Option.RECOMPUTE, D, 0.09, at_target_s=0.05)

    assert auto.decide([migrate, split]) is split
    assert auto.decide([migrate, replace(split, waiting=5)]) is migrate
    assert auto.decide([migrate, computed]) is computed
    assert auto.decide([replace(migrate, waiting=1), replace(computed, waiting=1)]).option is (
        Option.MIGRATE
    )
