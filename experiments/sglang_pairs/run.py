"""Servers of real SGLang die behind a proxy in mid-stream, prefill and decode apart, and every
stream must end as if none had.

    python -m experiments.sglang_pairs.run [--limit-s S] [--kind KIND]

A run adds rounds to those that the same code has measured before. Needs KVRS_SGLANG_PYTHON.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.deaths import as_text, by_kind, differences, rounds
from experiments.kills.vllm import make_requests
from experiments.record import Record
from kvrs.net.admin import AdminClient
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.open_loop import Dialect, Progress, replay
from kvrs_lab.traces.records import ReplayRequest, StreamRecord
from kvrs_testkit.sglang_servers import (
    PYTHON_ENV,
    START_TIMEOUT_S,
    Part,
    SglangServers,
    sglang_config,
)

NAME = "pairs"
STREAMS = 8
NODES = {"n0": ("p0", "d0"), "n1": ("p1", "d1"), "n2": ("d2",)}
# By kind: rounds, the letter of the servers of which one is hit, and the part that is hit.
DEATHS: dict[str, tuple[int, str, Part]] = {
    "decode": (30, "d", Part.SERVER),
    "prefill": (20, "p", Part.SERVER),
    "scheduler": (10, "pd", Part.SCHEDULER),
    "stop": (10, "pd", Part.SERVER),  # SIGSTOP; it goes on when the streams have ended.
}
PROMPT_TOKENS, OUTPUT_TOKENS = (40, 900), (300, 500)
STREAM_TIMEOUT_S = 240.0
_PREFILL_HIT_S = 1.5  # Prompts are being computed and sent for about so long.
_HELD_S = 45.0  # A decode server keeps what a dead prefill was sending it for 30 s.
_LOOK_AGAIN_S = 0.2
_COLUMNS = (
    *("rounds", "streams", "hit", "recovered", "lost", "repeated", "different"),
    *("failed", "held"),
)


class Rounds:
    """A cluster of two prefill and three decode servers, of which one is hit in each round."""

    def __init__(self, servers: SglangServers, seed: int) -> None:
        self._servers, self._seed = servers, seed
        config = servers.config
        self._url = f"http://{config.proxy.host}:{config.proxy.port}"
        self._admin_url = f"http://{config.proxy.admin_host}:{config.proxy.admin_port}"
        self._starts = ThreadPoolExecutor()

    def measure(self, name: str) -> dict[str, Any]:
        return asyncio.run(self._measure(name))

    async def _measure(self, name: str) -> dict[str, Any]:
        kind = name.split()[0]
        _, letters, part = DEATHS[kind]
        draw = random.Random(f"{self._seed} {name}")
        requests = self._requests(draw)
        await self._all_up()
        async with AdminPort(AdminClient(self._admin_url)) as port:
            progress, began_s = Progress(len(requests)), time.time()
            load = asyncio.create_task(
                replay(self._url, requests, timeout_s=STREAM_TIMEOUT_S, progress=progress)
            )
            letter = draw.choice(letters)
            await self._until_due(port, progress, letter, draw)
            streams = (await port.state())["streams"]
            key = "prefill" if letter == "p" else "decode"
            ends = Counter(each[key] for each in streams if (each[key] or "").startswith(letter))
            victim = ends.most_common(1)[0][0] if ends else f"{letter}0"
            if kind == "stop":
                self._servers.signal(victim, signal.SIGSTOP)
            else:
                self._servers.kill(victim, part)
            records = await load
            state = await port.state()
        if kind == "stop":
            self._servers.signal(victim, signal.SIGCONT)
            again = None
        else:
            self._servers.start(victim)
            again = self._starts.submit(self._servers.wait_ready, victim)
        held = await self._held(victim)
        calm = await replay(
            self._url,
            requests,
            dialect=Dialect(cache_salt="calm"),
            timeout_s=STREAM_TIMEOUT_S,
        )
        if again is not None:
            await asyncio.wrap_future(again)
        recoveries = [row for row in state["recoveries"] if row["at_s"] >= began_s]
        return {
            "victim": victim,
            "streams": len(requests),
            "open": len(streams),
            "hit": ends[victim],
            "recovered": len({row["stream"] for row in recoveries}),
            "by_option": dict(Counter(row["option"] for row in recoveries)),
            **compared(records, calm),
            "failed_calm": sum(not each.completed for each in calm),
            "held": held,
        }

    def _requests(self, draw: random.Random) -> list[ReplayRequest]:
        """Prompts of other lengths than those of the series of vLLM."""
        made = make_requests(self._servers.model, STREAMS, draw.randrange(1 << 30))
        return [
            replace(
                each,
                prompt_ids=tuple(draw.choices(each.prompt_ids, k=draw.randint(*PROMPT_TOKENS))),
                max_tokens=draw.randint(*OUTPUT_TOKENS),
            )
            for each in made
        ]

    async def _until_due(
        self, port: AdminPort, progress: Progress, letter: str, draw: random.Random
    ) -> None:
        """Return at a random moment: of prefill and transfer, or while all streams have tokens."""
        if letter == "p":
            await asyncio.sleep(draw.uniform(0.0, _PREFILL_HIT_S))
            return
        tokens = draw.randint(5, 100)
        while True:
            streams = (await port.state())["streams"]
            all_known = progress.sent == progress.total == len(streams) + progress.ended
            if all_known and all(each["output_tokens"] >= tokens for each in streams):
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _all_up(self) -> None:
        async with (
            AdminPort(AdminClient(self._admin_url)) as port,
            asyncio.timeout(START_TIMEOUT_S),
        ):
            while True:
                rows = (await port.state())["instances"]
                if all(_is_tested(row) for row in rows):
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _held(self, victim: str) -> int:
        """Count the requests that other servers still have, once none should be there."""
        others = [name for name in self._servers.names if name != victim]
        until_s = time.monotonic() + _HELD_S
        while True:
            held = sum(map(self._requests_at, others))
            if not held or time.monotonic() > until_s:
                return held
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _requests_at(self, name: str) -> int:
        loads = self._servers.loads(name)
        return sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads)


def _is_tested(row: Mapping[str, Any]) -> bool:
    test = row["self_test"]
    return bool(row["health"] == "up" and (test is None or test["done"]))


def compared(records: Sequence[StreamRecord], calm: Sequence[StreamRecord]) -> dict[str, int]:
    """Count the differences of what clients have had from the same streams without a death."""
    pairs = ((got.token_ids, each.token_ids) for got, each in zip(records, calm, strict=True))
    return {**differences(pairs), "failed": sum(not each.completed for each in records)}


def missed(figures: Mapping[str, Any]) -> list[str]:
    """The bars that are missed."""
    found = [
        f"{figures['all'][what]} {what}; bar 0"
        for what in ("lost", "repeated", "different", "failed", "held")
        if figures["all"].get(what)
    ]
    found += [
        f"{kind}: {figures[kind].get('rounds', 0)} rounds; bar {count}"
        for kind, (count, _, _) in DEATHS.items()
        if figures[kind].get("rounds", 0) < count
    ]
    return found


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--limit-s", type=float, default=3000.0, help="no round begins later")
    parser.add_argument("--kind", choices=[*DEATHS], help="rounds of this kind alone")
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    kinds = [options.kind] if options.kind else [*DEATHS]
    names = rounds({kind: DEATHS[kind][0] for kind in kinds})
    cells = Cells(options.out, NAME, {"streams_per_round": STREAMS})
    give_up_s = time.monotonic() + options.limit_s
    with TemporaryDirectory() as directory:
        config = sglang_config(Path(directory), NODES)
        with SglangServers(config, os.environ[PYTHON_ENV]) as servers:
            servers.start(*servers.names)
            servers.wait_ready(*servers.names)
            servers.start_proxy()
            drill = Rounds(servers, options.seed)
            for name in names:
                if name in cells.found or time.monotonic() > give_up_s:
                    continue
                cells.measure([name], options.limit_s, drill.measure)
                figures = by_kind(cells.found, DEATHS)
                text = as_text(figures, _COLUMNS, missed(figures))
                cells.keep(record, {"by_death": figures}, text)
    figures = by_kind(cells.found, DEATHS)
    misses = missed(figures)
    print(as_text(figures, _COLUMNS, misses))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
