"""Memory and CPU time of ranks that have experts, as the kernel counts it of their processes."""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrs.config.cluster import ElasticSettings, ExpertSettings
from kvrs.errors import RanksLostError
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import UnitKind, Units
from kvrs_engine.engine.ranks import routed
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.random_experts import ExpertsModel, write_experts_model
from tests.engine.ranks.test_rank_group import group_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.usefixtures("patient"),
    pytest.mark.nightly,
]

# 16 experts of 2 parts, of 3 MiB each: these are nearly all of its 100 MB.
MODEL = ExpertsModel("mixtral", 2, 256, 8, 4, 32, 8, 2, 2048, 2.0)
# Of a rank: pages of which a unit has only a part, and what a unit's place is rounded up to.
ROUNDED_BYTES = 1 << 20
FEW_SECONDS_S = 60.0
PAUSE_S = 0.02  # Between batches: changes need the processors, too.
BATCHES = 20
CHUNK = Chunk([(13 * at * at + 7) % 500 for at in range(90)], 0, range(10, 20), logits=3)


@pytest.fixture(autouse=True)
def changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies change as soon as others pay."""
    monkeypatch.setattr(routed, "APART_S", 0.1)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RankGroup]:
    """Without copies, as long as it does not know how long its batches take."""
    group = started(tmp_path / "large", MODEL)
    yield group
    group.close()


def started(directory: Path, model: ExpertsModel) -> RankGroup:
    write_experts_model(directory, model, seed=5)
    experts = ExpertSettings(room_share=1.0)
    group = group_of(directory, ElasticSettings(experts=experts), tp=3)
    group.execute([CHUNK])
    return group


def unit_bytes(pid: int, measure: str) -> int:
    """Resident bytes of the memory in which units lie: all that it maps (Rss), or each divided by
    the processes that map it (Pss).
    """
    found, is_units = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith(f"{measure}:"):
            found += is_units * int(line.split()[1]) * 1024
        elif not re.match(r"[A-Z]\w+:", line):  # The first line of a mapping.
            is_units = "memfd:kvrs-units" in line
    return found


def anonymous_bytes(pid: int) -> int:
    """Resident bytes that belong to no file."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, status
    return int(found[1]) * 1024


def in_units(group: RankGroup, measure: str) -> dict[int, int]:
    """Resident bytes of units by rank."""
    return {rank: unit_bytes(pid, measure) for rank, pid in group.pids.items()}


def held_bytes(layout: Layout, units: Units) -> dict[int, int]:
    """Bytes of the units that the layout gives each rank, but for what all ranks have."""
    return {
        rank: sum(
            units.bytes_of(unit) for unit in layout.held(rank) if unit.kind is not UnitKind.COMMON
        )
        for rank in layout.ranks
    }


def copied_bytes(layout: Layout, units: Units) -> Counter[int]:
    """Bytes of the copies of each rank."""
    found = Counter[int]()
    for layer in range(units.layers):
        for place, rank in layout.copies_of(layer):
            found[rank] += units.mlp_of(layer)[place]
    return found


def test_ranks_together_have_one_copy_of_the_weights(group: RankGroup, tmp_path: Path) -> None:
    """Each has its own units where units lie. All other memory of the ranks is about that of a
    model with nearly no weights: what is left would not hold one copy more, where three ranks that
    have all experts have two more.
    """
    small = started(tmp_path / "tiny", ExpertsModel.tiny("mixtral", skew=2.0))
    try:
        anonymous = [sum(map(anonymous_bytes, each.pids.values())) for each in (small, group)]
    finally:
        small.close()
    units, found = group.units, in_units(group, "Rss")
    held = held_bytes(group.layout, units)

    whole = units.total_bytes - units.common_bytes
    assert sum(held.values()) == whole > 100e6
    assert all(held[rank] <= found[rank] <= held[rank] + ROUNDED_BYTES for rank in held)
    assert anonymous[1] - anonymous[0] < whole


def test_a_copy_takes_the_memory_of_its_unit_where_it_is_shown(group: RankGroup) -> None:
    """It is memory of its own; otherwise each rank has what the layout gives it."""
    loads = group.reformer.loads
    assert loads is not None
    assert not group.layout.copies
    compute_until_copied(group)
    until_s = time.monotonic() + FEW_SECONDS_S

    def missing() -> int:
        """Bytes by which a rank has more or less than the layout, with its copies, at most."""
        held, found = held_bytes(group.layout, group.units), in_units(group, "Pss")
        return max(abs(found[rank] - held[rank]) for rank in held)

    # What a change that has begun before, or has just ended, still maps goes.
    readings = 0  # In a row that agree with the layout.
    while readings < 5 and time.monotonic() < until_s:
        agrees = not group.reforming and missing() <= ROUNDED_BYTES
        readings = readings + 1 if agrees else 0
        time.sleep(0.1)

    layout, units = group.layout, group.units
    assert readings == 5
    assert loads.facts(layout).copies == sum(map(len, layout.copies)) > 0
    assert max(copied_bytes(layout, units).values()) >= units.mlp_bytes[0] > ROUNDED_BYTES


def compute_until_copied(group: RankGroup) -> None:
    """Batches until copies are there; no other ones come behind them."""
    assert group.reformer.loads is not None
    group.predict = lambda chunks: 0.0
    until_s = time.monotonic() + FEW_SECONDS_S
    loads = group.reformer.loads
    while not group.layout.copies or group.reforming:
        try:
            group.execute([CHUNK])
        except RanksLostError:
            group.on_lost()
        if group.layout.copies:
            loads._settings = loads._settings.model_copy(update={"room_share": 0.0})
        assert time.monotonic() < until_s
        time.sleep(PAUSE_S)


def test_a_copy_takes_work_where_it_is_shown(group: RankGroup) -> None:
    """By the CPU time that the kernel counts: the rank that has most to do without copies has a
    smaller part of the work of all with them.
    """
    before = cpu_shares(group)
    compute_until_copied(group)
    after = cpu_shares(group)

    busiest = max(before, key=before.__getitem__)
    copied = copied_bytes(group.layout, group.units)
    gains = {rank: after[rank] - before[rank] for rank in before}
    assert copied
    assert after[busiest] < before[busiest] - 0.02
    assert max(gains, key=gains.__getitem__) in copied


def cpu_shares(group: RankGroup) -> dict[int, float]:
    """Each rank's part of the CPU time that all of them take for batches."""
    group.execute([CHUNK])
    from_s = {rank: cpu_s(pid) for rank, pid in group.pids.items()}
    for _ in range(BATCHES):
        group.execute([CHUNK])
    used = {rank: cpu_s(pid) - from_s[rank] for rank, pid in group.pids.items()}
    return {rank: own_s / sum(used.values()) for rank, own_s in used.items()}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
