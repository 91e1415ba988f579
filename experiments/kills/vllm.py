"""Real vLLM under a proxy: decode servers die in three ways in mid-stream, and every stream must
end as if none had.

For each option requests run in waves; in each wave one decode server is hit when all its streams
are under way and no self-test is left, so that whatever the other one pulls from then on is the
recovery's doing. The same requests run undisturbed afterwards, so that no prefix cache helps a
recovery.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from experiments.record import Record
from kvrs.config.policy import PolicyName
from kvrs.load.admin import AdminClient, AdminPort
from kvrs.load.open_loop import Progress, replay
from kvrs.report import oracle
from kvrs.traces.records import ReplayRequest, StreamRecord
from kvrs_testkit.vllm_servers import PYTHON_ENV, Part, VllmServers, vllm_config

OPTIONS = {"recompute": PolicyName.ALWAYS_RECOMPUTE, "migrate": PolicyName.ALWAYS_MIGRATE}
HIT_AT_LEAST = 8
UNDER_WAY_TOKENS = (5, 100)  # How far the last stream of a wave is when death comes.
PROMPT_TOKENS = (40, 200)
# A survivor holds all streams of a wave at once: at most 30,000 of its 32,768 tokens.
OUTPUT_TOKENS = (500, 700)
ARRIVALS_S = 1.0
STREAM_TIMEOUT_S = 240.0
UP_TIMEOUT_S = 120.0  # With self-tests, of which one may take 60 s.
_LOOK_AGAIN_S = 0.05
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Death(StrEnum):
    HANG = "hang"  # SIGSTOP of the whole server; it wakes when its streams have ended elsewhere.
    SERVER = "server"  # SIGKILL of the whole server: connections break.
    WORKER = "worker"  # SIGKILL of its worker process: HTTP 200, an error event, [DONE].


# The hang first, because nothing has to be started again after it.
DEATHS = (Death.HANG, Death.SERVER, Death.WORKER)


@dataclass
class Wave:
    """One wave of streams and the death in it."""

    option: str
    death: Death
    victim: str
    hit: int  # Streams on the victim as it was hit.
    requests: Sequence[ReplayRequest]
    records: list[StreamRecord]
    recoveries: list[dict[str, Any]]
    prompt_tokens: dict[str, int]  # By the proxy's id of the stream.
    pulled_tokens: float  # By the other decode server, from the hit to the end of the wave.
    pulled_bytes: float


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
    return [
        ReplayRequest(
            arrival_s=choose.uniform(0, ARRIVALS_S),
            prompt_ids=tuple(choose.choices(ids, k=choose.randint(*PROMPT_TOKENS))),
            max_tokens=choose.randint(*OUTPUT_TOKENS),
        )
        for _ in range(count)
    ]


def waves_of(requests: Sequence[ReplayRequest]) -> list[Sequence[ReplayRequest]]:
    """The requests in one part per death, of equal sizes but for one request."""
    cuts = [round(number * len(requests) / len(DEATHS)) for number in range(len(DEATHS) + 1)]
    return [requests[first:end] for first, end in pairwise(cuts)]


class Series:
    def __init__(self, servers: VllmServers, console: Console) -> None:
        self._servers = servers
        self._console = console
        proxy = servers.config.proxy
        self._url = f"http://{proxy.host}:{proxy.port}"
        self._admin_url = f"http://{proxy.admin_host}:{proxy.admin_port}"

    def run(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The rows of the table."""
        waves: list[Wave] = []
        choose = random.Random(seed)
        for option, policy in OPTIONS.items():
            self._start_proxy(policy)
            requests = make_requests(self._servers.model, count, seed + len(waves))
            for death, part in zip(DEATHS, waves_of(requests), strict=True):
                waves.append(
                    wave := asyncio.run(
                        self._wave(option, death, part, choose.randint(*UNDER_WAY_TOKENS))
                    )
                )
                self._say(f"{option}, {death.value}: {wave.hit} of {len(part)} streams hit")
                self._bring_back(wave.victim, death)
        self._say("the same requests, undisturbed")
        rows = [figures_of(wave, asyncio.run(self._undisturbed(wave.requests))) for wave in waves]
        self._servers.stop_proxy()
        return rows

    def _say(self, line: str) -> None:
        self._console.print(f"  {line}", style="dim", markup=False)

    def _start_proxy(self, policy: PolicyName) -> None:
        config = self._servers.config
        self._servers.stop_proxy()
        self._servers.start_proxy(
            config.model_copy(update={"policy": config.policy.model_copy(update={"name": policy})})
        )
        asyncio.run(self._all_tested())
        self._say(f"a proxy with policy {policy.value}")

    def _bring_back(self, victim: str, death: Death) -> None:
        if death is Death.HANG:
            self._servers.signal(victim, signal.SIGCONT)
        else:
            self._servers.start(victim)
            self._servers.wait_ready(victim)
        asyncio.run(self._all_tested())

    async def _all_tested(self) -> None:
        async with AdminPort(AdminClient(self._admin_url)) as port:
            # A process that came back is tested seconds later, and its test pulls KV.
            await port.wait_all_up(UP_TIMEOUT_S, _LOOK_AGAIN_S, tested=True)

    async def _undisturbed(self, requests: Sequence[ReplayRequest]) -> list[StreamRecord]:
        return await replay(self._url, requests, timeout_s=STREAM_TIMEOUT_S)

    async def _wave(
        self, option: str, death: Death, requests: Sequence[ReplayRequest], tokens: int
    ) -> Wave:
        start_s = time.time()
        async with AdminPort(AdminClient(self._admin_url)) as port:
            progress = Progress(len(requests))
            load = asyncio.create_task(
                replay(self._url, requests, timeout_s=STREAM_TIMEOUT_S, progress=progress)
            )
            try:
                streams = await asyncio.wait_for(
                    under_way(port, progress, tokens), STREAM_TIMEOUT_S
                )
                victim, hit = Counter(stream["decode"] for stream in streams).most_common(1)[0]
                (survivor,) = {"d0", "d1"} - {victim}
                before = self._servers.counters(survivor)
                strike(self._servers, victim, death)
                records = await load
            finally:
                load.cancel()
            after = self._servers.counters(survivor)
            recoveries = [
                row for row in (await port.state())["recoveries"] if row["at_s"] >= start_s
            ]
        prompts = {stream["id"]: stream["prompt_tokens"] for stream in streams}
        rise = {key: after[key] - before[key] for key in after}
        pulled_tokens, pulled_bytes = rise["pulled_tokens"], rise["pulled_bytes"]
        return Wave(
            option,
            death,
            victim,
            hit,
            requests,
            records,
            recoveries,
            prompts,
            pulled_tokens,
            pulled_bytes,
        )


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


def figures_of(wave: Wave, clean: Sequence[StreamRecord]) -> dict[str, Any]:
    """A row of the table. `moved_tokens` is what the migrated streams had: so much the other server
    must have pulled.
    """
    verdicts = oracle.judge(wave.records, clean)
    difference = oracle.total(verdicts)
    migrated = [row for row in wave.recoveries if row["option"] == "migrate"]
    gaps_s = sorted(row["gap_s"] for row in wave.recoveries if row["gap_s"] is not None)
    return {
        "option": wave.option,
        "death": wave.death.value,
        "streams": len(wave.records),
        "hit": wave.hit,
        "recoveries": dict(Counter(row["option"] for row in wave.recoveries)),
        "causes": dict(Counter(_NUMBER.sub("N", row["cause"]) for row in wave.recoveries)),
        "exact": sum(verdict.exact for verdict in verdicts),
        "errors": sum(not record.completed for record in wave.records),
        "lost": difference.lost,
        "repeated": difference.repeated,
        "different": difference.different,
        "text_different": sum(not verdict.text_equal for verdict in verdicts),
        "moved_tokens": sum(
            wave.prompt_tokens[row["stream"]] + row["produced_tokens"] for row in migrated
        ),
        "pulled_tokens": round(wave.pulled_tokens),
        "pulled_bytes": round(wave.pulled_bytes),
        "gap_s_p50": round(gaps_s[len(gaps_s) // 2], 3) if gaps_s else None,
        "gap_s_max": round(gaps_s[-1], 3) if gaps_s else None,
    }


def faults_of(row: dict[str, Any]) -> list[str]:
    """The parts of the claim that a wave does not bear out; empty when all of it holds."""
    option, hit, recoveries = row["option"], row["hit"], row["recoveries"]
    faults = []
    if row["exact"] != row["streams"]:
        faults.append(f"{row['streams'] - row['exact']} streams are not exact")
    if hit < HIT_AT_LEAST:
        faults.append(f"only {hit} streams were hit")
    if recoveries.get(option, 0) < hit:
        faults.append(f"{recoveries.get(option, 0)} of {hit} streams were recovered by {option}")
    if option == "migrate" and row["pulled_tokens"] < row["moved_tokens"]:
        faults.append(
            f"{row['moved_tokens']} tokens were to be moved, {row['pulled_tokens']} were pulled"
        )
    if option == "recompute" and row["pulled_tokens"]:
        faults.append(f"{row['pulled_tokens']} tokens were pulled")
    return faults


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "option",
        "death",
        "streams",
        "hit",
        "exact",
        "lost",
        "repeated",
        "different",
        "to move",
        "pulled",
        "gap p50/max s",
    )
    for row in rows:
        numbers = (
            row[key]
            for key in (
                "streams",
                "hit",
                "exact",
                "lost",
                "repeated",
                "different",
                "moved_tokens",
                "pulled_tokens",
            )
        )
        table.add_row(
            row["option"],
            row["death"],
            *map(str, numbers),
            f"{row['gap_s_p50']} / {row['gap_s_max']}",
        )
    return table


def kill_series(
    servers: VllmServers, streams: int, seed: int, console: Console, results: Path
) -> list[str]:
    """Run the series on servers that are up, print its table and write it under `results`.

    Returns what was not as claimed.
    """
    record = Record(seed)
    rows = Series(servers, console).run(streams, seed)
    faults = [
        f"{row['option']}, {row['death']}: {fault}" for row in rows for fault in faults_of(row)
    ]
    console.print(table_of(rows))
    console.print("\n".join(faults) or "PASSED", markup=False)
    document = {"streams_per_option": streams, "waves": rows}
    record.keep(results, "vllm", document, console.export_text())
    return faults


def run(options: argparse.Namespace) -> int:
    console = Console(record=True, width=130)
    with (
        tempfile.TemporaryDirectory() as directory,
        VllmServers(vllm_config(Path(directory)), os.environ[PYTHON_ENV]) as servers,
    ):
        servers.start(*servers.names)
        servers.wait_ready(*servers.names)
        streams = options.streams or 100  # For each option.
        return 1 if kill_series(servers, streams, options.seed, console, options.out) else 0
