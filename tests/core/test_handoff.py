"""Which decode instance gets a hand-off, once prefill is done."""

import pytest

from kvrs.config.policy import Handoff, PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.routing import HandoffCandidate, choose_hand_off
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only

A, B = StreamId("A"), StreamId("B")
P0, D0, D1 = InstanceId("p0"), InstanceId("d0"), InstanceId("d1")
N0, N1 = NodeId("n0"), NodeId("n1")


def near(name: InstanceId, queue_s: float, bytes_per_s: float) -> HandoffCandidate:
    return HandoffCandidate(name, queue_s, bytes_per_s, is_near=True)


@pytest.mark.parametrize(("requests", "expected"), [(0, D0), (6, D0), (7, D1), (40, D1)])
def test_the_seeds_crossover_lies_between_6_and_7_requests(
    requests: int, expected: InstanceId
) -> None:
    """Seed KVRS: 1.21 GB at 25 Gbit/s against 60 ms per request in the own queue, an idle instance
    remote: q* = 6.45.
    """
    own = near(D0, requests * 0.06, 1e15)
    remote = HandoffCandidate(D1, 0.0, 25e9 / 8)

    assert choose_hand_off(Handoff.ROM, own, [remote], 1_210_000_000, 0.0).instance == expected


def test_a_tie_goes_to_the_own_pair() -> None:
    """A transfer that gains nothing is none of it."""
    own, remote = near(D0, 1.0, 1e9), HandoffCandidate(D1, 0.0, 1e9)

    assert choose_hand_off(Handoff.ROM, own, [remote], 1_000_000_000, 0.0) is own
    assert (
        choose_hand_off(Handoff.AUTO, own, [HandoffCandidate(D1, 1.0, 1e9)], 1_000_000_000, 0.0)
        is own
    )


def test_auto_weighs_what_is_on_the_link_already() -> None:
    """The rule of seed KVRS does not: it sends all of them there."""
    own = near(D0, 1.0, 1e9)
    crowded = HandoffCandidate(D1, 0.0, 1e9, bytes_ahead=2_000_000_000)

    assert choose_hand_off(Handoff.ROM, own, [crowded], 1_000_000, 0.0) is crowded
    assert choose_hand_off(Handoff.AUTO, own, [crowded], 1_000_000, 0.0) is own


@pytest.mark.parametrize("queue_s", [0.5, 1.5])
def test_rom_takes_the_link_within_the_node_to_cost_nothing(queue_s: float) -> None:
    """Also where the plan is another node: the transfer of a second is to there."""
    planned, own = HandoffCandidate(D1, 0.0, 1e9), near(D0, queue_s, 1e9)

    found = choose_hand_off(Handoff.ROM, planned, [own], 1_000_000_000, 0.0)

    assert found is (own if queue_s < 1 else planned)


def harness(handoff: Handoff) -> PolicyHarness:
    """OPT-13B, own pair p0 and d0, an idle d1 behind 25 Gbit/s; d0 has 7 requests ahead of anything
    new.
    """
    told = PolicyHarness(handoff=handoff)
    for name in ("p0", "d0", "d1"):
        told.handle(_up(name))
    told.handle(ev.LinkMeasured(N0, N0, 600e9))
    told.handle(ev.LinkMeasured(N0, N1, 25e9 / 8))
    told.handle(ev.StreamArrived(A, 1477))
    told.handle(load(D0, 0.42))
    return told


def _up(name: str) -> ev.InstanceUp:
    profile = "opt-13b-a100-kvrs-seed"
    geometry, prefill = catalog.kv_geometry(profile), catalog.prefill_table(profile)
    return instance_up(name, geometry=geometry, prefill=prefill)


@pytest.mark.parametrize("handoff", [Handoff.ROM, Handoff.AUTO])
def test_a_hand_off_is_redirected_when_the_own_queue_is_longer_than_the_transfer(
    handoff: Handoff,
) -> None:
    """Before the decode call begins; the attempt stays the same one."""
    told = harness(handoff)

    redirect = only(told.handle(ev.PrefillDone(A, 1, 1477)), act.Redirect)

    assert redirect == act.Redirect(A, 1, act.Plan(decode=D1, prefill=P0))
    assert told.policy.snapshot()["instances"][2]["decode_streams"] == 1


def test_rom_counts_no_link_within_the_prefills_node() -> None:
    """However slow it was measured to be; `auto` does."""
    for handoff in (Handoff.ROM, Handoff.AUTO):
        told = harness(handoff)
        told.handle(load(D0, 0.3))
        told.handle(ev.LinkMeasured(N0, N0, 1e9))

        redirects = of(told.handle(ev.PrefillDone(A, 1, 1477)), act.Redirect)

        assert bool(redirects) is (handoff is Handoff.AUTO)


def test_a_redirected_recovery_is_not_learned_from() -> None:
    """The prediction was for another queue and another link."""
    told = PolicyHarness(
        "p0", "d0", "p1", "d1", "d2", name=PolicyName.ALWAYS_RECOMPUTE, handoff=Handoff.AUTO
    )
    told.decoding("A")
    told.handle(load(D1, 0.1))
    start = only(told.lose("d0", at_s=10.0, A=1), act.Start)
    told.handle(load(D1, 9.0))

    redirect = only(told.handle(ev.PrefillDone(A, 2, 101), at_s=10.1), act.Redirect)
    settled = only(told.handle(ev.StreamResumed(A, 2), at_s=15.0), act.Settled)

    assert (start.plan, redirect.plan.decode) == (act.Plan(D1, InstanceId("p1")), InstanceId("d2"))
    assert settled.real_s == 5.0
    assert told.policy.snapshot()["spread"]["events"] == 0.0


def test_own_pair_keeps_the_plan() -> None:
    """The default."""
    assert of(harness(Handoff.OWN_PAIR).handle(ev.PrefillDone(A, 1, 1477)), act.Redirect) == []


def test_hand_offs_between_nodes_are_in_the_links_book_until_their_stream_flows() -> None:
    """The next hand-off counts them; so does a recovery meanwhile."""
    told = harness(Handoff.AUTO)
    told.handle(ev.PrefillDone(A, 1, 1477))
    told.handle(ev.StreamArrived(B, 1477))

    second = told.handle(ev.PrefillDone(B, 1, 1477))
    meanwhile = _on_the_link(told)
    told.handle(ev.StreamResumed(A, 1))

    assert of(second, act.Redirect) == []
    assert (meanwhile, _on_the_link(told)) == (1488 * 819_200, 0)


def test_a_hand_off_is_in_the_links_book_from_the_start_of_its_prefill() -> None:
    """A recovery that is decided meanwhile may still fetch when the hand-off begins. At the end of
    its prefill a stream itself is not behind what it has booked: d1 is 0.39 s away, not 0.77.
    """
    told = PolicyHarness(handoff=Handoff.AUTO)
    for name in ("p0", "d1"):
        told.handle(_up(name))
    told.handle(ev.LinkMeasured(N0, N1, 25e9 / 8))
    told.handle(ev.StreamArrived(A, 1477))
    before = _on_the_link(told)
    told.handle(_up("d0"))
    told.handle(load(D0, 0.55))

    handed_off = told.handle(ev.PrefillDone(A, 1, 1477))
    after = _on_the_link(told)
    told.handle(ev.StreamResumed(A, 1))

    assert of(handed_off, act.Redirect) == []
    assert (before, after, _on_the_link(told)) == (1488 * 819_200, 1488 * 819_200, 0)


def _on_the_link(told: PolicyHarness) -> int:
    links = told.policy.snapshot()["links"]
    found = (each for each in links if (each["source"], each["target"]) == ("n0", "n1"))
    return next((each["in_flight_bytes"] for each in found), 0)
