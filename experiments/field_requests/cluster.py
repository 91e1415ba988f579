"""A process of `kvrs proxy` with its defaults, before three scripted servers of this process."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from experiments.field_requests.servers import FieldVllm, Odd, Seen
from experiments.record import MARK_ENV, ROOT
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.scripted_model import expected_ids, ids_of, text_of
from kvrs_testkit.scripted_vllm import VllmScript
from kvrs_testkit.sse import events_of

MODEL = "tiny"
DATA = ROOT / "kvrs" / "profiles" / "data"
_UP_WITHIN_S = 90.0  # On a busy machine.
_LOOK_S = 0.1
_ROLES = {"p0": "prefill", "d0": "decode", "d1": "decode", "p1": "prefill"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that a client has read; `text` is that of its only choice."""

    status: int
    text: str = ""
    finish: str | None = None
    is_done: bool = False
    error: str = ""

    def is_whole(self, text: str, finish: str = "length") -> bool:
        """It has all tokens, each once."""
        return (self.status, self.text, self.finish, self.is_done) == (200, text, finish, True)


@dataclass
class Cluster:
    """The servers, the proxy before them, and what its state has shown so far."""

    servers: dict[str, FieldVllm]
    seen: Seen
    http: aiohttp.ClientSession
    url: str
    admin: str
    process: subprocess.Popen[bytes]
    log: Path
    suspected: set[str] = field(default_factory=set)  # Such as "d0 ejected".
    on: dict[str, int] = field(default_factory=dict)  # Streams at each decode server, lately.

    async def state(self) -> Any:
        async with self.http.get(f"{self.admin}/kvrs/v1/state") as response:
            return msgspec.json.decode(await response.read())

    async def count(self, series: str) -> int:
        """The sum of the samples of this series."""
        async with self.http.get(f"{self.admin}/metrics") as response:
            text = await response.text()
        families = text_string_to_metric_families(text)
        samples = [sample for each in families for sample in each.samples]
        return int(sum(each.value for each in samples if each.name == series))

    async def health(self) -> dict[str, str]:
        return {row["id"]: row["health"] for row in (await self.state())["instances"]}

    async def until_health(self, **wanted: str) -> None:
        async with asyncio.timeout(_UP_WITHIN_S):
            while not wanted.items() <= (await self.health()).items():
                await asyncio.sleep(_LOOK_S)

    async def ask(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Answer:
        """Errors of the connection are answers, too."""
        try:
            async with self.http.post(self.url + path, json=dict(body)) as response:
                return read(response.status, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            return Answer(0, error=f"{type(error).__name__}: {error}")

    async def look(self) -> None:
        """Note again and again which servers are not in use, and where the streams are."""
        while True:
            with suppress(aiohttp.ClientError, KeyError):
                state = await self.state()
                for row in state["instances"]:
                    if row["health"] != "up":
                        self.suspected.add(f"{row['id']} {row['health']}")
                    if row["answers"]["ejected"]:
                        self.suspected.add(f"{row['id']} ejected")
                decodes = [each["decode"] for each in state["streams"]]
                self.on = {name: decodes.count(name) for name in self.servers}
            await asyncio.sleep(_LOOK_S)


def read(status: int, body: bytes) -> Answer:
    """An answer in one piece, or that of a stream."""
    if not body.startswith((b"data:", b":", b"id:", b"event:")):
        return _whole(status, body)
    text, finish, error = "", None, ""
    events = [each for event in events_of(body) for each in event.split(b"\n") if each]
    said = [each[6:] for each in events if each.startswith(b"data: ")]
    for each in said:
        if each == b"[DONE]":
            continue
        event = msgspec.json.decode(each)
        error = error or str(event.get("error", {}).get("message", ""))
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish = choice.get("finish_reason") or finish
    return Answer(status, text, finish, said[-1:] == [b"[DONE]"], error)


def _whole(status: int, body: bytes) -> Answer:
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return Answer(status, error=body[:200].decode(errors="replace"))
    if "error" in said:
        return Answer(status, error=str(said["error"].get("message", said["error"])))
    if not said.get("choices"):
        return Answer(status, is_done=True)
    choice = said["choices"][0]
    text = choice.get("text") or choice.get("message", {}).get("content") or ""
    return Answer(status, text, choice["finish_reason"], True)


def prompt(number: int, words: int = 20) -> str:
    """A prompt that the servers know by its number."""
    return f"#{number}# " + "word " * words


def body(number: int, tokens: int, **more: Any) -> dict[str, Any]:
    """A completion as a stream."""
    asked = {"model": MODEL, "prompt": prompt(number), "max_tokens": tokens, "temperature": 0}
    return asked | {"stream": True} | more


def text_after(asked: str, tokens: int) -> str:
    """The text of an undisturbed stream."""
    return "".join(text_of(each) for each in expected_ids(ids_of(asked), tokens))


@asynccontextmanager
async def cluster(
    takes_s: tuple[float, ...] = (0.0,),
    *,
    lanes: int | None = None,
    pause_s: float = 0.01,
    odd: Mapping[int, Odd] | None = None,
    token_s: float | None = None,
    names: Sequence[str] = ("p0", "d0", "d1"),
) -> AsyncIterator[Cluster]:
    """All servers are up, and tested by the proxy; `pause_s` lies between two tokens. `token_s`: of
    a prefill, by the profile that the proxy has; None: it has none.
    """
    seen, script = Seen(), VllmScript(pause_s=pause_s)
    async with AsyncExitStack() as stack:
        servers = {}
        for name in names:
            role = _ROLES[name]
            server = FieldVllm(name, "n0", role=role, script=script, seen=seen, takes_s=takes_s)
            server.odd, server.says_more, server.passed = odd or {}, True, ("/v1/embeddings",)
            server.tokens = 0
            if lanes is not None:
                server.narrow(lanes)
            await server.start()
            stack.push_async_callback(server.close)
            servers[name] = server
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        http = aiohttp.ClientSession(timeout=timeout, connector=connector)
        await stack.enter_async_context(http)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrs-field-")))
        port, admin_port = free_ports(2)
        profile = None if token_s is None else _profile(token_s, folder)
        process = _started(servers, port, admin_port, folder, profile)
        stack.push_async_callback(_ended, process)
        url, admin = (f"http://127.0.0.1:{each}" for each in (port, admin_port))
        system = Cluster(servers, seen, http, url, admin, process, folder / "log")
        await _until_tested(system)
        look = asyncio.create_task(system.look())
        stack.callback(look.cancel)
        yield system


def _started(
    servers: Mapping[str, FieldVllm],
    port: int,
    admin_port: int,
    folder: Path,
    profile: Path | None,
) -> subprocess.Popen[bytes]:
    """The command of the README."""
    words = [sys.executable, "-m", "kvrs", "proxy"]
    words += ["--port", str(port), "--admin-port", str(admin_port)]
    for name, server in servers.items():
        words += [f"--{_ROLES[name]}", f"http://127.0.0.1:{server.port}"]
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVRS_") or name == MARK_ENV
    }
    environ["PYTHONPATH"] = str(ROOT)
    if profile is not None:
        environ["KVRS_PROFILES__PREFILL"] = str(profile)
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(words, cwd=folder, env=environ, stdout=log, stderr=log)


def _profile(token_s: float, folder: Path) -> Path:
    """A profile of a prefill whose time grows by this with each token."""
    known = msgspec.json.decode((DATA / "llama-3.1-8b-a100-vllm-tp1.json").read_bytes())
    seconds = {str(tokens): token_s * tokens for tokens in (1, 10, 100, 1000)}
    known |= {
        "label": "field",
        "kind": "measured",
        "prefill": {"type": "points", "seconds": seconds},
    }
    path = folder / "field.json"
    path.write_bytes(msgspec.json.encode(known))
    return path


async def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    await asyncio.to_thread(process.wait)


async def _until_tested(system: Cluster) -> None:
    give_up_s = time.monotonic() + _UP_WITHIN_S
    while time.monotonic() < give_up_s:
        with suppress(aiohttp.ClientError):  # It has no ports yet.
            rows = (await system.state())["instances"]
            tests = [row["self_test"] or {} for row in rows if row["health"] == "up"]
            if sum(bool(test.get("done")) for test in tests) == len(system.servers):
                return
        if system.process.poll() is not None:
            break
        await asyncio.sleep(_LOOK_S)
    raise TimeoutError(f"the proxy has not tested all servers: {system.log.read_text()[-500:]}")
