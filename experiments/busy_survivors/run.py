"""A decode instance is killed, and every survivor answers 429 or 503 for ten seconds.

python -m experiments.busy_survivors.run [--busy-s 10] [--streams 60] [--out DIR]
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from experiments.record import Record
from experiments.scripted import is_whole
from kvrs.protocol.openai.chunks import error_body
from kvrs_testkit.proxy_cluster import open_proxy_cluster

TOKENS = 20
NEW = 50  # Requests that come while all are busy.
STATUSES = (429, 503)


async def measure(status: int, retry_after: str | None, streams: int, busy_s: float) -> Any:
    async with open_proxy_cluster(pairs=3) as system:
        system.script.gate, system.script.gate_at = asyncio.Event(), 3
        asked = [
            asyncio.create_task(is_whole(system, [1, 2, 3 + n], TOKENS)) for n in range(streams)
        ]
        await system.until_streams_hold(3, count=streams)
        rows = (await system.state())["streams"]
        victims = sum(row["decode"] == "d0" for row in rows)
        survivors = [one for name, one in system.instances.items() if name != "d0"]
        for one in survivors:
            one.refusal, one.retry_after = (status, error_body("no room")), retry_after
        before = sum(len(one.completions) for one in survivors)
        await system.instances["d0"].kill()
        asked += [asyncio.create_task(is_whole(system, [1, 2, 3 + n], TOKENS)) for n in range(NEW)]
        await asyncio.sleep(busy_s)
        calls = sum(len(one.completions) for one in survivors) - before
        for one in survivors:
            one.refusal = None
        system.script.gate.set()
        free_s = time.monotonic()
        whole = await asyncio.gather(*asked)
        return {
            "status": status,
            "retry_after": retry_after,
            "busy_s": busy_s,
            "victims": victims,
            "streams": streams,
            "streams_whole": sum(whole[:streams]),
            "new": NEW,
            "new_whole": sum(whole[streams:]),
            "calls_while_busy": calls,
            "all_done_after_s": round(time.monotonic() - free_s, 2),
        }


async def measure_all(streams: int, busy_s: float) -> list[dict[str, Any]]:
    cells = [(status, after) for status in STATUSES for after in (None, "3")]
    measured = [measure(status, after, streams, busy_s) for status, after in cells]
    return list(await asyncio.gather(*measured))


def as_text(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{row['status']} Retry-After {row['retry_after'] or '-':2} {row['busy_s']:.0f} s: "
        f"{row['streams_whole']} of {row['streams']} streams whole ({row['victims']} victims), "
        f"{row['new_whole']} of {row['new']} new requests, {row['calls_while_busy']} calls "
        f"while busy, all done {row['all_done_after_s']} s after it"
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy-s", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = Record()
    rows = asyncio.run(measure_all(options.streams, options.busy_s))
    print(as_text(rows))
    record.keep(options.out, "busy_survivors", {"rows": rows}, as_text(rows))
    return int(any(row["streams_whole"] < row["streams"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
