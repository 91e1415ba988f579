"""The comparison of two results, apart from the circumstances of their runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What a result says about its runs and not about what they measured.
_CIRCUMSTANCES = ("run", "runs")


def differences(one: Path, other: Path) -> list[str]:
    """The places at which the figures of two results differ."""
    first, second = (json.loads(path.read_text()) for path in (one, other))
    for key in _CIRCUMSTANCES:
        first.pop(key, None)
        second.pop(key, None)
    return [*_differing(first, second, "")]


def _differing(one: Any, other: Any, at: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _differing(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from _differing(*pair, f"{at}/{number}")
    elif one != other:
        yield at.removeprefix("/") or "."
