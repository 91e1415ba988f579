"""The registry of recovery options, and what they have in common."""

from typing import Any

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicyName
from kvrs.core import options
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.streams import Holder
from kvrs.core.options.migrate import estimate_fetch
from kvrs.core.rules import BY_NAME
from kvrs.ids import InstanceId
from tests.core.policy_harness import PolicyHarness, member

REMOTE = BackupSettings(mode=BackupMode.REMOTE)


def test_every_option_that_a_stream_can_recover_by_is_registered_once() -> None:
    """`Option` names what stands in logs and metrics; start and abort are no way to recover."""
    registered = [each.option for each in options.ALL]

    staying = {option for option in Option if option.stays}
    assert sorted(registered) == sorted(set(Option) - {Option.START, Option.ABORT} - staying)
    assert set(options.BY_NAME) == {*registered, *staying}


def test_a_split_is_weighed_after_the_fetches_it_divides() -> None:
    """Its estimate begins with the best of them."""
    order = [each.option for each in options.ALL]

    assert order.index(Option.SPLIT) > max(order.index(Option.MIGRATE), order.index(Option.RESTORE))


def test_fetching_costs_queue_transfer_and_the_tail() -> None:
    """`queue + hand-shake and missing bytes / bandwidth + prefill(tail given prefix)`."""
    estimate = estimate_fetch(
        Option.MIGRATE,
        member("d1"),
        history_tokens=110,
        history_s=0.110,
        prefix_tokens=96,
        transfer_s=0.97,
        queue_s=0.5,
    )

    assert estimate.compute_s == pytest.approx(0.014)
    assert estimate.total_s == pytest.approx(0.5 + 0.97 + 0.014)


@pytest.mark.parametrize(("tokens", "is_beyond"), [(400, False), (401, True)])
def test_a_fetch_from_beyond_the_table_is_marked(tokens: int, *, is_beyond: bool) -> None:
    """The rest behind the prefix is a difference of two lengths, of which the longer one counts."""
    estimate = estimate_fetch(Option.MIGRATE, member("d1"), tokens, tokens / 1e3, prefix_tokens=96)

    assert estimate.extrapolated is is_beyond


@pytest.mark.parametrize("name", PolicyName)
def test_an_estimate_takes_a_slot_exactly_if_its_plan_fetches(name: PolicyName) -> None:
    """Slots are acquired for plans; an expired one is replaced by an estimate that needs none."""
    checked = set()
    for target in ("d1", "b1"):
        harness = PolicyHarness("p0", "d0", "p1", target, name=name, backup=REMOTE)
        harness.agents("n0", "n1")
        harness.decoding("A", 400)
        harness.kept("agent-n1", A=9)
        policy: Any = harness.policy
        books, stream = policy.state, policy.state.streams["A"]
        members = books.view.members
        stream.holders[InstanceId(target)] = Holder(members[InstanceId(target)], 3)
        for estimate in BY_NAME[name].weigh(books, stream, [members[InstanceId(target)]], 0.0):
            plan = options.BY_NAME[estimate.option].plan(books, stream, estimate)

            assert options.takes_slot(estimate) is bool(plan.runs)
            checked.add(estimate.option)
    assert Option.RECOMPUTE in checked
    assert name is PolicyName.ROM or checked >= {Option.MIGRATE, Option.RESTORE, Option.REUSE}


def test_a_hand_off_from_a_prefix_cache_takes_no_slot() -> None:
    """The target fetches nothing: the holder computes the rest and hands all of it off."""
    fetched, handed_off = (
        Estimate(Option.MIGRATE, InstanceId("d1"), 1.0, source=InstanceId("p0"), by_prefill=cached)
        for cached in (False, True)
    )

    assert [options.takes_slot(fetched), options.takes_slot(handed_off)] == [True, False]
