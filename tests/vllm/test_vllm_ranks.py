"""Rows of real vLLM of several ranks: each has the cells of its own heads, in a layout from which
any number of ranks loads them.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from kvrs_testkit.vllm_rows import KVRS, RowServers, prompt_of
from kvrs_testkit.vllm_servers import PAGE_TOKENS
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

TWO = ["--tensor-parallel-size", "2"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowServers]:
    """Two servers of two ranks."""
    with RowServers(tmp_path_factory.mktemp("ranks")) as servers:
        servers.cpu_tier = {"canonical_layout": True}
        servers.flags |= {"d0": TWO, "d1": TWO}
        servers.start_all()
        yield servers


def ids_of(servers: RowServers, name: str, prompt: list[int], **fields: Any) -> list[int]:
    found = servers.complete(name, prompt=prompt, max_tokens=40, **fields)
    ids: list[int] = found["choices"][0]["token_ids"]
    return ids


def test_two_ranks_load_the_rows_of_two_and_of_one(servers: RowServers) -> None:
    """One rank loads those of two, too (test_vllm_kinds)."""
    for ranks in (TWO, []):
        if servers.flags["d0"] != ranks:
            servers.flags["d0"] = ranks
            servers.start("d0")
            servers.wait_ready("d0")
        prompt = prompt_of(50 + len(ranks))
        calm = ids_of(servers, "d1", prompt, cache_salt=f"calm {ranks}")
        assert ids_of(servers, "d0", prompt, **KVRS) == calm
        before = servers.loaded_tokens("d1")

        assert ids_of(servers, "d1", prompt, **KVRS) == calm

        loaded = servers.loaded_tokens("d1") - before
        assert loaded == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
