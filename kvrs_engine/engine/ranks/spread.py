"""The computation of spread heads on a rank: in each layer, for the sequences whose turn is on this
rank (`kvrs_engine.elastic.placing`).

The rows of these sequences are a separate batch in separate tiles. Their results are written where
all ranks of the stage read them, each row by the rank that has computed it. A row's bits depend
neither on the other rows nor on the rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, tensor

from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.engine.layers.step import build_step
from kvrs_engine.engine.models.decoder import Attention, Decoder, Pass
from kvrs_engine.engine.ranks.cells import CellPool
from kvrs_engine.engine.ranks.exchange import SharedMemory
from kvrs_engine.scheduling.sequences import Chunk


@dataclass(frozen=True, slots=True)
class RankPart:
    """The weights and cells of a rank's own units, or of its spread heads
    (`Share.spread_heads`).
    """

    decoder: Decoder
    pool: CellPool


@dataclass(frozen=True, slots=True)
class _Part:
    """The sequences of a batch whose turn is on this rank in some layers."""

    batch: Pass
    rows: Tensor  # [rows of the step]: row numbers in the whole batch.


class SpreadHeads:
    """Computes a rank's spread heads, for one batch at a time."""

    def __init__(self, layout: Layout, rank: int, share: RankPart, exchange: SharedMemory) -> None:
        self._decoder, self._pool, self._exchange = share.decoder, share.pool, exchange
        self._bases = layout.bases
        first = share.decoder.first_layer
        self._turns = [
            frozenset(base for base, at in enumerate(layout.turns[layer]) if at == rank)
            for layer in range(first, first + len(share.decoder.layers))
        ]
        self._chunks: Sequence[Chunk] = ()
        self._parts: dict[frozenset[int], _Part | None] = {}  # By the bases on this rank.

    def begin(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._parts.clear()

    def compute(self, rows: Tensor, layer: int) -> None:
        """Write the sums of the spread heads, given the normalised rows of the whole batch."""
        decoder = self._decoder
        at = layer - decoder.first_layer
        attention, bases = decoder.layers[at].attention, self._turns[at]
        if not attention.qkv.weights or not bases:
            return
        if bases not in self._parts:
            self._parts[bases] = self._part(bases)
        if (part := self._parts[bases]) is None:
            return
        step = part.batch.step
        # Only in this layer: in another layer these pages' cells may belong to another rank.
        self._pool.begin_layer(layer, step.begun_pages)
        own = rows.index_select(0, part.rows)
        sums = attention.sums(own, layer, part.batch)
        real = part.rows[: step.real_rows]
        for number, values in enumerate(sums):
            place = self._exchange.spread_sum(number)
            place.index_copy_(0, real, values[: step.real_rows])

    def _part(self, bases: frozenset[int]) -> _Part | None:
        chunks: list[Chunk] = []
        rows: list[int] = []
        first = 0
        for chunk in self._chunks:
            last = first + len(chunk.token_ids)
            if chunk.base % self._bases in bases:
                chunks.append(chunk)
                rows += range(first, last)
            first = last
        if not chunks:
            return None
        step = build_step(chunks, self._pool)
        rows += [rows[0]] * (step.token_ids.shape[0] - len(rows))
        batch = self._decoder.passing(step, self._pool, self._exchange)
        return _Part(batch, tensor(rows))


def hybrid(decoder: Decoder, spread: SpreadHeads) -> Decoder:
    """Return the decoder of a rank's own heads, extended by its spread heads."""
    return replace(
        decoder,
        layers=[
            replace(layer, attention=HybridAttention.of(layer.attention, spread))
            for layer in decoder.layers
        ],
    )


@dataclass(frozen=True, slots=True)
class HybridAttention(Attention):
    """Attention of a rank's own heads for all rows, and of its spread heads for some rows."""

    spread: SpreadHeads

    @classmethod
    def of(cls, own: Attention, spread: SpreadHeads) -> "HybridAttention":
        return cls(own.qkv, own.output, own.head_norm, own.head_dim, spread)

    def sums(self, rows: Tensor, layer: int, batch: Pass) -> list[Tensor]:
        self.spread.compute(rows, layer)
        return Attention.sums(self, rows, layer, batch)
