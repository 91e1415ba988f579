"""Where checkpoints are kept."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrs.config.backup import Placement
from kvrs.core.checkpoints import CANDIDATES_MAX, PlacementCandidate, choose_agent, load_s, weighed
from kvrs.ids import InstanceId, NodeId

GB = 10**9
NODES = ["n0", "n1", "n2", "n3"]
CANDIDATES = [
    PlacementCandidate(
        InstanceId(f"agent-{node}"),
        NodeId(node),
        queueing_delay_s=0.0,
        reserved_bytes=0,
        checkpoints=0,
        capacity_bytes=80 * GB,
        host_to_device_bytes_per_s=26e9,
    )
    for node in NODES
]
N0, N1, N2, N3 = (NodeId(node) for node in NODES)


def node_of(found: PlacementCandidate | None) -> NodeId | None:
    return found.node if found is not None else None


@st.composite
def tables(draw: st.DrawFn) -> list[PlacementCandidate]:
    """A load table in any order, of any nodes."""
    nodes = draw(st.lists(st.sampled_from(NODES), unique=True))
    return [
        PlacementCandidate(
            InstanceId(f"agent-{node}"),
            NodeId(node),
            # Few values, so that ties are drawn too.
            queueing_delay_s=draw(st.sampled_from([0.0, 0.25, 0.5])),
            reserved_bytes=draw(st.integers(0, 12)) * 10,
            checkpoints=draw(st.integers(0, 3)),
            capacity_bytes=100,
            host_to_device_bytes_per_s=draw(st.sampled_from([100.0, 200.0])),
        )
        for node in nodes
    ]


servings = st.sampled_from([N0, N1, N2, N3])
needs = st.integers(0, 120)
alphas = st.sampled_from([0.0, 0.5, 1.0, 10.0])
ANY = {
    "how": st.sampled_from(Placement),
    "table": tables(),
    "serving": servings,
    "need": needs,
    "alpha": alphas,
    "draw": st.integers(),
}


@given(**ANY)
@settings(deadline=None)
def test_a_checkpoint_is_never_with_what_it_protects_and_always_has_room(
    how: Placement,
    table: list[PlacementCandidate],
    serving: NodeId,
    need: int,
    alpha: float,
    draw: int,
) -> None:
    """The serving node would take both copies with it; a full agent would refuse."""
    found = choose_agent(how, table, serving, need, alpha, draw)

    if found is not None:
        assert found in table
        assert found.node != serving
        assert found.reserved_bytes + need <= found.capacity_bytes


@given(**ANY)
@settings(deadline=None)
def test_by_load_and_by_chance_any_agent_with_room_is_found(
    how: Placement,
    table: list[PlacementCandidate],
    serving: NodeId,
    need: int,
    alpha: float,
    draw: int,
) -> None:
    """A stream is unprotected only if no other agent has room; the ring looks at one agent only."""
    roomy = [
        row
        for row in table
        if row.node != serving and row.reserved_bytes + need <= row.capacity_bytes
    ]

    found = choose_agent(how, table, serving, need, alpha, draw)

    if how is not Placement.FIXED:
        assert (found is not None) == bool(roomy)


@given(table=tables(), serving=servings, need=needs, alpha=alphas, draw=st.integers())
@settings(deadline=None)
def test_load_is_lumens_eq_1_at_its_least_but_for_what_makes_no_difference(
    table: list[PlacementCandidate], serving: NodeId, need: int, alpha: float, draw: int
) -> None:
    """`queueing_delay + alpha * ((reserved + need) / (checkpoints + 1)) / host_to_device`, over
    those that may.
    """

    def eq_1(row: PlacementCandidate) -> float:
        pressure_s = (
            (row.reserved_bytes + need) / (row.checkpoints + 1) / row.host_to_device_bytes_per_s
        )
        return row.queueing_delay_s + alpha * pressure_s

    roomy = [
        row
        for row in table
        if row.node != serving and row.reserved_bytes + need <= row.capacity_bytes
    ]
    found = choose_agent(Placement.LOAD, table, serving, need, alpha, draw)

    if found is not None:
        assert eq_1(found) <= min(map(eq_1, roomy)) + 0.021


@given(
    how=st.sampled_from(Placement),
    table=tables(),
    serving=servings,
    need=needs,
    draw=st.integers(),
    data=st.data(),
)
@settings(deadline=None)
def test_the_order_of_the_table_does_not_matter(
    how: Placement,
    table: list[PlacementCandidate],
    serving: NodeId,
    need: int,
    draw: int,
    data: st.DataObject,
) -> None:
    """Agents come up in any order; every proxy finds the same one."""
    shuffled = data.draw(st.permutations(table))

    assert choose_agent(how, shuffled, serving, need, 1.0, draw) == choose_agent(
        how, table, serving, need, 1.0, draw
    )


def test_restore_pressure_is_the_mean_checkpoint_with_the_new_one_over_the_bandwidth() -> None:
    """Three checkpoints of 4 GB and one of 2: a mean of 3.5 GB, 135 ms at 26 GB/s."""
    holder = replace(CANDIDATES[0], queueing_delay_s=0.5, reserved_bytes=12 * GB, checkpoints=3)

    assert load_s(holder, 2 * GB, 1.0) == pytest.approx(0.5 + 3.5 / 26)
    assert load_s(holder, 2 * GB, 0.0) == 0.5


def test_checkpoints_of_a_node_are_shared_out_among_equals() -> None:
    """First by what each keeps for that node, then by all that it keeps."""
    table = [
        replace(CANDIDATES[1], of_serving_bytes=3 * GB, reserved_bytes=3 * GB, checkpoints=3),
        replace(CANDIDATES[2], of_serving_bytes=2 * GB, reserved_bytes=9 * GB, checkpoints=9),
        replace(CANDIDATES[3], of_serving_bytes=2 * GB, reserved_bytes=5 * GB, checkpoints=5),
    ]

    assert node_of(choose_agent(Placement.LOAD, table, N0, GB, 0.1, 0)) == N3
    late = replace(table[2], queueing_delay_s=0.5)
    assert node_of(choose_agent(Placement.LOAD, [*table[:2], late], N0, GB, 0.1, 0)) == N2


def test_a_long_queue_and_large_checkpoints_repel() -> None:
    """Either alone; alpha sets how much of the one outweighs the other."""
    idle, busy = CANDIDATES[1], replace(CANDIDATES[2], queueing_delay_s=0.1)
    pressed = replace(
        CANDIDATES[1], reserved_bytes=13 * GB, checkpoints=1
    )  # With 1 GB more 7 GB each: 269 ms against 38.

    assert node_of(choose_agent(Placement.LOAD, [busy, idle], N0, GB, 1.0, 0)) == N1
    assert node_of(choose_agent(Placement.LOAD, [busy, pressed], N0, GB, 1.0, 0)) == N2
    assert node_of(choose_agent(Placement.LOAD, [busy, pressed], N0, GB, 0.1, 0)) == N1


@pytest.mark.parametrize(("serving", "expected"), [(N0, N1), (N1, N2), (N2, N3), (N3, N0)])
@pytest.mark.parametrize("how", [Placement.FIXED, Placement.LOAD])
def test_the_ring_goes_on_to_the_next_node(
    how: Placement, serving: NodeId, expected: NodeId
) -> None:
    """DejaVu's ring; among equals by load too, so that idle agents share the streams of an idle
    cluster.
    """
    assert node_of(choose_agent(how, CANDIDATES, serving, GB, 1.0, 0)) == expected


def test_the_ring_skips_an_agent_that_is_down_but_not_one_that_is_full() -> None:
    """Also when it is the serving node's own agent, from which the ring begins."""
    without_own_and_next = [row for row in CANDIDATES if row.node not in (N1, N2)]
    full_next = [
        replace(row, reserved_bytes=80 * GB) if row.node == N2 else row for row in CANDIDATES
    ]

    assert node_of(choose_agent(Placement.FIXED, without_own_and_next, N1, GB, 1.0, 0)) == N3
    assert choose_agent(Placement.FIXED, full_next, N1, GB, 1.0, 0) is None


def test_by_chance_every_other_node_gets_its_share() -> None:
    """Streams are numbered one after another; their places do not follow each other in turn."""
    nodes = [
        node_of(choose_agent(Placement.RANDOM, CANDIDATES, N0, GB, 1.0, draw))
        for draw in range(3000)
    ]

    assert set(Counter(nodes)) == {N1, N2, N3}
    assert min(Counter(nodes).values()) > 900
    assert nodes == [
        node_of(choose_agent(Placement.RANDOM, CANDIDATES[::-1], N0, GB, 1.0, draw))
        for draw in range(3000)
    ]
    assert sum(before == after for before, after in pairwise(nodes)) > 900


def test_a_single_node_has_no_agent_for_it() -> None:
    """Nor has a node whose only peer is full to the last byte."""
    almost = replace(CANDIDATES[1], reserved_bytes=79 * GB)

    assert choose_agent(Placement.LOAD, CANDIDATES[:1], N0, 1, 1.0, 0) is None
    assert node_of(choose_agent(Placement.LOAD, [almost], N0, GB, 1.0, 0)) == N1
    assert choose_agent(Placement.LOAD, [almost], N0, GB + 1, 1.0, 0) is None


@given(agents=st.integers(0, 5000), draw=st.integers(0, 1 << 40))
def test_a_decision_weighs_a_bounded_number_of_agents(agents: int, draw: int) -> None:
    """All of a small cluster; of a large one not fewer than half as many as may be."""
    some = weighed(range(agents), draw)

    assert len(some) <= CANDIDATES_MAX
    assert len(some) >= min(agents, CANDIDATES_MAX // 2)
    assert agents > CANDIDATES_MAX or list(some) == list(range(agents))


def test_every_agent_of_a_large_cluster_is_weighed_as_often() -> None:
    """By the numbers of streams, which are consecutive."""
    counts = Counter(agent for number in range(20_000) for agent in weighed(range(1000), number))

    assert len(counts) == 1000
    assert max(counts.values()) < 1.15 * min(counts.values())
