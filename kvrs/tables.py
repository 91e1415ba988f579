"""Output of tables and documents on stdout.

Keys are never cut, values fold, and a pipe has no width limit. A document is printed as JSON, or as
one table for each of its parts. A table too narrow for a whole key or number is printed row by row,
key below key.
"""

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NO_WIDTH = 10_000  # Width in characters that no line of output reaches.
_WHOLE = 16  # Most characters of a word that is never broken, in a table's value.
_GAP = 2  # Characters between two columns.


def output() -> Console:
    """Make the console for stdout. A pipe gets unbroken lines, since programs read them; COLUMNS in
    the environment sets the width everywhere.
    """
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if has_width else Console(width=_NO_WIDTH)


def folded(table: Table) -> Table:
    """Let long values of a table fold on a narrow terminal, but never the first column, its key."""
    key, *values = table.columns
    key.no_wrap = bool(values)
    for column in values:
        column.no_wrap, column.overflow = False, "fold"
    return table


def show(document: Any, *, as_json: bool, hidden: Collection[str] = ()) -> None:
    """Print a document: an object, or a list of objects. Keys in `hidden`, at any depth, appear
    only in JSON.
    """
    text = msgspec.json.encode(document)
    if as_json:
        print(msgspec.json.format(text, indent=2).decode())
        return
    console = output()
    for name, keys, rows in _parts("", msgspec.json.decode(text), hidden):
        if name:
            console.print(Text(f"\n{name}", style="bold"))
        widths = _widths(keys, rows, console.width)
        if widths is not None:
            console.print(_table(keys, rows, widths))
            continue
        for number, row in enumerate(rows):
            if number:
                console.print()
            pairs = [pair for pair in zip(keys, row, strict=True) if pair[1]]
            console.print(_table(("", ""), pairs))


_Part = tuple[str, list[str], list[list[str]]]  # Name, keys and rows of a table.


def _parts(name: str, value: Any, hidden: Collection[str]) -> Iterator[_Part]:
    """Split a document into tables: an object gives one for its plain values and one for each other
    value; a list of objects gives a row for each.
    """
    if isinstance(value, dict):
        shown = {key: each for key, each in value.items() if key not in hidden}
        parts = {key: each for key, each in shown.items() if each and isinstance(each, dict | list)}
        if plain := [(key, _text(key, each)) for key, each in shown.items() if key not in parts]:
            yield name, ["", ""], [[*pair] for pair in plain]
        for key, each in parts.items():
            yield from _parts(f"{name}.{key}".removeprefix("."), each, hidden)
    elif isinstance(value[0], dict):
        rows = [row for item in value for row in _rows(item, hidden)]
        keys = dict.fromkeys(key for row in rows for key, cell in row.items() if cell not in _EMPTY)
        yield name, [*keys], [[row.get(key, "") for key in keys] for row in rows]
    else:
        yield name, [""], [[str(each)] for each in value]


_EMPTY = ("-", "no")  # Cells that tell nothing: a column with only such cells is left out.


def _rows(item: dict[str, Any], hidden: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of an object that may hold a list of objects: the first row joins the object
    with the first of the list, and each other one has a row of its own.
    """
    row: dict[str, str] = {}
    inner: list[dict[str, str]] = []
    for key, value in item.items():
        if key in hidden:
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner += [
                {f"{key}.{k}" if k in item else k: _text(k, v) for k, v in each.items()}
                for each in value
            ]
        else:
            row[key] = _text(key, value)
    first, *others = inner or [{}]
    yield row | first
    yield from others


def _widths(keys: list[str], rows: list[list[str]], most: int) -> list[int] | None:
    """Return the width of each column in characters, so that no key and no number is broken and the
    table fits into `most`; spare room goes to the first columns. None: too little room. Empty: a
    table without keys, which folds by itself.
    """
    if not any(keys):
        return []
    columns = [[key, *cells] for key, *cells in zip(keys, *rows, strict=True)]
    natural = [max(map(len, cells)) for cells in columns]
    # Least widths: the first column is never folded, keys and short words never broken.
    widths = [natural[0]]
    for key, *cells in columns[1:]:
        words = (min(len(word), _WHOLE) for cell in cells for word in cell.split())
        widths.append(max([len(key), *words]))
    room = most - sum(widths) - _GAP * (len(widths) - 1)
    if room < 0:
        return None
    for number, wanted in enumerate(natural):
        more = min(wanted - widths[number], room)
        widths[number], room = widths[number] + more, room - more
    return widths


def _table(keys: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int] = ()) -> Table:
    table = Table(
        *keys,
        box=SIMPLE_HEAD,
        show_header=any(keys),
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for column, width in zip(table.columns, widths, strict=False):
        column.width = width
    for row in rows:
        table.add_row(*map(Text, row))
    return folded(table)


def _text(key: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if key.endswith("bytes_per_s"):
            return f"{value / 1e9:.4g} GB/s ({value * 8 / 1e9:.4g} Gbit/s)"
        case float():
            return f"{value:,.3f}" if abs(value) >= 1 else f"{value:.4g}"
        case dict():
            return ", ".join(f"{name} {_text(name, each)}" for name, each in value.items()) or "-"
        case list():
            return ", ".join(_text(key, each) for each in value) or "-"
        case str() if key.endswith("_utc"):
            return value.replace("T", " ").removesuffix("+00:00")
        case _:
            return str(value)
