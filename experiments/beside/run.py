"""The same streams through kvrs and through other proxies, with the same faults: how many come
complete, which tokens are lost, come twice or differ, and what the client learns.

    python -m experiments.beside.run --quick      # Three minutes.
    python -m experiments.beside.run --out experiments/beside/results

All processes run in a network of their own, since Dynamo's event sockets bind all interfaces; that
needs root. A run goes on from what the same code has measured. Exit status 1: kvrs lost a stream,
or showed a wrong token.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from experiments.bench_proxy.engines import BenchError
from experiments.bench_proxy.proxies import MissingError
from experiments.beside.server import MODEL
from experiments.beside.streams import Stream, figures_of, prompt_ids_of, prompt_of, read, wanted_of
from experiments.beside.subjects import SUBJECTS, Front, Place, Subject
from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.record import Record
from kvrs_testkit.networks import isolate

STREAMS = 200
TOKENS = 40
STRIKE_AT = 10  # Tokens that every open stream has then.
PAUSE_S = 0.15  # Between two tokens.
STRUCK = 1  # Number of the server.
_OPEN_WITHIN_S = 60.0
_TRIAL_WITHIN_S = 60.0
FAULTS: dict[str, signal.Signals | None] = {
    "calm": None,
    "kill": signal.SIGKILL,
    "stall": signal.SIGSTOP,
    "malformed": signal.SIGUSR1,
    "fin": signal.SIGUSR2,
    "early_end": signal.SIGHUP,
}
TITLES = {
    "calm": "no fault",
    "kill": "SIGKILL",
    "stall": "SIGSTOP",
    "malformed": "a malformed event",
    "fin": "FIN in the middle",
    "early_end": "an early end",
}


def body_of(front: Front, number: int, tokens: int) -> dict[str, Any]:
    fields = {"model": MODEL, "max_tokens": tokens, "temperature": 0, "stream": True}
    if not front.takes_chats:
        return fields | {"prompt": prompt_ids_of(number)}
    return fields | {"messages": [{"role": "user", "content": prompt_of(number)}]}


def url_of(front: Front) -> str:
    return f"{front.url}/v1/{'chat/completions' if front.takes_chats else 'completions'}"


async def run_of(
    front: Front, fault: signal.Signals | None, count: int
) -> tuple[list[Stream], int | None]:
    """All streams at once; the fault once each of them has its first tokens. Also returns how many
    were open at the server then; None: it does not say.
    """
    struck = None
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(stream: Stream, number: int, tokens: int) -> None:
            body = body_of(front, number, tokens)
            await read(session, url_of(front), body, stream, front.headers)

        await _trial(one)
        streams = [Stream(wanted_of(number, TOKENS)) for number in range(count)]
        reading = [
            asyncio.create_task(one(stream, number, TOKENS))
            for number, stream in enumerate(streams)
        ]
        if fault is not None:
            give_up_s = time.monotonic() + _OPEN_WITHIN_S
            while any(s.events < STRIKE_AT and not s.over for s in streams):
                if time.monotonic() > give_up_s:
                    raise BenchError(f"not all streams had {STRIKE_AT} tokens in time")
                await asyncio.sleep(0.02)
            struck = await _open_at(session, front)
            if struck == 0:
                raise BenchError("its clients are so far behind that the server has no stream open")
            os.kill(front.servers.processes[STRUCK].pid, fault)
        await asyncio.gather(*reading)
    return streams, struck


async def _open_at(session: aiohttp.ClientSession, front: Front) -> int | None:
    """How many requests the server that is struck says it has."""
    if not front.servers.ports:
        return None
    async with session.get(f"{front.servers.urls[STRUCK]}/metrics") as answer:
        (count,) = re.findall(r"^vllm:num_requests_running.* (\S+)$", await answer.text(), re.M)
        return int(float(count))


async def _trial(one: Any) -> None:
    """Wait until the proxy serves a stream."""
    give_up_s = time.monotonic() + _TRIAL_WITHIN_S
    while True:
        stream = Stream(wanted_of(STREAMS, 3))
        await one(stream, STREAMS, 3)
        if stream.finish_reason is not None:
            return
        if time.monotonic() > give_up_s:
            raise BenchError(f"it serves no stream: {stream.status} {stream.error}")
        await asyncio.sleep(0.5)


def measured(subject: Subject, fault: str, peers: Path, count: int) -> dict[str, Any]:
    """Return the figures of one proxy with one fault, or why there are none."""
    if fault in subject.cannot:
        return {"skipped": "its workers send no HTTP"}
    with tempfile.TemporaryDirectory(prefix="kvrs-beside-") as name:
        place = Place(Path(name), peers, PAUSE_S)
        try:
            with subject.start(place) as front:
                streams, struck = asyncio.run(run_of(front, FAULTS[fault], count))
        except MissingError as error:
            return {"skipped": str(error)}
        except (BenchError, subprocess.SubprocessError) as error:
            return {"failed": str(error)}
    found = figures_of(streams)
    return {"version": subject.version(peers), "struck_streams": struck} | found


def as_text(cells: dict[str, Any]) -> str:
    table = Table("proxy", "fault", "complete", "lost", "untold", "twice", "other", "other ends")
    for subject in SUBJECTS:
        for fault, title in TITLES.items():
            cell = cells.get(f"{subject.name}:{fault}")
            if cell is None:
                continue
            if "complete" not in cell:
                table.add_row(subject.name, title, *(f"{key}: {why}" for key, why in cell.items()))
                continue
            ends = [f"{n} {end}" for end, n in cell["ends"].items() if end != "complete"]
            counts = ("lost", "lost_untold", "repeated", "different")
            table.add_row(
                f"{subject.name} {cell['version']}",
                title,
                f"{cell['complete']} of {cell['streams']}",
                *(str(cell[f"tokens_{each}"]) for each in counts),
                ", ".join(ends),
            )
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def misses_of(cells: dict[str, Any]) -> list[str]:
    """The runs in which kvrs is not exact."""
    counts = ("tokens_lost", "tokens_repeated", "tokens_different")
    return [
        f"MISSED: {name}: {cell}"
        for name, cell in cells.items()
        if name.startswith("kvrs:")
        and (cell.get("complete") != cell.get("streams", 0) or any(cell[each] for each in counts))
    ]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="40 streams")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in SUBJECTS])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvrs-bench"
    parser.add_argument("--peers", type=Path, default=cache, help="where peers are installed")
    parser.add_argument("--limit-s", type=float, default=3000.0, help="the rest in another run")
    options = parser.parse_args()
    isolate()
    record = Record(timed=False)
    count = 40 if options.quick else STREAMS
    settings = {"streams": count, "tokens": TOKENS, "struck_at": STRIKE_AT}
    cells = Cells(options.out or Path(os.devnull), "beside", settings)
    chosen = {
        f"{each.name}:{fault}": partial(measured, each, fault, options.peers, count)
        for each in SUBJECTS
        if options.only is None or each.name in options.only
        for fault in options.faults
    }
    cells.measure(chosen, options.limit_s, lambda name: chosen[name]())
    text = "\n".join([as_text(cells.found), *misses_of(cells.found)])
    print(text)
    if options.out is not None:
        cells.keep(record, {}, text)
    return 1 if misses_of(cells.found) else 0


if __name__ == "__main__":
    sys.exit(main())
