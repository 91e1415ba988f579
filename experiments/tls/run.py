"""Cost of TLS to a token, and effect of hostile hand-shakes and new certificates on streams.

python -m experiments.tls.run [--rounds 12] [--seed 0] [--out DIR]
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from experiments.record import Record
from kvrs_testkit.certificates import Authority, Pair
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster
from kvrs_testkit.scripted import SECRET

STREAMS = 16
TOKENS = 400
SILENT = 300
HONEST = 100
RENEWALS = 20
RENEWED_STREAMS = 50
RENEWAL_S = 0.5  # More than the proxy needs to see one: LOOK_INTERVAL_S, set below.
MOST_RATIO = 1.5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# The proxy looks at its files more often than every 2 s, so that 20 renewals take seconds.
_LAUNCH = "import kvrs.tls as t; t.LOOK_INTERVAL_S = 0.05; from kvrs.cli import main; main()"


@dataclass
class Process:
    pid: int
    port: int
    context: ssl.SSLContext | None  # None: plain HTTP.

    @property
    def url(self) -> str:
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://127.0.0.1:{self.port}/v1/completions"

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@asynccontextmanager
async def proxy(
    system: ProxyCluster, directory: Path, name: str, tls: Pair | None, ca: Authority
) -> AsyncIterator[Process]:
    nodes: dict[str, list[dict[str, Any]]] = {}
    for page_port, one in enumerate(system.instances.values(), 1):
        instance = {"id": one.id, "role": one.role.value, "port": one.port, "page_port": page_port}
        nodes.setdefault(one.node, []).append(instance)
    section = {"port": 0, "admin_port": 0, "tls": None if tls is None else tls.section()}
    cluster = {"nodes": [{"id": node, "instances": each} for node, each in nodes.items()]}
    config = directory / f"{name}.yaml"
    config.write_text(json.dumps({"proxy": section, "cluster": cluster}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LAUNCH, "proxy", "--config", str(config)),
        env=os.environ | {"KVRS_SECRET": SECRET.decode()},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        found = None
        while found is None:
            line = await process.stderr.readline()
            assert line, "the proxy has ended"
            found = re.search(rb"proxy ready port=(\d+)", line)
        draining = asyncio.create_task(process.stderr.read())
        yield Process(process.pid, int(found[1]), None if tls is None else ca.client())
        draining.cancel()
    finally:
        process.kill()
        await process.wait()


async def stream(client: aiohttp.ClientSession, process: Process, prompt: list[int]) -> bool:
    """True if the stream is whole."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with client.post(process.url, json=body, ssl=process.context or True) as answer:
            whole = await answer.read()
            return whole.count(b"\n\n") == TOKENS + 1 and whole.endswith(b"data: [DONE]\n\n")
    return False


async def cpu_per_token(process: Process, rng: random.Random) -> float:
    """Microseconds of the proxy, of one round."""
    connector = aiohttp.TCPConnector(limit=STREAMS)
    async with aiohttp.ClientSession(connector=connector) as client:
        prompts = [[rng.randrange(1, 100) for _ in range(20)] for _ in range(STREAMS)]
        await asyncio.gather(*(stream(client, process, prompt) for prompt in prompts))
        before_s = process.cpu_s()
        done = await asyncio.gather(*(stream(client, process, prompt) for prompt in prompts))
    assert all(done)
    return (process.cpu_s() - before_s) / (STREAMS * TOKENS) * 1e6


async def hostile(process: Process, rng: random.Random) -> dict[str, Any]:
    """Honest clients while 300 connections drip their hand-shakes, each opened again when it is
    closed.
    """
    assert process.context is not None

    async def drip() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
                writer.write(rng.choice((b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")))
                await reader.read()
                writer.close()

    attack = [asyncio.create_task(drip()) for _ in range(SILENT)]
    await asyncio.sleep(1)
    served, longest_s = 0, 0.0
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    for _ in range(HONEST):
        begun_s = time.monotonic()
        async with aiohttp.ClientSession() as client:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with client.post(process.url, json=body, ssl=process.context) as answer:
                    served += answer.status == 200
        longest_s = max(longest_s, time.monotonic() - begun_s)
    for task in attack:
        task.cancel()
    await asyncio.gather(*attack, return_exceptions=True)
    return {"silent": SILENT, "honest": HONEST, "served": served, "longest_s": round(longest_s, 3)}


async def serial_of(process: Process) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", process.port, ssl=process.context)
    found = str(writer.get_extra_info("peercert")["serialNumber"])
    writer.transport.abort()
    return found


async def renewals(
    system: ProxyCluster, process: Process, served: Pair, ca: Authority, rng: random.Random
) -> dict[str, Any]:
    """Streams that follow each other while the certificate is replaced."""
    pairs = [await asyncio.to_thread(ca.issue, f"renewed-{n}") for n in range(RENEWALS)]
    whole: list[bool] = []
    goes_on = True

    async def follow(client: aiohttp.ClientSession) -> None:
        while goes_on:
            whole.append(await stream(client, process, [rng.randrange(1, 100) for _ in range(20)]))

    system.script.pause_s = 0.002
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        following = [asyncio.create_task(follow(client)) for _ in range(RENEWED_STREAMS)]
        serials = {await serial_of(process)}
        for pair in pairs:
            served.replace(pair)
            await asyncio.sleep(RENEWAL_S)
            serials.add(await serial_of(process))
        goes_on = False
        await asyncio.gather(*following)
    system.script.pause_s = 0.0
    return {
        "renewals": RENEWALS,
        "shown": len(serials) - 1,
        "streams": len(whole),
        "whole": sum(whole),
    }


async def measure(rounds: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ca = Authority(directory)
        served = ca.issue("proxy")
        system = await stack.enter_async_context(open_proxy_cluster(pairs=2))
        opened = {
            name: await stack.enter_async_context(proxy(system, directory, name, tls, ca))
            for name, tls in (("plain", None), ("tls", served))
        }
        costs: dict[str, list[float]] = {name: [] for name in opened}
        for number in range(rounds):
            for name in sorted(opened, reverse=bool(number % 2)):
                costs[name].append(await cpu_per_token(opened[name], rng))
        ratios = [tls / plain for plain, tls in zip(costs["plain"], costs["tls"], strict=True)]
        return {
            "cpu_us_per_token": {name: statistics.median(each) for name, each in costs.items()},
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "hostile": await hostile(opened["tls"], rng),
            "renewed": await renewals(system, opened["tls"], served, ca, rng),
        }


def as_text(found: dict[str, Any]) -> str:
    cpu, silent, renewed = found["cpu_us_per_token"], found["hostile"], found["renewed"]
    return "\n".join(
        [
            f"CPU per token: plain {cpu['plain']:.0f} us, TLS {cpu['tls']:.0f} us, ratio "
            f"{found['ratio']:.2f} (median of {len(found['ratios'])} rounds)",
            f"{silent['silent']} silent hand-shakes: {silent['served']} of {silent['honest']} "
            f"honest clients served, the slowest in {silent['longest_s'] * 1e3:.0f} ms",
            f"{renewed['renewals']} renewals: {renewed['shown']} shown, {renewed['whole']} of "
            f"{renewed['streams']} streams whole",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = Record(options.seed)
    found = asyncio.run(measure(options.rounds, options.seed))
    print(as_text(found))
    record.keep(options.out, "tls", found, as_text(found))
    silent, renewed = found["hostile"], found["renewed"]
    return int(
        found["ratio"] > MOST_RATIO
        or silent["served"] < silent["honest"]
        or renewed["shown"] < renewed["renewals"]
        or renewed["whole"] < renewed["streams"]
    )


if __name__ == "__main__":
    sys.exit(main())
