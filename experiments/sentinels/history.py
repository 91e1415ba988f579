"""Kept values of the sentinels, and which of them have moved since a result was measured.

`kept.json` has, by sentinel, its values in the order in which they were kept: `at` (UTC), `commit`
(with `-dirty` behind it where the change was not committed yet, as is usual: the commit that moves
a sentinel keeps its new value) and `figures`. The last value is the present one. No repository is
asked, so that a page made of this is the same in every clone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

KEPT = Path(__file__).parent / "kept.json"
MAX_MOVED = 0.10  # Of a figure's value; a page names what has moved by more.
DIRTY = "-dirty"

Figures = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Value:
    """Figures of a sentinel from one moment on, until the next value."""

    at: str
    commit: str
    figures: Figures


History = dict[str, list[Value]]


def load(path: Path = KEPT) -> History:
    """By sentinel: its values, the oldest first."""
    kept = json.loads(path.read_text())
    return {name: [Value(**each) for each in values] for name, values in kept.items()}


def save(history: History, path: Path = KEPT) -> None:
    """One value a line, so that branches that move different sentinels merge."""
    blocks = []
    for name, values in sorted(history.items()):
        lines = ",\n".join(f"  {json.dumps(asdict(each))}" for each in values)
        blocks.append(f"{json.dumps(name)}: [\n{lines}\n ]" if lines else f"{json.dumps(name)}: []")
    path.write_text("{\n " + ",\n ".join(blocks) + "\n}\n")


def note_for(
    names: tuple[str, ...], result_commit: str, result_date: str, path: Path = KEPT
) -> str:
    """A note for readers on the time since a result was measured; empty: there is none.

    Without sentinels that is its date. With some: those that have moved by more than a tenth, and
    those that had no value yet.

    Args:
        names: the sentinels that watch what the result depends on.
        result_commit: the full hash of the result's commit, or `unknown`.
        result_date: the start of its run, such as `2026-11-24T12:28:13Z`; empty: unknown.
        path: the kept values.

    Raises:
        ValueError: there is no sentinel of such a name.
    """
    day = result_date[:10] or "an unknown day"
    if not names:
        return f"measured on {day}"
    history, unknown, notes = load(path), list[str](), list[str]()
    for name in names:
        if name not in history:
            raise ValueError(f"sentinel: got {name}; allowed: {', '.join(sorted(history))}")
        then = value_at(history[name], result_commit, result_date)
        if then is None:
            unknown.append(f"`{name}`")
        elif found := list(moves(then.figures, history[name][-1].figures)):
            notes.append(f"since {day} the sentinel `{name}` has moved: {_furthest(found)}")
    if unknown:
        notes.append(f"measured on {day}, before sentinels were kept: {', '.join(unknown)}")
    return "; ".join(notes)


def value_at(values: Sequence[Value], commit: str, date: str) -> Value | None:
    """The value that held when a result was measured; None: none was kept yet.

    That is the value of the result's own commit; else the last one that was kept before, but for
    one that changes on top of that very commit have brought.
    """
    for each in reversed(values):
        if each.commit == commit:
            return each
    earlier = (each for each in values if each.at <= date and each.commit != commit + DIRTY)
    return max(earlier, key=lambda each: each.at, default=None)


@dataclass(frozen=True, slots=True)
class Move:
    """A figure that was one thing and is another."""

    figure: str
    before: float | str | None  # None: there was no such figure.
    after: float | str | None

    @property
    def change(self) -> float:
        """Share of the value before; infinite for text, and from 0."""
        match self.before, self.after:
            case int() | float() as before, int() | float() as after if before:
                return (after - before) / abs(before)
            case _:
                return inf

    def __str__(self) -> str:
        by = f" ({self.change:+.1%})" if self.change < inf else ""
        return f"{self.figure} {_shown(self.before)} to {_shown(self.after)}{by}"


def moves(before: Figures, after: Figures, most: float = MAX_MOVED) -> Iterator[Move]:
    """Figures that differ by more than `most` of the value before."""
    for name in sorted({*before, *after}):
        one, other = before.get(name), after.get(name)
        if one != other:
            move = Move(name, one, other)
            if abs(move.change) > most:
                yield move


def _furthest(found: Sequence[Move]) -> str:
    first = max(found, key=lambda move: abs(move.change))
    others = len(found) - 1
    return f"{first}" + (f" and {others} more" if others else "")


def _shown(value: float | str | None) -> str:
    if value is None:
        return "nothing"
    return value if isinstance(value, str) else f"{value:,.6g}"
