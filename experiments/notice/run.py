"""Time until the proxy detects a SIGKILLed decode instance, beside a bare socket that waits for the
same end.

    python -m experiments.notice.run [--rounds 8] [--streams 16] [--out DIR]
    python -m experiments.notice.run --spinning 4  # Beside so many processes that want a processor.

Real engines in processes of their own; the proxy runs in this one, so that the time at which its
policy gets the loss can be read. A third process kills and holds the bare socket, a fourth one
sends streams.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import uvloop

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.recovery import RecoveryPolicy
from kvrs.profiles import catalog
from kvrs.proxy.server import Proxy
from kvrs_lab.load.open_loop import replay
from kvrs_lab.report.metrics import percentile
from kvrs_lab.traces.records import ReplayRequest
from kvrs_testkit.processes import Processes, cpu_ticks, share_used, spinning

LIMIT_MS = 50.0
STARVED_LIMIT_MS = 1000.0  # Beside processes that want all processors.
# Engines keep another GPU's clock: at full speed on the CPU, they and the dying process would fight
# for the processors. It is slowed down further, since two cores would be busy with it all the same.
PACE, STRETCH = "opt-13b-a100-distserve-tp1", 2.0
LINES = ("small_ms", "large_ms")  # Of a decode step.
CPU_LIMIT = 0.6  # Above this a run measures the processors rather than the notice.
PREFILLS = ["p0", "p1"]
DECODES = ["d0", "d1", "d2", "d3", "d4", "d5"]
UP_TIMEOUT_S = 120.0
NOTICE_TIMEOUT_S = 30.0
VOCABULARY = 512
# Before a kill, so that it falls anywhere between two reports of load, and a stream that one death
# has stopped has mostly a token before the next one: several deaths in a row make it poison.
PAUSE_S = (0.1 * STRETCH, 0.35 * STRETCH)


@dataclass(frozen=True, slots=True)
class Kill:
    state: str  # "idle" or "busy".
    instance: str
    streams: int  # Open at the instance when it was lost.
    notice_ms: float  # From the kill to the policy's hearing of it.
    bare_ms: float  # From the kill to the end of a bare connection.


class Notices:
    """The time at which the proxy's policy got the event of a loss."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []  # Lost without having been killed.
        self._awaited: tuple[str, asyncio.Future[tuple[float, int]]] | None = None

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Look at every event on its way to the policy; nothing else changes."""
        notices, handle = self, RecoveryPolicy.handle

        def observe(policy: RecoveryPolicy, event: ev.Event, now_s: float) -> list[act.Action]:
            if isinstance(event, ev.InstanceLost):
                notices._hear(event, time.monotonic())
            return handle(policy, event, now_s)

        with mock.patch.object(RecoveryPolicy, "handle", observe):
            yield

    def expect(self, instance: str) -> asyncio.Future[tuple[float, int]]:
        """Time and number of victims of the coming loss of `instance`."""
        future: asyncio.Future[tuple[float, int]] = asyncio.get_running_loop().create_future()
        self._awaited = instance, future
        return future

    def _hear(self, event: ev.InstanceLost, now_s: float) -> None:
        if self._awaited is None or self._awaited[0] != event.instance:
            self.unexpected.append(event.instance)
            return
        self._awaited[1].set_result((now_s, len(event.produced_tokens)))
        self._awaited = None


def run_killer(orders: Connection) -> None:
    """A process that connects, kills, waits for the end of the connection, and reports both
    times.
    """
    while (order := orders.recv()) is not None:
        port, pid, pause_s = order
        with socket.create_connection(("127.0.0.1", port)) as sock:
            # Answered once, so that the connection is known to have reached the process.
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answered = b""
            while not answered.endswith(b"\r\n\r\n"):
                answered += sock.recv(65536)
            assert answered.startswith(b"HTTP/1.1 200"), answered
            time.sleep(pause_s)
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            try:
                rest = sock.recv(65536)
            except ConnectionResetError:
                rest = b""
            ended_s = time.monotonic()
        assert not rest
        orders.send((killed_s, ended_s))


def run_clients(orders: Connection, url: str, streams: int) -> None:
    """A process that keeps that many streams open from "go" to "stop", then reports how many were
    complete and how the others ended.
    """
    choose = random.Random(1)

    async def one_after_the_other(ended: list[str]) -> None:
        while not orders.poll():
            prompt = tuple(choose.randrange(2, VOCABULARY) for _ in range(choose.randint(64, 256)))
            request = ReplayRequest(
                arrival_s=0.0, prompt_ids=prompt, max_tokens=choose.randint(100, 400)
            )
            for record in await replay(url, [request]):
                exact = record.completed and len(record.token_ids) == request.max_tokens
                ended.append(
                    ""
                    if exact
                    else str(
                        record.error or f"{len(record.token_ids)} of {request.max_tokens} tokens"
                    )
                )

    async def all_at_once(ended: list[str]) -> None:
        await asyncio.gather(*(one_after_the_other(ended) for _ in range(streams)))

    while orders.recv() is not None:
        ended: list[str] = []
        uvloop.run(all_at_once(ended))
        orders.recv()
        orders.send(ended)


@contextmanager
def helper(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that takes orders over a pipe until it gets None."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
        ours.send(None)
        process.join(10)
    finally:
        process.kill()
        process.join()


async def answer(pipe: Connection) -> Any:
    while not pipe.poll():
        await asyncio.sleep(0.001)
    return pipe.recv()


class Experiment:
    def __init__(
        self, processes: Processes, killer: Connection, clients: Connection, streams: int
    ) -> None:
        self._processes = processes
        self._killer = killer
        self._clients = clients
        self._streams = streams
        self._ports = {
            str(instance.id): instance.port for _, instance in processes.config.cluster.instances()
        }
        self._choose = random.Random(0)
        self.notices = Notices()
        self.kills: list[Kill] = []
        self.cpu: dict[str, list[float]] = {
            "idle": [],
            "busy": [],
        }  # Share of the CPUs in use, from the first kill of a round to its last.
        self.ended: list[str] = []  # Of each stream: nothing, or what went wrong.

    async def run(self, rounds: int, say: Callable[[str], None]) -> None:
        proxy = Proxy(self._processes.config, self._processes.secret)
        with self.notices.observed():
            await proxy.start()
            try:
                async with aiohttp.ClientSession(
                    f"http://127.0.0.1:{proxy.admin_port}"
                ) as self._admin:
                    for index in range(rounds):
                        await self._round("idle")
                        async with self._clients_at_work():
                            await self._round("busy")
                        say(f"round {index + 1} of {rounds}: {len(self.kills)} kills")
            finally:
                await proxy.close()

    async def _round(self, state: str) -> None:
        """Kill all decode instances but one, in turn, then bring them back together."""
        await self._all_up()
        alive = set(DECODES)
        ticks = cpu_ticks()
        while len(alive) > 1:
            victim = (
                await self._busiest(alive)
                if state == "busy"
                else self._choose.choice(sorted(alive))
            )
            alive.remove(victim)
            self.kills.append(await self._kill(state, victim))
        self.cpu[state].append(share_used(ticks, cpu_ticks()))
        self._processes.start(*sorted(set(DECODES) - alive))
        await self._all_up()

    async def _kill(self, state: str, victim: str) -> Kill:
        noticed = self.notices.expect(victim)
        self._killer.send(
            (self._ports[victim], self._processes.pid(victim), self._choose.uniform(*PAUSE_S))
        )
        noticed_s, streams = await asyncio.wait_for(noticed, NOTICE_TIMEOUT_S)
        killed_s, ended_s = await answer(self._killer)
        return Kill(
            state, victim, streams, (noticed_s - killed_s) * 1e3, (ended_s - killed_s) * 1e3
        )

    async def _all_up(self) -> None:
        give_up_s = time.monotonic() + UP_TIMEOUT_S
        while not all(
            instance["health"] == "up" for instance in (await self._state())["instances"]
        ):
            assert time.monotonic() < give_up_s, "not all instances came up"
            await asyncio.sleep(0.1)

    async def _busiest(self, alive: set[str]) -> str:
        """The instance alive with the most streams; waits until all streams are open."""
        while True:
            streams = [
                stream for stream in (await self._state())["streams"] if stream["stage"] == "decode"
            ]
            counts = Counter(stream["decode"] for stream in streams if stream["decode"] in alive)
            if len(streams) >= self._streams // 2 and counts:
                return max(sorted(alive), key=lambda name: counts[name])
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def _clients_at_work(self) -> AsyncIterator[None]:
        self._clients.send("go")
        yield
        self._clients.send("stop")
        self.ended += await answer(self._clients)

    async def _state(self) -> Any:
        async with self._admin.get("/kvrs/v1/state") as response:
            return await response.json()


def pace_in(directory: str) -> str:
    """The file of the clock."""
    profile = json.loads((Path(catalog.__file__).parent / f"data/{PACE}.json").read_text())
    parts = ((profile["prefill"], "coefficients_ms"), *((profile["decode"], key) for key in LINES))
    for part, key in parts:
        part[key] = [STRETCH * value for value in part[key]]
    path = Path(directory) / f"{PACE}-x{STRETCH:g}.json"
    path.write_text(json.dumps(profile))
    return str(path)


def settings(pace: str) -> Config:
    """Two nodes with one prefill and three decode instances each."""
    nodes = [
        {
            "id": node,
            "instances": [
                {"id": prefill, "role": "prefill"},
                *({"id": name, "role": "decode"} for name in decodes),
            ],
        }
        for node, prefill, decodes in (
            ("n0", PREFILLS[0], DECODES[:3]),
            ("n1", PREFILLS[1], DECODES[3:]),
        )
    ]
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"engine": {"pace": pace}, "nodes": nodes},
        }
    )


def table(kills: list[Kill]) -> str:
    lines = [
        f"{'':<6} {'kills':>5} {'streams hit':>11}"
        + "".join(f"{name:>26}" for name in ("notice ms", "bare socket ms", "difference ms"))
    ]
    lines.append(f"{'':<24}" + f"{'p50':>10}{'p99':>8}{'max':>8}" * 3)
    for state in ("idle", "busy", "all"):
        chosen = [kill for kill in kills if state in (kill.state, "all")]
        cells = "".join(
            "".join(
                f"{shown:{width}.2f}"
                for shown, width in zip(figures.values(), (10, 8, 8), strict=True)
            )
            for figures in summary(chosen).values()
        )
        lines.append(
            f"{state:<6} {len(chosen):>5} {sum(kill.streams for kill in chosen):>11}{cells}"
        )
    return "\n".join(lines)


def spread(values: Iterable[float]) -> dict[str, float | None]:
    known = list(values)
    return {
        "p50": percentile(known, 50),
        "p99": percentile(known, 99),
        "max": max(known, default=None),
    }


def summary(kills: list[Kill]) -> dict[str, dict[str, float | None]]:
    return {
        "notice_ms": spread(kill.notice_ms for kill in kills),
        "bare_ms": spread(kill.bare_ms for kill in kills),
        "difference_ms": spread(kill.notice_ms - kill.bare_ms for kill in kills),
    }


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument(
        "--rounds", type=int, default=8, help="of five idle and five busy kills each"
    )
    parser.add_argument("--streams", type=int, default=16, help="kept open in busy rounds")
    parser.add_argument("--spinning", type=int, default=0, help="processes that want a CPU each")
    options = parser.parse_args()
    logging.getLogger("kvrs").setLevel(logging.ERROR)  # Losses are what this is about.
    record = Record()

    with (
        tempfile.TemporaryDirectory(prefix="kvrs-notice-") as directory,
        Processes(settings(pace_in(directory))) as processes,
        helper(run_killer) as killer,
    ):
        processes.start(*PREFILLS, *DECODES)
        processes.wait_ready(*PREFILLS, *DECODES)
        url = f"http://127.0.0.1:{processes.config.proxy.port}"
        with helper(run_clients, url, options.streams) as clients:
            experiment = Experiment(processes, killer, clients, options.streams)
            with spinning(options.spinning):
                uvloop.run(
                    experiment.run(options.rounds, lambda line: print(line, file=sys.stderr))
                )

    return report(record, experiment, options.out, options.spinning)


def report(record: Record, experiment: Experiment, out: Path, spinning: int) -> int:
    limit_ms = STARVED_LIMIT_MS if spinning else LIMIT_MS
    kills, failed = experiment.kills, [fault for fault in experiment.ended if fault]
    used = {state: statistics.mean(shares) for state, shares in experiment.cpu.items()}
    p99_ms = summary(kills)["notice_ms"]["p99"]
    assert p99_ms is not None
    met = p99_ms <= limit_ms and not experiment.notices.unexpected and not failed
    verdict = f"{'met' if met else 'MISSED'} ({p99_ms:.2f} ms)"
    text = "\n".join(
        [
            *([f"beside {spinning} processes that want a processor each"] if spinning else []),
            table(kills),
            f"streams ended: {len(experiment.ended)}, of them not complete: {len(failed)}; "
            f"instances lost without a kill: {len(experiment.notices.unexpected)}",
            f"bar: {limit_ms:.0f} ms p99 of all kills: {verdict}",
            f"CPU in use while killing: idle {used['idle']:.0%}, busy {used['busy']:.0%}",
        ]
    )
    print(text)
    document = {
        "limit_ms_p99": limit_ms,
        "met": met,
        "cpu_used_while_killing": {state: round(share, 3) for state, share in used.items()},
        "summary": {
            state: summary([kill for kill in kills if state in (kill.state, "all")])
            for state in ("idle", "busy", "all")
        },
        "streams_ended": len(experiment.ended),
        "streams_not_complete": failed,
        "lost_without_a_kill": experiment.notices.unexpected,
        "kills": [
            {name: round(x, 3) if isinstance(x, float) else x for name, x in asdict(kill).items()}
            for kill in kills
        ],
    }
    if not spinning:
        record.check_cpu(max(used.values()), CPU_LIMIT)
    is_void = record.keep(out, "starved" if spinning else "notice", document, text)
    return 2 if is_void else 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
