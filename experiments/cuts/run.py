"""Cut streams in every place, and compare what their clients get with the uninterrupted run, byte
for byte.

    python -m experiments.cuts.run         # every cut of every stream, scripted instances
    python -m experiments.cuts.run --real  # random cuts of streams of four engine processes

Writes `scripted.json` and `scripted.txt`, or `real.json` and `real.txt`, into `results/`.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from experiments.cuts.relay import Tried
from experiments.record import Record
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import save_tokenizer
from tests.proxy.cuts import Point, cases, points, try_point

RESULTS = Path(__file__).parent / "results"
# Instances whose connections are cut again and again get nothing new for up to a minute.
PATIENCE_S = 600.0
AT_ONCE = 32  # Cuts in flight.
HANGING_AT_ONCE = 400  # Most of their time passes in silence.


async def scripted() -> tuple[list[Tried], int]:
    """All cuts of all streams; and how many streams there were."""
    with tempfile.TemporaryDirectory() as model:
        save_tokenizer(Path(model))
        # Engines that send the finish with the last token, and engines that send it apart.
        tried = []
        for separate in (False, True):
            async with open_proxy_cluster(
                model=model,
                proxy={"token_gap_s": 2.0, "keep_alive_s": None, "max_streams": 100_000},
                policy={"recovery": {"wait_s": PATIENCE_S}},
                slo={"recovery_gap_s": PATIENCE_S},
            ) as system:
                system.script.separate_finish = separate
                tried += await _all_cuts(system, separate)
    return tried, len(cases())


async def _all_cuts(system: ProxyCluster, separate: bool) -> list[Tried]:
    every = [
        point
        for case in cases()
        for point in await points(system.http, system.url, system.script, case)
    ]
    # A second house need not repeat what is the same in the first.
    if separate:
        last = {
            point.case.name: max(p.cut.event for p in every if p.case is point.case)
            for point in every
        }
        every = [point for point in every if point.cut.event >= last[point.case.name] - 3]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=2 * PATIENCE_S)
    ) as http:
        hanging = [point for point in every if point.cut.fault is Fault.HANG]
        breaking = [point for point in every if point.cut.fault is not Fault.HANG]
        tried = await _try_all(http, system, breaking, AT_ONCE, f"break {separate}")
        return tried + await _try_all(http, system, hanging, HANGING_AT_ONCE, f"hang {separate}")


async def _try_all(
    http: aiohttp.ClientSession,
    system: ProxyCluster,
    tried: Sequence[Point],
    at_once: int,
    name: str,
) -> list[Tried]:
    gate = asyncio.Semaphore(at_once)

    async def one(number: int, point: Point) -> Tried:
        async with gate:
            wrong = await try_point(http, system.url, system.script, point, f"{name} {number}")
        return Tried(point.case.name, point.cut.fault, point.cut.event, wrong)

    return await asyncio.gather(*(one(number, point) for number, point in enumerate(tried)))


def report(tried: Sequence[Tried], streams: int, seconds: float, what: str) -> dict[str, Any]:
    exact = [cut for cut in tried if cut.wrong is None]
    per_stream = Counter(cut.case for cut in tried)
    return {
        "what": what,
        "streams": streams,
        "cuts": len(tried),
        "exact": len(exact),
        "cuts_by_kind": dict(sorted(Counter(cut.kind for cut in tried).items())),
        "cuts_by_stream": dict(sorted(per_stream.items())),
        "seconds": round(seconds, 1),
        "wrong": [
            {"stream": c.case, "kind": c.kind, "event": c.event, "what": c.wrong}
            for c in tried
            if c.wrong is not None
        ],
    }


def as_text(result: dict[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in result["cuts_by_kind"].items())
    lines = [
        result["what"],
        f"{result['exact']} of {result['cuts']} cuts byte-exact, {result['streams']} "
        f"streams, {result['seconds']} s",
        f"kinds of cut: {kinds}",
        "cuts by stream:",
        *(f"  {count:5d}  {name}" for name, count in result["cuts_by_stream"].items()),
    ]
    lines += [
        f"WRONG {wrong['stream']}, {wrong['kind']} before event {wrong['event']}: {wrong['what']}"
        for wrong in result["wrong"]
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="cut streams of real engine processes")
    parser.add_argument("--cuts", type=int, default=520, help="with --real: how many")
    parser.add_argument("--seed", type=int, default=0, help="with --real: of the choice of cuts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    record, started_s = Record(arguments.seed, timed=False), time.monotonic()
    if arguments.real:
        from experiments.cuts.real import real  # Starts processes; the other mode needs none.

        name, what = (
            "real",
            "Real engine processes; the connection to the decode instance is closed "
            "before a random event.",
        )
        tried, streams = uvloop.run(real(arguments.cuts, arguments.seed))
    else:
        name, what = (
            "scripted",
            "Scripted instances; every cut point of every stream, in every way.",
        )
        tried, streams = uvloop.run(scripted())
    result = report(tried, streams, time.monotonic() - started_s, what)
    print(as_text(result), end="")
    record.keep(arguments.out, name, result, as_text(result))
    return 0 if result["exact"] == result["cuts"] else 1


if __name__ == "__main__":
    sys.exit(main())
