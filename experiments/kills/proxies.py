"""Streams under a series of proxy kills at random moments, compared with the same requests
undisturbed: completions that clients resume by `Last-Event-ID` or replay, background responses that
the unmodified `openai` client resumes, and messages that the unmodified `anthropic` client replays.
"""

import argparse
import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anthropic
import httpx2
import openai
import uvloop

from experiments.record import Record
from experiments.two_pairs import PACE
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.resuming import BARS, Clients, Load, Way, bodies, is_exact, quiet_run, verdict

REQUESTS = 48
TOKENS = 320
# Of ten clients seven continue and three replay.
WAYS = [Way.REPLAY if number % 10 in (2, 5, 8) else Way.CONTINUE for number in range(20)]
PAUSE_S = (0.0, 2.0)
DECODE = (InstanceId("d0"), InstanceId("d1"))
API_CLIENTS = 6
API_TOKENS = 120
GIVE_UP_S = 120.0
RETRY_S = 0.05
_LAST = ("response.completed", "response.incomplete", "message_stop", "response.failed")


def settings(mirror: str, seed: int) -> Config:
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0, "mirror": mirror},
            "cluster": {"engine": {"seed": seed, "pace": PACE}},
            "gossip": {"enabled": True},
        }
    )


async def kill_all(
    cluster: Cluster, options: argparse.Namespace, rng: random.Random
) -> dict[str, Any]:
    """Kill at random times, each some time after the last killed proxy is back; return how many
    streams each proxy had.
    """
    hit: list[int] = []
    instances = 0
    for _ in range(options.kills):
        await asyncio.to_thread(cluster.wait_all_up)
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        number = rng.randrange(len(cluster.proxies))
        hit.append(len((await asyncio.to_thread(cluster.state, number))["streams"]))
        if options.mix:
            instances += 1
            await asyncio.to_thread(cluster.kill, rng.choice(DECODE))
        cluster.proxies[number].signal(signal.SIGKILL)
    await asyncio.to_thread(cluster.wait_all_up)
    return {
        "kills": len(hit),
        "instance_kills": instances,
        "kills_without_a_stream": hit.count(0),
        "streams_hit": sum(hit),
    }


async def of_completions(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    asked = bodies(REQUESTS, TOKENS, options.seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = Clients(session, lambda: cluster.urls, asked)
        quiet = await quiet_run(clients, REQUESTS)
        load = Load(clients, WAYS, REQUESTS, options.seed)
        loading = asyncio.create_task(load.run())
        await asyncio.sleep(2.0)
        started_s = time.monotonic()
        killed = await kill_all(cluster, options, random.Random(options.seed))
        took_s = time.monotonic() - started_s
        load.stop()
        await loading
        states = [
            await asyncio.to_thread(cluster.state, number) for number in range(len(cluster.proxies))
        ]
    left = {"streams": sum(len(state["streams"]) for state in states)}
    return (
        killed
        | verdict(load.found, quiet)
        | {"left_at_the_end": left, "kills_took_s": round(took_s, 1)}
    )


def completions_text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['proxies']} proxies, mirror {result['mirror']}: {result['kills']} "
        f"kills in {result['kills_took_s']:.0f} s"
        + (
            f", with each a decode instance ({result['instance_kills']})"
            if result["instance_kills"]
            else ""
        ),
        f"streams of the killed proxies {result['streams_hit']} (kills without a stream: "
        f"{result['kills_without_a_stream']})",
        f"streams {result['streams']} {result['by_way']}, {result['tokens']} tokens; "
        f"{result['streams_that_broke']} broke off, "
        f"{result['breaks']} times in all, one of them {result['most_breaks_of_a_stream']} times",
        ", ".join(f"{bar} {result[bar]}" for bar in BARS),
        f"longest gap of a stream that broke and continued, in s: {result['longest_gap_s']}",
        f"what clients were told meanwhile: {result['refusals']}",
    ]
    lines += [f"{count} x {failure}" for failure, count in result["failures"].items()]
    return "\n".join([*lines, "PASSED" if result["passed"] else "FAILED"]) + "\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """The content of one answer at a client, over all its connections."""

    text: str
    ending: str
    output_tokens: int
    events: int


@dataclass
class Seen:
    answers: list[tuple[int, Answer | None]] = field(default_factory=list)  # By kind of request.
    breaks: int = 0
    # Sequence numbers that are not one above the last, or events that are others when they come
    # again.
    number_gaps: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class ApiClient:
    """A client of one request. Each connection goes to the next proxy."""

    def __init__(self, cluster: Cluster, model: str, number: int, seen: Seen) -> None:
        self._cluster = cluster
        self._seen = seen
        self._proxy = number
        self._model = model
        self._number = number
        self._temperature = 0.8 if number % 2 else 0.0

    @property
    def _url(self) -> str:
        urls = self._cluster.urls
        self._proxy += 1
        return urls[self._proxy % len(urls)]

    async def ask(self) -> Answer | None:
        """One answer, whatever breaks; None: it was given up or has failed."""
        events: list[dict[str, Any]] = []
        gives_up_s = time.monotonic() + GIVE_UP_S
        while not events or events[-1]["type"] not in _LAST:
            if time.monotonic() > gives_up_s:
                return None
            if events:
                self._seen.breaks += 1
            try:
                await self._listen(events)
            except (openai.APIError, anthropic.APIError, httpx2.TransportError, OSError) as error:
                self._seen.errors[type(error).__name__] += 1
                await asyncio.sleep(RETRY_S)
        return self._answer(events)

    async def _listen(self, events: list[dict[str, Any]]) -> None:
        """Take events from one connection until it ends."""
        raise NotImplementedError

    def _answer(self, events: list[dict[str, Any]]) -> Answer | None:
        raise NotImplementedError


class ResponseClient(ApiClient):
    """Reads a response in the background, and the rest of its events from the next proxy."""

    async def _listen(self, events: list[dict[str, Any]]) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{self._url}/v1", api_key="unused", max_retries=2, timeout=30
        ) as client:
            if events:
                stream = await client.responses.retrieve(
                    events[0]["response"]["id"],
                    stream=True,
                    starting_after=events[-1]["sequence_number"],
                )
            else:
                stream = await client.responses.create(
                    model=self._model,
                    input=f"Count {self._number} and go on",
                    max_output_tokens=API_TOKENS,
                    temperature=self._temperature,
                    background=True,
                    stream=True,
                    extra_body={"seed": self._number, "ignore_eos": True},
                )
            async for event in stream:
                each = event.model_dump()
                expected = events[-1]["sequence_number"] + 1 if events else 0
                self._seen.number_gaps += each["sequence_number"] != expected
                events.append(each)

    def _answer(self, events: list[dict[str, Any]]) -> Answer | None:
        last = events[-1]
        deltas = (e["delta"] for e in events if e["type"] == "response.output_text.delta")
        usage = last["response"]["usage"]
        tokens = 0 if usage is None else usage["output_tokens"]
        return Answer("".join(deltas), last["type"], tokens, len(events))


class MessageClient(ApiClient):
    """Reads a message by its key, from the beginning at each proxy."""

    _made = itertools.count()

    def __init__(self, cluster: Cluster, model: str, number: int, seen: Seen) -> None:
        super().__init__(cluster, model, number, seen)
        self._key = f"message-{next(self._made)}"

    async def _listen(self, events: list[dict[str, Any]]) -> None:
        async with anthropic.AsyncAnthropic(
            base_url=self._url, api_key="unused", max_retries=2, timeout=30
        ) as client:
            stream = await client.messages.create(
                model=self._model,
                messages=[{"role": "user", "content": f"Count {self._number} and go on"}],
                max_tokens=API_TOKENS,
                stream=True,
                extra_headers={"Idempotency-Key": self._key},
                extra_body={
                    "temperature": self._temperature,
                    "seed": self._number,
                    "ignore_eos": True,
                },
            )
            place = 0
            async for event in stream:
                each = event.model_dump()
                if place < len(events):
                    self._seen.number_gaps += each != events[place]
                else:
                    events.append(each)
                place += 1

    def _answer(self, events: list[dict[str, Any]]) -> Answer | None:
        deltas = (e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
        ended = events[-2]
        tokens = ended["usage"]["output_tokens"]
        return Answer("".join(deltas), ended["delta"]["stop_reason"], tokens, len(events))


CLIENTS: dict[str, type[ApiClient]] = {"responses": ResponseClient, "messages": MessageClient}


async def of_clients(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    make = CLIENTS[options.api]
    async with openai.AsyncOpenAI(base_url=f"{cluster.urls[0]}/v1", api_key="unused") as client:
        model = (await client.models.list()).data[0].id
    numbers = range(API_CLIENTS)
    quiet = [await make(cluster, model, number, Seen()).ask() for number in numbers]
    assert all(each is not None and each.ending != _LAST[-1] for each in quiet), quiet
    seen, stopping = Seen(), asyncio.Event()

    async def load(number: int) -> None:
        while not stopping.is_set():
            answer = await make(cluster, model, number, seen).ask()
            seen.answers.append((number, answer))

    loading = [asyncio.create_task(load(number)) for number in numbers]
    started_s = time.monotonic()
    killed = await kill_all(cluster, options, random.Random(options.seed))
    stopping.set()
    await asyncio.gather(*loading)
    return {
        "kills": options.kills,
        "instance_kills": killed["instance_kills"],
        options.api: len(seen.answers),
        "breaks": seen.breaks,
        "lost": sum(answer is None for _, answer in seen.answers),
        "different": sum(a is not None and a != quiet[number] for number, a in seen.answers),
        "number_gaps": seen.number_gaps,
        "errors_seen": dict(seen.errors),
        "kills_took_s": round(time.monotonic() - started_s, 1),
    }


def clients_text(result: dict[str, Any], api: str) -> str:
    also = f", with each a decode instance ({result['instance_kills']})" if result["mix"] else ""
    order = "gaps or repeats in sequence numbers"
    if api == "messages":
        order = "events that were others when they came again"
    return "\n".join(
        [
            f"{result['proxies']} proxies, {result['kills']} kills in "
            f"{result['kills_took_s']:.0f} s{also}, {API_CLIENTS} clients, half of the requests "
            f"sampled",
            f"{result[api]} {api} of {API_TOKENS} tokens; connections broke "
            f"{result['breaks']} times while one was under way",
            f"lost {result['lost']}, different {result['different']}, {order} "
            f"{result['number_gaps']}",
            f"errors of the client meanwhile: {result['errors_seen']}",
            "PASSED\n" if result["passed"] else "FAILED\n",
        ]
    )


def run(options: argparse.Namespace) -> int:
    options.kills, options.proxies = options.kills or 100, options.proxies or 2
    options.mirror, options.api = options.mirror or "async", options.api or "completions"
    is_client = options.api in CLIENTS
    record = Record(options.seed, timed=not is_client)
    with Cluster(settings(options.mirror, options.seed), print, options.proxies) as cluster:
        measured = uvloop.run((of_clients if is_client else of_completions)(cluster, options))
    result = {key: getattr(options, key) for key in ("proxies", "mirror", "mix")} | measured
    if is_client:
        bad = result["lost"] + result["different"] + result["number_gaps"]
        result["passed"] = not bad and result["breaks"] > 0
    else:
        is_whole = is_exact(result) and not result["left_at_the_end"]["streams"]
        result["passed"] = is_whole and result["streams_that_broke"] > 0
    more = [str(options.proxies)] if options.proxies != 2 else []
    more += ["sync"] if options.mirror == "sync" else []
    more += ["mix"] if options.mix else []
    more += [options.api] if is_client else []
    text = clients_text(result, options.api) if is_client else completions_text(result)
    print(text, end="")
    record.keep(options.out, "-".join(["proxy", *more]), result, text)
    return 0 if result["passed"] else 1
