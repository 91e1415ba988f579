"""How open streams survive: victims, options, holders, retries."""

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicyName, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.streams import RecoveryState
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Capability
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only

P0, P1, D0, D1, D2 = (InstanceId(name) for name in ("p0", "p1", "d0", "d1", "d2"))
N0, N1 = NodeId("n0"), NodeId("n1")
A, B = StreamId("A"), StreamId("B")
SLOW = PrefillTable("slow", "made up", 100, [0.0, 1.0, 2.0])  # 10 ms per token


def test_a_victim_migrates_from_the_prefill_instance_that_retains_its_prompt() -> None:
    """The full pages of the prompt are fetched at the target; the partial page and what was
    produced are computed there.
    """
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A", 100)

    actions = harness.lose("d0", A=7)

    assert only(actions, act.Start) == act.Start(
        A, 2, act.Plan(decode=D1, runs=(act.PageRange(P0, 0, 6, 1),))
    )
    record = only(actions, act.Recovered)
    assert (record.option, record.cause, record.failed) == (Option.MIGRATE, "killed", D0)
    assert record.predicted_s == min(estimate.total_s for estimate in record.estimates)
    assert {estimate.option for estimate in record.estimates} == {Option.MIGRATE, Option.RECOMPUTE}


def test_the_last_position_of_a_history_is_never_fetched() -> None:
    """Its logits are what is needed, so a prompt of exactly 6 pages with nothing produced is
    fetched up to page 5.
    """
    harness = PolicyHarness("p0", "d0", "d1")
    harness.decoding("A", 96, resumed=False)

    assert only(harness.lose("d0"), act.Start).plan.runs[0].pages == 5


def test_an_instance_that_another_proxy_fenced_keeps_its_streams_and_what_it_holds() -> None:
    """Its epoch has risen, and that is all: nothing is decided, and later fetches name the new
    epoch.
    """
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A", 100)

    fenced = [
        action
        for name in ("d0", "p0")
        for action in harness.handle(instance_up(name, epoch=2, lives_on=True))
    ]

    assert fenced == []
    assert only(
        harness.handle(ev.InstanceLost(D0, 2, "killed", {A: 7})), act.Start
    ).plan == act.Plan(decode=D1, runs=(act.PageRange(P0, 0, 6, 2),))


def test_a_slow_link_makes_auto_recompute_at_the_target() -> None:
    """No hand-off is left when the target computes the history itself."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A", 100)
    harness.handle(ev.LinkMeasured(N0, N1, 100_000.0))

    actions = harness.lose("d0", A=7)

    assert only(actions, act.Start) == act.Start(A, 2, act.Plan(decode=D1))
    assert only(actions, act.Recovered).option is Option.RECOMPUTE


def test_behind_a_busy_target_its_own_pair_recomputes() -> None:
    """Its queue passes while the prefill instance beside it computes, so that only a local hand-off
    is left.
    """
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A", 100)
    harness.handle(ev.LinkMeasured(N0, N1, 100_000.0))
    harness.handle(load(D1, 0.1))

    actions = harness.lose("d0", A=7)

    assert only(actions, act.Start) == act.Start(A, 2, act.Plan(decode=D1, prefill=P1))
    assert only(actions, act.Recovered).predicted_s == pytest.approx(
        0.107 + 0.002 + 112 * 2048 / 1.25e9
    )


def test_the_generated_tail_is_part_of_what_auto_weighs() -> None:
    """KV of produced tokens died with decode: either way they are computed again."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A", 100)

    estimates = {
        estimate.option: estimate
        for estimate in only(harness.lose("d0", A=50), act.Recovered).estimates
    }
    migrate, recompute = estimates[Option.MIGRATE], estimates[Option.RECOMPUTE]

    assert migrate.compute_s == pytest.approx(0.054)
    assert recompute.compute_s == pytest.approx(0.150)


def test_a_queue_at_the_prefill_instance_turns_auto_towards_migration() -> None:
    """The seed's crossover: recomputing waits behind other requests, a transfer does not."""

    def choice(queue_s: float) -> Option:
        harness = PolicyHarness("p0", "d0", "p1")
        harness.handle(
            instance_up("d1", prefill=SLOW, capabilities=frozenset(Capability) - {Capability.SPLIT})
        )
        harness.handle(ev.LinkMeasured(N0, N1, 1e6))
        harness.decoding("A", 100)
        harness.handle(load(P1, queue_s))
        return only(harness.lose("d0", A=1), act.Recovered).option

    assert [choice(0.0), choice(2.0)] == [Option.RECOMPUTE, Option.MIGRATE]


def test_bytes_already_on_a_link_are_weighed() -> None:
    """Victims of one event are decided together: the first fill the link, so that the last do
    better to recompute.
    """
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(ev.LinkMeasured(N0, N1, 4e6))
    harness.handle(load(P1, 9.0))
    for n in range(12):
        harness.decoding(f"s{n}", 100)
    harness.handle(load(P1, 0.0))

    options = [record.option for record in of(harness.lose("d0"), act.Recovered)]

    assert options[0] in (Option.MIGRATE, Option.SPLIT)
    assert Option.RECOMPUTE in options


@pytest.mark.parametrize("prompt_tokens", [512, 1024, 2048])
@pytest.mark.parametrize(("gbit_s", "expected"), [(111, Option.RECOMPUTE), (113, Option.MIGRATE)])
def test_rom_flips_at_112_gbit_s_whatever_queues_and_tails_there_are(
    prompt_tokens: int, gbit_s: float, expected: Option
) -> None:
    """The seed's rule exactly: KV bytes of the prompt over bandwidth against its prefill time,
    nothing else.
    """
    seed = "opt-13b-a100-kvrs-seed"
    harness = PolicyHarness(name=PolicyName.ROM)
    for name in ("p0", "d0", "p1", "d1"):
        harness.handle(
            instance_up(
                name, geometry=catalog.kv_geometry(seed), prefill=catalog.prefill_table(seed)
            )
        )
    harness.decoding("A", prompt_tokens)
    harness.handle(ev.LinkMeasured(N0, N1, gbit_s * 1e9 / 8))
    harness.handle(load(P1, 3.0))
    harness.handle(load(D1, 5.0))

    record = only(harness.lose("d0", A=500), act.Recovered)

    assert record.option is expected


@pytest.mark.parametrize(
    ("name", "bytes_per_s", "expected"),
    [
        (PolicyName.ALWAYS_MIGRATE, 1.0, Option.MIGRATE),
        (PolicyName.ALWAYS_RECOMPUTE, 1e15, Option.RECOMPUTE),
    ],
)
def test_an_always_policy_does_not_look_at_costs(
    name: PolicyName, bytes_per_s: float, expected: Option
) -> None:
    """The static baselines of the seed."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", name=name)
    harness.decoding("A")
    harness.handle(ev.LinkMeasured(N0, N1, bytes_per_s))

    assert only(harness.lose("d0", A=1), act.Recovered).option is expected


@pytest.mark.parametrize(
    ("changed", "capability"), [("p0", Capability.RETAIN), ("d1", Capability.PULL_PAGES)]
)
def test_without_the_capability_there_is_no_migration(changed: str, capability: Capability) -> None:
    """An instance that neither retains nor caches has nothing to give, and one that does not pull
    cannot fetch.
    """
    harness = PolicyHarness(name=PolicyName.ALWAYS_MIGRATE)
    for name in ("p0", "d0", "p1", "d1"):
        lacking = (
            frozenset(Capability)
            - {Capability.PREFIX_CACHE}
            - ({capability} if name == changed else set())
        )
        harness.handle(instance_up(name, capabilities=lacking))
    harness.decoding("A")

    record = only(harness.lose("d0", A=1), act.Recovered)

    assert {estimate.option for estimate in record.estimates} == {Option.RECOMPUTE}


@pytest.mark.parametrize("how", ["lost", "replaced", "retention lost"])
def test_pages_that_are_gone_are_never_a_source(how: str) -> None:
    """A new epoch of an instance holds nothing of the one before."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_MIGRATE)
    harness.decoding("A")
    match how:
        case "lost":
            harness.lose("p0")
        case "replaced":
            harness.handle(instance_up("p0", epoch=2))
        case _:
            harness.handle(ev.RetentionLost(P0, (A, B)))

    start = only(harness.lose("d0", A=1), act.Start)

    assert start.plan == act.Plan(decode=D1)


def test_a_stale_loss_is_ignored() -> None:
    """The loss of an older epoch does not concern the present one."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(instance_up("d0", epoch=5))
    harness.decoding("A")

    assert harness.lose("d0", epoch=4, A=1) == []
    assert only(harness.lose("d0", epoch=5, A=1), act.Start).attempt == 2


def test_a_higher_epoch_means_that_what_ran_before_is_lost() -> None:
    """Also when the loss was not reported; an equal or lower epoch changes nothing."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A")

    repeated = harness.handle(instance_up("d0"))
    replaced = harness.handle(instance_up("d0", epoch=2))

    assert repeated == []
    assert only(replaced, act.Start).attempt == 2


def test_a_stream_that_had_nothing_yet_is_started_again() -> None:
    """No token, no KV: that is a start, on record because the client waits longer for it."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(ev.StreamArrived(A, 100))

    actions = harness.lose("p0")

    assert only(actions, act.Start) == act.Start(A, 2, act.Plan(decode=D1, prefill=P1))
    assert only(actions, act.Recovered).option is Option.START


def test_a_recovery_that_is_hit_again_is_decided_again() -> None:
    """Failures during recovery are ordinary; numbers only rise and late reports of older attempts
    are ignored.
    """
    harness = PolicyHarness("p0", "d0", "d1", "d2")
    harness.decoding("A")
    harness.lose("d0", A=5)

    second = only(harness.lose("d1", A=5), act.Start)
    late = [
        harness.handle(ev.StreamResumed(A, 2)),
        harness.handle(ev.AttemptFailed(A, 2, D1, "reset", 5)),
        harness.handle(ev.StreamEnded(A, 1)),
    ]

    assert (second.attempt, second.plan.decode) == (3, D2)
    assert late == [[], [], []]


def test_a_failed_attempt_is_followed_by_another_instance_and_option() -> None:
    """Neither the instance nor the option that has just failed is tried again at once."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", "d2", name=PolicyName.ALWAYS_MIGRATE)
    harness.decoding("A")
    harness.lose("d0", A=1)

    actions = harness.handle(ev.AttemptFailed(A, 2, D1, "refused", 1))

    assert only(actions, act.Start) == act.Start(A, 3, act.Plan(decode=D2))
    assert only(actions, act.Recovered).option is Option.RECOMPUTE


def test_a_stream_is_not_sent_back_to_the_instance_that_failed_it() -> None:
    """However slow the others are."""
    harness = PolicyHarness("p0", "d0", "d1")
    harness.handle(instance_up("d2", prefill=SLOW))
    harness.decoding("A")
    harness.lose("d0", A=1)

    assert only(harness.handle(ev.AttemptFailed(A, 2, D1, "reset", 1)), act.Start).plan.decode == D2


def test_an_option_is_allowed_again_once_the_stream_flows() -> None:
    """A way that failed in one recovery is as good as any in the next."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", name=PolicyName.ALWAYS_MIGRATE)
    harness.decoding("A")
    harness.lose("d0", A=1)
    harness.handle(ev.AttemptFailed(A, 2, D1, "refused", 1))
    harness.handle(ev.StreamResumed(A, 3))
    harness.handle(instance_up("d1", epoch=2))

    assert only(harness.lose("d2", A=9), act.Recovered).option is Option.MIGRATE


def test_a_new_epoch_lifts_the_bar() -> None:
    """It was the earlier epoch that failed."""
    harness = PolicyHarness("p0", "d0", "d1")
    harness.decoding("A")
    harness.handle(ev.AttemptFailed(A, 1, D0, "error event", 1))
    harness.handle(instance_up("d0", epoch=2))

    assert only(harness.lose("d1", A=2), act.Start).plan.decode == D0


def test_the_only_instance_is_tried_again_after_a_pause() -> None:
    """It may be dying, and its death takes a moment to be known: attempts are not burnt
    meanwhile.
    """
    harness = PolicyHarness("p0", "d0")
    harness.decoding("A")

    failed = harness.handle(ev.AttemptFailed(A, 1, D0, "reset", 3), at_s=1.0)
    again = harness.handle(ev.TimerFired(), at_s=1.05)

    assert of(failed, act.Start) == []
    assert only(again, act.Start).plan.decode == D0


def test_abort_when_no_option_meets_the_gap() -> None:
    """`slo.abort`: an explicit error now, and the capacity for the others."""
    harness = PolicyHarness("p0", "d0", "d1", slo=SloSettings(abort=True, recovery_gap_s=0.05))
    harness.decoding("A", 400)
    harness.handle(ev.LinkMeasured(N0, N1, 1e6))

    assert only(harness.lose("d0", A=1), act.GiveUp).reason is act.Reason.SLO


def test_victims_are_spread_over_the_targets() -> None:
    """Each placement counts for the next, so one loss does not bury one survivor."""
    harness = PolicyHarness("p0", "d0")
    for n in range(6):
        harness.decoding(f"s{n}")
    harness.add("d1", "d2")

    starts = of(harness.lose("d0"), act.Start)

    assert [start.plan.decode for start in starts].count(D1) == 3
    assert [start.plan.decode for start in starts].count(D2) == 3


def test_late_and_unknown_reports_are_ignored() -> None:
    """The world is slower than the policy; nothing that comes late may disturb it."""
    harness = PolicyHarness("p0", "d0")

    unknown = [
        harness.handle(event)
        for event in (
            ev.PrefillDone(A, 1, 5),
            ev.StreamResumed(A, 1),
            ev.AttemptFailed(A, 1, D0, "reset", 0),
            ev.StreamEnded(A, 1),
            load("x", 1.0),
            ev.RetentionLost(P0, (A,)),
            ev.InstanceLost(InstanceId("x"), 1, "killed", {}),
            ev.TimerFired(),
        )
    ]

    assert unknown == [[]] * 8


def test_an_instance_that_failed_a_stream_is_tried_again_after_2_s_at_most() -> None:
    """The pause doubles until then, and is up to a quarter shorter by jitter."""
    recovery, waits_s = RecoveryState(), []

    for jitter in (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0):
        recovery.back_off(None, jitter, 10.0)
        waits_s.append(recovery.retry_at_s - 10.0)

    assert waits_s == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 1.5])


def test_what_a_scrape_reads_names_no_stream() -> None:
    """Its cost may not grow with the streams: it is read on the event loop."""
    backup = BackupSettings(mode=BackupMode.REMOTE)
    harness = PolicyHarness("p0", "d0", "p1", "d1", backup=backup)
    harness.decoding("stream-A", 100)

    assert "stream-A" in str(harness.policy.snapshot())
    assert "stream-A" not in str(harness.policy.cluster_snapshot())
