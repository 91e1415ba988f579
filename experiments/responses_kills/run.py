"""Background responses under a series of proxy kills, streamed and resumed by the unmodified
`openai` client, and compared with the same requests undisturbed.

    python -m experiments.responses_kills.run [--kills 100] [--proxies 2]
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from experiments.proxy_kills.run import settings
from experiments.record import Record
from kvrs.cluster.launcher import Cluster

CLIENTS = 6
TOKENS = 120
PAUSE_S = (0.0, 1.5)
GIVE_UP_S = 120.0
RETRY_S = 0.05
_LAST = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True, slots=True)
class Answer:
    """The content of one response at a client, over all its connections."""

    text: str
    ending: str
    output_tokens: int
    events: int


@dataclass
class Seen:
    answers: list[tuple[int, Answer | None]] = field(default_factory=list)  # By kind of request.
    breaks: int = 0
    number_gaps: int = 0  # Sequence numbers that are not one above the last.
    errors: Counter[str] = field(default_factory=Counter)


class Client:
    """Each connection goes to the next proxy."""

    def __init__(self, cluster: Cluster, model: str, number: int, seen: Seen) -> None:
        self._cluster = cluster
        self._seen = seen
        self._proxy = number
        self._body: dict[str, Any] = {
            "model": model,
            "input": f"Count {number} and go on",
            "max_output_tokens": TOKENS,
            "temperature": 0.8 if number % 2 else 0.0,
            "background": True,
            "extra_body": {"seed": number, "ignore_eos": True},
        }

    async def ask(self) -> Answer | None:
        """One response, whatever breaks; None: it was given up or has failed."""
        events: list[dict[str, Any]] = []
        gives_up_s = time.monotonic() + GIVE_UP_S
        while not events or events[-1]["type"] not in _LAST:
            if time.monotonic() > gives_up_s:
                return None
            if events:
                self._seen.breaks += 1
            try:
                await self._listen(events)
            except (openai.APIError, OSError) as error:
                self._seen.errors[type(error).__name__] += 1
                await asyncio.sleep(RETRY_S)
        last = events[-1]
        deltas = (e["delta"] for e in events if e["type"] == "response.output_text.delta")
        usage = last["response"]["usage"]
        tokens = 0 if usage is None else usage["output_tokens"]
        return Answer("".join(deltas), last["type"], tokens, len(events))

    async def _listen(self, events: list[dict[str, Any]]) -> None:
        """Take events from one connection until it ends."""
        urls = self._cluster.urls
        self._proxy += 1
        url = f"{urls[self._proxy % len(urls)]}/v1"
        async with openai.AsyncOpenAI(
            base_url=url, api_key="unused", max_retries=2, timeout=30
        ) as client:
            if events:
                stream = await client.responses.retrieve(
                    events[0]["response"]["id"],
                    stream=True,
                    starting_after=events[-1]["sequence_number"],
                )
            else:
                stream = await client.responses.create(**self._body, stream=True)
            async for event in stream:
                each = event.model_dump()
                expected = events[-1]["sequence_number"] + 1 if events else 0
                self._seen.number_gaps += each["sequence_number"] != expected
                events.append(each)


async def measure(cluster: Cluster, kills: int, seed: int) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.urls[0]}/v1", api_key="unused") as client:
        model = (await client.models.list()).data[0].id
    quiet = [await Client(cluster, model, number, Seen()).ask() for number in range(CLIENTS)]
    assert all(each is not None and each.ending in _LAST[:2] for each in quiet), quiet
    seen, rng, stopping = Seen(), random.Random(seed), asyncio.Event()

    async def load(number: int) -> None:
        while not stopping.is_set():
            answer = await Client(cluster, model, number, seen).ask()
            seen.answers.append((number, answer))

    loading = [asyncio.create_task(load(number)) for number in range(CLIENTS)]
    started_s = time.monotonic()
    for done in range(kills):
        await asyncio.to_thread(cluster.wait_all_up)
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        rng.choice(cluster.proxies).signal(signal.SIGKILL)
        if done % 10 == 9:
            print(f"  {done + 1} kills, {len(seen.answers)} responses", flush=True)
    await asyncio.to_thread(cluster.wait_all_up)
    stopping.set()
    await asyncio.gather(*loading)
    return {
        "kills": kills,
        "responses": len(seen.answers),
        "breaks": seen.breaks,
        "lost": sum(answer is None for _, answer in seen.answers),
        "different": sum(a is not None and a != quiet[number] for number, a in seen.answers),
        "number_gaps": seen.number_gaps,
        "errors_seen": dict(seen.errors),
        "kills_took_s": round(time.monotonic() - started_s, 1),
    }


def as_text(result: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"{result['proxies']} proxies, {result['kills']} kills in "
            f"{result['kills_took_s']:.0f} s, {CLIENTS} clients, half of the requests sampled",
            f"{result['responses']} responses of {TOKENS} tokens; connections broke "
            f"{result['breaks']} times while one was under way",
            f"lost {result['lost']}, different {result['different']}, gaps or repeats in sequence "
            f"numbers {result['number_gaps']}",
            f"errors of the client meanwhile: {result['errors_seen']}",
            "PASSED" if result["passed"] else "FAILED",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--proxies", type=int, default=2, choices=range(2, 9), metavar="2..8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    record = Record(arguments.seed, timed=False)
    with Cluster(settings("async", arguments.seed), print, arguments.proxies) as cluster:
        measured = asyncio.run(measure(cluster, arguments.kills, arguments.seed))
    bad = measured["lost"] + measured["different"] + measured["number_gaps"]
    result = {"proxies": arguments.proxies} | measured
    result["passed"] = not bad and measured["breaks"] > 0
    print(as_text(result))
    record.keep(arguments.out, "responses_kills", result, as_text(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
