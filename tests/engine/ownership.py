"""A model that is divided among ranks at random, all of them in one process, and a comparison of
its bytes with an engine that computes each sequence alone.

Each rank has copies of its own units at addresses of its own, and the cells of its own KV heads in
pools of its own. It computes with nothing else, and what it hands over are the sums of its largest
subtrees.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.protocol.geometry import KvGeometry
from kvrs_engine.elastic.trees import Node, combine, cover, steps
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.layers.attention import attend
from kvrs_engine.engine.layers.experts import Experts
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.layers.step import BatchStep, build_step
from kvrs_engine.engine.layers.tiles import TILE_ROWS, pair_sum
from kvrs_engine.engine.layers.units import CANONICAL, TALL, ColumnUnits, Form, RowUnits, product
from kvrs_engine.engine.models.decoder import Decoder
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk

SEQUENCES, LENGTH = 5, 110
CHUNKS = (1, 1, 1, 2, 5, 16, 17, 33, 64)
_VECTOR_FLOATS = 16
Place = tuple[str, int, int]  # Kind of a unit, its layer and its number.


@dataclass
class Rank:
    heights: tuple[int, ...]
    units: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    weights: dict[Place, Tensor] = field(default_factory=dict)
    pools: dict[int, KvPool] = field(default_factory=dict)

    def owned(self, kind: str, layer: int) -> list[int]:
        """In an order of its own."""
        return self.units.get((kind, layer), [])

    def times(self, rows: Tensor, kind: str, layer: int, unit: int) -> Tensor:
        return product(rows, self.weights[kind, layer, unit], self.heights)


class Formation:
    """The ranks of one instance. `in_order`: sums are added in the order of ranks, which is wrong,
    to show that the comparison sees it.
    """

    def __init__(
        self,
        decoder: Decoder,
        geometry: KvGeometry,
        pages: int,
        choose: random.Random,
        *,
        in_order: bool = False,
    ) -> None:
        self.decoder, self._geometry, self._pages = decoder, geometry, pages
        self._choose, self._in_order = choose, in_order
        self.ranks: list[Rank] = []
        self.stages = 0
        self.deal()

    def deal(self) -> None:
        """Give every unit an owner; cells that are there go where their heads go."""
        before = self.ranks
        count = self._choose.randint(1, 6)
        self.stages = self._choose.randint(1, min(4, count, self._geometry.layers))
        self.ranks = [
            Rank(self._choose.choice((TALL, CANONICAL.heights, (64, 16)))) for _ in range(count)
        ]
        # Each stage has a rank, and the others are anywhere.
        stage_of = [*range(self.stages)]
        stage_of += [self._choose.randrange(self.stages) for _ in range(count - self.stages)]
        inner = range(1, self._geometry.layers)
        cuts = [0, *sorted(self._choose.sample(inner, self.stages - 1)), self._geometry.layers]
        for stage in range(self.stages):
            members = [rank for rank, of in zip(self.ranks, stage_of, strict=True) if of == stage]
            for layer in range(cuts[stage], cuts[stage + 1]):
                self._deal_layer(layer, members)
        assert self.decoder.head is not None, "the decoder is whole"
        self._give("head", 0, self.decoder.head.weights, members)
        for layer in range(self._geometry.layers):
            self._move_cells(layer, before)

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits of all rows of a batch, `[rows, vocab]`."""
        by_heads = {
            pool.geometry.kv_heads: build_step(chunks, pool)
            for rank in self.ranks
            for pool in rank.pools.values()
        }
        step = next(iter(by_heads.values()))
        for rank in self.ranks:
            for pool in rank.pools.values():
                pool.begin(step.begun_pages)
        assert self.decoder.embedding is not None, "the decoder is whole"
        hidden = self.decoder.embedding(step)
        tables = None if self.decoder.rotary is None else self.decoder.rotary.at(step.positions)
        for index, layer in enumerate(self.decoder.layers):
            attention = partial(self._attention, index, tables, by_heads)
            hidden = hidden + attention(layer.attention_norm(hidden))
            hidden = hidden + self._mlp(index, layer.mlp_norm(hidden))
        last = self.decoder.last(hidden)
        parts = {
            unit: rank.times(last, "head", 0, unit)
            for rank in self.ranks
            for unit in rank.owned("head", 0)
        }
        return torch.cat([parts[unit] for unit in sorted(parts)], 1)[: step.real_rows]

    def cell(self, layer: int, head: int) -> Tensor:
        """The cell in all pages, `[pages, 2, page_size_tokens, head_dim]`."""
        (found,) = (
            rank.pools[layer].tensor[:, 0, rank.owned("heads", layer).index(head)]
            for rank in self.ranks
            if head in rank.owned("heads", layer)
        )
        return found

    def _attention(
        self,
        layer: int,
        tables: tuple[Tensor, Tensor] | None,
        by_heads: Mapping[int, BatchStep],
        rows: Tensor,
    ) -> Tensor:
        block = self.decoder.layers[layer].attention
        sums: dict[Node, Tensor] = {}
        for rank in self.ranks:
            owned = rank.owned("heads", layer)
            if not owned:
                continue
            step, pool = by_heads[len(owned)], rank.pools[layer]
            columns = [
                _biased(rank.times(rows, "heads", layer, unit), block.qkv, unit) for unit in owned
            ]
            heads = torch.stack(columns, 1).view(rows.shape[0], len(owned), -1, block.head_dim)
            queries, keys, values = block.split(heads, tables)
            real = slice(step.real_rows)
            pool.write(0, step.pages, step.slots, keys[real], values[real])
            mixed = attend(queries, pool, 0, step).view(rows.shape[0], len(owned), -1)
            summands = {
                unit: rank.times(mixed[:, at], "output", layer, unit)
                for at, unit in enumerate(owned)
            }
            sums |= _node_sums(summands, len(block.output.weights))
        return self._total(sums, block.output)

    def _experts(self, layer: int, experts: Experts, rows: Tensor) -> Tensor:
        """Row by row, of each expert in tiles of rows drawn at random, by any owner of a part."""
        form = Form(self._choose.choice((TALL, CANONICAL.heights)), together=False)
        found = experts.router(rows, form)
        block = self.decoder.layers[layer].mlp
        owners: dict[int, Rank] = {}
        for rank in self.ranks:
            owners |= dict.fromkeys(rank.owned("up", layer), rank)
        yielded: dict[tuple[int, int], Tensor] = {}  # By row and expert.
        for expert in sorted(set(found.experts.flatten().tolist())):
            wanting = (found.experts == expert).any(1).nonzero().flatten().tolist()
            self._choose.shuffle(wanting)
            at = [*wanting, *self._choose.choices(range(len(rows)), k=-len(wanting) % TILE_ROWS)]
            parts = []
            for unit in range(expert * experts.parts, (expert + 1) * experts.parts):
                up = owners[unit].times(rows[at], "up", layer, unit)
                parts.append(owners[unit].times(block.activation(up), "down", layer, unit))
            whole = pair_sum(torch.stack(parts, 1))
            yielded |= {(row, expert): whole[place] for place, row in enumerate(wanting)}
        weighted = [
            torch.stack(
                [yielded[row, one] * weight for one, weight in zip(own, weights, strict=True)]
            )
            for row, (own, weights) in enumerate(
                zip(found.experts.tolist(), found.weights, strict=True)
            )
        ]
        return pair_sum(torch.stack(weighted))

    def _mlp(self, layer: int, rows: Tensor) -> Tensor:
        if (experts := self.decoder.layers[layer].experts) is not None:
            return self._experts(layer, experts, rows)
        block = self.decoder.layers[layer].mlp
        sums: dict[Node, Tensor] = {}
        for rank in self.ranks:
            summands = {}
            for unit in rank.owned("up", layer):
                up = _biased(rank.times(rows, "up", layer, unit), block.up, unit)
                summands[unit] = rank.times(block.activation(up), "down", layer, unit)
            sums |= _node_sums(summands, len(block.down.weights))
        return self._total(sums, block.down)

    def _total(self, sums: dict[Node, Tensor], block: RowUnits) -> Tensor:
        if self._in_order:
            first, *others = sums.values()
            total = sum(others, start=first)
        else:
            arrived = self._choose.sample(list(sums.items()), len(sums))
            total = combine(dict(arrived), len(block.weights), torch.add)
        return total if block.bias is None else total + block.bias

    def _deal_layer(self, layer: int, members: list[Rank]) -> None:
        block = self.decoder.layers[layer]
        owners = self._give("heads", layer, block.attention.qkv.weights, members)
        self._give("output", layer, block.attention.output.weights, members, owners)
        owners = self._give("up", layer, block.mlp.up.weights, members)
        self._give("down", layer, block.mlp.down.weights, members, owners)

    def _give(
        self,
        kind: str,
        layer: int,
        weights: Sequence[Tensor],
        members: list[Rank],
        owners: list[int] | None = None,
    ) -> list[int]:
        if owners is None:
            owners = [self._choose.randrange(len(members)) for _ in weights]
        for unit in self._choose.sample(range(len(weights)), len(weights)):
            rank = members[owners[unit]]
            rank.units.setdefault((kind, layer), []).append(unit)
            rank.weights[kind, layer, unit] = self._placed(weights[unit])
        return owners

    def _placed(self, weight: Tensor) -> Tensor:
        """A copy of `[in, out]` at some multiple of 64 bytes."""
        offset = self._choose.randrange(64) * _VECTOR_FLOATS
        memory = weight.new_empty(offset + weight.numel())
        return memory[offset:].view(weight.shape[1], weight.shape[0]).copy_(weight.t()).t()

    def _move_cells(self, layer: int, before: Sequence[Rank]) -> None:
        for rank in self.ranks:
            owned = rank.owned("heads", layer)
            if not owned:
                continue
            geometry = replace_heads(self._geometry, len(owned))
            pool = rank.pools[layer] = KvPool(geometry, self._pages, torch.device("cpu"))
            pool.tensor[: self._pages] = torch.nan  # The worst that an earlier owner can leave.
            for old in before:
                for at, head in enumerate(old.owned("heads", layer)):
                    if head in owned:
                        pool.tensor[:, 0, owned.index(head)] = old.pools[layer].tensor[:, 0, at]


def replace_heads(geometry: KvGeometry, kv_heads: int) -> KvGeometry:
    """One layer of that many KV heads."""
    return KvGeometry(
        layers=1,
        kv_heads=kv_heads,
        head_dim=geometry.head_dim,
        dtype_bytes=geometry.dtype_bytes,
        page_size_tokens=geometry.page_size_tokens,
    )


def all_rows(step: BatchStep) -> BatchStep:
    """The same batch with logits of every row."""
    rows = torch.arange(step.token_ids.shape[0])
    return replace(step, logit_rows=rows, logits=step.real_rows)


def _node_sums(summands: dict[int, Tensor], units: int) -> dict[Node, Tensor]:
    found = {}
    for node in cover(summands, units):
        sums: dict[int, Tensor] = {}
        for unit, additions in steps(node, units):
            sums[unit] = summands[unit]
            for into, other in additions:
                sums[into] = sums[into] + sums.pop(other)
        (found[node],) = sums.values()
    return found


def _biased(columns: Tensor, units: ColumnUnits, unit: int) -> Tensor:
    return columns + units.biases[unit] if units.biases else columns


@dataclass
class Count:
    rows: int = 0
    rows_different: int = 0
    cells: int = 0
    cells_different: int = 0
    batches: int = 0


class Bench:
    """A model, and what one engine computes of some sequences."""

    def __init__(self, directory: Path, page_size_tokens: int, seed: int) -> None:
        self.size = page_size_tokens
        self.each = -(-LENGTH // page_size_tokens)
        self.worker = Worker(
            directory,
            EngineSettings(page_size_tokens=page_size_tokens, pages=2 * SEQUENCES * self.each),
        )
        choose = random.Random(seed)
        self.token_ids = [
            choose.choices(range(self.worker.vocab_size), k=LENGTH) for _ in range(SEQUENCES)
        ]
        self.expected = [self._alone(sequence) for sequence in range(SEQUENCES)]

    def _alone(self, sequence: int) -> Tensor:
        """Logits of every position."""
        pages = range(sequence * self.each, (sequence + 1) * self.each)
        chunk = Chunk(self.token_ids[sequence], 0, pages, logits=1)
        with torch.inference_mode():
            step = all_rows(build_step([chunk], self.worker.pool))
            return self.worker.model.forward(step, self.worker.pool)

    def trial(self, choose: random.Random, count: Count, *, in_order: bool = False) -> None:
        """All sequences to their ends in random batches, with new owners now and then."""
        pages = choose.sample(range(self.worker.pool.pages), k=SEQUENCES * self.each)
        held = [pages[at * self.each : (at + 1) * self.each] for at in range(SEQUENCES)]
        done = [0] * SEQUENCES
        formation = Formation(
            self.worker.model,
            self.worker.geometry,
            self.worker.pool.pages,
            choose,
            in_order=in_order,
        )
        while open_ones := [at for at in range(SEQUENCES) if done[at] < LENGTH]:
            if choose.random() < 0.1:
                formation.deal()
            members = choose.sample(open_ones, choose.randint(1, len(open_ones)))
            chunks, expected = [], []
            for at in members:
                last = min(LENGTH, done[at] + choose.choice(CHUNKS))
                chunks.append(Chunk(self.token_ids[at][done[at] : last], done[at], held[at], 1))
                expected.append(self.expected[at][done[at] : last])
                done[at] = last
            logits = formation.forward(chunks)
            count.batches += 1
            count.rows += logits.shape[0]
            for row, own in zip(logits, torch.cat(expected), strict=True):
                count.rows_different += not same_bytes(row, own)
        self._compare_cells(formation, held, count)

    def _compare_cells(self, formation: Formation, held: list[list[int]], count: Count) -> None:
        geometry, oracle = self.worker.geometry, self.worker.pool.tensor
        for layer in range(geometry.layers):
            for head in range(geometry.kv_heads):
                cells = formation.cell(layer, head)
                for sequence, pages in enumerate(held):
                    for at, page in enumerate(pages):
                        filled = slice(min(self.size, LENGTH - at * self.size))
                        own = oracle[sequence * self.each + at, layer, head]
                        count.cells += 1
                        count.cells_different += not same_bytes(
                            cells[page][:, filled], own[:, filled]
                        )
