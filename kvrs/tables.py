"""Tables and text on stdout: keys are never cut, values fold, and a pipe has no width. A document
is printed as JSON, or with the same facts as one table for each of its parts.
"""

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NO_WIDTH = 10_000  # Characters. Nothing that is printed is as long.


def output() -> Console:
    """Prints to stdout. What is no terminal is read by programs, for which no line is broken; the
    environment's COLUMNS counts everywhere.
    """
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if has_width else Console(width=_NO_WIDTH)


def folded(table: Table) -> Table:
    """The same table, of which the first column, the key, keeps its width on a narrow terminal."""
    key, *values = table.columns
    key.no_wrap = bool(values)
    for column in values:
        column.no_wrap, column.overflow = False, "fold"
    return table


def show(document: Any, *, as_json: bool, hidden: Collection[str] = ()) -> None:
    """Print a document: an object, or a list of objects. `hidden`: keys, at any depth, that only
    JSON has.
    """
    text = msgspec.json.encode(document)
    if as_json:
        print(msgspec.json.format(text, indent=2).decode())
        return
    console = output()
    for name, table in _tables("", msgspec.json.decode(text), hidden):
        if name:
            console.print(Text(f"\n{name}", style="bold"))
        console.print(table)


def _tables(name: str, value: Any, hidden: Collection[str]) -> Iterator[tuple[str, Table]]:
    """The plain values of an object, then each other one by itself; a row for each of a list."""
    if isinstance(value, dict):
        shown = {key: each for key, each in value.items() if key not in hidden}
        parts = {key: each for key, each in shown.items() if each and isinstance(each, dict | list)}
        if plain := [(key, _text(key, each)) for key, each in shown.items() if key not in parts]:
            yield name, _table(("", ""), plain)
        for key, each in parts.items():
            yield from _tables(f"{name}.{key}".removeprefix("."), each, hidden)
    elif isinstance(value[0], dict):
        rows = [row for item in value for row in _rows(item, hidden)]
        keys = dict.fromkeys(key for row in rows for key, cell in row.items() if cell not in _EMPTY)
        yield name, _table(keys, ([row.get(key, "") for key in keys] for row in rows))
    else:
        yield name, _table(("",), ([str(each)] for each in value))


_EMPTY = ("-", "no")  # A column of these alone is left out.


def _rows(item: dict[str, Any], hidden: Collection[str]) -> Iterator[dict[str, str]]:
    """An item with the first object of a list that it holds; the others get rows of their own."""
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


def _table(keys: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    columns = [*keys]
    table = Table(
        *columns,
        box=SIMPLE_HEAD,
        show_header=any(columns),
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
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
        case _:
            return str(value)
