"""Streams of a mixture of experts whose ranks are killed while copies of its experts move.

    python -m experiments.experts.kills [--streams 500]

Real: one instance of the embedded engine over HTTP, with 3 ranks and with 4, a tiny Mixtral with a
skewed router, and SIGKILLs of ranks, some with their memory. Every other kill waits until a change
of copies is under way. Each stream is compared with the one that a single process gives. Exit
status 1: a stream is lost, repeated or different, or a kind of kill did not happen.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import parse_config
from kvrs.elastic.ways.base import Way
from kvrs.engine.instance import EngineInstance
from kvrs.engine.random_experts import ExpertsModel, write_experts_model
from kvrs.engine.ranks.group import RankGroup
from kvrs.engine.routes import make_app
from kvrs.ids import InstanceId
from kvrs_testkit.ports import instance_client

NAME = "kills"
DEGREES = (3, 4)
SECRET = b"a secret of the experiment, long enough"
_AT_ONCE, _OUTPUT_TOKENS, _PAUSE_S = 32, 40, 2.0
_LOOK_S, _WAIT_S = 0.001, 5.0


@dataclass(slots=True)
class Row:
    ranks: int
    streams: int
    kills: int = 0
    with_memory: int = 0
    in_rebalances: int = 0  # Kills while copies of experts moved.
    rebalances: int = 0
    copied_bytes: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0

    @property
    def passes(self) -> bool:
        exact = not (self.lost or self.repeated or self.different)
        return exact and self.in_rebalances > 0 and 0 < self.with_memory < self.kills


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--streams", type=int, default=500, help="of each degree")
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_experts_model(model, ExpertsModel.tiny("mixtral", skew=1.0), options.seed)
        rows = asyncio.run(measured(model, options.streams, options.seed))
    record.keep(options.out, NAME, {"rows": [asdict(row) for row in rows]}, as_text(rows))
    return not all(row.passes for row in rows)


async def measured(model: Path, streams: int, seed: int) -> list[Row]:
    async with _Serving(model, 1) as (_, client):
        expected = await _answers(client, streams)
    rows = []
    for ranks in DEGREES:
        row = Row(ranks, streams)
        async with _Serving(model, ranks) as (instance, client):
            killing = asyncio.create_task(_kill_ranks(instance, row, random.Random(seed + ranks)))
            found = await _answers(client, streams)
            killing.cancel()
            report = instance.load().experts
            assert report is not None, "the model has experts"
            row.rebalances, row.copied_bytes = report.rebalances, report.copied_bytes
        for mine, theirs in zip(found, expected, strict=True):
            row.lost += len(mine) < len(theirs)
            row.repeated += len(mine) > len(theirs)
            row.different += len(mine) == len(theirs) and mine != theirs
        rows.append(row)
    return rows


class _Serving:
    """An instance with that many ranks, and a client of it."""

    def __init__(self, model: Path, ranks: int) -> None:
        instance = {"id": "e0", "role": "both", "tp": ranks}
        self._config = parse_config(
            {
                "cluster": {
                    "model": str(model),
                    "engine": {"pages": 2048},
                    "nodes": [{"id": "n0", "instances": [instance]}],
                },
                "elastic": {"experts": {"after_s": 0.2, "half_life_s": 0.3, "room_share": 1.0}},
            }
        )

    async def __aenter__(self) -> tuple[EngineInstance, aiohttp.ClientSession]:
        self._instance = EngineInstance(self._config, InstanceId("e0"), 1, SECRET)
        self._client = instance_client(make_app(self._instance), SECRET)
        client = await self._client.__aenter__()
        await self._instance.start()
        return self._instance, client

    async def __aexit__(self, *_: object) -> None:
        await self._instance.close()
        await self._client.__aexit__(None, None, None)


async def _kill_ranks(instance: EngineInstance, row: Row, choose: random.Random) -> None:
    group = instance.worker
    assert isinstance(group, RankGroup), "all ranks are here"
    while True:
        await asyncio.sleep(_PAUSE_S * choose.random())
        waits = row.kills % 2 == 0
        moving = waits and await _copies_move(group)
        if len(group.pids) < 2:
            continue
        rank = choose.choice(sorted(group.pids))
        if choose.random() < 0.5:
            os.kill(group.pids[rank], signal.SIGKILL)
        else:
            instance.lose_device(rank)
            row.with_memory += 1
        row.kills += 1
        row.in_rebalances += moving


async def _copies_move(group: RankGroup) -> bool:
    for _ in range(int(_WAIT_S / _LOOK_S)):
        now = group.reforming
        if now is not None and now.way is Way.RESIZE and now.after.ranks == group.layout.ranks:
            return True
        await asyncio.sleep(_LOOK_S)
    return False


async def _answers(client: aiohttp.ClientSession, streams: int) -> list[list[int]]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(seed: int) -> list[int]:
        async with places:
            return await _answer(client, seed)

    return await asyncio.gather(*map(one, range(streams)))


async def _answer(client: aiohttp.ClientSession, seed: int) -> list[int]:
    """Every other stream is sampled."""
    choose = random.Random(seed)
    body: dict[str, Any] = {
        "model": "any",
        "prompt": [choose.randrange(2, 500) for _ in range(choose.randint(8, 100))],
        "max_tokens": _OUTPUT_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0.9 * (seed % 2),
        "seed": seed,
        "stream": True,
    }
    token_ids: list[int] = []
    async with client.post("/v1/completions", json=body) as response:
        if response.status != 200:
            print(f"stream {seed}: {await response.text()}", file=sys.stderr)
            return token_ids
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    print(f"stream {seed}: {event}", file=sys.stderr)
                    break
                token_ids += event["choices"][0].get("token_ids") or []
    return token_ids


def as_text(rows: Sequence[Row]) -> str:
    lines = [
        "ranks  streams  kills  with memory  while copies moved  re-balances  lost  rep.  diff."
    ]
    lines += [
        f"{row.ranks:5} {row.streams:8} {row.kills:6} {row.with_memory:12} {row.in_rebalances:19} "
        f"{row.rebalances:12} {row.lost:5} {row.repeated:5} {row.different:6}"
        for row in rows
    ]
    passed = sum(row.passes for row in rows)
    return "\n".join([*lines, "", f"passed: {passed} of {len(rows)}"])


if __name__ == "__main__":
    sys.exit(main())
