"""Cuts on a real cluster: four engine processes and a proxy, and a relay before each decode
instance that ends connections.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from experiments.cuts.relay import Cuts, Relay, Tried
from kvrs.config.file import Config, parse_config
from kvrs.protocol.instance import Role
from kvrs_testkit.processes import Processes
from tests.proxy.cuts import Case, CutOffError, ask, difference

AT_ONCE = 4
TOKENS = 24
KINDS = ("eof", "reset")
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
_PROMPT = "The quick brown fox jumps over the lazy dog, and then it "


async def real(count: int, seed: int) -> tuple[list[Tried], int]:
    """`count` random cuts of streams of engine processes; and how many streams they belong to."""
    chosen, cuts = random.Random(seed), Cuts()
    with Processes(parse_config({"proxy": {"port": 0, "admin_port": 0}})) as processes:
        names = [str(instance.id) for _, instance in processes.config.cluster.instances()]
        processes.start(*names)
        await asyncio.to_thread(processes.wait_ready, *names)
        async with _relays(processes.config, cuts) as config:
            await asyncio.to_thread(processes.start_proxy, config)
            url = f"http://{config.proxy.host}:{config.proxy.port}"
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
                known = [
                    (case, *await _undisturbed(http, url, case)) for case in await _cases(http, url)
                ]
                return await _cut(http, url, cuts, known, count, chosen), len(known)


@asynccontextmanager
async def _relays(config: Config, cuts: Cuts) -> AsyncIterator[Config]:
    """The configuration as the proxy sees it: decode instances are reached through relays."""
    document = config.model_dump(mode="json")
    relays = []
    for node in document["cluster"]["nodes"]:
        for instance in node["instances"]:
            if instance["role"] == Role.DECODE:
                relays.append(Relay(instance["host"], instance["port"], cuts))
                instance["port"] = await relays[-1].start()
    try:
        yield parse_config(document)
    finally:
        for relay in relays:
            await relay.close()


async def _undisturbed(
    http: aiohttp.ClientSession, url: str, case: Case
) -> tuple[list[bytes], int]:
    """The case's answer, the same twice, and the number of events between which it can be cut."""
    expected = await ask(http, url, case)
    if (again := await ask(http, url, case)) != expected:
        raise CutOffError(
            f"{case.name} is not deterministic: {difference(b''.join(again), b''.join(expected))}"
        )
    events = max(part.count(b"\n\n") for part in expected) if case.body.get("stream") else TOKENS
    return expected, events


async def _cut(
    http: aiohttp.ClientSession,
    url: str,
    cuts: Cuts,
    known: list[tuple[Case, list[bytes], int]],
    count: int,
    chosen: random.Random,
) -> list[Tried]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Tried:
        case, expected, events = known[number % len(known)]
        # Before the first event too; what is after the last is no cut.
        kind, event, user = chosen.choice(KINDS), chosen.randrange(events), f"cut-{number}"
        cuts.pending[user.encode()] = (event, kind)
        async with gate:
            try:
                got, wrong = await ask(http, url, case, user=user), None
            except CutOffError as error:
                got, wrong = expected, str(error)
        if cuts.take(user.encode()) is not None:
            wrong = "was not cut"
        elif got != expected:
            wrong = difference(b"".join(got), b"".join(expected))
        return Tried(case.name, kind, event, wrong)

    return await asyncio.gather(*(one(number) for number in range(count)))


async def _cases(http: aiohttp.ClientSession, url: str) -> list[Case]:
    cases = [*_completions(), *_chats()]
    # Stop strings that straddle tokens are only known once the output is.
    for case in list(cases[:3]):
        text = await _text(http, url, case)
        middle = len(text) // 2
        cases.append(
            _with(
                case,
                "stop",
                stop=[text[middle : middle + 5], text[middle + 1 : middle + 3] + "never"],
            )
        )
        cases.append(
            _with(
                case,
                "stop that never comes",
                stop=[text[-4:] + "x", text[middle : middle + 4] + "never"],
            )
        )
    return cases


async def _text(http: aiohttp.ClientSession, url: str, case: Case) -> str:
    async with http.post(url + case.path, json=case.body | {"stream": False}) as response:
        answer: dict[str, Any] = await response.json()
    text: str = answer["choices"][0]["text"]
    return text


def _completions() -> Iterator[Case]:
    sampled = {"temperature": 1.0, "seed": 11}
    plain = _completion("greedy")
    yield plain
    yield _completion("sampled", **sampled)
    yield _completion(
        "sampled multi-byte",
        prompt="Où est né l'empereur 漢? ",
        **sampled | {"seed": 5, "top_p": 0.95},
    )
    yield _completion("sampled, top_k, ids", **sampled | {"top_k": 20}, return_token_ids=True)
    yield _completion("usage", stream_options={"include_usage": True})
    yield _completion("logprobs", logprobs=3, **sampled)
    yield _completion(
        "penalties", presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, **sampled
    )
    yield _completion("min_tokens", min_tokens=20, **sampled | {"seed": 12})
    yield _completion("three choices", n=3, stream_options={"include_usage": True}, **sampled)
    yield _completion("echo", echo=True, **sampled)
    yield _completion("whole", stream=False, logprobs=2, return_token_ids=True, **sampled)
    yield _completion("whole choices", stream=False, n=2, **sampled)
    yield _completion("long prompt", prompt=_PROMPT * 12)


def _chats() -> Iterator[Case]:
    sampled = {"temperature": 0.9, "seed": 21}
    yield _chat("greedy")
    yield _chat("sampled, usage", stream_options={"include_usage": True}, **sampled)
    yield _chat("logprobs", logprobs=True, top_logprobs=4, **sampled)
    yield _chat("tools", tools=_TOOLS, return_token_ids=True, **sampled)
    yield _chat("two choices", n=2, **sampled)
    yield _chat("whole", stream=False, logprobs=True, **sampled)


def _completion(name: str, **fields: Any) -> Case:
    body = {
        "prompt": _PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    return Case(name, "/v1/completions", body | fields)


def _chat(name: str, **fields: Any) -> Case:
    body = {
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    return Case(f"chat {name}", "/v1/chat/completions", body | {"ignore_eos": True} | fields)


def _with(case: Case, what: str, **fields: Any) -> Case:
    return Case(f"{case.name}, {what}", case.path, case.body | fields)
