"""Proxies as processes of their own, as `kvrs proxy` runs them, before scripted instances."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kvrs_testkit.awaited import forked
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from kvrs_testkit.scripted import SECRET

REQUEST = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


@asynccontextmanager
async def process(
    system: ProxyCluster,
    directory: Path,
    python: Sequence[str] = (),
    **proxy: float,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A second proxy before the same instances, and where it listens; one that does not end is
    killed. `python`: the command that runs Python; none: the process is forked.
    """
    async with process_of(config_of(system, directory, **proxy), python) as started:
        yield started


def config_of(system: ProxyCluster, directory: Path, **proxy: float) -> Path:
    """The file of a proxy before the instances of `system`."""
    nodes: dict[str, list[dict[str, str | int]]] = {}
    for page_port, one in enumerate(system.instances.values(), 1):
        instance: dict[str, str | int] = {
            "id": one.id,
            "role": one.role.value,
            "port": one.port,
            "page_port": page_port,
        }
        nodes.setdefault(one.node, []).append(instance)
    cluster = {"nodes": [{"id": node, "instances": instances} for node, instances in nodes.items()]}
    config = directory / "kvrs.yaml"
    config.write_bytes(
        msgspec.json.encode({"proxy": {"port": 0, "admin_port": 0, **proxy}, "cluster": cluster})
    )
    return config


@asynccontextmanager
async def process_of(
    config: Path, python: Sequence[str] = ()
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    async with started_process(config, python) as started:
        async with asyncio.timeout(WITHIN_S):
            assert started.stderr is not None
            while (
                port := re.search(rb"proxy ready port=(\d+)", await started.stderr.readline())
            ) is None:
                assert started.returncode is None
        yield started, f"http://127.0.0.1:{int(port[1])}/v1/completions"


@asynccontextmanager
async def started_process(
    config: Path, python: Sequence[str] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A proxy that may not be ready yet; one that does not end is killed."""
    command = ("kvrs", "proxy", "--config", str(config))
    environment = os.environ | {"KVRS_SECRET": SECRET.decode()}
    pipe = asyncio.subprocess.PIPE
    if python:
        started = await asyncio.create_subprocess_exec(
            *(*python, "-m", *command), env=environment, stderr=pipe
        )
    else:
        started = await forked(*command, environment=environment, stderr=pipe)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def until_logged(proxy: asyncio.subprocess.Process, *words: bytes) -> bytes:
    """The log up to the line with the last of these words, which come in any order."""
    assert proxy.stderr is not None
    logged = b""
    async with asyncio.timeout(WITHIN_S):
        while not all(each in logged for each in words):
            line = await proxy.stderr.readline()
            assert line, f"the proxy ended with {await proxy.wait()}"
            logged += line
    return logged
