"""One and four requests of up to 8 MB beside another stream, at a real proxy and a real engine.

python -m experiments.large_bodies.run [--rounds 3] [--out DIR]
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from experiments.record import Record
from kvrs.config.file import parse_config
from kvrs_testkit.processes import Processes

BODY_BYTES = 8 << 20
MOST_GAP_S = 0.1
QUIET_S = 5.0
SPAN_S = 15.0  # At most, of one measurement.
STREAM = {
    "prompt": "ka lo mi",
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
_LONG = json.dumps("b" * 100)
_CHILD = """
import asyncio, io, sys, aiohttp
async def main():
    url, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    body = sys.stdin.buffer.read(size)
    print("ready", flush=True)
    sys.stdin.buffer.read(1)
    async with aiohttp.ClientSession() as http:
        async def send():
            async with http.post(url, data=io.BytesIO(body)) as response:
                await response.read()
                return response.status
        print(await asyncio.gather(*(send() for _ in range(count))))
asyncio.run(main())
"""


def _chat(**fields: str) -> bytes:
    given = {"messages": '[{"role":"user","content":"a"}]', "max_tokens": "4"} | fields
    return ("{" + ",".join(f'"{name}":{value}' for name, value in given.items()) + "}").encode()


def _listed(value: str, times: int) -> str:
    return "[" + ",".join([value] * times) + "]"


# JSON of several shapes, each as large as the limits of structure or of bytes allow; "allowed
# tools" are as many as the model takes, and are rendered where nothing bounds their bytes.
BODIES = {
    "tools": _chat(tools=_listed(f'{{"a":{_LONG}}}', 65_000)),
    "small tools": _chat(tools=_listed("{}", 65_000)),
    "arguments": _chat(chat_template_kwargs=f'{{"a":{_listed(f"[{_LONG}]", 65_000)}}}'),
    "messages": _chat(messages=_listed('{"role":"user","content":"a"}', 32_000)),
    "text": _chat(messages=f'[{{"role":"user","content":"{"b" * 8_000_000}"}}]'),
    "escapes": _chat(messages='[{"role":"user","content":"' + "\\u00e9" * 1_300_000 + '"}]'),
    "allowed tools": _chat(tools=_listed(f'{{"a":{json.dumps("b" * 700)}}}', 9_000)),
    "million tools": _chat(tools=_listed('{"a":1}', 1_000_000)),
}


@dataclass
class Watched:
    """The streams of an honest client, one after the other."""

    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    failed: int = 0

    async def run(self, http: aiohttp.ClientSession, url: str, stream: Mapping[str, Any]) -> None:
        while True:
            last_s, is_first = time.monotonic(), True
            async with http.post(f"{url}/v1/completions", json=stream) as response:
                body = b""
                async for chunk in response.content.iter_any():
                    now_s = time.monotonic()
                    (self.first_s if is_first else self.gaps_s).append(now_s - last_s)
                    last_s, is_first, body = now_s, False, chunk
            self.failed += response.status != 200 or not body.endswith(b"[DONE]\n\n")


async def measure(
    http: aiohttp.ClientSession,
    url: str,
    name: str | None,
    count: int,
    *,
    bodies: Mapping[str, bytes] = BODIES,
    path: str = "/v1/chat/completions",
    stream: Mapping[str, Any] = STREAM,
) -> dict[str, Any]:
    body = bodies[name] if name else b""
    child = None
    if name is not None:
        # Another process, which is ready before the measurement begins.
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CHILD),
            *(f"{url}{path}", str(count), str(len(body))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(body)
        await child.stdout.readline()
    watched = Watched()
    watching = asyncio.create_task(watched.run(http, url, stream))
    statuses = ""
    await asyncio.sleep(1.0)
    begun_s = time.monotonic()
    if child is None:
        await asyncio.sleep(QUIET_S)
    else:
        try:
            async with asyncio.timeout(SPAN_S):
                said, _ = await child.communicate(b"x")
            statuses = said.decode().strip()
        except TimeoutError:
            child.kill()
            await child.wait()
            statuses = "not answered"
    took_s = time.monotonic() - begun_s
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return {
        "body": name or "none",
        "bytes": len(body),
        "requests": count,
        "statuses": statuses,
        "took_s": round(took_s, 3),
        "longest_gap_s": round(max(watched.gaps_s), 4),
        "longest_first_token_s": round(max(watched.first_s), 4),
        "tokens": len(watched.gaps_s),
        "failed": watched.failed,
    }


async def deaths(http: aiohttp.ClientSession, admin: str) -> float:
    async with http.get(f"{admin}/metrics") as response:
        counts = re.findall(r"^kvrs_worker_deaths_total{.*} (\S+)", await response.text(), re.M)
    return sum(map(float, counts))


async def measure_all(
    processes: Processes, rounds: int, *, has_tokenizer: bool
) -> list[dict[str, Any]]:
    proxy = processes.config.proxy
    url, admin = (f"http://127.0.0.1:{port}" for port in (proxy.port, proxy.admin_port))
    rows: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as http:
        for number in range(rounds):
            cells = [(None, 0), *((name, count) for name in BODIES for count in (1, 4))]
            for name, count in cells:
                before = await deaths(http, admin)
                row = await measure(http, url, name, count)
                row |= {
                    "tokenizer": has_tokenizer,
                    "round": number,
                    "lost": await deaths(http, admin) - before,
                }
                row["load"] = round(os.getloadavg()[0], 2)
                print(
                    f"{row['body']:14} {row['requests']} x {row['bytes'] / 1e6:4.1f} MB: gap "
                    f"{row['longest_gap_s']:.3f} s, first token {row['longest_first_token_s']:.3f} "
                    f"s, {row['lost']:.0f} lost, {row['statuses']} in {row['took_s']:.1f} s",
                    flush=True,
                )
                rows.append(row)
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """For each body the longest gap: the median over rounds, and the longest of them."""
    cells: dict[tuple[bool, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["tokenizer"], row["body"], row["requests"]), []).append(row)
    lines = [
        f"{'tokenizer':<10}{'body':<15}{'requests':>8}{'MB':>6}{'gap s, median':>15}{'longest':>9}"
        f"{'lost':>6}{'failed':>8}"
    ]
    for (has_tokenizer, body, requests), found in cells.items():
        gaps = [row["longest_gap_s"] for row in found]
        lines.append(
            f"{'yes' if has_tokenizer else 'no':<10}{body:<15}{requests:>8}"
            f"{found[0]['bytes'] / 1e6:>6.1f}{median(gaps):>15.3f}{max(gaps):>9.3f}"
            f"{sum(row['lost'] for row in found):>6.0f}{sum(row['failed'] for row in found):>8}"
        )
    for what, some in (
        ("with a body", [row for row in rows if row["requests"]]),
        ("without any", [row for row in rows if not row["requests"]]),
    ):
        above = sum(row["longest_gap_s"] > MOST_GAP_S for row in some)
        lines.append(f"single rounds {what}: {above} of {len(some)} above {MOST_GAP_S} s")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    assert all(len(body) <= BODY_BYTES for body in BODIES.values())
    instances = [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode"}]
    engine = {"max_model_len": 8192}
    cluster = {"nodes": [{"id": "n0", "instances": instances}], "engine": engine}
    config = parse_config({"proxy": {"port": 0, "admin_port": 0}, "cluster": cluster})
    record = Record()
    rows: list[dict[str, Any]] = []
    for has_tokenizer in (True, False):
        print(f"a proxy with{'' if has_tokenizer else 'out'} the model's tokenizer")
        with Processes(config) as running:
            running.start("p0", "d0")
            running.wait_ready("p0", "d0")
            served = running.config.cluster
            known = served if has_tokenizer else served.model_copy(update={"model": None})
            running.start_proxy(running.config.model_copy(update={"cluster": known}))
            rows += asyncio.run(measure_all(running, options.rounds, has_tokenizer=has_tokenizer))
    print(as_text(rows))
    record.keep(options.out, "large_bodies", {"rows": rows}, as_text(rows))
    return int(
        any(row["lost"] or row["failed"] or row["longest_gap_s"] > MOST_GAP_S for row in rows)
    )


if __name__ == "__main__":
    sys.exit(main())
