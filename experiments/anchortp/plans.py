"""AnchorTP's table II in bytes: what each planner reads from the host and copies between ranks.

Nothing is moved: the planners of kvrs/elastic are asked, and their plans counted. Exit status 1: a
plan reads more than Eq. (1) allows, or a tile goes from rank to rank on demand.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.elastic import cmm, on_demand
from kvrs.elastic.layouts import even, uneven
from kvrs.elastic.plans import HOST, plan
from kvrs.elastic.shapes import SHAPES, ModelShape
from kvrs.elastic.units import UnitKind, Units

# Qwen3-30B-A3B, from its config.json on the Hugging Face hub.
_QWEN3_30B = ModelShape(48, 2048, 32, 4, 128, 768, 151936, experts=128)
MODELS = {
    "Mixtral-8x22B": SHAPES["mistralai/Mixtral-8x22B-v0.1"].units(),
    "Qwen3-30B-A3B": _QWEN3_30B.units(),
}
CASES = (
    ("Mixtral-8x22B", 8, 7),
    ("Mixtral-8x22B", 8, 6),
    ("Qwen3-30B-A3B", 4, 3),
    ("Qwen3-30B-A3B", 4, 2),
)
# Table II, Mixtral-8x22B, 8 -> 7, seconds: reload, peer to peer.
PUBLISHED_S = {"cmm": (17.56, 1.87), "greedy": (26.15, None), "full reload": (197.31, None)}


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes over all losses of that many ranks: the least and the most."""

    model: str
    ranks: int
    left: int
    planner: str
    host_bytes: tuple[int, int]
    busiest_link_bytes: tuple[int, int]
    peer_bytes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Counted:
    host: int
    busiest: int
    peer: int


def by_interval(units: Units, ranks: int, dead: set[int], *, copies: bool, keeps: bool) -> Counted:
    """AnchorTP's planner and its two baselines, over all bytes as one interval. `keeps`: a rank
    uses what it has; `copies`: and what others have.
    """
    parts = cmm.even_parts(units.total_bytes, ranks)
    shards = [cmm.Shard(rank, *part) for rank, part in enumerate(parts)]
    left = [rank for rank in range(ranks) if rank not in dead]
    read: Counter[int] = Counter()
    peer = 0
    tasks = cmm.plan_interval(shards, dead, left)
    for task in tasks:
        if task.source == task.target and keeps:
            continue
        if task.source != HOST and copies:
            peer += task.bytes
        else:
            read[task.target] += task.bytes
    if copies:
        assert read.total() == cmm.least_reload_bytes(shards, dead, left), "Eq. (1)"
    return Counted(read.total(), max(read.values()), peer)


def by_units(units: Units, ranks: int, dead: set[int]) -> Counted:
    """RaidServe's weights on demand, in whole units."""
    spread = len(units.attention_bytes) % ranks
    start = uneven(units, even(units, ranks).stages) if spread else even(units, ranks)
    after = on_demand.reshaped(start, units, on_demand.survivors(start, sorted(dead)))
    found = plan(start, after, units, dead)
    assert found.bytes_by_kind()[UnitKind.MLP][1] == 0, "a tile goes from rank to rank"
    lost = set().union(*(start.held(rank) for rank in dead))
    kept = set().union(*(start.held(rank) for rank in after.ranks))
    assert found.host_bytes == sum(map(units.bytes_of, lost - kept)), "Eq. (1), in units"
    read = found.host_bytes_by_rank()
    return Counted(found.host_bytes, max(read.values()), found.peer_bytes)


PLANNERS: dict[str, Callable[[Units, int, set[int]], Counted]] = {
    "full reload": partial(by_interval, copies=False, keeps=False),
    "greedy": partial(by_interval, copies=False, keeps=True),
    "cmm": partial(by_interval, copies=True, keeps=True),
    "on demand": by_units,
}


def measure() -> list[Row]:
    rows = []
    for model, ranks, left in CASES:
        units = MODELS[model]
        losses = [set(dead) for dead in combinations(range(ranks), ranks - left)]
        for planner, count in PLANNERS.items():
            # On demand every loss costs the same but for the place of the ragged last tile.
            asked = losses[:2] if planner == "on demand" else losses
            counted = [count(units, ranks, dead) for dead in asked]
            rows.append(
                Row(
                    model,
                    ranks,
                    left,
                    planner,
                    _range([each.host for each in counted]),
                    _range([each.busiest for each in counted]),
                    _range([each.peer for each in counted]),
                )
            )
    return rows


def _range(values: list[int]) -> tuple[int, int]:
    return min(values), max(values)


def as_text(rows: list[Row]) -> str:
    lines = [
        "weights in GB (and share of the model); least .. most over which ranks are lost;",
        "seconds: bytes at the rate of the paper's full reload, beside its table II",
        "",
        f"{'model':14} {'ranks':7} {'planner':12} {'from the host':24} {'busiest link':15} "
        f"{'between ranks':17} {'reload s':14} {'published':>9}",
    ]
    for row in rows:
        whole = MODELS[row.model].total_bytes
        is_table = (row.model, row.ranks, row.left) == CASES[0]
        published = PUBLISHED_S.get(row.planner, (None, None))[0] if is_table else None
        rate = whole / PUBLISHED_S["full reload"][0] if is_table else None
        seconds = _span(row.host_bytes, rate, 2) if rate else ""
        share = f"({row.host_bytes[0] / whole:.1%})"
        lines.append(
            f"{row.model:14} {row.ranks} -> {row.left:<2} {row.planner:12} "
            f"{_span(row.host_bytes, 1e9, 2) + ' ' + share:24} "
            f"{_span(row.busiest_link_bytes, 1e9, 2):15} {_span(row.peer_bytes, 1e9, 2):17} "
            f"{seconds:14} {'' if published is None else published:>9}"
        )
    return "\n".join(lines)


def _span(values: tuple[int, int], divisor: float, digits: int) -> str:
    low, high = (f"{value / divisor:.{digits}f}" for value in values)
    return low if low == high else f"{low} .. {high}"


def main() -> None:
    options = parser_of(__doc__).parse_args()
    record = Record(timed=False)
    rows = measure()
    text = as_text(rows)
    print(text)
    record.keep(options.out, "plans", {"rows": [asdict(row) for row in rows]}, text)


if __name__ == "__main__":
    main()
