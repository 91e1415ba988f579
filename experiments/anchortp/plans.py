"""AnchorTP's table II in bytes: what each planner reads from the host and copies between ranks.

Nothing is moved: the planners of kvrs_engine/elastic are asked, and their plans counted. Exit
status 1: a plan reads more than Eq. (1) allows, or a tile goes from rank to rank on demand.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.sentinels.planners import CASES, MODELS, cases

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


def measure() -> list[Row]:
    return [
        Row(
            each.model,
            each.ranks,
            each.left,
            each.planner,
            _range([one.host for one in each.counted]),
            _range([one.busiest for one in each.counted]),
            _range([one.peer for one in each.counted]),
        )
        for each in cases()
    ]


def _range(values: Sequence[int]) -> tuple[int, int]:
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
