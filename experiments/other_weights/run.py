"""Servers of another model, or of other weights under the same path, that come, go and return
around streams; each stream is compared with both models.

    python -m experiments.other_weights.run [--rounds 100] [--seed 1] [--quick] [--out DIR]

All is in one process, in memory and virtual time: one or two proxies, three scripted vLLM servers,
and agents in half of the rounds of weights.
"""

import argparse
import asyncio
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import parse_config
from kvrs.core.fleet.self_tests import Standing
from kvrs.core.model.member import Health
from kvrs.ids import InstanceId
from kvrs.protocol.rows import RegionReport
from kvrs.proxy.server import Proxy
from kvrs_testkit.memory_loop import MemoryLoop
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.scripted_agent import ScriptedAgent
from kvrs_testkit.scripted_model import Arithmetic, save_tokenizer, token_after
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import CONFIG

ROUNDS, QUICK_ROUNDS = 100, 10
NAMES = ("d0", "d1", "d2")
RIGHT, WRONG = Arithmetic(), Arithmetic(1)
TOKEN_S, MAX_TOKENS = 0.05, 80
WAIT_S = 8.0
_PORT = 21_000
_LOOK_S, _READY_S = 0.25, 120.0
KINDS = ("models, with files", "models, without files", "weights", "weights, agents")


@dataclass(frozen=True, slots=True)
class Stream:
    """The answer to a client, and the proxy's knowledge when the stream began."""

    number: int
    status: int
    is_marked: bool
    error: str  # Code of the error event; empty: none.
    is_whole: bool
    right: int  # Tokens that the right model computes behind those before them.
    wrong: int
    text_differs: bool  # The text is not that of the ids by the right tokenizer.
    wrong_was_known: bool  # Each server with other weights was known as such at the begin.

    @property
    def mixes(self) -> bool:
        return self.is_whole and not self.is_marked and bool(self.right and self.wrong)

    @property
    def is_wrong_unmarked(self) -> bool:
        return self.wrong > 0 and not self.right and not self.is_marked

    @property
    def is_false(self) -> bool:
        """A whole answer whose text or head is other than promised."""
        return self.is_whole and not self.is_marked and (self.mixes or self.text_differs)


@dataclass
class World:
    """Servers, agents and proxies of one round."""

    kind: str
    rng: random.Random
    directory: Path
    servers: dict[str, ScriptedVllm] = field(default_factory=dict)
    agents: dict[str, ScriptedAgent] = field(default_factory=dict)
    proxies: list[Proxy] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    known_after_s: list[float] = field(default_factory=list)
    first_token_s: float = 0.0  # From the begin of all to the first token of a stream.

    @property
    def has_models(self) -> bool:
        return self.kind.startswith("models")

    async def kill(self, name: str) -> None:
        self.down.add(name)
        await self.servers[name].kill()
        if (agent := self.agents.get(name)) is not None:
            agent.regions = [_region(name, self.servers[name], is_alive=False)]

    async def start(self, name: str, arithmetic: Arithmetic) -> None:
        """Start a server that is down, with these weights or another model."""
        server = self.servers[name]
        server.arithmetic = arithmetic
        if self.has_models:
            server.root = str(self.directory / ("right" if arithmetic is RIGHT else "wrong"))
        if (agent := self.agents.get(name)) is not None:
            agent.regions = [_region(name, server, is_alive=True)]
        await server.start()
        self.down.discard(name)

    async def restart_proxy(self, at: int) -> None:
        await self.proxies[at].close()
        self.proxies[at] = proxy = Proxy(self.configs[at], SECRET)
        await proxy.start()

    def knows(self, proxy: Proxy) -> bool:
        """Return whether the proxy knows all servers with other weights that it uses."""
        control = proxy.parts.driver.control
        wrong = [
            InstanceId(name) for name, each in self.servers.items() if each.arithmetic is WRONG
        ]
        return all(
            control.self_tests.standing(name) is Standing.OTHER
            for name in wrong
            if control.instances.known[name].health is Health.UP
        )

    async def until_known(self, name: str) -> None:
        """Measure the time until the first proxy knows a server that was just started."""
        loop = asyncio.get_running_loop()
        begun_s, control = loop.time(), self.proxies[0].parts.driver.control
        while loop.time() < begun_s + 30.0 and name not in self.down:
            if control.self_tests.standing(InstanceId(name)) is Standing.OTHER:
                self.known_after_s.append(loop.time() - begun_s)
                return
            await asyncio.sleep(0.05)


def _region(name: str, server: ScriptedVllm, *, is_alive: bool) -> RegionReport:
    digest = "right" if server.arithmetic is RIGHT else "wrong"
    return RegionReport(InstanceId(name), "0" * 16, is_alive, 8, 64, 16, digest)


@asynccontextmanager
async def opened(kind: str, rng: random.Random, number: int) -> AsyncIterator[World]:
    """Open a world whose servers are right, up and compared."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        world = World(kind, rng, directory)
        (directory / "right").mkdir()
        save_tokenizer(directory / "right")
        fields = CONFIG | {"vocab_size": 1 << 16}
        (directory / "right" / "config.json").write_text(json.dumps(fields))
        if kind == "models, with files":
            _save_other(directory)
        script = VllmScript()
        script.pause_s = TOKEN_S
        for at, name in enumerate(NAMES):
            server = ScriptedVllm(name, f"n{at}", role="decode", script=script)
            server.arithmetic, server.root = RIGHT, str(directory / "right")
            world.servers[name] = server
            await server.start()
            stack.push_async_callback(server.close)
            if kind == "weights, agents":
                world.agents[name] = agent = ScriptedAgent(f"agent-n{at}", f"n{at}")
                agent.regions = [_region(name, server, is_alive=True)]
                await agent.start()
                stack.push_async_callback(agent.close)
        for at in range(2 if kind == "weights" else 1):
            config = parse_config(_document(world, at, _PORT + 10 * number))
            world.configs.append(config)
            world.proxies.append(proxy := Proxy(config, SECRET))
            await proxy.start()
        try:
            world.first_token_s = await _first_token_s(world.proxies[0])
            await _until_compared(world)
            yield world
        finally:
            for proxy in world.proxies:
                await proxy.close()


def _save_other(directory: Path) -> None:
    """Save files of another model, whose tokenizer makes other text of each id."""
    other = directory / "wrong"
    other.mkdir()
    tokenizer = json.loads((directory / "right" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    fields = CONFIG | {"vocab_size": 1 << 16, "num_hidden_layers": 3}
    (other / "config.json").write_text(json.dumps(fields))


def _document(world: World, at: int, port: int) -> dict[str, Any]:
    proxy: dict[str, Any] = {"id": f"proxy-{at}", "port": 0, "admin_port": 0}
    if world.kind == "weights":
        proxy |= {"peer_port": port + at, "peers": [{"id": f"proxy-{1 - at}"}]}
        proxy["peers"][0]["peer_port"] = port + 1 - at
    nodes = [
        {
            "id": f"n{number}",
            "agent": {"port": world.agents[name].port if world.agents else 0},
            "instances": [{"id": name, "role": "decode", "port": world.servers[name].port}],
        }
        for number, name in enumerate(NAMES)
    ]
    model = None if world.has_models else str(world.directory / "right")
    return {
        "proxy": proxy | {"load_interval_s": 0.25},
        "cluster": {"backend": "vllm", "model": model, "nodes": nodes},
        "policy": {"recovery": {"wait_s": WAIT_S}},
        **({"backup": {"mode": "local"}} if world.agents else {}),
    }


async def _first_token_s(proxy: Proxy) -> float:
    """Time to the first token of a stream that is sent at once, which waits for no test."""
    begun_s, body = asyncio.get_running_loop().time(), {"prompt": [3], "max_tokens": 2}
    url = f"http://127.0.0.1:{proxy.port}/v1/completions"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body | {"temperature": 0, "stream": True}) as response,
    ):
        await response.content.readuntil(b"\n\n")
        first_s = asyncio.get_running_loop().time() - begun_s
        await response.read()
    return first_s


async def _until_compared(world: World) -> None:
    async with asyncio.timeout(_READY_S):
        for proxy in world.proxies:
            tests = proxy.parts.driver.control.self_tests
            while {tests.standing(InstanceId(name)) for name in NAMES} != {Standing.RIGHT}:
                await asyncio.sleep(_LOOK_S)


async def ask(world: World, number: int, tokenizer: Tokenizer) -> Stream | None:
    """Run a greedy stream at a random proxy; None: it had no answer, or the proxy was ended."""
    proxy = world.rng.choice(world.proxies)
    prompt = [world.rng.randrange(3, 200) for _ in range(4)]
    body = {"prompt": prompt, "max_tokens": world.rng.randint(10, MAX_TOKENS), "temperature": 0}
    body |= {"stream": True, "return_token_ids": True}
    was_known = world.knows(proxy)
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://127.0.0.1:{proxy.port}/v1/completions", json=body) as response,
        ):
            raw, mark = await response.read(), response.headers.get("X-Kvrs-Exact")
    except aiohttp.ClientError:
        return None
    if response.status != 200:
        return Stream(number, response.status, False, "", False, 0, 0, False, was_known)
    ids, text, error = list[int](), "", ""
    for event in events_of(raw):
        if event.startswith(b"data: {"):
            said = json.loads(event[6:])
            error = said.get("error", {}).get("code") or error
            for choice in said.get("choices", ()):
                ids += choice.get("token_ids") or ()
                text += choice["text"]
    history, right = list(prompt), 0
    for token in ids:
        right += token == token_after(history)
        history.append(token)
    is_whole = b"data: [DONE]" in raw
    differs = is_whole and right == len(ids) and text != tokenizer.decode(ids)
    wrong = len(ids) - right
    return Stream(number, 200, mark == "no", error, is_whole, right, wrong, differs, was_known)


async def play(world: World, number: int) -> list[Stream]:
    """Play one round: what is drawn happens while streams run."""
    rng, tokenizer = world.rng, Tokenizer.from_file(str(world.directory / "right/tokenizer.json"))
    streams: list[asyncio.Task[Stream | None]] = []
    watches: list[asyncio.Task[None]] = []
    victim = rng.choice(NAMES)  # One server comes with other weights; the others with the right.
    for _ in range(rng.randint(5, 9)):
        streams += [
            asyncio.create_task(ask(world, number, tokenizer)) for _ in range(rng.randint(1, 4))
        ]
        await asyncio.sleep(rng.uniform(0.1, 2.0))
        name = rng.choice(NAMES)
        if rng.random() < 0.5:
            name = victim
        if name in world.down:
            is_wrong = name == victim and rng.random() < 0.7
            await world.start(name, WRONG if is_wrong else RIGHT)
            if is_wrong and not world.has_models:
                watches.append(asyncio.create_task(world.until_known(name)))
        elif len(world.down) < 2:
            await world.kill(name)
        if len(world.proxies) > 1 and rng.random() < 0.2:
            await world.restart_proxy(rng.randrange(2))
        await asyncio.sleep(rng.choice([0.1, 1.0, 4.0, 12.0]))
    for name in [*world.down]:
        await world.start(name, RIGHT)
    found = [stream for stream in await asyncio.gather(*streams) if stream is not None]
    for watch in watches:
        watch.cancel()
    return found


@dataclass
class Found:
    """The rounds of one kind."""

    streams: list[Stream] = field(default_factory=list)
    known_after_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


async def run(rounds: int, seed: int) -> dict[str, Found]:
    found = {kind: Found() for kind in KINDS}
    for number in range(rounds):
        for at, kind in enumerate(KINDS):
            rng = random.Random(f"{seed}/{kind}/{number}")
            async with opened(kind, rng, number * len(KINDS) + at) as world:
                found[kind].streams.extend(await play(world, number))
                found[kind].known_after_s.extend(world.known_after_s)
                found[kind].first_token_s.append(world.first_token_s)
    return found


def figures_of(found: Found) -> dict[str, Any]:
    streams, times = found.streams, sorted(found.known_after_s)
    return {
        "streams": len(streams),
        "whole, unmarked": sum(each.is_whole and not each.is_marked for each in streams),
        "marked": sum(each.is_marked for each in streams),
        "of two models as whole": sum(each.mixes for each in streams),
        "other text or head than promised": sum(each.is_false for each in streams),
        "of the wrong model, unmarked, once known": sum(
            each.is_wrong_unmarked and each.wrong_was_known for each in streams
        ),
        "of the wrong model, unmarked, before": sum(
            each.is_wrong_unmarked and not each.wrong_was_known for each in streams
        ),
        "errors": Counter(each.error for each in streams if each.error),
        "statuses": Counter(each.status for each in streams if each.status != 200),
        "known after s, median": round(times[len(times) // 2], 2) if times else None,
        "known after s, most": round(times[-1], 2) if times else None,
        "first token after s, most": round(max(found.first_token_s), 2),
    }


def table_of(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table("", *figures)
    for name in next(iter(figures.values())):
        shown = [of[name] for of in figures.values()]
        table.add_row(
            name,
            *(
                ", ".join(f"{k}: {n}" for k, n in each.items())
                if isinstance(each, Counter)
                else str(each)
                for each in shown
            ),
        )
    return table


BARS = (
    "of two models as whole",
    "other text or head than promised",
    "of the wrong model, unmarked, once known",
)


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--rounds", type=int, default=None, help="rounds of each kind")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    options: argparse.Namespace = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    record = Record(options.seed, timed=False)
    logging.disable(logging.CRITICAL)  # Each death is a warning.
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        found = runner.run(run(rounds, options.seed))
    figures = {kind: figures_of(each) for kind, each in found.items()}
    console = Console(record=True, width=150)
    console.print(table_of(figures))
    bad = [
        asdict(each)
        for of in found.values()
        for each in of.streams
        if each.mixes or each.is_false or (each.is_wrong_unmarked and each.wrong_was_known)
    ]
    missed = [
        f"{kind}: {of[bar]} {bar}; bar 0" for kind, of in figures.items() for bar in BARS if of[bar]
    ]
    console.print("missed:", missed or "nothing", markup=False)
    document = {"rounds": rounds, "kinds": figures, "bad": bad}
    record.keep(options.out, "other_weights", document, console.export_text())
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
