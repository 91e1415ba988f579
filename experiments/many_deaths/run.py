"""Streams through a hundred deaths of their decode instances, with progress in between.

python -m experiments.many_deaths.run [--deaths 100] [--streams 8] [--out DIR]
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from experiments.record import Record
from experiments.scripted import expected_text
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster

MORE_TOKENS = 20  # After the last death.


async def measure(deaths: int, streams: int) -> dict[str, Any]:
    """All streams run at one decode instance, which is killed after each further token."""
    begun_s = time.monotonic()
    tokens = deaths + MORE_TOKENS
    async with open_proxy_cluster(pairs=3) as system:
        system.script.gate, system.script.gate_at = asyncio.Event(), 1
        prompts = [[1, 2, n + 1] for n in range(streams)]
        asked = [asyncio.create_task(_text(system, prompt, tokens)) for prompt in prompts]
        killed = 0
        for death in range(1, deaths + 1):
            await system.until_streams_hold(death, count=streams)
            busiest = await _busiest(system)
            await system.instances[busiest].kill()
            killed += 1
            system.script.gate_at = death + 1
            await system.instances[busiest].restart()
            await system.until_health(**{busiest: "up"})
        system.script.gate.set()
        texts = await asyncio.gather(*asked)
        whole = [expected_text(prompt, tokens) for prompt in prompts]
        attempts = sum(len(instance.completions) for instance in system.instances.values())
        return {
            "deaths": killed,
            "streams": streams,
            "exact": sum(map(str.__eq__, texts, whole)),
            "upstream_calls": attempts,
            "seconds": round(time.monotonic() - begun_s, 1),
        }


async def _busiest(system: ProxyCluster) -> str:
    rows: list[str] = [row["decode"] for row in (await system.state())["streams"]]
    return max(sorted(set(rows)), key=rows.count)


async def _text(system: ProxyCluster, prompt: list[int], tokens: int) -> str:
    _, body = await system.complete(prompt=prompt, max_tokens=tokens, temperature=0, stream=True)
    *events, end = body.split(b"\n\n")[:-1]
    if end != b"data: [DONE]":
        return f"error: {end!r}"
    chunks = [msgspec.json.decode(event[6:]) for event in events]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def as_text(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{row['deaths']} deaths: {row['exact']} of {row['streams']} streams exact, "
        f"{row['upstream_calls']} upstream calls, {row['seconds']} s"
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = Record(timed=False)
    rows = [
        asyncio.run(measure(options.deaths, streams)) for streams in sorted({1, options.streams})
    ]
    print(as_text(rows))
    record.keep(options.out, "many_deaths", {"rows": rows}, as_text(rows))
    return int(any(row["exact"] < row["streams"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
