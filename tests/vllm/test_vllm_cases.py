"""Requests of vLLM's own OpenAI tests, to a server alone and to the same servers behind kvrs."""

import json
from typing import Any

from kvrs_testkit.vllm_servers import VllmServers
from tests.openai_cases import (
    CASES,
    IDS,
    MESSAGES,
    WORDS,
    Answer,
    ask,
    missing,
    refused_otherwise,
)
from tests.vllm.marks import REAL_VLLM
from tests.vllm.test_vllm_proxy import open_front

pytestmark = REAL_VLLM

# Path, and the body of a POST; None: a GET.
BESIDE: list[tuple[str, dict[str, Any] | None]] = [
    ("/health", None),
    ("/version", None),
    ("/load", None),
    ("/tokenize", {"prompt": WORDS, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": IDS}),
    ("/detokenize", {"tokens": [-1]}),
    # Tasks that the model has not.
    ("/v1/embeddings", {"input": WORDS}),
    ("/pooling", {"input": WORDS}),
    ("/classify", {"input": WORDS}),
    ("/score", {"text_1": WORDS, "text_2": WORDS}),
    ("/v2/rerank", {"query": WORDS, "documents": [WORDS]}),
]


async def test_answers_behind_kvrs_are_those_of_vllm_alone(vllm_servers: VllmServers) -> None:
    """Status, fields with their types, texts and usage; of a refusal the field. What kvrs refuses
    by decision it refuses by the name of the field.
    """
    faults: dict[str, object] = {}
    async with open_front(vllm_servers, vllm_servers.config) as front:
        for case in CASES:
            body = {"model": vllm_servers.model} | case.body
            alone = await ask(front.http, vllm_servers.url("d0"), case.path, body)
            behind = await ask(front.http, f"http://127.0.0.1:{front.proxy.port}", case.path, body)
            if case.refused:
                is_named = behind.status == 400 and behind.refusal.field == case.refused
                fault: object = None if is_named else behind
            else:
                fault = differences(alone, behind)
            if fault:
                faults[case.name] = fault

    assert not faults


async def test_other_paths_are_answered_as_by_vllm_alone(vllm_servers: VllmServers) -> None:
    """The same bytes, but for errors, of which the status is the same; and an invocation is what it
    is at its endpoint.
    """
    async with open_front(vllm_servers, vllm_servers.config) as front:
        behind = f"http://127.0.0.1:{front.proxy.port}"
        for path, fields in BESIDE:
            answers = []
            for url in (vllm_servers.url("d0"), behind):
                body = None if fields is None else {"model": vllm_servers.model} | fields
                method = "GET" if body is None else "POST"
                async with front.http.request(method, url + path, json=body) as answer:
                    raw = await answer.read()
                    answers.append((answer.status, raw if answer.status == 200 else b""))
            assert answers[0] == answers[1], path
        async with front.http.get(f"{behind}/v1/models") as answer:
            (listed,) = json.loads(await answer.read())["data"]
        assert (listed["id"], listed["max_model_len"]) == (vllm_servers.model, 2048)


def differences(alone: Answer, behind: Answer) -> list[object]:
    if behind.status != alone.status:
        return [(alone.status, alone.events), (behind.status, behind.events)]
    found: list[object] = [*missing(alone.shape, behind.shape), *refused_otherwise(alone, behind)]
    if not behind.is_whole:
        found.append("no last event")
    if (behind.said, behind.usage) != (alone.said, alone.usage):
        found.append([(each.said, each.usage) for each in (alone, behind)])
    return found
