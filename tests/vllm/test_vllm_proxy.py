"""The proxy in front of real vLLM: what clients get is what one server alone would have given
them.
"""

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.document import parse_yaml
from kvrs.config.file import Config, parse_config
from kvrs.proxy.server import Proxy
from kvrs_testkit.vllm_servers import VllmServers
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

SECRET = b"only for tests, thirty-two bytes!"
DOCUMENT = Path(__file__).parents[2] / "docs" / "guide" / "vllm.md"
PROMPT = " ".join(["ka lo mi ren sta", "vor ti el an dra", "shi pu ne go bri"] * 8)
MESSAGES = [{"role": "user", "content": "ka lo mi ren sta"}]
DEADLINE_S = 180.0


def documented_config() -> dict[str, Any]:
    """The only YAML in docs/guide/vllm.md."""
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    document: dict[str, Any] = parse_yaml(text)
    return document


@dataclass
class Front:
    """A proxy before the servers, and one of these to compare with."""

    servers: Any  # Of vLLM, or of SGLang.
    proxy: Proxy
    http: aiohttp.ClientSession

    async def state(self) -> Any:
        async with self.http.get(
            f"http://127.0.0.1:{self.proxy.admin_port}/kvrs/v1/state"
        ) as answer:
            return await answer.json()

    async def until_up(self) -> None:
        """And tested, so that all options are weighed."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(map(_is_ready, (await self.state())["instances"])):
                await asyncio.sleep(0.05)

    async def ask(self, **fields: Any) -> tuple[int, Any]:
        return await self._ask(f"http://127.0.0.1:{self.proxy.port}", fields)

    async def ask_alone(self, **fields: Any) -> tuple[int, Any]:
        """One server, without the proxy."""
        return await self._ask(self.servers.url("d0"), {"model": self.servers.model} | fields)

    async def _ask(self, url: str, fields: dict[str, Any]) -> tuple[int, Any]:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        async with self.http.post(
            url + path, json={"temperature": 0, "return_token_ids": True} | fields
        ) as answer:
            if not fields.get("stream"):
                return answer.status, await answer.json()
            raw = (await answer.read()).decode()
            return answer.status, [
                json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")
            ]

    async def hang_in_mid_stream(self, least_tokens: int) -> str:
        """Stop the decode server of the only stream, when that has begun."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for stream in (await self.state())["streams"]:
                    if stream["output_tokens"] >= least_tokens:
                        self.servers.signal(stream["decode"], signal.SIGSTOP)
                        return str(stream["decode"])
                await asyncio.sleep(0.001)


def _is_ready(row: dict[str, Any]) -> bool:
    return row["health"] == "up" and row["self_test"] is not None and row["self_test"]["done"]


@asynccontextmanager
async def open_front(servers: Any, config: Config, secret: bytes = SECRET) -> AsyncIterator[Front]:
    ports = config.proxy.model_copy(update={"port": 0, "admin_port": 0})
    proxy = Proxy(config.model_copy(update={"proxy": ports}), secret)
    await proxy.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
            front = Front(servers, proxy, http)
            await front.until_up()
            yield front
    finally:
        await proxy.close()


@pytest.fixture
async def front(vllm_servers: VllmServers) -> AsyncIterator[Front]:
    async with open_front(vllm_servers, vllm_servers.config) as opened:
        yield opened


async def test_a_self_test_sees_what_vllm_does(front: Front) -> None:
    """KV really moves over NIXL, and servers that are alike compute the same tokens. How sampled
    streams are continued depends on the model runner.
    """
    found = {row["id"]: row["self_test"] for row in (await front.state())["instances"]}

    assert all(test["moves_kv"] for test in found.values()), found
    assert all(not test["differs_from"] for test in found.values()), found
    assert {test["weights"] for test in found.values()} == {"right"}, found  # Prefill's, too.
    exact = {test["continues"] for name, test in found.items() if name[0] == "d"}
    assert exact <= {"exact greedy", "exact seeded"}


def text_and_ids(answer: Any) -> tuple[str, list[int], str | None]:
    """Text, ids and finish reason of a whole answer, or of all events of a streamed one."""
    events = answer if isinstance(answer, list) else [answer]
    choices = [choice for event in events for choice in event["choices"]]
    said = [
        choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        for choice in choices
    ]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    return "".join(part.get("content") or "" for part in said), ids, choices[-1]["finish_reason"]


def test_documented_config_is_valid() -> None:
    """A config that works as printed is at least one that the proxy takes."""
    config = parse_config(documented_config())

    assert config.cluster.backend.value == "vllm"


async def test_documented_config_works(vllm_servers: VllmServers) -> None:
    """But for the model's directory and the ports, which are those of the servers at hand."""
    document = documented_config()
    document["cluster"]["model"] = vllm_servers.model
    for node in document["cluster"]["nodes"]:
        for instance in node["instances"]:
            instance["port"] = int(vllm_servers.url(instance["id"]).rpartition(":")[2])

    async with open_front(vllm_servers, parse_config(document)) as front:
        status, answer = await front.ask(prompt=PROMPT, max_tokens=12)
        _, alone = await front.ask_alone(prompt=PROMPT, max_tokens=12)

    assert status == 200
    assert text_and_ids(answer) == text_and_ids(alone)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": PROMPT, "max_tokens": 40},
        {"prompt": PROMPT, "max_tokens": 40, "stream": True},
        {"prompt": "ka lo mi", "max_tokens": 40},
        {"prompt": PROMPT, "max_tokens": 40, "min_tokens": 40},
        {"prompt": PROMPT, "max_tokens": 40, "stop": ["an", "q"]},
        {"prompt": PROMPT, "max_tokens": 40, "stop": ["an", "q"], "stream": True},
        {"prompt": PROMPT, "max_tokens": 8, "logprobs": 2},
        {"messages": MESSAGES, "max_tokens": 30},
        {"messages": MESSAGES, "max_tokens": 30, "stream": True},
    ],
    ids=lambda fields: ",".join(fields),
)
async def test_answers_are_those_of_one_server(front: Front, fields: dict[str, Any]) -> None:
    """Through prefill, hand-off and decode: the same ids, text and finish as from a server that did
    it all itself.
    """
    status, answer = await front.ask(**fields)
    _, alone = await front.ask_alone(**fields)

    assert status == 200
    assert text_and_ids(answer) == text_and_ids(alone)


async def test_hand_off_is_pulled(front: Front) -> None:
    """The healthy path moves KV: a decode server that computed prompts itself would give the same
    tokens.
    """
    before = {name: front.servers.counters(name)["pulled_tokens"] for name in ("d0", "d1")}

    _, answer = await front.ask(prompt="sol tek qui " * 20, max_tokens=4)

    pulled = sum(front.servers.counters(name)["pulled_tokens"] - before[name] for name in before)
    assert pulled == answer["usage"]["prompt_tokens"]


async def test_a_clients_own_transfer_parameters_reach_no_engine(front: Front) -> None:
    """An empty block list would end vLLM's engine with all its streams."""
    hostile = {
        "do_remote_prefill": True,
        "remote_block_ids": [],
        "remote_engine_id": "x",
        "remote_request_id": "x",
    }

    status, answer = await front.ask(prompt=PROMPT, max_tokens=8, kv_transfer_params=hostile)

    _, alone = await front.ask_alone(prompt=PROMPT, max_tokens=8)
    assert status == 200
    assert text_and_ids(answer) == text_and_ids(alone)
    assert {row["health"] for row in (await front.state())["instances"]} == {"up"}


async def test_a_refusal_of_vllm_is_a_fault_of_the_client(front: Front) -> None:
    """The client gets the error, and no instance is suspected."""
    status, answer = await front.ask(prompt=[1, 600], max_tokens=4)

    assert status == 400
    assert "600" in answer["error"]["message"]
    assert (await front.state())["recoveries"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True},
        {"messages": MESSAGES, "max_tokens": 500, "ignore_eos": True},
    ],
    ids=["completion", "chat"],
)
async def test_a_stream_goes_on_when_its_decode_server_hangs(
    front: Front, fields: dict[str, Any]
) -> None:
    """Silence is all that there is to see: vLLM's /health need not know of it."""
    _, alone = await front.ask_alone(**fields)

    asked = asyncio.create_task(front.ask(stream=True, **fields))
    victim = await front.hang_in_mid_stream(least_tokens=20)
    try:
        status, answer = await asked
    finally:
        front.servers.signal(victim, signal.SIGCONT)

    assert status == 200
    assert text_and_ids(answer) == text_and_ids(alone)
    recoveries = (await front.state())["recoveries"]
    assert [row["from"] for row in recoveries] == [victim]
    await front.until_up()


async def assert_steps_are_reported(front: Front, within_s: float) -> None:
    """The server that decodes has a time of a step, which a stream's tokens have taken on the mean;
    one that only prefills has none.
    """
    async with asyncio.timeout(DEADLINE_S):
        known: dict[str, float] = {}
        while not any(known.values()):
            began_s = time.monotonic()
            status, _ = await front.ask(prompt=PROMPT, max_tokens=1200, ignore_eos=True)
            token_s = (time.monotonic() - began_s) / 1200
            assert status == 200
            rows = (await front.state())["instances"]
            known = {row["id"]: row["load"]["step_s"] for row in rows if row["role"] == "decode"}
            others = [row["load"]["step_s"] for row in rows if row["role"] == "prefill"]
    assert set(others) == {0.0}
    assert max(known.values()) < within_s, (known, token_s)
    print("step_s", known, "seconds of a token, with prefill and network", token_s)


async def test_the_steps_of_a_server_are_known(front: Front) -> None:
    """By the series that this version of vLLM has."""
    await assert_steps_are_reported(front, within_s=10.0)
