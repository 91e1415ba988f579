"""Nodes in a ring, each of whose agents copies the rows of the node before it: of the streams of
servers and nodes that die, the share of the rows that is loaded where they go on.

    python -m experiments.vllm_rows.ring [--moves N] [--nodes 3 5 8]
    python -m experiments.vllm_rows.ring --real [--kills N] [--limit-s S]

Real agents and a real proxy, with scripted servers whose tier is the product's
(`kvrs_testkit/tiered_vllm.py`), or with `--real` before three servers of real vLLM, which needs
KVRS_VLLM_PYTHON. The proxy restores whatever costs less, because so short histories are soon
computed, too. A row is late if its last token is one of the last three of a stream before the
death: it may not be in the dead server's memory, and is not counted.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from experiments.command_line import parser_of
from experiments.deaths import differences
from experiments.record import Record
from kvrs.config.file import Config
from kvrs.config.policy import PolicyName
from kvrs.net.admin import AdminClient
from kvrs_testkit.engine_servers import EngineServers
from kvrs_testkit.processes import ForkedProcesses
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_vllm import PAGE
from kvrs_testkit.vllm_rows import TierServers, row_config
from kvrs_testkit.vllm_servers import PAGE_TOKENS

BAR = 0.95  # Of full rows that are not late: the share that is loaded, in each ring.
LATE_STEPS = 3
STREAMS_PER_SERVER = 2
PROMPT_TOKENS, TOKENS, TOKENS_OF_VLLM = (100, 500), 90, 400
# What dies in a round, in turns: a server, two neighbours along the ring, a server with its agent.
KINDS = ("server", "server", "two", "node")
COUNTED_WITHIN_S = 30.0
UP_WITHIN_S = 600.0
# Of kvrs in vLLM: agents and threads that are late on a busy machine are waited for.
PATIENT = {"lookup_s": 5.0, "load_s": 20.0}
_LOOK_S = 0.1
_COLUMNS = (
    *("kills", "moves", "restores", "not_loaded", "due_rows", "loaded_rows"),
    *("lost", "repeated", "different"),
)


class TieredVllms(EngineServers, ForkedProcesses):
    """The instances of a configuration as scripted servers with a tier, and its agents."""

    pace_s = 0.05

    def start(self, *names: str) -> None:
        for name in names:
            if name not in self._instances:
                super().start(name)  # An agent.
                continue
            if (former := self._running.get(name)) is not None:
                former.wait()
            arguments = str(self._config_path), name, str(self.pace_s)
            self._spawn(name, "kvrs_testkit.tiered_vllm", *arguments)


class Ring:
    """The servers, agents and proxy of one ring."""

    def __init__(self, servers: EngineServers, row_tokens: int, seed: int) -> None:
        self._servers, self._row_tokens = servers, row_tokens
        self._draw = random.Random(f"{seed} {len(servers.names)}")
        self._admin = AdminClient.of(servers.config, os.environ)
        self._seen: set[tuple[str, int]] = set()
        self._victim = 0
        self.is_real = isinstance(servers, TierServers)
        self.counts: Counter[str] = Counter(dict.fromkeys(_COLUMNS, 0))
        self.moves: list[dict[str, Any]] = []

    async def round(self, kind: str) -> None:
        """Cut streams by a death of this kind, and add what was loaded for them to `counts`."""
        names = self._servers.names
        await self._until_up()
        first, self._victim = self._victim, (self._victim + 1) % len(names)
        dying = [names[first], names[(first + 1) % len(names)]][: 1 + (kind == "two")]
        most = TOKENS_OF_VLLM if self.is_real else TOKENS
        got: list[list[int]] = [[] for _ in range(STREAMS_PER_SERVER * len(names))]
        prompts = [self._prompt() for _ in got]
        due = asyncio.Event()
        dies_at = self._draw.randrange(most // 5, most * 3 // 5) * len(got)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
            asked = [
                asyncio.create_task(self._stream(http, prompt, most, ids, got, dies_at, due))
                for prompt, ids in zip(prompts, got, strict=True)
            ]
            await due.wait()
            ended = [*dying]
            if kind == "node":
                ended.insert(0, self._agent_of(names[first]))
            for name in ended:
                self._servers.kill(name)
            await asyncio.gather(*asked)
            for name in ended:
                self._servers.start(name)
            calm = await self._calm(http, prompts, most)
        self.counts.update(differences(zip(got, calm, strict=True)))
        self.counts["kills"] += len(dying)
        await self._count(kind)

    def _prompt(self) -> list[int]:
        return self._draw.choices(range(5, 200), k=self._draw.randrange(*PROMPT_TOKENS))

    def _agent_of(self, name: str) -> str:
        nodes = self._servers.config.cluster.instances()
        return str(next(node.agent_id for node, each in nodes if each.id == name))

    async def _stream(
        self,
        http: aiohttp.ClientSession,
        prompt: list[int],
        most: int,
        ids: list[int],
        all_ids: Sequence[Sequence[int]],
        dies_at: int,
        due: asyncio.Event,
    ) -> None:
        async with http.post(self._url(), json=self._body(prompt, most) | {"stream": True}) as sent:
            async for line in sent.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        ids += choice["token_ids"]
                    if sum(map(len, all_ids)) >= dies_at:
                        due.set()

    def _url(self) -> str:
        proxy = self._servers.config.proxy
        return f"http://{proxy.host}:{proxy.port}/v1/completions"

    def _body(self, prompt: list[int], most: int) -> dict[str, Any]:
        ending = {"ignore_eos": True} if self.is_real else {}
        fixed = {"temperature": 0, "return_token_ids": True, "model": self._servers.model}
        return {"prompt": prompt, "max_tokens": most} | fixed | ending

    async def _calm(
        self, http: aiohttp.ClientSession, prompts: Sequence[list[int]], most: int
    ) -> list[list[int]]:
        """The same streams without a death; at real servers under another salt."""
        if not self.is_real:
            return [expected_ids(prompt, most) for prompt in prompts]

        async def ask(prompt: list[int]) -> list[int]:
            body = self._body(prompt, most) | {"cache_salt": "calm", "stream": True}
            ids: list[int] = []
            async with http.post(self._url(), json=body) as sent:
                async for line in sent.content:
                    if line.startswith(b"data: {"):
                        for choice in json.loads(line[6:]).get("choices", ()):
                            ids += choice["token_ids"]
            return ids

        return [*await asyncio.gather(*map(ask, prompts))]

    async def _count(self, kind: str) -> None:
        """Add the recoveries since the last look, once their targets have counted them."""
        give_up_s = time.monotonic() + COUNTED_WITHIN_S
        while True:
            rows = await self._state("recoveries")
            new = [row for row in rows if (row["stream"], row["attempt"]) not in self._seen]
            resumed = [row for row in new if row["outcome"] == "resumed"]
            uncounted = [row for row in resumed if row["source"] and row["loaded_tokens"] is None]
            if not uncounted or time.monotonic() > give_up_s:
                break
            await asyncio.sleep(_LOOK_S)
        self._seen |= {(row["stream"], row["attempt"]) for row in new}
        for row in resumed:
            loaded = row["loaded_tokens"] or 0
            history = loaded + (row["computed_tokens"] or 0)
            is_restore = row["source"] is not None
            due = max(0, history - 1 - LATE_STEPS) // self._row_tokens if is_restore else 0
            self.moves.append(
                {"kind": kind, "due_rows": due, "loaded_tokens": loaded, "history_tokens": history}
                | {key: row[key] for key in ("from", "to", "source", "option")}
            )
            self.counts["moves"] += 1
            self.counts["restores"] += row["option"] == "restore"
            self.counts["not_loaded"] += is_restore and row["option"] != "restore"
            self.counts["due_rows"] += due
            self.counts["loaded_rows"] += min(due, loaded // self._row_tokens)

    async def _until_up(self) -> None:
        """Wait until every server is up, and its rows are served."""
        give_up_s = time.monotonic() + UP_WITHIN_S
        wanted = {*self._servers.names}
        while time.monotonic() < give_up_s:
            up = {row["id"] for row in await self._state("instances") if row["health"] == "up"}
            agents = await self._state("agents")
            regions = [each for row in agents for each in row["regions"]]
            served = {each["engine"] for each in regions if each["is_alive"]}
            if wanted <= up and wanted == served:
                return
            await asyncio.sleep(_LOOK_S)
        raise TimeoutError(f"not up within {UP_WITHIN_S:.0f} s: {wanted - up}, {wanted - served}")

    async def _state(self, key: str) -> list[dict[str, Any]]:
        state = await asyncio.to_thread(self._admin.read, "state", key)
        return list(state[key])


def configured(directory: Path, nodes: int) -> Config:
    """Return the configuration of a ring. Servers are not tested: only loads count here."""
    names = {f"n{number}": [f"d{number}"] for number in range(nodes)}
    config = row_config(directory, names)
    proxy = {"self_test": False, "load_interval_s": 0.1}
    policy = {"name": PolicyName.ALWAYS_RESTORE}
    return config.model_copy(
        update={
            "proxy": config.proxy.model_copy(update=proxy),
            "policy": config.policy.model_copy(update=policy),
        }
    )


async def measured(ring: Ring, moves: int, kills: int, limit_s: float) -> None:
    give_up_s, number = time.monotonic() + limit_s, 0
    while ring.counts["moves"] < moves and ring.counts["kills"] < kills:
        if time.monotonic() > give_up_s:
            return
        await ring.round(KINDS[number % len(KINDS)])
        number += 1
        print(f"{ring.counts['moves']} moves, {ring.counts['kills']} kills", flush=True)


def run(options: argparse.Namespace, nodes: int) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        config = configured(Path(directory), nodes)
        servers: EngineServers = (
            TierServers(config) if options.real else TieredVllms(config, sys.executable)
        )
        with servers:
            if isinstance(servers, TierServers):
                servers.options |= {"requests": "all", **PATIENT}
            agents = [str(node.agent_id) for node in config.cluster.nodes]
            servers.start(*agents, *servers.names)
            servers.wait_ready(*agents, *servers.names)
            servers.start_proxy()
            ring = Ring(servers, PAGE_TOKENS if options.real else PAGE, options.seed)
            asyncio.run(measured(ring, options.moves, options.kills, options.limit_s))
    counts = dict(ring.counts)
    return {"nodes": nodes, **counts, "share": share_of(counts), "each": ring.moves}


def share_of(counts: Mapping[str, int]) -> float:
    return counts["loaded_rows"] / max(1, counts["due_rows"])


def as_text(rings: Sequence[Mapping[str, Any]], misses: Sequence[str]) -> str:
    width = max(map(len, _COLUMNS)) + 2
    head = "nodes" + "".join(f"{name:>{width}}" for name in (*_COLUMNS, "share"))
    lines = [
        f"{ring['nodes']:>5}"
        + "".join(f"{ring[name]:>{width},}" for name in _COLUMNS)
        + f"{ring['share']:>{width}.1%}"
        for ring in rings
    ]
    return "\n".join([head, *lines, "", *(f"MISSED: {each}" for each in misses)]) + "\n"


def missed(rings: Sequence[Mapping[str, Any]], moves: int, kills: int) -> list[str]:
    found = []
    for ring in rings:
        name = f"{ring['nodes']} nodes"
        found += [
            f"{name}: {ring[what]} {what}; bar 0"
            for what in ("lost", "repeated", "different")
            if ring[what]
        ]
        if ring["share"] < BAR:
            found.append(f"{name}: {ring['share']:.1%} of the rows were loaded; bar {BAR:.0%}")
        if ring["moves"] < moves and ring["kills"] < kills:
            found.append(f"{name}: {ring['moves']} moves by {ring['kills']} kills in the time")
    return found


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--moves", type=int, default=60)
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--limit-s", type=float, default=600.0, help="no round begins later")
    parser.add_argument("--real", action="store_true", help="three servers of real vLLM")
    options = parser.parse_args()
    if options.real:
        options.nodes, options.moves, options.kills = [3], 10_000, min(options.kills, 10)
    record = Record(options.seed, timed=False)
    rings = [run(options, nodes) for nodes in options.nodes]
    misses = missed(rings, options.moves, options.kills)
    text = as_text(rings, misses)
    print(text)
    name = "ring_of_vllm" if options.real else "ring"
    record.keep(options.out, name, {"rings": rings}, text)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
