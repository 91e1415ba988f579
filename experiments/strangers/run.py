"""Strangers at the ports of a cluster: real engines and a real proxy on loopback.

python -m experiments.strangers.run [--seed 0] [--out DIR]
"""

import argparse
import asyncio
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from experiments.record import Record
from kvrs.config.file import parse_config
from kvrs.config.transfer import TransferSettings
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import InstanceInfo
from kvrs.protocol.page_messages import Identity, PullRequest
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.proving import ProvingConnector, address_of, instance_keys
from kvrs.transfer.peers import Peer
from kvrs.transfer.puller import PagePuller
from kvrs_testkit.processes import Processes, nodes_with_pairs

PROMPT = [333, 444, 222]
REQUESTS = 20
SQUATTING_S = 4.0
SILENT = (0, 64, 300, 1000)
PULLS = 20
CONNECTIONS = 300


class Squatter:
    """Listens at the port of a dead instance, keeps what comes, and answers as `way` says."""

    def __init__(self, way: str, live_port: int) -> None:
        self.received = b""
        self._way = way
        self._live_port = live_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        if self._way == "relay":
            back, there = await asyncio.open_connection("127.0.0.1", self._live_port)
            carrying = asyncio.create_task(_carry(back, writer))
        try:
            while data := await reader.read(1 << 16):
                self.received += data
                if self._way == "http":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                if there is not None:
                    there.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()
            if there is not None:
                there.close()
                await carrying


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)


async def succeeds(session: aiohttp.ClientSession, url: str) -> bool:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        return answer.status == 200 and (await answer.json())["usage"]["completion_tokens"] == 8


async def squat(
    processes: Processes, ways: list[str], ask: Callable[[], Awaitable[bool]]
) -> list[dict[str, Any]]:
    ports = {each.id: each.port for _, each in processes.config.cluster.instances()}
    rows = []
    for way in ways:
        before = await info_of(processes, "d1")
        squatter = Squatter(way, ports[InstanceId("d1")])
        server = await _listen(squatter, ports[InstanceId("d0")])
        asked: list[bool] = []
        until_s = time.monotonic() + SQUATTING_S
        while time.monotonic() < until_s or len(asked) < REQUESTS:
            asked.append(await ask())
        server.close()
        words = [b"Bearer", b"HTTP/1.1", b"[333,", b"epoch", processes.secret]
        rows.append(
            {
                "squatter": way,
                "requests": len(asked),
                "succeeded": sum(asked),
                "bytes_received": len(squatter.received),
                "tokens_or_prompts": sum(word in squatter.received for word in words),
                "epoch_of_d1_unchanged": (await info_of(processes, "d1")).epoch == before.epoch,
            }
        )
    return rows


async def _listen(squatter: Squatter, port: int) -> asyncio.Server:
    """Listen as soon as the dead instance has left its port."""
    while True:
        try:
            return await asyncio.start_server(squatter.serve, "127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)


async def info_of(processes: Processes, name: str) -> InstanceInfo:
    instances = [each for _, each in processes.config.cluster.instances() if each.id == name]
    keys = instance_keys(processes.secret, instances)
    async with (
        aiohttp.ClientSession(connector=ProvingConnector(keys)) as session,
        session.get(f"{instances[0].url}/kvrs/v1/instance") as answer,
    ):
        return msgspec.json.decode(await answer.read(), type=InstanceInfo)


async def pulls_beside_silence(processes: Processes, silent: int) -> dict[str, Any]:
    info = await info_of(processes, "p0")
    strangers = [socket.socket() for _ in range(silent)]
    for stranger in strangers:
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", info.page_port))
    own = Identity(
        InstanceId("d1"),
        NodeId("n1"),
        1,
        info.fingerprint,
        info.geometry.page_bytes,
        page_cells=info.geometry.page_cells,
    )
    peer = Peer(info.id, info.node, "127.0.0.1", info.page_port)
    took_s, failed = [], 0
    for _ in range(PULLS):
        # A connection of its own, as at a first pull; the page that it asks for is not there.
        puller = PagePuller(lambda: own, processes.secret, TransferSettings(), time.monotonic)
        page = memoryview(bytearray(info.geometry.page_bytes))
        result = await puller.pull(peer, PullRequest((Tag(bytes(TAG_BYTES)),)), [page], None)
        took_s.append(result.seconds)
        failed += result.error is not None or not result.gone
        await puller.close()
    for stranger in strangers:
        stranger.close()
    return {
        "silent": silent,
        "pulls": PULLS,
        "failed": failed,
        "ms_p50": round(statistics.median(took_s) * 1e3, 2),
        "ms_max": round(max(took_s) * 1e3, 1),
    }


async def cost(processes: Processes) -> dict[str, Any]:
    """Milliseconds of a small request: each over a new connection, plain or proved, and over one
    that stands. The ways take turns.
    """
    (instance,) = (each for _, each in processes.config.cluster.instances() if each.id == "p0")
    keys = {address_of(instance.url): scoped_key(processes.secret, Scope.INSTANCE, "p0")}
    took: dict[str, list[float]] = {"plain": [], "proved": [], "kept": []}
    async with _sessions(keys) as sessions:
        for _ in range(CONNECTIONS):
            for way, session in sessions.items():
                begun_s = time.perf_counter()
                async with session.get(f"{instance.url}/healthz") as answer:
                    await answer.read()
                took[way].append((time.perf_counter() - begun_s) * 1e3)
    return {way: round(statistics.median(each), 3) for way, each in took.items()}


@asynccontextmanager
async def _sessions(keys: Any) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as plain,
        aiohttp.ClientSession(connector=ProvingConnector(keys, force_close=True)) as proved,
        aiohttp.ClientSession(connector=ProvingConnector(keys)) as kept,
    ):
        yield {"plain": plain, "proved": proved, "kept": kept}


async def measure(processes: Processes, seed: int) -> dict[str, Any]:
    proxy = processes.config.proxy
    url = f"http://{proxy.host}:{proxy.port}"
    silence = [await pulls_beside_silence(processes, silent) for silent in SILENT]
    proofs = await cost(processes)
    processes.kill("d0")
    ways = ["silent", "http", "relay"]
    random.Random(seed).shuffle(ways)
    async with aiohttp.ClientSession() as session:
        squats = await squat(processes, ways, lambda: succeeds(session, url))
    return {"squatters": squats, "page_port": silence, "request_ms_p50": proofs}


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{row['squatter']:7} at the port of d0: {row['succeeded']} of {row['requests']} requests "
        f"succeeded; it got {row['bytes_received']} bytes, {row['tokens_or_prompts']} with a "
        f"token, a request or the secret; d1 fenced: {not row['epoch_of_d1_unchanged']}"
        for row in found["squatters"]
    ]
    lines += [
        f"{row['silent']:5} silent connections: {row['failed']} of {row['pulls']} pulls failed; "
        f"{row['ms_p50']} ms p50, {row['ms_max']} ms at most"
        for row in found["page_port"]
    ]
    each = found["request_ms_p50"]
    lines.append(
        f"a request over a new connection: {each['plain']} ms, proved {each['proved']} ms; "
        f"over one that stands: {each['kept']} ms"
    )
    return "\n".join(lines)


def is_good(found: dict[str, Any]) -> bool:
    return all(
        row["succeeded"] == row["requests"]
        and not row["tokens_or_prompts"]
        and row["epoch_of_d1_unchanged"]
        for row in found["squatters"]
    ) and not any(row["failed"] for row in found["page_port"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = parse_config(
        {"proxy": {"port": 0, "admin_port": 0}, "cluster": {"nodes": nodes_with_pairs()}}
    )
    record = Record(options.seed)
    with Processes(config) as processes:
        names = [str(each.id) for _, each in processes.config.cluster.instances()]
        processes.start(*names)
        processes.wait_ready(*names)
        processes.start_proxy()
        found = asyncio.run(measure(processes, options.seed))
    print(table(found))
    record.keep(options.out, "strangers", found, table(found))
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
