"""`kvrs proxy` before vLLM servers that its command line names, as a process."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.proxy import ADMIN_PORT_STEP
from kvrs_testkit.awaited import AwaitedProcess, forked
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import CONFIG

pytestmark = [pytest.mark.process, pytest.mark.network]

ROOT = Path(__file__).parents[2]
BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}


def bare_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVRS_")}


@asynccontextmanager
async def servers(
    *names: str, root: str = "/models/of/another/machine"
) -> AsyncIterator[dict[str, ScriptedVllm]]:
    shared = VllmScript()
    found = {
        name: ScriptedVllm(
            name, "n0", role="prefill" if name[0] == "p" else "decode", script=shared, root=root
        )
        for name in names
    }
    for server in found.values():
        server.connector = any(name[0] == "p" for name in names)
        await server.start()
    try:
        yield found
    finally:
        for server in found.values():
            await server.close()


def options_of(found: dict[str, ScriptedVllm]) -> list[str]:
    return [
        part
        for name, server in found.items()
        for part in (
            "--prefill" if name[0] == "p" else "--decode",
            f"http://127.0.0.1:{server.port}",
        )
    ]


@asynccontextmanager
async def proxy(*options: str, **variables: str) -> AsyncIterator[tuple[AwaitedProcess, str]]:
    """The process, and its URL once it takes requests."""
    started = await forked(
        *("kvrs", "proxy", *options),
        environment=bare_environment() | variables,
        stderr=asyncio.subprocess.PIPE,
        with_children=True,
    )
    assert started.stderr is not None
    logged = b""
    try:
        async with asyncio.timeout(WITHIN_S):
            while (found := re.search(rb"proxy ready port=(\d+)", logged)) is None:
                line = await started.stderr.readline()
                assert line, logged
                logged += line
        yield started, f"http://127.0.0.1:{int(found[1])}"
    finally:
        if started.returncode is None:
            started.terminate()
        await started.communicate()


async def until_ready(
    http: aiohttp.ClientSession, url: str, found: dict[str, ScriptedVllm]
) -> None:
    """The proxy takes requests, and has tried each server with one token."""
    async with asyncio.timeout(WITHIN_S):
        while not all(server.bodies for server in found.values()):
            await asyncio.sleep(0.01)
        while True:
            async with http.get(f"{url}/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("names", [("p0", "d0", "d1"), ("d0", "d1")])
@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
async def test_a_stream_survives_behind_urls_alone(
    names: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    """No file, no secret, no profile and no model on this machine; with prefill or without."""
    port, admin_port, *_ = free_ports(2 + ADMIN_PORT_STEP)  # The second worker's too.
    options = ("--port", str(port), "--admin-port", str(admin_port), *workers)
    async with (
        servers(*names) as found,
        proxy(*options_of(found), *options, KVRS_PROXY__SELF_TEST="false") as (_, url),
        aiohttp.ClientSession() as http,
    ):
        await until_ready(http, url, found)
        async with http.post(f"{url}/v1/completions", json=BODY) as response:
            whole: Any = await response.json()
        while any(each.running for each in found.values()):
            await asyncio.sleep(0.01)  # A client may have its answer before its server is done.
        script = next(iter(found.values())).script
        script.gate, script.gate_at = asyncio.Event(), 3
        streamed = await http.post(f"{url}/v1/completions", json=BODY | {"stream": True})
        await streamed.content.readuntil(b"\n\n")
        decoders = [each for each in found.values() if each.role == "decode"]
        # A second worker may try a server with one token at this moment.
        while len(victims := [each for each in decoders if each.running]) > 1:
            await asyncio.sleep(0.01)
        for victim in victims:
            await victim.kill()
        script.gate.set()
        *events, done, _ = events_of(await streamed.read())

    assert len(victims) == 1
    assert whole["usage"]["completion_tokens"] == 6
    assert done == b"data: [DONE]"
    assert b'"finish_reason":"length"' in events[-1] or b'"finish_reason":"length"' in events[-2]


async def test_doctor_finds_the_command_line_of_the_proxy(model: str, tmp_path: Path) -> None:
    """The first line is what every response depends on: there is no tokenizer here."""
    admin_port = free_ports(1)[0]
    async with servers("p0", "d0", "d1") as found, aiohttp.ClientSession() as http:
        options = ("--port", "0", "--admin-port", str(admin_port))
        async with proxy(*options_of(found), *options) as (_, url):
            await until_ready(http, url, found)
            text = await doctor("--admin-url", f"http://127.0.0.1:{admin_port}")

    first, *rest = text.splitlines()
    assert first.startswith("  failure exactness: responses say X-Kvrs-Exact: no")
    assert "no files of the model /models/of/another/machine on the proxy's machine" in first
    lines = {line[10:].partition(":")[0]: line for line in rest}
    assert lines["instances"].endswith("3 of 3 well")
    assert lines["configuration in use"].split()[0] == "ok"
    assert lines["secret"].split()[0] == "ok"
    assert "is assumed" in lines["files of the model"]


async def test_doctor_is_content_where_vllm_names_a_directory_of_this_machine(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shutil.copy(Path(model) / "tokenizer.json", tmp_path / "tokenizer.json")
    admin_port = free_ports(1)[0]
    async with servers("p0", "d0", root=str(tmp_path)) as found, aiohttp.ClientSession() as http:
        options = ("--port", "0", "--admin-port", str(admin_port))
        async with proxy(*options_of(found), *options) as (_, url):
            await until_ready(http, url, found)
            text = await doctor("--admin-url", f"http://127.0.0.1:{admin_port}")

    assert "exactness" not in text
    assert "files of the model" not in text


async def doctor(*options: str) -> str:
    asked = await forked(
        *("kvrs", "doctor", *options),
        environment=bare_environment() | {"COLUMNS": "400"},
        stdout=asyncio.subprocess.PIPE,
    )
    stdout, _ = await asked.communicate()
    return stdout.decode()


async def test_a_reload_says_that_there_is_no_file(tmp_path: Path) -> None:
    """The answer names the command line, where the path of a file would stand."""
    admin_port = free_ports(1)[0]
    async with servers("p0", "d0") as found, aiohttp.ClientSession() as http:
        options = ("--port", "0", "--admin-port", str(admin_port))
        async with proxy(*options_of(found), *options) as (_, url):
            await until_ready(http, url, found)
            async with http.post(f"http://127.0.0.1:{admin_port}/kvrs/v1/reload") as response:
                answer = await response.json()

    assert answer.get("file") is None
    assert answer["note"] == "this proxy was started without a file: its command line counts"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), b"--decode: missing; allowed: URLs of servers"),
        (
            ("--config", "x.yaml", "--decode", "http://a:1"),
            b"--decode: got http://a:1 beside --config x.yaml; allowed: one of them",
        ),
        (("--config", "x.yaml", "--model", "m"), b"--model: got m beside --config x.yaml"),
        (("--decode", "http://a:1", "--host", "0.0.0.0"), b"proxy.host: got '0.0.0.0'"),
    ],
)
async def test_what_does_not_go_together_is_refused(options: tuple[str, ...], said: bytes) -> None:
    ended = await forked(
        *("kvrs", "proxy", *options),
        environment=bare_environment(),
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await ended.communicate()

    assert (ended.returncode, said in stderr) == (2, True)


async def test_the_command_of_the_readme_works_as_printed() -> None:
    """Its URLs are those of servers that run here; nothing else is needed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"^    kvrs (proxy .*)$", readme, re.MULTILINE)
    async with servers("p0", "d0", "d1") as found:
        for name, host in (("p0", "a:8100"), ("d0", "b:8200"), ("d1", "c:8200")):
            assert host in printed
            printed = printed.replace(host, f"127.0.0.1:{found[name].port}")
        ports = ("--port", "0", "--admin-port", "0")  # Others may have 8000 here.
        async with (
            proxy(*printed.split()[1:], *ports) as (_, url),
            aiohttp.ClientSession() as http,
        ):
            await until_ready(http, url, found)
            async with http.post(f"{url}/v1/completions", json=BODY) as response:
                answer: Any = await response.json()

    assert answer["usage"]["completion_tokens"] == 6
    assert "pip install . " in readme
    assert "pip install kvrs" not in readme
