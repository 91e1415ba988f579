"""Streams of real SGLang go on from the KV in a dead server's own memory, and those with penalties
by generating what is known once more.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kvrs_testkit.sse import events_of

if TYPE_CHECKING:
    from experiments.sglang_restore.run import Rounds
    from kvrs_testkit.sglang_servers import SglangServers

PYTHON_ENV = "KVRS_SGLANG_PYTHON"
pytestmark = [
    *(pytest.mark.sglang, pytest.mark.process, pytest.mark.network, pytest.mark.nightly),
    pytest.mark.xdist_group("clusters"),
    pytest.mark.skipif(PYTHON_ENV not in os.environ, reason=f"{PYTHON_ENV} names no interpreter"),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SglangServers]":
    # Imported late: it loads torch, which skipped tests do not need.
    from experiments.sglang_restore.run import restoring_config
    from kvrs_testkit.sglang_servers import SglangServers

    directory: Path = tmp_path_factory.mktemp("sglang")
    flag = "--enable-custom-logit-processor"
    with SglangServers(restoring_config(directory), os.environ[PYTHON_ENV], flag) as running:
        yield running


@pytest.fixture(scope="module")
def rounds(servers: "SglangServers") -> "Rounds":
    from experiments.sglang_restore.run import Rounds

    found = Rounds(servers, seed=2)
    found.start()
    return found


def test_a_prefill_that_has_nothing_loads_what_a_dead_decode_server_had(rounds: "Rounds") -> None:
    """Identical, and at least 95 % loaded, of which nothing was sent before."""
    from experiments.sglang_restore.run import faults_of

    cell = rounds.measure("decode 0")

    assert not faults_of(cell), cell


async def test_a_stream_with_penalties_is_generated_again(
    servers: "SglangServers", rounds: "Rounds"
) -> None:
    """SGLang counts them in the output of one request: the pair that goes on gets the request as it
    was, with its output so far.
    """
    asked = {"prompt": [*range(30, 90)], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    asked |= {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    proxy = servers.config.proxy
    url, admin = f"http://{proxy.host}:{proxy.port}", f"http://{proxy.host}:{proxy.admin_port}"
    async with aiohttp.ClientSession() as http, asyncio.timeout(300):

        async def state() -> Any:
            async with http.get(f"{admin}/kvrs/v1/state") as answer:
                return await answer.json()

        async def ids(salt: str) -> list[int]:
            body = asked | {"stream": True, "return_token_ids": True, "cache_salt": salt}
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                *events, _, _ = events_of(await answer.read())
                assert (answer.status, answer.headers.get("X-Kvrs-Exact")) == (200, None)
            choices = [json.loads(each[6:])["choices"][0] for each in events]
            return [i for choice in choices for i in choice["token_ids"]]

        while {each["health"] for each in (await state())["instances"]} != {"up"}:
            await asyncio.sleep(0.2)
        streaming = asyncio.create_task(ids("cut"))
        while not (found := (await state())["streams"]) or found[0]["output_tokens"] < 100:
            assert not streaming.done(), streaming.result()
            await asyncio.sleep(0.02)
        servers.kill(found[0]["decode"])
        cut = await streaming
        recovery = (await state())["recoveries"][-1]

        assert cut == await ids("calm")
        assert (len(cut), recovery["option"]) == (300, "replay")
