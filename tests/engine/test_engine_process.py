"""`python -m kvrs_engine.engine` as a process."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs_testkit.free_ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.process, pytest.mark.network]


async def test_an_engine_learns_of_further_instances_at_sighup(
    tmp_path: Path, tiny_model: Path
) -> None:
    """It may fetch from them then; a file with faults changes nothing, and is named."""
    port, page_port = free_ports(2)
    path = tmp_path / "kvrs.yaml"
    first: dict[str, Any] = {"id": "b0", "role": "both", "port": port, "page_port": page_port}
    nodes: list[Any] = [{"id": "n0", "instances": [first]}]
    path.write_bytes(msgspec.json.encode({"cluster": {"model": str(tiny_model), "nodes": nodes}}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrs_engine.engine", "--config", str(path), "--instance", "b0"),
        env=os.environ | {"KVRS_SECRET": "only for the tests: a secret"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(180):
            assert await process.stdout.readline() == b"ready\n"
            path.write_text("cluster: {nodes: 3}")
            process.send_signal(signal.SIGHUP)
            refused = await until(process.stderr, b"not reloaded")
            second = {"id": "b1", "role": "both", "port": 1, "page_port": 2}
            nodes.append({"id": "n1", "instances": [second]})
            path.write_bytes(
                msgspec.json.encode({"cluster": {"model": str(tiny_model), "nodes": nodes}})
            )
            process.send_signal(signal.SIGHUP)
            taken = await until(process.stderr, b" reloaded")
            process.terminate()
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert b"cluster.nodes" in refused
    assert b"peers=2" in taken
    assert status == 0


async def until(lines: asyncio.StreamReader, words: bytes) -> bytes:
    while words not in (line := await lines.readline()):
        assert line
    return line
