"""Requests of vLLM's own OpenAI tests, to a server alone and to the same servers behind kvrs."""

import pytest

from experiments.vllm_servers import VllmServers
from tests.openai_cases import CASES, Answer, ask, missing
from tests.vllm.test_vllm_proxy import open_front

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
]


async def test_answers_behind_kvrs_are_those_of_vllm_alone(vllm_servers: VllmServers) -> None:
    """Status, fields with their types, texts and usage. What kvrs refuses by decision it refuses by
    the name of the field.
    """
    faults: dict[str, object] = {}
    async with open_front(vllm_servers, vllm_servers.config) as front:
        for case in CASES:
            body = {"model": vllm_servers.model} | case.body
            alone = await ask(front.http, vllm_servers.url("d0"), case.path, body)
            behind = await ask(front.http, f"http://127.0.0.1:{front.proxy.port}", case.path, body)
            if case.refused and alone.status == 200:
                refusal = behind.events[0].get("error", {})
                is_named = str(refusal.get("param")).startswith(case.refused)
                fault: object = None if is_named and behind.status == 400 else behind
            else:
                fault = differences(alone, behind)
            if fault:
                faults[case.name] = fault

    assert not faults


def differences(alone: Answer, behind: Answer) -> list[object]:
    if behind.status != alone.status:
        return [(alone.status, alone.events), (behind.status, behind.events)]
    found: list[object] = [*missing(alone.shape, behind.shape)]
    if not behind.is_whole:
        found.append("no last event")
    if (behind.said, behind.usage) != (alone.said, alone.usage):
        found.append([(each.said, each.usage) for each in (alone, behind)])
    return found
