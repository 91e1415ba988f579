"""Real vLLM under a proxy: a server comes back with other weights under the same path, and right
ones die before and behind its self-test.

    KVRS_VLLM_PYTHON=.venv-vllm/bin/python python -m experiments.other_weights.vllm [--rounds 5]

Three decode servers. In a round the files of the model are replaced, d1 is killed and started
again; as soon as it is up, and not tested yet, d0 is killed in the middle of streams. When d1 is
known to differ, d2 is killed, too, so that new streams find it alone. Then the files are put back,
all three are started again, and the same requests run undisturbed.
"""

import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.net.admin import AdminClient
from kvrs_engine.engine.random_model import SYLLABLES, write_tiny_model
from kvrs_testkit.vllm_servers import MODEL_SEED, PYTHON_ENV, VllmServers, vllm_config

ALONE = {"n0": ("d0",), "n1": ("d1",), "n2": ("d2",)}
OTHER_SEED = MODEL_SEED + 1
WAVE, MAX_TOKENS = 8, 400
UNDER_WAY_TOKENS = 5
WAIT_S = 20.0  # `recovery.wait_s`: then streams without a right server end.
_LOOK_S, _UP_TIMEOUT_S = 0.05, 400.0


@dataclass
class Got:
    ids: list[int] = field(default_factory=list)
    is_marked: bool = False
    is_whole: bool = False
    error: str = ""


@dataclass
class Rounds:
    servers: VllmServers
    rng: random.Random
    console: Console
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        proxy = self.servers.config.proxy
        self._url = f"http://{proxy.host}:{proxy.port}/v1/completions"
        self._admin = AdminClient(f"http://{proxy.admin_host}:{proxy.admin_port}")
        self._model = Path(str(self.servers.config.cluster.model))
        self._begun = dict[int, int]()  # Tokens of each stream under way.

    async def run(self, rounds: int) -> None:
        timeout = aiohttp.ClientTimeout(total=240)
        async with aiohttp.ClientSession(timeout=timeout) as self._http:
            await self._until(lambda rows: all(_is(rows[name], "right") for name in rows))
            for number in range(rounds):
                self.rows.append(row := await self._round(number))
                self.console.print(f"  {row}", style="dim", markup=False)

    async def _round(self, number: int) -> dict[str, Any]:
        requests = [self._request() for _ in range(3 * WAVE)]
        cut, before, behind = requests[:WAVE], requests[WAVE : 2 * WAVE], requests[2 * WAVE :]
        await asyncio.to_thread(self._replace, OTHER_SEED)
        await asyncio.to_thread(self.servers.kill, "d1")
        await self._until(lambda rows: rows["d1"]["health"] == "down")
        await asyncio.to_thread(self.servers.start, "d1")
        await self._until(lambda rows: rows["d1"]["health"] == "up")
        up_s = time.monotonic()
        self._begun.clear()
        asked = [asyncio.create_task(self._ask(each, at)) for at, each in enumerate(cut)]
        known = asyncio.create_task(self._until(lambda rows: _is(rows["d1"], "other")))
        await self._under_way(len(cut))
        was_known = known.done()
        await asyncio.to_thread(self.servers.kill, "d0")
        found = list(await asyncio.gather(*asked))
        await known
        known_after_s = time.monotonic() - up_s
        self._begun.clear()
        asked = [asyncio.create_task(self._ask(each, at)) for at, each in enumerate(before)]
        await self._under_way(len(before))
        await asyncio.to_thread(self.servers.kill, "d2")
        await self._until(lambda rows: rows["d2"]["health"] == "down")
        alone = list(await asyncio.gather(*(self._ask(each, -1) for each in behind)))
        found += await asyncio.gather(*asked)
        await asyncio.to_thread(self._put_right)
        await self._until(lambda rows: all(_is(rows[name], "right") for name in rows))
        calm = [await self._ask(each, -1) for each in requests]
        pairs = list(zip([*found, *alone], calm, strict=True))
        equal = [one.ids == other.ids and one.is_whole for one, other in pairs]
        assert all(each.is_whole and not each.is_marked for each in calm), calm
        explicit = [
            bool(one.error) and one.ids == other.ids[: len(one.ids)] for one, other in pairs
        ]
        return {
            "round": number,
            "streams": len(pairs),
            "d0_killed_before_d1_was_known": not was_known,
            "equal": sum(equal),
            "explicit errors": sum(explicit),
            "marked": sum(one.is_marked for one, _ in pairs),
            "wrong": sum(
                not (a or b or one.is_marked)
                for a, b, (one, _) in zip(equal, explicit, pairs, strict=True)
            ),
            "alone": len(alone),
            "alone, marked": sum(one.is_marked for one in alone),
            "errors": sorted({one.error for one, _ in pairs if one.error}),
            "known_after_s": round(known_after_s, 2),
        }

    def _replace(self, seed: int) -> None:
        """Replace the model's directory; servers that run have loaded the former one."""
        former = self._model.rename(self._model.with_name("former"))
        write_tiny_model(self._model, seed)
        shutil.rmtree(former)

    def _put_right(self) -> None:
        self.servers.kill("d1")
        self._replace(MODEL_SEED)
        names = ("d0", "d1", "d2")
        self.servers.start(*names)
        self.servers.wait_ready(*names)

    async def _until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        async with asyncio.timeout(_UP_TIMEOUT_S):
            while True:
                state = await asyncio.to_thread(self._admin.read, "state", "instances")
                if holds({row["id"]: row for row in state["instances"]}):
                    return
                await asyncio.sleep(_LOOK_S)

    async def _under_way(self, count: int) -> None:
        async with asyncio.timeout(120):
            while sum(self._begun.get(at, 0) >= UNDER_WAY_TOKENS for at in range(count)) < count:
                await asyncio.sleep(_LOOK_S)

    def _request(self) -> dict[str, Any]:
        prompt = " ".join(self.rng.choices(SYLLABLES, k=12))
        fixed = {"temperature": 0, "stream": True, "return_token_ids": True, "ignore_eos": True}
        return {"prompt": prompt, "max_tokens": MAX_TOKENS} | fixed

    async def _ask(self, request: dict[str, Any], at: int) -> Got:
        self._begun[at] = 0
        got = Got()
        async with self._http.post(self._url, json=request) as answer:
            got.is_marked = "X-Kvrs-Exact" in answer.headers
            async for line in answer.content:
                got.is_whole |= line.startswith(b"data: [DONE]")
                if not line.startswith((b"data: {", b'{"error"')):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    got.error = str(event["error"].get("code"))
                for choice in event.get("choices", ()):
                    got.ids += choice.get("token_ids") or ()
                self._begun[at] = len(got.ids)
        self._begun[at] = MAX_TOKENS  # Whatever came of it, it is not waited for.
        return got


def _is(row: dict[str, Any], weights: str) -> bool:
    test = row["self_test"]
    return row["health"] == "up" and bool(test) and test["weights"] == weights


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # Counts have the bars; its seconds are said to be those of a machine that loads models.
    record, console = Record(options.seed, timed=False), Console(record=True, width=200)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = vllm_config(directory, ALONE, policy={"recovery": {"wait_s": WAIT_S}})
        servers = VllmServers(config, os.environ[PYTHON_ENV])
        stack.enter_context(servers).start_all()
        servers.start_proxy(servers.config)
        rounds = Rounds(servers, random.Random(options.seed), console)
        asyncio.run(rounds.run(options.rounds))
        servers.stop_proxy()
    console.print(table_of(rounds.rows))
    wrong = sum(row["wrong"] for row in rounds.rows)
    unmarked = sum(row["alone"] - row["alone, marked"] for row in rounds.rows)
    faults = [
        text
        for count, text in (
            (wrong, f"{wrong} streams are neither equal, marked nor ended by an error"),
            (unmarked, f"{unmarked} new streams at a server that is known are not marked"),
        )
        if count
    ]
    console.print("\n".join(faults) or "PASSED", markup=False)
    record.keep(options.out, "vllm", {"rounds": rounds.rows}, console.export_text())
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
