"""Requests that end every instance that works on them, between streams that must not be lost.

python -m experiments.poison.run [--seed 0] [--out DIR]
"""

import argparse
import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from experiments.record import Record
from experiments.scripted import is_whole
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster

# Name, pairs, the poisons' output position (-1: they end prefill instances), poisons, seconds until
# a dead instance is back (None: never), the most deaths that one request may cause.
CELLS = [
    ("one request, prefill", 10, -1, 1, None, 3),
    ("one request, before its first token", 10, 0, 1, None, 3),
    ("three requests, four pairs that restart", 4, 0, 3, 1.0, 3),
    ("three requests, prefill, four pairs that restart", 4, -1, 3, 1.0, 3),
    ("one request, after five tokens", 10, 5, 1, None, 4),
]
BESIDE = 40
TOKENS = 150
PROMPT_TOKENS = 20


async def measure(
    name: str, pairs: int, position: int, poisons: int, back_s: float | None, most: int, seed: int
) -> dict[str, Any]:
    rng = random.Random(f"{seed} {name}")
    async with open_proxy_cluster(pairs=pairs) as system:
        users = [f"poison-{n}" for n in range(poisons)]
        system.script.poisons = dict.fromkeys(users, position)
        system.script.pause_s = 0.02
        restarting = asyncio.create_task(_restart(system, back_s))
        beside = [asyncio.create_task(_is_whole(system, rng)) for _ in range(BESIDE // 2)]
        await system.until_streams_hold(5, count=BESIDE // 2)
        asked = []
        for user in users:
            prompt = rng.choices(range(1, 100), k=PROMPT_TOKENS)
            request = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "user": user}
            asked.append(asyncio.create_task(system.ask(request | {"stream": position > 0})))
            for _ in range(BESIDE // 2 // poisons):  # Requests that begin beside them.
                beside.append(asyncio.create_task(_is_whole(system, rng)))
                await asyncio.sleep(rng.uniform(0.0, 0.02))
        answers = [body for _, body in await asyncio.gather(*asked)]
        whole = await asyncio.gather(*beside)
        restarting.cancel()
        deaths = [user for user, _ in system.script.poisoned]
        for instance in system.instances.values():
            if instance.dying is not None:
                await instance.dying
        return {
            "cell": name,
            "instances": 2 * pairs,
            "deaths": len(deaths),
            "deaths_of_one_request": max(map(deaths.count, users)),
            "allowed": most,
            "refused": sum(b'"code":"poison"' in body for body in answers),
            "poisons": poisons,
            "beside": len(whole),
            "beside_lost": whole.count(False),
        }


async def _is_whole(system: ProxyCluster, rng: random.Random) -> bool:
    return await is_whole(system, rng.choices(range(1, 100), k=PROMPT_TOKENS), TOKENS)


async def _restart(system: ProxyCluster, back_s: float | None) -> None:
    if back_s is None:
        return
    while True:
        for instance in system.instances.values():
            if instance.dying is not None and instance.dying.done():
                instance.dying = asyncio.create_task(_back(instance, back_s))
        await asyncio.sleep(0.02)


async def _back(instance: Any, back_s: float) -> None:
    await asyncio.sleep(back_s)
    instance.dying = None
    await instance.restart()


async def measure_all(seed: int) -> list[dict[str, Any]]:
    return [await measure(*cell, seed) for cell in CELLS]


def is_met(row: dict[str, Any]) -> bool:
    return (
        row["deaths_of_one_request"] <= row["allowed"]
        and not row["beside_lost"]
        and row["refused"] == row["poisons"]
    )


def as_text(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{row['cell']:50} {row['deaths_of_one_request']} deaths of one request (allowed: "
        f"{row['allowed']}, instances: {row['instances']}), {row['refused']} of {row['poisons']} "
        f"refused, {row['beside_lost']} of {row['beside']} beside lost"
        + ("" if is_met(row) else ": MISSED")
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = Record(options.seed)
    rows = asyncio.run(measure_all(options.seed))
    print(as_text(rows))
    record.keep(options.out, "poison", {"rows": rows}, as_text(rows))
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
