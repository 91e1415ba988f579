"""The book of incidents: when a request is refused for what it ran on."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.config.policy import RecoverySettings
from kvrs.core.books.incident_book import (
    KEPT_S,
    MAX_DEATHS,
    NEWS_S,
    STORM_S,
    UNEXPLAINED_S,
    IncidentBook,
    LostInstance,
    Ruling,
)
from kvrs.ids import InstanceId, NodeId, StreamId

A, B, C = StreamId("A"), StreamId("B"), StreamId("C")
WAIT_S = 30.0


class Scene:
    """A book, and instances i0, i1, ... that are lost one after the other."""

    def __init__(self, deaths: int = 3, wait_s: float = WAIT_S) -> None:
        self.book = IncidentBook(RecoverySettings(poison_deaths=deaths, wait_s=wait_s))
        self.count = 0

    def lose(
        self,
        at_s: float,
        *suspects: StreamId,
        flowed: Iterable[StreamId] = (),
        others: Iterable[StreamId] = (),
        server: str = "",
        may_live: bool = False,
    ) -> InstanceId:
        """`flowed`: suspects that had a token anywhere; `others`: streams that flow there."""
        name = InstanceId(f"i{self.count}")
        self.count += 1
        process = LostInstance(name, 1, InstanceId(server or name), NodeId(f"node of {name}"))
        found = dict.fromkeys(suspects, False) | dict.fromkeys(flowed, True)
        self.book.lost(process, found, others, at_s, may_live=may_live)
        return name

    def ruling(self, stream: StreamId, at_s: float) -> Ruling:
        return self.book.judge(stream, at_s).ruling

    def refused(self, stream: StreamId, at_s: float) -> bool:
        return self.ruling(stream, at_s) is Ruling.REFUSE


def after_news(at_s: float) -> float:
    return at_s + NEWS_S


# How many deaths.


@pytest.mark.parametrize("deaths", [2, 3, 4])
def test_a_request_is_refused_after_as_many_deaths_as_are_set(deaths: int) -> None:
    """Each time it was the only one that waited there, and nothing else died."""
    scene = Scene(deaths)
    rulings = []

    for n in range(deaths):
        scene.lose(10.0 * n, A)
        rulings.append(scene.ruling(A, after_news(10.0 * n)))

    assert rulings == [Ruling.APART] * (deaths - 1) + [Ruling.REFUSE]


def test_a_token_in_between_clears_a_request() -> None:
    """Deaths count that follow each other."""
    scene = Scene(2)
    scene.lose(0.0, A)
    scene.book.progressed(A)
    scene.lose(10.0, A)

    assert scene.ruling(A, 11.0) is Ruling.APART


def test_a_request_that_is_not_suspected_is_free() -> None:
    scene = Scene()
    scene.lose(0.0, B, others=[A])

    assert scene.ruling(A, 0.0) is Ruling.FREE
    assert scene.ruling(B, 0.0) is Ruling.APART


def test_settings_that_are_loaded_again_hold_for_open_cases() -> None:
    scene = Scene(3)
    scene.lose(0.0, A)
    scene.lose(10.0, A)

    scene.book.reload(RecoverySettings(poison_deaths=2))

    assert scene.refused(A, 11.0)


@pytest.mark.parametrize("wait_s", [WAIT_S, 4.0])
def test_a_suspected_request_runs_apart_for_5_s_and_then_for_half_of_the_longest_wait(
    wait_s: float,
) -> None:
    """Most instances die of other causes; a second death says more."""
    scene = Scene(wait_s=wait_s)
    scene.lose(0.0, A)
    first = scene.book.judge(A, 0.0)
    scene.lose(20.0, A)
    second = scene.book.judge(A, after_news(20.0))

    assert first.until_s == min(5.0, wait_s / 2)
    assert second.until_s == 20.0 + wait_s / 2


# News first.


@pytest.mark.parametrize(("after_s", "expected"), [(0.4, Ruling.WAIT), (0.6, Ruling.REFUSE)])
def test_from_the_second_death_on_half_a_second_is_waited_for_news(
    after_s: float, expected: Ruling
) -> None:
    """The other losses of an outage become known a moment later."""
    scene = Scene(2)
    first = (scene.lose(0.0, A), scene.ruling(A, 0.0))[1]
    scene.lose(0.1, A)

    assert first is Ruling.APART
    assert scene.ruling(A, 0.1 + after_s) is expected


@pytest.mark.parametrize("at_s", [0.0, 0.3, 4.4])
def test_one_that_would_be_refused_waits_while_others_are_suspected_of_the_same_storm(
    at_s: float,
) -> None:
    """Their tokens would excuse it; after 5 s it is refused, since an attack looks the same."""
    scene = Scene(2)
    scene.lose(0.0, B)
    scene.lose(0.1, A)
    scene.lose(0.2, A)

    assert scene.ruling(A, after_news(0.2) + at_s) is Ruling.WAIT
    assert scene.refused(A, 0.2 + 5.0)


# A storm excuses.

STORM_AT_S = 100.0  # When A is hit twice; what else dies at that time is the storm.
LATE_S = STORM_AT_S + 6.0  # Nothing is waited for any more.


def nearly_refused() -> Scene:
    """A has met three deaths, of five that are allowed. So many are never raised; two more end it,
    unless they are excused and count as one.
    """
    scene = Scene(MAX_DEATHS)
    for n in range(3):
        scene.lose(10.0 * n, A)
    return scene


def hit_twice(scene: Scene) -> None:
    scene.lose(STORM_AT_S, A)
    scene.lose(STORM_AT_S + 0.01, A)


@pytest.mark.parametrize(
    ("at_s", "is_excused"), [(-2.1, False), (-1.9, True), (0.1, True), (1.9, True), (2.1, False)]
)
def test_deaths_within_two_seconds_of_one_that_nothing_explains_count_as_one(
    at_s: float, *, is_excused: bool
) -> None:
    """Before it or after it: that is an outage, as far as can be told."""
    scene = nearly_refused()
    if at_s < 0:
        scene.lose(STORM_AT_S + at_s)
    hit_twice(scene)
    if at_s > 0:
        scene.lose(STORM_AT_S + at_s)

    assert scene.refused(A, LATE_S) is not is_excused
    assert STORM_S == 2.0


def test_a_loss_whose_suspects_have_all_had_a_token_excuses_others() -> None:
    scene = nearly_refused()
    scene.lose(STORM_AT_S, B, C)
    hit_twice(scene)
    scene.book.progressed(B)
    waits = scene.ruling(A, after_news(STORM_AT_S + 0.01))
    scene.book.progressed(C)

    assert waits is Ruling.WAIT
    assert not scene.refused(A, LATE_S)


def test_a_loss_with_a_suspect_that_is_not_decided_excuses_nobody() -> None:
    """So each of several attackers speaks against the others."""
    scene = nearly_refused()
    scene.lose(STORM_AT_S, B)
    hit_twice(scene)

    assert scene.refused(A, LATE_S)


def test_a_loss_that_a_refused_request_has_caused_excuses_nobody() -> None:
    scene = nearly_refused()
    scene.lose(STORM_AT_S, B)
    hit_twice(scene)
    scene.book.left(B, is_refused=True)

    assert scene.refused(A, LATE_S)


def test_a_loss_beside_which_a_request_flowed_that_is_suspected_since_excuses_nobody() -> None:
    """One that ends its instances late flowed at the first of them."""
    scene = nearly_refused()
    scene.lose(STORM_AT_S, others=[B])
    scene.lose(STORM_AT_S + 0.005, B)
    hit_twice(scene)

    assert scene.refused(A, LATE_S)


def test_a_loss_beside_which_the_request_itself_flowed_does_not_excuse_it() -> None:
    scene = nearly_refused()
    scene.lose(STORM_AT_S, others=[A])
    hit_twice(scene)

    assert scene.refused(A, LATE_S)


def test_a_suspect_that_left_without_a_token_is_suspected_no_longer() -> None:
    """Its client may have lost patience in the outage."""
    scene = nearly_refused()
    scene.lose(STORM_AT_S, B)
    hit_twice(scene)
    scene.book.left(B, is_refused=False)

    assert not scene.refused(A, LATE_S)


def test_an_excuse_lasts_when_the_other_loss_is_old() -> None:
    """A ruling does not change because a record has gone."""
    scene = nearly_refused()
    scene.lose(STORM_AT_S)
    hit_twice(scene)
    scene.ruling(A, LATE_S)
    scene.lose(STORM_AT_S + KEPT_S + 1.0, B)

    assert not scene.refused(A, STORM_AT_S + KEPT_S + 2.0)


def test_an_excused_request_waits_for_the_end_of_the_storm_and_is_tried_once_more() -> None:
    """Two seconds without a loss; the next death refuses it, where two are allowed."""
    scene = Scene(MAX_DEATHS)
    scene.book.reload(RecoverySettings(poison_deaths=2, wait_s=WAIT_S))
    scene.lose(0.0, A)
    scene.lose(0.1, A)
    scene.lose(0.2)
    scene.lose(1.0)

    during, end = scene.book.judge(A, 0.8), scene.book.judge(A, 2.9)
    after = scene.book.judge(A, 3.0)
    for n in range(2):
        scene.book.exited(InstanceId(f"i{2 + n}"), 1, 3.0, is_external=False)
    scene.lose(10.0, A)

    assert (during.ruling, during.until_s) == (Ruling.WAIT, 3.0)
    assert end.ruling is Ruling.WAIT
    assert (after.ruling, after.until_s) == (Ruling.APART, 3.0 + WAIT_S / 2)
    assert scene.refused(A, 11.0)


def test_a_request_that_ends_instances_in_an_endless_storm_is_refused_all_the_same() -> None:
    """An instance that crashes again and again beside it excuses it no more than once a trial."""
    scene = Scene(3)
    deaths, now_s = 0, 0.0

    while scene.ruling(A, now_s) is not Ruling.REFUSE:
        if scene.ruling(A, now_s) is not Ruling.WAIT:
            scene.lose(now_s, A)
            deaths += 1
        now_s += 0.5
        scene.lose(now_s)

    assert deaths <= MAX_DEATHS + 1


@given(
    allowed=st.integers(2, 5),
    burst=st.lists(
        st.tuples(st.floats(0, STORM_S), st.sets(st.sampled_from([A, B, C])), st.booleans()),
        max_size=12,
    ),
    unexplained_s=st.floats(0, STORM_S),
    looks=st.lists(st.floats(STORM_S, 100), min_size=1, max_size=10).map(sorted),
    acquitted=st.sets(st.sampled_from([A, B, C]), max_size=2),
)
@settings(deadline=None)
def test_no_request_is_refused_for_losses_of_which_one_had_no_suspect(
    allowed: int,
    burst: list[tuple[float, set[StreamId], bool]],
    unexplained_s: float,
    looks: list[float],
    acquitted: set[StreamId],
) -> None:
    """Before a later death: whoever was at the others, however often, and whenever it is asked."""
    scene = Scene(allowed)
    refused = []

    for at_s, found, have_flowed in sorted([*burst, (unexplained_s, set(), False)], key=first_of):
        scene.lose(at_s, *(() if have_flowed else found), flowed=found if have_flowed else ())
    for at_s in looks:
        refused += [stream for stream in (A, B, C) if scene.refused(stream, at_s)]
        for stream in acquitted:
            scene.book.progressed(stream)

    assert refused == []


def first_of(loss: tuple[float, object, object]) -> float:
    return loss[0]


@given(st.integers(2, 5), st.lists(st.sampled_from([A, B, C]), max_size=60))
@settings(deadline=None)
def test_no_attacker_ends_more_instances_than_are_allowed(
    allowed: int, order: list[StreamId]
) -> None:
    """Each ends what it runs on as soon as it may run, and the others do so at the same time."""
    scene = Scene(allowed)
    deaths = dict.fromkeys((A, B, C), 0)
    left: set[StreamId] = set()

    for turn, stream in enumerate(order):
        now_s = 0.3 * turn
        for each in {A, B, C} - left:
            if scene.refused(each, now_s):
                scene.book.left(each, is_refused=True)
                left.add(each)
        if stream not in left and scene.ruling(stream, now_s) in (Ruling.FREE, Ruling.APART):
            scene.lose(now_s, stream)
            deaths[stream] += 1

    assert max(deaths.values()) <= allowed


# Losses that nothing explains.


@pytest.mark.parametrize(("others", "needed"), [(0, 3), (1, 4), (2, 5), (3, 5)])
def test_each_loss_that_nothing_explains_raises_the_deaths_that_are_needed(
    others: int, needed: int
) -> None:
    """Up to five: those are of one instance at a time, which no storm excuses."""
    scene = Scene(3)
    for n in range(others):
        scene.lose(4.0 * n)
    deaths = 0
    while not scene.refused(A, 20.0 + 4 * deaths):
        scene.lose(20.0 + 4 * deaths, A)
        deaths += 1

    assert deaths == needed


@pytest.mark.parametrize(("age_s", "is_refused"), [(55.0, False), (65.0, True)])
def test_a_loss_that_nothing_explains_counts_for_a_minute(
    age_s: float, *, is_refused: bool
) -> None:
    scene = Scene(2)
    scene.lose(0.0)
    scene.lose(age_s - 10.0, A)
    scene.lose(age_s, A)

    assert scene.refused(A, age_s + 0.6) is is_refused
    assert UNEXPLAINED_S == 60.0


@pytest.mark.parametrize("what", ["open", "left", "refused", "flows", "internal"])
def test_a_loss_that_may_be_explained_raises_nothing(what: str) -> None:
    """Its suspect is not decided, has left undecided, was refused, flowed there; or the process
    ended itself.
    """
    scene = Scene(2)
    name = scene.lose(0.0, others=[B]) if what == "flows" else scene.lose(0.0, B)
    match what:
        case "left" | "refused":
            scene.book.left(B, is_refused=what == "refused")
        case "internal":
            scene.book.progressed(B)
            scene.book.exited(name, 1, 1.0, is_external=False)
        case "flows":
            scene.lose(5.0, B)
        case _:
            pass
    scene.lose(20.0, A)
    scene.lose(30.0, A)

    assert scene.refused(A, 31.0)


def test_a_loss_whose_suspects_have_all_had_a_token_raises_the_deaths_that_are_needed() -> None:
    scene = Scene(2)
    scene.lose(0.0, B)
    scene.book.progressed(B)
    scene.lose(20.0, A)
    scene.lose(30.0, A)

    assert not scene.refused(A, 31.0)


def test_more_deaths_may_be_set_than_losses_raise_them_to() -> None:
    scene = Scene(7)
    scene.lose(0.0)
    for n in range(7):
        assert not scene.refused(A, 10.0 * n + 9)
        scene.lose(10.0 * n + 10, A)

    assert scene.refused(A, 80.0)


# What a supervisor knows.


@pytest.mark.parametrize("before", [True, False])
def test_an_exit_from_outside_suspects_nobody(*, before: bool) -> None:
    """The report of it may come before the loss or after it."""
    scene = Scene(2)
    scene.lose(0.0, A)
    name = InstanceId("i1")
    if before:
        scene.book.exited(name, 1, 10.0, is_external=True)
    scene.lose(10.0, A)
    freed = [] if before else scene.book.exited(name, 1, 10.1, is_external=True)

    assert freed == [A] * (not before)
    assert scene.ruling(A, 11.0) is Ruling.APART


def test_an_exit_from_outside_frees_a_request_whose_connection_broke_there() -> None:
    """Its loss is not known yet, or was before the connection broke."""
    scene = Scene()
    scene.book.broke(A, InstanceId("i0"), 1, 0.0)

    assert scene.book.exited(InstanceId("i0"), 1, 0.1, is_external=True) == [A]
    assert not scene.book.is_suspect(A)
    scene.book.broke(A, InstanceId("i0"), 1, 0.2)
    scene.lose(0.3, A)
    assert not scene.book.is_suspect(A)


def test_an_exit_of_another_epoch_says_nothing() -> None:
    scene = Scene(2)
    scene.lose(0.0, A)
    scene.book.exited(scene.lose(10.0, A), 2, 10.1, is_external=True)

    assert scene.refused(A, 11.0)


def test_exits_that_the_processes_caused_are_never_excused() -> None:
    """Not by a storm, nor by losses that nothing explains."""
    scene = Scene(2)
    for n in range(4):
        scene.lose(0.1 * n)
    for n in range(2):
        scene.book.exited(scene.lose(1.0 + n / 2, A), 1, 1.6, is_external=False)

    assert scene.refused(A, 10.0)


def test_an_exit_that_the_process_caused_may_be_reported_before_the_loss() -> None:
    scene = Scene(2)
    scene.lose(0.0)
    for n in range(2):
        scene.book.exited(InstanceId(f"i{1 + n}"), 1, 1.0, is_external=False)
        scene.lose(1.0 + n / 2, A)

    assert scene.refused(A, 10.0)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("apart_s", "is_suspect"), [(1.9, False), (2.1, True)])
def test_what_is_lost_within_two_seconds_of_its_node_is_lost_with_it(
    apart_s: float, *, is_suspect: bool, before: bool
) -> None:
    """The agent of a node is ended by no request."""
    scene = Scene()
    node = NodeId("node of i0")
    if before:
        scene.book.node_lost(node, 10.0)
        scene.lose(10.0 + apart_s, A)
    else:
        scene.lose(10.0, A)
        scene.book.node_lost(node, 10.0 + apart_s)

    assert scene.book.is_suspect(A) is is_suspect


# Which of several suspects.


@pytest.mark.parametrize(
    ("suspects", "flowed", "met_before", "refused"),
    [
        ([A, B], [], [A, B], []),
        ([A, B], [], [A], [A]),
        ([A], [B], [A, B], [A]),
        ([B], [A], [A], [A]),
        ([], [A, B], [A, B], []),
    ],
    ids=["equal", "met before", "had no token", "met before, and flowed", "equal, and flowed"],
)
def test_the_likeliest_of_several_suspects_counts_as_the_only_one(
    suspects: list[StreamId],
    flowed: list[StreamId],
    met_before: list[StreamId],
    refused: list[StreamId],
) -> None:
    """The one that has met a death before; else the one that never had a token."""
    scene = Scene(2)
    for stream in met_before:
        scene.lose(0.0, stream)
    scene.lose(10.0, *suspects, flowed=flowed)

    assert [stream for stream in (A, B) if scene.refused(stream, 16.0)] == refused


def test_the_last_death_decides_whether_it_was_the_only_suspect() -> None:
    """That is the one at which its attempt broke last, which may be known first."""
    scene = Scene(2)
    scene.book.broke(A, InstanceId("i1"), 1, 0.0)
    scene.book.broke(A, InstanceId("i0"), 1, 0.5)
    scene.lose(0.6, A)
    scene.lose(0.7, A, B)

    assert scene.refused(A, 7.0)


def test_instances_of_one_server_are_one_death() -> None:
    """They end together; the one is no second loss that would excuse the other."""
    scene = Scene(2)
    for n in range(2):
        scene.lose(10.0 * n, A, server=f"server {n}")
        scene.lose(10.0 * n, A, server=f"server {n}")
        is_refused = scene.refused(A, 10.0 * n + 0.6)
        assert is_refused is (n == 1)


# Connections that break before a death is known.


@pytest.mark.parametrize(("after_s", "is_free"), [(0.25, False), (0.35, True)])
def test_a_report_soon_after_a_connection_broke_may_have_been_under_way(
    after_s: float, *, is_free: bool
) -> None:
    scene = Scene()
    scene.book.broke(A, InstanceId("i0"), 1, 1.0)

    freed = scene.book.alive(InstanceId("i0"), 1, 1.0 + after_s)

    assert (freed == [A]) is is_free
    assert scene.book.is_suspect(A) is not is_free


def test_a_death_counts_after_a_report_that_was_under_way_for_long() -> None:
    """The stream goes on meanwhile, and has had no token when the death becomes known."""
    scene = Scene(2)
    scene.lose(0.0, A)
    scene.book.broke(A, InstanceId("i1"), 1, 10.0)
    scene.book.alive(InstanceId("i1"), 1, 10.9)
    was_suspected = scene.book.broke_at(A, InstanceId("i1"), 1, 11.0)
    scene.lose(11.0, A)

    assert was_suspected
    assert scene.refused(A, 12.0)


def test_a_request_that_is_hit_again_soon_waits_for_news_in_spite_of_a_report() -> None:
    """It would end a third instance before the first death is known."""
    scene = Scene()
    scene.book.broke(A, InstanceId("i0"), 1, 10.0)
    scene.book.alive(InstanceId("i0"), 1, 10.5)
    was_free = scene.ruling(A, 10.5)
    scene.book.broke(A, InstanceId("i1"), 1, 10.6)
    waits = scene.ruling(A, 10.7)
    scene.book.alive(InstanceId("i0"), 1, 10.8)

    assert (was_free, waits) == (Ruling.FREE, Ruling.WAIT)
    assert scene.ruling(A, 10.9) is Ruling.APART


@pytest.mark.parametrize(("after_s", "counts"), [(1.9, True), (2.1, False)])
def test_a_connection_that_broke_long_before_a_death_says_nothing(
    after_s: float, *, counts: bool
) -> None:
    scene = Scene()
    scene.book.broke(A, InstanceId("i0"), 1, 10.0)

    assert scene.book.broke_at(A, InstanceId("i0"), 1, 10.0 + after_s) is counts
    assert not scene.book.broke_at(A, InstanceId("i0"), 2, 10.0)
    assert not scene.book.broke_at(B, InstanceId("i0"), 1, 10.0)


@pytest.mark.parametrize(("after_s", "expected"), [(1.9, Ruling.WAIT), (2.1, Ruling.APART)])
def test_a_request_whose_second_connection_breaks_waits_for_news_of_the_instance(
    after_s: float, expected: Ruling
) -> None:
    """Deaths are known later than broken connections; it would end another instance meanwhile."""
    scene = Scene()
    scene.lose(0.0, A)
    scene.book.broke(A, InstanceId("i1"), 1, 10.0)

    assert scene.ruling(A, 10.0 + after_s) is expected


# Instances that fell silent.


@pytest.mark.parametrize("had_not_ended", [True, False])
def test_a_silent_instance_that_had_not_ended_was_no_death(*, had_not_ended: bool) -> None:
    """Half of the longest wait is waited for it."""
    scene = Scene(2)
    scene.lose(0.0, A)
    name = scene.lose(10.0, A, may_live=True)
    waits = scene.ruling(A, 24.9)
    scene.book.up(name, had_not_ended=had_not_ended)

    assert waits is Ruling.WAIT
    assert scene.refused(A, 15.1) is not had_not_ended


def test_a_silent_instance_that_stays_silent_is_a_death() -> None:
    scene = Scene(2)
    scene.lose(0.0, A)
    scene.lose(10.0, A, may_live=True)

    assert scene.refused(A, 10.0 + WAIT_S / 2)


@pytest.mark.parametrize(("after_s", "cleared"), [(115.0, [A]), (125.0, [])])
def test_an_exit_that_is_reported_within_two_minutes_of_the_loss_clears_its_suspects(
    after_s: float, cleared: list[StreamId]
) -> None:
    """Older losses are forgotten."""
    scene = Scene()
    name = scene.lose(0.0, A)

    assert scene.book.exited(name, 1, after_s, is_external=True) == cleared
