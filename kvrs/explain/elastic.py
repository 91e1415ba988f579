"""What it costs an instance of several ranks to go on without some of them: the plan in bytes,
every planner beside the others, and what becomes of its streams.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvrs.elastic import cmm, on_demand
from kvrs.elastic.layouts import Layout, even
from kvrs.elastic.moving import LinkRates, schedule
from kvrs.elastic.plans import HOST, MovePlan, plan
from kvrs.elastic.shapes import shape_of
from kvrs.elastic.speed import Degree, Speed, shares
from kvrs.elastic.units import Units
from kvrs.errors import ConfigError, LayoutError
from kvrs.explain.staying import ElasticCase, WayOn, ways_on
from kvrs.profiles import catalog

# RaidServe (3.2, table 3): Llama-3.1-70B on 8 H100, one lost, 56 requests of 16K tokens.
_RAIDSERVE = ("meta-llama/Llama-3.1-70B", 8, 1, 56, 16384)
_RAIDSERVE_S = {"recompute": 22.0, "host": 0.530, "on demand": 0.120}
_RAIDSERVE_WEIGHT_BYTES, _RAIDSERVE_KV_BYTES = 140 * 10**9, 280 * 10**9
RAIDSERVE_HOST_BYTES_PER_S = 50e9

# What stands in the papers beside figures that do not follow from it.
CONTRADICTIONS = (
    "AnchorTP, table II: 17.56 s of 197.31 s for a full reload are 8.9 % of the bytes, Eq. (1) has "
    "12.5 % as the least for 8 -> 7 (24.7 s at the same rate)",
    "RaidServe, figure 4: the text loses GPU 3, its result {3,4,5,0}, {6,7,8,1}, {9,10,11,2} is "
    "that of GPU 0",
    "RaidServe, 3.2 and table 3: the arithmetic gives 0.50 s and 0.15 s where 530 and 120 ms were "
    "measured; 120 ms for 7.5 GB are 62.5 GB/s, more than the 50 GB/s it starts from",
)


@dataclass(frozen=True, slots=True)
class ElasticQuestion:
    """`profile`: a name of the catalog. Rates are of one rank's link."""

    profile: str
    tp: int
    lost: int
    requests: int
    context_tokens: int
    has_backup: bool  # Of KV, in the host's memory.
    host_bytes_per_s: float
    peer_bytes_per_s: float
    bytes_per_s: float  # Between nodes.


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes of one kind in the plan that is carried out."""

    kind: str
    host_bytes: int
    peer_bytes: int


@dataclass(frozen=True, slots=True)
class WayCost:
    """One way. Bytes from the host are those of the rank that reads most."""

    way: str
    host_bytes: int
    peer_bytes: int
    moving_s: float
    recompute_s: float
    published_s: float | None

    @property
    def total_s(self) -> float:
        return self.moving_s + self.recompute_s


@dataclass(frozen=True, slots=True)
class ElasticAnswer:
    survivors: int
    weight_bytes: int
    kv_bytes: int
    moved: tuple[MovedBytes, ...]  # On demand.
    ladder: tuple[WayCost, ...]  # The quickest first.
    ways: tuple[WayOn, ...]  # Of the instance and of its streams, that which is taken first.
    raidserve_s: dict[str, float]  # From its rounded figures, by the same planners.


def explain_elastic(question: ElasticQuestion) -> ElasticAnswer:
    """Raises ConfigError: profile or degrees do not allow it."""
    profile = catalog.profile(question.profile)
    units = shape_of(profile.model).units()
    try:
        before = even(units, question.tp)
        dead = set(before.ranks[question.tp - question.lost :])
        after = on_demand.reshaped(before, units, on_demand.survivors(before, sorted(dead)))
    except LayoutError as error:
        raise ConfigError([f"--tp, --lost: {error}"]) from None
    tokens = question.requests * question.context_tokens
    kv_bytes = tokens * profile.geometry.bytes_per_token
    is_published = (
        profile.model,
        question.tp,
        question.lost,
        question.requests,
        question.context_tokens,
    ) == _RAIDSERVE
    rates = LinkRates(question.host_bytes_per_s, question.peer_bytes_per_s)
    recompute_s = _recompute_s(question, after, units)
    cells = _per_head(kv_bytes, units) if question.has_backup else 0
    found = plan(before, after, units, dead, cells)
    missing_s = 0.0 if question.has_backup else recompute_s
    left = len(after.ranks)
    rungs = [
        _reload(units, left, 0, rates, recompute_s),
        _by_plan("on demand", found, rates, missing_s),
        _by_interval(before, units, dead, cells, rates, missing_s),
    ]
    if question.has_backup:
        rungs.append(_reload(units, left, len(dead) * kv_bytes // question.tp, rates, 0.0))
    # It recomputes without a backup, and restores with one.
    published = {
        way: seconds
        for way, seconds in _RAIDSERVE_S.items()
        if is_published and question.has_backup is (way != "recompute")
    }
    return ElasticAnswer(
        survivors=len(after.ranks),
        weight_bytes=units.total_bytes,
        kv_bytes=kv_bytes,
        moved=tuple(
            MovedBytes(kind.name.lower(), *moved) for kind, moved in found.bytes_by_kind().items()
        ),
        ladder=tuple(
            sorted(
                (replace(rung, published_s=published.get(rung.way)) for rung in rungs),
                key=lambda rung: rung.total_s,
            )
        ),
        ways=ways_on(
            ElasticCase(
                profile=question.profile,
                units=units,
                before=before,
                lost=frozenset(dead),
                requests=question.requests,
                context_tokens=question.context_tokens,
                has_backup=question.has_backup,
                rates=rates,
                bytes_per_s=question.bytes_per_s,
            )
        ),
        raidserve_s=raidserve_s(question.peer_bytes_per_s),
    )


def raidserve_s(peer_bytes_per_s: float) -> dict[str, float]:
    """Seconds of its two ways, from 140 GB of weights, 280 GB of KV and 50 GB/s on each link."""
    shape = shape_of(_RAIDSERVE[0]).units()
    layer = _RAIDSERVE_WEIGHT_BYTES // shape.layers
    share = sum(shape.attention_bytes) / (sum(shape.attention_bytes) + sum(shape.mlp_bytes))
    head = int(layer * share) // len(shape.attention_bytes)
    tile = int(layer * (1 - share)) // len(shape.mlp_bytes)
    units = Units(
        layers=shape.layers,
        attention_bytes=(head,) * len(shape.attention_bytes),
        mlp_bytes=(tile,) * len(shape.mlp_bytes),
        vocabulary_bytes=(0,),
        common_bytes=0,
    )
    rates = LinkRates(RAIDSERVE_HOST_BYTES_PER_S, peer_bytes_per_s)
    before = even(units, 8)
    after = on_demand.reshaped(before, units, on_demand.survivors(before, [7]))
    full = plan(before, after, units, {7}, _per_head(_RAIDSERVE_KV_BYTES, units))
    return {
        "host": _reload(units, 7, _RAIDSERVE_KV_BYTES // 8, rates, 0.0).total_s,
        "on demand": schedule(full, rates).makespan_s,
    }


def _per_head(kv_bytes: int, units: Units) -> int:
    return kv_bytes // (units.layers * len(units.attention_bytes))


def _by_plan(way: str, found: MovePlan, rates: LinkRates, recompute_s: float) -> WayCost:
    return WayCost(
        way=way,
        host_bytes=max(found.host_bytes_by_rank().values()),
        peer_bytes=found.peer_bytes,
        moving_s=schedule(found, rates).makespan_s,
        recompute_s=recompute_s,
        published_s=None,
    )


def _by_interval(
    before: Layout,
    units: Units,
    dead: set[int],
    cells: int,
    rates: LinkRates,
    recompute_s: float,
) -> WayCost:
    """AnchorTP's planner over all weights as one interval; lost KV in even shares."""
    left = [rank for rank in before.ranks if rank not in dead]
    parts = cmm.even_parts(units.total_bytes, len(before.ranks))
    held = [cmm.Shard(rank, *part) for rank, part in zip(before.ranks, parts, strict=True)]
    tasks = cmm.plan_interval(held, dead, left)
    lost_cells = cells * units.layers * len(units.attention_bytes) * len(dead) // len(before.ranks)

    def most(chosen: Iterator[tuple[int, int]]) -> int:
        sums: dict[int, int] = {}
        for rank, size in chosen:
            sums[rank] = sums.get(rank, 0) + size
        return max(sums.values(), default=0)

    copies = [task for task in tasks if task.source not in (HOST, task.target)]
    host = most((task.target, task.bytes) for task in tasks if task.source == HOST)
    host += lost_cells // len(left)
    busiest = max(
        most((task.target, task.bytes) for task in copies),
        most((task.source, task.bytes) for task in copies),
    )
    return WayCost(
        way="cmm",
        host_bytes=host,
        peer_bytes=sum(task.bytes for task in copies),
        moving_s=max(host / rates.host_bytes_per_s, busiest / rates.peer_bytes_per_s),
        recompute_s=recompute_s,
        published_s=None,
    )


def _reload(
    units: Units, survivors: int, lost_kv_bytes: int, rates: LinkRates, recompute_s: float
) -> WayCost:
    """Whole new shards from the host, whatever the survivors have."""
    host = (units.total_bytes + lost_kv_bytes) // survivors
    way = "host" if lost_kv_bytes else "recompute"
    return WayCost(way, host, 0, host / rates.host_bytes_per_s, recompute_s, None)


def _recompute_s(question: ElasticQuestion, after: Layout, units: Units) -> float:
    """Every history once more, one after the other, at the degree that is left."""
    profile = catalog.profile(question.profile)
    if profile.tp is None:
        raise ConfigError([f"--elastic: {profile.label} states no tensor parallel degree"])
    speed = Speed(_degree(question.profile), _other_degree(question.profile))
    return question.requests * speed.prefill_s(shares(after, units), question.context_tokens)


def _degree(name: str) -> Degree:
    profile = catalog.profile(name)
    assert profile.tp is not None
    return Degree(profile.tp, catalog.decode_table(name), catalog.prefill_table(name))


def _other_degree(name: str) -> Degree | None:
    """The nearest other degree of the same model, GPU and engine that has a profile."""
    own = catalog.profile(name)
    assert own.tp is not None
    kin: list[tuple[int, str]] = []
    for other_name in catalog.names():
        other = catalog.profile(other_name)
        if (other.model, other.gpu, other.engine) != (own.model, own.gpu, own.engine):
            continue
        if other.tp is not None and other.tp != own.tp and other.decode is not None:
            kin.append((abs(other.tp - own.tp), other_name))
    return _degree(min(kin)[1]) if kin else None
