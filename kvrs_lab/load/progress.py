"""Progress of a replay in the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kvrs_lab.load.open_loop import Progress

_COUNTS = TextColumn("{task.fields[open]} open, {task.fields[failed]} failed")


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[Progress], None]]:
    """Show a bar of ended streams; yield a function that shows a progress. Without a terminal only
    the last state is printed.
    """
    columns = TextColumn("  {task.description}"), BarColumn(24), MofNCompleteColumn(), _COUNTS
    with Bar(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(title, total=total, open=0, failed=0)
        yield lambda now: bar.update(
            task, completed=now.ended, open=now.inflight, failed=now.failed
        )
