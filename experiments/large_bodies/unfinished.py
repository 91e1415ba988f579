"""Bodies of 8 MB that never end: memory of a real proxy, and how long a usual request takes
meanwhile.

python -m experiments.large_bodies.unfinished [--connections 100] [--megabytes 8] [--out DIR]
"""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from experiments.record import Record
from kvrs_testkit.proxy_cluster import open_proxy_cluster
from kvrs_testkit.proxy_process import process

MB = 10**6
MOST_GROWTH_BYTES = 150 * MB
MOST_LATENCY_S = 0.1
BEFORE_S = 2.0
PAUSE_S = 0.02
USUAL = {"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}
FRAMINGS = ("length", "chunked")
# Another process, which says how many of its connections were answered, and with what.
_CHILD = """
import asyncio, collections, sys
async def send(port, size, framing, until):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = f"Content-Length: {size}" if framing == "length" else "Transfer-Encoding: chunked"
    writer.write(f"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\n{length}\\r\\n\\r\\n".encode())
    async def answer():
        line = await reader.readline()
        return line.split()[1].decode() if line else "closed"
    answering = asyncio.ensure_future(answer())
    left = size - 1
    try:
        while left:
            part = b" " * min(left, 1 << 16)
            left -= len(part)
            writer.write(part if framing == "length" else b"%x\\r\\n%b\\r\\n" % (len(part), part))
            await writer.drain()
    except ConnectionError:
        pass
    await asyncio.wait({answering}, timeout=max(0.0, until - asyncio.get_running_loop().time()))
    if not answering.done():
        answering.cancel()
        found = "open"
    else:
        found = "closed" if answering.exception() else answering.result()
    writer.transport.abort()
    return found
async def main():
    port, count, size, framing, seconds = sys.argv[1:]
    until = asyncio.get_running_loop().time() + float(seconds)
    sent = (send(int(port), int(size), framing, until) for _ in range(int(count)))
    print(dict(collections.Counter(await asyncio.gather(*sent))))
asyncio.run(main())
"""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def ask(http: aiohttp.ClientSession, url: str) -> tuple[int, float]:
    """Status of a usual request, and how long it took."""
    begun_s = time.perf_counter()
    async with http.post(url, json=USUAL) as response:
        await response.read()
    return response.status, time.perf_counter() - begun_s


async def measure(
    framing: str, connections: int, size_bytes: int, seconds: float
) -> dict[str, Any]:
    async with open_proxy_cluster(pairs=1) as system:
        with tempfile.TemporaryDirectory() as directory:
            async with (
                process(system, Path(directory), body_timeout_s=60.0) as (proxy, url),
                aiohttp.ClientSession() as http,
            ):
                port = url.split(":")[2].split("/")[0]
                asked: dict[str, list[tuple[int, float]]] = {"before": [], "meanwhile": []}
                until_s = time.monotonic() + BEFORE_S
                while time.monotonic() < until_s:
                    asked["before"].append(await ask(http, url))
                    await asyncio.sleep(PAUSE_S)
                resident, most = resident_bytes(proxy.pid), 0
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _CHILD, port, str(connections), str(size_bytes)),
                    *(framing, str(seconds)),
                    stdout=asyncio.subprocess.PIPE,
                )
                ended = asyncio.ensure_future(child.communicate())
                while not ended.done():
                    asked["meanwhile"].append(await ask(http, url))
                    most = max(most, resident_bytes(proxy.pid) - resident)
                    await asyncio.sleep(PAUSE_S)
                said, _ = await ended
    return {
        "framing": framing,
        "connections": connections,
        "size_bytes": size_bytes,
        "growth_bytes": most,
        "answers": said.decode().strip(),
        "asked": len(asked["meanwhile"]),
        "served": sum(status == 200 for status, _ in asked["meanwhile"]),
        "longest_before_s": round(max(took_s for _, took_s in asked["before"]), 4),
        "longest_s": round(max(took_s for _, took_s in asked["meanwhile"]), 4),
    }


def is_met(row: dict[str, Any]) -> bool:
    is_small = row["growth_bytes"] <= MOST_GROWTH_BYTES
    is_quick = row["longest_s"] <= MOST_LATENCY_S
    return bool(is_small and is_quick and row["served"] == row["asked"])


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'framing':<9}{'bodies':>8}{'MB':>6}{'growth MB':>11}{'usual requests':>16}{'served':>8}"
        f"{'longest s':>11}{'before':>8}  answers"
    ]
    lines += [
        f"{row['framing']:<9}{row['connections']:>8}{row['size_bytes'] / MB:>6.1f}"
        f"{row['growth_bytes'] / MB:>11.1f}{row['asked']:>16}{row['served']:>8}"
        f"{row['longest_s']:>11.3f}{row['longest_before_s']:>8.3f}  {row['answers']}: "
        f"{'met' if is_met(row) else 'MISSED'}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record, size_bytes = Record(), int(options.megabytes * MB)
    rows = []
    for framing in FRAMINGS * options.rounds:
        rows.append(asyncio.run(measure(framing, options.connections, size_bytes, options.seconds)))
        print(as_text(rows[-1:]), flush=True)
    print(as_text(rows))
    record.keep(options.out, "unfinished", {"rows": rows}, as_text(rows))
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
