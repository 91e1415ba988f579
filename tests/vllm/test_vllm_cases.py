"""Requests of vLLM's own OpenAI tests, to a server alone and to the same servers behind kvrs."""

from collections.abc import AsyncIterator

import pytest

from experiments.vllm_servers import VllmServers
from tests.openai_cases import CASES, Answer, Case, ask, missing
from tests.vllm.test_vllm_proxy import Front, open_front

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
]


@pytest.fixture(scope="module")
async def front(vllm_servers: VllmServers) -> AsyncIterator[Front]:
    async with open_front(vllm_servers, vllm_servers.config) as opened:
        yield opened


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_an_answer_behind_kvrs_is_that_of_vllm_alone(front: Front, case: Case) -> None:
    """Status, fields with their types, texts and usage. What kvrs refuses by decision it refuses by
    the name of the field.
    """
    body = {"model": front.servers.model} | case.body
    alone = await ask(front.http, front.servers.url("d0"), case.path, body)
    behind = await ask(front.http, f"http://127.0.0.1:{front.proxy.port}", case.path, body)

    if case.refused and alone.status == 200:
        assert behind.status == 400
        assert behind.events[0]["error"]["param"].startswith(case.refused)
        return
    check_same(alone, behind)


def check_same(alone: Answer, behind: Answer) -> None:
    assert behind.status == alone.status, (alone.events, behind.events)
    assert missing(alone.shape, behind.shape) == []
    assert behind.is_whole
    assert (behind.said, behind.usage) == (alone.said, alone.usage)
