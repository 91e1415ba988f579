"""Endpoints beside streams, as vLLM answers them behind the proxy."""

import json
from typing import Any

import anthropic
import openai
import pytest

from kvrs.proxy.api.passed import PATHS
from kvrs_testkit.vllm_cluster import Builder, Servers, Vllms

KEPT_FROM_ENGINES: dict[str, Any] = {
    "kv_transfer_params": {"remote_host": "10.0.0.1"},
    "request_id": "a",
    "priority": -1,
}


async def posted(system: Vllms, path: str, **fields: Any) -> tuple[int, Any]:
    async with system.http.post(system.url + path, json=fields) as answer:
        return answer.status, json.loads(await answer.read())


@pytest.mark.parametrize("path", PATHS)
async def test_vllm_answers_and_another_one_where_one_dies(vllms: Builder, path: str) -> None:
    """The request reaches an engine as it came, and the client gets that engine's bytes."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.passed, server.dies_passing = (path,), server.id != "d1"

    system = await vllms(prepare=prepare)
    asked = {"prompt": "a", "documents": ["b"], "a_field_of_its_next_release": {"deep": [1]}}

    status, body = await posted(system, path, **asked)

    assert (status, body) == (200, {"path": path, "got": asked})
    assert [got for server in system.servers.values() for got in server.bodies][-1] == asked


async def test_the_openai_client_gets_embeddings(vllms: Builder) -> None:
    """And the engine's own 404 where its model has none; fields of the cluster are refused."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.passed = ("/v1/embeddings",)

    system = await vllms(prepare=prepare)
    async with openai.AsyncOpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0
    ) as client:
        made = await client.embeddings.with_raw_response.create(model="tiny", input="a")
        refused = [
            await posted(system, "/v1/embeddings", **{"input": "a", name: value})
            for name, value in KEPT_FROM_ENGINES.items()
        ]
        missing = await posted(system, "/rerank", query="a", documents=["b"])

    assert json.loads(made.text)["got"]["input"] == "a"
    assert [(got[0], got[1]["error"]["param"]) for got in refused] == [
        (400, name) for name in KEPT_FROM_ENGINES
    ]
    assert missing[0] == 404


async def test_no_instance_is_a_status_to_retry_on(vllms: Builder) -> None:
    """The refusal is that of streams, with the time to wait."""
    system = await vllms(wait=False)
    for server in system.servers.values():
        await server.kill()
    async with system.http.post(system.url + "/score", json={"text_1": "a"}) as answer:
        assert (answer.status, int(answer.headers["Retry-After"]) > 0) == (503, True)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [[5, 6], [7]], "prompt_logprobs": 1, "n": 2, "echo": True}),
        ("/v1/completions", {"prompt": [5, 6], "use_beam_search": True, "length_penalty": 0.5}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1},
        ),
        ("/v1/completions", {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 0}),
        ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": [5], "echo": True, "truncate_prompt_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "echo": True}),
    ],
    ids=["two", "beams", "text", "chat", "echo", "echo-only", "echo-truncated", "chat-echo"],
)
async def test_what_needs_one_engine_is_answered_by_one(
    vllms: Builder, path: str, fields: dict[str, Any]
) -> None:
    """With all that was asked, and by another one where it dies; as a stream it is refused."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.dies_passing = server.id != "d1"

    system = await vllms(prepare=prepare)
    asked = {"max_tokens": 3, "temperature": 0} | fields

    status, body = await posted(system, path, **asked)
    reached = [got for server in system.servers.values() for got in server.bodies]
    refused = [
        await posted(system, path, **asked, stream=True),
        await posted(system, path, **asked, kv_transfer_params={"remote_host": "10.0.0.1"}),
    ]

    assert (status, body) == (200, {"path": path, "got": asked})
    assert all(got == asked for got in reached)
    name = next(name for name in ("prompt_logprobs", "use_beam_search", "echo") if name in asked)
    assert (refused[0][0], refused[0][1]["error"]["param"]) == (400, name)
    assert refused[1] == (status, body)


async def test_tokens_of_a_message_are_counted_without_computing_them(vllms: Builder) -> None:
    """An engine renders the chat that the message would be."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.passed, server.count = ("/tokenize",), 7

    system = await vllms(prepare=prepare)
    async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none") as client:
        counted = await client.messages.count_tokens(
            model="tiny", messages=[{"role": "user", "content": "a"}], system="s"
        )

    assert counted.input_tokens == 7
    assert [got for server in system.servers.values() for got in server.bodies][-1] == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    }
