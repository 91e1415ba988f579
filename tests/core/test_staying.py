"""Streams of an instance that re-forms: each stays, in the same attempt, or leaves."""

from typing import Any

import pytest

from kvrs.config.policy import PolicyName, SloSettings
from kvrs.core import placing
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.reports import changes_decision
from kvrs.core.options import base
from kvrs.core.rules.base import Rule, cases_of
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import ReformingReport
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only

S = StreamId("s")
NAMES = ("s", "t", *(f"s{n}" for n in range(12)))
GRACE_S = 2.0  # The shortest silence that counts.


def reforming(name: str, ready_in_s: float, **changes: Any) -> ev.LoadReported:
    produced = dict.fromkeys(map(StreamId, NAMES), 300)
    of_load: dict[str, Any] = {"produced_tokens": produced, "queue_s": 0.0, "epoch": 1}
    of_load |= {key: changes.pop(key) for key in (*of_load, "token_s") if key in changes}
    lost: dict[str, Any] = {"number": 1, "way": "reshard", "degree": 1, "lost": [1]}
    report = ReformingReport(ready_in_s=ready_in_s, move_bytes=0, **(lost | changes))
    return load(name, reforming=report, degree=1, full_degree=2, **of_load)


def reformed(name: str, queue_s: float = 0.0, *, factor: float = 1.0) -> ev.LoadReported:
    """Without a prediction before it takes `factor` times as long as with all its ranks."""
    return load(name, queue_s, token_s=0.05, degree=round(6 / factor), full_degree=6)


def two_pairs(*streams: str, prompt_tokens: int = 10, **settings: Any) -> PolicyHarness:
    """All streams decode at `d0`; `d1` is as good, and comes up after them. Most of their KV is
    only at `d0`, so that to leave takes 0.3 s.
    """
    harness = PolicyHarness("p0", "d0", **settings)
    for name in streams:
        harness.decoding(name, prompt_tokens)
    harness.handle(instance_up("p1"))
    harness.handle(instance_up("d1"))
    return harness


def ring(harness: PolicyHarness, at_s: float) -> list[act.Action]:
    return harness.handle(ev.TimerFired(), at_s)


def options_of(recovered: act.Recovered) -> dict[Option, float]:
    return {each.option: each.next_token_s for each in recovered.estimates}


def test_a_stream_stays_where_that_is_sooner_and_keeps_its_attempt() -> None:
    """No second attempt, no halt; an alarm bounds the wait."""
    harness = two_pairs("s")

    actions = harness.handle(reforming("d0", 0.02), at_s=1.0)

    stay, recovered = only(actions, act.Stay), only(actions, act.Recovered)
    assert (of(actions, act.Start), of(actions, act.Halt)) == ([], [])
    assert (stay.stream, stay.attempt) == (S, 1)
    assert 1.02 < stay.until_s <= 1.02 + GRACE_S
    assert only(actions, act.WakeAt).at_s == stay.until_s
    assert (recovered.option, recovered.attempt, recovered.failed) == (Option.IN_PLACE, 1, "d0")
    assert recovered.predicted_s == pytest.approx(0.02)
    assert recovered.cause == "rank 1 of d0 lost: reshard"
    assert set(options_of(recovered)) >= {Option.IN_PLACE, Option.RECOMPUTE}


def test_a_stream_leaves_where_that_is_sooner() -> None:
    """In a new attempt elsewhere, with what staying would have cost beside it."""
    harness = two_pairs("s")

    actions = harness.handle(reforming("d0", 5.0, produced_tokens={S: 7}), at_s=1.0)

    halt, start, recovered = (
        only(actions, act.Halt),
        only(actions, act.Start),
        only(actions, act.Recovered),
    )
    assert (halt.stream, halt.attempt) == (S, 1)
    assert (start.attempt, start.plan.decode) == (2, "d1")
    assert recovered.option is not Option.IN_PLACE
    assert options_of(recovered)[Option.IN_PLACE] == pytest.approx(5.0)


def test_the_next_token_ends_the_recovery() -> None:
    """The prediction is compared with the real time."""
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.02), at_s=1.0)
    harness.handle(reformed("d0"), at_s=1.03)

    settled = only(harness.handle(ev.StreamResumed(S, 1), at_s=1.04), act.Settled)

    assert (settled.option, settled.attempt) == (Option.IN_PLACE, 1)
    assert [settled.predicted_s, settled.real_s] == pytest.approx([0.02, 0.04])
    assert settled.low_s is not None
    assert ring(harness, 9.0) == []
    assert [
        a for a in harness.handle(ev.StreamEnded(S, 1), at_s=9.1) if not isinstance(a, act.WakeAt)
    ] == []


def test_a_token_from_before_the_re_forming_settles_nothing() -> None:
    """It was on its way when the rank was lost: the alarm stays."""
    harness = two_pairs("s")
    stay = only(harness.handle(reforming("d0", 0.02), at_s=1.0), act.Stay)

    early = harness.handle(ev.StreamResumed(S, 1), at_s=1.001)
    late = ring(harness, stay.until_s)

    assert of(early, act.Settled) == []
    assert only(late, act.Start).plan.decode == "d1"


def test_a_token_from_before_the_re_forming_frees_the_slot_of_its_transfer() -> None:
    """It shows that the pages have come, while the stream goes on waiting for its instance."""
    harness = PolicyHarness("p0", "d0", name=PolicyName.AUTO)
    harness.decoding("s", 2000)
    harness.handle(instance_up("d1"))
    start = only(harness.lose("d0", at_s=1.0, s=1), act.Start)
    assert start.plan.runs
    assert harness.policy.snapshot()["slots"]["d1"]["held"] == 1
    only(harness.handle(reforming("d1", 0.5, produced_tokens={S: 1}), at_s=1.01), act.Stay)

    harness.handle(ev.StreamResumed(S, 2), at_s=1.02)

    assert harness.policy.snapshot()["slots"] == {}


def test_an_instance_that_breaks_its_word_is_left() -> None:
    """At the announced time and one silence limit at most; to stay there again is no option."""
    harness = two_pairs("s")
    stay = only(harness.handle(reforming("d0", 0.02), at_s=1.0), act.Stay)

    before = ring(harness, stay.until_s - 0.01)
    actions = ring(harness, stay.until_s)

    halt, start, recovered = (
        only(actions, act.Halt),
        only(actions, act.Start),
        only(actions, act.Recovered),
    )
    assert of(before, act.Start) == []
    assert (halt.attempt, start.attempt, start.plan.decode) == (1, 2, "d1")
    assert Option.IN_PLACE not in options_of(recovered)
    assert "was to go on" in recovered.cause


def test_streams_that_leave_at_their_alarms_are_one_event() -> None:
    """All have left the books before any is placed, and each is charged what the others wait."""
    names = [f"s{n}" for n in range(4)]
    harness = two_pairs(*names, gather_s=0.01)
    promised = of(harness.handle(reforming("d0", 0.02), at_s=1.0), act.Stay)
    until_s = max(stay.until_s for stay in promised)

    left = ring(harness, until_s)
    placed = ring(harness, until_s + 0.01)

    assert (
        [halt.stream for halt in of(left, act.Halt)] == names == [stay.stream for stay in promised]
    )
    assert of(left, act.Start) == []
    assert [start.stream for start in of(placed, act.Start)] == names
    assert [recovered.others for recovered in of(placed, act.Recovered)] == [3.0] * 4


@pytest.mark.parametrize("updates", [1, 40])
def test_later_predictions_extend_a_promise_only_so_far(updates: int) -> None:
    """An instance that always needs a little longer cannot hold a stream for ever."""
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.1), at_s=1.0)

    left_s = None
    for update in range(updates):
        at_s = 1.0 + 0.1 * (update + 1)
        actions = harness.handle(reforming("d0", 0.2), at_s=at_s)
        if left_s is None and of(actions, act.Start):
            left_s = at_s
    actions = ring(harness, 20.0)

    assert left_s is not None or only(actions, act.Start).attempt == 2
    if updates == 40:
        assert left_s is not None
        assert left_s <= 1.1 + GRACE_S + 0.11


def test_a_prediction_that_is_read_after_the_last_moment_does_not_extend_a_deadline() -> None:
    """The proxy was stopped meanwhile: the alarm is overdue, and rings with the report."""
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.1), at_s=1.0)

    late = harness.handle(reforming("d0", 0.0), at_s=9.0)
    rung = ring(harness, 9.1)

    assert of(late, act.Stay) == []
    assert only([*late, *rung], act.Start).attempt == 2


def test_a_prediction_that_has_become_far_later_makes_a_stream_leave() -> None:
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.02), at_s=1.0)

    actions = harness.handle(reforming("d0", 30.0), at_s=1.01)

    assert only(actions, act.Start).plan.decode == "d1"


def test_an_earlier_prediction_changes_nothing() -> None:
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.05), at_s=1.0)

    assert harness.handle(reforming("d0", 0.01), at_s=1.01) == []


def test_a_second_loss_in_mid_move_is_decided_anew() -> None:
    """The same attempt, a new deadline, one more recovery."""
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.02), at_s=1.0)

    actions = harness.handle(reforming("d0", 0.04, number=2), at_s=1.01)

    stay, recovered = only(actions, act.Stay), only(actions, act.Recovered)
    assert (stay.attempt, recovered.attempt) == (1, 1)
    assert recovered.predicted_s == pytest.approx(0.04)
    assert stay.until_s > 1.05


def test_late_news_of_a_former_re_forming_is_ignored() -> None:
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.02, number=2), at_s=1.0)

    assert harness.handle(reforming("d0", 30.0, number=1), at_s=1.01) == []
    assert harness.handle(reforming("d0", 30.0, number=3, epoch=0), at_s=1.01) == []


def test_streams_wait_for_those_before_them() -> None:
    """Lost cells are restored one stream after another; whose turn comes late leaves."""
    names = [f"s{n}" for n in range(12)]
    harness = two_pairs(*names, dispatch="least_loaded")
    missing = {StreamId(name): 10 for name in names}

    actions = harness.handle(reforming("d0", 0.01, missing_pages=missing, page_s=0.004), at_s=1.0)

    stayed = [each for each in of(actions, act.Recovered) if each.option is Option.IN_PLACE]
    left = [each for each in of(actions, act.Recovered) if each.option is not Option.IN_PLACE]
    assert [each.stream for each in stayed][:2] == ["s0", "s1"]
    assert [each.predicted_s for each in stayed] == pytest.approx(
        [0.01 + 0.04 * (n + 1) for n in range(len(stayed))]
    )
    assert len(stayed) >= 2
    assert len(left) >= 2


def test_of_pages_that_an_agent_holds_only_the_lost_cells_cost() -> None:
    """The pages behind them are computed."""
    harness = two_pairs("s")
    event = reforming(
        "d0",
        0.01,
        missing_pages={S: 10},
        page_s=0.01,
        held_pages={S: 8},
        held_page_s=0.001,
    )

    stays = only(harness.handle(event, at_s=1.0), act.Recovered)

    assert stays.option is Option.IN_PLACE
    assert stays.predicted_s == pytest.approx(0.01 + 8 * 0.001 + 2 * 0.01)


def test_streams_that_leave_together_are_charged_what_they_cost_each_other() -> None:
    """A split is sooner for the first of eight, but the others wait for what it has the target
    compute.
    """
    chosen = {}
    for count in (1, 8):
        names = [f"s{n}" for n in range(count)]
        harness = two_pairs(*names, prompt_tokens=321, dispatch="least_loaded")
        harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 2e6))
        harness.handle(load("p1", 60.0))
        event = reforming("d0", 30.0, produced_tokens=dict.fromkeys(map(StreamId, names), 1))
        first = of(harness.handle(event, at_s=1.0), act.Recovered)[0]
        chosen[count] = first.option, first.others

    assert chosen == {1: (Option.SPLIT, 0.0), 8: (Option.MIGRATE, 3.5)}


def test_lost_cells_are_no_source() -> None:
    """Pages that have lost a part cannot be fetched from the instance; the rest still can."""
    harness = PolicyHarness("b0")
    for name in ("s", "t"):
        harness.handle(ev.StreamArrived(StreamId(name), 400))
        harness.handle(ev.PrefillDone(StreamId(name), 1, 400))
        harness.handle(ev.StreamResumed(StreamId(name), 1))
    harness.handle(instance_up("b1"))

    actions = harness.handle(reforming("b0", 30.0, missing_pages={S: 25}, page_s=0.001), at_s=1.0)

    runs = {start.stream: start.plan.runs for start in of(actions, act.Start)}
    assert runs[S] == ()
    assert [run.holder for run in runs[StreamId("t")]] == ["b0"]


def test_an_answer_of_a_prefill_does_not_bring_back_what_was_lost_since() -> None:
    """The history was computed before the re-forming, and the answer comes during it."""
    harness = PolicyHarness("p0", "d0")
    harness.handle(ev.StreamArrived(S, 400))
    harness.handle(reforming("p0", 0.1, missing_pages={S: 25}, page_s=0.001), at_s=1.0)
    harness.handle(ev.PrefillDone(S, 1, 400), at_s=1.01)
    harness.handle(instance_up("d1"), at_s=1.02)

    lost = harness.lose("d0", at_s=1.03)
    later = ring(harness, 1.2)

    assert only([*lost, *later], act.Start).plan.runs == ()


def test_nothing_new_comes_to_it_while_others_are_up() -> None:
    harness = two_pairs()
    harness.handle(instance_up("b2"))

    harness.handle(reforming("d0", 1.0), at_s=1.0)
    during = {harness.decoding(f"n{n}").plan.decode for n in range(4)}
    harness.handle(reformed("d0"), at_s=2.0)
    after = {harness.decoding(f"m{n}").plan.decode for n in range(6)}

    assert "d0" not in during
    assert "d0" in after


def test_where_nothing_else_is_up_new_streams_wait_for_it() -> None:
    """With the predicted wait in their own prediction."""
    harness = PolicyHarness("b0", slo=SloSettings(abort=True))
    harness.handle(reforming("b0", 5.0), at_s=1.0)

    start = only(harness.handle(ev.StreamArrived(S, 100)), act.Start)
    tight = harness.handle(ev.StreamArrived(StreamId("t"), 100, deadlines=ev.Deadlines(ttft_s=1.0)))

    assert start.plan.decode == "b0"
    assert only(tight, act.GiveUp).reason.value == "slo"


def test_without_any_other_instance_a_stream_stays_beyond_its_promise() -> None:
    """There is nowhere to go; another instance that comes up ends that."""
    harness = PolicyHarness("b0")
    harness.decoding("s")
    stay = only(harness.handle(reforming("b0", 0.5), at_s=1.0), act.Stay)

    alone = ring(harness, stay.until_s)
    harness.handle(instance_up("b1"))
    actions = ring(harness, only(alone, act.Stay).until_s)

    assert (of(alone, act.Start), of(alone, act.Halt)) == ([], [])
    assert only(actions, act.Start).plan.decode == "b1"


def test_a_hand_off_avoids_an_instance_that_re_forms() -> None:
    """Prefill elsewhere was for it, and another one decodes at once."""
    harness = PolicyHarness("p0", "d0", "d1")
    planned = only(harness.handle(ev.StreamArrived(S, 100)), act.Start).plan.decode
    harness.handle(reforming(planned, 2.0))

    harness.handle(ev.PrefillDone(S, 1, 100))
    seen = {each["id"]: each["decode_streams"] for each in harness.policy.snapshot()["instances"]}

    assert seen[planned] == 0


@pytest.mark.parametrize(("ready_in_s", "stays"), [(0.01, True), (9.0, False)])
def test_a_prefill_that_re_forms_is_weighed_like_a_decode_instance(
    ready_in_s: float, stays: bool
) -> None:
    """The request has no token yet."""
    harness = PolicyHarness("p0", "d0")
    harness.handle(ev.StreamArrived(S, 300))
    harness.handle(instance_up("p1"))
    harness.handle(instance_up("d1"))

    actions = harness.handle(reforming("p0", ready_in_s, produced_tokens={}), at_s=0.25)

    if stays:
        assert only(actions, act.Stay).attempt == 1
        harness.handle(ev.PrefillDone(S, 1, 300), at_s=0.4)
        assert of(ring(harness, 9.0), act.Start) == []
    else:
        assert only(actions, act.Start).plan.prefill == "p1"


def test_an_attempt_that_fails_meanwhile_is_a_failure_like_any_other() -> None:
    """And to stay is not tried again for that stream."""
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.02), at_s=1.0)

    actions = harness.handle(ev.AttemptFailed(S, 1, InstanceId("d0"), "error event", 7), at_s=1.01)

    assert only(actions, act.Start).plan.decode == "d1"
    assert ring(harness, 9.0) == []


def test_an_instance_that_ends_in_mid_move_is_lost_like_any_other() -> None:
    harness = two_pairs("s", "t")
    harness.handle(reforming("d0", 0.02), at_s=1.0)

    actions = harness.lose("d0", at_s=1.01, s=7, t=7)

    assert {start.plan.decode for start in of(actions, act.Start)} == {"d1"}
    assert len(of(actions, act.Start)) == 2


def test_look_ahead_counts_the_slower_tokens_of_fewer_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a step twice as long, 32 tokens later the other instance is ahead; 0 looks at the next
    token only.
    """
    far, near = two_pairs("s"), two_pairs("s")
    event = reforming("d0", 0.02, decode_factor=2.0, token_s=0.05)

    leaves = far.handle(event, at_s=1.0)
    monkeypatch.setattr(base, "LOOKAHEAD_TOKENS", 0)
    stays = near.handle(event, at_s=1.0)

    assert only(leaves, act.Start).plan.decode == "d1"
    assert only(stays, act.Stay).stream == S


def test_look_ahead_ends_with_the_stream() -> None:
    """One token more is all that it may have."""
    harness = PolicyHarness("p0", "d0")
    harness.handle(ev.StreamArrived(S, 10, most_tokens=311))
    harness.handle(ev.PrefillDone(S, 1, 10))
    harness.handle(ev.StreamResumed(S, 1))
    harness.handle(instance_up("p1"))
    harness.handle(instance_up("d1"))
    event = reforming("d0", 0.02, decode_factor=2.0, token_s=0.05)

    assert only(harness.handle(event, at_s=1.0), act.Stay).stream == S


def test_predictions_do_not_contain_the_look_ahead() -> None:
    """It decides; what is compared with the real cost is the time to the next token."""
    harness = two_pairs("s")

    actions = harness.handle(reforming("d0", 0.02, decode_factor=1.1, token_s=0.01), at_s=1.0)

    recovered = only(actions, act.Recovered)
    chosen = next(each for each in recovered.estimates if each.option is Option.IN_PLACE)
    assert recovered.predicted_s == pytest.approx(0.02 + 0.011)
    assert chosen.total_s == pytest.approx(0.02 + 0.011 + 32 * 0.001)


def test_the_next_token_takes_a_step_of_the_ranks_that_are_left() -> None:
    """The instance predicts when it serves, not when a token comes."""
    harness = two_pairs("s")

    actions = harness.handle(reforming("d0", 0.02, decode_factor=1.5, token_s=0.01), at_s=1.0)

    recovered = only(actions, act.Recovered)
    assert recovered.predicted_s == pytest.approx(0.02 + 1.5 * 0.01)


def test_what_a_stream_had_lost_before_is_still_to_be_restored() -> None:
    """The instance changes its ranks once more while it restores: what it has not restored yet
    takes as long as before, behind the new pause.
    """
    harness = two_pairs("s", "t")
    lost = reforming("d0", 0.02, missing_pages={S: 10, StreamId("t"): 10}, page_s=0.01)
    harness.handle(lost, at_s=1.0)
    harness.handle(reformed("d0"), at_s=1.02)
    harness.handle(ev.StreamResumed(S, 1), at_s=1.12)

    actions = harness.handle(reforming("d0", 0.03, number=2), at_s=1.15)

    predicted_s = {each.stream: each.predicted_s for each in of(actions, act.Recovered)}
    assert predicted_s == {S: pytest.approx(0.03), StreamId("t"): pytest.approx(0.03 + 0.07)}
    assert of(actions, act.Start) == []


def test_a_stream_that_waits_still_is_not_promised_less_by_a_second_loss() -> None:
    """In mid-move nothing has been restored: all of it is to come."""
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.05, missing_pages={S: 10}, page_s=0.01), at_s=1.0)

    actions = harness.handle(reforming("d0", 0.05, number=2), at_s=1.02)

    assert only(actions, act.Recovered).predicted_s == pytest.approx(0.05 + 0.1)


def test_a_token_after_the_predicted_end_settles_though_the_report_is_late() -> None:
    """It cannot be from before the re-forming: a stream that goes on is not taken away. Until then
    each token is followed by a look at the next one.
    """
    harness = two_pairs("s")
    stay = only(harness.handle(reforming("d0", 0.02), at_s=1.0), act.Stay)

    early = harness.handle(ev.StreamResumed(S, 1), at_s=1.001)
    late = harness.handle(ev.StreamResumed(S, 1), at_s=1.03)

    assert only(early, act.Stay) == stay
    assert only(late, act.Settled).option is Option.IN_PLACE
    assert of(ring(harness, stay.until_s), act.Halt) == []


def test_an_instance_says_how_slow_it_is_with_the_ranks_that_it_has() -> None:
    """Also one whose ranks have changed while it served, which has predicted nothing."""
    harness = two_pairs()
    paces: dict[str, Any] = {"decode_factor": 3.0, "prefill_factor": 2.0}

    harness.handle(load("d0", token_s=0.05, degree=3, full_degree=4, layout_number=1, **paces))

    member = harness.policy.state.view.members[InstanceId("d0")]
    assert member.times.table.seconds_for(200) == pytest.approx(0.4)
    assert member.times.slower_token_s == pytest.approx(0.1)


def test_fewer_ranks_scale_the_tables_until_all_are_back() -> None:
    harness = two_pairs()
    harness.handle(reformed("d0", factor=1.5))
    view = harness.policy.state.view
    slower = view.members[InstanceId("d0")].times.table.seconds_for(200)

    harness.handle(reformed("d0"))

    assert slower == pytest.approx(0.3)
    assert view.members[InstanceId("d0")].times.table.seconds_for(200) == pytest.approx(0.2)
    assert view.members[InstanceId("d0")].times.slower_token_s == 0


@pytest.mark.parametrize("name", [PolicyName.ROM, PolicyName.ALWAYS_RECOMPUTE])
def test_the_static_policies_leave(name: PolicyName) -> None:
    """They know no such option, unless there is nowhere to go."""
    harness, alone = two_pairs("s", name=name), PolicyHarness("p0", "d0", name=name)
    alone.decoding("s")

    assert only(harness.handle(reforming("d0", 0.01), at_s=1.0), act.Start).plan.decode == "d1"
    assert only(alone.handle(reforming("d0", 0.01), at_s=1.0), act.Stay).stream == S


def test_a_re_forming_that_ended_while_another_proxy_fenced_the_instance_is_over() -> None:
    """In its new epoch the same process reports that all ranks compute."""
    harness = PolicyHarness("b0")
    harness.handle(reforming("b0", 5.0), at_s=1.0)
    harness.handle(instance_up("b0", epoch=2, lives_on=True), at_s=2.0)
    before = harness.policy.members[InstanceId("b0")].reforming
    report = load("b0", epoch=2, degree=2, full_degree=2)

    is_told = changes_decision(
        harness.policy.members[InstanceId("b0")], report.report, 2.1, has_peers=False, waiting=False
    )
    harness.handle(report, at_s=2.1)

    assert is_told
    assert before is not None
    assert harness.policy.members[InstanceId("b0")].reforming is None


def test_the_wait_falls_with_what_is_left_of_the_pause() -> None:
    """A new request is refused for 31 s of it, and not for 29: nothing but time lies between."""
    harness = PolicyHarness("b0")
    member = harness.policy.members[InstanceId("b0")]
    harness.handle(reforming("b0", 31.0, queue_s=1.0), at_s=1.0)
    refused = only(harness.handle(ev.StreamArrived(S, 10), at_s=1.0), act.GiveUp)
    later = reforming("b0", 28.0, queue_s=1.0)

    is_told = changes_decision(member, later.report, 4.0, has_peers=False, waiting=False)
    harness.handle(later, at_s=4.0)

    assert refused.reason is act.Reason.OVERLOADED
    assert is_told
    assert member.queue_s == pytest.approx(29.0)
    assert only(harness.handle(ev.StreamArrived(StreamId("t"), 10), at_s=4.0), act.Start)


def test_load_reports_meanwhile_do_not_hide_the_wait() -> None:
    """An instance that computes nothing has an empty queue."""
    harness = PolicyHarness("b0")
    harness.handle(reforming("b0", 5.0), at_s=1.0)

    harness.handle(reforming("b0", 4.0), at_s=2.0)
    (during,) = harness.policy.snapshot()["instances"]
    harness.handle(reforming("b0", 3.9, queue_s=0.5), at_s=2.1)
    harness.handle(reformed("b0", 0.5), at_s=2.2)
    (after,) = harness.policy.snapshot()["instances"]

    assert (during["queue_s"], after["queue_s"]) == (pytest.approx(4.0), pytest.approx(0.5))


def test_the_terms_of_a_stay_add_up() -> None:
    harness = two_pairs("s")
    harness.handle(reforming("d0", 0.02, missing_pages={S: 3}, page_s=0.001), at_s=1.0)
    policy = harness.policy
    stream = policy.state.streams[S]
    home = policy.state.view.members[InstanceId("d0")]
    books = policy.state
    estimate = only([*harness.actions], act.Recovered).estimates[-1]
    assert home.reforming is not None
    home.reforming.ahead_s = 0.0

    rule: Rule = placing._rule(policy.state)
    (case,) = cases_of(books, stream, [home], 1.0)
    terms = [*rule.terms(case, estimate)]

    assert sum(term.seconds for term in terms) == pytest.approx(estimate.total_s)
    assert estimate.total_s == pytest.approx(0.023)


@pytest.mark.parametrize(("ready_in_s", "late_s"), [(0.02, 0.1), (1.0, 0.5), (10.0, 2.0)])
def test_a_deadline_is_kept_late_by_half_of_its_length_within_bounds(
    ready_in_s: float, late_s: float
) -> None:
    """The bounds are a tenth of a second and two seconds."""
    harness = PolicyHarness("b0")
    harness.decoding("s")

    stay = only(harness.handle(reforming("b0", ready_in_s), at_s=1.0), act.Stay)

    assert stay.until_s == pytest.approx(1.0 + ready_in_s + late_s, abs=0.02)


@pytest.mark.parametrize(("later_s", "is_news"), [(0.015, False), (0.025, True)])
def test_a_prediction_that_is_20_ms_later_changes_nothing(later_s: float, *, is_news: bool) -> None:
    harness = PolicyHarness("b0")
    harness.decoding("s")
    harness.handle(reforming("b0", 0.5), at_s=1.0)

    actions = harness.handle(reforming("b0", 0.5 + later_s), at_s=1.0)

    assert bool(of(actions, act.Stay)) is is_news
