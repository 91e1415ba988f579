"""Two proxies, one target, 200 victims at once: how many recovery transfers hold a slot at the
target's agent at a time.

    python -m experiments.two_proxies.run [--streams 200] [--tokens 200] [--gbit 0.16]

Each proxy has half of the streams, all on one decode instance, for the other one is stopped
(SIGSTOP) until they run. Then that one comes up, the first is killed, and all must go to the one
target. The expected answer of every stream is that of an earlier run without a kill.
"""

import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from typing import Any

import aiohttp
import msgspec
import uvloop

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import draw, session_for
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import AgentReport, SlotCounts
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_testkit.processes import Processes, cpu_ticks, share_used

PROXIES = ("proxy-0", "proxy-1")
PROMPT_TOKENS = 128
PAGE_TOKENS = 16
LOOK_EVERY_S = 0.02
PATIENCE_S = 600.0
VICTIM, TARGET = InstanceId("d0"), InstanceId("d1")


def settings(streams: int, tokens: int, gbit_per_s: float) -> Config:
    pages = streams * ((PROMPT_TOKENS + tokens) // PAGE_TOKENS + 1) + 64
    engine = {
        "pages": pages,
        "max_running": streams,
        "max_batch_tokens": 2 * streams,
        "max_model_len": PROMPT_TOKENS + tokens,
    }
    nodes = [
        {
            "id": "n0",
            "instances": [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode"}],
        },
        {"id": "n1", "instances": [{"id": "d1", "role": "decode"}]},
    ]
    return parse_config(
        {
            # A stream that starts among 200 others waits for its first token.
            "proxy": {"port": 0, "admin_port": 0, "token_gap_s": 60.0},
            "cluster": {"engine": engine, "nodes": nodes},
            # All by fetching, with a long `wait_s`: the worst case for the slots.
            "policy": {
                "name": "always_migrate",
                "recovery": {"wait_s": 300.0},
                "slot_lease_s": 120.0,
            },
            "slo": {"recovery_gap_s": 600.0},
            "transfer": {"link_bytes_per_s": gbit_per_s / 8 * 1e9},
            # Agents run; there is no room for checkpoints, which are not what this is about.
            "backup": {"mode": "remote", "capacity_bytes": 1 << 16},
        }
    )


def proxy_config(config: Config) -> Config:
    """The same cluster, seen from a proxy with ports of its own."""
    own = resolve_ports(parse_config({"proxy": {"port": 0, "admin_port": 0}})).proxy
    document = config.model_dump(mode="json")
    document["proxy"] |= {"port": own.port, "admin_port": own.admin_port}
    return parse_config(document)


class Clients:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        proxies: list[Config],
        prompts: list[list[int]],
        tokens: int,
    ) -> None:
        self._session = session
        self._proxies = proxies
        self._prompts = prompts
        self._tokens = tokens

    def ask_all(self) -> "list[asyncio.Task[tuple[int, ...] | str]]":
        return [asyncio.create_task(self._ask(number)) for number in range(len(self._prompts))]

    async def _ask(self, number: int) -> tuple[int, ...] | str:
        """The ids of the answer, or what went wrong."""
        config = self._proxies[number % len(self._proxies)].proxy
        body = {
            "prompt": self._prompts[number],
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        url = f"http://{config.host}:{config.port}/v1/completions"
        async with self._session.post(url, json=body | {"return_token_ids": True}) as answer:
            said = await answer.json()
        return (
            tuple(said["choices"][0]["token_ids"])
            if answer.status == 200
            else f"HTTP {answer.status}: {said}"
        )

    async def states(self) -> list[Any]:
        found = []
        for config in self._proxies:
            async with self._session.get(
                f"http://{config.proxy.admin_host}:{config.proxy.admin_port}/kvrs/v1/state"
            ) as answer:
                found.append(await answer.json())
        return found


async def until_all_decode(clients: Clients, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            rows = [row for state in await clients.states() for row in state["streams"]]
            if sum(row["decode"] == VICTIM and row["output_tokens"] >= 1 for row in rows) == count:
                return
            await asyncio.sleep(0.1)


async def until_up(clients: Clients, name: str) -> None:
    """Up, and tested: before that no KV is fetched there."""
    async with asyncio.timeout(PATIENCE_S):
        while not all(
            row["health"] == "up" and (row["self_test"] is None or row["self_test"]["done"])
            for s in await clients.states()
            for row in s["instances"]
            if row["id"] == name
        ):
            await asyncio.sleep(0.1)


class AgentWatch:
    """Looks at the target's agent all the time."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.held: list[int] = []
        self.last = SlotCounts(0, 0, 0, 0, 0, 0)

    async def run(self) -> None:
        while True:
            async with self._session.get(f"{self._url}/kvrs/v1/holdings") as answer:
                report = msgspec.json.decode(await answer.read(), type=AgentReport)
            self.last = report.slots.get(TARGET, self.last)
            self.held.append(self.last.held)
            await asyncio.sleep(LOOK_EVERY_S)


async def measure(
    processes: Processes, proxies: list[Config], prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    agent = next(node.agent for node in processes.config.cluster.nodes if node.id == "n1")
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        session_for(processes) as inner,
    ):
        clients, watch = Clients(session, proxies, prompts, tokens), AgentWatch(inner, agent.url)
        quiet = await asyncio.gather(*clients.ask_all())
        asked = clients.ask_all()
        await until_all_decode(clients, len(prompts))
        os.kill(processes.pid(TARGET), signal.SIGCONT)
        await until_up(clients, TARGET)
        open_ = [
            sum(row["decode"] == VICTIM for row in state["streams"])
            for state in await clients.states()
        ]
        watching = asyncio.create_task(watch.run())
        killed_s = time.monotonic()
        processes.kill(VICTIM)
        answers = await asyncio.gather(*asked)
        took_s = time.monotonic() - killed_s
        await asyncio.sleep(10 * LOOK_EVERY_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        states = await clients.states()
    return {
        "victims": open_,
        "served": sum(not isinstance(answer, str) for answer in answers),
        "exact": sum(answer == wanted for answer, wanted in zip(answers, quiet, strict=True)),
        "errors": [answer for answer in answers if isinstance(answer, str)][:5],
        "most_held_seen": max(watch.held),
        "looks": len(watch.held),
        "agent": msgspec.to_builtins(watch.last),
        "proxies": [figures(state["recoveries"]) for state in states],
        "all_answered_s": round(took_s, 2),
    }


def figures(recoveries: list[Any]) -> dict[str, Any]:
    gaps_s = sorted(row["gap_s"] for row in recoveries if row["gap_s"] is not None)
    return {
        "outcomes": dict(Counter(row["outcome"] for row in recoveries)),
        "options": dict(
            Counter(row["option"] for row in recoveries if row["outcome"] == "resumed")
        ),
        "gap_s": {"median": round(statistics.median(gaps_s), 3), "longest": round(gaps_s[-1], 3)}
        if gaps_s
        else None,
    }


def as_text(result: dict[str, Any]) -> str:
    agent = result["agent"]
    lines = [
        f"{sum(result['victims'])} victims at once "
        f"({' + '.join(map(str, result['victims']))}), one target, "
        f"at most {result['slots_max']} slots; CPU in use "
        f"{result['cpu_share']:.0%}",
        f"slots held at the agent at a time, at most: {agent['most']} by its own count, "
        f"{result['most_held_seen']} seen in "
        f"{result['looks']} looks",
        f"granted {agent['granted']}, denied {agent['denied']}, expired "
        f"{agent['expired']}, left {agent['held']}",
        f"served {result['served']} of {result['streams']}, equal to the quiet run "
        f"{result['exact']}",
    ]
    for name, found in zip(PROXIES, result["proxies"], strict=True):
        lines.append(
            f"{name}: {found['outcomes']}, resumed by {found['options']}, gap {found['gap_s']}"
        )
    return "\n".join([*lines, *result["errors"]]) + "\n"


def main() -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200, help="of every answer")
    parser.add_argument(
        "--gbit", type=float, default=0.16, help="rate of the link to the target, in Gbit/s"
    )
    arguments = parser.parse_args()
    record, rng = Record(arguments.seed), random.Random(arguments.seed)
    prompts = [draw(rng, PROMPT_TOKENS) for _ in range(arguments.streams)]
    with Processes(settings(arguments.streams, arguments.tokens, arguments.gbit)) as processes:
        names = ("p0", VICTIM, TARGET, "agent-n0", "agent-n1")
        processes.start(*names)
        processes.wait_ready(*names)
        os.kill(processes.pid(TARGET), signal.SIGSTOP)
        proxies = [proxy_config(processes.config) for _ in PROXIES]
        for name, config in zip(PROXIES, proxies, strict=True):
            processes.start_proxy(config, name)
        before = cpu_ticks()
        measured = uvloop.run(measure(processes, proxies, prompts, arguments.tokens))
        cpu = share_used(before, cpu_ticks())
        slots_max = processes.config.policy.slots_max
    result = {
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "gbit_per_s": arguments.gbit,
        "slots_max": slots_max,
        **measured,
        "cpu_share": round(cpu, 3),
    }
    print(as_text(result), end="")
    record.keep(arguments.out, "two_proxies", result, as_text(result))
    most = max(result["agent"]["most"], result["most_held_seen"])
    within = most <= slots_max and result["agent"]["held"] == 0
    return 0 if within and result["exact"] == sum(result["victims"]) == arguments.streams else 1


if __name__ == "__main__":
    sys.exit(main())
