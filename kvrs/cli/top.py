"""`kvrs top` shows the live page's data in the terminal."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrs.config.file import load_config
from kvrs.net.admin import AdminClient, AdminError
from kvrs.tables import output

_INTERVAL_S = 1.0
# Colours of states; any other state is yellow.
_COLOURS = {"up": "green", "down": "red", "refused": "red"}


def run_top(config: Path | None, admin_url: str | None, *, once: bool) -> None:
    """Show a proxy's data once, or every second until a key ends it."""
    client = AdminClient.of(load_config(config, os.environ), os.environ, admin_url)
    if once or not sys.stdout.isatty():
        output().print(screen(client.overview(), client.url, 1000))
        return
    _run(client)


def _run(client: AdminClient) -> None:
    console = Console()
    shown: RenderableType = screen(client.overview(), client.url, console.height)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(shown, refresh=True)
            if pressed(_INTERVAL_S) in ("q", "Q"):
                return
            try:
                shown = screen(client.overview(), client.url, console.height)
            # Shown and asked again, because the proxy may be restarting.
            except AdminError as error:
                shown = Text(f"{error}\n\nasked again every second; q ends", style="red")


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to some seconds for a key and returns it; "": none was
    pressed.
    """
    keyboard = sys.stdin.fileno()
    if not os.isatty(keyboard):

        def wait(wait_s: float) -> str:
            time.sleep(wait_s)
            return ""

        yield wait
        return
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:

        def pressed(wait_s: float) -> str:
            ready, _, _ = select.select([keyboard], [], [], wait_s)
            return os.read(keyboard, 1).decode(errors="replace") if ready else ""

        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def screen(overview: Mapping[str, Any], url: str, rows: int) -> Group:
    """Make the contents of the screen: the table of instances and agents, then the newest incidents
    that fit into `rows` lines.
    """
    processes, incidents = [*overview["instances"], *overview["agents"]], overview["incidents"]
    headings = dict.fromkeys(name for row in processes for name in row["facts"])
    table = Table(box=None, pad_edge=False)
    for name in ("process", "role", "node", "health"):
        table.add_column(name, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    shown = processes[: max(1, rows - 8)]
    for row in shown:
        table.add_row(
            Text(row["id"]),
            row["role"],
            Text(row["node"]),
            Text(row["health"], style=_COLOURS.get(row["health"], "yellow")),
            *(Text(row["facts"].get(heading, "")) for heading in headings),
        )
    parts: list[Any] = [_head(overview, url), table]
    if len(shown) < len(processes):
        parts.append(Text(f"... and {len(processes) - len(shown)} more", style="dim"))
    lines = [_line(f"{row['id']}: {note}") for row in processes for note in row["notes"]]
    causes = [row for row in processes if not row["is_up"] and row["reason"]]
    lines += [_line(f"{row['id']}: {row['reason']}") for row in causes]
    if incidents:
        lines.append(Text("events, the newest first", style="bold"))
        lines += [_line(f"{row['time']}  {row['sentence']}") for row in incidents]
    return Group(*parts, *lines[: max(0, rows - 8 - len(shown))])


def _head(overview: Mapping[str, Any], url: str) -> Text:
    streams = overview["streams"]
    counted = [_up(overview["instances"], "instances")]
    if overview["agents"]:
        counted.append(_up(overview["agents"], "agents"))
    stages = ", ".join(f"{count} {stage}" for stage, count in streams["by_stage"].items())
    restorable = streams["restorable"]["streams"]
    policy, fates = overview["policy"], overview["fates"]
    return _line(
        f"kvrs {overview['proxies'][0]['id']} at {url}\n"
        f"{', '.join(counted)}, policy {policy['policy']}, "
        f"backup {policy['backup']}\n"
        f"{streams['open']} streams{f' ({stages})' if stages else ''}, "
        f"{restorable} could be restored; saved since start: "
        f"{fates['back']} of {fates['back'] + fates['lost']}\n"
    )


def _up(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    return f"{sum(row['is_up'] for row in rows)} of {len(rows)} {kind} up"


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
