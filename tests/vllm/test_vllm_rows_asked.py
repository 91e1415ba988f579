"""The proxy in front of real vLLM with its own CPU tier and kvrs in that: a stream that is cut goes
on out of the memory of the server that was killed.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvrs.config.file import Config
from kvrs.config.policy import PolicyName
from kvrs.protocol.instance import MEMORY
from kvrs_testkit.vllm_rows import RowServers, prompt_of
from kvrs_testkit.vllm_servers import PAGE_TOKENS
from tests.vllm.marks import REAL_VLLM
from tests.vllm.test_vllm_proxy import DEADLINE_S, Front, open_front

pytestmark = REAL_VLLM

TOKENS = 400
AGENT = "agent-n0"
SHOWN = ("option", "predicted_s", "real_s", "gap_s", "loaded_tokens", "computed_tokens")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowServers]:
    with RowServers(tmp_path_factory.mktemp("rows")) as servers:
        servers.start_all()
        yield servers


@pytest.fixture
async def front(servers: RowServers) -> AsyncIterator[Front]:
    """Restore is chosen whatever costs less: so short a history is soon computed, too."""
    config = always_restoring(servers.config)
    async with open_front(servers, config, servers.secret) as front:
        yield front


def always_restoring(config: Config) -> Config:
    policy = config.policy.model_copy(update={"name": PolicyName.ALWAYS_RESTORE})
    return config.model_copy(update={"policy": policy})


async def cut_stream(front: Front, seed: int, number: signal.Signals) -> tuple[list[int], int]:
    """A stream whose server gets SIGKILL after some tokens, once its agent has got the signal;
    return its ids, and how many tokens the other server has loaded for it.
    """
    draw = random.Random(seed)
    prompt = draw.choices(range(5, 200), k=draw.randrange(100, 400))
    asked = asyncio.create_task(
        front.ask(prompt=prompt, max_tokens=TOKENS, ignore_eos=True, stream=True)
    )
    cut, killed = draw.randrange(60, 300), ""
    async with asyncio.timeout(DEADLINE_S):
        while not killed:
            for stream in (await front.state())["streams"]:
                if stream["output_tokens"] >= cut:
                    killed = stream["decode"]
            await asyncio.sleep(0.005)
    (survivor,) = {"d0", "d1"} - {killed}
    before = front.servers.counters(survivor)["pulled_tokens"]
    if number is not signal.SIGCONT:
        os.kill(front.servers.pid(AGENT), number)
    front.servers.kill(killed)
    status, events = await asked
    assert status == 200
    ids = [i for event in events for choice in event["choices"] for i in choice["token_ids"]]
    loaded = front.servers.counters(survivor)["pulled_tokens"] - before
    calm = front.servers.complete(
        survivor, prompt=prompt, max_tokens=TOKENS, cache_salt=f"calm {seed}"
    )
    os.kill(front.servers.pid(AGENT), signal.SIGCONT)
    front.servers.start(killed)
    front.servers.wait_ready(killed)
    await front.until_up()
    assert ids == calm["choices"][0]["token_ids"]
    return prompt, int(loaded)


@pytest.mark.parametrize("seed", range(3))
async def test_a_stream_of_a_killed_server_is_restored_from_its_memory(
    front: Front, seed: int
) -> None:
    """All but its last blocks are loaded, and the record says what was done."""
    prompt, loaded = await cut_stream(front, seed, signal.SIGCONT)

    record = await counted_record(front)
    assert (record["option"], record["outcome"]) == ("restore", "resumed")
    history = len(prompt) + record["produced_tokens"]
    assert loaded >= (history // PAGE_TOKENS - 1) * PAGE_TOKENS
    assert (record["loaded_tokens"], record["computed_tokens"]) == (loaded, history - loaded)
    (link,) = (each for each in (await front.state())["links"] if each["source"] == MEMORY)
    assert link["measured"]


async def counted_record(front: Front) -> dict[str, Any]:
    """The only recovery, once it is known how much was loaded for it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            (record,) = (await front.state())["recoveries"]
            if record["loaded_tokens"] is not None:
                print({name: record[name] for name in SHOWN})
                return dict(record)
            await asyncio.sleep(0.1)


async def test_a_stream_goes_on_without_its_agent(front: Front) -> None:
    """It is stopped, and answers neither proxy nor servers: the history is computed."""
    _, loaded = await cut_stream(front, 7, signal.SIGSTOP)

    (record,) = (await front.state())["recoveries"]
    print({name: record[name] for name in SHOWN})
    assert (loaded, record["outcome"]) == (0, "resumed")


async def test_servers_have_tested_that_they_restore(front: Front) -> None:
    """Each with a row of the other one, as it came up."""
    found = {row["id"]: row["self_test"]["restores"] for row in (await front.state())["instances"]}
    assert found == {"d0": True, "d1": True}


async def test_streams_of_a_killed_server_are_restored_and_others_are_left_alone(
    front: Front,
) -> None:
    """Both are what they would be without a death; of the former all but their last blocks are
    loaded.
    """
    prompts = [prompt_of(40 + number) for number in range(8)]
    servers = front.servers
    async with asyncio.timeout(DEADLINE_S):
        asked = [
            asyncio.create_task(
                front.ask(prompt=prompt, max_tokens=TOKENS, ignore_eos=True, stream=True)
            )
            for prompt in prompts
        ]
        streams: list[dict[str, Any]] = []
        while len(streams) < len(prompts) or min(each["output_tokens"] for each in streams) < 60:
            streams = (await front.state())["streams"]
            await asyncio.sleep(0.005)
        hit = {each["id"]: each["prompt_tokens"] for each in streams if each["decode"] == "d0"}
        before = servers.counters("d1")["pulled_tokens"]
        servers.kill("d0")
        answers = await asyncio.gather(*asked)
        recoveries = (await front.state())["recoveries"]
        loaded = servers.counters("d1")["pulled_tokens"] - before
        calm = await asyncio.gather(
            *(
                asyncio.to_thread(
                    servers.complete, "d1", prompt=each, max_tokens=TOKENS, cache_salt="calm"
                )
                for each in prompts
            )
        )
    servers.start("d0")
    servers.wait_ready("d0")

    assert 0 < len(hit) < len(prompts)
    for (status, events), of_calm in zip(answers, calm, strict=True):
        assert status == 200
        ids = [i for event in events for choice in event["choices"] for i in choice["token_ids"]]
        assert ids == of_calm["choices"][0]["token_ids"]
    found = [(row["stream"], row["option"], row["outcome"]) for row in recoveries]
    assert sorted(found) == sorted((stream, "restore", "resumed") for stream in hit)
    tokens = [hit[row["stream"]] + row["produced_tokens"] for row in recoveries]
    assert loaded >= sum(each // PAGE_TOKENS - 2 for each in tokens) * PAGE_TOKENS
