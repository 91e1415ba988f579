"""Endpoints beside streams, before engines that have none of them: tokens by the proxy."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvrs.proxy.api.passed import PATHS
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder


async def posted(system: ProxyCluster, path: str, **fields: Any) -> tuple[int, Any]:
    async with system.http.post(system.url + path, json=fields) as answer:
        return answer.status, await answer.json()


async def test_the_proxy_s_tokenizer_answers_in_vllm_s_form(
    build: ProxyClusterBuilder, model: str
) -> None:
    """Text to ids and back, special tokens included."""
    system = await build(model=model)
    driver = system.proxy.parts.driver
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    ids = tokenizer.encode("play cjk.").ids

    found = await posted(system, "/tokenize", prompt="play cjk.", return_token_strs=True)
    text = await posted(system, "/detokenize", tokens=ids)
    empty = await posted(system, "/tokenize", prompt="", add_special_tokens=False)

    status, body = found
    assert (status, body["count"], body["tokens"]) == (200, len(ids), ids)
    assert body["token_strs"] == tokenizer.encode("play cjk.").tokens
    assert body["max_model_len"] == driver.control.instances.max_model_len
    assert text == (200, {"prompt": tokenizer.decode(ids, skip_special_tokens=False)})
    assert (empty[0], empty[1]["tokens"]) == (200, [])


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, 400, "messages"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "lora": 1}, 400, "lora"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        *((path, {}, 404, None) for path in PATHS if path[-5:] != "enize"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    build: ProxyClusterBuilder,
    model: str,
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str | None,
) -> None:
    """Before engines without these endpoints only the form that the proxy can answer is."""
    system = await build(model=model, pairs=1)

    answer = await posted(system, path, **fields)

    assert (answer[0], answer[1]["error"]["param"]) == (status, param), answer
    assert "Backend." not in answer[1]["error"]["message"]
    assert not any(instance.bodies for instance in system.instances.values())


async def test_without_a_tokenizer_there_are_no_tokens(build: ProxyClusterBuilder) -> None:
    """404, as of an endpoint that is not there; the reason is named."""
    system = await build(pairs=1)

    status, body = await posted(system, "/tokenize", prompt="a")

    assert status == 404
    assert "cluster.model: missing" in body["error"]["message"]
