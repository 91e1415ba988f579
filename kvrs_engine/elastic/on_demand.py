"""The layout behind a change of ranks in which each rank keeps what it has and only what is missing
is moved (RaidServe 3.1 and 3.2).

Tiles have a fixed size, whatever the number of ranks, so those of a lost rank are dealt one by one;
no rank has two more of a layer than another. They are dealt in runs that begin with the largest,
which keeps whole the subtrees of the sum. Of the KV heads every rank has `heads // ranks` of its
own, and the rest is spread. The turns of ranks that are lost are dealt to the others; where ranks
join, all turns are dealt anew.

A unit of which a rank that stays has a copy becomes that rank's, and nothing of it is moved; only
the others are dealt.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
    """The layout of these ranks, given for each stage: survivors, and perhaps ranks that join.
    Without `spread` the KV heads that are left over go to one rank each, as tiles do. A stage with
    the ranks that it had keeps what each of them has. Without `copies` units have one owner each.

    Raises:
        LayoutError: a stage has no rank.
    """
    stages = []
    for stage, group in zip(before.stages, ranks, strict=True):
        if not group:
            raise LayoutError(f"no rank is left for layers [{stage.first}, {stage.last})")
        stages.append(Stage(stage.first, stage.last, tuple(sorted(group))))
    given: Counter[int] = Counter()  # Bytes that each rank did not have before.
    attention, mlp = [], []
    left: list[set[tuple[int, int]]] = []  # Copies of each layer.
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
    turns = _turns(before, stages) if any(SPREAD in owners for owners in attention) else ()
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
    """The remaining ranks of each stage."""
    return [[rank for rank in stage.ranks if rank not in lost] for stage in before.stages]


def after_losses(
    before: Layout, units: Units, rank: int, losses: int, *, spread: bool
) -> Iterator[Layout]:
    """The layouts that a rank comes to be in as up to so many others of its stage are lost, at once
    or one after the other; those with fewer losses first. Losses of other stages do not change
    what it has.
    """
    levels = [[before]]  # By the number of losses.
    for lost in range(1, losses + 1):
        levels.append([])
        for at_once in range(1, lost + 1):
            for layout in levels[lost - at_once]:
                others = [other for other in layout.stage_of(rank).ranks if other != rank]
                for gone in combinations(others, at_once):
                    after = reshaped(layout, units, survivors(layout, gone), spread=spread)
                    levels[lost].append(after)
                    yield after


def _turns(before: Layout, stages: Sequence[Stage]) -> Turns:
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
    """Every rank has as many heads of its own; the rest is spread. A rank keeps heads that it has;
    it gets those first of which it has the weights already.
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
    # Heads that were spread are on every rank already: the lost ones come last, to be spread, or
    # to go to the ranks that were given least.
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
    """`parts`: of experts, each of which is to be on as many ranks as possible; 0: as few."""
    owners, is_given = _given_to_copies(owners, ranks, copies)
    own = {rank: [tile for tile, owner in enumerate(owners) if owner == rank] for rank in ranks}
    loose = [tile for tile, owner in enumerate(owners) if owner not in own]
    counts = {rank: len(tiles) for rank, tiles in own.items()}
    quotas = _quotas(counts, len(loose), given)
    if is_given and any(counts[rank] > quotas[rank] for rank in ranks):
        quotas = _filled(counts, len(loose), given)
    for rank in ranks:  # Only where ranks join: what is too much goes to them.
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
    """Take one tile of a rank: the last, or a part of the expert of which it has most."""
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
    """Each loose part of an expert to a rank that has fewest of it."""
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
    """Owners among whom a tile of a rank that is gone is given to one that has a copy of it, the
    one with fewest tiles; and whether any is.
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
    """How many tiles each rank comes to have where none gives any away: those that have fewest get
    the loose ones.
    """
    quotas = dict(counts)
    for _ in range(loose):
        quotas[min(quotas, key=lambda rank: (quotas[rank], given[rank], rank))] += 1
    return quotas


def _quotas(counts: dict[int, int], loose: int, given: Counter[int]) -> dict[int, int]:
    """How many tiles each rank comes to have: even to one; those that have the one more are those
    that have more now, else those that were given least.
    """
    ranks = sorted(counts, key=lambda rank: (-counts[rank], given[rank], rank))
    each, more = divmod(sum(counts.values()) + loose, len(ranks))
    return {rank: each + (at < more) for at, rank in enumerate(ranks)}
