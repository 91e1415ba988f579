"""Requests as they come in the field, through a proxy with its default limits before scripted vLLM
servers: long computations, queues, engines that stop, unusual answers, and clients in a pause.

    python -m experiments.field_requests.run [--out DIR] [--part NAME ...]     # Four minutes.
"""

import asyncio
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence

from experiments.command_line import parser_of
from experiments.field_requests import clients, odd, waiting
from experiments.field_requests.rows import Row, as_text
from experiments.record import Record

PARTS: dict[str, Callable[[int], Awaitable[Row]]] = {
    "long": waiting.long,
    "queued": waiting.queued,
    "embeddings": waiting.embeddings,
    "recomputed": waiting.recomputed,
    "in_chunks": waiting.in_chunks,
    "wedged": waiting.wedged,
    "wedged_long": waiting.wedged_long,
    "odd": odd.odd,
    "pauses": clients.pauses,
    "busy": waiting.busy,
}


async def _measured(part: str, seed: int) -> Row:
    """One that breaks has missed its bars."""
    begun_s = time.monotonic()
    try:
        row = await PARTS[part](seed)
        print(f"{part}: {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
        return row
    except Exception as error:  # The other parts go on.
        traceback.print_exc()
        row = Row(part, seconds=time.monotonic() - begun_s)
        row.bar(f"measured: {type(error).__name__}: {error}", is_met=False)
        return row


async def measure(parts: Sequence[str], seed: int) -> list[Row]:
    """All but `busy` at the same time, each with a cluster of its own: most of them sleep."""
    rows = await asyncio.gather(*(_measured(part, seed) for part in parts if part != "busy"))
    if "busy" in parts:
        rows.append(await _measured("busy", seed))
    return rows


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[*PARTS], metavar="NAME")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    record = Record(options.seed)
    rows = asyncio.run(measure(options.part, options.seed))
    text = as_text(rows)
    print(text)
    figures = {"parts": {row.part: row.as_figures() for row in rows}}
    is_void = record.keep(options.out, "field_requests", figures, text)
    return 1 if is_void or any(row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
