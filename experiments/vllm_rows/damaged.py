"""A server's rows are damaged, and it dies: its streams go on with the right tokens.

    python -m experiments.vllm_rows.damaged [--rounds N] [--limit-s S]
    python -m experiments.vllm_rows.damaged --real [--rounds N] [--limit-s S]

Real agents and a real proxy, with scripted servers whose tier is the product's, or with `--real`
before two servers of real vLLM, which needs KVRS_VLLM_PYTHON. Only rows that were complete for
`OLD_S`, and that running streams need, are damaged, with the server stopped, so that their
checksums exist. In every second round half of them are damaged, drawn at random, else all.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from experiments.command_line import parser_of
from experiments.deaths import differences
from experiments.record import Record
from experiments.vllm_rows.ring import (
    PATIENT,
    STREAMS_PER_SERVER,
    Ring,
    TieredVllms,
)
from kvrs.config.backup import BackupMode
from kvrs.config.file import Config
from kvrs.config.policy import PolicyName
from kvrs.transfer.rows.ledger import LedgerView
from kvrs_testkit.engine_servers import EngineServers
from kvrs_testkit.scripted_vllm import PAGE
from kvrs_testkit.vllm_rows import TierServers, row_config
from kvrs_testkit.vllm_servers import PAGE_TOKENS

DAMAGED_BYTES = 256
# Age of the rows that are damaged: many times that of a row whose checksum is made.
OLD_S = 1.5
TOKENS, TOKENS_OF_VLLM = 200, 1500  # Of streams that still run `OLD_S` later.
_COUNTS = ("lost", "repeated", "different", "cut", "rows", "damaged", "refused", "loaded_tokens")
_COLUMNS = ("rounds", *_COUNTS, "wrong_loads")
# Servers by node: rows reach the other server over its agent's socket, or over TCP.
WAYS = {"socket": {"n0": ["d0", "d1"]}, "tcp": {"n0": ["d0"], "n1": ["d1"]}}


class Damage(Ring):
    """Two servers, of which one loses rows and its life in each round."""

    def __init__(self, servers: EngineServers, row_tokens: int, seed: int) -> None:
        super().__init__(servers, row_tokens, seed)
        self.rounds: list[dict[str, Any]] = []

    async def round(self, kind: str) -> None:
        """Damage the old rows of a server, kill it, and add what became of its streams. `kind`:
        `all` rows, or `half`.
        """
        await self._until_up()
        names = self._servers.names
        victim, self._victim = names[self._victim], 1 - self._victim
        most = TOKENS_OF_VLLM if self.is_real else TOKENS
        got: list[list[int]] = [[] for _ in range(STREAMS_PER_SERVER * len(names))]
        prompts = [self._prompt() for _ in got]
        before, moves = await self._refused(), len(self.moves)
        dies_at = self._draw.randrange(most // 5, most // 3) * len(got)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=400)) as http:
            due = asyncio.Event()
            asked = [
                asyncio.create_task(self._stream(http, prompt, most, ids, got, dies_at, due))
                for prompt, ids in zip(prompts, got, strict=True)
            ]
            await due.wait()
            with Rows(self._pids(victim)) as rows:
                old = rows.complete()
                await asyncio.sleep(OLD_S)
                self._servers.signal(victim, signal.SIGSTOP)
                count, damaged = rows.damage(old, 0.5 if kind == "half" else 1.0, self._draw)
                cut = sum(len(ids) < most for ids in got)
                self._servers.kill(victim)
            await asyncio.gather(*asked)
            self._servers.start(victim)
            calm = await self._calm(http, prompts, most)
        await self._count(kind)
        loads = [each["loaded_tokens"] for each in self.moves[moves:] if each["from"] == victim]
        self.rounds.append(
            {"kind": kind, "victim": victim, "cut": cut, "rows": count, "damaged": damaged}
            | {"refused": await self._refused() - before, "loaded_tokens": sum(loads)}
            # Where all are damaged only rows that came after the old ones can be loaded, and a load
            # needs the first of a stream.
            | {"wrong_loads": sum(kind == "all" and each > 0 for each in loads)}
            | dict(differences(zip(got, calm, strict=True)))
        )

    def _pids(self, name: str) -> list[int]:
        servers = self._servers
        more = servers.parts(name) if isinstance(servers, TierServers) else []
        return [servers.pid(name), *more]

    async def _refused(self) -> int:
        return sum(row["refused_rows"] or 0 for row in await self._state("agents"))


class Rows:
    """The memory and the ledger of a server's rows, opened through its processes."""

    def __init__(self, pids: Sequence[int]) -> None:
        found = {
            os.readlink(place): place
            for pid in pids
            for place in Path(f"/proc/{pid}/fd").iterdir()
            if "memfd:" in os.readlink(place) or "vllm_offload_" in os.readlink(place)
        }
        (ledger,) = {place for name, place in found.items() if "memfd:kvrs-rows" in name}
        memory = {
            place
            for name, place in found.items()
            if "memfd:rows" in name or "vllm_offload_" in name
        }
        self._memory = os.open(memory.pop(), os.O_RDWR)
        self._file = os.open(ledger, os.O_RDONLY)
        self._ledger = LedgerView(self._file)

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.release()
        os.close(self._file)
        os.close(self._memory)

    def complete(self) -> dict[int, int]:
        """Return the sequence of each complete row that a running stream needs."""
        entries = ((row, self._ledger.entry(row)) for row in self._ledger.protected())
        return {row: entry[1] for row, entry in entries if entry is not None}

    def damage(self, old: Mapping[int, int], share: float, draw: random.Random) -> tuple[int, int]:
        """Overwrite bytes of these rows, as far as they have not changed. Return the number of
        complete rows, and of damaged ones.
        """
        now = self.complete()
        same = [row for row, sequence in old.items() if now.get(row) == sequence]
        chosen = draw.sample(same, round(len(same) * share))
        size = self._ledger.row_bytes
        for row in chosen:
            at = row * size + draw.randrange(size - DAMAGED_BYTES)
            was = os.pread(self._memory, DAMAGED_BYTES, at)
            os.pwrite(self._memory, bytes(byte ^ draw.randrange(1, 256) for byte in was), at)
        return len(now), len(chosen)


def configured(directory: Path, way: str) -> Config:
    """Two servers with no second copies, which would be loaded instead of the damaged rows."""
    config = row_config(directory, WAYS[way])
    return config.model_copy(
        update={
            "backup": config.backup.model_copy(update={"mode": BackupMode.LOCAL}),
            "proxy": config.proxy.model_copy(update={"self_test": False, "load_interval_s": 0.1}),
            "policy": config.policy.model_copy(update={"name": PolicyName.ALWAYS_RESTORE}),
        }
    )


async def measured(damage: Damage, rounds: int, give_up_s: float) -> None:
    for number in range(rounds):
        if time.monotonic() > give_up_s:
            return
        await damage.round("half" if number % 2 else "all")
        print(damage.rounds[-1], flush=True)


def run(options: argparse.Namespace, way: str, rounds: int, give_up_s: float) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        config = configured(Path(directory), way)
        servers: EngineServers = (
            TierServers(config) if options.real else TieredVllms(config, sys.executable)
        )
        with servers:
            if isinstance(servers, TierServers):
                servers.options |= {"requests": "all", **PATIENT}
            servers.start_all()
            servers.start_proxy()
            damage = Damage(servers, PAGE_TOKENS if options.real else PAGE, options.seed)
            asyncio.run(measured(damage, rounds, give_up_s))
    found = {name: sum(each[name] for each in damage.rounds) for name in _COLUMNS[1:]}
    return {"way": way, "rounds": len(damage.rounds)} | found | {"each": damage.rounds}


def as_text(found: Sequence[Mapping[str, Any]], misses: Sequence[str]) -> str:
    width = max(map(len, _COLUMNS)) + 2
    head = "rows over" + "".join(f"{name:>{width}}" for name in _COLUMNS)
    lines = [
        f"{way['way']:<9}" + "".join(f"{way[name]:>{width},}" for name in _COLUMNS) for way in found
    ]
    return "\n".join([head, *lines, "", *(f"MISSED: {each}" for each in misses)]) + "\n"


def missed(found: Sequence[Mapping[str, Any]], rounds: int) -> list[str]:
    misses = []
    for way in found:
        misses += [
            f"{way['way']}: {way[what]} {what}; bar 0"
            for what in ("lost", "repeated", "different", "wrong_loads")
            if way[what]
        ]
        for number, each in enumerate(way["each"]):
            if not each["damaged"] or each["refused"] != each["damaged"]:
                misses.append(
                    f"{way['way']}: {each['refused']} of {each['damaged']} damaged rows were "
                    f"refused in round {number}; bar all"
                )
    if (done := sum(way["rounds"] for way in found)) < rounds:
        misses.append(f"{done} rounds in the time; bar {rounds}")
    return misses


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--rounds", type=int, help="15, or 5 of real vLLM")
    parser.add_argument("--limit-s", type=float, default=1500.0, help="no round begins later")
    parser.add_argument("--real", action="store_true", help="two servers of real vLLM")
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    rounds = options.rounds or (5 if options.real else 15)
    over_tcp = 0 if options.real else rounds // 2
    shares = {"socket": rounds - over_tcp, "tcp": over_tcp}
    give_up_s = time.monotonic() + options.limit_s
    found = [run(options, way, count, give_up_s) for way, count in shares.items() if count]
    misses = missed(found, rounds)
    text = as_text(found, misses)
    print(text)
    name = "damaged_of_vllm" if options.real else "damaged"
    record.keep(options.out, name, {"ways": found}, text)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
