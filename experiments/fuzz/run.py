"""Mutated inputs to every parser of bytes from outside, and raw bytes to a proxy's port.

python -m experiments.fuzz.run [--inputs 10000000] [--seed 0]
"""

import argparse
import asyncio
import resource
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from experiments.fuzz.targets import TARGETS, Target
from experiments.record import Record
from kvrs_testkit.proxy_cluster import open_proxy_cluster

HERE = Path(__file__).parent
# Slow parsers get fewer inputs; HTTP has sockets in between.
SHARES = {
    "sse": 0.05,
    "page frames": 0.10,
    "gossip": 0.65,
    "completions": 0.08,
    "traces": 0.10,
    "chat templates": 0.01,
    "event log": 0.006,
    "yaml": 0.001,
}
HTTP_SHARE = 0.003
LONGEST_BYTES = 4096
MOST_GROWTH_BYTES = 64 << 20
AT_ONCE = 128  # Connections.
KEPT = 64  # Inputs of a target that are mutated further.


def mutated(draw: Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A few changes of the kinds that parsers trip over."""
    found = bytearray(data)
    for _ in range(1 + int(draw.expovariate(1.0))):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(7)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            found[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == 2:
            del found[at : at + draw.randint(1, 16)]
        elif kind == 3:
            found[at:at] = found[at : at + draw.randint(1, 32)] * draw.choice((1, 2, 50))
        elif kind == 4 and words:
            found[at:at] = draw.choice(words)
        elif kind == 5:
            other = draw.choice(others)
            cut = draw.randrange(len(other) + 1)
            found[at:] = other[cut:]
        elif kind == 6 and found:
            found[at % len(found)] = draw.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(found[:LONGEST_BYTES])


def fuzz(target: Target, inputs: int, seed: int, crashes: Path | None) -> dict[str, Any]:
    """Run one parser; any exception but its refusals is a crash, which is kept."""
    draw, corpus, found = Random(f"{seed} {target.name}"), list(target.seeds), []
    taken, words, began_s = 0, tuple(target.words), time.monotonic()
    for number in range(inputs):
        data = mutated(draw, draw.choice(corpus), corpus, words)
        try:
            target.run(data)
        except target.refused:
            continue
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-2:])
            found.append({"number": number, "error": f"{error!r:.200}", "where": where[:500]})
            if crashes is not None and len(found) <= 3:
                crashes.mkdir(parents=True, exist_ok=True)
                (crashes / f"{target.name.replace(' ', '-')}-{number}").write_bytes(data)
            continue
        # Taken inputs lead further into the parser than refused ones.
        taken += 1
        if len(corpus) < KEPT:
            corpus.append(data)
        else:
            corpus[draw.randrange(len(target.seeds), KEPT)] = data
    return {
        "inputs": inputs,
        "taken": taken,
        "crashes": len(found),
        "first_crashes": found[:3],
        "seconds": time.monotonic() - began_s,
    }


_BODY = b'{"prompt":[1,2,3],"max_tokens":2,"temperature":0}'
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(_BODY)
) + _BODY
_WORDS = (
    b"\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 5\r\n",
    b"\x00",
    b"0\r\n\r\n",
)


async def fuzz_http(inputs: int, seed: int) -> dict[str, Any]:
    """Raw bytes to the clients' port of a proxy in front of scripted engines, which must answer a
    right request afterwards.
    """
    draw, began_s = Random(f"{seed} http"), time.monotonic()
    statuses: dict[str, int] = {}
    async with open_proxy_cluster() as system:

        async def send(data: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
            try:
                writer.write(data)
                async with asyncio.timeout(1.0):
                    answer = await reader.read(4096)
                status = answer[9:12].decode("ascii", "replace") or "none"
            except TimeoutError:
                status = "waits for more"
            except OSError as error:
                status = type(error).__name__
            finally:
                writer.close()
            statuses[status] = statuses.get(status, 0) + 1

        for first in range(0, inputs, AT_ONCE):
            batch = min(AT_ONCE, inputs - first)
            sent = [mutated(draw, _REQUEST, [_REQUEST], _WORDS) for _ in range(batch)]
            await asyncio.gather(*map(send, sent))
        status, _ = await system.complete(prompt=[1, 2, 3], max_tokens=2)

        async def is_idle() -> bool:
            return not (await system.state())["streams"]

        await system.until(is_idle)
    crashes = statuses.get("500", 0) + (status != 200)
    return {
        "inputs": inputs,
        "taken": statuses.get("200", 0),
        "crashes": crashes,
        "first_crashes": [],
        "statuses": statuses,
        "seconds": time.monotonic() - began_s,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    record = Record(arguments.seed, timed=False)
    rows: dict[str, Any] = {}
    for target in TARGETS:  # Warm, so that growth is not that of the first use.
        fuzz(target, 200, arguments.seed + 1, None)
    before = peak_bytes()
    for target in TARGETS:
        count = int(arguments.inputs * SHARES[target.name])
        rows[target.name] = fuzz(target, count, arguments.seed, arguments.out / "crashes")
        print(target.name, rows[target.name], flush=True)
    growth = peak_bytes() - before
    rows["http"] = asyncio.run(fuzz_http(int(arguments.inputs * HTTP_SHARE), arguments.seed))
    crashes = sum(row["crashes"] for row in rows.values())
    result = {
        "inputs": sum(row["inputs"] for row in rows.values()),
        "crashes": crashes,
        "growth_bytes": growth,
        "targets": rows,
        "passed": not crashes and growth < MOST_GROWTH_BYTES,
    }
    lines = [f"{'target':16} {'inputs':>10} {'taken':>10} {'crashes':>8} {'seconds':>9}"]
    lines += [
        f"{name:16} {row['inputs']:10} {row['taken']:10} {row['crashes']:8} {row['seconds']:9.1f}"
        for name, row in rows.items()
    ]
    lines.append(
        f"{result['inputs']} inputs, {crashes} crashes, memory grew by {growth / 1e6:.1f} MB: "
        f"{'PASSED' if result['passed'] else 'FAILED'}"
    )
    print("\n".join(lines))
    record.keep(arguments.out, "fuzz", result, "\n".join(lines))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
