"""Streams beside a watch that fails, and a proxy that is stopped: whether one is cut, and whether
anything is declared dead that lives.

    python -m experiments.signs_of_life.run [--out DIR] [--rounds 5]     # Five minutes.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from experiments.command_line import parser_of
from experiments.field_requests.cluster import (
    Answer,
    Cluster,
    body,
    cluster,
    prompt,
    read,
    text_after,
)
from experiments.field_requests.servers import FieldVllm, Seen
from experiments.record import MARK_ENV, ROOT, Record
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.scripted_vllm import VllmScript

STREAMS, TOKENS, PACE_S = 50, 160, 0.1
NEW, FAILS_FOR_S = 10, 14.0
FORMS: dict[str, int | float | str] = {
    "500": 500,
    "404": 404,
    "12 s late": 12.0,
    "closed": "closes",
}
PLACES = {"one": ("d0",), "all": ("p0", "d0", "d1")}
STOPPED_STREAMS, STOPPED_TOKENS, STOP_S = 20, 140, 8.0
_WITHIN_S = 60.0
_LOOK_S = 0.1
_DEATHS = ("instance lost", "agent lost", "proxy lost", "died")


def whole(number: int, answer: Answer, tokens: int) -> bool:
    return answer.is_whole(text_after(prompt(number), tokens))


async def failing(system: Cluster, form: str, place: str, first: int) -> dict[str, Any]:
    """Streams run, then `/metrics` fail for longer than any silence lasts, and new ones come."""
    running = [asyncio.create_task(system.ask(body(first + n, TOKENS))) for n in range(STREAMS)]
    await asyncio.sleep(1.0)
    before = await system.count("kvrs_worker_deaths_total")
    for name in PLACES[place]:
        system.servers[name].fails = {"/metrics": FORMS[form]}
    await asyncio.sleep(FAILS_FOR_S / 2)
    shown = [row["id"] for row in (await system.state())["instances"] if row["failing"]]
    new = await asyncio.gather(*(system.ask(body(first + STREAMS + n, 5)) for n in range(NEW)))
    await asyncio.sleep(FAILS_FOR_S / 2)
    ended = await asyncio.gather(*running)
    for server in system.servers.values():
        server.fails = {}
    deaths = await system.count("kvrs_worker_deaths_total") - before
    await system.until_health(**dict.fromkeys(system.servers, "up"))
    decodes = [sum(name[0] == "d" for name in system.seen.calls[first + n]) for n in range(STREAMS)]
    return {
        "whole": sum(whole(first + n, each, TOKENS) for n, each in enumerate(ended)),
        "cut": sum(each > 1 for each in decodes),
        "new": sum(whole(first + STREAMS + n, each, 5) for n, each in enumerate(new)),
        "deaths": deaths,
        "shown": sorted(shown),
    }


class Pair:
    """Two processes of `kvrs proxy` that are peers, before scripted servers of this process."""

    def __init__(self, http: aiohttp.ClientSession, folder: Path) -> None:
        self.http = http
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ports, self.admins, self.logs = list[int](), list[int](), list[Path]()
        self._folder = folder

    def start(self, servers: dict[str, FieldVllm]) -> None:
        ports = free_ports(8)
        for n in range(2):
            port, admin, peer, gossip = ports[4 * n : 4 * n + 4]
            other = {"id": f"proxy-{1 - n}", "peer_port": ports[4 * (1 - n) + 2]}
            instances = [
                {"id": name, "role": server.role, "port": server.port}
                for name, server in servers.items()
            ]
            document = {
                "proxy": {
                    "id": f"proxy-{n}",
                    "port": port,
                    "admin_port": admin,
                    "peer_port": peer,
                    "gossip_port": gossip,
                    "peers": [other],
                },
                "cluster": {"backend": "vllm", "nodes": [{"id": "n0", "instances": instances}]},
            }
            path, log = self._folder / f"{n}.yaml", self._folder / f"{n}.log"
            path.write_text(yaml.safe_dump(document))
            environ = {
                key: value
                for key, value in os.environ.items()
                if not key.startswith("KVRS_") or key == MARK_ENV
            }
            environ |= {"PYTHONPATH": str(ROOT), "KVRS_SECRET": "5e" * 32}
            command = [sys.executable, "-m", "kvrs", "proxy", "--config", str(path)]
            with log.open("wb") as out:
                made = subprocess.Popen(
                    command, cwd=self._folder, env=environ, stdout=out, stderr=out
                )
            self.processes.append(made)
            self.ports.append(port)
            self.admins.append(admin)
            self.logs.append(log)

    async def state(self, n: int) -> Any:
        url = f"http://127.0.0.1:{self.admins[n]}/kvrs/v1/state"
        async with self.http.get(url) as response:
            return msgspec.json.decode(await response.read())

    async def until_well(self) -> None:
        """All instances and both proxies are up, as either proxy sees them."""
        until_s = time.monotonic() + _WITHIN_S
        while time.monotonic() < until_s:
            with suppress(aiohttp.ClientError):
                states = [await self.state(n) for n in range(2)]
                rows = [row for state in states for row in state["instances"]]
                peers = [state["proxies"][0]["peers"].values() for state in states]
                tested = all((row["self_test"] or {}).get("done") for row in rows)
                are_up = {row["health"] for row in rows} == {"up"}
                if tested and are_up and all({*each} == {"up"} for each in peers):
                    return
            await asyncio.sleep(_LOOK_S)
        raise TimeoutError(self.logs[0].read_text()[-1000:])

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        seen, script, servers = Seen(), VllmScript(pause_s=PACE_S), dict[str, FieldVllm]()
        for name in PLACES["all"]:
            role = "prefill" if name == "p0" else "decode"
            server = FieldVllm(name, "n0", role=role, script=script, seen=seen)
            server.tokens = 0
            await server.start()
            stack.push_async_callback(server.close)
            servers[name] = server
        http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        await stack.enter_async_context(http)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrs-signs-")))
        made = Pair(http, folder)
        stack.callback(made.end)
        made.start(servers)
        await made.until_well()
        yield made


async def stopped(system: Pair, first: int) -> dict[str, Any]:
    """Stop proxy-0 under its streams, and let it go on; what it declares dead then is false."""
    said = len(system.logs[0].read_text())

    async def ask(number: int) -> Answer:
        url = f"http://127.0.0.1:{system.ports[0]}/v1/completions"
        async with system.http.post(url, json=body(number, STOPPED_TOKENS)) as response:
            return read(response.status, await response.read())

    streams = [asyncio.create_task(ask(first + n)) for n in range(STOPPED_STREAMS)]
    await asyncio.sleep(2.0)
    before = (await system.state(0))["proxies"][0]["starved"]["spells"]
    os.kill(system.processes[0].pid, signal.SIGSTOP)
    await asyncio.sleep(STOP_S)
    os.kill(system.processes[0].pid, signal.SIGCONT)
    ended = await asyncio.gather(*streams)
    await asyncio.sleep(2.0)
    state, lines = await system.state(0), system.logs[0].read_text()[said:].splitlines()
    blamed = [line for line in lines if any(each in line for each in _DEATHS)]
    return {
        "whole": sum(whole(first + n, each, STOPPED_TOKENS) for n, each in enumerate(ended)),
        "declared dead": len(blamed),
        "recoveries": len(state["recoveries"]),
        "starved": state["proxies"][0]["starved"]["spells"] - before,
        "said": blamed[:3],
    }


async def measure(rounds: int) -> dict[str, list[dict[str, Any]]]:
    found = list[dict[str, Any]]()
    async with cluster(pause_s=PACE_S) as system:
        for number, (form, place) in enumerate((f, p) for f in FORMS for p in PLACES):
            row = await failing(system, form, place, 100 * number)
            found.append({"form": form, "at": place, **row})
            print(found[-1], file=sys.stderr, flush=True)
    stops = list[dict[str, Any]]()
    async with pair() as proxies:
        for number in range(rounds):
            await proxies.until_well()
            stops.append(await stopped(proxies, 100 * number))
            print(stops[-1], file=sys.stderr, flush=True)
    return {"metrics": found, "stopped": stops}


def as_text(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [f"/metrics fail for {FAILS_FOR_S:g} s under {STREAMS} streams, {NEW} new ones come"]
    lines.append(f"{'form':<12}{'at':<6}{'whole':>7}{'cut':>6}{'new':>6}{'deaths':>8}")
    for row in found["metrics"]:
        figures = f"{row['whole']:>7}{row['cut']:>6}{row['new']:>6}{row['deaths']:>8}"
        lines.append(f"{row['form']:<12}{row['at']:<6}{figures}")
    lines.append("")
    lines.append(f"a proxy stopped for {STOP_S:g} s under {STOPPED_STREAMS} streams, with a peer")
    lines.append(f"{'round':<8}{'whole':>7}{'declared dead':>15}{'recoveries':>12}{'starved':>9}")
    for number, row in enumerate(found["stopped"]):
        figures = f"{row['declared dead']:>15}{row['recoveries']:>12}{row['starved']:>9}"
        lines.append(f"{number:<8}{row['whole']:>7}{figures}")
    lines.append("")
    lines.append("bars met: no stream cut, all new ones served, nothing declared dead")
    if not is_met(found):
        lines[-1] = "BARS MISSED"
    return "\n".join(lines) + "\n"


def is_met(found: dict[str, list[dict[str, Any]]]) -> bool:
    cut_none = all(
        (row["whole"], row["cut"], row["new"], row["deaths"]) == (STREAMS, 0, NEW, 0)
        for row in found["metrics"]
    )
    return cut_none and all(
        (row["whole"], row["declared dead"], row["recoveries"]) == (STOPPED_STREAMS, 0, 0)
        for row in found["stopped"]
    )


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    # Counts of streams and deaths, which no load of the machine may change.
    record = Record(options.seed, timed=False)
    found = asyncio.run(measure(options.rounds))
    text = as_text(found)
    print(text)
    is_void = record.keep(options.out, "signs_of_life", found, text)
    return 1 if is_void or not is_met(found) else 0


if __name__ == "__main__":
    sys.exit(main())
