"""Servers of real vLLM that hand prompts over by NIXL, with their own CPU tier beside it: a stream
whose decode server is killed is restored from its memory.
"""

import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvrs_testkit.vllm_rows import KVRS, TierServers, prompt_of, row_config
from kvrs_testkit.vllm_servers import PAGE_TOKENS, wait_ended
from tests.vllm.marks import REAL_VLLM
from tests.vllm.test_vllm_proxy import Front, open_front
from tests.vllm.test_vllm_rows_asked import always_restoring, counted_record, cut_stream

pytestmark = REAL_VLLM

STATISTICS_S = 11.0  # vLLM logs and resets its statistics every 10 s.


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServers]:
    """One prefill and two decode instances, on one node with its agent."""
    nodes = {"n0": ("p0", "d0", "d1")}
    with TierServers(row_config(tmp_path_factory.mktemp("handed"), nodes)) as servers:
        servers.start_all()
        yield servers


@pytest.fixture
async def front(servers: TierServers) -> AsyncIterator[Front]:
    config = always_restoring(servers.config)
    async with open_front(servers, config, servers.secret) as front:
        yield front


async def test_a_stream_that_was_handed_over_is_restored_from_its_memory(front: Front) -> None:
    """Blocks that came by NIXL are among the rows, too."""
    prompt, _ = await cut_stream(front, 3, signal.SIGCONT)

    record = await counted_record(front)
    assert (record["option"], record["outcome"]) == ("restore", "resumed")
    history = len(prompt) + record["produced_tokens"]
    assert record["loaded_tokens"] >= (history // PAGE_TOKENS - 1) * PAGE_TOKENS


def test_with_prefill_dead_its_rows_are_still_there(servers: TierServers) -> None:
    """The hand-off cannot be pulled any more; the other servers live on with statistics."""
    prompt = prompt_of(5)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    given = {"kv_transfer_params": asked | KVRS["kv_transfer_params"]}
    calm = servers.complete("d1", prompt=prompt, max_tokens=40, cache_salt="calm")
    servers.complete("p0", prompt=prompt, max_tokens=1, **given)
    parts = servers.parts("p0")
    servers.kill("p0")
    wait_ended(parts)
    before = servers.counters("d1")

    found = servers.complete("d1", prompt=prompt, max_tokens=40, **KVRS)

    after = servers.counters("d1")
    assert found["choices"][0]["token_ids"] == calm["choices"][0]["token_ids"]
    loaded = after["pulled_tokens"] - before["pulled_tokens"]
    assert loaded == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert after["pulled_bytes"] == before["pulled_bytes"]  # By NIXL.
    time.sleep(STATISTICS_S)
    assert servers.complete("d1", prompt=[*prompt, 7], max_tokens=4)
