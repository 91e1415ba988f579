"""Rates of an instance with four stages, which computes a batch in each of them at a time, beside
the same instance with one batch at a time.

    python -m experiments.pipelines.depth [--pairs 5]

- *prefill*: prompts that fill a batch each, one token wanted;
- *decode*: streams of 120 tokens.

Ranks are processes of a tiny model and keep the clock of another GPU: a batch takes as long as
there, all stages together. Ideal is a stage that always computes: a stage's part of the time for
each batch. Both instances are there all the time, and are asked in turns.
"""

import asyncio
import statistics
import time
from random import Random
from typing import Any

import aiohttp

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import draw, interval, session_for
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.scheduling.pace import Pace
from kvrs.scheduling.sequences import Chunk
from kvrs_testkit.processes import Processes

PROFILE = "llama-3.1-70b-a100-vllm-tp4"
STAGES = 4
BATCH_TOKENS = 64
PROMPTS, TOKENS, STREAMS = 160, 120, 16
AT_A_TIME = 2 * STAGES  # Prompts.
ONE, FULL = "d0", "d1"
LEAST = 0.9
Row = dict[str, Any]


class OneOfThem(Processes):
    """The first instance computes one batch at a time."""

    def _placed(self, name: str, command: list[str]) -> list[str]:
        if name != ONE:
            return command
        return [
            "experiments.pipelines.one_batch" if word == "kvrs.engine" else word for word in command
        ]


def config() -> Config:
    nodes = [
        {"id": f"n{n}", "instances": [{"id": f"d{n}", "role": "both", "pp": STAGES}]}
        for n in range(2)
    ]
    engine = {
        "pace": PROFILE,
        "pages": 1024,
        "max_running": STREAMS,
        "max_batch_tokens": BATCH_TOKENS,
    }
    return parse_config(
        {"cluster": {"nodes": nodes, "engine": engine}, "gossip": {"enabled": False}}
    )


class Asked:
    def __init__(self, processes: Processes, http: aiohttp.ClientSession, name: str) -> None:
        instance = processes.config.cluster.find(InstanceId(name))[1]
        self._url, self._http = processes.config.url_of(instance), http
        self._random = Random(name)

    async def _one(self, prompt_tokens: int, tokens: int) -> None:
        prompt = list(draw(self._random, prompt_tokens))
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with self._http.post(f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    async def prefill_per_s(self) -> float:
        """Prompt tokens."""
        slots, began_s = asyncio.Semaphore(AT_A_TIME), time.perf_counter()

        async def one() -> None:
            async with slots:
                await self._one(BATCH_TOKENS, 1)

        await asyncio.gather(*(one() for _ in range(PROMPTS)))
        return PROMPTS * BATCH_TOKENS / (time.perf_counter() - began_s)

    async def decode_per_s(self) -> float:
        """Tokens, prefill of a short prompt included."""
        began_s = time.perf_counter()
        await asyncio.gather(*(self._one(4, TOKENS) for _ in range(STREAMS)))
        return STREAMS * TOKENS / (time.perf_counter() - began_s)


def ideals() -> dict[str, float]:
    """Tokens/s where each stage always computes."""
    pace = Pace(PROFILE)
    prompt = pace.batch_s([Chunk(range(BATCH_TOKENS), 0, [], logits=1)])
    own = STREAMS // STAGES
    step = pace.batch_s([Chunk([1], TOKENS // 2, [], logits=1)] * own)
    return {"prefill": STAGES * BATCH_TOKENS / prompt, "decode": STAGES * own / step}


async def measure(pairs: int) -> list[Row]:
    found: dict[tuple[str, str], list[float]] = {}
    with OneOfThem(config()) as processes:
        processes.start(ONE, FULL)
        processes.wait_ready(ONE, FULL)
        async with session_for(processes) as http:
            asked = {name: Asked(processes, http, name) for name in (ONE, FULL)}
            for number in range(pairs + 1):
                for name in (ONE, FULL) if number % 2 else (FULL, ONE):
                    rates = {
                        "prefill": await asked[name].prefill_per_s(),
                        "decode": await asked[name].decode_per_s(),
                    }
                    # The first pair warms up.
                    for what, rate in rates.items() if number else ():
                        found.setdefault((what, name), []).append(rate)
    return [
        {
            "what": what,
            "one": statistics.median(found[what, ONE]),
            "full": statistics.median(found[what, FULL]),
            "ideal": ideal,
            "share": statistics.median(found[what, FULL]) / ideal,
            "interval": interval([rate / ideal for rate in found[what, FULL]]),
        }
        for what, ideal in ideals().items()
    ]


def as_text(rows: list[Row]) -> str:
    lines = [
        f"tokens/s of {STAGES} stages at the pace of {PROFILE}; ideal: a stage computes always",
        f"  {'':10}{'one batch':>11}{f'{STAGES} batches':>11}{'ideal':>9}  of the ideal",
    ]
    lines += [
        f"  {row['what']:10}{row['one']:11.0f}{row['full']:11.0f}{row['ideal']:9.0f}"
        f"{row['share']:10.2f} ± {row['interval']:.2f}"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    record = Record(0)
    rows = asyncio.run(measure(options.pairs))
    faults = [
        f"{row['what']}: {row['share']:.2f} of the ideal; bar {LEAST}"
        for row in rows
        if row["share"] < LEAST
    ]
    text = as_text(rows) + "\n".join(faults or ["PASSED"]) + "\n"
    print(text, end="")
    is_void = record.keep(options.out, "depth", {"rows": rows}, text)
    return 1 if faults or is_void else 0


if __name__ == "__main__":
    raise SystemExit(main())
