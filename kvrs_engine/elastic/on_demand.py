"""The next layout after a change of ranks: each rank keeps its units, and only missing units are
moved (RaidServe 3.1 and 3.2).

The size of a tile does not depend on the number of ranks, so the tiles of a lost rank are dealt one
by one; per layer, tile counts of ranks differ by one at most. The tiles are dealt in runs, the
largest run first, which keeps subtrees of the sum whole. Each rank owns `heads // ranks` KV heads,
and the remaining heads are spread. The turns of a lost rank are dealt to the others; when ranks
join, all turns are dealt anew.

A lost unit with a copy on a remaining rank goes to that rank without a move.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations

from kvrs.errors import LayoutError
from kvrs_engine.elastic.layouts import SPREAD, Layout, Stage, fresh_turns, validate
from kvrs_engine.elastic.placing import Turns, mended
from kvrs_engine.elastic.units import Units


def reshaped(
    before: Layout,
    units: Units,
    ranks: Sequence[Sequence[int]],
    *,
    spread: bool = True,
    copies: bool = True,
) -> Layout:
    """Return the layout for the ranks of each stage: the survivors, and ranks that join.

    A stage with unchanged ranks keeps its assignment. Without `spread` each remaining KV head goes
    to one rank, as tiles do. Without `copies` the new layout has no copies.

    Raises:
        LayoutError: a stage has no rank.
    """
    stages = []
    for stage, group in zip(before.stages, ranks, strict=True):
        if not group:
            raise LayoutError(f"no rank is left for layers [{stage.first}, {stage.last})")
        stages.append(Stage(stage.first, stage.last, tuple(sorted(group))))
    given: Counter[int] = Counter()  # New bytes of each rank.
    attention, mlp = [], []
    left: list[set[tuple[int, int]]] = []  # Remaining copies by layer.
    for stage, old in zip(stages, before.stages, strict=True):
        for layer in stage.layers:
            owners = before.attention[layer]
            kept = {copy for copy in before.copies_of(layer) if copy[1] in stage.ranks}
            if stage == old:
                attention.append(owners)
                mlp.append(before.mlp[layer])
                left.append(kept)
                continue
            attention.append(
                _heads(owners, stage, units, given)
                if spread
                else _tiles(owners, stage.ranks, units.attention_bytes, given)
            )
            is_split = before.split and layer not in units.dense_layers
            own = _tiles(
                before.mlp[layer],
                stage.ranks,
                units.mlp_of(layer),
                given,
                kept,
                parts=units.expert_parts if is_split else 0,
            )
            mlp.append(own)
            left.append(kept - set(enumerate(own)))
    last = stages[-1].ranks
    vocabulary = _tiles(before.vocabulary, last, units.vocabulary_bytes, given)
    turns = turns_after(before, stages) if any(SPREAD in owners for owners in attention) else ()
    after = Layout(
        number=before.number + 1,
        stages=tuple(stages),
        attention=tuple(attention),
        mlp=tuple(mlp),
        vocabulary=vocabulary,
        turns=turns,
        copies=tuple(tuple(sorted(own)) for own in left) if copies and any(left) else (),
        split=before.split,
    )
    validate(after, units)
    return after


def survivors(before: Layout, lost: Sequence[int]) -> list[list[int]]:
    """Return the remaining ranks of each stage."""
    return [[rank for rank in stage.ranks if rank not in lost] for stage in before.stages]


def after_losses(
    before: Layout,
    units: Units,
    rank: int,
    losses: int,
    reshape: Callable[[Layout, Units, Sequence[Sequence[int]]], Layout],
) -> Iterator[Layout]:
    """Yield the layouts after up to `losses` losses of other ranks in the rank's stage, together or
    one after the other, with fewer losses first. `reshape` makes the next layout. Losses in other
    stages do not change the rank's units.
    """
    levels = [[before]]  # Layouts by the number of losses.
    for lost in range(1, losses + 1):
        levels.append([])
        for at_once in range(1, lost + 1):
            for layout in levels[lost - at_once]:
                others = [other for other in layout.stage_of(rank).ranks if other != rank]
                for gone in combinations(others, at_once):
                    after = reshape(layout, units, survivors(layout, gone))
                    levels[lost].append(after)
                    yield after


def turns_after(before: Layout, stages: Sequence[Stage]) -> Turns:
    """Return the turns of spread heads in the next layout: those of lost ranks are dealt to the
    others, and all are dealt anew when ranks join.
    """
    joining = {rank for stage in stages for rank in stage.ranks}.difference(before.ranks)
    if joining or not before.turns:
        return fresh_turns(stages)
    turns: list[tuple[int, ...]] = []
    for stage in stages:
        turns += mended(before.turns[stage.first : stage.last], stage.ranks)
    return tuple(turns)


def _heads(
    owners: Sequence[int], stage: Stage, units: Units, given: Counter[int]
) -> tuple[int, ...]:
    """Assign equally many heads to each rank and spread the rest. A rank keeps its own heads, and
    then gets heads whose weights it already has.
    """
    ranks = stage.ranks
    each = len(owners) // len(ranks)
    kept: dict[int, list[int]] = {rank: [] for rank in ranks}
    loose: list[int] = []
    for head, owner in enumerate(owners):
        if owner in kept and len(kept[owner]) < each:
            kept[owner].append(head)
        else:
            loose.append(head)
    # The weights of spread heads are on every rank already, so these heads are assigned first; lost
    # heads are spread, or go to the ranks with the fewest new bytes.
    loose.sort(key=lambda head: (owners[head] != SPREAD, head))
    result = list(owners)
    lacking = [rank for rank in ranks for _ in range(each - len(kept[rank]))]
    lacking.sort(key=lambda rank: (-given[rank], rank))
    taken = loose[: len(lacking)]
    for rank, head in zip(lacking, taken, strict=True):
        result[head] = rank
        if owners[head] != SPREAD:
            given[rank] += units.attention_bytes[head]
    for head in loose[len(lacking) :]:
        result[head] = SPREAD
    return tuple(result)


def _tiles(
    owners: Sequence[int],
    ranks: Sequence[int],
    sizes: Sequence[int],
    given: Counter[int],
    copies: Collection[tuple[int, int]] = (),
    parts: int = 0,
) -> tuple[int, ...]:
    """Assign tiles to ranks, keeping owners. `parts`: units per expert, to spread each expert over
    many ranks; 0: each over as few ranks as possible.
    """
    owners, is_given = _given_to_copies(owners, ranks, copies)
    own = {rank: [tile for tile, owner in enumerate(owners) if owner == rank] for rank in ranks}
    loose = [tile for tile, owner in enumerate(owners) if owner not in own]
    counts = {rank: len(tiles) for rank, tiles in own.items()}
    quotas = _quotas(counts, len(loose), given)
    if is_given and any(counts[rank] > quotas[rank] for rank in ranks):
        quotas = _filled(counts, len(loose), given)
    for rank in ranks:  # Ranks above their quota give tiles to ranks that join.
        while counts[rank] > quotas[rank]:
            loose.append(_spared(own[rank], parts))
            counts[rank] -= 1
    loose.sort()
    result = list(owners)
    if parts:
        _deal_parts(result, loose, own, quotas, given, sizes, parts)
        return tuple(result)
    wanting = sorted(ranks, key=lambda rank: (counts[rank] - quotas[rank], given[rank], rank))
    for rank in wanting:
        run, loose = loose[: quotas[rank] - counts[rank]], loose[quotas[rank] - counts[rank] :]
        for tile in run:
            result[tile] = rank
            given[rank] += sizes[tile]
    return tuple(result)


def _spared(own: list[int], parts: int) -> int:
    """Remove one tile of a rank: the last tile, or a part of the expert with most parts there."""
    if not parts:
        return own.pop()
    by_expert = Counter(tile // parts for tile in own)
    return own.pop(max(range(len(own)), key=lambda at: (by_expert[own[at] // parts], at)))


def _deal_parts(
    result: list[int],
    loose: Sequence[int],
    own: dict[int, list[int]],
    quotas: dict[int, int],
    given: Counter[int],
    sizes: Sequence[int],
    parts: int,
) -> None:
    """Give each loose part of an expert to the rank with the fewest parts of that expert."""
    for tile in loose:
        rank = min(
            (rank for rank in own if len(own[rank]) < quotas[rank]),
            key=lambda rank: (
                sum(other // parts == tile // parts for other in own[rank]),
                len(own[rank]) - quotas[rank],
                given[rank],
                rank,
            ),
        )
        own[rank].append(tile)
        result[tile] = rank
        given[rank] += sizes[tile]


def _given_to_copies(
    owners: Sequence[int], ranks: Sequence[int], copies: Collection[tuple[int, int]]
) -> tuple[list[int], bool]:
    """Give each tile of a lost rank to the rank with a copy of it (the one with the fewest tiles);
    return the owners, and whether any tile was given.
    """
    result = list(owners)
    counts = Counter(owners)
    found: dict[int, list[int]] = {}
    for place, rank in sorted(copies):
        if owners[place] not in ranks:
            found.setdefault(place, []).append(rank)
    for place, holders in found.items():
        result[place] = min(holders, key=lambda rank: (counts[rank], rank))
        counts[result[place]] += 1
    return result, bool(found)


def _filled(counts: dict[int, int], loose: int, given: Counter[int]) -> dict[int, int]:
    """Return the number of tiles of each rank if no rank gives tiles away and the loose tiles go to
    the ranks with the fewest.
    """
    quotas = dict(counts)
    for _ in range(loose):
        quotas[min(quotas, key=lambda rank: (quotas[rank], given[rank], rank))] += 1
    return quotas


def _quotas(counts: dict[int, int], loose: int, given: Counter[int]) -> dict[int, int]:
    """Return an even number of tiles for each rank. The remainder goes to the ranks that now have
    the most tiles, on a tie to those with the fewest new bytes.
    """
    ranks = sorted(counts, key=lambda rank: (-counts[rank], given[rank], rank))
    each, more = divmod(sum(counts.values()) + loose, len(ranks))
    return {rank: each + (at < more) for at, rank in enumerate(ranks)}
