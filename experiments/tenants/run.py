"""One tenant tries to read, end, probe and evict the streams of another one, before two proxies;
and what 200 finished requests with keys and 8 MB prompts leave in memory.

python -m experiments.tenants.run [--part attacks|memory] [--seed 0] [--out DIR]
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from experiments.record import Record
from kvrs.config.tenants import key_hash
from kvrs.protocol.instance import InstanceInfo, Role
from kvrs.protocol.openai.chunks import error_body
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import open_proxy_cluster
from kvrs_testkit.proxy_process import process_of
from kvrs_testkit.scripted import Scripted

TOKENS = 60
HALF = 20
IDLE_S = 6.0  # A record may be evicted after 5 s.
LARGE_REQUESTS = 200
LARGE_BYTES = 8_000_000
BUDGET_BYTES = 256 << 20
MOST_OF_BUDGET = 1.2
PROMPT = [1, 2, 3]


@dataclass(eq=False)
class Victim:
    """A stream of tenant a, and what its client has of it."""

    key: str
    proxy: int
    fields: dict[str, Any]
    last: str = ""
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    refusals: list[str] = field(default_factory=list)

    async def read(self, http: aiohttp.ClientSession, url: str, most: int | None = None) -> None:
        headers = {"Authorization": "Bearer key-of-a", "Idempotency-Key": self.key}
        if self.last:
            headers["Last-Event-ID"] = self.last
        async with http.post(url, json=self.fields, headers=headers) as response:
            if response.status != 200:
                self.refusals.append(f"{response.status} {await response.text():.200}")
                return
            while (raw := await response.content.readuntil(b"\n\n")) and not self.done:
                self._take(raw)
                if most is not None and len(self.tokens) >= most:
                    break

    def _take(self, raw: bytes) -> None:
        name, _, data = raw.decode().strip().partition("data: ")
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.refusals.append(data[:200])
            return
        self.last = name.removeprefix("id: ").strip()
        for choice in event["choices"]:
            self.tokens += choice["token_ids"]

    @property
    def stream(self) -> str:
        return self.last.partition(":")[0]


class Attacker:
    """Tenant b, a wrong key, or none."""

    def __init__(self, http: aiohttp.ClientSession, authorization: str | None) -> None:
        self._http = http
        self._own = {} if authorization is None else {"Authorization": authorization}
        self.tried: Counter[str] = Counter()
        self.succeeded: Counter[str] = Counter()

    async def ask(self, url: str, fields: dict[str, Any], **headers: str) -> tuple[int, bytes]:
        said = self._own | {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post(url, json=fields, headers=said) as response:
            return response.status, await response.read()

    def note(self, kind: str, *, succeeded: bool) -> None:
        self.tried[kind] += 1
        self.succeeded[kind] += succeeded

    async def attack(self, victim: Victim, urls: list[str], number: int) -> None:
        for url in urls:
            await self._probe(victim, url, number)
        # Only now: from here on the attacker has a stream of its own under the same key.
        for url in urls:
            await self._read(victim, url)

    async def _read(self, victim: Victim, url: str) -> None:
        """The same key and body; and from the beginning of the very stream."""
        fields = victim.fields | {"max_tokens": TOKENS}
        _, body = await self.ask(url, fields, Idempotency_Key=victim.key)
        self.note("read", succeeded=victim.stream.encode() in body)
        status, body = await self.ask(
            url, fields, Idempotency_Key=victim.key, Last_Event_ID=f"{victim.stream}:0"
        )
        self.note("read", succeeded=status == 200 or victim.stream.encode() in body)

    async def _probe(self, victim: Victim, url: str, number: int) -> None:
        """Note whether known streams are answered differently from unknown ones."""
        unknown = f"{number:032x}"
        pairs = [
            ((victim.key, f"{victim.stream}:1"), (f"none-{number}", f"{unknown}:1")),
            ((f"other-{number}", f"{victim.stream}:1"), (f"others-{number}", f"{unknown}:1")),
        ]
        for (key, event), (no_key, no_event) in pairs:
            known = await self.ask(url, victim.fields, Idempotency_Key=key, Last_Event_ID=event)
            other = await self.ask(
                url, victim.fields, Idempotency_Key=no_key, Last_Event_ID=no_event
            )
            # The same but for the count of the limit of wrong keys.
            self.note("probe", succeeded=known != other and 429 not in (known[0], other[0]))


async def throw_away(attacker: Attacker, urls: list[str], keys: int) -> None:
    """Finished and interrupted streams under so many keys."""
    places = asyncio.Semaphore(32)
    fields = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}

    async def one(number: int) -> None:
        async with places:
            await attacker.ask(urls[number % 2], fields, Idempotency_Key=f"throw-away-{number}")

    await asyncio.gather(*(one(number) for number in range(keys)))


async def measure_attacks(seed: int, streams: int, keys: int) -> dict[str, Any]:
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        system = await stack.enter_async_context(open_proxy_cluster(pairs=2))
        urls = [
            (await stack.enter_async_context(process_of(config)))[1]
            for config in _configs(system.instances, directory)
        ]
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        await _until_ready(http, urls)
        await asyncio.sleep(1)  # For the proxies to know each other.
        fields = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        fields |= {"return_token_ids": True}
        victims = [Victim(f"order-{n}", rng.randrange(2), fields) for n in range(streams)]
        interrupted, flowing = victims[::2], victims[1::2]
        system.script.pause_s = 0.02
        await asyncio.gather(*(each.read(http, urls[each.proxy], HALF) for each in interrupted))
        # They go on when the attacks are over.
        system.script.gate, system.script.gate_at = asyncio.Event(), HALF
        reading = [asyncio.create_task(each.read(http, urls[each.proxy])) for each in flowing]
        while any(len(each.tokens) < HALF for each in flowing):
            await asyncio.sleep(0.05)
        system.script.gate.set()
        system.script.gate, system.script.pause_s = asyncio.Event(), 0.0
        system.script.gate_at = TOKENS + 1
        attackers = {
            "tenant b": Attacker(http, "Bearer key-of-b"),
            "wrong key": Attacker(http, "Bearer wrong"),
            "no key": Attacker(http, None),
        }
        numbers = itertools.count(1)
        for attacker in attackers.values():
            for victim in victims:
                await attacker.attack(victim, urls, next(numbers))
        await asyncio.sleep(IDLE_S)
        begun_s = time.monotonic()
        await throw_away(attackers["tenant b"], urls, keys)
        flooded_s = time.monotonic() - begun_s
        await asyncio.gather(*reading)
        await asyncio.gather(*(each.read(http, urls[1 - each.proxy]) for each in interrupted))
        whole = {tuple(each.tokens) for each in victims}
        return {
            "attackers": {
                name: {kind: [each.succeeded[kind], each.tried[kind]] for kind in ("read", "probe")}
                for name, each in attackers.items()
            },
            "ended": [sum(not each.done for each in flowing), len(flowing)],
            "evicted": [sum(not each.done for each in interrupted), len(interrupted)],
            "differing": len(whole) - 1,
            "refusals": sorted({refusal for each in victims for refusal in each.refusals}),
            "throw_away_keys": keys,
            "throw_away_s": round(flooded_s, 1),
        }


def _configs(instances: dict[str, Scripted], directory: Path) -> list[Path]:
    key_file = directory / "keys"
    tenants = {name: {"keys": [key_hash(f"key-of-{name}".encode()).hex()]} for name in "ab"}
    key_file.write_bytes(msgspec.json.encode(tenants))
    key_file.chmod(0o600)
    peer_ports = free_ports(2)
    paths = []
    for n in range(2):
        peer = {"id": f"proxy-{1 - n}", "peer_port": peer_ports[1 - n]}
        section = {"id": f"proxy-{n}", "peer_port": peer_ports[n], "peers": [peer]}
        paths.append(_config(instances, directory / f"{n}.yaml", section, key_file))
    return paths


def _config(
    instances: dict[str, Scripted], path: Path, proxy: dict[str, Any], key_file: Path | None
) -> Path:
    nodes: dict[str, list[dict[str, Any]]] = {}
    for page_port, one in enumerate(instances.values(), 1):
        instance = {"id": one.id, "role": one.role.value, "port": one.port, "page_port": page_port}
        nodes.setdefault(one.node, []).append(instance)
    document: dict[str, Any] = {
        "proxy": {"port": 0, "admin_port": 0} | proxy,
        "cluster": {"nodes": [{"id": node, "instances": own} for node, own in nodes.items()]},
    }
    if key_file is not None:
        document["security"] = {"key_file": str(key_file)}
    path.write_bytes(msgspec.json.encode(document))
    return path


# Memory.

_IDS = ",".join(str(1_000_000 + n % 1000) for n in range(LARGE_BYTES // 8))
_PREFILLED = (
    '{"id":"cmpl-1","choices":[{"index":0,"finish_reason":"length","token_ids":[],'
    f'"prompt_token_ids":[{_IDS}]}}],"kv_transfer_params":{{"do_remote_prefill":true,'
    '"remote_engine_id":"p0","remote_request_id":"r","tp_size":1}}'
).encode()
_DECODED = (
    b'data: {"id":"cmpl-1","created":100,"model":"scripted","choices":[{"text":"a","index":0,'
    b'"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[5]}],'
    b'"object":"text_completion"}\n\ndata: [DONE]\n\n'
)


class LargeScripted(Scripted):
    """Answers to prompts of 8 MB without looking at them."""

    def info(self) -> InstanceInfo:
        return msgspec.structs.replace(super().info(), max_model_len=1 << 24)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if len(body) < LARGE_BYTES // 4:
            return web.Response(status=503, body=error_body("large prompts only"))
        if b'"do_remote_decode":true' in body:
            return web.Response(body=_PREFILLED, content_type="application/json")
        return web.Response(body=_DECODED, content_type="text/event-stream")


async def measure_memory(requests: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        instances: dict[str, Scripted] = {}
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            instances[name] = made = LargeScripted(name, "n0", role=role)
            await made.start()
            stack.push_async_callback(made.close)
        section = {"mirror_bytes": BUDGET_BYTES, "admin_port": (admin := free_ports(1)[0])}
        config = _config(instances, directory / "kvrs.yaml", section, None)
        process, url = await stack.enter_async_context(process_of(config))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await _until_ready(http, [url])
        body = msgspec.json.encode({"prompt": "x" * LARGE_BYTES, "max_tokens": 1})
        before = _resident_bytes(process.pid)
        highest, statuses = before, Counter[int]()
        for number in range(requests):
            headers = {"Idempotency-Key": f"large-{number}", "Content-Type": "application/json"}
            async with http.post(url, data=body, headers=headers) as response:
                await response.read()
                statuses[response.status] += 1
            highest = max(highest, _resident_bytes(process.pid))
        await asyncio.sleep(2)
        async with http.get(f"http://127.0.0.1:{admin}/kvrs/v1/state") as response:
            state = (await response.json())["proxies"][0]
        return {
            "requests": requests,
            "statuses": dict(statuses),
            "budget_bytes": BUDGET_BYTES,
            "grown_bytes": _resident_bytes(process.pid) - before,
            "highest_bytes": highest - before,
            "records": state["records"],
            "record_bytes": state["record_bytes"],
        }


async def _until_ready(http: aiohttp.ClientSession, urls: list[str]) -> None:
    for url in urls:
        while True:
            async with http.get(url.replace("/v1/completions", "/readyz")) as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.1)


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _succeeded(found: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    """Attempts of every kind: how many succeeded, and of how many."""
    rows = [
        (name, kind, counts)
        for name, kinds in found["attackers"].items()
        for kind, counts in kinds.items()
    ]
    return rows + [("tenant b", kind, found[kind]) for kind in ("ended", "evicted")]


def text_of_attacks(found: dict[str, Any]) -> str:
    lines = [
        f"{name:10} {kind:8} {succeeded:4} of {tried}"
        for name, kind, (succeeded, tried) in _succeeded(found)
    ]
    return "\n".join(
        [
            *lines,
            f"{found['throw_away_keys']:,} throw-away keys of tenant b; streams that differ: "
            f"{found['differing']}",
        ]
    )


def attacks_failed(found: dict[str, Any]) -> bool:
    return not found["differing"] and not any(row[2][0] for row in _succeeded(found))


def text_of_memory(found: dict[str, Any]) -> str:
    grown, highest = (
        found[f"{what}_bytes"] / found["budget_bytes"] for what in ("grown", "highest")
    )
    return (
        f"{found['requests']} finished requests of 8 MB: {found['grown_bytes'] / 2**20:.0f} MiB "
        f"more,\n{grown:.0%} of the budget ({highest:.0%} at most on the way); the book says "
        f"{found['record_bytes'] / 2**20:.0f} MiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["attacks", "memory", "both"], default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--keys", type=int, default=9000)
    parser.add_argument("--requests", type=int, default=LARGE_REQUESTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record, holds = Record(options.seed), True
    if options.part != "memory":
        found = asyncio.run(measure_attacks(options.seed, options.streams, options.keys))
        print(text_of_attacks(found))
        record.keep(options.out, "attacks", found, text_of_attacks(found))
        holds &= attacks_failed(found)
    if options.part != "attacks":
        found = asyncio.run(measure_memory(options.requests))
        print(text_of_memory(found))
        record.keep(options.out, "memory", found, text_of_memory(found))
        holds &= bool(found["grown_bytes"] <= MOST_OF_BUDGET * found["budget_bytes"])
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
