"""Tables and text on stdout: keys are never cut, values fold, and a pipe has no width."""

import os
import sys

from rich.console import Console
from rich.table import Table

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
    key.no_wrap = True
    for column in values:
        column.no_wrap, column.overflow = False, "fold"
    return table
