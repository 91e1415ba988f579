"""A decode server of real SGLang dies in mid-stream behind a proxy, and a prefill server that has
nothing of the stream loads its KV out of the dead server's own memory.

    python -m experiments.sglang_restore.run [--limit-s S] [--rounds N] [--ranks N]

A run adds rounds to those that the same code has measured before. Needs KVRS_SGLANG_PYTHON; each
rank of a server takes a core.
"""

import asyncio
import os
import random
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import Config
from kvrs.net.admin import AdminClient
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.open_loop import Dialect, replay
from kvrs_lab.traces.records import ReplayRequest
from kvrs_testkit.sglang_servers import PAGE_TOKENS, PYTHON_ENV, SglangServers, sglang_config

NAME = "sglang_restore"
# Each server on a node of its own: pages of the dead one come from another node's agent.
NODES = {"n0": ("p0",), "n1": ("d0",), "n2": ("d1",)}
PROMPT_TOKENS, OUTPUT_TOKENS, CUT_AT = 100, 1500, 400
LEAST_LOADED = 0.95
STREAM_TIMEOUT_S = 240.0
PAGE_BYTES = 32768  # Of the tiny model, in float32.
_LOOK_AGAIN_S = 0.02
_VOCABULARY = range(20, 200)


def restoring_config(directory: Path) -> Config:
    return sglang_config(directory, NODES, backup={"mode": "local"})


class Rounds:
    """One prefill and two decode servers behind a proxy, of which a decode server dies in each
    round.
    """

    def __init__(self, servers: SglangServers, seed: int, ranks: int = 1) -> None:
        """`ranks`: of each server (tensor parallelism)."""
        self._servers, self._seed, self._ranks = servers, seed, ranks
        config = servers.config
        self._url = f"http://{config.proxy.host}:{config.proxy.port}"
        self._admin_url = f"http://{config.proxy.admin_host}:{config.proxy.admin_port}"
        self._row_ports = {node.agent.row_port for node in config.cluster.nodes}

    def start(self) -> None:
        """Start agents, servers and the proxy."""
        servers = self._servers
        agents = [str(node.agent_id) for node in servers.config.cluster.nodes]
        for name in servers.names:
            servers.keep_pages(name)
        servers.start(*agents, *servers.names)
        servers.wait_ready(*agents, *servers.names)
        servers.start_proxy()

    def measure(self, name: str) -> dict[str, Any]:
        return asyncio.run(self._measure(name))

    async def _measure(self, name: str) -> dict[str, Any]:
        draw = random.Random(f"{self._seed} {name}")
        prompt = tuple(draw.choices(_VOCABULARY, k=PROMPT_TOKENS))
        requests = [ReplayRequest(0.0, prompt, OUTPUT_TOKENS)]
        servers = self._servers
        async with AdminPort(AdminClient(self._admin_url)) as port:
            await self._until_all_hold(port)
            before, at_start = len((await port.state())["recoveries"]), self._sent_bytes()
            load = asyncio.create_task(replay(self._url, requests, timeout_s=STREAM_TIMEOUT_S))
            while not (found := (await port.state())["streams"]) or (
                found[0]["output_tokens"] < CUT_AT
            ):
                if load.done():
                    raise RuntimeError(f"the stream ended: {load.result()}")
                await asyncio.sleep(_LOOK_AGAIN_S)
            (stream,) = found
            at_death, said = self._sent_bytes(), len(servers.said(stream["prefill"]))
            _flush(servers.url(stream["prefill"]))
            servers.kill(stream["decode"])
            (record,) = await load
            at_end = self._sent_bytes()
            recoveries = (await port.state())["recoveries"][before:]
        # What it says of the calm run is not of the recovery.
        log = servers.said(stream["prefill"])[said:]
        servers.start(stream["decode"])
        dialect = Dialect(cache_salt=f"calm {name}")
        (calm,) = await replay(self._url, requests, dialect=dialect, timeout_s=STREAM_TIMEOUT_S)
        await asyncio.to_thread(servers.wait_ready, stream["decode"])
        return {
            "victim": stream["decode"],
            "cut_at": [row["produced_tokens"] for row in recoveries],
            "recoveries": [(row["option"], row["from"], row["to"]) for row in recoveries],
            "completed": record.completed and calm.completed,
            "tokens": len(record.token_ids),
            "identical": record.token_ids == calm.token_ids,
            "sent_before_bytes": at_death - at_start,
            "sent_afterwards_bytes": at_end - at_death,
            **loaded(log, self._ranks),
        }

    async def _until_all_hold(self, port: AdminPort) -> None:
        """Return when all servers are up and their agents hold their memory."""
        names = {*self._servers.names}
        while True:
            state = await port.state()
            up = {row["id"] for row in state["instances"] if row["health"] == "up"}
            regions = [each for row in state["agents"] for each in row["regions"]]
            held = {each["engine"] for each in regions if each["is_alive"]}
            if names <= up & held and not state["streams"]:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _sent_bytes(self) -> int:
        """How much agents have sent on connections to their row ports, over which alone pages leave
        a node.
        """
        shown = subprocess.run(
            ["ss", "-tniH", "state", "established"], check=True, capture_output=True, text=True
        )
        found = re.findall(r":(\d+)\s+\S+\s*\n\s.*?bytes_sent:(\d+)", shown.stdout)
        return sum(int(sent) for port, sent in found if int(port) in self._row_ports)


def _flush(url: str) -> None:
    """Let a server forget all that it has computed; its region keeps its pages."""
    request = urllib.request.Request(f"{url}/flush_cache", method="POST")  # noqa: S310
    with urllib.request.urlopen(request, timeout=STREAM_TIMEOUT_S):  # noqa: S310
        pass


def loaded(log: str, ranks: int) -> dict[str, int]:
    """Tokens that a prefill server has loaded, by the counts of its ranks, each of which has a part
    of each page.
    """
    lines = re.findall(r"kvrs loaded (\d+) of \d+ pages, (\d+) of them from agents", log)
    pages, from_agents = (sum(int(line[at]) for line in lines) // ranks for at in (0, 1))
    return {
        "loaded_tokens": pages * PAGE_TOKENS,
        "from_agents_tokens": from_agents * PAGE_TOKENS,
        "from_agents_bytes": from_agents * PAGE_BYTES,
    }


def faults_of(cell: dict[str, Any]) -> list[str]:
    """The bars that a round misses."""
    output = sum(cell["cut_at"])
    least = LEAST_LOADED * (PROMPT_TOKENS + output)
    found = {
        "it has not completed": not cell["completed"] or cell["tokens"] != OUTPUT_TOKENS,
        "it differs": not cell["identical"],
        "it was not recovered once": len(cell["recoveries"]) != 1,
        "it was cut too early": output < CUT_AT,
        "too little was loaded": cell["loaded_tokens"] < least,
        # The prompt's are its own.
        "the dead server gave too little": cell["from_agents_tokens"] < least - PROMPT_TOKENS,
        "something was sent before": cell["sent_before_bytes"] != 0,
        "what is sent is not seen": cell["sent_afterwards_bytes"] < cell["from_agents_bytes"],
    }
    return [fault for fault, is_so in found.items() if is_so]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--limit-s", type=float, default=1800.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args(arguments)
    record = Record(given.seed, timed=False)
    settings = {"seed": given.seed, "cut_at": CUT_AT, "ranks": given.ranks}
    cells = Cells(given.out, NAME, settings)
    with TemporaryDirectory() as directory:
        config = restoring_config(Path(directory))
        flags = () if given.ranks == 1 else ("--tp-size", str(given.ranks))
        with SglangServers(config, os.environ[PYTHON_ENV], *flags) as servers:
            if given.ranks > 1:
                cores = "|".join(map(str, range(given.ranks)))
                servers.environment["SGLANG_CPU_OMP_THREADS_BIND"] = cores
            rounds = Rounds(servers, given.seed, given.ranks)
            rounds.start()
            names = [f"decode {number}" for number in range(given.rounds)]
            cells.measure(names, given.limit_s, rounds.measure)
    faults = {name: found for name, cell in cells.found.items() if (found := faults_of(cell))}
    lines = [
        f"{name}: {cell['loaded_tokens']} of {PROMPT_TOKENS + sum(cell['cut_at'])} tokens loaded, "
        f"{cell['from_agents_tokens']} of them from agents; {cell['sent_before_bytes']} bytes sent "
        f"before the death, {cell['sent_afterwards_bytes']} afterwards; "
        f"{'identical' if cell['identical'] else 'different'}"
        for name, cell in cells.found.items()
    ]
    lines += [f"{name}: {', '.join(found)}" for name, found in faults.items()]
    is_void = cells.keep(record, {"faults": faults}, "\n".join(lines))
    return int(bool(faults) or is_void)


if __name__ == "__main__":
    sys.exit(main())
