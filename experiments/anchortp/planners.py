"""Table II: the weights of a lost rank come back by the plans of several planners, carried out by
the processes of ranks; bytes and seconds.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrs.config.cluster import ElasticSettings, EngineSettings
from kvrs.transfer.shared_memory import Region
from kvrs_engine.elastic import cmm, on_demand
from kvrs_engine.elastic.layouts import Layout, staged, uneven
from kvrs_engine.elastic.plans import HOST, Move, plan
from kvrs_engine.elastic.units import UnitKind, Units
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.ranks.cells import memory_bytes
from kvrs_engine.engine.ranks.processes import RankProcesses
from kvrs_engine.engine.ranks.seats import Answered, Ended
from kvrs_engine.engine.ranks.wire import Fetched, Loaded
from kvrs_engine.engine.worker import geometry_of

SETTINGS = EngineSettings(pages=8, max_model_len=128)
_FLOAT_BYTES = 4  # Of a weight in memory.


@dataclass(frozen=True, slots=True)
class Planned:
    after: Layout
    moves: tuple[Move, ...]


def planned(name: str, before: Layout, units: Units, lost: int) -> Planned:
    """By the name of a planner: what it has survivors fetch."""
    groups = on_demand.survivors(before, [lost])
    if name == "on demand":
        after = on_demand.reshaped(before, units, groups, spread=False)
    else:
        after = cmm.reshaped(before, units, groups)
    moves = plan(before, after, units, {lost}).moves
    if name == "greedy":  # What it does not have itself a rank reads.
        moves = tuple(replace(move, source=HOST) for move in moves)
    if name == "full reload":
        moves = tuple(
            Move(unit, 0, units.bytes_of(unit), HOST, rank)
            for rank in after.ranks
            for unit in sorted(after.held(rank))
            if units.bytes_of(unit)
        )
    return Planned(after, moves)


PLANNERS = ("full reload", "greedy", "cmm", "on demand")


def row_of(model: Path, ranks: int, name: str, lost: int) -> dict[str, Any]:
    """One plan, carried out: reads first and copies behind them, and once more side by side."""
    config = ModelConfig.from_directory(model)
    units = config.units_of_ranks
    with _ranks(model, config, ranks) as (processes, before):
        processes.seats[lost].kill()
        found = planned(name, before, units, lost)
        reads = [move for move in found.moves if move.source == HOST]
        copies = [move for move in found.moves if move.source != HOST]
        reload_s = _fetch(processes, 2, reads)
        copy_s = _fetch(processes, 3, copies)
        both_s = _fetch(processes, 4, found.moves)
        moved = processes.moved[2] + processes.moved[3]
    return {
        "planner": name,
        "lost": lost,
        "least_bytes": least_bytes(before, found.after, units, lost),
        "host_bytes": moved["host"],
        "peer_bytes": moved["peer"],
        "read_bytes": moved["read"],
        "needed_bytes": _in_files(moved["host"], model),
        "tile_peer_bytes": sum(move.bytes for move in copies if move.unit.kind is UnitKind.MLP),
        "of_busiest": max(_by_target(reads).values(), default=0),
        "of_idlest": min(_by_target(reads, found.after.ranks).values(), default=0),
        "largest_unit_bytes": max(move.bytes for move in found.moves),
        "reload_s": reload_s,
        "copy_s": copy_s,
        "both_s": both_s,
    }


def least_bytes(before: Layout, after: Layout, units: Units, lost: int) -> int:
    """Eq. (1), for each kind of units of each layer as one interval of bytes."""
    total = 0
    sizes = (units.attention_bytes, units.mlp_bytes)
    targets = list(range(len(after.ranks)))
    for layer in range(units.layers):
        for owners, own in zip((before.attention, before.mlp), sizes, strict=True):
            total += cmm.least_reload_bytes(_shards(owners[layer], own), {lost}, targets)
    shards = _shards(before.vocabulary, units.vocabulary_bytes)
    return total + cmm.least_reload_bytes(shards, {lost}, targets)


def _shards(owners: Sequence[int], sizes: Sequence[int]) -> list[cmm.Shard]:
    shards, at = [], 0
    for owner, size in zip(owners, sizes, strict=True):
        shards.append(cmm.Shard(owner, at, at + size))
        at += size
    return shards


@contextmanager
def _ranks(model: Path, config: ModelConfig, count: int) -> Iterator[tuple[RankProcesses, Layout]]:
    """The processes of an even instance, with their weights."""
    layout = uneven(config.units_of_ranks, staged(config.layers, [range(count)]))
    geometry = geometry_of(config, SETTINGS)
    cells = Region.anonymous("cells", memory_bytes(geometry, SETTINGS.pages))
    processes = RankProcesses(model, SETTINGS, config, cells, ElasticSettings())
    try:
        for rank in layout.ranks:
            processes.seats[rank] = processes.start(rank, layout, 0)
        _collect(processes, count)
        units = config.units_of_ranks
        moves = [
            Move(unit, 0, units.bytes_of(unit), HOST, rank)
            for rank in layout.ranks
            for unit in sorted(layout.held(rank))
            if units.bytes_of(unit)
        ]
        _fetch(processes, 1, moves)
        yield processes, layout
    finally:
        processes.close(0.0)
        cells.close()


def _fetch(processes: RankProcesses, epoch: int, moves: Sequence[Move]) -> float:
    """Carry moves out; the seconds until the last one has arrived."""
    began_s = time.monotonic()
    processes.fetch(epoch, moves)
    _collect(processes, len(moves))
    return time.monotonic() - began_s


def _collect(processes: RankProcesses, count: int) -> None:
    """So many answers."""
    while count:
        told = processes.told.get(timeout=120)
        if isinstance(told, Ended) and told.seat.has_died:
            continue  # The lost one.
        assert isinstance(told, Answered), told
        match told.answer:
            case Loaded() as loaded:
                processes.loaded(told.seat, loaded)
            case Fetched() as fetched:
                processes.fetched(told.seat, fetched)
            case _:
                raise RuntimeError(told.answer)
        count -= 1


def _by_target(moves: Sequence[Move], ranks: Sequence[int] = ()) -> dict[int, int]:
    found: defaultdict[int, int] = defaultdict(int, dict.fromkeys(ranks, 0))
    for move in moves:
        found[move.target] += move.bytes
    return found


def _in_files(size_bytes: int, model: Path) -> int:
    """Bytes in files of weights that take `size_bytes` in memory."""
    (of_a_weight,) = {_weight_bytes(path) for path in Weights(model).files}
    return size_bytes // _FLOAT_BYTES * of_a_weight


def _weight_bytes(path: Path) -> int:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        (size,) = {file.get_tensor(name).element_size() for name in file.keys()}  # noqa: SIM118
    return int(size)
