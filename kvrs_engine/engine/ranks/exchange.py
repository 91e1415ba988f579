"""The exchange between the ranks of a formation, in shared memory.

Every rank has a line of words and two slots. To add up a block, each rank of a stage writes the
sums of its largest subtrees (`kvrs_engine.elastic.trees`) into a slot, increments its counter,
waits for the counters of the stage's other ranks, and adds all sums in the fixed order of the tree.
A slot is used again two sums later; by then every other rank has incremented its counter once more,
so it has read the slot. Sums of spread heads are in slots of the stage, where each rank writes its
own rows.

Sums of many rows are divided: each rank adds a slice of rows, writes the result over these rows of
its own first sum, which no other rank needs any more, increments its counter again, and copies the
other ranks' slices. Additions are per element, so slices change no bits.

Rows of experts are in further slots of the stage, one per expert of a row. The router, which every
rank computes, determines which slots a rank writes, and which rank computes which rows of an expert
with copies. One set of these slots is enough, because a sum of attention is between two uses. The
first rank of a stage counts each expert's tiles of rows.

Four ranks on two cores add up 16 rows of 1,024 floats in 105 us at p50 and 230 us at p99
(2026-11-23, 3e1a7352).

Rows for the next stage, and logits for the instance's process, have separate areas, one per stage.
Batches use them in turns, so that each stage may compute another batch.

The memory belongs to one formation: a rank of an earlier formation writes into unused memory.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from kvrs.errors import KvrsError
from kvrs_engine.elastic.experts import assign, pieces_of
from kvrs_engine.elastic.layouts import SPREAD, Layout
from kvrs_engine.elastic.trees import Node, combine, cover
from kvrs_engine.elastic.units import UnitKind
from kvrs_engine.engine.layers.tiles import FLOAT_BYTES, TILE_ROWS, padded_rows
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.futex import Word

_LINE_BYTES = 64  # A cache line: ranks do not share lines.
_COUNT_BYTES = 8
_PAGE_BYTES = 4096
_MAX_VIEWS = 4096  # Limit of cached views; creating a view costs as much as a small sum.
# Number of additions per rank that must be saved to pay for another wait.
SLICED_ADDITIONS = 1 << 17


class FormationEndedError(KvrsError):
    """The formation has ended, because a rank is lost or another formation follows."""


class Areas:
    """The places of all areas in the memory of a formation, for all stages or for some."""

    def __init__(
        self,
        layout: Layout,
        stages: range | None = None,
        *,
        config: ModelConfig,
        batch_tokens: int,
    ) -> None:
        """`stages` are the stages in this memory; None: all."""
        last, experts = len(layout.stages) - 1, config.experts
        self._stages = stages = stages or range(last + 1)
        self.lines = layout.ranks  # Ranks of all stages.
        # Ranks of the stages in this memory.
        self.ranks = tuple(rank for stage in stages for rank in layout.stages[stage].ranks)
        self.layers = layout.layers(stages)
        self.hidden, self.vocabulary = config.hidden, config.vocab
        self.experts = experts.count if experts else 0  # Experts of a layer; 0: none.
        self.depth = last + 1  # Limit of concurrent batches: one per stage.
        self.logit_rows = batch_tokens if last in stages else 0
        # Stages whose output rows are in this memory.
        self._boundaries = range(max(0, stages.start - 1), min(stages.stop, last))
        dense = [owners for at, owners in enumerate(layout.mlp) if not config.has_experts(at)]
        most = max(
            len(cover(_places(owners, rank), len(owners)))
            for owners in (*layout.attention, *dense)
            for rank in (*self.ranks, SPREAD)
        )
        self.rows_bytes = padded_rows(batch_tokens) * config.hidden * FLOAT_BYTES
        self._slot_bytes = most * self.rows_bytes
        # A row has a slot for each part of each of its experts.
        parts = experts.chosen * config.grain.expert_parts if experts else 0
        self._routed_bytes = parts * self.rows_bytes
        self._logits_bytes = _whole_pages(self.logit_rows * config.vocab * FLOAT_BYTES)
        slots = 2 * (len(self.ranks) + (len(stages) if layout.turns else 0))
        rows = len(self._boundaries) * self.depth
        self._slots = _whole_pages((1 + len(self.lines)) * _LINE_BYTES)
        self._routed = _whole_pages(self._slots + slots * self._slot_bytes)
        self._rows = _whole_pages(self._routed + len(stages) * self._routed_bytes)
        self._logits = _whole_pages(self._rows + rows * self.rows_bytes)
        # The tile counts: by layer and expert, then by the rank that has computed them.
        self.counts = self._logits + self.depth * self._logits_bytes
        counts = len(self.layers) * self.experts + len(self.lines)
        self.size_bytes = self.counts + counts * _COUNT_BYTES

    def slot(self, rank: int, turn: int) -> int:
        return self._slot(self.ranks.index(rank), turn)

    def spread_slot(self, stage: int, turn: int) -> int:
        return self._slot(len(self.ranks) + self._stages.index(stage), turn)

    def routed_slot(self, stage: int) -> int:
        """Return the offset of the stage's first slot of experts."""
        return self._routed + self._stages.index(stage) * self._routed_bytes

    def rows(self, boundary: int, batch: int) -> int:
        place = self._boundaries.index(boundary) * self.depth + batch % self.depth
        return self._rows + place * self.rows_bytes

    def logits(self, batch: int) -> int:
        return self._logits + batch % self.depth * self._logits_bytes

    def _slot(self, place: int, turn: int) -> int:
        return self._slots + (2 * place + turn) * self._slot_bytes


class Line:
    """The words of one rank."""

    def __init__(self, memory: mmap.mmap, areas: Areas, rank: int) -> None:
        first = (1 + areas.lines.index(rank)) * _LINE_BYTES
        self.summed = Word(memory, first)  # Number of sums that the rank has written.
        self.sent = Word(memory, first + 4)  # Last batch whose rows the rank has sent.
        self.done = Word(memory, first + 8)  # Last batch that the rank has computed.
        # While the rank waits: the awaited word (see `_waits`), and its awaited value.
        self.awaits = Word(memory, first + 12)
        self.until = Word(memory, first + 16)
        # Processor time of its thread, in milliseconds.
        self.worked_ms = Word(memory, first + 20)


class FormationMemory:
    """The memory of a formation, mapped by all its processes."""

    def __init__(self, memory: mmap.mmap, areas: Areas) -> None:
        self.areas = areas
        self.ended = Word(memory, 0)
        self.lines = {rank: Line(memory, areas, rank) for rank in areas.lines}
        self._floats = torch.frombuffer(memory, dtype=torch.float32)
        self._views: dict[tuple[int, int, int], Tensor] = {}
        count = len(areas.layers) * areas.experts
        words = torch.frombuffer(
            memory, dtype=torch.int64, count=count + len(areas.lines), offset=areas.counts
        )
        # Tile counts since the formation began: by layer and expert, and by rank.
        self.tiles = words[:count].view(len(areas.layers), areas.experts)
        self.computed = words[count:]

    def floats(self, offset: int, rows: int, width: int) -> Tensor:
        key = (offset, rows, width)
        if (found := self._views.get(key)) is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            first = offset // FLOAT_BYTES
            found = self._floats[first : first + rows * width].view(rows, width)
            self._views[key] = found
        return found

    def note_computed(self, rank: int, tiles: int) -> None:
        self.computed[self.areas.lines.index(rank)] = tiles

    def logits(self, rows: int, batch: int) -> Tensor:
        return self.floats(self.areas.logits(batch), rows, self.areas.vocabulary)

    def end(self) -> None:
        """Tell all ranks to stop computing in this formation."""
        self.ended.note(1)
        for line in self.lines.values():
            line.summed.wake()
            line.sent.wake()
            line.done.wake()

    def progress(self) -> list[int]:
        """Return counters, of which one changes whenever a rank progresses in its batch."""
        lines = self.lines.values()
        return [word.value for line in lines for word in (line.summed, line.sent, line.done)]

    def stuck(self, batch: int) -> list[int]:
        """Return the ranks that have not computed the batch and do not wait for another rank."""
        return [
            rank
            for rank in self.areas.ranks
            if not (line := self.lines[rank]).done.has_reached(batch) and not self._waits(line)
        ]

    def _waits(self, line: Line) -> bool:
        if not line.awaits.value:
            return False
        place, kind = divmod(line.awaits.value - 1, 2)
        other = self.lines[self.areas.lines[place]]
        return not (other.sent if kind else other.summed).has_reached(line.until.value)


@dataclass(frozen=True, slots=True)
class _Sum:
    """The plan of adding up the sums of a stage's ranks."""

    sources: tuple[tuple[int, int], ...]  # Rank and index of each sum.
    additions: tuple[tuple[int, int], ...]  # Indexes of two sums; each result gets a new index.
    result: int


class SharedMemory:
    """The `SumExchange` of one rank of a stage."""

    def __init__(self, memory: FormationMemory, layout: Layout, rank: int) -> None:
        self._memory, self._areas, self._rank = memory, memory.areas, rank
        stage = layout.stage_of(rank)
        self._line = memory.lines[rank]
        self._ranks, self._place = stage.ranks, stage.ranks.index(rank)
        self._peers = [other for other in stage.ranks if other != rank]
        self._sums = {
            (kind, layer): _sum_of(owners[layer])
            for kind, owners in ((UnitKind.ATTENTION, layout.attention), (UnitKind.MLP, layout.mlp))
            for layer in stage.layers
        }
        self._layout, self._first = layout, memory.areas.layers.start
        self._count, self._turn = 0, 0
        self._shape = (0, 0)
        self._slices: list[slice] = []  # Rows of each rank of the stage.
        place = layout.stages.index(stage)
        self._before = layout.stages[place - 1].ranks[0] if place else None
        self._boundary = place
        self._sends = place + 1 < len(layout.stages) and stage.ranks[0] == rank

    def total(self, sums: list[Tensor], kind: UnitKind, layer: int) -> Tensor:
        plan = self._sums[kind, layer]
        if not self._peers and len(sums) == len(plan.sources):
            self._count += 1
            self._line.summed.note(self._count)
            (total,) = sums
            return total
        self._turn ^= 1
        for at, own in enumerate(sums):
            self._slot(self._rank, at).copy_(own)
        self._meet()
        if self._saved_additions(plan) < SLICED_ADDITIONS:
            return self._added(plan, sums)
        mine = self._slices[self._place]
        if mine.start < mine.stop:
            self._slot(self._rank, 0)[mine] = self._added(plan, sums, mine)
        self._meet()
        total = torch.empty(self._shape)
        for rank, rows in zip(self._ranks, self._slices, strict=True):
            total[rows] = self._slot(rank, 0)[rows]
        return total

    def spread_sum(self, number: int) -> Tensor:
        """Return the memory for a sum of spread heads, into which each rank writes its own rows
        before the next `total`. Every rank has read its previous content, of two sums ago.
        """
        return self._sums_at(SPREAD, number, self._turn ^ 1)

    def slots_of_expert(self, layer: int, parts: int) -> int:
        return parts // pieces_of(self._layout, layer, parts).units

    def own_runs(self, layer: int, parts: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        runs = [-(-count // TILE_ROWS) for count in rows]
        if self._place == 0:
            self._memory.tiles[layer - self._first].add_(torch.tensor(runs))
        if not self._layout.copies_of(layer):
            return {}
        pieces = pieces_of(self._layout, layer, parts)
        each = parts // pieces.units
        assigned = assign([count for count in runs for _ in range(each)], pieces.holders)
        return {
            piece: [run for run, rank in enumerate(given) if rank == self._rank]
            for piece, given in assigned.items()
        }

    def slots(self, count: int, rows: Tensor) -> Tensor:
        first, (height, hidden) = self._areas.routed_slot(self._boundary), rows.shape
        return self._memory.floats(first, count * height, hidden).view(count, height, hidden)

    def slots_filled(self) -> None:
        self._meet()

    def _meet(self) -> None:
        """Wait until all ranks of the stage have reached this point."""
        self._count += 1
        self._line.summed.set(self._count)
        for peer in self._peers:
            self._await(self._memory.lines[peer].summed, self._count, peer, 0)

    def _saved_additions(self, plan: "_Sum") -> int:
        """Return the additions that slices save on each rank; copying an element counts as one."""
        rows, hidden = self._shape
        others = len(self._peers)
        return rows * hidden * others * (len(plan.additions) - 1) // (others + 1)

    def _added(self, plan: "_Sum", sums: list[Tensor], rows: slice | None = None) -> Tensor:
        """Return the whole sum, for a slice of rows or for all."""
        values = [
            sums[at] if rank == self._rank else self._slot(rank, at) for rank, at in plan.sources
        ]
        if rows is not None:
            values = [value[rows] for value in values]
        given = len(values)
        for one, other in plan.additions:
            left, right = values[one], values[other]
            values.append(left.add_(right) if one >= given else left + right)
        total = values[plan.result]
        return total if plan.result >= given else total.clone()

    def begin(self, rows: int, hidden: int) -> None:
        """Begin a batch of `rows` rows, padding included."""
        self._shape = (rows, hidden)
        count = len(self._ranks)
        bounds = [rows * at // count for at in range(count + 1)]
        self._slices = [slice(first, last) for first, last in pairwise(bounds)]

    def receive(self, batch: int) -> Tensor:
        """Return the rows of the previous stage; the caller must not change them."""
        assert self._before is not None, "the first stage receives none"
        self._await(self._memory.lines[self._before].sent, batch, self._before, 1)
        return self._memory.floats(self._areas.rows(self._boundary - 1, batch), *self._shape)

    def send(self, hidden: Tensor, batch: int) -> None:
        """Send rows to the next stage, if this is the first rank of the stage."""
        if self._sends:
            rows = self._areas.rows(self._boundary, batch)
            self._memory.floats(rows, *self._shape).copy_(hidden)
            self._line.sent.set(batch)

    def _slot(self, rank: int, at: int) -> Tensor:
        return self._sums_at(rank, at, self._turn)

    def _sums_at(self, rank: int, at: int, turn: int) -> Tensor:
        rows, hidden = self._shape
        if rank == SPREAD:
            first = self._areas.spread_slot(self._boundary, turn)
        else:
            first = self._areas.slot(rank, turn)
        return self._memory.floats(first + at * rows * hidden * FLOAT_BYTES, rows, hidden)

    def _await(self, word: Word, count: int, peer: int, kind: int) -> None:
        if word.has_reached(count):
            return
        self._line.until.note(count)
        self._line.awaits.note(2 * self._areas.lines.index(peer) + kind + 1)
        word.wait(count, self._look)
        self._line.awaits.note(0)

    def _look(self) -> None:
        if self._memory.ended.value:
            raise FormationEndedError("this formation has ended")


@cache
def _sum_of(owners: tuple[int, ...]) -> _Sum:
    count = len(owners)
    sources: list[tuple[int, int]] = []
    numbers: dict[Node, int] = {}
    for rank in sorted(set(owners)):
        for at, node in enumerate(cover(_places(owners, rank), count)):
            numbers[node] = len(sources)
            sources.append((rank, at))
    additions: list[tuple[int, int]] = []

    def add(one: int, other: int) -> int:
        additions.append((one, other))
        return len(sources) + len(additions) - 1

    result = combine(numbers, count, add)
    return _Sum(tuple(sources), tuple(additions), result)


def _places(owners: tuple[int, ...], rank: int) -> list[int]:
    return [place for place, owner in enumerate(owners) if owner == rank]


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
