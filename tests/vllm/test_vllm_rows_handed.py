"""Servers of real vLLM that hand prompts over by NIXL, with their own CPU tier beside it: a stream
whose decode server is killed is restored from its memory.
"""

import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from kvrs.config.file import parse_config
from kvrs_testkit.vllm_rows import TierServers
from kvrs_testkit.vllm_servers import PAGE_TOKENS, vllm_config
from tests.vllm.marks import REAL_VLLM
from tests.vllm.test_vllm_proxy import Front, open_front
from tests.vllm.test_vllm_rows_asked import counted_record, cut_stream

pytestmark = REAL_VLLM


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServers]:
    """One prefill and two decode instances, on one node with its agent."""
    directory = tmp_path_factory.mktemp("handed")
    document = vllm_config(directory, with_kvrs=True).model_dump(mode="json")
    first, second = nodes = document["cluster"]["nodes"]
    first["instances"] += second["instances"]
    nodes.remove(second)
    for instance in first["instances"]:
        instance["connector_port"] = None
    document["backup"]["mode"] = "local"
    document["policy"]["name"] = "always_restore"
    with TierServers(parse_config(document)) as servers:
        servers.start_all()
        yield servers


@pytest.fixture
async def front(servers: TierServers) -> AsyncIterator[Front]:
    async with open_front(servers, servers.config, servers.secret) as front:
        yield front


async def test_a_stream_that_was_handed_over_is_restored_from_its_memory(front: Front) -> None:
    """Blocks that came by NIXL are among the rows, too."""
    prompt, _ = await cut_stream(front, 3, signal.SIGCONT)

    record = await counted_record(front)
    assert (record["option"], record["outcome"]) == ("restore", "resumed")
    history = len(prompt) + record["produced_tokens"]
    assert record["loaded_tokens"] >= (history // PAGE_TOKENS - 1) * PAGE_TOKENS
