"""Compute the sentinels and compare them with their kept values.

    python -m experiments.sentinels.check                # All of them: a minute and a half.
    python -m experiments.sentinels.check --only link    # Some, by name.
    python -m experiments.sentinels.check --update       # Keep what has moved, in kept.json.

What has moved is printed, old and new. The commit that moves a sentinel keeps its new value, so
that pages can say which results are older than the move. Exit status 1: a sentinel has moved and
was not kept, or has failed.
"""

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from experiments.record import ROOT, commit_of
from experiments.sentinels import history
from experiments.sentinels.history import KEPT, Figures, History, Value, moves
from experiments.sentinels.table import ALL

_DIGITS = 6  # So that another mathematical library, which rounds the last bit otherwise, is equal.

Table = Mapping[str, Callable[[], Figures]]


@dataclass(frozen=True, slots=True)
class Computed:
    name: str
    seconds: float
    figures: Figures
    failure: str = ""


def _tell(line: str) -> None:
    print(line, flush=True)


def compute(name: str, table: Table = ALL) -> Computed:
    """One sentinel, with its figures rounded and its own output left out."""
    begun_s, failure, figures = time.monotonic(), "", dict[str, float | str]()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            figures = {key: _rounded(value) for key, value in table[name]().items()}
    except Exception as error:  # The others are still worth knowing.
        failure = f"{type(error).__name__}: {error}"
    return Computed(name, time.monotonic() - begun_s, figures, failure)


def _rounded(value: float | str) -> float | str:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def computed(names: Sequence[str], jobs: int, table: Table = ALL) -> Iterator[Computed]:
    """Each as soon as it is there."""
    if jobs == 1:
        yield from map(partial(compute, table=table), names)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # The last ones of the table take longest.
        found = [pool.submit(compute, name) for name in reversed(names)]
        for future in as_completed(found):
            yield future.result()


def check(
    names: Sequence[str],
    *,
    jobs: int = 1,
    update: bool = False,
    path: Path = KEPT,
    table: Table = ALL,
    tell: Callable[[str], None] = _tell,
) -> int:
    """Print a line for each sentinel, and what has moved; returns the exit status."""
    kept = history.load(path) if path.exists() else {}
    moved, failed = list[str](), list[str]()
    for done, each in enumerate(computed(names, jobs, table), 1):
        line = f"[{done}/{len(names)}] {each.name:<12}{each.seconds:6.1f} s  "
        if each.failure:
            failed.append(each.name)
            tell(f"{line}FAILED: {each.failure}")
            continue
        changes = changes_of(kept, each)
        tell(line + ("moved" if changes else "as kept"))
        for change in changes:
            tell(f"    {change}")
        if changes:
            moved.append(each.name)
            if update:
                keep(kept, each)
    if update and moved:
        history.save(kept, path)
        tell(f"kept: {', '.join(moved)}")
    elif moved:
        tell(f"moved: {', '.join(moved)}; if that is meant, keep it with --update in this commit")
    if failed:
        tell(f"failed: {', '.join(failed)}")
    return 1 if failed or (moved and not update) else 0


def changes_of(kept: History, found: Computed) -> list[str]:
    """Every figure that differs from the last kept value, old and new."""
    values = kept.get(found.name)
    if not values:
        return ["no value is kept"]
    return [str(move) for move in moves(values[-1].figures, found.figures, most=0.0)]


def keep(kept: History, found: Computed) -> None:
    """Append the value; one of the same uncommitted tree is replaced."""
    at, commit = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), commit_of(ROOT)
    values = kept.setdefault(found.name, [])
    if values and values[-1].commit == commit:
        values.pop()
    values.append(Value(at, commit, found.figures))


def chosen(names: Sequence[str], table: Table = ALL) -> list[str]:
    """Raises ValueError: there is no sentinel of such a name."""
    for name in names:
        if name not in table:
            raise ValueError(f"--only: got {name}; allowed: {', '.join(sorted(table))}")
    return [name for name in table if not names or name in names]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these sentinels")
    parser.add_argument("--jobs", type=_jobs, default=1, help="processes at a time; default: 1")
    parser.add_argument("--update", action="store_true", help="keep the values that have moved")
    arguments = parser.parse_args()
    try:
        names = chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    return check(names, jobs=arguments.jobs, update=arguments.update)


def _jobs(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: 1 to 64")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
