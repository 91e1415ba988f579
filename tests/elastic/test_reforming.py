"""Whatever is lost and whenever, an instance serves again with what is left, or says why not."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.cluster import Planner
from kvrs_engine.elastic import cmm, on_demand
from kvrs_engine.elastic.layouts import SPREAD, Layout, staged, uneven, validate
from kvrs_engine.elastic.moving import LinkRates
from kvrs_engine.elastic.plans import HOST
from kvrs_engine.elastic.reforming import (
    Action,
    CarryOut,
    EndInstance,
    FormRanks,
    Freeze,
    LoadShifted,
    ProbeEnded,
    ProbeStep,
    RankJoined,
    RankLeaving,
    RankOffered,
    RanksLost,
    Reforming,
    ReformingPhase,
    RoomMissing,
    Serve,
    UnitArrived,
)
from kvrs_engine.elastic.units import UnitKind, Units
from kvrs_engine.elastic.ways import PLANNERS as BY_NAME
from kvrs_engine.elastic.ways import Costs, Room, StreamAtRisk, Way
from kvrs_testkit.examples import examples
from kvrs_testkit.layouts import even, rotated
from kvrs_testkit.planned import host_bytes_by_rank
from kvrs_testkit.reforming import answers, carry_through

PLANNERS: list[Planner] = [*BY_NAME]
UNITS = Units(2, (128,) * 4, (64,) * 8, (64,) * 4, 32)
ROOM = Room(capacity_bytes=10_000, cell_bytes=8, pages=10)
COSTS = Costs(rates=LinkRates(100.0, 1000.0), join_s=0.01, restart_s=0.2, lookahead_tokens=32)
LOST = RanksLost(frozenset({1}))
UNITS_OF_0 = even(UNITS, 4).held(0)


def machine(tp: int = 4, pp: int = 1, **changes: object) -> Reforming:
    given = {"room": ROOM, "costs": COSTS} | changes
    return Reforming(UNITS, even(UNITS, tp, pp), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_lost_rank_is_done_without(planner: Planner) -> None:
    own = machine(planner=planner)

    done = carry_through(own, own.handle(LOST))

    assert [type(action) for action in done] == [
        Freeze,
        CarryOut,
        Freeze,
        FormRanks,
        ProbeStep,
        Serve,
    ]
    assert own.layout.ranks == (0, 2, 3)
    assert own.phase is ReformingPhase.SERVING
    assert own.layout.number == 2


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_has_arrived_is_not_read_again_after_a_further_loss(planner: Planner) -> None:
    """The plan of the second loss takes the first one's bytes from where they are."""
    own = machine(planner=planner)
    first = own.handle(LOST)
    assert isinstance(first[1], CarryOut)
    before = {(move.unit, move.target) for move in first[1].plan.moves if move.source == HOST}
    for event in answers(first[1])[:-1]:
        own.handle(event)

    second = own.handle(RanksLost(frozenset({3})))

    assert isinstance(second[1], CarryOut)
    kept = {unit for unit, target in before if target != 3}
    read = {move.unit for move in second[1].plan.moves if move.source == HOST}
    assert kept - read, "something had arrived"
    assert read & kept <= {answers(first[1])[-1].unit}  # type: ignore[union-attr]
    carry_through(own, second)
    assert own.layout.ranks == (0, 2)


@pytest.mark.parametrize("spread", [False, True])
def test_the_plan_of_cmm_stands_beside_that_of_on_demand(spread: bool) -> None:
    """Both read what is lost; copies between ranks are those of even contiguous shares. Where ranks
    stay the same, or the planner is on_demand, there is no other plan.
    """
    own, other = machine(planner="cmm", spread=spread), machine(spread=spread)
    found, plain = own.handle(LOST)[1], other.handle(LOST)[1]
    assert isinstance(found, CarryOut)
    assert isinstance(plain, CarryOut)

    beside = own.on_demand_for(found.plan.after)

    assert beside == plain.plan
    assert found.plan.after == cmm.reshaped(even(UNITS, 4), UNITS, [[0, 2, 3]], spread=spread)
    assert found.plan.host_bytes == beside.host_bytes
    assert found.plan.peer_bytes > beside.peer_bytes
    assert own.on_demand_for(own.layout) is None
    assert other.on_demand_for(plain.plan.after) is None


def test_memory_that_other_ranks_can_have_is_not_read_from_the_host() -> None:
    """Ranks copy the memory of a process that is gone, unless its device is lost too."""
    costs = replace(COSTS, rates=LinkRates(100.0, 1e6), kept_is_readable=True)
    own = machine(costs=costs, spread=False)

    kept = own.handle(replace(LOST, memory_kept=True))[1]
    lost = own.handle(LOST)[1]

    assert isinstance(kept, CarryOut)
    assert isinstance(lost, CarryOut)
    assert (kept.way, kept.plan.host_bytes) == (Way.RESHARD, 0)
    assert {move.source for move in kept.plan.moves} == {1}
    assert lost.plan.host_bytes == kept.plan.peer_bytes
    carry_through(own, [lost])
    assert own.layout.ranks == (0, 2, 3)


def test_a_process_whose_memory_is_kept_is_started_again() -> None:
    """AnchorTP's crash: nothing moves at all."""
    own = machine(costs=replace(COSTS, rates=LinkRates(1.0, 1.0)))

    done = carry_through(own, own.handle(replace(LOST, memory_kept=True)))

    assert isinstance(done[1], CarryOut)
    assert (done[1].way, done[1].fresh, done[1].plan.moves) == (Way.RESTART, frozenset({1}), ())
    assert own.layout.ranks == (0, 1, 2, 3)


def test_the_way_with_the_least_waiting_of_all_streams_is_taken() -> None:
    """A restart that takes longer is cheaper where it saves what the streams would restore; streams
    that had better leave do not count against it.
    """
    costs = replace(COSTS, rates=LinkRates(1e6, 1e7), restart_s=1.0)
    lost = replace(LOST, memory_kept=True)
    cases = {
        Way.RESHARD: (StreamAtRisk(restore_s=0.1),) * 5,
        Way.RESTART: (StreamAtRisk(restore_s=5.0),) * 5,
    }

    for way, streams in cases.items():
        own = machine(costs=costs, spread=False)
        began = own.handle(replace(lost, streams=streams))[1]
        assert isinstance(began, CarryOut)
        assert began.way is way

    slow = replace(costs, step_s=lambda layout: 1.0 if len(layout.ranks) < 4 else 0.01)
    began = machine(costs=slow).handle(replace(lost, streams=cases[Way.RESHARD]))[1]
    assert isinstance(began, CarryOut)
    assert began.way is Way.RESTART


def test_a_replacement_is_waited_for_where_there_is_no_other_way() -> None:
    own = machine(min_ranks=4, costs=replace(COSTS, replace_s=30.0))

    done = carry_through(own, own.handle(LOST))

    assert isinstance(done[1], CarryOut)
    assert (done[1].way, done[1].fresh) == (Way.REPLACE, frozenset({1}))
    assert done[1].ready_s > 30
    assert {move.target for move in done[1].plan.moves} == {1}
    assert ProbeStep in map(type, done), "the layout is the same one, the process is not"
    assert own.layout.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "lost", "said"),
    [
        ({"min_ranks": 3}, {0, 1}, "2 ranks are left, elastic.min_ranks is 3"),
        ({"pp": 2, "tp": 2}, {2, 3}, r"no rank is left for layers \[1, 2\)"),
        (
            {"room": replace(ROOM, capacity_bytes=1500)},
            {0, 1, 2},
            "1 ranks are left, and the fullest lacks 1476 bytes of memory",
        ),
    ],
)
def test_without_a_way_the_instance_ends_and_says_why(
    changes: dict[str, object], lost: set[int], said: str
) -> None:
    own = machine(**changes)  # type: ignore[arg-type]

    (given_up,) = own.handle(RanksLost(frozenset(lost)))

    assert isinstance(given_up, EndInstance)
    assert re.search(said, given_up.reason), given_up.reason
    assert own.phase is ReformingPhase.GIVEN_UP
    assert own.handle(LOST) == []


def test_other_bits_in_the_probe_step_end_the_instance() -> None:
    own = machine()
    actions = own.handle(LOST)
    for action in list(actions):
        for event in answers(action):
            actions = own.handle(event) or actions
    for event in answers(actions[-1]):
        own.handle(event)

    (given_up,) = own.handle(ProbeEnded(own.epoch, equal=False))

    assert isinstance(given_up, EndInstance)


def test_ranks_leave_and_join_while_the_others_serve() -> None:
    """Nothing is frozen before the weights are there, and nothing is read from the host."""
    own = machine()

    left = own.handle(RankLeaving(2))
    assert isinstance(left[0], CarryOut)
    assert left[0].plan.host_bytes == 0
    assert ProbeStep in map(type, carry_through(own, left))
    assert list(own.layout.ranks) == [0, 1, 3]

    joined = own.handle(RankOffered(7, stage=0))
    assert isinstance(joined[0], CarryOut)
    carry_through(own, joined)
    assert list(own.layout.ranks) == [0, 1, 3, 7]
    assert own.phase is ReformingPhase.SERVING


def test_two_ranks_that_are_lost_at_once_are_done_without() -> None:
    """One plan for both, which reads each lost unit once."""
    own = machine()
    lost = (own.layout.held(1) | own.layout.held(2)) - UNITS_OF_0

    done = carry_through(own, own.handle(RanksLost(frozenset({1, 2}))))

    assert isinstance(done[1], CarryOut)
    read = [move for move in done[1].plan.moves if move.source == HOST]
    assert {move.unit for move in read} == lost
    assert sum(move.bytes for move in read) == sum(map(UNITS.bytes_of, lost))
    assert own.layout.ranks == (0, 3)


EXPERTS = replace(UNITS, expert_parts=1)


def shifted(layout: Layout) -> LoadShifted:
    copies = (((0, 1), (0, 2)), ((7, 0),))
    return LoadShifted(replace(layout, copies=copies, number=layout.number + 1))


def test_copies_come_while_the_ranks_serve() -> None:
    """They are copied from their owners, and nothing is frozen before they are there; that they
    are right is known when they come, and no step is computed for it.
    """
    own = Reforming(EXPERTS, even(EXPERTS, 4), ROOM, COSTS)
    wanted = shifted(own.layout)

    began = own.handle(wanted)
    assert own.handle(wanted) == [], "not while something else is under way"
    done = carry_through(own, began)

    assert [type(action) for action in done] == [CarryOut, Freeze, FormRanks, Serve]
    assert isinstance(done[0], CarryOut)
    assert (done[0].way, done[0].plan.host_bytes) == (Way.RESIZE, 0)
    assert done[0].plan.peer_bytes == 3 * 64
    assert own.layout is wanted.layout


def test_copies_without_room_or_of_other_ranks_do_not_come() -> None:
    own = Reforming(EXPERTS, even(EXPERTS, 4), ROOM, COSTS)
    least = max(own.layout.weight_bytes(rank, EXPERTS) for rank in range(4))

    own.room = replace(ROOM, capacity_bytes=least + 200)
    assert own.handle(shifted(own.layout)) == []
    own.room = ROOM
    assert own.handle(shifted(even(EXPERTS, 2))) == []
    assert own.phase is ReformingPhase.SERVING


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_is_lost_while_copies_come_is_done_without(
    victim: int, planner: Planner
) -> None:
    """Their owner, the rank that gets one, or another one; the layout of before is what counts."""
    own = Reforming(EXPERTS, even(EXPERTS, 4), ROOM, COSTS, spread=False, planner=planner)
    (began,) = own.handle(shifted(own.layout))
    for event in answers(began)[:-1]:
        own.handle(event)

    done = carry_through(own, own.handle(RanksLost(frozenset({victim}))))

    assert isinstance(done[-1], Serve)
    assert victim not in own.layout.ranks
    validate(own.layout, EXPERTS)
    assert isinstance(done[1], CarryOut)
    assert done[1].way is Way.RESHARD


@pytest.mark.parametrize("victim", [0, 7])
def test_a_rank_that_is_lost_while_ranks_join_is_done_without(victim: int) -> None:
    """One that served, or the one that was to join: nothing serves in the broken formation, and
    nothing is moved twice.
    """
    own = machine()
    (moving,) = own.handle(RankOffered(7, stage=0))
    joining = [action for event in answers(moving) for action in own.handle(event)]
    assert [type(action) for action in joining] == [Freeze, FormRanks]
    late = answers(joining[1])

    lost = own.handle(RanksLost(frozenset({victim}), memory_kept=victim == 7))
    ignored = [action for event in late for action in own.handle(event)]
    done = carry_through(own, lost)

    assert ignored == []
    assert isinstance(done[1], CarryOut)
    assert not {move.unit for move in done[1].plan.moves} - UNITS_OF_0
    assert isinstance(done[-1], Serve)
    left = {0, 1, 2, 3} - {victim}
    assert done[-1].layout.ranks == tuple(sorted(left))
    validate(done[-1].layout, UNITS)


def test_a_process_that_was_started_again_is_not_started_twice() -> None:
    """Another one is lost meanwhile: the new one goes on starting, or is done without, and either
    way is as long as it is.
    """
    own = machine(min_ranks=3, costs=replace(COSTS, rates=LinkRates(1e6, 1e7)))
    kept = RanksLost(frozenset({2, 3}), memory_kept=True)
    began = own.handle(kept)[1]
    assert isinstance(began, CarryOut)
    assert began.fresh == {2, 3}

    again = own.handle(RanksLost(frozenset({3}), memory_kept=True))[1]

    assert isinstance(again, CarryOut)
    assert (again.way, again.fresh) == (Way.RESTART, frozenset({3}))
    assert min(choice.ready_s for choice in own.choices()) > COSTS.restart_s
    own.min_ranks = 2
    assert min(choice.ready_s for choice in own.choices()) < COSTS.restart_s


@pytest.mark.parametrize(
    ("changes", "rank", "said"),
    [
        ({}, 4, "rank: got 4; allowed: 0, 1, 2, 3"),
        ({"min_ranks": 4}, 2, "3 ranks are left, elastic.min_ranks is 4"),
        ({"tp": 1, "pp": 2}, 1, r"no rank is left for layers \[1, 2\)"),
        (
            {"room": replace(ROOM, capacity_bytes=900)},
            2,
            r"3 ranks are left, and the fullest lacks \d+ bytes of memory",
        ),
    ],
)
def test_a_rank_that_is_needed_does_not_leave(
    changes: dict[str, object], rank: int, said: str
) -> None:
    """It says why, and nothing changes; nothing is lost, so the instance goes on."""
    own = machine(**changes)  # type: ignore[arg-type]

    assert re.fullmatch(said, own.why_it_stays(rank) or ""), own.why_it_stays(rank)
    assert own.handle(RankLeaving(rank)) == []
    assert own.phase is ReformingPhase.SERVING


def test_a_rank_leaves_only_while_all_serve() -> None:
    own = machine()
    own.handle(LOST)

    assert own.why_it_stays(2) == "the ranks are moving; allowed: while the ranks are serving"
    assert own.handle(RankLeaving(2)) == []


def test_a_leaving_rank_that_dies_before_it_has_left_is_a_lost_one() -> None:
    """The units that it had sent count, and the rest comes from the host."""
    own = machine()
    (left,) = own.handle(RankLeaving(2))
    *arrived, missing = answers(left)
    for event in arrived:
        own.handle(event)
    assert isinstance(missing, UnitArrived)

    done = carry_through(own, own.handle(RanksLost(frozenset({2}))))

    assert isinstance(done[1], CarryOut)
    assert {move.unit for move in done[1].plan.moves if move.source == HOST} == {missing.unit}
    assert own.layout.ranks == (0, 1, 3)


def test_without_room_for_a_change_the_ranks_serve_as_before() -> None:
    """Where ranks are lost there is no before: the instance ends, and says how much is missing."""
    reason = "no room for 9 bytes of shared memory"
    for event in (RankLeaving(2), RankOffered(7, stage=0)):
        own = machine()
        own.handle(event)
        phases = [own.phase]
        for epoch in (own.epoch - 1, own.epoch):
            assert own.handle(RoomMissing(epoch, reason)) == []
            phases.append(own.phase)
        assert phases == ["moving", "moving", "serving"]
        layouts = [own.layout.ranks]
        carry_through(own, own.handle(RankLeaving(1)))
        layouts.append(own.layout.ranks)
        assert layouts == [(0, 1, 2, 3), (0, 2, 3)]

    own = machine()
    own.handle(LOST)
    assert own.handle(RoomMissing(own.epoch, reason)) == [EndInstance(reason)]


def test_without_room_for_a_formation_the_ranks_form_again_as_before() -> None:
    """Where none was lost, and once; else the instance ends and says how much is missing."""
    reason = "no room for 9 bytes of shared memory"
    for event in (RankLeaving(2), RankOffered(7, stage=0)):
        own = machine()
        before = own.layout
        for arrived in [each for began in own.handle(event) for each in answers(began)]:
            own.handle(arrived)
        assert own.phase is ReformingPhase.JOINING

        again = own.handle(RoomMissing(own.epoch, reason))

        assert [type(action) for action in again] == [CarryOut, Freeze, FormRanks]
        assert again[-1] == FormRanks(own.epoch, before)
        carry_through(own, again)
        assert own.layout is before

        for arrived in [each for began in own.handle(event) for each in answers(began)]:
            own.handle(arrived)
        own.handle(RoomMissing(own.epoch, reason))
        assert own.handle(RoomMissing(own.epoch, reason)) == [EndInstance(reason)]

    own = machine()
    for arrived in [each for began in own.handle(LOST) for each in answers(began)]:
        own.handle(arrived)
    assert own.handle(RoomMissing(own.epoch, reason)) == [EndInstance(reason)]


def test_bytes_of_a_dead_process_do_not_count_for_its_successor() -> None:
    own = machine(min_ranks=4, costs=replace(COSTS, replace_s=30.0))
    first = own.handle(LOST)
    own.handle(LOST)
    late = answers(first[1])[0]
    assert isinstance(late, UnitArrived)

    own.handle(late)
    third = own.handle(RanksLost(frozenset({2})))

    assert isinstance(third[1], CarryOut)
    moved = {move.unit for move in third[1].plan.moves if move.target == 1}
    assert late.unit in moved


def test_late_reports_of_a_lost_rank_make_it_no_source() -> None:
    """Bytes that were said to be at a rank are gone with it, whenever the report comes."""
    own = machine()
    carry_through(own, own.handle(RankLeaving(2)))
    before = own.epoch
    carry_through(own, own.handle(LOST))
    for unit in UNITS.all():
        own.handle(UnitArrived(before, 1, unit))

    (grown, *_) = own.handle(RankOffered(7, stage=0))

    assert isinstance(grown, CarryOut)
    assert {move.source for move in grown.plan.moves} <= {0, 3}


def test_a_rank_that_is_gone_already_is_not_lost_again() -> None:
    own = machine()
    own.handle(LOST)

    assert own.handle(LOST) == []


def test_units_of_a_rank_that_was_to_join_are_not_read_once_it_is_lost() -> None:
    """Its joining was broken off by a loss, so no layout has it."""
    own = Reforming(
        UNITS, uneven(UNITS, staged(2, [range(1)])), ROOM, replace(COSTS, replace_s=1.0)
    )
    (grown, *_) = own.handle(RankOffered(51, stage=0))
    assert isinstance(grown, CarryOut)
    own.handle(RanksLost(frozenset({0})))
    own.handle(UnitArrived(grown.epoch, 51, grown.plan.moves[0].unit))

    _, again, *_ = own.handle(RanksLost(frozenset({51})))

    assert isinstance(again, CarryOut)
    assert {move.source for move in again.plan.moves} == {HOST}


def test_ranks_are_awaited_that_no_other_has_to_be_awaited_for() -> None:
    """One that copies a unit from another, once that has read it, is not to blame before."""
    own = machine(in_pieces=False)
    assert own.awaited == frozenset()
    _, began = own.handle(LOST)
    assert isinstance(began, CarryOut)
    moves = began.plan.moves
    reader, unit = next(
        (move.source, move.unit)
        for move in moves
        if any((move.source, move.unit) == (other.target, other.unit) for other in moves)
    )
    assert own.awaited == {move.target for move in moves if move.source == HOST}
    behind = {move.target for move in moves if (move.source, move.unit) == (reader, unit)}
    late = [event for event in answers(began) if getattr(event, "unit", None) == unit]
    for event in answers(began):
        if event not in late:
            assert own.handle(event) == []

    assert own.awaited == {reader}
    assert own.handle(UnitArrived(own.epoch, reader, unit)) == []
    assert own.awaited == behind
    joining = [action for event in late for action in own.handle(event)]
    assert own.phase is ReformingPhase.JOINING
    assert own.awaited == {0, 2, 3}
    own.handle(RankJoined(own.epoch, 2))
    assert own.awaited == {0, 3}
    carry_through(own, joining)
    assert own.awaited == frozenset()


@examples(60)
@given(st.data())
def test_ranks_that_hang_are_those_that_are_awaited(data: st.DataObject) -> None:
    """However many hang, and whenever: once all others have said what they have to say, only ranks
    that hang are awaited, and without them the instance serves or says why not.
    """
    tp = data.draw(st.integers(2, 5))
    costs = replace(COSTS, replace_s=data.draw(st.sampled_from([1.0, float("inf")])))
    layout = uneven(UNITS, staged(2, [range(tp)]))
    planner = data.draw(st.sampled_from(PLANNERS))
    own = Reforming(UNITS, layout, ROOM, costs, planner=planner, in_pieces=False)
    world, ranks = World(own), st.integers(0, tp - 1)
    world.lose(frozenset({data.draw(ranks)}), memory_kept=data.draw(st.booleans()))

    while own.phase in (ReformingPhase.MOVING, ReformingPhase.JOINING):
        for _ in range(data.draw(st.integers(0, 8))):
            world.step(data.draw(st.integers(0, 20)))
        # Each only once: a process that is started again does not hang.
        if data.draw(st.booleans()) and (may := world.alive & world.first - world.silent):
            world.silent.add(data.draw(st.sampled_from(sorted(may))))
        while world.ready:
            world.step(None)
        assert bool(own.awaited) == (
            own.phase in (ReformingPhase.MOVING, ReformingPhase.JOINING)
        ), "else nothing would ever be heard"
        assert own.awaited <= world.silent
        world.lose(own.awaited, memory_kept=data.draw(st.booleans()))

    assert own.phase in (ReformingPhase.SERVING, ReformingPhase.GIVEN_UP)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("spread", [False, True])
def test_ranks_of_other_stages_are_neither_asked_nor_moved(spread: bool, planner: Planner) -> None:
    """Each of several nodes has one stage of the layout: what it has lost is all that changes, also
    where the heads of other stages are not dealt as they would be dealt now.
    """
    stages = staged(2, [range(3), range(4, 7)])
    before = rotated(UNITS, stages)
    own = Reforming(UNITS, before, ROOM, COSTS, planner=planner, spread=spread, stages=range(1, 2))

    done = carry_through(own, own.handle(RanksLost(frozenset({5}))))

    began = done[1]
    assert isinstance(began, CarryOut)
    assert {move.target for move in began.plan.moves} <= {4, 6}
    assert own.layout.stages[1].ranks == (4, 6)
    for rank in range(3):
        assert own.layout.held(rank) == before.held(rank)
    assert own.why_it_stays(0) == "rank: got 0; allowed: 4, 6"


@examples(60)
@given(st.data())
def test_any_losses_at_any_moment_end_in_serving_or_giving_up(data: st.DataObject) -> None:
    """Epochs rise, no move reads what is gone, every layout is whole and of living ranks."""
    tp = data.draw(st.integers(1, 4))
    stages = staged(2, [range(tp)] if data.draw(st.booleans()) else [range(tp), range(9, 9 + tp)])
    costs = replace(COSTS, replace_s=data.draw(st.sampled_from([1.0, float("inf")])))
    planner = data.draw(st.sampled_from(PLANNERS))
    world = World(Reforming(UNITS, uneven(UNITS, stages), ROOM, costs, planner=planner))

    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 12))):
            world.step(data.draw(st.integers(0, 20)))
        ranks = st.sampled_from(sorted(world.alive)) if world.alive else st.nothing()
        lost = frozenset(data.draw(st.lists(ranks, max_size=2)) if world.alive else ())
        world.lose(lost, memory_kept=data.draw(st.booleans()))
        if data.draw(st.booleans()):
            world.offer()
        if data.draw(st.booleans()) and world.own.layout.ranks:
            serving = st.sampled_from(sorted(world.own.layout.ranks))
            world.leave(data.draw(serving))
    while world.queue:
        world.step(None)

    assert world.own.phase in (ReformingPhase.SERVING, ReformingPhase.GIVEN_UP)


Report = UnitArrived | RankJoined | ProbeEnded


class World:
    """The ranks of a machine: which live, which have memory, and what they still have to do."""

    def __init__(self, own: Reforming) -> None:
        self.own = own
        self.alive, self.memory = set(own.layout.ranks), set(own.layout.ranks)
        self.first = frozenset(own.layout.ranks)  # That were never started again.
        self.silent: set[int] = set()  # They hang.
        self.queue: list[Report] = []
        self._epoch = own.epoch
        self._behind: dict[Report, Report] = {}  # What is copied, by what is to come.

    def lose(self, ranks: frozenset[int], *, memory_kept: bool) -> None:
        self.alive -= ranks
        self.first -= ranks
        self.silent -= ranks
        self.memory -= frozenset() if memory_kept else ranks
        self._do(self.own.handle(RanksLost(ranks, memory_kept=memory_kept)))

    def offer(self) -> None:
        new = 50 + len(self.alive)
        if new not in self.alive:
            self.alive.add(new)
            self.memory.add(new)
            self._do(self.own.handle(RankOffered(new, stage=0)))

    def leave(self, rank: int) -> None:
        """It lives, and can be read, until the others serve without it."""
        self._do(self.own.handle(RankLeaving(rank)))

    @property
    def ready(self) -> list[Report]:
        """Reports of ranks that do not hang and have what they copy."""
        coming = set(self.queue)
        return [
            event
            for event in self.queue
            if isinstance(event, ProbeEnded)
            or (event.rank not in self.silent and coming.isdisjoint(self._before(event)))
        ]

    def _before(self, event: Report) -> list[Report]:
        return [self._behind[event]] if event in self._behind else []

    def step(self, index: int | None) -> None:
        """A report of a rank that lives is heard, in any order."""
        if ready := self.ready:
            event = ready[0 if index is None else index % len(ready)]
            self.queue.remove(event)
            if isinstance(event, ProbeEnded) or event.rank in self.alive:
                self._do(self.own.handle(event))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, CarryOut):
                assert action.epoch > self._epoch
                self._epoch = action.epoch
                if action.way is not Way.RESIZE:
                    assert not action.fresh & self.alive, "no living process is started again"
                self.alive |= action.fresh
                self.memory |= action.fresh
                assert {move.source for move in action.plan.moves} - {HOST} <= self.alive
                assert {move.target for move in action.plan.moves} <= self.alive
                if not self.own.in_pieces:
                    self._behind |= {
                        UnitArrived(action.epoch, move.target, move.unit): UnitArrived(
                            action.epoch, move.source, move.unit
                        )
                        for move in action.plan.moves
                    }
            if isinstance(action, Serve):
                validate(action.layout, UNITS)
                assert set(action.layout.ranks) <= self.alive & self.memory
                self.alive &= set(action.layout.ranks)  # The others are ended.
            self.queue += answers(action)


def test_slower_steps_count_only_until_the_lost_rank_is_back() -> None:
    """Where it is started beside the others, going on with them is never dearer than waiting for
    it; without that, the look-ahead may be.
    """
    steps = {4: 1.0, 3: 1.4}
    costs = replace(COSTS, restart_s=10.0, step_s=lambda layout: steps[len(layout.ranks)])
    streams = (StreamAtRisk(0.0),)
    kept = RanksLost(frozenset({1}), memory_kept=True, streams=streams)

    for back_s, way in ((float("inf"), Way.RESTART), (10.0, Way.RESHARD)):
        own = machine(costs=replace(costs, back_s=back_s))
        own.handle(kept)
        assert own.choices()[0].way is way


@given(
    tp=st.sampled_from([2, 4, 8]), lost=st.sets(st.integers(0, 7), min_size=1), again=st.booleans()
)
def test_heads_that_cannot_be_spread_have_one_rank_each(
    tp: int, lost: set[int], again: bool
) -> None:
    """In a layer no rank has two more than another; heads that are kept stay where they are."""
    units = Units(3, (128,) * 8, (64,) * 8, (64,) * 8, 32)
    before = even(units, tp)
    left = [rank for rank in before.ranks if rank not in lost]
    if not left:
        return
    after = on_demand.reshaped(before, units, [left], spread=False)
    if again:
        after = on_demand.reshaped(after, units, [before.ranks], spread=False)

    validate(after, units)
    for owners, old in zip(after.attention, before.attention, strict=True):
        assert SPREAD not in owners
        counts = [owners.count(rank) for rank in after.ranks]
        assert max(counts) - min(counts) <= 1
        if not again:
            kept = [(new, was) for new, was in zip(owners, old, strict=True) if was in left]
            assert all(new == was for new, was in kept)


def test_heads_stay_whole_where_those_that_are_spread_have_no_room() -> None:
    """Each rank would have the weights of all of them."""
    whole = machine(spread=False).handle(LOST)[1]
    hybrid = machine().handle(LOST)[1]
    assert isinstance(whole, CarryOut)
    assert isinstance(hybrid, CarryOut)
    after = hybrid.plan.after
    room = replace(ROOM, capacity_bytes=0)
    short = room.missing_bytes(after, UNITS) - 1

    tight = machine(room=replace(room, capacity_bytes=short)).handle(LOST)[1]

    assert isinstance(tight, CarryOut)
    assert any(SPREAD in owners for owners in after.attention)
    assert tight.plan.after == whole.plan.after


def test_ranks_that_exchange_no_pieces_read_each_unit_once() -> None:
    """One of those that want a unit reads it, in turn, and the others copy it."""
    began = machine(in_pieces=False).handle(LOST)[1]

    assert isinstance(began, CarryOut)
    moves = began.plan.moves
    assert {(move.start, move.stop) for move in moves} == {
        (0, UNITS.bytes_of(move.unit)) for move in moves
    }
    reads = {move.unit: move.target for move in moves if move.source == HOST}
    copies = [move for move in moves if move.source != HOST]
    assert began.plan.host_bytes == sum(map(UNITS.bytes_of, reads))
    assert {move.unit for move in copies if move.unit.kind == UnitKind.ATTENTION}
    assert all(move.source == reads[move.unit] for move in copies)
    read = host_bytes_by_rank(began.plan).values()
    assert max(read) - min(read) <= max(map(UNITS.bytes_of, reads))
