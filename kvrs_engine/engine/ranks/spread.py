"""The spread heads of a rank: in each layer those of the sequences that have their turn here
(`kvrs_engine.elastic.placing`).

The rows of these sequences are a batch of their own, in tiles of their own. What they yield goes
where all ranks of the stage read it, each row from the one rank that has computed it. Neither rows
beside a row nor the rank change its bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, tensor

from kvrs.profiles.tables import PrefillTable
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import Units
from kvrs_engine.engine.kv_pool import KvStore
from kvrs_engine.engine.layers.step import BatchStep, build_step
from kvrs_engine.engine.models.decoder import Attention, Decoder, Forms
from kvrs_engine.engine.ranks.cells import CellPool
from kvrs_engine.engine.ranks.exchange import SharedMemory
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_engine.scheduling.shares import PrefillCost, Waiting, in_line, shared_out

# Where costs of prefill are taken from a table: of so many tokens, behind as many as there may be.
_TOKENS = 64
_PS = 1e12


def prefill_cost(layout: Layout, units: Units, prefill: PrefillTable) -> PrefillCost | None:
    """Cost of a token of a prompt on all ranks of a layout, and on the one that has its spread
    heads, by a table that was measured with the attention divided evenly; None: no head is spread.

    A share of the time that does not rise with the position is taken to be attention's, as large as
    that of its weights; what rises with it is.
    """
    if not layout.turns:
        return None
    heads, ranks = len(units.attention_bytes), len(layout.turns[0])
    spread = max(len(layout.spread(layer)) for layer in range(units.layers))
    attention = units.layers * sum(units.attention_bytes)
    share = attention / (attention + units.all_mlp_bytes)
    first_s, behind_s = (prefill.extra(before, _TOKENS) for before in (0, _TOKENS))
    token_s = (first_s - prefill.step_overhead_s) / _TOKENS
    rising_s = max(0.0, behind_s - first_s) / _TOKENS / _TOKENS
    on_one = ranks * spread / heads  # Of the attention, in place of an even share.
    return PrefillCost(
        step_ps=round(prefill.step_overhead_s * _PS),
        dense_ps=max(0, round(token_s * (1 - share * spread / heads) * _PS)),
        base_ps=max(1, round(token_s * share * on_one * _PS)),
        per_position_ps=round(rising_s * on_one * _PS),
    )


class HasLayout(Protocol):
    """Ranks of which the layout may change."""

    @property
    def units(self) -> Units: ...
    @property
    def layout(self) -> Layout: ...


@dataclass(frozen=True, slots=True)
class PrefillShares:
    """Tokens of a prefill batch (a `Share`): by RaidServe's Algorithm 1 where heads are spread,
    else first come, first served.
    """

    ranks: HasLayout
    prefill: PrefillTable

    def __call__(self, waiting: Sequence[Waiting], budget: int) -> list[int]:
        layout = self.ranks.layout
        cost = prefill_cost(layout, self.ranks.units, self.prefill) if len(waiting) > 1 else None
        if cost is None:
            return in_line(waiting, budget)
        bases = layout.bases
        by_base = [Waiting(each.rank % bases, each.first, each.tokens) for each in waiting]
        return shared_out(by_base, budget, cost)


@dataclass(frozen=True, slots=True)
class RankPart:
    """Weights of a rank's own units, or of the spread heads alone (`Share.spread_heads`), with the
    cells of their heads.
    """

    decoder: Decoder
    pool: CellPool


@dataclass(frozen=True, slots=True)
class _Part:
    """The sequences of a batch that have their turn here in some layers."""

    step: BatchStep
    rows: Tensor  # [rows of the step]: the batch's row that stands in each.
    tables: tuple[Tensor, Tensor] | None  # Of rotations.


class SpreadHeads:
    """Computes them, for one batch at a time."""

    def __init__(self, layout: Layout, rank: int, share: RankPart, exchange: SharedMemory) -> None:
        self._decoder, self._pool, self._exchange = share.decoder, share.pool, exchange
        self._bases = layout.bases
        first = share.decoder.first_layer
        self._turns = [
            frozenset(base for base, at in enumerate(layout.turns[layer]) if at == rank)
            for layer in range(first, first + len(share.decoder.layers))
        ]
        self._chunks: Sequence[Chunk] = ()
        self._parts: dict[frozenset[int], _Part | None] = {}  # By the bases that have their turn.

    def begin(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._parts.clear()

    def compute(self, rows: Tensor, layer: int) -> None:
        """Hand over the sums of these heads, for normalised rows of the whole batch."""
        decoder = self._decoder
        at = layer - decoder.first_layer
        attention, bases = decoder.layers[at].attention, self._turns[at]
        if not attention.qkv.weights or not bases:
            return
        if bases not in self._parts:
            self._parts[bases] = self._part(bases)
        if (part := self._parts[bases]) is None:
            return
        step = part.step
        # Only of this layer: in another one these cells may be those of another rank.
        self._pool.begin_layer(layer, step.begun_pages)
        own = rows.index_select(0, part.rows)
        sums = attention.sums(own, layer, part.tables, step, self._pool, decoder.forms)
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
        rotary = self._decoder.rotary
        return _Part(step, tensor(rows), None if rotary is None else rotary.at(step.positions))


def hybrid(decoder: Decoder, spread: SpreadHeads) -> Decoder:
    """The decoder of a rank's own heads, with the spread ones beside them."""
    return replace(
        decoder,
        layers=[
            replace(layer, attention=HybridAttention.of(layer.attention, spread))
            for layer in decoder.layers
        ],
    )


@dataclass(frozen=True, slots=True)
class HybridAttention(Attention):
    """A rank's own heads for all rows, and the spread ones for some."""

    spread: SpreadHeads

    @classmethod
    def of(cls, own: Attention, spread: SpreadHeads) -> "HybridAttention":
        return cls(own.qkv, own.output, own.head_norm, own.head_dim, spread)

    def sums(
        self,
        rows: Tensor,
        layer: int,
        tables: tuple[Tensor, Tensor] | None,
        step: BatchStep,
        pool: KvStore,
        forms: Forms,
    ) -> list[Tensor]:
        self.spread.compute(rows, layer)
        return Attention.sums(self, rows, layer, tables, step, pool, forms)
