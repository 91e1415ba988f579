"""Copies of hot experts on real processes: they come while batches are computed, change no bit, and
save the move of what is lost with its owner.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrs.config.cluster import ElasticSettings, ExpertSettings
from kvrs.errors import RanksLostError
from kvrs_engine.elastic.units import Unit, UnitKind
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.ranks import routed
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.random_experts import ExpertsModel, write_experts_model
from kvrs_testkit.turning_experts import FIRST_IDS, LAST_IDS, write_turning_model
from tests.engine.exact_models import write_model
from tests.engine.ranks.test_rank_group import SETTINGS, group_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.usefixtures("patient"),
    pytest.mark.nightly,
]

FEW_SECONDS_S = 60.0
PAUSE_S = 0.02  # Between batches: changes need the processors, too.
CHUNK = Chunk([(13 * at * at + 7) % 500 for at in range(90)], 0, range(10, 20), logits=3)


@pytest.fixture(autouse=True)
def changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies change as soon as others pay."""
    monkeypatch.setattr(routed, "APART_S", 0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "skewed"
    write_experts_model(directory, ExpertsModel.tiny("mixtral", skew=2.0), seed=5)
    return directory


@pytest.fixture
def group(model: Path) -> Iterator[RankGroup]:
    experts = ExpertSettings(room_share=1.0)
    group = group_of(model, ElasticSettings(experts=experts), tp=3)
    group.predict = lambda chunks: 0.0
    yield group
    group.close()


def compute_until(group: RankGroup, model: Path, copies: bool) -> None:
    """Batches, each with the bytes of one process, until there are copies, or none."""
    expected = Worker(model, SETTINGS).execute([CHUNK])
    until_s = time.monotonic() + FEW_SECONDS_S
    while bool(group.layout.copies) is not copies or group.reforming:
        try:
            assert same_bytes(group.execute([CHUNK]), expected)
        except RanksLostError:
            group.on_lost()
        assert time.monotonic() < until_s
        time.sleep(PAUSE_S)
    assert same_bytes(group.execute([CHUNK]), expected)


def test_hot_experts_get_copies_while_batches_are_computed(group: RankGroup, model: Path) -> None:
    """No process ends, nothing is read from files, and what the report says is on the ranks."""
    first, read = group.pids, group.processes.read_bytes.total()

    compute_until(group, model, copies=True)

    assert group.pids == first
    assert group.processes.read_bytes.total() == read
    assert {each.way for each in group.reformer.done} == {Way.RESIZE}
    loads, layout = group.reformer.loads, group.layout
    assert loads is not None
    report = loads.facts(layout)
    assert report.copies == sum(map(len, layout.copies)) > 0
    assert report.rebalances == len(group.reformer.done) > 0
    assert report.copied_bytes == sum(each.moved["peer"] for each in group.reformer.done) > 0
    held = {rank: {*group.processes.seats[rank].units} for rank in layout.ranks}
    assert held == {rank: layout.held(rank) - {Unit(UnitKind.COMMON, 0, 0)} for rank in held}
    assert min(report.tiles) > 0


def test_copies_settle_where_popularity_keeps_turning(tmp_path: Path) -> None:
    """Copies may change every tenth of a second, and other experts are popular every half one. All
    that are popular now and then get copies, which stay and change no bit.
    """
    write_turning_model(tmp_path)
    elastic = ElasticSettings(experts=ExpertSettings(room_share=1.0))
    turns = [
        Chunk([ids[7 * at * at % len(ids)] for at in range(90)], 0, range(10, 20), logits=3)
        for ids in (FIRST_IDS, LAST_IDS)
    ]
    expected = [Worker(tmp_path, SETTINGS).execute([chunk]) for chunk in turns]
    group = group_of(tmp_path, elastic, tp=3)
    group.predict = lambda chunks: 0.0
    began_s = time.monotonic()
    until_s = began_s + FEW_SECONDS_S
    try:
        while not group.layout.copies or time.monotonic() < began_s + 4.0:
            turn = int(2 * time.monotonic()) % 2
            try:
                assert same_bytes(group.execute([turns[turn]]), expected[turn])
            except RanksLostError:
                group.on_lost()
            assert time.monotonic() < until_s
            time.sleep(PAUSE_S)
        # It might be forty times.
        assert 0 < len(group.reformer.done) <= 20
    finally:
        group.close()


def test_split_experts_have_the_bytes_of_one_process_and_grow_back(tmp_path: Path) -> None:
    """Each rank has parts of every expert, also once one was lost and is back."""
    write_model("mixtral, 5 experts of 2 parts", tmp_path, seed=5)
    experts = ExpertSettings(layout="split")
    group = group_of(tmp_path, ElasticSettings(experts=experts), tp=2)
    expected = Worker(tmp_path, SETTINGS).execute([CHUNK])
    full = group.layout.ranks
    try:
        assert same_bytes(group.execute([CHUNK]), expected)
        group.processes.seats[1].kill()
        until_s = time.monotonic() + FEW_SECONDS_S
        while len(group.reformer.done) < 2 or group.layout.ranks != full:
            try:
                assert same_bytes(group.execute([CHUNK]), expected)
            except RanksLostError:
                group.on_lost()
            assert time.monotonic() < until_s
            time.sleep(PAUSE_S)
        assert same_bytes(group.execute([CHUNK]), expected)
        assert group.layout.split
        for own in group.layout.mlp:
            assert all(set(own[at : at + 2]) == {0, 1} for at in range(0, len(own), 2))
    finally:
        group.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_lost_expert_with_a_copy_costs_no_byte(
    group: RankGroup, model: Path, *, is_killed: bool
) -> None:
    """Its device is gone, or its process is killed and the memory is left; the rank with the copy
    owns it, and no move is of it.
    """
    compute_until(group, model, copies=True)
    loads = group.reformer.loads
    assert loads is not None
    # No further change of copies: one that is under way would bring more of them.
    loads._settings = loads._settings.model_copy(update={"room_share": 0.0})
    while group.reforming:
        time.sleep(0.01)
    copies = group.layout.copies
    layer, (place, _) = next((at, own[0]) for at, own in enumerate(copies) if own)
    owner = group.layout.mlp[layer][place]
    lost = {
        unit
        for unit in group.layout.held(owner)
        if unit.kind is UnitKind.MLP and len(group.layout.holders(unit)) > 1
    }
    done = len(group.reformer.done)
    bytes_of = group.units.bytes_of
    others = [
        unit
        for unit in group.layout.held(owner)
        if unit not in lost and unit.kind is not UnitKind.COMMON
    ]

    if is_killed:
        os.kill(group.pids[owner], signal.SIGKILL)
    else:
        group.lose_device(owner)
        group.on_restart()
    while len(group.reformer.done) == done:
        try:
            group.execute([CHUNK])
        except RanksLostError:
            group.on_lost()

    reshard = group.reformer.done[done]
    others_bytes = sum(map(bytes_of, others))
    moved = dict.fromkeys(["kept"] if is_killed else ["host", "read"], others_bytes)
    assert lost
    assert reshard.way is Way.RESHARD
    assert {name: size for name, size in reshard.moved.items() if size} == moved
    assert reshard.host_bytes == (0 if is_killed else others_bytes)
    assert same_bytes(group.execute([CHUNK]), Worker(model, SETTINGS).execute([CHUNK]))
