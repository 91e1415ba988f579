"""Requests of vLLM's own OpenAI tests, to an embedded engine alone and to the same engines behind a
proxy.
"""

import json
from collections.abc import AsyncIterator

import aiohttp
import jsonschema  # type: ignore[import-untyped]  # Its stubs are a package of their own.
import pytest

from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_testkit.ports import client_of
from kvrs_testkit.processes import Processes
from tests.openai_cases import (
    CASES,
    CHAT,
    MESSAGES,
    SCHEMA,
    Case,
    ask,
    missing,
    refused_otherwise,
)

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("systems")]

# What the proxy does and an engine of kvrs alone does not: several prompts and choices, and names.
BY_PROXY = dict.fromkeys(
    (
        *("text-two-seeded", "text-two-seeded-stream", "chat-two-seeded", "chat-two-seeded-stream"),
        *("two-prompts", "two-of-ids", "two-prompts-stream", "two-of-two", "echo", "echo-stream"),
        *("text-two-with-usage", "chat-two-with-usage", "probabilities-of-two"),
        *("echo-ids", "echo-ids-stream", "echo-two"),
    ),
    200,
) | {"text-no-model": 404, "chat-no-model": 404}


@pytest.fixture
async def engine(processes: Processes) -> AsyncIterator[aiohttp.ClientSession]:
    """The decode instance alone, which computes prompts too if it is asked."""
    (url,) = (each.url for _, each in processes.config.cluster.instances() if each.id == "d0")
    async with client_of(url, scoped_key(processes.secret, Scope.INSTANCE, "d0")) as client:
        yield client


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_an_answer_behind_a_proxy_is_that_of_the_engine(
    processes: Processes, engine: aiohttp.ClientSession, case: Case
) -> None:
    """Status, fields with their types, texts and usage; of a refusal the field; of prompts and
    choices that the proxy makes streams of, each.
    """
    proxy = processes.config.proxy
    async with aiohttp.ClientSession() as http:
        behind = await ask(http, f"http://{proxy.host}:{proxy.port}", case.path, case.body)
    assert behind.is_whole

    if case.name in BY_PROXY:
        assert behind.status == BY_PROXY[case.name]
        return
    alone = await ask(engine, "", case.path, case.body)

    assert behind.status == alone.status, (alone.events, behind.events)
    assert missing(alone.shape, behind.shape) == []
    assert refused_otherwise(alone, behind) == []
    assert (behind.said, behind.usage) == (alone.said, alone.usage)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_of_json_mode_is_json(processes: Processes, stream: bool) -> None:
    """Choices are streams of their own, with masks of their own."""
    proxy = processes.config.proxy
    url = f"http://{proxy.host}:{proxy.port}"
    body = {
        "messages": MESSAGES,
        "n": 3,
        "temperature": 1.3,
        "seed": 5,
        "max_tokens": 200,
        "stream": stream,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA},
        },
    }
    async with aiohttp.ClientSession() as http:
        answer = await ask(http, url, CHAT, body)

    said = answer.said
    assert answer.is_whole
    assert {reason for _, reason in said.values()} == {"stop"}
    for text, _ in said.values():
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len({text for text, _ in said.values()}) == 3
