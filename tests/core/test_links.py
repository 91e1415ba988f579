from math import inf, nan

import msgspec
import pytest

from kvrs.core.books.learning import LinkBounds
from kvrs.core.model import events as ev
from kvrs.ids import NodeId
from kvrs.transfer.meter import Measurement, lower_bound
from tests.core.policy_harness import PolicyHarness

A, B = NodeId("n0"), NodeId("n1")


def told(event: ev.LinkMeasured | None) -> float | None:
    return None if event is None else event.bytes_per_s


def test_the_policy_is_told_what_a_link_carries_at_least() -> None:
    """A way that was chosen for a rate which was the best of several would come too late half of
    the time.
    """
    measured = Measurement(1e9, 1e8, 4.0)

    event = LinkBounds().measured(A, B, measured, now_s=10.0)

    assert (
        event
        == ev.LinkMeasured(A, B, lower_bound(measured), 1e9)
        == ev.LinkMeasured(A, B, 1e9 - 1e8 - 2e7, 1e9)
    )


def test_a_mean_that_moved_is_told_while_its_bound_stays() -> None:
    """The mean predicts: samples that become even raise it and leave the bound where it was."""
    links = LinkBounds()
    links.measured(A, B, Measurement(1.0e9, 1e8, 0.0), now_s=1.0)

    hardly = links.measured(A, B, Measurement(1.01e9, 1.1e8, 0.0), now_s=2.0)
    moved = links.measured(A, B, Measurement(1.05e9, 1.5e8, 0.0), now_s=3.0)

    assert (hardly, moved) == (None, ev.LinkMeasured(A, B, 0.9e9, 1.05e9))


@pytest.mark.parametrize("rate", [1e-320, 0.0, -5.0, 1e300, inf, nan])
def test_a_rate_that_no_link_has_is_not_told(rate: float) -> None:
    """Times by it would be infinite, and the policy could not predict by them."""
    links = LinkBounds()

    absurd = links.measured(A, B, Measurement(rate, 0.0, 0.0), now_s=1.0)
    real = links.measured(A, B, Measurement(1e9, 0.0, 1.0), now_s=1.0)

    assert (absurd, told(real)) == (None, 1e9 - 1e7)


def test_a_link_keeps_the_mean_beside_the_rate_that_decides() -> None:
    """Decisions count on the bound; a prediction needs the mean, and knows what share was left."""
    harness = PolicyHarness()
    harness.handle(ev.LinkMeasured(A, B, 6e8, 8e8))

    link = harness.policy.state.view.link(A, B)

    assert (link.bytes_per_s, link.mean_bytes_per_s, link.counted_share) == (6e8, 8e8, 0.75)
    assert harness.policy.state.view.bytes_per_s(A, B) == 6e8


def test_a_mean_that_is_not_known_is_the_rate_that_decides() -> None:
    """Links that were not measured, and event logs written before the mean was, have none."""
    harness = PolicyHarness()
    harness.handle(ev.LinkMeasured(A, B, 6e8, 8e8))
    line = b'{"kind":"LinkMeasured","source":"n0","target":"n1","bytes_per_s":5e8}'
    harness.handle(msgspec.json.decode(line, type=ev.LinkMeasured))

    measured, assumed = (harness.policy.state.view.link(A, node) for node in (B, NodeId("n2")))

    for link in (measured, assumed):
        assert (link.mean_bytes_per_s, link.counted_share) == (0.0, 1.0)
    assert measured.bytes_per_s == 5e8


def test_the_newest_measurement_counts_from_any_source() -> None:
    """Gossip is older than a direct report, and may be the only word on a link whose target is
    gone.
    """
    links = LinkBounds()
    links.measured(A, B, Measurement(1e9, 0.0, 0.0), now_s=100.0)

    older = links.measured(A, B, Measurement(5e8, 0.0, 10.0), now_s=101.0)
    newer = links.measured(A, B, Measurement(2e8, 0.0, 1.0), now_s=102.0)

    assert (told(older), told(newer)) == (None, lower_bound(Measurement(2e8, 0.0, 1.0)))


def test_the_same_measurement_is_told_again_only_when_its_age_has_cost_it_something() -> None:
    """Reports come four times a second; every event is logged, and none of these changes a
    decision.
    """
    links = LinkBounds()

    events = [
        links.measured(A, B, Measurement(1e9, 0.0, age_s / 4), now_s=age_s / 4)
        for age_s in range(400)
    ]

    rates = [event.bytes_per_s for event in events if event is not None]
    assert 3 <= len(rates) <= 6
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(("older_s", "counts"), [(0.4, True), (0.6, False)])
def test_a_measurement_that_looks_half_a_second_older_may_be_the_same(
    older_s: float, *, counts: bool
) -> None:
    """Reports travel."""
    links = LinkBounds()
    links.measured(A, B, Measurement(1e9, 0.0, 0.0), now_s=100.0)

    event = links.measured(A, B, Measurement(5e8, 0.0, older_s), now_s=100.0)

    assert (event is not None) is counts
