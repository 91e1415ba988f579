"""Where new streams go, and how long they wait when they can go nowhere."""

import pytest

from kvrs.core import outliers
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.outliers import CONSECUTIVE_FAILURES
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Role
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only

P0, P1, D0, D1 = (InstanceId(name) for name in ("p0", "p1", "d0", "d1"))
A, B, C = (StreamId(name) for name in "ABC")


def test_a_new_stream_starts_at_once_as_attempt_1_at_a_pair_of_one_node() -> None:
    """Own pair first; the first start is no recovery."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")

    actions = harness.handle(ev.StreamArrived(A, 100))

    assert actions == [act.Start(A, 1, act.Plan(decode=D0, prefill=P0))]


def test_the_prefill_instance_with_the_least_predicted_work_is_taken() -> None:
    """The policy's own bookings count what it has just sent, long before any report."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")

    plans = [
        only(harness.handle(ev.StreamArrived(StreamId(f"s{n}"), tokens)), act.Start).plan
        for n, tokens in enumerate([300, 100, 100, 50])
    ]

    assert [plan.prefill for plan in plans] == [P0, P1, P1, P1]
    assert [plan.decode for plan in plans] == [D0, D1, D1, D1]


def test_a_reported_queue_counts_when_it_is_longer_than_the_own_book() -> None:
    """Other proxies' work is known from reports only."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(load(P0, 0.5))

    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    assert start.plan.prefill == P1


def test_an_instance_that_fails_what_it_gets_is_not_taken_for_its_short_queue() -> None:
    """It is idle for that reason; one that works is taken, however long its queue is."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    outliers._eject(harness.policy.state, harness.policy.state.view.members[P0], "HTTP 500")
    harness.handle(load(P1, 0.5))

    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    assert start.plan.prefill == P1


def test_streams_of_other_proxies_count_as_the_instance_reports_them() -> None:
    """All that it runs or queues, without what this proxy has there."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("own")

    rows = []
    for streams in (3, 8, 2):
        harness.handle(load(D0, 0.0, streams))
        (row,) = (each for each in harness.policy.snapshot()["instances"] if each["id"] == D0)
        rows.append((row["decode_streams"], row["others_reported"]))

    assert rows == [(1, 2), (1, 7), (1, 1)]


def test_work_leaves_the_book_when_prefill_answers() -> None:
    """Finished prefills do not count: the next stream is placed by what each pair decodes."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A", 400)

    plans = [
        only(harness.handle(ev.StreamArrived(stream, 10)), act.Start).plan for stream in (B, C)
    ]

    assert [plan.prefill for plan in plans] == [P1, P0]


def test_without_its_own_pair_the_decode_instance_with_the_fewest_streams_is_taken() -> None:
    """A prefill instance whose decode partner is gone still works."""
    harness = PolicyHarness("p0", "p1", "d1", "p2", "d2")
    harness.handle(load(P0, 1.0))
    harness.handle(ev.StreamArrived(A, 100))
    harness.handle(load(P0, 0.0))
    harness.handle(load(P1, 9.0))
    harness.handle(load("p2", 9.0))

    start = only(harness.handle(ev.StreamArrived(B, 100)), act.Start)

    assert start.plan == act.Plan(decode=InstanceId("d2"), prefill=P0)


@pytest.mark.parametrize("names", ["p0 d0 d1", "p2 d0 d1", "p0 p1 d0 d1"])
def test_a_decode_instance_that_is_back_gets_the_new_streams_until_it_has_as_many(
    names: str,
) -> None:
    """Also on a node without a prefill instance, and beside one that has got all streams."""
    harness = PolicyHarness(*names.split())
    for n in range(8):
        harness.decoding(f"s{n}")
    harness.lose("d1")
    harness.handle(instance_up("d1", epoch=2))

    new = [harness.decoding(f"t{n}").plan.decode for n in range(10)]

    assert [*new[:8]] == [D1] * 8
    assert new[8:].count(D0) == 1


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_decode_instance_whose_prefill_ends_takes_hand_offs_of_another_one(is_lost: bool) -> None:
    """Lost or draining: without its own pair it gets an equal share of new streams, unless its
    answers close it to them.
    """
    harness = PolicyHarness("p0", "d0", "d1", "p1")
    harness.handle(load(P1, 0.1))
    own = [harness.decoding(f"s{n}").plan.decode for n in range(4)]
    if is_lost:
        harness.lose("p1")
    else:
        harness.handle(load(P1, draining=True))

    shared = [harness.decoding(f"t{n}").plan.decode for n in range(3)]
    outliers._eject(harness.policy.state, harness.policy.state.view.members[D1], "HTTP 500")
    closed = harness.decoding("u").plan.decode

    assert own == [D0] * 4
    assert shared == [D1] * 3
    assert closed == D0


def test_an_instance_of_both_roles_takes_the_stream_alone() -> None:
    """There is nothing to hand off within one instance."""
    harness = PolicyHarness("b0")

    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    assert start.plan == act.Plan(decode=InstanceId("b0"))


def test_streams_wait_for_a_pair_and_start_in_order_of_arrival() -> None:
    """A prefill instance alone is no pair; when one is complete, first come, first served."""
    harness = PolicyHarness("p0")

    waiting = [harness.handle(ev.StreamArrived(stream, 100)) for stream in (B, A, C)]
    started = harness.handle(instance_up("d0"), at_s=1.0)

    assert waiting[0] == [act.WakeAt(30.0)]
    assert [start.stream for start in of(started, act.Start)] == [B, A, C]


def test_a_stream_that_waited_in_vain_is_given_up_with_retry_after() -> None:
    """No instance within `recovery.wait_s`: an explicit end, and not a moment earlier."""
    harness = PolicyHarness("d0", wait_s=5.0)
    harness.handle(ev.StreamArrived(A, 100), at_s=1.0)

    early = harness.handle(ev.TimerFired(), at_s=5.5)
    late = harness.handle(ev.TimerFired(), at_s=6.0)

    assert of(early, act.GiveUp) == []
    given_up = only(late, act.GiveUp)
    assert (given_up.stream, given_up.reason) == (A, act.Reason.NO_INSTANCE)
    assert 5.0 <= given_up.retry_after_s < 10.0


def test_without_patience_a_stream_is_given_up_at_once() -> None:
    """`recovery.wait_s: 0`."""
    harness = PolicyHarness(wait_s=0.0)

    assert (
        only(harness.handle(ev.StreamArrived(A, 100)), act.GiveUp).reason is act.Reason.NO_INSTANCE
    )


def test_the_prompts_length_is_known_from_prefill_on() -> None:
    """The first figure is a guess while the prompt is text; costs are computed from the true
    one.
    """
    harness = PolicyHarness("p0", "d0", "d1")
    harness.handle(ev.StreamArrived(A, 1))
    harness.handle(ev.PrefillDone(A, 1, 330))

    estimates = only(harness.lose("d0", A=10), act.Recovered).estimates

    assert {round(e.compute_s, 6) for e in estimates} == {0.340, 0.020}


def test_one_timer_is_requested_however_many_streams_wait() -> None:
    """No storm of wake-ups: the earliest pending one is enough."""
    harness = PolicyHarness()

    actions = [
        harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 1), at_s=n / 10) for n in range(50)
    ]

    assert [a for each in actions for a in each] == [act.WakeAt(30.0)]
    assert of(harness.handle(ev.TimerFired(), at_s=30.0), act.WakeAt) == [act.WakeAt(30.1)]


def test_an_ended_stream_leaves_no_trace() -> None:
    """Everything is forgotten, and whatever comes late is ignored."""
    harness = PolicyHarness("p0", "d0")
    before = harness.policy.snapshot()
    harness.decoding("A")

    harness.handle(ev.StreamEnded(A, 1))
    late = [
        harness.handle(ev.PrefillDone(A, 1, 100)),
        harness.handle(ev.StreamEnded(A, 1)),
        harness.lose("d9"),
    ]

    assert late == [[], [], []]
    assert harness.policy.snapshot() == before


def test_the_snapshot_is_plain_data() -> None:
    """It goes out as JSON on the admin port."""
    harness = PolicyHarness("p0", "d0")
    harness.handle(ev.StreamArrived(A, 100))

    snapshot = harness.policy.snapshot()

    assert snapshot["streams"] == {"waiting": 0, "queued": 0, "prefill": 1, "decode": 0}
    assert snapshot["instances"][0] == {
        "id": "p0",
        "node": "n0",
        "role": Role.PREFILL.value,
        "epoch": 1,
        "queue_s": 0.1,
        "work_s": 0.1,
        "running": 1,
        "decode_streams": 0,
        "others_reported": 0,
        "retained_streams": 0,
        "drained": False,
        "health": {
            "ejected": False,
            "failures_in_a_row": 0,
            "paused_s": 0.0,
            "busy_s": 0.0,
            "hung_transfer_s": 0.0,
            "quick_deaths": 0,
            "cause": "",
        },
    }


def could_take(harness: PolicyHarness, name: str, *silent: str) -> bool:
    """True if others could go on with the instance's streams, while these are silent."""
    return harness.policy.has_others(InstanceId(name), lambda other: other not in silent)


@pytest.mark.parametrize(
    ("up", "silent", "expected"),
    [
        (("p0", "d0"), ("d0",), False),
        (("p0", "d0", "d1"), ("d0",), True),
        (("p0", "d0", "d1"), ("d0", "d1"), False),
        (("p0", "d0", "b1"), ("d0",), True),
        (("p0", "d0", "p1"), ("d0",), False),
    ],
)
def test_another_decode_instance_can_take_streams_if_it_is_heard(
    up: tuple[str, ...], silent: tuple[str, ...], expected: bool
) -> None:
    """All that are silent at once have nowhere to send their streams."""
    assert could_take(PolicyHarness(*up), "d0", *silent) is expected


def test_an_instance_of_both_roles_needs_others_for_both() -> None:
    harness = PolicyHarness("b0", "d1")

    assert not could_take(harness, "b0", "b0")
    harness.handle(instance_up("p1"))
    assert could_take(harness, "b0", "b0")


def test_what_is_to_end_or_is_ejected_takes_nothing() -> None:
    """Nor does one that is lost."""
    harness = PolicyHarness("p0", "d0", "d1")

    harness.handle(ev.DrainOrdered(D0, False, {}))
    drained = could_take(harness, "d1", "d1")
    harness.handle(ev.DrainEnded(D0))
    again = could_take(harness, "d1", "d1")
    for name in [f"s{number}" for number in range(CONSECUTIVE_FAILURES)]:
        harness.decoding(name, resumed=False)
    for name in [f"s{number}" for number in range(CONSECUTIVE_FAILURES)]:
        harness.handle(ev.AttemptFailed(StreamId(name), 1, D0, "broken", 0))
    ejected = could_take(harness, "d1", "d1")
    harness.lose("d0")

    assert (drained, again, ejected) == (False, True, False)
    assert not could_take(harness, "d1", "d1")
