"""Servers whose decode instance calls its own prefill instance: a stream is one call."""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs.protocol.instance import Capability
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import BREAKS, Fault, Scripted
from kvrs_testkit.scripted_model import expected_ids, ids_of, rendered
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.streams.test_proxy_streams import normal

TEXT = "hello"
TOKENS = 6
REQUEST: dict[str, Any] = {"prompt": TEXT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "stream": True,
}
SHARDED = [Capability.FENCE, Capability.EXACT_RESUME]
WHOLE = [*SHARDED, Capability.PULL_PAGES, Capability.RETAIN]


def servers(capabilities: list[Capability]) -> Any:
    def prepare(instances: dict[str, Scripted]) -> None:
        for name, instance in instances.items():
            instance.capabilities = capabilities
            if name[0] == "d":
                instance.own_prefill = "p" + name[1:]

    return prepare


def ids_in(body: bytes) -> list[int]:
    *events, done, end = events_of(body)
    assert (done, end) == (b"data: [DONE]", b"")
    return [
        i
        for event in events
        for i in msgspec.json.decode(event[6:])["choices"][0].get("token_ids", [])
    ]


async def ids(system: ProxyCluster, **fields: Any) -> list[int]:
    status, body = await system.ask(REQUEST | {"return_token_ids": True} | fields)
    assert status == 200, body
    return ids_in(body)


def calls(system: ProxyCluster) -> dict[str, int]:
    return {name: len(instance.bodies) for name, instance in system.instances.items()}


@pytest.mark.parametrize("asked", [REQUEST, CHAT], ids=["completion", "chat"])
async def test_a_stream_is_one_call_and_the_same_bytes(
    build: ProxyClusterBuilder, asked: dict[str, Any]
) -> None:
    """The prompt's ids in the first event do not reach a client that does not want them."""
    plain, one = await build(pairs=1), await build(pairs=1, prepare=servers(WHOLE))

    (_, expected), (_, body) = await plain.ask(asked), await one.ask(asked)

    assert calls(one) == {"p0": 0, "d0": 1}
    assert calls(plain) == {"p0": 1, "d0": 1}
    assert normal(body.replace(b"chatcmpl", b"cmpl")) == normal(
        expected.replace(b"chatcmpl", b"cmpl")
    )


@pytest.mark.parametrize("asked", [REQUEST, CHAT], ids=["completion", "chat"])
async def test_usage_counts_the_prompt_that_the_engine_has_counted(
    build: ProxyClusterBuilder, asked: dict[str, Any]
) -> None:
    system = await build(pairs=1, prepare=servers(WHOLE))

    _, body = await system.ask(asked | {"stream": False})

    prompt = ids_of(TEXT) if "prompt" in asked else rendered_chat()
    assert msgspec.json.decode(body)["usage"]["prompt_tokens"] == len(prompt)


def rendered_chat() -> list[int]:
    from kvrs.protocol.openai.requests import parse_chat_request

    return rendered(parse_chat_request(msgspec.json.encode(CHAT)))


@pytest.mark.parametrize("capabilities", [SHARDED, WHOLE], ids=["sharded", "whole"])
@pytest.mark.parametrize("fault", [*BREAKS, Fault.UNAVAILABLE, Fault.EMPTY])
async def test_every_death_at_every_place_gives_the_same_ids(
    build: ProxyClusterBuilder, fault: Fault, capabilities: list[Capability]
) -> None:
    """Also before the first event, when the prompt is still text."""
    system = await build(prepare=servers(capabilities))

    for position in range(TOKENS):
        system.script.faults = {position: fault}
        assert await ids(system) == expected_ids(ids_of(TEXT), TOKENS), position
        assert not system.script.faults, "the fault happened"


async def test_a_stream_without_the_prompts_ids_is_served_without_recovery(
    build: ProxyClusterBuilder,
) -> None:
    """Nothing could be continued from it, but nothing has failed either."""
    system = await build(prepare=servers(WHOLE))
    system.instances["d0"].names_prompt = False

    assert await ids(system) == expected_ids(ids_of(TEXT), TOKENS)
    assert (await system.state())["recoveries"] == []


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_either_stage_takes_the_call_with_it(build: ProxyClusterBuilder, victim: str) -> None:
    """Before the first token; at once and with one attempt, though the connection to the server is
    still open.
    """
    system = await build(prepare=servers(WHOLE), policy={"recovery": {"gather_s": 0.5}})
    system.script.gate = asyncio.Event()
    asked = asyncio.create_task(ids(system))
    await system.until(lambda: _called(system, "d0"))
    assert (await system.state())["streams"][0]["stage"] == "prefill"

    system.instances[victim].deaf = True
    system.instances[victim].cut_watch()
    await system.until(lambda: _called(system, "d1"))
    system.script.gate.set()

    assert await asked == expected_ids(ids_of(TEXT), TOKENS)
    (row,) = (await system.state())["recoveries"]
    assert (row["attempt"], row["from"], row["to"]) == (2, victim, "d1")


async def _called(system: ProxyCluster, name: str) -> bool:
    return bool(system.instances[name].bodies)


async def test_a_history_is_recomputed_in_one_call_too(build: ProxyClusterBuilder) -> None:
    """Where pages cannot be fetched."""
    system = await build(prepare=servers(SHARDED))
    system.script.faults = {4: Fault.RESET}

    expected = expected_ids(ids_of(TEXT), TOKENS)
    assert await ids(system) == expected
    again = system.instances["d1"].bodies[0]
    assert calls(system) == {"p0": 0, "d0": 1, "p1": 0, "d1": 1}
    assert again["prompt"] == ids_of(TEXT) + expected[:4]
    assert again["kvrs"]["prompt_tokens"] == len(TEXT)
    assert "kv_transfer_params" not in again


async def test_what_prefill_retains_is_leased_and_migrated(build: ProxyClusterBuilder) -> None:
    """The prefill instance keeps the prompt's pages, though the proxy has not called it."""
    system = await build(
        prepare=servers(WHOLE), policy={"name": "always_migrate"}, transfer={"lease_s": 0.3}
    )
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    prompt = list(range(40))
    asked = asyncio.create_task(ids(system, prompt=prompt))
    await system.until_streams_hold(3)

    async def renewed() -> bool:
        return any(update.renew for update in system.instances["p0"].lease_updates)

    await system.until(renewed)
    system.instances["d0"].cut_streams()
    await system.until(lambda: _called(system, "d1"))
    system.script.gate.set()

    assert await asked == expected_ids(prompt, TOKENS)
    (source,) = system.instances["d1"].bodies[0]["kvrs"]["sources"]
    assert (source["id"], source["pages"]) == ("p0", 2)


async def test_leases_are_sent_only_to_instances_that_retain(build: ProxyClusterBuilder) -> None:
    system = await build(prepare=servers(SHARDED), transfer={"lease_s": 0.15})
    system.script.pause_s = 0.1

    await ids(system)
    await asyncio.sleep(0.3)

    assert all(not instance.lease_updates for instance in system.instances.values())


async def test_an_own_prefill_that_is_not_configured_is_refused(build: ProxyClusterBuilder) -> None:
    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d0"].own_prefill = "p7"
        instances["d0"].capabilities = SHARDED  # It fetches no pages of others.

    system = await build(pairs=1, wait=False, prepare=prepare)

    await system.until_health(d0="refused")
    assert "own_prefill is 'p7'" in (await system.state())["instances"][1]["reason"]
