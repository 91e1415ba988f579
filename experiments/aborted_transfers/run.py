"""Legs of real prefill/decode pairs are aborted while their KV moves, and other streams of the same
servers must get every token that they get alone.

    python -m experiments.aborted_transfers.run vllm|sglang [--rounds N] [--limit-s S]
        [--kv-bytes-per-s R] [--decode-tokens N] [--unprotected]

A run adds rounds to those that the same code has measured before. Needs KVRS_VLLM_PYTHON or
KVRS_SGLANG_PYTHON, and root for a network whose transfers are slow.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.protocol.rows import SGLANG_VARIABLE
from kvrs_testkit import sglang_servers, vllm_servers
from kvrs_testkit.engine_servers import EngineServers
from kvrs_testkit.networks import isolate, slow_loopback
from kvrs_testkit.sglang_servers import SglangServers, sglang_config
from kvrs_testkit.vllm_servers import VllmServers, vllm_config

LEGS, IN_FLIGHT = 500, 200  # Bars, over both engines.
ABORTS_PER_ROUND = 25
BYSTANDERS = 4  # Streams at a time that are compared.
PROMPTS, BYSTANDER_TOKENS = 16, 64
SHORT, LONG = (40, 400), (700, 1900)  # Tokens of the prompts of bystanders, and of aborted pairs.
KV_BYTES_PER_S = 4e6  # Of everything on loopback but HTTP; a prompt of 1,900 tokens has 3.9 MB.
# Tokens of KV at a server: so few that pages of aborted pairs are soon those of others.
KV_TOKENS = 8192
NODES = {"n0": ("p0", "d0")}
VOCABULARY = (3, 450)
_SPREAD = 1.15  # Aborts come until so many times the usual wait for a first token.
_REST_S = 75.0  # Longest wait until nothing is left: leases and held pages end after 30 s.
_STREAM_TIMEOUT_S = 240.0
_TIE = 1e-3  # Greedy choices between log probabilities that differ by less depend on the batch.
_BYTES_PER_TOKEN = 2048
# Counts by name.
Found = Counter[str]
_COLUMNS = (
    *("aborts", "legs", "in_flight", "clients", "streams", "tokens", "different", "ties", "left"),
)


@dataclass
class Bystander:
    prompt: list[int]
    expected: list[int] = field(default_factory=list)


class Pairs:
    """A prefill and a decode server, behind a proxy and beside it."""

    servers: EngineServers
    moments: tuple[str, ...]

    def __init__(self, servers: EngineServers, http: aiohttp.ClientSession) -> None:
        self.servers, self._http = servers, http
        proxy = servers.config.proxy
        self.proxy_url = f"http://{proxy.host}:{proxy.port}"
        self.admin_url = f"http://{proxy.admin_host}:{proxy.admin_port}"

    @property
    def ports(self) -> list[int]:
        """Ports of HTTP."""
        proxy = self.servers.config.proxy
        instances = [each.port for _, each in self.servers.config.cluster.instances()]
        return [proxy.port, proxy.admin_port, *instances]

    async def text(self, url: str) -> str:
        async with self._http.get(url) as response:
            return await response.text()

    async def ids(self, prompt: Sequence[int], tokens: int, salt: str) -> list[int]:
        """The tokens of a stream through the proxy."""
        body = self.body(prompt, tokens, cache_salt=salt)
        found: list[int] = []
        async for event in self.events(self.proxy_url, body):
            for choice in event["choices"]:
                found += choice["token_ids"]
        return found

    async def gap(self, prompt: Sequence[int]) -> float:
        """Difference of the log probabilities of the two likeliest next tokens."""
        body = self.body(prompt, 1) | {"logprobs": 2, "stream": False}
        async with self._http.post(f"{self.proxy_url}/v1/completions", json=body) as response:
            answer = await response.json()
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        first, second, *_ = sorted(top.values(), reverse=True)
        return float(first - second)

    def body(self, prompt: Sequence[int], tokens: int, **fields: Any) -> dict[str, Any]:
        return {
            "model": self.servers.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        } | fields

    async def events(self, url: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        async with self._http.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert not event.get("error"), event
                    yield event

    async def first_event(self, url: str, body: Mapping[str, Any]) -> None:
        events = self.events(url, body)
        try:
            await anext(events)
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def abort(self, moment: str, prompt: list[int], after_s: float, others: int) -> Found:
        """Begin a pair and abort it in this way after this time; return counts of aborted legs, and
        of those of them that were in flight. `others`: streams that may wait for KV, too.
        """
        raise NotImplementedError

    async def in_flight_total(self) -> float | None:
        """Aborts in flight that the engine itself has counted; None: it counts none."""
        return None

    async def left(self) -> int:
        """Requests and pages that are left at the servers."""
        raise NotImplementedError

    async def kept(self) -> int:
        """Streams and detached pairs that are left at the proxy."""
        state = json.loads(await self.text(f"{self.admin_url}/kvrs/v1/state"))
        pairs: int = sum(row["detached_pairs"] for row in state["instances"])
        return len(state["streams"]) + pairs


class VllmPairs(Pairs):
    moments = ("decode", "decode", "decode", "prefill", "client")

    async def abort(self, moment: str, prompt: list[int], after_s: float, others: int) -> Found:
        if moment == "client":
            leg = asyncio.create_task(self.first_event(self.proxy_url, self.body(prompt, 32)))
            return await self._cut(leg, after_s, others)
        handed = {"do_remote_decode": True, "do_remote_prefill": False}
        asked = self.body(prompt, 1, kv_transfer_params=handed) | {"stream": False}
        prefill = asyncio.create_task(self._whole("p0", asked))
        if moment == "prefill":
            return await self._cut(prefill, after_s / 4, others)
        params = (await prefill)["kv_transfer_params"]
        body = self.body(prompt, 32, kv_transfer_params=params)
        leg = asyncio.create_task(self.first_event(self.servers.url("d0"), body))
        return await self._cut(leg, after_s, others)

    async def _whole(self, name: str, body: Mapping[str, Any]) -> Any:
        async with self._http.post(f"{self.servers.url(name)}/v1/completions", json=body) as got:
            return await got.json()

    async def _cut(self, leg: asyncio.Task[Any], after_s: float, others: int) -> Found:
        await asyncio.wait({leg}, timeout=after_s)
        metrics = await self.text(f"{self.servers.url('d0')}/metrics")
        pulls = _sum(metrics, "vllm:num_requests_kv_fetch_by_stage", 'stage="in_progress"')
        was_open = not leg.done()
        leg.cancel()
        await asyncio.wait({leg})
        return Counter(legs=int(was_open), in_flight=int(was_open and pulls > others))

    async def left(self) -> int:
        left = 0.0
        for name in ("p0", "d0"):
            metrics = await self.text(f"{self.servers.url(name)}/metrics")
            blocks = re.search(r'num_gpu_blocks="(\d+)"', metrics)
            assert blocks is not None
            left += _sum(metrics, "vllm:num_requests_running")
            left += _sum(metrics, "vllm:num_requests_waiting")
            left += round(_sum(metrics, "vllm:kv_cache_usage_perc") * int(blocks[1]))
        return int(left)


class SglangPairs(Pairs):
    moments = ("both", "decode", "both", "decode", "prefill", "client")

    async def abort(self, moment: str, prompt: list[int], after_s: float, others: int) -> Found:
        if moment == "client":
            leg = asyncio.create_task(self.first_event(self.proxy_url, self.body(prompt, 32)))
            await asyncio.wait({leg}, timeout=after_s)
            was_open = not leg.done()
            leg.cancel()
            await asyncio.wait({leg})
            return Counter(clients=int(was_open))
        prefill = self.servers._instances["p0"]
        room = {
            "bootstrap_host": prefill.host,
            "bootstrap_port": prefill.page_port,
            "bootstrap_room": random.getrandbits(62),
            "rid": f"aborted-{random.getrandbits(62)}",
        }
        body = self.body(prompt, 32, **room)
        legs = {
            name: asyncio.create_task(self._drained(self.servers.url(name), body))
            for name in ("p0", "d0")
        }
        await asyncio.wait({legs["d0"]}, timeout=after_s)
        first = {"both": ("p0", "d0"), "decode": ("d0",), "prefill": ("p0",)}[moment]
        found = Counter(legs=sum(not legs[name].done() for name in first))
        # SGLang looks only once a second whether a connection has ended.
        await asyncio.gather(*(self._order_abort(name, room["rid"]) for name in first))
        for name in first:
            legs[name].cancel()
        # The other leg is left to itself for a while, and then closed.
        await asyncio.wait(set(legs.values()), timeout=8.0)
        for leg in legs.values():
            leg.cancel()
        await asyncio.wait(set(legs.values()))
        return found

    async def _order_abort(self, name: str, rid: object) -> None:
        url = f"{self.servers.url(name)}/abort_request"
        async with self._http.post(url, json={"rid": rid}) as response:
            await response.read()

    async def _drained(self, url: str, body: Mapping[str, Any]) -> None:
        with contextlib.suppress(AssertionError):  # The other leg was aborted.
            async for _ in self.events(url, body):
                pass

    async def in_flight_total(self) -> float | None:
        metrics = await self.text(f"{self.servers.url('d0')}/metrics")
        return _sum(metrics, "sglang:decode_deferred_kv_release_total")

    async def left(self) -> int:
        left = 0
        for name in ("p0", "d0"):
            answer = json.loads(await self.text(f"{self.servers.url(name)}/v1/loads?include=all"))
            for load in answer["loads"]:
                left += load["num_running_reqs"] + load["num_waiting_reqs"]
                left += sum(v for k, v in load["disaggregation"].items() if k.endswith("_reqs"))
                left += load["num_used_tokens"]
        return left


def _sum(metrics: str, name: str, label: str = "") -> float:
    lines = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for labels, value in lines if label in labels)


class Trial:
    """Rounds of aborts beside streams that are compared."""

    def __init__(self, pairs: Pairs, seed: int, kv_bytes_per_s: float) -> None:
        self.pairs, self._seed, self._kv_bytes_per_s = pairs, seed, kv_bytes_per_s
        self._salts = (f"{os.getpid()} {number}" for number in itertools.count())
        self._bystanders: list[Bystander] = []
        self._waiting = 0  # Bystanders that may wait for KV.
        self._found = Counter[str]()
        self._usual_s = 0.0
        self.gaps: list[float] = []

    async def prepare(self) -> None:
        """Learn what the bystanders get alone, and how long a long prompt takes."""
        draw = random.Random(self._seed)
        pairs = self.pairs
        while len(self._bystanders) < PROMPTS:
            prompt = [draw.randrange(*VOCABULARY) for _ in range(draw.randint(*SHORT))]
            bystander = Bystander(prompt, await self._ask(prompt))
            if await self._ask(prompt) == bystander.expected:
                self._bystanders.append(bystander)
        slow_loopback(self._kv_bytes_per_s, pairs.ports)
        times_s = []
        for _ in range(3):
            began_s = time.monotonic()
            body = pairs.body([draw.randrange(*VOCABULARY) for _ in range(LONG[1])], 1)
            await pairs.first_event(pairs.proxy_url, body)
            times_s.append(time.monotonic() - began_s)
        self._usual_s = sorted(times_s)[1]
        print(f"a prompt of {LONG[1]} tokens takes {times_s} s", flush=True)

    async def _ask(self, prompt: list[int]) -> list[int]:
        return await self.pairs.ids(prompt, BYSTANDER_TOKENS, next(self._salts))

    async def round(self, name: str) -> dict[str, Any]:
        draw = random.Random(f"{self._seed} {name}")
        pairs, self._found = self.pairs, Counter(dict.fromkeys(_COLUMNS, 0))
        before = await pairs.in_flight_total()
        stop = asyncio.Event()
        streams = [
            asyncio.create_task(self._bystand(random.Random(draw.random()), stop))
            for _ in range(BYSTANDERS)
        ]
        try:
            for number in range(ABORTS_PER_ROUND):
                prompt = [draw.randrange(*VOCABULARY) for _ in range(draw.randint(*LONG))]
                usual_s = self._usual_s * len(prompt) / LONG[1]
                after_s = draw.uniform(0.0, _SPREAD * usual_s)
                moment = pairs.moments[number % len(pairs.moments)]
                self._found += await pairs.abort(moment, prompt, after_s, self._waiting)
                self._found["aborts"] += 1
        finally:
            stop.set()
            done = await asyncio.gather(*streams, return_exceptions=True)
        for each in done:
            if isinstance(each, BaseException):
                raise each
        self._found["left"] += await self._left()
        after = await pairs.in_flight_total()
        if before is not None and after is not None:
            self._found["in_flight"] = int(after - before)
        return dict(self._found)

    async def _bystand(self, draw: random.Random, stop: asyncio.Event) -> None:
        while not stop.is_set():
            bystander = draw.choice(self._bystanders)
            body = self.pairs.body(bystander.prompt, BYSTANDER_TOKENS, cache_salt=next(self._salts))
            got: list[int] = []
            self._waiting += 1
            is_waiting = True
            try:
                async for event in self.pairs.events(self.pairs.proxy_url, body):
                    if is_waiting:
                        self._waiting, is_waiting = self._waiting - 1, False
                    for choice in event["choices"]:
                        got += choice["token_ids"]
            finally:
                self._waiting -= is_waiting
            self._found["streams"] += 1
            self._found["tokens"] += len(got)
            if got != bystander.expected:
                await self._judge(bystander, got)

    async def _judge(self, bystander: Bystander, got: list[int]) -> None:
        """Count a difference; a near-tie of two tokens, which depends on the batch, by itself."""
        pairs = zip(got, bystander.expected, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), len(got))
        gap = await self.pairs.gap(bystander.prompt + bystander.expected[:at])
        self.gaps.append(gap)
        print(f"different at {at} of {len(got)}, gap {gap:.6f}", flush=True)
        self._found["ties" if gap < _TIE else "different"] += 1

    async def _left(self) -> int:
        until_s = time.monotonic() + _REST_S
        while True:
            left = await self.pairs.left() + await self.pairs.kept()
            if not left or time.monotonic() > until_s:
                return left
            await asyncio.sleep(1.0)


def as_text(sums: Mapping[str, int], misses: Sequence[str]) -> str:
    lines = [f"{name:<12} {sums.get(name, 0):>9,}" for name in _COLUMNS]
    return "\n".join([*lines, *(f"MISSED: {each}" for each in misses)]) + "\n"


def missed(sums: Mapping[str, int]) -> list[str]:
    """The bars that are missed."""
    found = [f"{sums[what]} {what}; bar 0" for what in ("different", "left") if sums.get(what)]
    for what, bar in (("legs", LEGS // 2), ("in_flight", IN_FLIGHT // 2)):
        if sums.get(what, 0) < bar:
            found.append(f"{sums.get(what, 0)} {what}; bar {bar}")
    return found


def _started(options: argparse.Namespace, directory: Path) -> EngineServers:
    tokens = {"p0": KV_TOKENS, "d0": options.decode_tokens}
    if options.engine == "vllm":
        vllm = VllmServers(vllm_config(directory, NODES), os.environ[vllm_servers.PYTHON_ENV])
        for name, most in tokens.items():
            vllm.flags[name] = ["--kv-cache-memory-bytes", str(most * _BYTES_PER_TOKEN)]
        vllm.environment["UCX_TLS"] = "tcp"  # Memory that servers share would not be slow.
        return vllm
    config = sglang_config(directory, NODES)
    sglang = SglangServers(config, os.environ[sglang_servers.PYTHON_ENV], "--enable-metrics")
    for name, most in tokens.items():
        sglang.flags[name] = ["--max-total-tokens", str(most)]
    if options.decode_tokens < KV_TOKENS:  # Decode keeps room for 512 more tokens of each stream.
        sglang.flags["d0"] += ["--num-reserved-decode-tokens", "96"]
    sglang.environment["SGLANG_REQUEST_STATE_WAIT_TIMEOUT"] = "1"
    if options.unprotected:
        sglang.environment[SGLANG_VARIABLE] = "0"
    return sglang


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit-s", type=float, default=3000.0, help="no round begins later")
    parser.add_argument("--kv-bytes-per-s", type=float, default=KV_BYTES_PER_S)
    parser.add_argument("--decode-tokens", type=int, default=KV_TOKENS, help="of KV at decode")
    parser.add_argument("--unprotected", action="store_true", help="SGLang holds no page")
    options = parser.parse_args()
    isolate()
    record = Record(options.seed, timed=False)
    name = options.engine + ("-unprotected" if options.unprotected else "")
    settings = {
        "aborts_per_round": ABORTS_PER_ROUND,
        "kv_bytes_per_s": options.kv_bytes_per_s,
        "decode_tokens": options.decode_tokens,
    }
    cells = Cells(options.out, name, settings)
    until_s = time.monotonic() + options.limit_s

    def sums() -> Counter[str]:
        return sum((Counter(each) for each in cells.found.values()), Counter())

    async def rounds(servers: EngineServers) -> None:
        timeout = aiohttp.ClientTimeout(total=_STREAM_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            pairs = (VllmPairs if options.engine == "vllm" else SglangPairs)(servers, http)
            trial = Trial(pairs, options.seed, options.kv_bytes_per_s)
            await trial.prepare()
            for each in (f"round {number}" for number in range(options.rounds)):
                if each in cells.found or time.monotonic() > until_s:
                    continue
                began_s = time.monotonic()
                cells.found[each] = await trial.round(each)
                took_s = time.monotonic() - began_s
                print(f"{each}: {took_s:.0f} s, {cells.found[each]}", flush=True)
                cells.keep(record, {"all": dict(sums())}, as_text(sums(), missed(sums())))

    with (
        TemporaryDirectory() as directory,
        _started(options, Path(directory)) as servers,
    ):
        servers.start_all()
        servers.start_proxy()
        asyncio.run(rounds(servers))
    print(as_text(sums(), missed(sums())))
    return 1 if missed(sums()) else 0


if __name__ == "__main__":
    sys.exit(main())
