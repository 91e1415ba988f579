"""Layouts: the assignment of a model's units to the ranks of an instance.

Stages split a model by layers. Within a stage each KV head of a layer is either partitioned (one
rank has the head for all sequences) or spread (every rank has the head's weights, and each
sequence's cells are on one rank: `placing.py`). Each tile of the MLP has one owner; other ranks of
the stage may have copies of experts, and compute some of their rows (`experts.py`). The LM head's
tiles belong to ranks of the last stage. No bit of a result depends on the layout, so that the
layout may change at any batch; its number rises with each change. A process keeps its rank number
for life, so the ranks of a layout may have gaps after a loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvrs.errors import LayoutError
from kvrs_engine.elastic.placing import Turns, cyclic
from kvrs_engine.elastic.units import COMMON, Unit, UnitKind, Units

SPREAD: Final = -1  # The owner of a spread head.

# (unit, rank) of the copies of MLP units by layer, in ascending order; empty without any copy.
Copies = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `[first, last)` and the ranks that compute them together."""

    first: int
    last: int
    ranks: tuple[int, ...]

    @property
    def layers(self) -> range:
        return range(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Layout:
    number: int
    stages: tuple[Stage, ...]
    attention: tuple[tuple[int, ...], ...]  # Owner by layer and KV head: a rank or SPREAD.
    mlp: tuple[tuple[int, ...], ...]  # Owner by layer and tile (or part of an expert).
    vocabulary: tuple[int, ...]  # Owner of each tile: a rank of the last stage.
    turns: Turns = ()  # Ranks of spread heads by layer and base; empty if no head is spread.
    copies: Copies = ()  # Copies of experts' units on other ranks than their owners.
    split: bool = False  # Each rank has parts of all experts; else, of as few as possible.

    @property
    def bases(self) -> int:
        """Number of bases of sequences (`placing.py`), also if no head is spread."""
        if self.turns:
            return len(self.turns[0])
        return max(len(stage.ranks) for stage in self.stages)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    def layers(self, stages: range) -> range:
        """Return the layers of consecutive stages."""
        return range(self.stages[stages.start].first, self.stages[stages.stop - 1].last)

    def stage_of(self, rank: int) -> Stage:
        return next(stage for stage in self.stages if rank in stage.ranks)

    def stage_at(self, layer: int) -> Stage:
        return next(stage for stage in self.stages if layer in stage.layers)

    def heads(self, rank: int, layer: int) -> tuple[int, ...]:
        """Return the KV heads of a layer that this rank owns."""
        return _owned(self.attention[layer], rank)

    def spread(self, layer: int) -> tuple[int, ...]:
        """Return the KV heads of a layer that are spread over the ranks of its stage."""
        return _owned(self.attention[layer], SPREAD)

    def cells(self, rank: int, base: int) -> list[tuple[int, int]]:
        """Return (layer, KV head) of each cell on this rank, for a page with this base."""
        found = []
        for layer in self.stage_of(rank).layers:
            heads = self.heads(rank, layer)
            if self.turns and self.turn(layer, base) == rank:
                heads = tuple(sorted((*heads, *self.spread(layer))))
            found += [(layer, head) for head in heads]
        return found

    def turn(self, layer: int, base: int) -> int:
        """Return the rank with the layer's cells of spread heads, for pages with this base, which
        may be of an earlier layout with more bases.
        """
        of_layer = self.turns[layer]
        return of_layer[base % len(of_layer)]

    def tiles(self, rank: int, layer: int) -> tuple[int, ...]:
        """Return the tiles of a layer's MLP that this rank owns or has as copies."""
        own = _owned(self.mlp[layer], rank)
        copied = [place for place, other in self.copies_of(layer) if other == rank]
        return tuple(sorted((*own, *copied))) if copied else own

    def copies_of(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return (unit, rank) of each copy in the layer's MLP."""
        return self.copies[layer] if self.copies else ()

    def vocabulary_tiles(self, rank: int) -> tuple[int, ...]:
        return _owned(self.vocabulary, rank)

    def holders(self, unit: Unit) -> tuple[int, ...]:
        """Return the ranks that have the unit."""
        match unit.kind:
            case UnitKind.COMMON:
                return self.ranks
            case UnitKind.ATTENTION:
                owner = self.attention[unit.layer][unit.place]
                return self.stage_at(unit.layer).ranks if owner == SPREAD else (owner,)
            case UnitKind.MLP:
                copies = [rank for at, rank in self.copies_of(unit.layer) if at == unit.place]
                return (self.mlp[unit.layer][unit.place], *copies)
            case UnitKind.VOCABULARY:
                return (self.vocabulary[unit.place],)

    def held(self, rank: int) -> frozenset[Unit]:
        """Return the units whose weights this rank has."""
        units = {COMMON}
        for layer in self.stage_of(rank).layers:
            for kind, owners in ((UnitKind.ATTENTION, self.attention), (UnitKind.MLP, self.mlp)):
                units |= {
                    Unit(kind, layer, place)
                    for place, owner in enumerate(owners[layer])
                    if owner in (rank, SPREAD)
                }
            units |= {
                Unit(UnitKind.MLP, layer, at) for at, own in self.copies_of(layer) if own == rank
            }
        units |= {Unit(UnitKind.VOCABULARY, 0, place) for place in self.vocabulary_tiles(rank)}
        return frozenset(units)

    def weight_bytes(self, rank: int, units: Units) -> int:
        return sum(map(units.bytes_of, self.held(rank)))

    def cells_per_page(self, rank: int) -> int:
        """Return the largest number of a page's cells on this rank: the cells of its own heads, and
        its even share of the spread heads, rounded up.
        """
        stage = self.stage_of(rank)
        own = sum(len(self.heads(rank, layer)) for layer in stage.layers)
        spread = sum(len(self.spread(layer)) for layer in stage.layers)
        return own + -(-spread // len(stage.ranks))


def uneven(units: Units, stages: Sequence[Stage], *, split: bool = False) -> Layout:
    """Return a layout of contiguous shares for any number of ranks; shares differ by one unit at
    most. `split`: each rank gets parts of every expert.

    Raises:
        LayoutError: a rank would have no unit, or experts have no parts to split.
    """
    heads = len(units.attention_bytes)
    return _layout(units, stages, lambda stage: _dealt(heads, stage), split=split)


def hybrid(units: Units, stages: Sequence[Stage], *, split: bool = False) -> Layout:
    """Return a layout with equally many KV heads on each rank and the remaining heads spread
    (RaidServe's hybrid attention). `split` is as in `uneven`.
    """

    def heads(stage: Stage) -> tuple[int, ...]:
        count, ranks = len(units.attention_bytes), len(stage.ranks)
        own = count // ranks
        return tuple(stage.ranks[at // own] if at < own * ranks else SPREAD for at in range(count))

    return _layout(units, stages, heads, split=split)


def staged(layers: int, groups: Sequence[Sequence[int]]) -> tuple[Stage, ...]:
    """Divide the layers into stages whose sizes differ by one layer at most."""
    if not 1 <= len(groups) <= layers:
        raise LayoutError(f"pp {len(groups)}: a model of {layers} layers has 1 to {layers} stages")
    bounds = [at * layers // len(groups) for at in range(len(groups) + 1)]
    return tuple(
        Stage(first, last, tuple(ranks))
        for (first, last), ranks in zip(pairwise(bounds), groups, strict=True)
    )


def fresh_turns(stages: Sequence[Stage]) -> Turns:
    """Return the cyclic turns of all layers; the number of bases is that of the ranks of the
    largest stage.
    """
    bases = max(len(stage.ranks) for stage in stages)
    return tuple(turn for stage in stages for turn in cyclic(stage.ranks, len(stage.layers), bases))


def validate(layout: Layout, units: Units) -> None:
    """Check that the owner of every unit, and of every turn of spread heads, is in the right stage.

    Raises:
        LayoutError: an owner is missing or wrong; the message names its unit.
    """
    _validate_stages(layout.stages, units.layers)
    for what, owners, counts in (
        ("attention", layout.attention, [len(units.attention_bytes)] * units.layers),
        ("mlp", layout.mlp, [len(units.mlp_of(layer)) for layer in range(units.layers)]),
    ):
        if len(owners) != units.layers:
            raise LayoutError(f"{what} of {len(owners)} layers, the model has {units.layers}")
        for stage in layout.stages:
            for layer in stage.layers:
                _validate_owners(f"{what} of layer {layer}", owners[layer], counts[layer], stage)
    if any(SPREAD in owners for owners in layout.attention):
        _validate_turns(layout)
    _validate_copies(layout, units)
    last = layout.stages[-1]
    _validate_owners("vocabulary", layout.vocabulary, len(units.vocabulary_bytes), last)


def _validate_copies(layout: Layout, units: Units) -> None:
    if layout.copies and len(layout.copies) != units.layers:
        raise LayoutError(f"copies of {len(layout.copies)} layers, the model has {units.layers}")
    for layer, copies in enumerate(layout.copies):
        owners, ranks = layout.mlp[layer], layout.stage_at(layer).ranks
        if copies and (not units.expert_parts or layer in units.dense_layers):
            raise LayoutError(f"copies in layer {layer}, which has no experts")
        if list(copies) != sorted(set(copies)):
            raise LayoutError(f"copies of layer {layer}: each once and in ascending order")
        for place, rank in copies:
            if place not in range(len(owners)) or rank not in ranks or rank == owners[place]:
                raise LayoutError(
                    f"a copy of unit {place} of layer {layer} on rank {rank}; allowed: of units 0 "
                    f"to {len(owners) - 1}, on other ranks of {ranks} than their owner"
                )


def _validate_turns(layout: Layout) -> None:
    layers = len(layout.attention)
    if len(layout.turns) != layers or len(set(map(len, layout.turns))) != 1 or not layout.bases:
        raise LayoutError(
            f"spread heads have turns of {len(layout.turns)} layers, the model has {layers}; "
            f"allowed: as many bases, one or more, in each"
        )
    for stage in layout.stages:
        for layer in stage.layers:
            if others := set(layout.turns[layer]) - set(stage.ranks):
                raise LayoutError(
                    f"turns of layer {layer} are given to rank {min(others)}, its stage has "
                    f"{stage.ranks}"
                )


def _validate_stages(stages: Sequence[Stage], layers: int) -> None:
    covered = [layer for stage in stages for layer in stage.layers]
    if covered != list(range(layers)) or not all(stage.layers for stage in stages):
        spans = ", ".join(f"[{stage.first}, {stage.last})" for stage in stages)
        raise LayoutError(f"stages {spans} do not cover layers [0, {layers}) once and in order")
    ranks = [rank for stage in stages for rank in stage.ranks]
    if len(set(ranks)) != len(ranks) or min(ranks, default=0) < 0:
        raise LayoutError(f"ranks {ranks}: each is in one stage once, and not negative")
    if not all(stage.ranks for stage in stages):
        raise LayoutError("a stage has no rank")


def _validate_owners(what: str, owners: Sequence[int], count: int, stage: Stage) -> None:
    if len(owners) != count:
        raise LayoutError(f"{what} has {len(owners)} owners for {count} units")
    allowed = {*stage.ranks, SPREAD} if what.startswith("attention") else set(stage.ranks)
    for place, owner in enumerate(owners):
        if owner not in allowed:
            raise LayoutError(
                f"unit {place} of {what} is given to rank {owner}, its stage has {stage.ranks}"
            )


def _layout(
    units: Units,
    stages: Sequence[Stage],
    heads: Callable[[Stage], tuple[int, ...]],
    *,
    split: bool,
) -> Layout:
    if split and units.expert_parts == 1:
        raise LayoutError("experts are split, but each is one unit of this model")
    split = split and units.expert_parts > 0
    _validate_stages(stages, units.layers)
    most = max(len(units.attention_bytes), len(units.mlp_bytes), len(units.dense_bytes))
    for stage in stages:
        if len(stage.ranks) > most:
            raise LayoutError(
                f"tp {len(stage.ranks)}: the model has {len(units.attention_bytes)} KV heads and "
                f"{len(units.mlp_bytes)} tiles, allowed: 1 to {most}"
            )
    attention = tuple(heads(stage) for stage in stages for _ in stage.layers)
    layout = Layout(
        number=1,
        stages=tuple(stages),
        attention=attention,
        mlp=tuple(
            _in_turns(len(units.mlp_of(layer)), stage)
            if split and layer not in units.dense_layers
            else _dealt(len(units.mlp_of(layer)), stage)
            for stage in stages
            for layer in stage.layers
        ),
        vocabulary=_dealt(len(units.vocabulary_bytes), stages[-1]),
        turns=fresh_turns(stages) if any(SPREAD in owners for owners in attention) else (),
        split=split,
    )
    validate(layout, units)
    return layout


def _dealt(count: int, stage: Stage) -> tuple[int, ...]:
    """Return the owners of `count` units in contiguous runs."""
    bounds = [at * count // len(stage.ranks) for at in range(len(stage.ranks) + 1)]
    return tuple(
        rank
        for rank, (first, last) in zip(stage.ranks, pairwise(bounds), strict=True)
        for _ in range(first, last)
    )


def _in_turns(count: int, stage: Stage) -> tuple[int, ...]:
    """Return the owners of `count` units, dealt to the ranks in turn."""
    return tuple(stage.ranks[at % len(stage.ranks)] for at in range(count))


def _owned(owners: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(place for place, owner in enumerate(owners) if owner == rank)
