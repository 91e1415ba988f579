"""Requests of up to 8 MB that are served, beside another stream: a real proxy before mock engines
with room for them.

python -m experiments.large_bodies.served [--rounds 3] [--out DIR]
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from experiments.bench_proxy import proxies
from experiments.bench_proxy.engines import PAIR, Engines, compile_programs
from experiments.large_bodies.run import MOST_GAP_S, deaths, measure
from experiments.record import Record

# At 100 tokens/s, after 1 ms of prefill.
PACE = "100000,1,1000"
STREAM = {
    "prompt": [1, 2, 3],
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "user": PACE,
}


def _completion(prompt: str) -> bytes:
    return f'{{"prompt":{prompt},"max_tokens":4,"user":"{PACE}"}}'.encode()


BODIES = {
    "text": _completion(json.dumps("b" * 8_000_000)),
    "escapes": _completion('"' + "\\u00e9" * 1_300_000 + '"'),
    "ids": _completion(str([1_000_000 + n for n in range(850_000)])),
}


async def measure_all(running: proxies.Running, rounds: int) -> list[dict[str, Any]]:
    url, admin = (f"http://127.0.0.1:{port}" for port in (running.port, running.admin_port))
    rows: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as http:
        for number in range(rounds):
            for name, count in [
                ("none", 0),
                *((name, count) for name in BODIES for count in (1, 4)),
            ]:
                before = await deaths(http, admin)
                row = await measure(
                    http,
                    url,
                    None if name == "none" else name,
                    count,
                    bodies=BODIES,
                    path="/v1/completions",
                    stream=STREAM,
                )
                row |= {"round": number, "lost": await deaths(http, admin) - before}
                # Of several at once admission may refuse some: their work is long for a queue.
                statuses = "[200]" if name == "none" else row["statuses"]
                found = set(json.loads(statuses)) if statuses.startswith("[") else set()
                row["served"] = 200 in found <= {200, 429}
                rows.append(row)
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """For each body the longest gap: the median over rounds, and the longest of them."""
    lines = [f"{'body':<10}{'requests':>8}{'MB':>6}{'gap s, median':>15}{'longest':>9}  served"]
    for cell in dict.fromkeys((row["body"], row["requests"]) for row in rows):
        found = [row for row in rows if (row["body"], row["requests"]) == cell]
        gaps = [row["longest_gap_s"] for row in found]
        lines.append(
            f"{cell[0]:<10}{cell[1]:>8}{found[0]['bytes'] / 1e6:>6.1f}{median(gaps):>15.3f}"
            f"{max(gaps):>9.3f}  {'yes' if all(row['served'] for row in found) else 'NO'}"
        )
    return "\n".join(lines)


def is_met(row: dict[str, Any]) -> bool:
    is_short = row["longest_gap_s"] <= MOST_GAP_S
    return bool(is_short and row["served"] and not row["lost"] and not row["failed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = Record()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with Engines(compile_programs(directory / "bin"), PAIR) as engines:
            bench = proxies.Bench(engines, directory, directory, None)
            with proxies.kvrs()(bench) as running:
                rows = asyncio.run(measure_all(running, options.rounds))
    print(as_text(rows))
    record.keep(options.out, "served", {"rows": rows}, as_text(rows))
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
