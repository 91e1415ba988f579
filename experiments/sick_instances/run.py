"""One of three prefill or decode instances fails every call while its reports are healthy; or
instances are paused, or have no processor to spare.

python -m experiments.sick_instances.run [--seed 0] [--seeds 4] [--out DIR]
python -m experiments.sick_instances.run --part paused|busy [--streams N] [--out DIR]
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.record import Record
from experiments.sick_instances import paused
from kvrs.protocol.openai.chunks import error_body
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster

ANSWERS: tuple[int | str, ...] = (404, 413, 422, 429, 500, 503, "hang")
SPAN_S = 15.0
SETTLED_S = 5.0
REQUESTS_PER_S = 20
AT_ONCE = 4  # Clusters that run side by side.
LEAST_SUCCEEDED = 0.995
MOST_SHARE = 0.02


async def measure(leg: str, answer: int | str, seed: int) -> dict[str, Any]:
    rng = random.Random(f"{seed} {leg} {answer}")
    async with open_proxy_cluster(pairs=3) as system:
        name = f"{leg[0]}{rng.randrange(3)}"
        sick = system.instances[name]
        if isinstance(answer, int):
            sick.refusal = (answer, error_body("no"))
        else:
            sick.hangs = True
        begun_s = time.monotonic()
        asked: list[asyncio.Task[bool]] = []
        before = early = 0
        while (elapsed_s := time.monotonic() - begun_s) < SPAN_S:
            if elapsed_s < SETTLED_S:
                before, early = len(sick.completions), len(asked)
            prompt = [rng.randrange(1, 100) for _ in range(20)]
            asked.append(asyncio.create_task(_succeeds(system, prompt)))
            await asyncio.sleep(rng.expovariate(REQUESTS_PER_S))
        there, late = len(sick.completions) - before, len(asked) - early
        succeeded = sum(await asyncio.gather(*asked))
        return {
            "leg": leg,
            "answer": answer,
            "seed": seed,
            "requests": len(asked),
            "succeeded": succeeded / len(asked),
            "share_after_5_s": there / late,
        }


async def _succeeds(system: ProxyCluster, prompt: list[int]) -> bool:
    status, body = await system.complete(prompt=prompt, max_tokens=4, temperature=0)
    return status == 200 and json.loads(body)["usage"]["completion_tokens"] == 4


async def measure_all(seeds: range) -> list[dict[str, Any]]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(leg: str, answer: int | str, seed: int) -> dict[str, Any]:
        async with places:
            return await measure(leg, answer, seed)

    cells = itertools.product(("prefill", "decode"), ANSWERS, seeds)
    return await asyncio.gather(*(one(*cell) for cell in cells))


def is_met(row: dict[str, Any]) -> bool:
    return bool(row["succeeded"] >= LEAST_SUCCEEDED and row["share_after_5_s"] <= MOST_SHARE)


def as_text(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{row['leg']:8} {row['answer']!s:5} seed {row['seed']} {row['requests']:4} requests, "
        f"{row['succeeded']:.2%} succeeded, {row['share_after_5_s']:.2%} there after 5 s"
        + ("" if is_met(row) else ": MISSED")
        for row in rows
    )


def measure_part(record: Record, part: str, streams: int | None, out: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="kvrs-paused-") as directory:
        rows = paused.measure(part, Path(directory), streams)
    print(paused.as_text(rows))
    record.keep(out, part, {"rows": rows}, paused.as_text(rows))
    return 0 if all(map(paused.is_met, rows)) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=("answers", *paused.STREAMS), default="answers")
    parser.add_argument("--streams", type=int, help="of the parts paused and busy")
    options = parser.parse_args()
    record = Record(options.seed)
    if options.part != "answers":
        return measure_part(record, options.part, options.streams, options.out)
    rows = asyncio.run(measure_all(range(options.seed, options.seed + options.seeds)))
    print(as_text(rows))
    record.keep(options.out, "sick_instances", {"rows": rows}, as_text(rows))
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
