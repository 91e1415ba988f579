"""Clients that take all they can get, before a real proxy process: what is left to the others, and
to the memory.

python -m experiments.abuse.run [--only bodies ...] [--out DIR]
"""

import argparse
import asyncio
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp

from experiments.record import Record
from kvrs.config.file import parse_config
from kvrs_testkit.processes import Processes
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster
from kvrs_testkit.proxy_process import process

MIB = 1 << 20
BUDGET_BYTES = 256 * MIB
BODY_BYTES = 8 * MIB
MOST_OVER_BUDGET = 1.2
MOST_GAP_S = 0.1
STREAM = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "stream": True}
JSON = {"Content-Type": "application/json"}


def port_of(url: str) -> int:
    return int(url.split(":")[2].split("/")[0])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def outcome_of(http: aiohttp.ClientSession, url: str) -> str:
    """How the stream of a client ends that comes back as often as it is told to, for 2 minutes."""
    give_up_s, last = time.monotonic() + 120.0, ""
    while time.monotonic() < give_up_s:
        begun = False
        try:
            async with http.post(url, json=STREAM) as response:
                begun = response.status == 200
                events = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            if begun:
                return f"lost: {type(error).__name__}"
            last = f"refused: {type(error).__name__}"
            await asyncio.sleep(1.0)
            continue
        if begun:
            is_whole = events.endswith(b"data: [DONE]\n\n") and b'"error"' not in events
            return "whole" if is_whole else "lost"
        last = f"refused: {response.status}"
        await asyncio.sleep(float(response.headers.get("Retry-After", 1)))
    return last


async def is_served(http: aiohttp.ClientSession, url: str) -> bool:
    return await outcome_of(http, url) == "whole"


async def unfinished_bodies(count: int = 200) -> dict[str, Any]:
    """All but the last byte of bodies that declare 8 MiB."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_BYTES}\r\n\r\n"
    body = b" " * (BODY_BYTES - 1)

    async def send(port: int) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        return writer

    async with open_proxy_cluster(pairs=1) as system:
        with tempfile.TemporaryDirectory() as directory:
            async with process(
                system, Path(directory), unfinished_body_bytes=BUDGET_BYTES, body_timeout_s=30.0
            ) as (proxy, url):
                async with aiohttp.ClientSession() as http:
                    assert await is_served(http, url)
                before, most = resident_bytes(proxy.pid), 0
                writers = [await send(port_of(url)) for _ in range(count)]
                for _ in range(100):
                    await asyncio.sleep(0.1)
                    most = max(most, resident_bytes(proxy.pid) - before)
                for writer in writers:
                    writer.transport.abort()
    bound = MOST_OVER_BUDGET * BUDGET_BYTES
    return {
        "unfinished": count,
        "budget_mib": BUDGET_BYTES // MIB,
        "most_mib": round(most / MIB, 1),
        "met": most < bound,
    }


async def silent_connections(count: int = 300, honest: int = 100) -> dict[str, Any]:
    """Connections that send nothing, before a proxy with a limit of 128 descriptors."""
    python = ("prlimit", "--nofile=128:128", sys.executable)
    async with open_proxy_cluster(pairs=2) as system:
        with tempfile.TemporaryDirectory() as directory:
            async with (
                process(system, Path(directory), python) as (_, url),
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=8)) as http,
            ):
                opened = [
                    await asyncio.open_connection("127.0.0.1", port_of(url)) for _ in range(count)
                ]
                served = await asyncio.gather(*(is_served(http, url) for _ in range(honest)))
                for _, writer in opened:
                    writer.transport.abort()
    return {"silent": count, "honest": honest, "served": sum(served), "met": all(served)}


async def few_descriptors(clients: int = 2000) -> dict[str, Any]:
    """Clients of a proxy with 1,024 descriptors, soft and hard; a decode instance is killed in the
    middle.
    """
    python = ("prlimit", "--nofile=1024:1024", sys.executable)
    async with open_proxy_cluster(pairs=3) as system:
        system.script.pause_s = 0.05
        with tempfile.TemporaryDirectory() as directory:
            async with (
                process(system, Path(directory), python) as (_, url),
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
            ):
                asking = [asyncio.create_task(outcome_of(http, url)) for _ in range(clients)]
                await asyncio.sleep(2.0)
                await _kill(system, "d0")
                ends = await asyncio.gather(*asking)
    counts = {end: ends.count(end) for end in sorted(set(ends))}
    lost = sum(count for end, count in counts.items() if end.startswith("lost"))
    return {"clients": clients, "ends": counts, "met": lost == 0 and counts.get("whole", 0) > 0}


async def _kill(system: ProxyCluster, name: str) -> None:
    await system.instances[name].kill()


async def storm(per_s: int = 1000, span_s: float = 5.0) -> dict[str, Any]:
    """Connections with one request each, 1,000 a second, before 64 streams; then an honest one."""
    body = json.dumps(STREAM | {"stream": False}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    after: list[int] = []

    async def one(port: int) -> str:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError):
            return "no answer"
        after.extend(int(x.split()[1]) for x in lines if x.startswith(b"Retry-After:"))
        return lines[0].split()[1].decode()

    async with open_proxy_cluster(pairs=2) as system:
        system.script.pause_s = 0.05
        with tempfile.TemporaryDirectory() as directory:
            async with process(system, Path(directory), max_streams=64) as (_, url):
                asked = []
                for _ in range(int(span_s * 20)):
                    port = port_of(url)
                    asked += [asyncio.create_task(one(port)) for _ in range(per_s // 20)]
                    await asyncio.sleep(0.05)
                answers = await asyncio.gather(*asked)
                async with aiohttp.ClientSession() as http:
                    served = await is_served(http, url)
    counts = {name: answers.count(name) for name in sorted(set(answers))}
    return {
        "asked": len(answers),
        "answers": counts,
        "retry_after_s": {each: after.count(each) for each in sorted(set(after))},
        "met": served and len(set(after)) > 1,
    }


async def large_bodies(count: int) -> dict[str, Any]:
    """Chats of 8 MB beside another stream, before the embedded engine."""
    nodes = [
        {"id": f"n{n}", "instances": [{"id": f"{role[0]}{n}", "role": role}]}
        for n, role in enumerate(("prefill", "decode"))
    ]
    cluster = {"nodes": nodes, "engine": {"max_model_len": 2048, "pages": 2048}}
    config = parse_config({"proxy": {"port": 0, "admin_port": 0}, "cluster": cluster})
    content = "word " * (8_000_000 // 5)
    body = json.dumps(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    ).encode()
    with Processes(config) as processes:
        processes.start("p0", "d1")
        processes.wait_ready("p0", "d1")
        processes.start_proxy()
        base = f"http://127.0.0.1:{processes.config.proxy.port}/v1"
        async with aiohttp.ClientSession() as http:
            asked = {"prompt": [5] * 16, "max_tokens": 2000, "ignore_eos": True, "stream": True}
            response = await http.post(f"{base}/completions", json=asked)
            times = asyncio.create_task(_times(response))
            await asyncio.sleep(3.0)
            begun_s = time.monotonic()
            large = [
                http.post(f"{base}/chat/completions", data=BytesIO(body), headers=JSON)
                for _ in range(count)
            ]
            statuses = [answer.status for answer in await asyncio.gather(*large)]
            ended_s = time.monotonic()
            await asyncio.sleep(1.0)
            times.cancel()
            written = await asyncio.gather(times, return_exceptions=True)
            marks = written[0] if isinstance(written[0], list) else _TIMES
        log = b"".join(each.read_bytes() for each in processes.directory.glob("proxy*.log"))
    gaps = {"before": 0.0, "beside": 0.0}
    for one, two in itertools.pairwise(marks):
        when = "before" if two < begun_s else "beside"
        if one < ended_s + 1.0:
            gaps[when] = max(gaps[when], two - one)
    lost = log.count(b"instance lost")
    return {
        "large": count,
        "statuses": statuses,
        "longest_gap_before_s": round(gaps["before"], 3),
        "longest_gap_s": round(gaps["beside"], 3),
        "instances_lost": lost,
        "met": gaps["beside"] < MOST_GAP_S and lost == 0,
    }


_TIMES: list[float] = []


async def _times(response: aiohttp.ClientResponse) -> None:
    """The time of every event, which outlives the cancellation of this."""
    _TIMES.clear()
    async for line in response.content:
        if line.startswith(b"data: "):
            _TIMES.append(time.monotonic())


MEASURES: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
    "bodies": unfinished_bodies,
    "silent": silent_connections,
    "descriptors": few_descriptors,
    "storm": storm,
    "large-1": lambda: large_bodies(1),
    "large-4": lambda: large_bodies(4),
}


def as_text(rows: dict[str, dict[str, Any]]) -> str:
    """Every figure of every measurement, one of them a line."""
    return "\n".join(
        f"{name:12} "
        + ", ".join(f"{what} {value}" for what, value in row.items() if what != "met")
        + f": {'met' if row['met'] else 'MISSED'}"
        for name, row in rows.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    record = Record()
    rows = {}
    for name in options.only:
        rows[name] = asyncio.run(_run(MEASURES[name]))
        print(as_text({name: rows[name]}), flush=True)
    record.keep(options.out, "abuse", {"rows": rows}, as_text(rows))
    return int(not all(row["met"] for row in rows.values()))


async def _run(measure: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    return await measure()


if __name__ == "__main__":
    sys.exit(main())
