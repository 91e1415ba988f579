"""Servers whose decode instance has the history computed by its own prefill instance: a stream is one call."""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs.protocol.instance import Capability
from tests.proxy.conftest import HouseBuilder
from tests.proxy.house import House
from tests.proxy.scripted import BREAKS, Fault, Scripted
from tests.proxy.scripted_model import expected_ids, ids_of, rendered
from tests.proxy.test_proxy_streams import normal

TEXT = "hello"
TOKENS = 6
ASKED: dict[str, Any] = {"prompt": TEXT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS, "temperature": 0, "stream": True}
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
    *events, done, end = body.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [i for event in events for i in msgspec.json.decode(event[6:])["choices"][0].get("token_ids", [])]


async def ids(house: House, **fields: Any) -> list[int]:
    status, body = await house.ask(ASKED | {"return_token_ids": True} | fields)
    assert status == 200, body
    return ids_in(body)


def calls(house: House) -> dict[str, int]:
    return {name: len(instance.bodies) for name, instance in house.instances.items()}


@pytest.mark.parametrize("asked", [ASKED, CHAT], ids=["completion", "chat"])
async def test_a_stream_is_one_call_and_the_same_bytes(build: HouseBuilder, asked: dict[str, Any]) -> None:
    """Its prompt's ids come in the first event, and do not reach a client that did not ask for them."""
    plain, one = await build(pairs=1), await build(pairs=1, prepare=servers(WHOLE))

    (_, expected), (_, body) = await plain.ask(asked), await one.ask(asked)

    assert calls(one) == {"p0": 0, "d0": 1}
    assert calls(plain) == {"p0": 1, "d0": 1}
    assert normal(body.replace(b"chatcmpl", b"cmpl")) == normal(expected.replace(b"chatcmpl", b"cmpl"))


@pytest.mark.parametrize("asked", [ASKED, CHAT], ids=["completion", "chat"])
async def test_usage_counts_the_prompt_that_the_engine_has_counted(build: HouseBuilder, asked: dict[str, Any]) -> None:
    house = await build(pairs=1, prepare=servers(WHOLE))

    _, body = await house.ask(asked | {"stream": False})

    prompt = ids_of(TEXT) if "prompt" in asked else rendered_chat()
    assert msgspec.json.decode(body)["usage"]["prompt_tokens"] == len(prompt)


def rendered_chat() -> list[int]:
    from kvrs.protocol.openai import parse_chat_request

    return rendered(parse_chat_request(msgspec.json.encode(CHAT)))


@pytest.mark.parametrize("capabilities", [SHARDED, WHOLE], ids=["sharded", "whole"])
@pytest.mark.parametrize("fault", [*BREAKS, Fault.UNAVAILABLE, Fault.EMPTY])
async def test_every_death_at_every_place_gives_the_same_ids(
    build: HouseBuilder, fault: Fault, capabilities: list[Capability]
) -> None:
    """Also before the first event, when the prompt is still text."""
    house = await build(prepare=servers(capabilities))

    for position in range(TOKENS):
        house.script.faults = {position: fault}
        assert await ids(house) == expected_ids(ids_of(TEXT), TOKENS), position
        assert not house.script.faults, "the fault happened"


async def test_a_first_event_without_the_prompts_ids_is_a_failure(build: HouseBuilder) -> None:
    """Nothing could be continued from it."""
    house = await build(prepare=servers(WHOLE))
    house.instances["d0"].names_prompt = False

    assert await ids(house) == expected_ids(ids_of(TEXT), TOKENS)
    (row,) = (await house.state())["recoveries"]
    assert (row["from"], row["to"]) == ("d0", "d1")
    assert "began without prompt_token_ids" in row["cause"]


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_either_stage_takes_the_call_with_it(build: HouseBuilder, victim: str) -> None:
    """Before the first token; at once and with one attempt, though the connection to the server is still open."""
    house = await build(prepare=servers(WHOLE), policy={"recovery": {"gather_s": 0.5}})
    house.script.gate = asyncio.Event()
    asked = asyncio.create_task(ids(house))
    await house.until(lambda: _called(house, "d0"))
    assert (await house.state())["streams"][0]["stage"] == "prefill"

    house.instances[victim].deaf = True
    house.instances[victim].cut_watch()
    await house.until(lambda: _waits(house))  # From now on nobody writes, whatever the server still says.
    await house.until(lambda: _called(house, "d1"))
    house.script.gate.set()

    assert await asked == expected_ids(ids_of(TEXT), TOKENS)
    (row,) = (await house.state())["recoveries"]
    assert (row["attempt"], row["from"], row["to"]) == (2, victim, "d1")


async def _waits(house: House) -> bool:
    return bool((await house.state())["streams"][0]["stage"] == "waiting")


async def _called(house: House, name: str) -> bool:
    return bool(house.instances[name].bodies)


async def test_after_the_first_token_prefill_is_not_needed(build: HouseBuilder) -> None:
    house = await build(pairs=1, prepare=servers(WHOLE))
    house.script.gate, house.script.gate_at = asyncio.Event(), 3
    asked = asyncio.create_task(ids(house))
    await house.until_streams_hold(3)
    assert (await house.state())["streams"][0]["stage"] == "decode"

    await house.instances["p0"].kill()
    await house.until_health(p0="down")
    house.script.gate.set()

    assert await asked == expected_ids(ids_of(TEXT), TOKENS)
    assert (await house.state())["recoveries"] == []


async def test_a_history_is_recomputed_in_one_call_too(build: HouseBuilder) -> None:
    """Where pages cannot be fetched."""
    house = await build(prepare=servers(SHARDED))
    house.script.faults = {4: Fault.RESET}

    expected = expected_ids(ids_of(TEXT), TOKENS)
    assert await ids(house) == expected
    again = house.instances["d1"].bodies[0]
    assert calls(house) == {"p0": 0, "d0": 1, "p1": 0, "d1": 1}
    assert again["prompt"] == ids_of(TEXT) + expected[:4]
    assert again["kvrs"]["prompt_tokens"] == len(TEXT)
    assert "kv_transfer_params" not in again


async def test_what_prefill_retains_is_leased_and_migrated(build: HouseBuilder) -> None:
    """It keeps the prompt's pages though nobody has called it."""
    house = await build(prepare=servers(WHOLE), policy={"name": "always_migrate"}, transfer={"lease_s": 0.3})
    house.script.gate, house.script.gate_at = asyncio.Event(), 3
    prompt = list(range(40))
    asked = asyncio.create_task(ids(house, prompt=prompt))
    await house.until_streams_hold(3)

    async def renewed() -> bool:
        return any(update.renew for update in house.instances["p0"].lease_updates)

    await house.until(renewed)
    house.instances["d0"].cut_streams()
    await house.until(lambda: _called(house, "d1"))
    house.script.gate.set()

    assert await asked == expected_ids(prompt, TOKENS)
    (source,) = house.instances["d1"].bodies[0]["kvrs"]["sources"]
    assert (source["id"], source["pages"]) == ("p0", 2)


async def test_leases_are_sent_only_to_who_retains(build: HouseBuilder) -> None:
    house = await build(prepare=servers(SHARDED), transfer={"lease_s": 0.15})
    house.script.pause_s = 0.1

    await ids(house)
    await asyncio.sleep(0.3)

    assert all(not instance.lease_updates for instance in house.instances.values())


async def test_an_own_prefill_that_nobody_configured_is_refused(build: HouseBuilder) -> None:
    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d0"].own_prefill = "p7"

    house = await build(pairs=1, wait=False, prepare=prepare)

    await house.until_health(d0="refused")
    assert "own_prefill is 'p7'" in (await house.state())["instances"][1]["reason"]
