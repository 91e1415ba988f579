"""Real vLLM under a proxy: decode servers die in several ways in mid-stream, and every stream must
end as if none had.

For each option requests run in waves; in each wave one decode server is hit when all its streams
are under way. Of two servers none is left in a self-test, so that whatever the other one pulls from
then on is the recovery's doing; of three the next wave begins while one is started again. Behind
each wave its requests run undisturbed, with another salt: no prefix cache helps one run or the
other. Servers whose own memory is served after their death: experiments/vllm_rows.
"""

import argparse
import asyncio
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from experiments.kills.vllm_figures import (
    Death,
    Wave,
    faults_of,
    figures_of,
    table_of,
    without_times,
)
from experiments.record import Record
from kvrs.config.policy import PolicyName
from kvrs.net.admin import AdminClient
from kvrs.protocol.instance import Role
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.open_loop import Dialect, Progress, replay
from kvrs_lab.traces.records import ReplayRequest, StreamRecord
from kvrs_testkit.vllm_servers import (
    BATCH_INVARIANT,
    GPU_FLAGS,
    HANDED_OVER,
    PYTHON_ENV,
    START_TIMEOUT_S,
    Part,
    VllmServers,
    vllm_config,
)

POLICIES = {
    "recompute": PolicyName.ALWAYS_RECOMPUTE,
    "migrate": PolicyName.ALWAYS_MIGRATE,
}
# With --option recompute: servers that compute prompts themselves.
ALONE = {"n0": ("d0",), "n1": ("d1",), "n2": ("d2",)}
UNDER_WAY_TOKENS = (5, 100)  # How far the last stream of a wave is when death comes.
PROMPT_TOKENS = (40, 200)
# A survivor holds all streams of a wave at once: at most 30,000 of its 32,768 tokens.
OUTPUT_TOKENS = (500, 700)
ARRIVALS_S = 1.0
STREAM_TIMEOUT_S = 240.0
UP_TIMEOUT_S = 120.0  # With self-tests, of which one may take 60 s.
STREAMS_PER_KILL = 12  # With --kills: of three servers the one with most of them is hit.
_LOOK_AGAIN_S = 0.05


# The hang first, because nothing has to be started again after it.
DEATHS = (Death.HANG, Death.SERVER, Death.WORKER)


def make_requests(model: str, count: int, seed: int) -> list[ReplayRequest]:
    """Greedy, because nothing else continues exactly in vLLM; no two share a beginning.

    Prompts are of whole characters, as text is: after half a one vLLM's first chunk repeats the
    prompt's text.
    """
    choose = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    ids = [
        token
        for token in range(tokenizer.get_vocab_size())
        if "\ufffd" not in (tokenizer.decode([token]) or "\ufffd")
    ]
    sizes: set[tuple[int, int]] = set()  # All different: in the proxy's state they are names.
    found: list[ReplayRequest] = []
    while len(found) < count:
        arrival_s = choose.uniform(0, ARRIVALS_S)
        prompt = tuple(choose.choices(ids, k=choose.randint(*PROMPT_TOKENS)))
        max_tokens = choose.randint(*OUTPUT_TOKENS)
        if (size := (len(prompt), max_tokens)) not in sizes:
            sizes.add(size)
            found.append(ReplayRequest(arrival_s, prompt, max_tokens))
    return found


def waves_of(requests: Sequence[ReplayRequest], kills: int) -> list[Sequence[ReplayRequest]]:
    """The requests in one part per death, of equal sizes but for one request."""
    cuts = [round(number * len(requests) / kills) for number in range(kills + 1)]
    return [requests[first:end] for first, end in pairwise(cuts)]


@dataclass
class Found:
    """Waves of one option, each with its undisturbed records."""

    waves: list[tuple[Wave, list[StreamRecord]]] = field(default_factory=list)
    kills_per_hour: float = 0.0

    def add(self, other: "Found") -> None:
        """Those of another pool of servers, at the same time."""
        self.waves += other.waves
        self.kills_per_hour += other.kills_per_hour

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the table, one for each kind of death."""
        by_death: dict[Death, list[tuple[Wave, list[StreamRecord]]]] = {}
        for wave, records in self.waves:
            by_death.setdefault(wave.death, []).append((wave, records))
        return [figures_of(pairs, self.kills_per_hour) for pairs in by_death.values()]


class Series:
    """Waves of one pool of servers, which are up."""

    def __init__(self, servers: VllmServers, console: Console) -> None:
        self._servers = servers
        self._console = console
        config = servers.config
        self._decodes = {
            str(each.id) for _, each in config.cluster.instances() if each.role is not Role.PREFILL
        }
        # Of two servers both have to be up when one is hit.
        self._may_be_down = len(self._decodes) - 2
        self._starts = ThreadPoolExecutor()
        self._starting: list[Future[None]] = []
        self._url = f"http://{config.proxy.host}:{config.proxy.port}"
        self._admin_url = f"http://{config.proxy.admin_host}:{config.proxy.admin_port}"

    def run(
        self, option: str, count: int, kills: int | None, seed: int, until_s: float = math.inf
    ) -> "Found":
        """Its waves; none begins later than `until_s` of the monotonic clock."""
        found, choose = Found(), random.Random(seed)
        self._start_proxy(POLICIES[option])
        requests = make_requests(self._servers.model, count, seed)
        start_s = time.monotonic()
        for number, part in enumerate(waves_of(requests, kills or len(DEATHS))):
            if time.monotonic() > until_s:
                break
            death = DEATHS[number % len(DEATHS)]
            wave = asyncio.run(self._wave(option, death, part, choose))
            self._say(f"{option}, {death.value}: {wave.hit} of {len(part)} streams hit")
            self._bring_back(wave.victim, death)
            # Meanwhile the victim starts.
            found.waves.append((wave, asyncio.run(self._undisturbed(part))))
        found.kills_per_hour = len(found.waves) / (time.monotonic() - start_s) * 3600
        self._say(f"{found.kills_per_hour:.0f} kills per hour")
        self._servers.stop_proxy()
        return found

    def _say(self, line: str) -> None:
        self._console.print(f"  {line}", style="dim", markup=False)

    def _start_proxy(self, policy: PolicyName) -> None:
        config = self._servers.config
        self._servers.stop_proxy()
        self._servers.start_proxy(
            config.model_copy(update={"policy": config.policy.model_copy(update={"name": policy})})
        )
        asyncio.run(self._all_tested(may_be_down=0))
        self._say(f"a proxy with policy {policy.value}")

    def _bring_back(self, victim: str, death: Death) -> None:
        if death is Death.HANG:
            self._servers.signal(victim, signal.SIGCONT)
            return
        self._servers.start(victim)
        self._starting.append(self._starts.submit(self._servers.wait_ready, victim))

    async def _all_tested(self, may_be_down: int) -> set[str]:
        """Wait until no more decode servers than these are down or in tests; return those that are
        up and tested.

        A process that came back is tested seconds later, and its test pulls KV.
        """
        async with (
            AdminPort(AdminClient(self._admin_url)) as port,
            asyncio.timeout(START_TIMEOUT_S + UP_TIMEOUT_S),
        ):
            while True:
                for started in [each for each in self._starting if each.done()]:
                    started.result()
                    self._starting.remove(started)
                state = await port.state()
                ready = {row["id"] for row in state["instances"] if _is_tested(row)}
                others = {row["id"] for row in state["instances"]} - self._decodes
                missing = self._decodes - ready
                if others <= ready and len(missing) <= may_be_down:
                    return ready - others
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _undisturbed(self, requests: Sequence[ReplayRequest]) -> list[StreamRecord]:
        dialect = Dialect(cache_salt="undisturbed")
        return await replay(self._url, requests, dialect=dialect, timeout_s=STREAM_TIMEOUT_S)

    async def _wave(
        self,
        option: str,
        death: Death,
        requests: Sequence[ReplayRequest],
        choose: random.Random,
    ) -> Wave:
        ready = await self._all_tested(self._may_be_down)
        start_s = time.time()
        async with AdminPort(AdminClient(self._admin_url)) as port:
            progress = Progress(len(requests))
            load = asyncio.create_task(
                replay(self._url, requests, timeout_s=STREAM_TIMEOUT_S, progress=progress)
            )
            try:
                tokens = choose.randint(*UNDER_WAY_TOKENS)
                streams = await asyncio.wait_for(
                    under_way(port, progress, tokens), STREAM_TIMEOUT_S
                )
                on_ready = Counter(each["decode"] for each in streams if each["decode"] in ready)
                victim = on_ready.most_common(1)[0][0]
                others = sorted(ready - {victim})
                before = self._counters(others)
                strike(self._servers, victim, death)
                struck_s = time.time() - start_s
                records = await load
            finally:
                load.cancel()
            # Reports are on their way.
            await asyncio.sleep(2 * self._servers.config.proxy.load_interval_s)
            state = await port.state()
        after = self._counters(others)
        return Wave(
            option=option,
            death=death,
            victim=victim,
            struck_s=struck_s,
            streams=streams,
            requests=requests,
            records=records,
            recoveries=[row for row in state["recoveries"] if row["at_s"] >= start_s],
            pulled_tokens=after["pulled_tokens"] - before["pulled_tokens"],
            pulled_bytes=after["pulled_bytes"] - before["pulled_bytes"],
            ended=[name for name in others if not self._servers.is_up(name)],
        )

    def _counters(self, names: Sequence[str]) -> Counter[str]:
        return sum((Counter(self._servers.counters(name)) for name in names), Counter())


def _is_tested(row: dict[str, Any]) -> bool:
    test = row["self_test"]
    return bool(row["health"] == "up" and (test is None or test["done"]))


async def under_way(port: AdminPort, progress: Progress, tokens: int) -> list[dict[str, Any]]:
    """The proxy's open streams, when all have given their clients so many tokens; the first ones
    may have ended by then.

    No hand-off is left that could be taken for a recovery's.
    """
    while True:
        streams: list[dict[str, Any]] = (await port.state())["streams"]
        all_known = progress.sent == progress.total == len(streams) + progress.ended
        if all_known and all(stream["output_tokens"] >= tokens for stream in streams):
            assert streams, "all streams ended before the last one had begun"
            return streams
        await asyncio.sleep(_LOOK_AGAIN_S)


def strike(servers: VllmServers, victim: str, death: Death) -> None:
    match death:
        case Death.HANG:
            servers.signal(victim, signal.SIGSTOP)
        case Death.SERVER:
            servers.kill(victim)
        case Death.WORKER:
            servers.kill(victim, Part.WORKER)


def kill_series(
    servers: VllmServers,
    streams: int,
    seed: int,
    console: Console,
    results: Path,
    options: Sequence[str] = (*POLICIES,),
    kills: int | None = None,
) -> list[str]:
    """Run the series on servers that are up, print its table and write it under `results`.

    `streams`, `kills`: of each option; without kills one of each kind of death. Returns what was
    not as claimed.
    """
    record, series = Record(seed, timed=kills is None), Series(servers, console)
    found = _by_option(series, options, streams, kills, seed)
    return _keep(record, found, kills, [], console, results, "vllm")


def _by_option(
    series: Series,
    options: Sequence[str],
    streams: int,
    kills: int | None,
    seed: int,
    until_s: float = math.inf,
) -> list[Found]:
    found: list[Found] = []
    for option in options:
        found.append(series.run(option, streams, kills, seed, until_s))
        seed += len(found[-1].rows())
    return found


def _keep(
    record: Record,
    found: Sequence[Found],
    kills: int | None,
    faults: list[str],
    console: Console,
    results: Path,
    name: str,
) -> list[str]:
    """Print and keep the result; return its faults behind those given. A series of kills counts and
    has no times, so that other processes may run beside it.
    """
    rows = [row for each in found for row in each.rows()]
    faults += [
        f"{row['option']}, {row['death']}: {fault}" for row in rows for fault in faults_of(row)
    ]
    if kills is not None:
        rows = [without_times(row) for row in rows]
    console.print(table_of(rows))
    console.print("\n".join(faults) or "PASSED", markup=False)
    streams = max(sum(len(wave.requests) for wave, _ in each.waves) for each in found)
    document = {"streams_per_option": streams, "waves": rows}
    record.keep(results, name, document, console.export_text())
    return faults


def run(options: argparse.Namespace) -> int:
    console, kills, worlds = Console(record=True, width=180), options.kills, options.worlds or 1
    seeds = range(options.seed, options.seed + worlds)
    record = Record(*seeds, timed=kills is None)
    until_s = time.monotonic() + (options.limit_s or math.inf)
    if kills:
        kills = math.ceil(kills / worlds)
    streams = options.streams or (kills * STREAMS_PER_KILL if kills else 100)
    chosen = (options.option,) if options.option else (*POLICIES,)
    where = "gpu" if options.gpu else None
    name = "-".join(filter(None, ("vllm", options.option, where)))

    def world(servers: VllmServers, seed: int) -> list[Found]:
        servers.start_all()
        series = Series(servers, console)
        return _by_option(series, chosen, streams, kills, seed, until_s)

    with ExitStack() as stack:
        pools = [stack.enter_context(_servers(options, stack)) for _ in seeds]
        threads = stack.enter_context(ThreadPoolExecutor(worlds))
        runs = [threads.submit(world, *each) for each in zip(pools, seeds, strict=True)]
        errors = {seed: each.exception() for seed, each in zip(seeds, runs, strict=True)}
        ended = [f"the world of seed {seed}: {error!r}" for seed, error in errors.items() if error]
        done = [each.result() for each in runs if not each.exception()]
        first, *others = done or [runs[0].result()]
        for other in others:
            for whole, part in zip(first, other, strict=True):
                whole.add(part)
        faults = _keep(record, first, kills, ended, console, options.out, name)
    return 1 if faults else 0


def _servers(options: argparse.Namespace, stack: ExitStack) -> VllmServers:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config = vllm_config(directory, ALONE if options.option == "recompute" else HANDED_OVER)
    flags = GPU_FLAGS if options.gpu else ()
    servers = VllmServers(config, os.environ[PYTHON_ENV], *flags)
    servers.environment = BATCH_INVARIANT if options.gpu else {}
    return servers
