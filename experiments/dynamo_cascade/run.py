"""Dynamo's own benchmark of a cascade, through kvrs and through Dynamo: three workers are killed
one after the other under a load of Mooncake's conversations.

    python -m experiments.dynamo_cascade.run --out experiments/dynamo_cascade/results

24 clients send the trace's requests one after the other. At 60, 120 and 180 s a worker gets
SIGKILL, and 90 s later it is started again, as long as a model takes to load. All subjects run at
the same time on this machine, so that other load meets all of them. Exit status 1: a request
through kvrs failed, or a token was wrong.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from experiments.bench_proxy.engines import BenchError
from experiments.bench_proxy.proxies import MissingError
from experiments.beside.server import MODEL
from experiments.beside.streams import End, Stream, difference, read
from experiments.beside.subjects import Front, Place, Start, dynamo, kvrs
from experiments.command_line import parser_of
from experiments.kills.drill import TRACE
from experiments.record import Record
from experiments.rig import percentile
from kvrs_lab.traces.formats import load_trace
from kvrs_testkit.networks import isolate
from kvrs_testkit.scripted_model import RANDOM_TOKENS, expected_ids

SEED = 7
CLIENTS = 24
LOAD_S = 300.0
KILLS_S = (60.0, 120.0, 180.0)
RESTART_S = 90.0
MOST_REQUESTS = 6000  # That a run can serve, or fail, in its time.
PAUSE_S = 0.064  # Between two tokens of a stream.
PROMPT_TOKENS_PER_S = 10_000.0
# A prompt and an output have fewer tokens than in the trace, and each takes as much longer.
PROMPT_SCALE = 32
OUTPUT_SCALE = 8
MOST_PROMPT = 3500  # The scripted servers have a context of 4,096 tokens.
SILENCE_S = 60.0
_SERVES_WITHIN_S = 60.0
SUBJECTS: dict[str, Start] = {
    "kvrs": kvrs,
    "dynamo": dynamo(),
    "dynamo, no migration": dynamo(migrations=0),
    "dynamo, its mockers": dynamo(is_mocked=True),
}
_RANDOM = {"dynamo, its mockers"}  # Their tokens are random: only their number is known.


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    wanted: list[int]


def requests_of(trace: Path, seed: int, count: int) -> list[Asked]:
    """The first requests of the trace, with random prompts, and the tokens of their answers."""
    rng = random.Random(seed)
    asked = []
    for request in load_trace(trace).requests[:count]:
        size = min(MOST_PROMPT, max(1, request.input_tokens // PROMPT_SCALE))
        prompt = [rng.randrange(RANDOM_TOKENS) for _ in range(size)]
        tokens = max(1, request.output_tokens // OUTPUT_SCALE)
        asked.append(Asked(prompt, expected_ids(prompt, tokens)))
    return asked


@dataclass(slots=True)
class Served:
    """One request with its times, from the beginning of the load on."""

    asked: Asked
    stream: Stream
    sent_s: float

    @property
    def ttft_s(self) -> float | None:
        times = self.stream.token_times_s
        return times[0] - self.sent_s if times else None


@dataclass(slots=True)
class Run:
    name: str
    front: Front
    requests: Sequence[Asked]
    share: float  # Of the times of the cascade.
    served: list[Served] = field(default_factory=list)
    _trial: Asked = field(default_factory=lambda: Asked([1, 2, 3], expected_ids([1, 2, 3], 3)))

    async def until_served(self, session: aiohttp.ClientSession) -> None:
        """Wait until the proxy serves a stream: workers are known before their model is."""
        async with asyncio.timeout(_SERVES_WITHIN_S):
            while not self.is_whole(await self._ask(session, self._trial)):
                await asyncio.sleep(0.5)

    async def load(self, session: aiohttp.ClientSession) -> None:
        """24 clients, each with one request after the other."""
        loop = asyncio.get_running_loop()
        begun_s, requests = loop.time(), iter(self.requests)

        async def client() -> None:
            while loop.time() - begun_s < LOAD_S * self.share:
                served = await self._ask(session, next(requests), self.served)
                if served.stream.end in (End.STATUS, End.BROKEN):
                    await asyncio.sleep(0.1)  # A client that is refused is not a busy loop.

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        asked: Asked,
        record: list[Served] | None = None,
    ) -> Served:
        served = Served(asked, Stream(asked.wanted), asyncio.get_running_loop().time())
        if record is not None:
            record.append(served)
        body = {
            "model": MODEL,
            "prompt": asked.prompt,
            "max_tokens": len(asked.wanted),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self.front.url}/v1/completions"
        await read(session, url, body, served.stream, silence_s=SILENCE_S)
        return served

    async def cascade(self) -> None:
        """Kill the workers in turn; start each again."""

        async def death(number: int, at_s: float) -> None:
            await asyncio.sleep(at_s * self.share)
            self.front.servers.processes[number].kill()
            await asyncio.sleep(RESTART_S * self.share)
            self.front.servers.restart(number)

        await asyncio.gather(*(death(number, at_s) for number, at_s in enumerate(KILLS_S)))

    def is_whole(self, served: Served) -> bool:
        end = served.stream.end
        return end is End.COMPLETE or (end is End.WRONG and self.name in _RANDOM)

    def figures(self) -> dict[str, Any]:
        whole = [each for each in self.served if self.is_whole(each)]
        failed = [each for each in self.served if not self.is_whole(each)]
        begun_s = self.served[0].sent_s
        tokens = sum(len(each.asked.wanted) for each in whole)
        ttfts_s = [each.ttft_s for each in self.served if each.ttft_s is not None]
        found = [
            difference(each.stream.ids, each.stream.wanted)
            for each in whole
            if self.name not in _RANDOM
        ]
        return {
            "requests": len(self.served),
            "failures": len(failed),
            "ends": dict(Counter(str(each.stream.end) for each in failed)),
            "errors": dict(
                Counter(
                    f"{each.stream.status}: {each.stream.error}"[:160] for each in failed
                ).most_common(3)
            ),
            "wrong_tokens": sum(map(sum, found)),
            "ttft_s": {
                name: round(percentile(ttfts_s, share), 3)
                for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0))
            },
            "failures_by_10_s": dict(
                Counter(int((each.sent_s - begun_s) // 10) * 10 for each in failed)
            ),
            # When they were sent, and how long they waited.
            "slowest_ttfts_s": [
                (round(each.sent_s - begun_s, 1), round(each.ttft_s or 0.0, 3))
                for each in sorted(self.served, key=lambda each: -(each.ttft_s or 0.0))[:10]
            ],
            "goodput_tokens_per_s": round(tokens * OUTPUT_SCALE / (LOAD_S * self.share), 1),
        }


async def measured(runs: Sequence[Run]) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(run.until_served(session) for run in runs))
        await asyncio.gather(*(run.load(session) for run in runs), *(run.cascade() for run in runs))


def as_text(subjects: dict[str, Any]) -> str:
    table = Table("proxy", "requests", "failures", "TTFT p50", "p99", "tokens/s", "failed by")
    for name, found in subjects.items():
        if "skipped" in found:
            table.add_row(name, f"skipped: {found['skipped']}")
            continue
        ends = ", ".join(f"{count} {end}" for end, count in found["ends"].items())
        ttft = found["ttft_s"]
        table.add_row(
            name,
            *(str(found[key]) for key in ("requests", "failures")),
            *(f"{ttft[key]:.3f} s" for key in ("p50", "p99")),
            f"{found['goodput_tokens_per_s']:,.0f}",
            ends,
        )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def main() -> int:
    options = parsed()
    isolate()
    record = Record(options.seed, timed=False)
    subjects: dict[str, Any] = {}
    share = 0.2 if options.quick else 1.0
    requests = requests_of(options.trace, options.seed, int(MOST_REQUESTS * share))
    with contextlib.ExitStack() as stack:
        runs = []
        for name, start in SUBJECTS.items():
            if name not in (options.only or SUBJECTS):
                continue
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrs-fall-")))
            place = Place(directory, options.peers, PAUSE_S, PROMPT_TOKENS_PER_S)
            try:
                front = stack.enter_context(start(place))
            except (MissingError, BenchError) as error:
                subjects[name] = {"skipped": str(error)}
                continue
            runs.append(Run(name, front, requests, share))
        asyncio.run(measured(runs))
        subjects = {run.name: run.figures() for run in runs} | subjects
    ours = subjects.get("kvrs", {"failures": 0, "wrong_tokens": 0})
    missed = ours["failures"] or ours["wrong_tokens"]
    text = as_text(subjects) + ("\nMISSED: 0 failures through kvrs" if missed else "")
    print(text)
    settings = {"clients": CLIENTS, "is_quick": options.quick}
    settings |= {"kills_s": KILLS_S, "restart_s": RESTART_S, "load_s": LOAD_S}
    record.keep(options.out, "dynamo_cascade", settings | {"subjects": subjects}, text)
    return 1 if missed else 0


def parsed() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=SEED)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvrs-bench"
    parser.add_argument("--peers", type=Path, default=cache, help="where peers are installed")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS)
    parser.add_argument("--quick", action="store_true", help="a fifth of all times")
    parser.add_argument("--trace", type=Path, default=TRACE, help="in Mooncake's format")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
