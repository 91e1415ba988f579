"""Chats without `max_tokens` before a vLLM whose model has a limit of its own for them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvrs.proxy.backends.model_config import default_max_tokens
from kvrs_testkit.scripted import Fault
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import Builder, Servers, Vllms

DEFAULT = 9
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "temperature": 0,
    "return_token_ids": True,
    "ignore_eos": True,
}


@pytest.fixture
def limited(vllm_model: str) -> str:
    file = Path(vllm_model) / "generation_config.json"
    file.write_text(json.dumps({"max_new_tokens": DEFAULT, "temperature": 0.7}))
    return vllm_model


def with_default(servers: Servers) -> None:
    for server in servers.values():
        server.default_tokens = DEFAULT
        server.script.prompt_tokens = len("user: a\n")


async def ids_of(system: Vllms, **fields: Any) -> list[tuple[list[int], str]]:
    """The ids of each choice, and why it ended."""
    url = f"{system.url}/v1/chat/completions"
    async with system.http.post(url, json=CHAT | fields) as response:
        body = await response.read()
    assert response.status == 200, body
    if not fields.get("stream"):
        return [(each["token_ids"], each["finish_reason"]) for each in json.loads(body)["choices"]]
    found: dict[int, tuple[list[int], str]] = {}
    for event in events_of(body)[:-2]:
        for choice in json.loads(event[6:])["choices"]:
            ids, finish = found.get(choice["index"], ([], ""))
            ids = [*ids, *choice["token_ids"]]
            found[choice["index"]] = ids, finish or choice["finish_reason"]
    return [found[index] for index in sorted(found)]


def continued(system: Vllms) -> list[dict[str, Any]]:
    """The calls that go on with a chat, as completions."""
    bodies = [body for name in ("d0", "d1") for body in system.servers[name].bodies]
    return [body for body in bodies if body["stream"] and "messages" not in body]


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("cuts", [{4: Fault.RESET}, {2: Fault.RESET, 6: Fault.ERROR}])
async def test_a_cut_chat_ends_where_the_uncut_one_does(
    vllms: Builder, stream: bool, n: int, cuts: dict[int, Fault]
) -> None:
    """The limit counts from the beginning of the output, through any number of cuts."""
    system = await vllms(prepare=with_default)
    calm = await ids_of(system, stream=stream, n=n)
    system.shared.faults = dict(cuts)

    cut = await ids_of(system, stream=stream, n=n)

    assert not system.shared.faults
    assert [(len(ids), finish) for ids, finish in calm] == [(DEFAULT, "length")] * n
    assert cut == calm


@pytest.mark.usefixtures("limited")
async def test_an_uncut_chat_is_sent_as_it_came(vllms: Builder) -> None:
    """The server applies its limit itself."""
    system = await vllms(prepare=with_default)

    await ids_of(system, stream=True)

    bodies = [body for name in ("d0", "d1") for body in system.servers[name].bodies]
    assert [body.get("max_tokens", "absent") for body in bodies if "messages" in body] == ["absent"]


@pytest.mark.usefixtures("limited")
async def test_a_chat_that_its_client_takes_up_again_has_the_same_limit(vllms: Builder) -> None:
    """The next owner of its stream, here or at another proxy, counts from its record."""
    system = await vllms(prepare=with_default)
    calm = await ids_of(system, stream=True)
    gate = system.shared.gate = asyncio.Event()
    system.shared.gate_at = 4
    asked, key = CHAT | {"stream": True}, {"Idempotency-Key": "key-1"}
    url = f"{system.url}/v1/chat/completions"
    async with system.http.post(url, json=asked, headers=key) as response:
        for _ in range(4):
            await response.content.readuntil(b"\n\n")
    gate.set()

    async with system.http.post(url, json=asked, headers=key) as response:
        events = events_of(await response.read())[:-2]

    choices = [json.loads(each.split(b"data: ", 1)[1])["choices"][0] for each in events]
    ids = [one for choice in choices for one in choice["token_ids"]]
    assert [(ids, choices[-1]["finish_reason"])] == calm
    (body,) = continued(system)
    assert len(body["prompt"]) + body["max_tokens"] == system.shared.prompt_tokens + DEFAULT


@pytest.mark.usefixtures("limited")
async def test_what_the_client_names_goes_before_the_default(vllms: Builder) -> None:
    """Above it too."""
    system = await vllms(prepare=with_default)
    system.shared.faults = {4: Fault.RESET}

    ((ids, finish),) = await ids_of(system, stream=True, max_tokens=DEFAULT + 3)

    assert (len(ids), finish) == (DEFAULT + 3, "length")


@pytest.mark.usefixtures("limited")
async def test_a_server_that_goes_beyond_the_default_does_not_have_it(vllms: Builder) -> None:
    """`--generation-config vllm` cannot be seen: the stream goes on as far as the context."""
    system = await vllms(prepare=with_default)
    for server in system.servers.values():
        server.default_tokens = None
    system.shared.faults = {DEFAULT + 2: Fault.RESET}
    reading = asyncio.create_task(ids_of(system, stream=True))

    async def goes_on() -> bool:
        return bool(continued(system))

    await system.until(goes_on)
    (body,) = continued(system)
    reading.cancel()

    assert body["max_tokens"] == 4096 - len(body["prompt"])


async def test_the_limit_of_the_context_is_the_lower_one(vllms: Builder, vllm_model: str) -> None:
    """The least of all limits holds, as at vLLM."""
    file = Path(vllm_model) / "generation_config.json"
    file.write_text(json.dumps({"max_new_tokens": 1 << 20}))
    system = await vllms(prepare=with_default)
    system.shared.faults = {4: Fault.RESET}

    await ids_of(system, stream=True)

    (body,) = continued(system)
    assert body["max_tokens"] == 4096 - len(body["prompt"])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"max_new_tokens": 2048}', 2048),
        ('{"max_new_tokens": null}', None),
        ('{"max_length": 20}', None),
        ('{"max_new_tokens": 0}', None),
        ('{"max_new_tokens": true}', None),
        ("[]", None),
        ("{", None),
        (None, None),
    ],
)
def test_the_default_is_that_of_the_model_s_file(
    content: str | None, found: int | None, tmp_path: Path
) -> None:
    """A file that is missing or broken has none."""
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)

    assert default_max_tokens(tmp_path) == found
