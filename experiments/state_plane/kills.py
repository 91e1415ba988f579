"""An engine that is killed at random moments, and the pages that its successor adopts."""

import asyncio
import mmap
import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, socket, socketpair
from typing import Any

import aiohttp
import torch

from kvrs.config.file import ENV_NAME, Config, parse_config
from kvrs.engine.kv_pool import KvPool
from kvrs.engine.nursery import AdoptedChild, Nursery
from kvrs.engine.worker import Worker
from kvrs.ids import InstanceId
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.protocol.tags import Tag, page_tags, root_tag
from kvrs.proving import ProvingConnector, address_of
from kvrs.scheduling.sequences import Chunk
from kvrs.transfer.anchors.ledger import LedgerLayout, PageLedger, read_header
from kvrs.transfer.store.directory import store_directory
from kvrs_testkit.processes import Processes

ENGINE = InstanceId("e0")
# Fewer pages than the prompts need, so that pages are written again all the time.
PAGES, PROMPTS, TOKENS, STREAMS = 96, 48, 120, 5
LONGEST_S = 0.6


def config_of(seed: int) -> Config:
    node = {"id": "n0", "instances": [{"id": ENGINE, "role": "both"}]}
    return parse_config(
        {
            "cluster": {
                "engine": {"seed": seed, "pages": PAGES, "max_running": 16},
                "nodes": [node],
            },
            "proxy": {"port": 0, "admin_port": 0},
            "state_plane": {"enabled": True},
        }
    )


class Reference:
    """The contents of every page that any of the streams can fill."""

    def __init__(self, config: Config, seed: int) -> None:
        assert config.cluster.model is not None
        engine = config.cluster.engine.model_copy(update={"pages": 64})
        self.worker, choose = Worker(Path(config.cluster.model), engine), random.Random(seed)
        self.prompts = [
            [choose.randrange(2, 500) for _ in range(choose.randint(16, 150))]
            for _ in range(PROMPTS)
        ]
        self.pages: dict[Tag, bytes] = {}
        for prompt in self.prompts:
            history = self._greedy(prompt)
            pages, size = range(-(-len(history) // 16)), engine.page_size_tokens
            self.worker.execute([Chunk(history, 0, pages, logits=0)])
            tags = page_tags(root_tag(self.worker.fingerprint), history, size)
            views = map(self.worker.pool.view, pages)
            self.pages |= {tag: bytes(view) for tag, view in zip(tags, views, strict=False)}

    def _greedy(self, prompt: list[int]) -> list[int]:
        history, first = list(prompt), 0
        while len(history) < len(prompt) + TOKENS:
            chunk = Chunk(history[first:], first, range(64), logits=1)
            first = len(history)
            history.append(int(torch.argmax(self.worker.execute([chunk])[0])))
        return history


@dataclass
class Found:
    """The sums over all kills."""

    kills: int = 0
    with_pages: int = 0
    pages: int = 0
    different: int = 0
    unknown: int = 0  # Pages that no stream can have filled.
    refused: int = 0  # Records that were torn, which is what a seal is for.
    streams: int = 0
    not_new: int = 0  # Starts that adopted.


def run(kills: int, seed: int) -> dict[str, Any]:
    found, choose = Found(), random.Random(seed)
    with Processes(config_of(seed)) as processes:
        processes.start("agent-n0")
        processes.wait_ready("agent-n0")
        reference = Reference(processes.config, seed)
        with (processes.directory / "engine.log").open("a") as log:
            path = str(processes.directory / "config.yaml")
            command = ["kvrs.cluster.hosted", "--config", path, "--name", ENGINE]
            nursery = Nursery(command, {ENV_NAME: processes.secret.decode()}, log)
            line, process = _forked(nursery)
            for start in range(1, kills + 1):
                line.send(f"start {start}".encode())
                if line.recv(1000) != b"ready":
                    raise RuntimeError((processes.directory / "engine.log").read_text()[-2000:])
                following = _forked(nursery)
                asyncio.run(_work(processes, reference, choose, start))
                _end(line, process)
                line, process = following
                _check(processes, reference, found)
            line.close()
            process.close()
        text = (processes.directory / "engine.log").read_text()
        found.not_new = text.count("is_new=False")
    return vars(found)


async def _work(
    processes: Processes, reference: Reference, choose: random.Random, start: int
) -> None:
    """Have it compute streams, and kill it in the middle of them."""
    ((_, settings),) = processes.config.cluster.instances()
    url = processes.config.url_of(settings)
    keys = {address_of(url): scoped_key(processes.secret, Scope.INSTANCE, ENGINE)}
    async with aiohttp.ClientSession(url, connector=ProvingConnector(keys)) as client:
        prompts = choose.sample(reference.prompts, STREAMS)
        async with client.get("/kvrs/v1/instance") as answer:
            pid = (await answer.json())["pid"]
        streams = [
            asyncio.create_task(_read(client, f"s{start}-{at}", prompt))
            for at, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(choose.uniform(0.0, LONGEST_S))
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*streams)


async def _read(client: aiohttp.ClientSession, stream: str, prompt: list[int]) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
        "kvrs": {"stream": stream, "attempt": 1, "prompt_tokens": len(prompt)},
    }
    with suppress(aiohttp.ClientError, ConnectionError):
        async with client.post("/v1/completions", json=body) as answer:
            async for _ in answer.content:
                pass


def _forked(nursery: Nursery) -> tuple[socket, AdoptedChild]:
    """A process with its line."""
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    with theirs:
        return ours, nursery.fork(theirs)


def _end(line: socket, process: AdoptedChild) -> None:
    """Wait until the process is gone."""
    line.settimeout(30.0)
    with line:
        assert line.recv(1000) == b""
    process.close()


def _check(processes: Processes, reference: Reference, found: Found) -> None:
    """Adopt from a copy of what it left, with the product's own code."""
    config = processes.config
    node = config.cluster.nodes[0].id
    directory = store_directory(config.backup.directory, processes.secret, node)
    with (directory / f"memory-{ENGINE}").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header = read_header(memoryview(memory))
    assert header is not None
    layout = LedgerLayout(PAGES, config.cluster.engine.max_running)
    pool = KvPool(
        reference.worker.geometry,
        PAGES,
        torch.device("cpu"),
        torch.frombuffer(memory, dtype=torch.uint8)[layout.size_bytes :],
    )
    kept = PageLedger(memoryview(memory), layout, header[1], pool.view).adopt()
    found.kills += 1
    found.with_pages += bool(kept.pages)
    found.pages += len(kept.pages)
    found.refused += kept.damaged
    found.streams += len(kept.streams)
    for page, tag in kept.pages:
        right = reference.pages.get(tag)
        found.unknown += right is None
        found.different += right is not None and right != bytes(pool.view(page))
