"""AnchorTP's planner: Eq. (1) exactly, and the figure of the paper."""

from hypothesis import given
from hypothesis import strategies as st

from kvrs_engine.elastic import cmm
from kvrs_engine.elastic.cmm import Shard, Task, even_parts, least_reload_bytes, plan_interval
from kvrs_engine.elastic.plans import HOST, plan
from kvrs_engine.elastic.units import UnitKind, Units
from kvrs_testkit.examples import examples
from kvrs_testkit.layouts import even
from kvrs_testkit.planned import bytes_by_kind


def test_figure_3() -> None:
    """1,024 rows on 4 GPUs, the second is lost: 256 rows are reloaded, 86 come from a peer."""
    shards = [
        Shard(gpu, *part) for gpu, part in zip((1, 2, 3, 4), even_parts(1024, 4), strict=True)
    ]

    tasks = plan_interval(shards, {2}, [1, 3, 4])

    assert tasks == [
        Task(0, 256, 1, 1),
        Task(256, 341, HOST, 1),
        Task(512, 682, 3, 3),
        Task(341, 512, HOST, 3),
        Task(682, 768, 3, 4),
        Task(768, 1024, 4, 4),
    ]
    assert sum(task.bytes for task in tasks if task.source == HOST) == 256
    assert sum(task.bytes for task in tasks if task.source not in (HOST, task.target)) == 86


@examples(200)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any),
    data=st.data(),
)
def test_reload_is_equation_1_and_all_targets_are_complete(
    sizes: list[int], data: st.DataObject
) -> None:
    """Whatever the shards and the losses: no plan for these targets reloads less."""
    bounds = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    shards = [Shard(at, bounds[at], bounds[at + 1]) for at in range(len(sizes))]
    dead = set(data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)))
    targets = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9, unique=True))

    tasks = plan_interval(shards, dead, targets)

    for target, part in zip(targets, even_parts(bounds[-1], len(targets)), strict=True):
        covered = [
            at for task in tasks if task.target == target for at in range(task.start, task.stop)
        ]
        assert sorted(covered) == list(range(*part))
    assert not {task.source for task in tasks} & dead
    reloaded = sum(task.bytes for task in tasks if task.source == HOST)
    assert reloaded == least_reload_bytes(shards, dead, targets)
    # From disjoint shards that cover everything that is what the dead ones had.
    assert reloaded == sum(sizes[at] for at in dead)


def test_units_are_reloaded_as_equation_1_says() -> None:
    """The layout of even contiguous shares moves what the interval's plan moves, in whole tiles."""
    units = Units(3, (64,) * 8, (64,) * 64, (64,) * 8, 0)
    before = even(units, tp=8)
    shards = [Shard(rank, rank * 8, rank * 8 + 8) for rank in range(8)]
    left = [0, 1, 3, 4, 5, 6, 7]

    found = plan(before, cmm.reshaped(before, units, [left]), units, {2})

    tasks = plan_interval(shards, {2}, left)
    copied = sum(task.bytes for task in tasks if task.source not in (HOST, task.target))
    assert bytes_by_kind(found)[UnitKind.MLP] == (
        3 * 64 * least_reload_bytes(shards, {2}, left),
        3 * 64 * copied,
    )
