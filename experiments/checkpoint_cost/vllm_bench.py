"""Streams at two real vLLM servers with the kvrs connector, without a proxy: saved to the agent of
one's node, and restored from it by the other one.
"""

import asyncio
import random
import secrets
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from experiments.rig import draw, process_cpu_s
from kvrs.config.cluster import InstanceSettings
from kvrs.ids import StreamId
from kvrs.net.admin import AdminClient, AdminPort
from kvrs.protocol.fault_orders import FaultRequest, LinkFault, NoFault
from kvrs.protocol.instance import CheckpointTarget, KvrsParams, LeaseUpdate, SourceRange
from kvrs.transfer.checkpoint_backlog import RETRY_MOST_S
from kvrs_testkit.processes import below
from kvrs_testkit.vllm_clients import Clients
from kvrs_testkit.vllm_servers import PAGE_TOKENS, VllmServers

BEHIND_TOKENS = 8  # Compared, behind a history.
SLOW_BYTES_PER_S = 1e6
# Of saving to a slow agent: it runs for the first part of each period.
DUTY_S = (0.01, 0.2)
UNDER_WAY_TOKENS = 100
LEFT_AFTER_S = 0.5
SETTLE_S = 5.0
MORE_THAN_CACHED = 24  # Histories: used in turns, none is in vLLM's prefix cache of 32,768 tokens.


@dataclass(frozen=True, slots=True)
class Load:
    """The streams of a round, and the history that is restored."""

    streams: int = 8
    prompt_tokens: int = 40
    output_tokens: int = 600
    reserved_bytes: int = 8 << 20  # For each stream, at the agent.
    history_tokens: int = 1500
    history_reserved_bytes: int = 8 << 20
    saving_tokens: int = 150  # A history is saved while so many behind it are computed.


@dataclass
class Answer:
    """The answer to one request, also to one that was left."""

    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # One for each event with ids.
    under_way: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, ids: list[int]) -> None:
        self.ids = ids
        self.times_s.append(time.perf_counter())
        if len(ids) >= UNDER_WAY_TOKENS:
            self.under_way.set()


class Bench:
    """Servers d0, which saves to the agent of its node, and d1, which restores from that: pages
    go over a socket both times.
    """

    def __init__(self, servers: VllmServers, client: Clients, load: Load, seed: int) -> None:
        self._servers, self._client, self._load = servers, client, load
        self._rng = random.Random(seed)
        (self._node, self.d0), (self._to, self.d1) = servers.config.cluster.instances()
        self._agent = str(self._node.agent_id)

    def _new(self, **fields: Any) -> KvrsParams:
        return KvrsParams(StreamId(secrets.token_hex(16)), 1, self._load.prompt_tokens, **fields)

    def _saved(self, reserved_bytes: int = 0) -> KvrsParams:
        reserved_bytes = reserved_bytes or self._load.reserved_bytes
        target = CheckpointTarget(self._node.agent_id, reserved_bytes)
        return self._new(checkpoints=[target])

    async def _release(self, *params: KvrsParams) -> None:
        update = LeaseUpdate(30.0, release=[each.stream for each in params])
        url = f"{self._node.agent.url}/kvrs/v1/leases"
        async with self._client.proven.post(url, data=msgspec.json.encode(update)) as answer:
            assert answer.status == 200, await answer.text()

    async def _caught_up(self) -> None:
        async with asyncio.timeout(30.0):
            while (await self._client.report(self.d0)).lag_pages:
                await asyncio.sleep(0.02)

    async def _ask(
        self,
        instance: InstanceSettings,
        prompt: list[int],
        tokens: int,
        params: KvrsParams | None = None,
        *,
        salt: str | None = None,
        answer: Answer | None = None,
    ) -> Answer:
        answer = answer or Answer()
        await self._client.generate(instance, prompt, tokens, params, salt=salt, on_ids=answer.take)
        return answer

    def _cpu_s(self) -> float:
        pid = self._servers.pid("d0")
        return sum(map(process_cpu_s, (pid, *below(pid))))

    # Saving.

    async def round(self, side: "Side") -> None:
        """All streams at once; pages that are behind are sent, and counted, before it is over."""
        prompts = [draw(self._rng, self._load.prompt_tokens) for _ in range(self._load.streams)]
        params = [self._saved() if side.saves else None for _ in prompts]
        saved = (await self._client.report(self.d0)).pages_saved
        before_s = self._cpu_s()
        answers = await asyncio.gather(
            *(
                self._ask(self.d0, prompt, self._load.output_tokens, each)
                for prompt, each in zip(prompts, params, strict=True)
            )
        )
        await self._caught_up()
        side.cpu_s.append(
            (self._cpu_s() - before_s) / (self._load.streams * self._load.output_tokens)
        )
        side.tpot_s.append(statistics.median(tpot_of(answer) for answer in answers))
        side.gaps_s += [gap for answer in answers for gap in gaps_of(answer)]
        side.pages_saved += (await self._client.report(self.d0)).pages_saved - saved
        await self._release(*(each for each in params if each))

    # Faults of the agent.

    @asynccontextmanager
    async def _fault(self, kind: str, *, sends: bool) -> AsyncIterator[None]:
        """The agent's fault; `sends`: what it sends is slow, not the process."""
        duty: asyncio.Task[None] | None = None
        if kind == "stopped":
            self._servers.signal(self._agent, signal.SIGSTOP)
        elif kind == "dead":
            self._servers.kill(self._agent)
        elif kind == "slow" and sends:
            await self._inject(LinkFault(self._to.id, SLOW_BYTES_PER_S, 600.0))
        elif kind == "slow":
            duty = asyncio.create_task(self._duty())
        try:
            yield
        finally:
            if duty is not None:
                duty.cancel()
            if kind == "dead":
                await asyncio.to_thread(self._servers.start, self._agent)
                await asyncio.to_thread(self._servers.wait_ready, self._agent)
            else:
                self._servers.signal(self._agent, signal.SIGCONT)
                await self._inject(NoFault())

    async def _duty(self) -> None:
        runs_s, period_s = DUTY_S
        while True:
            self._servers.signal(self._agent, signal.SIGCONT)
            await asyncio.sleep(runs_s)
            self._servers.signal(self._agent, signal.SIGSTOP)
            await asyncio.sleep(period_s - runs_s)

    async def _inject(self, fault: FaultRequest) -> None:
        async with AdminPort(AdminClient("http://127.0.0.1:1"), self._servers.secret) as port:
            await port.inject(self._agent, self._node.agent.url, fault)

    async def save_beside(self, kind: str) -> dict[str, Any]:
        """The longest gap of saved streams after the fault of the agent that gets their pages."""
        reserved = 1 << 40 if kind == "full" else 0
        params = [self._saved(reserved) for _ in range(self._load.streams)]
        answers = [Answer() for _ in params]
        streams = [
            asyncio.create_task(
                self._ask(
                    self.d0,
                    draw(self._rng, self._load.prompt_tokens),
                    self._load.output_tokens,
                    each,
                    answer=answer,
                )
            )
            for each, answer in zip(params, answers, strict=True)
        ]
        await asyncio.gather(*(answer.under_way.wait() for answer in answers))
        async with self._fault(kind, sends=False):
            at_s = time.perf_counter()
            await asyncio.gather(*streams)
        assert all(len(answer.ids) == self._load.output_tokens for answer in answers)
        await self._release(*params)
        gaps_s = [gap for answer in answers for gap in gaps_of(answer, at_s)]
        return {"save_gap_ms": max(gaps_s) * 1e3}

    async def restore_beside(self, kind: str) -> dict[str, Any]:
        """How long a restore takes, what it loads, and the longest gap of streams beside it; of
        the kind `computed` the history is computed.
        """
        prompt = draw(self._rng, self._load.history_tokens)
        saved, calm = await self._save(prompt)
        source = await self._client.source(self._node, saved.stream)
        others = [Answer(), Answer()]
        beside = [
            asyncio.create_task(
                self._ask(
                    self.d1,
                    draw(self._rng, self._load.prompt_tokens),
                    3 * self._load.output_tokens,
                    answer=other,
                )
            )
            for other in others
        ]
        await asyncio.gather(*(other.under_way.wait() for other in others))
        before = await self._client.report(self.d1)
        async with self._fault(kind, sends=True):
            at_s = time.perf_counter()
            params = self._new(sources=[source]) if kind != "computed" else None
            answer = await self._ask(self.d1, prompt, BEHIND_TOKENS, params)
            first_s = answer.times_s[0] - at_s
            until_s = time.perf_counter()
        await asyncio.gather(*beside)
        loaded = (await self._client.report(self.d1)).pages_loaded - before.pages_loaded
        await self._release(saved)
        gaps_s = [gap for each in others for gap in gaps_of(each, at_s, until_s)]
        return {
            "restore_first_token_s": first_s,
            "restore_loaded_pages": loaded,
            "restore_pages": self._load.history_tokens // PAGE_TOKENS,
            "restore_exact": answer.ids == calm,
            "restore_gap_ms": max(gaps_s, default=0.0) * 1e3,
        }

    async def _save(self, prompt: list[int]) -> tuple[KvrsParams, list[int]]:
        """Save a history; return its stream and the tokens behind it.

        Pages are sent as long as a request lives, and to an agent that was dead or stopped only
        after the pause that its sender made.
        """
        until_s = time.perf_counter() + 2 * RETRY_MOST_S
        while time.perf_counter() < until_s:
            params = self._saved(self._load.history_reserved_bytes)
            answer = await self._ask(self.d0, prompt, self._load.saving_tokens, params)
            held = await self._client.source(self._node, params.stream)
            if held.pages >= len(prompt) // PAGE_TOKENS:
                return params, answer.ids[:BEHIND_TOKENS]
            await self._release(params)
            await asyncio.sleep(0.5)
        raise AssertionError(f"the agent got {held.pages} pages of {len(prompt)} tokens")

    # Aborts.

    async def aborts(self, count: int) -> dict[str, Any]:
        """Requests that load and are saved, left by their clients after a random time; half of them
        while the agent sends slowly, so that they are left in mid-fetch.
        """
        histories = []
        for _ in range(MORE_THAN_CACHED):
            prompt = draw(self._rng, self._load.history_tokens)
            saved, _ = await self._save(prompt)
            histories.append((prompt, await self._client.source(self._node, saved.stream)))
            await self._release(saved)  # Its pages stay.
        left = [
            (kind, *histories[number % len(histories)])
            for kind in ("none", "slow")
            for number in range(count // 2)
        ]
        tokens = 0
        for first in range(0, len(left), self._load.streams):
            batch = left[first : first + self._load.streams]
            async with self._fault(batch[0][0], sends=True):
                had = await asyncio.gather(
                    *(self._abort(prompt, source) for _, prompt, source in batch)
                )
            tokens += sum(had)
        await asyncio.sleep(SETTLE_S)
        report = await self._client.report(self.d1)
        counters = await asyncio.to_thread(self._servers.counters, "d1")
        return {
            "aborts": len(left),
            "aborts_with_tokens": tokens,
            "pages_loaded": report.pages_loaded,
            "pinned_blocks": report.pinned_blocks,
            "kv_cache_usage": counters["cache_usage"],
            "running": counters["running"],
            "off_reason": report.off_reason,
        }

    async def _abort(self, prompt: list[int], source: SourceRange) -> bool:
        """Returns whether it had tokens when it was left."""
        answer = Answer()
        params = self._saved()
        params.sources = [source]
        request = self._ask(self.d1, prompt, self._load.output_tokens // 2, params, answer=answer)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.0, LEFT_AFTER_S)):
                await request
        await self._release(params)
        return bool(answer.ids)

    # Restoring.

    async def pair(self) -> "Pair":
        """The first token after one history, in random order."""
        prompt = draw(self._rng, self._load.history_tokens)
        saved, calm = await self._save(prompt)
        source = await self._client.source(self._node, saved.stream)
        before, same = (await self._client.report(self.d1)).pages_loaded, True
        first_s = {}
        ways = [("loaded", self._new(sources=[source]), None), ("computed", None, "computed")]
        for way, params, salt in self._rng.sample(ways, 2):
            at_s = time.perf_counter()
            answer = await self._ask(self.d1, prompt, BEHIND_TOKENS, params, salt=salt)
            first_s[way] = answer.times_s[0] - at_s
            same = same and answer.ids == calm
        pages = (await self._client.report(self.d1)).pages_loaded - before
        await self._release(saved)
        return Pair(first_s["loaded"], first_s["computed"], pages, same)


@dataclass(frozen=True, slots=True)
class Pair:
    """One history at the same server, loaded and computed."""

    loaded_s: float
    computed_s: float
    pages: int  # That were loaded.
    same: bool  # The tokens behind it are those of the request that saved it, both times.


@dataclass
class Side:
    """One way of running the same streams: saved or not."""

    saves: bool
    cpu_s: list[float] = field(default_factory=list)  # Per token; a sample is one round.
    tpot_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    pages_saved: int = 0


def tpot_of(answer: Answer) -> float:
    return (answer.times_s[-1] - answer.times_s[0]) / (len(answer.ids) - 1)


def gaps_of(answer: Answer, from_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
    return [
        later - earlier
        for earlier, later in pairwise(answer.times_s)
        if later >= from_s and earlier <= until_s
    ]
