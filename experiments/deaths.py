"""Rounds in each of which a server dies: their order, their figures by kind of death, and their
table.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def rounds(counts: Mapping[str, int]) -> list[str]:
    """Names of the rounds (`counts`: by kind), so that those of each kind come evenly."""
    spread = [
        ((number + 0.5) / count, kind, number)
        for kind, count in counts.items()
        for number in range(count)
    ]
    return [f"{kind} {number}" for _, kind, number in sorted(spread)]


def differences(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Counter[str]:
    """Count the differences between the token ids that clients got and those of the same streams
    without a death, in this order.
    """
    found = Counter(lost=0, repeated=0, different=0)
    for got, wanted in pairs:
        found["lost"] += max(0, len(wanted) - len(got))
        found["repeated"] += max(0, len(got) - len(wanted))
        found["different"] += sum(a != b for a, b in zip(got, wanted, strict=False))
    return found


def by_kind(cells: Mapping[str, Mapping[str, Any]], kinds: Iterable[str]) -> dict[str, Any]:
    """Sum the counts of all cells by kind of death, and of all."""
    sums: dict[str, Counter[str]] = {kind: Counter() for kind in (*kinds, "all")}
    for name, cell in cells.items():
        counts = {key: value for key, value in cell.items() if isinstance(value, int)}
        for kind in (name.split()[0], "all"):
            sums[kind].update(counts | {"rounds": 1})
    return {kind: dict(found) for kind, found in sums.items()}


def as_text(
    figures: Mapping[str, Mapping[str, int]], columns: Sequence[str], misses: Sequence[str]
) -> str:
    width = max(map(len, columns)) + 2
    lines = ["of death     " + "".join(f"{name:>{width}}" for name in columns)]
    lines += [
        f"{kind:<13}" + "".join(f"{counts.get(name, 0):>{width},}" for name in columns)
        for kind, counts in figures.items()
    ]
    return "\n".join([*lines, "", *(f"MISSED: {each}" for each in misses)]) + "\n"
