"""Where the victims of one event go: to their KV, and away from where that is too many."""

from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.policy import Dispatch
from kvrs.core.placing import Victim, assign, ceiling
from kvrs.ids import InstanceId, StreamId

D0, D1, D2 = (InstanceId(f"d{n}") for n in range(3))


def victim(
    name: str, home: InstanceId | None = None, pages: int = 0, *barred: InstanceId
) -> Victim:
    return Victim(StreamId(name), () if home is None else (home,), pages, frozenset(barred))


def test_victims_go_to_their_holders() -> None:
    """`holders`: however many that are; a victim without one goes where the fewest streams are."""
    victims = [victim("a", D0, 1), victim("b", D0, 2), victim("c", D0, 3), victim("d")]

    assert assign(Dispatch.HOLDERS, victims, {D0: 0, D1: 5}) == {"a": D0, "b": D0, "c": D0, "d": D0}


def test_of_several_targets_at_the_holder_the_least_loaded_is_taken() -> None:
    """One node, two decode instances."""
    victims = [Victim(StreamId(name), (D0, D1), 1) for name in "abc"]

    assert assign(Dispatch.HOLDERS, victims, {D0: 1, D1: 0, D2: 0}) == {"a": D1, "b": D0, "c": D1}


def test_the_smallest_checkpoints_leave_an_overloaded_holder() -> None:
    """LUMEN: what is moved forfeits its checkpoint, so the least is lost by moving the shortest."""
    victims = [victim("a", D0, 30), victim("b", D0, 10), victim("c", D0, 20), victim("d", D0, 40)]

    assert assign(Dispatch.REBALANCE, victims, {D0: 0, D1: 0}) == {
        "a": D0,
        "b": D1,
        "c": D1,
        "d": D0,
    }


def test_the_most_loaded_holder_gives_first() -> None:
    """The least loaded target is filled from where it hurts most."""
    victims = [victim(f"x{n}", D0, 9) for n in range(4)] + [
        victim(f"y{n}", D1, 1) for n in range(2)
    ]

    assigned = assign(Dispatch.REBALANCE, victims, {D0: 0, D1: 1, D2: 2})

    # Nine streams on three targets: x gives up all but one and every target is at the mean.
    assert [assigned[StreamId(f"x{n}")] for n in range(4)].count(D2) == 1
    assert {assigned[StreamId(f"y{n}")] for n in range(2)} == {D1}


def test_least_loaded_looks_at_no_holder() -> None:
    """`least_loaded`, the baseline."""
    victims = [victim("a", D0, 9), victim("b", D0, 9)]

    assert assign(Dispatch.LEAST_LOADED, victims, {D0: 4, D1: 0}) == {"a": D1, "b": D1}


def test_a_victim_is_never_sent_to_an_excluded_target() -> None:
    """A victim that excludes all targets is left out."""
    victims = [victim("a", D0, 9, D0), victim("b", None, 0, D0, D1)]

    assert assign(Dispatch.REBALANCE, victims, {D0: 0, D1: 7}) == {"a": D1}
    assert assign(Dispatch.REBALANCE, victims, {}) == {}


def test_no_victim_moves_to_a_target_that_would_be_as_loaded() -> None:
    """The one free target is barred: a move to the other would only move the crowd."""
    victims = [victim(name, D0, 1, D2) for name in "abce"]

    assert set(assign(Dispatch.REBALANCE, victims, {D0: 0, D1: 3, D2: 0}).values()) == {D0}


@st.composite
def events(draw: st.DrawFn) -> tuple[list[Victim], dict[InstanceId, int]]:
    targets = [InstanceId(f"d{n}") for n in range(draw(st.integers(1, 6)))]
    loads = {target: draw(st.integers(0, 8)) for target in targets}
    homes = st.lists(st.sampled_from([*targets, InstanceId("gone")]), max_size=2, unique=True).map(
        tuple
    )
    victims = [
        Victim(StreamId(f"s{n}"), draw(homes), draw(st.integers(0, 50)))
        for n in range(draw(st.integers(0, 25)))
    ]
    return victims, loads


@given(events(), st.sampled_from(Dispatch))
def test_every_victim_gets_one_present_target(
    event: tuple[list[Victim], dict[InstanceId, int]], how: Dispatch
) -> None:
    """None is left out as long as there is any target, and the caller's loads are not changed."""
    victims, loads = event
    before = dict(loads)

    assigned = assign(how, victims, loads)

    assert set(assigned) == {victim.stream for victim in victims}
    assert set(assigned.values()) <= set(loads)
    assert loads == before


@given(events())
def test_rebalancing_ends_at_the_ceiling_of_the_mean(
    event: tuple[list[Victim], dict[InstanceId, int]],
) -> None:
    """Only targets without a victim left to give stay above it; no victim that was moved had more
    held pages than one that stayed there.
    """
    victims, loads = event
    at_first = assign(Dispatch.HOLDERS, victims, loads)
    assigned = assign(Dispatch.REBALANCE, victims, loads)

    limit = ceiling(len(victims), loads)
    after = {target: load + list(assigned.values()).count(target) for target, load in loads.items()}
    first = {target: load + list(at_first.values()).count(target) for target, load in loads.items()}

    assert all(load <= limit or target not in assigned.values() for target, load in after.items())
    assert max(after.values()) <= max(first.values())
    for target in loads:
        left = [v.held_pages for v in victims if at_first[v.stream] == target != assigned[v.stream]]
        stayed = [
            v.held_pages for v in victims if at_first[v.stream] == target == assigned[v.stream]
        ]
        assert not left or not stayed or max(left) <= min(stayed)


@given(events())
def test_no_victim_moves_while_no_target_is_above_the_ceiling(
    event: tuple[list[Victim], dict[InstanceId, int]],
) -> None:
    """KV is not given up for nothing."""
    victims, loads = event
    at_first = assign(Dispatch.HOLDERS, victims, loads)
    after = {target: load + list(at_first.values()).count(target) for target, load in loads.items()}

    if max(after.values()) <= ceiling(len(victims), loads):
        assert assign(Dispatch.REBALANCE, victims, loads) == at_first
