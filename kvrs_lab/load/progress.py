"""Progress of a replay in the terminal: a bar, and percentiles so far."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvrs_lab.load.open_loop import Progress
from kvrs_lab.report.metrics import percentile

_BAR_WIDTH = 24
_REFRESH_S = 0.25


class LiveView:
    """A context manager; `show` may be called at any rate. Without a terminal only the last state
    is printed.
    """

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._title = title
        self._progress = Progress(total)
        self._started_s = time.monotonic()
        self._shown_s = 0.0
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.print()

    def show(self, progress: Progress) -> None:
        """Keep for the next refresh. Percentiles need a sort, so they are computed a few times a
        second.
        """
        self._progress = progress
        now_s = time.monotonic()
        if now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._live.refresh()

    def _render(self) -> RenderableType:
        now = self._progress
        elapsed_s = time.monotonic() - self._started_s
        head = Table.grid(padding=(0, 1))
        failed = f", {now.failed} failed" if now.failed else ""
        counts = f"{now.ended}/{now.total}, {now.inflight} open{failed}"
        bar = ProgressBar(total=now.total, completed=now.ended, width=_BAR_WIDTH)
        head.add_row(
            Text(f"  {self._title:<16}"), bar, Text(counts), Text(f"{elapsed_s:.0f} s", style="dim")
        )
        if not now.lag_s:
            return head
        spreads = (("TTFT", now.ttft_s), ("longest gap", now.gap_s), ("send lag", now.lag_s))
        words = [f"{name} {_pair(values)}" for name, values in spreads if values]
        return Group(
            head,
            Text(f"  p50/p99: {', '.join(words)}", style="dim", no_wrap=True, overflow="ellipsis"),
        )


def _pair(values: Sequence[float]) -> str:
    p50, p99 = percentile(values, 50), percentile(values, 99)
    assert p50 is not None
    assert p99 is not None
    return f"{round(p50 * 1000)}/{round(p99 * 1000)} ms"
