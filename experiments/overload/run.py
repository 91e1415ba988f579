"""Goodput below and beyond saturation, with and without admission by predicted wait.

python -m experiments.overload.run [--span 15] [--seed 0] [--out DIR]
"""

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from experiments.record import Record
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs_testkit.proxy_cluster import open_proxy_cluster
from kvrs_testkit.scripted import Scripted

PREFILL_S = 0.05  # Of each prompt, one at a time at each of two instances.
PAIRS = 2
SATURATION_PER_S = PAIRS / PREFILL_S
TTFT_S = 2.0  # A token that comes later is worth nothing to its client.
WITHOUT_S = 3600.0
LOADS = (1.0, 1.5, 3.0)


@dataclass(eq=False)
class Queueing(Scripted):
    """A scripted instance that computes prompts one after the other, and reports its queue."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0

    async def _prefill(
        self, request: web.Request, parsed: CompletionRequest | ChatRequest
    ) -> web.StreamResponse:
        self.waiting += 1
        self.queue_delay_s = self.waiting * PREFILL_S
        try:
            async with self.turn:
                await asyncio.sleep(PREFILL_S)
        finally:
            self.waiting -= 1
            self.queue_delay_s = self.waiting * PREFILL_S
        return await super()._prefill(request, parsed)


def with_queues(instances: dict[str, Scripted]) -> None:
    for name, each in instances.items():
        instances[name] = Queueing(
            each.id, each.node, role=each.role, script=each.script, created=each.created
        )


async def one(http: aiohttp.ClientSession, url: str, seed: int) -> tuple[str, float]:
    """How a request ends, and after which time its first token came."""
    begun_s = time.monotonic()
    body = {"prompt": [seed % 90 + 1] * 20, "max_tokens": 4, "temperature": 0, "stream": True}
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                return str(response.status), time.monotonic() - begun_s
            await response.content.readuntil(b"\n\n")
            first_s = time.monotonic() - begun_s
            events = await response.read()
    except (aiohttp.ClientError, asyncio.IncompleteReadError):
        return "broken", time.monotonic() - begun_s
    return "whole" if events.endswith(b"data: [DONE]\n\n") else "broken", first_s


async def measure(load: float, wait_s: float, span_s: float, seed: int) -> dict[str, Any]:
    rng = random.Random(f"{seed} {load}")
    policy = {"admission": {"wait_s": wait_s}}
    async with (
        open_proxy_cluster(pairs=PAIRS, policy=policy, prepare=with_queues) as system,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        asked: list[asyncio.Task[tuple[str, float]]] = []
        begun_s = next_s = time.monotonic()
        while next_s - begun_s < span_s:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            asked.append(asyncio.create_task(one(http, system.url, len(asked))))
            next_s += rng.expovariate(load * SATURATION_PER_S)
        answers = await asyncio.gather(*asked)
    good = sum(end == "whole" and first_s <= TTFT_S for end, first_s in answers)
    firsts = sorted(first_s for end, first_s in answers if end == "whole")
    return {
        "load": load,
        "admission": wait_s < WITHOUT_S,
        "asked_per_s": round(len(asked) / span_s, 1),
        "goodput_per_s": round(good / span_s, 1),
        "ttft_s_p50": round(firsts[len(firsts) // 2], 3),
        "ttft_s_p99": round(firsts[int(len(firsts) * 0.99)], 3),
        "refused": sum(end in ("429", "503") for end, _ in answers),
        "broken": sum(end == "broken" for end, _ in answers),
    }


async def measure_all(span_s: float, seed: int) -> list[dict[str, Any]]:
    return [
        await measure(load, wait_s, span_s, seed)
        for load in LOADS
        for wait_s in (WITHOUT_S, 0.75 * TTFT_S)
    ]


def as_text(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        [
            f"{'load':>5} {'admission':<10}{'asked/s':>8}{'in time/s':>10}{'TTFT p50 s':>12}"
            f"{'p99 s':>8}{'refused':>9}{'broken':>8}",
            *(
                f"{row['load']:>4}x {'with' if row['admission'] else 'without':<10}"
                f"{row['asked_per_s']:>8}{row['goodput_per_s']:>10}{row['ttft_s_p50']:>12.2f}"
                f"{row['ttft_s_p99']:>8.2f}{row['refused']:>9}{row['broken']:>8}"
                for row in rows
            ),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--span", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = Record(options.seed)
    rows = asyncio.run(measure_all(options.span, options.seed))
    print(as_text(rows))
    record.keep(options.out, "overload", {"rows": rows}, as_text(rows))
    beyond = [row["goodput_per_s"] for row in rows if row["admission"] and row["load"] > 1]
    at = next(row["goodput_per_s"] for row in rows if row["admission"] and row["load"] == 1)
    return int(min(beyond) < 0.8 * at)


if __name__ == "__main__":
    sys.exit(main())
