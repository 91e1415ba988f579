"""Invariants of control and policy, in worlds drawn at random."""

from collections import Counter
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.config.backup import BackupMode, BackupSettings, Placement
from kvrs.config.policy import (
    Dispatch,
    Handoff,
    PolicyName,
    PolicySettings,
    RecoverySettings,
    SloSettings,
)
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Option
from kvrs.core.recovery import RecoveryPolicy
from tests.core.control_world import Engines, World

CLUSTERS = [
    ["p0", "d0"],
    ["p0", "d0", "p1", "d1"],
    ["p0", "d0", "d1", "d2"],
    ["b0", "b1"],
    ["p0", "b0", "d1"],
]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    recovery = RecoverySettings(
        wait_s=draw(st.sampled_from([0.0, 1.0, 30.0])),
        gather_s=draw(st.sampled_from([0.0, 0.01, 0.3])),
        max_attempts=draw(st.sampled_from([2, 8, 50])),
        poison_deaths=draw(st.integers(2, 5)),
    )
    policy = PolicySettings(
        name=draw(st.sampled_from(PolicyName)),
        handoff=draw(st.sampled_from(Handoff)),
        dispatch=draw(st.sampled_from(Dispatch)),
        correction_max=draw(st.sampled_from([1.0, 4.0])),
        slots_max=draw(st.integers(1, 4)),
        slot_lease_s=draw(st.sampled_from([0.3, 2.0, 30.0])),
        recovery=recovery,
    )
    slo = SloSettings(abort=draw(st.booleans()), recovery_gap_s=draw(st.sampled_from([0.5, 10.0])))
    backup = BackupSettings(
        mode=draw(st.sampled_from(BackupMode)), placement=draw(st.sampled_from(Placement))
    )
    failure_rate = draw(st.sampled_from([0.0, 0.1, 0.4]))
    cluster, one_timer = draw(st.sampled_from(CLUSTERS)), draw(st.booleans())
    engines = draw(st.sampled_from(Engines))
    world = World(
        draw(st.integers(0, 1 << 32)),
        cluster,
        policy,
        slo,
        failure_rate,
        one_timer,
        backup,
        engines,
    )
    world.run(streams=draw(st.integers(1, 25)), kills=draw(st.integers(0, 8)))
    return world


@given(worlds())
@settings(max_examples=300, deadline=None)
def test_every_stream_ends_and_nothing_is_left_in_the_books(world: World) -> None:
    """Complete or given up on, whatever broke; slots, work, bytes in flight, leases and streams are
    back to zero.

    On the way the invariants check that attempt numbers rise by one, that nothing starts where
    nothing is up, that sources hold what is fetched from them, and that transfers never exceed the
    slots.
    """
    assert all(live.outcome for live in world.streams.values())

    world.invariants.check_at_rest(world.control, "the proxy")
    leases, reservations = world.control.leases, world.control.checkpoints.leases
    held = [*leases.batches(renew=True).values(), *reservations.batches(renew=True).values()]
    assert not any(update.renew for update in held)


@given(worlds())
@settings(max_examples=50, deadline=None)
def test_the_same_events_lead_to_the_same_actions(world: World) -> None:
    """A recorded incident can be run again."""
    again = RecoveryPolicy(world.config.policy, world.config.slo, world.config.backup)

    assert [again.handle(event, now_s) for event, now_s in world.log] == world.answers


@given(worlds())
@settings(max_examples=50, deadline=None)
def test_wake_ups_are_few(world: World) -> None:
    """No storm of timers: a wake-up is asked for only because of an alarm that some event has
    set.
    """
    wakes = sum(isinstance(action, act.WakeAt) for answer in world.answers for action in answer)

    assert wakes <= 2 * len(world.log)


def test_generated_worlds_cover_every_option() -> None:
    """Guards the tests above: every option, kind of end, way of combining sources and queue for
    slots must really occur.
    """
    options: Counter[Option] = Counter()
    outcomes: Counter[str] = Counter()
    actions: Counter[str] = Counter()
    combined = protected = cached = one_call = denials = 0
    for seed in range(115):
        world = World(
            seed,
            CLUSTERS[seed // 5 % 5],
            settings_for(seed),
            SloSettings(abort=seed % 3 == 0, recovery_gap_s=1.0),
            failure_rate=0.2,
            one_timer=True,
            backup=BackupSettings(mode=list(BackupMode)[seed % 4], capacity_bytes=1 << 30),
            engines=Engines.OURS if seed < 75 else list(Engines)[1 + seed % 3],
        )
        world.run(streams=20, kills=6)
        outcomes.update(live.outcome for live in world.streams.values())
        for action in (action for answer in world.answers for action in answer):
            actions[type(action).__name__] += 1
            if isinstance(action, act.Recovered):
                options[action.option] += 1
            elif isinstance(action, act.Start):
                combined += len(action.plan.runs) > 1
                protected += bool(action.plan.places)
            cached += isinstance(action, act.Recovered) and any(
                each.by_prefill for each in action.estimates
            )
        denials += world.denials
        one_call += world.one_calls

    # No engine of these worlds generates known output again.
    assert set(options) == set(Option) - {Option.ABORT, Option.REPLAY}
    assert set(outcomes) == {*("complete", "no_instance", "overloaded", "slo", "retries", "poison")}
    assert set(actions) == {kind.__name__ for kind in get_args(act.Action)}
    assert (
        min(
            *options.values(),
            *outcomes.values(),
            *actions.values(),
            combined,
            protected,
            cached,
            one_call,
            denials,
        )
        > 5
    ), (
        options,
        outcomes,
        actions,
    )


def settings_for(seed: int) -> PolicySettings:
    recovery: dict[str, Any] = {
        "wait_s": 0.5 if seed % 4 == 0 else 20.0,
        "max_attempts": 3 if seed % 2 else 20,
        "poison_deaths": 2,
    }
    return PolicySettings(
        name=PolicyName.AUTO if seed % 7 == 0 else list(PolicyName)[seed % 5],
        handoff=list(Handoff)[seed % 3],
        slots_max=1 + seed % 2,
        recovery=RecoverySettings(**recovery),
    )
