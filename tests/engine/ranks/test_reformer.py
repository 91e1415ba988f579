"""The process of an instance re-forms as its ranks die, join, leave and come back, whatever they do
meanwhile. The ranks are scripted.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvrs.errors import KvrsError
from kvrs_engine.elastic import waiting
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.reforming import ReformingPhase
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.ranks.seats import Answered
from kvrs_engine.engine.ranks.wire import Loaded
from kvrs_engine.engine.ranks.yielding import COPY_NICE
from kvrs_testkit.layouts import even
from tests.engine.ranks.scripted_ranks import UNITS, ScriptedGroup, ScriptedSeat, scripted

ALL = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rank is started again at once."""
    monkeypatch.setattr(waiting, "AGAIN_S", 0.001)


def then(what: Callable[[], object]) -> Callable[[Any], None]:
    def hook(_: object) -> None:
        what()

    return hook


def no_formation(group: ScriptedGroup, times: int) -> None:
    """So many times there is no memory for one."""
    form = group.form

    def fail(epoch: int, layout: Layout) -> Any:
        nonlocal times
        times -= 1
        if times >= 0:
            raise KvrsError("no room for 9 bytes of shared memory")
        return form(epoch, layout)

    group.form = fail  # type: ignore[method-assign]


def test_without_memory_for_a_rank_that_joins_the_others_serve_on() -> None:
    """Nothing is lost by it; the rank is tried again."""
    with scripted() as group:

        def leave_no_room(_: object) -> None:
            group.processes.room_bytes = 0

        group.processes.hooks["load"] = leave_no_room
        group.lose(3)
        group.until_serving(0, 1, 2)
        first = waiting.MissingRank(0.0)
        missing = group.machine.waiting.missing  # Without the rank while it joins.
        group.until(
            lambda: missing.get(3, first).wait_s > first.wait_s and group.reformer.now is None
        )
        assert group.layout.ranks == (0, 1, 2)
        assert len(group.done) == 1
        group.processes.room_bytes = 1e9
        group.hurry(3)
        group.until_serving(*ALL)

        assert group.ended is None
        assert [each.way for each in group.done] == [Way.RESHARD, Way.RESIZE]


def test_without_memory_for_a_formation_of_more_the_others_serve_on() -> None:
    with scripted() as group:
        first = dict(group.processes.seats)
        group.processes.hooks["load"] = then(lambda: no_formation(group, times=1))
        group.lose(3)
        group.until(lambda: len(group.done) >= 2)

        assert [each.degree for each in group.done[:2]] == [3, 3]
        group.until(lambda: group.reformer.now is None)
        group.hurry(3)
        group.until_serving(*ALL)
        assert all(group.processes.seats[rank] is first[rank] for rank in (0, 1, 2))
        assert group.processes.starts == {3: 2}
        assert group.ended is None


def test_a_restart_is_predicted_by_the_start_before_it() -> None:
    """The start of all ranks takes longer than that of one: 9 s here, where one takes no time."""
    with scripted(min_ranks=4) as group:
        group.lose(3)
        group.until(lambda: len(group.done) == 1)
        group.lose(3)
        group.until(lambda: len(group.done) == 2)
        first, second = group.done

        assert (first.way, second.way) == (Way.RESTART, Way.RESTART)
        assert first.predicted_s > 9.0
        assert second.predicted_s < 1.0
        assert group.machine.costs.back_s < 9.0


def test_a_restart_is_predicted_without_what_the_start_before_did_ahead() -> None:
    """A rank that the others wait for proves nothing for later losses; one that starts beside them
    does.
    """
    with scripted(min_ranks=4) as group:

        def takes_long(seat: ScriptedSeat) -> bool:
            seat.began_s -= 100.0
            loaded: Any = Answered(seat, Loaded(b"", {}, ahead_s=100.0))  # type: ignore[arg-type]
            group.processes.tell([loaded])
            return False

        group.processes.hooks["load"] = takes_long
        group.lose(3)
        group.until(lambda: len(group.done) == 1)

        assert group.machine.costs.restart_s < 9.0
        assert group.machine.costs.back_s > 100.0


def test_what_a_restart_takes_after_the_start_is_learned_without_the_start() -> None:
    """8 s were predicted and almost none are taken; a start that takes 100 s is no part of it."""
    with scripted(min_ranks=4) as group:
        group.machine.costs = replace(group.machine.costs, join_s=8.0)

        def takes_long(seat: ScriptedSeat) -> None:
            assert group.reformer._begun is not None
            seat.began_s -= 100.0
            group.reformer._begun.began_s -= 100.0

        group.processes.hooks["load"] = takes_long
        group.lose(3)
        group.until(lambda: len(group.done) == 1)

        assert group.machine.costs.restart_s > 100.0
        assert 4.0 <= group.machine.costs.join_s < 8.0


def test_nothing_is_learned_of_a_restart_that_a_further_loss_breaks_off() -> None:
    """Time that was wasted is no part of the next prediction."""
    with scripted(min_ranks=4) as group:
        group.processes.hooks["form"] = then(lambda: group.lose(2))
        group.lose(3)
        group.until(lambda: len(group.done) == 1)

        assert group.machine.costs.join_s == 0.01


@pytest.mark.parametrize(
    ("processors", "ranks", "factor"),
    [(8, 2, 2.0), (4, 2, 2.0), (2, 2, 1.0), (2, 1, 2.0), (1, 1, 1.0)],
)
def test_ranks_that_share_processors_are_no_slower_with_fewer(
    monkeypatch: pytest.MonkeyPatch, processors: int, ranks: int, factor: float
) -> None:
    """The instance has four ranks, which compute with one thread each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    with scripted() as group:
        assert group.reformer.factors(even(UNITS, ranks)) == pytest.approx((factor, factor))


@pytest.mark.parametrize(
    ("processors", "way"), [(4, Way.RESTART), (2, Way.RESHARD)], ids=["own", "shared"]
)
def test_a_lost_rank_is_awaited_where_steps_without_it_are_slower(
    monkeypatch: pytest.MonkeyPatch, processors: int, way: Way
) -> None:
    """A process takes 0.1 s; 32 steps of 0.1 s count, which three ranks do in twice the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    with scripted() as group:
        monkeypatch.setattr(group, "predict", lambda chunks: 0.1)
        group.streams = 1
        group.machine.costs = replace(group.machine.costs, restart_s=0.1)
        group.lose(3)
        group.until(lambda: len(group.done) >= 1)

        assert group.done[0].way is way


def test_a_rank_leaves_by_order_and_comes_back_by_order() -> None:
    """The others serve until they have what it had, and read none of it from the host; it is not
    started again before it is told to.
    """
    with scripted() as group:
        leaving = group.processes.seats[3]

        assert group.order(3, leaves=True) is None
        group.until_serving(0, 1, 2)

        (left,) = group.done
        assert (left.way, left.paused, left.host_bytes) == (Way.RESIZE, False, 0)
        assert left.moved == {"peer": left.peer_bytes}
        assert left.peer_bytes > 0
        assert True not in group.freezes
        group.until(lambda: leaving.is_closed)  # While the others serve.
        group.lose(2)
        group.until(lambda: len(group.done) >= 3)
        assert group.layout.ranks == (0, 1, 2)
        assert group.processes.starts == {2: 1}
        assert group.order(2, leaves=False) == "rank: got 2; allowed: 3"
        assert group.order(3, leaves=False) is None
        group.until_serving(*ALL)
        # What a loss or a rank that comes back waits for does not yield.
        assert group.processes.nices == [COPY_NICE, 0, 0, 0]


def test_a_re_forming_is_recorded_while_its_layout_serves_and_before_it_has_ended() -> None:
    """A reader that finds the record finds the layout; one that finds no re-forming finds both."""
    with scripted() as group:
        seen: list[tuple[int, bool]] = []
        serve = group.serve

        def watched(formation: Any) -> None:
            seen.append((len(group.done), group.reformer.now is not None))
            serve(formation)

        group.serve = watched  # type: ignore[method-assign]
        group.lose(3)
        group.until(lambda: len(group.done) >= 2)

        assert group.layout.ranks == ALL
        assert seen == [(0, True), (1, True)]


def test_a_lost_rank_that_is_told_to_leave_is_not_started_again() -> None:
    """Neither one whose process is about to join, nor one that is lost at this moment: its device
    may be broken, and each of its ends is a pause of the others.
    """
    with scripted() as group:
        group.processes.hooks["load"] = lambda seat: False
        group.lose(3)
        group.until_serving(0, 1, 2)
        group.until(lambda: 3 in group.processes.starts)
        spare = group.reformer._spares.seats[3]
        assert group.order(3, leaves=True) is None
        assert spare.is_closed  # type: ignore[attr-defined]
        group.processes.hooks["form"] = lambda layout: False
        group.lose(2)
        group.until(lambda: group.machine.phase is ReformingPhase.JOINING)
        assert group.order(2, leaves=True) is None
        group.processes.tell(group.processes.held_back)
        group.until_serving(0, 1)

        assert group.machine.waiting.missing == {}
        assert group.processes.starts == {3: 1}
        assert [group.order(rank, leaves=False) for rank in (2, 3)] == [None, None]
        group.until_serving(*ALL)


@pytest.mark.parametrize(
    ("elastic", "rank", "said"),
    [
        ({}, 4, "rank: got 4; allowed: 0, 1, 2, 3"),
        ({"min_ranks": 4}, 0, "3 ranks are left, elastic.min_ranks is 4"),
        ({"enabled": False}, 0, "elastic.enabled: got false; allowed: true"),
    ],
)
def test_an_order_that_is_not_carried_out_says_why(
    elastic: dict[str, Any], rank: int, said: str
) -> None:
    with scripted(**elastic) as group:
        assert group.order(rank, leaves=True) == said
        assert group.order(rank, leaves=False) == (
            f"rank: got {rank}; allowed: none, no rank has left"
        )
        assert group.layout.ranks == ALL


def test_an_order_of_which_nobody_awaits_the_answer_is_dropped() -> None:
    """Its caller may have gone before it was its turn."""
    with scripted() as group:
        release: list[Answered] = group.processes.held_back

        def cancel(_: object) -> bool:
            group.reformer.order(2, leaves=True).cancel()
            return False

        group.processes.hooks["form"] = cancel
        assert group.order(3, leaves=True) is None
        group.until(lambda: bool(release))
        group.processes.tell(release)
        group.until_serving(0, 1, 2)

        assert group.order(2, leaves=False) == "rank: got 2; allowed: 3"


@pytest.mark.parametrize("where", ["fetch", "form"])
def test_a_rank_that_hangs_as_the_ranks_re_form_is_killed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And done without, as one that is lost; those that have said their word, or would if they were
    not behind it, are not.
    """
    monkeypatch.setattr(waiting, "HUNG_S", 0.02)
    with scripted() as group:
        first = dict(group.processes.seats)
        hung: list[ScriptedSeat] = []

        def hang(what: Any) -> None:
            rank = what[0].target if where == "fetch" else 1
            hung.append(group.processes.seats[rank])
            hung[0].is_silent = True

        group.processes.hooks[where] = hang
        group.lose(3)
        group.until(lambda: len(group.done) >= 1)

        assert hung[0].process.has_ended
        assert group.done[0].degree == 2
        group.until_serving(*ALL)
        assert group.processes.starts == {3: 1, hung[0].rank: 1}
        kept = {rank for rank, seat in group.processes.seats.items() if seat is first[rank]}
        assert kept == {0, 1, 2} - {hung[0].rank}


def test_a_rank_that_hangs_as_it_loads_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others serve meanwhile."""
    monkeypatch.setattr(waiting, "HUNG_S", 0.02)
    monkeypatch.setattr(waiting, "BESIDE_FACTOR", 0.0)
    with scripted() as group:
        hung: list[ScriptedSeat] = []

        def hang(seat: ScriptedSeat) -> bool:
            hung.append(seat)
            return False

        group.processes.hooks["load"] = hang
        group.lose(3)
        group.until_serving(0, 1, 2)
        group.until(lambda: bool(hung) and hung[0].is_closed)
        group.hurry(3)
        group.until_serving(*ALL)

        assert group.processes.starts == {3: 2}
        assert [each.degree for each in group.done] == [3, 4]


def test_scripted_ranks_can_fail() -> None:
    """A probe with wrong bits ends the instance: the rig hides nothing."""
    with scripted() as group:
        group.probe = lambda formation: group.probed + 1  # type: ignore[method-assign]
        group.lose(1)
        group.until(lambda: group.ended is not None)

        assert "wrong bits" in str(group.ended)
