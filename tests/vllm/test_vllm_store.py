"""Real vLLM beside a Mooncake store: streams go on behind what their killed server had stored, and
a store that is wrong is found out.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_testkit.vllm_servers import MODEL_SEED, PAGE_TOKENS
from kvrs_testkit.vllm_store import StoreServers, lacks_store
from tests.vllm.marks import REAL_VLLM
from tests.vllm.test_vllm_proxy import DEADLINE_S, Front, open_front

_LACKS = lacks_store()
pytestmark = [*REAL_VLLM, pytest.mark.skipif(bool(_LACKS), reason=f"no Mooncake store: {_LACKS}")]

TOKENS = 300
CUT = 120  # The server of the stream is killed behind so many.


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServers]:
    with StoreServers(tmp_path_factory.mktemp("store")) as servers:
        servers.start_store()
        servers.start_all()
        yield servers


@asynccontextmanager
async def open_tested(servers: StoreServers) -> AsyncIterator[Front]:
    """A proxy that has tested the store at both servers."""
    async with open_front(servers, servers.config, servers.secret) as front:
        await until_settled(front, "d0", "d1")
        yield front


async def told(front: Front, name: str) -> Any:
    rows = {row["id"]: row["self_test"] for row in (await front.state())["instances"]}
    return rows[name]


async def until_settled(front: Front, *names: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for name in names:
            while (
                (row := await told(front, name)) is None
                or row["store"] is None
                or (row["store"]["restores"] is None)
            ):
                await asyncio.sleep(0.1)


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 200), k=300)


async def cut_in_mid_stream(front: Front, seed: int) -> tuple[list[int], str]:
    """Ids of a stream whose server is killed, and the name of that."""
    asked = asyncio.create_task(
        front.ask(prompt=prompt_of(seed), max_tokens=TOKENS, ignore_eos=True, stream=True)
    )
    async with asyncio.timeout(DEADLINE_S):
        while not (streams := (await front.state())["streams"]) or (
            streams[0]["output_tokens"] < CUT
        ):
            assert not asked.done(), asked.result()
            await asyncio.sleep(0.001)
    victim = str(streams[0]["decode"])
    front.servers.kill(victim)
    status, events = await asked
    assert status == 200
    assert not [event for event in events if "error" in event], events
    return [each for event in events for each in event["choices"][0]["token_ids"]], victim


def alone(front: Front, name: str, seed: int) -> list[int]:
    """The stream as one server computes it without the store's help."""
    answer = front.servers.complete(
        name, prompt=prompt_of(seed), max_tokens=TOKENS, cache_salt=f"alone {seed}"
    )
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


async def test_streams_go_on_behind_what_their_killed_servers_had_stored(
    servers: StoreServers,
) -> None:
    """Prompt and output alike, but for the last blocks. A server that was started again is used so
    only behind a test of its own.
    """
    async with open_tested(servers) as front:
        for name in ("d0", "d1"):
            assert (await told(front, name))["restores"] is True, await told(front, name)
        for seed in (1, 2):
            ids, victim = await cut_in_mid_stream(front, seed)
            survivor = "d1" if victim == "d0" else "d0"

            assert ids == alone(front, survivor, seed)
            row = (await front.state())["recoveries"][-1]
            assert (row["option"], row["to"]) == ("restore", survivor)
            loaded = row["loaded_tokens"]
            print(f"seed {seed}: {loaded} of {loaded + row['computed_tokens']} tokens loaded")
            assert loaded >= len(prompt_of(seed)) + CUT - 3 * PAGE_TOKENS
            servers.start(victim)
            servers.wait_ready(victim)
            await front.until_up()
            await until_settled(front, victim)
            assert (await told(front, victim))["restores"] is True


async def test_a_store_that_mixes_two_models_is_found_out(servers: StoreServers) -> None:
    """Mooncake's keys have the name of the model: a server that was started with newer weights at
    the same path finds the blocks of the older ones, and goes on wrongly.
    """
    model = Path(servers.model)
    former = model.rename(model.with_name("former"))
    write_tiny_model(model, MODEL_SEED + 1)
    servers.start("d1")
    servers.wait_ready("d1")
    try:
        async with open_tested(servers) as front:
            row = await told(front, "d1")
            assert (row["restores"], row["store"]["is_wrong"]) == (False, True), row
            assert "goes on with other tokens behind what its store (mooncake) has" in row["cause"]
    finally:
        shutil.rmtree(model)
        former.rename(model)
