"""What the options cost, and which one a policy takes."""

import pytest

from kvrs.ids import InstanceId
from kvrs.policy.config import PolicyName
from kvrs.policy.costs import Estimate, Option, decide, estimate_fetch, estimate_recompute, rom_migrate, rom_recompute
from kvrs.profiles import catalog
from tests.policy.policy_stories import instance

SEED = "opt-13b-a100-kvrs-seed"
GBIT_S = 1e9 / 8
OPT_13B = instance("d1", geometry=catalog.kv_geometry(SEED), prefill=catalog.prefill_table(SEED))
D = InstanceId("d1")


def test_1_21_gb_take_387_ms_at_25_gbit_s() -> None:
    """Seed KVRS: the inter-node cost of a 1.21 GB cache (1,477 tokens of OPT-13B) at 25 Gbit/s."""
    tokens = round(1.21e9 / OPT_13B.geometry.bytes_per_token)

    estimate = rom_migrate(OPT_13B, prompt_tokens=tokens, bytes_per_s=25 * GBIT_S)

    assert tokens == 1477
    assert estimate.total_s == pytest.approx(0.387, abs=5e-4)


@pytest.mark.parametrize("prompt_tokens", [512, 1024, 2048])
@pytest.mark.parametrize(("gbit_s", "expected"), [(111, Option.RECOMPUTE), (113, Option.MIGRATE)])
def test_the_seeds_rule_flips_at_112_gbit_s_for_every_listed_length(prompt_tokens: int, gbit_s: float, expected: Option) -> None:
    """The seed's table is a straight line, so bandwidth alone decides: 819,200 bytes per token against 58.6 us per token."""
    estimates = [
        rom_migrate(OPT_13B, prompt_tokens=prompt_tokens, bytes_per_s=gbit_s * GBIT_S),
        rom_recompute(OPT_13B, OPT_13B, prompt_tokens=prompt_tokens),
    ]

    assert decide(PolicyName.ROM, estimates).option is expected


def test_fetching_costs_queue_transfer_and_the_tail() -> None:
    """`queue + hand-shake and missing bytes / bandwidth + prefill(tail given prefix)`."""
    estimate = estimate_fetch(Option.MIGRATE, instance("d1"), history_tokens=110, prefix_tokens=96, transfer_s=0.97, queue_s=0.5)

    assert estimate.compute_s == pytest.approx(0.014)
    assert estimate.raw_s == pytest.approx(0.5 + 0.97 + 0.014)
    assert estimate.total_s == estimate.raw_s


def test_a_correction_changes_what_is_compared_and_not_what_the_tables_say() -> None:
    """`total_s` is what options are compared by; `raw_s` is what is learned from."""
    estimate = estimate_fetch(Option.MIGRATE, instance("d1"), history_tokens=110, prefix_tokens=96, transfer_s=1.0, factor=2.0)

    assert estimate.raw_s == pytest.approx(1.014)
    assert estimate.total_s == pytest.approx(2.028)


def test_recomputing_costs_queue_the_whole_history_and_the_hand_off() -> None:
    """`queue(prefill) + prefill(L + t) + local hand-off`; there is no hand-off within one instance."""
    apart = estimate_recompute(
        instance("p1"), instance("d1"), history_tokens=110, bytes_per_s=204_800.0, queue_s=0.5, handshake_s=0.01
    )
    alone = estimate_recompute(instance("b1"), instance("b1"), history_tokens=110, bytes_per_s=204_800.0, handshake_s=0.01)

    assert apart.total_s == pytest.approx(0.5 + 0.110 + 0.01 + 110 * 2048 / 204_800)
    assert alone.total_s == pytest.approx(0.110)


def test_an_estimate_from_beyond_the_table_is_marked() -> None:
    """Extrapolation is said, never hidden."""
    within = estimate_recompute(instance("p1"), instance("d1"), history_tokens=400, bytes_per_s=1e9)
    beyond = estimate_recompute(instance("p1"), instance("d1"), history_tokens=401, bytes_per_s=1e9)

    assert (within.extrapolated, beyond.extrapolated) == (False, True)


@pytest.mark.parametrize("name", [PolicyName.ROM, PolicyName.AUTO])
def test_a_tie_goes_to_migrate(name: PolicyName) -> None:
    """The seed's rule."""
    estimates = [Estimate(Option.RECOMPUTE, D, 1.0), Estimate(Option.MIGRATE, D, 1.0)]

    assert decide(name, estimates).option is Option.MIGRATE


def test_an_always_policy_takes_its_option_when_it_can_and_the_other_when_it_cannot() -> None:
    """A fixed policy is no reason to lose a stream."""
    migrate, recompute = Estimate(Option.MIGRATE, D, 9.0), Estimate(Option.RECOMPUTE, D, 1.0)

    assert decide(PolicyName.ALWAYS_MIGRATE, [migrate, recompute]) == migrate
    assert decide(PolicyName.ALWAYS_MIGRATE, [recompute]) == recompute
    assert decide(PolicyName.ALWAYS_RECOMPUTE, [migrate, recompute]) == recompute
    assert decide(PolicyName.ALWAYS_RECOMPUTE, [migrate]) == migrate


def test_no_option_within_the_budget_means_abort() -> None:
    """Abort only when every option is too slow, not merely the policy's favourite."""
    estimates = [Estimate(Option.MIGRATE, D, 3.0), Estimate(Option.RECOMPUTE, D, 2.0)]

    assert decide(PolicyName.AUTO, estimates, budget_s=1.9) == Estimate(Option.ABORT, D, 2.0)
    assert decide(PolicyName.ALWAYS_MIGRATE, estimates, budget_s=2.0).option is Option.MIGRATE
