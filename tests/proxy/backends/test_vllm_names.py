"""Aliases and adapters of vLLM: listed, served where they are, and kept through recoveries."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvrs.config.security import key_hash
from kvrs.protocol.pages import salt_of
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_vllm import ScriptedVllm
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Builder, Servers, Vllms

NAMES = ["tiny", "alias", "lora1"]
ROOT = "/adapters/1"
EXPECTED = expected_ids(PROMPT, TOKENS)


def having(*names: str, root: str = ROOT) -> Callable[[Servers], None]:
    """All servers have the alias, and those of these names the adapter."""

    def prepare(servers: Servers) -> None:
        for name, server in servers.items():
            server.aliases, server.adapters = ["alias"], {"lora1": root} if name in names else {}

    return prepare


everywhere = having("p0", "d0", "d1")


def models_of(server: ScriptedVllm) -> list[str]:
    return [body["model"] for body in server.bodies]


async def listed(system: Vllms) -> dict[str, dict[str, Any]]:
    async with system.http.get(f"{system.url}/v1/models") as answer:
        return {each["id"]: each for each in json.loads(await answer.read())["data"]}


async def until_listed(system: Vllms, *names: str) -> None:
    async def holds() -> bool:
        return [*await listed(system)] == [*names]

    await system.until(holds)


async def test_all_names_are_listed_each_by_itself_too(vllms: Builder) -> None:
    """The model's own name first; an adapter with the fields that vLLM's list has."""
    system = await vllms(prepare=everywhere)

    found = await listed(system)
    for name, each in found.items():
        async with system.http.get(f"{system.url}/v1/models/{name}") as answer:
            assert json.loads(await answer.read()) == each
    rows = (await system.state())["instances"]

    assert [*found] == NAMES
    assert (found["lora1"]["root"], found["lora1"]["parent"]) == (ROOT, "tiny")
    assert {each["max_model_len"] for each in found.values()} == {4096}
    assert "parent" not in found["alias"]
    assert [row["models"] for row in rows] == [NAMES] * 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chat", [False, True])
async def test_each_name_is_served_and_engines_and_client_see_it_as_it_was_asked_for(
    vllms: Builder, name: str, *, chat: bool
) -> None:
    """By both stages, and in every event of the answer, as vLLM has it."""
    system = await vllms(prepare=everywhere)
    system.shared.prompt_tokens = 0
    request: dict[str, Any] = {"model": name, "max_tokens": 3, "temperature": 0}
    request |= {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": PROMPT}

    status, body = await system.ask(request | {"stream": True})
    whole = await system.ask(request)

    assert status == 200
    *events, _, _ = events_of(body)
    assert {msgspec.json.decode(event[6:])["model"] for event in events} == {name}
    assert (whole[0], msgspec.json.decode(whole[1])["model"]) == (200, name)
    used = [server for server in system.servers.values() if server.bodies]
    assert {server.role for server in used} == {"prefill", "decode"}
    assert {each for server in used for each in models_of(server)} == {name}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["always_migrate", "always_recompute"])
async def test_a_stream_that_is_cut_goes_on_under_its_name(
    vllms: Builder, name: str, policy: str
) -> None:
    """At the next instance, and at prefill where that computes it again."""
    system = await vllms(prepare=everywhere, policy={"name": policy})
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 3
    task = asyncio.create_task(system.ids(model=name))
    await system.until_streams_hold(3)

    dead = next(each for each in ("d0", "d1") if system.servers[each].bodies)
    await system.servers[dead].kill()
    await system.until_health(**{dead: "down"})
    system.shared.gate.set()

    assert await task == EXPECTED
    (again,) = system.servers["d1" if dead == "d0" else "d0"].bodies
    assert again["model"] == name
    assert set(models_of(system.servers["p0"])) == {name}
    assert system.shared.violations == []


async def test_an_instance_without_the_adapter_gets_no_stream_of_it(vllms: Builder) -> None:
    """Neither new ones nor those that another one has lost; these wait for one that has it."""
    system = await vllms(prepare=having("p0", "d0"))
    many = await asyncio.gather(*(system.ids(model="lora1") for _ in range(6)))
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 3
    task = asyncio.create_task(system.ids(model="lora1"))
    await system.until_streams_hold(3)

    await system.servers["d0"].kill()
    await system.until_health(d0="down")
    base = asyncio.create_task(system.ids(model="tiny"))
    await system.until(lambda: _has(system.servers["d1"]))
    lost = models_of(system.servers["d1"])
    system.servers["d1"].adapters = {"lora1": ROOT}
    system.shared.gate.set()

    assert many == [EXPECTED] * 6
    assert [await task, await base] == [EXPECTED] * 2
    assert lost == ["tiny"]
    assert models_of(system.servers["d1"]) == ["tiny", "lora1"]


async def _has(server: ScriptedVllm) -> bool:
    return bool(server.bodies)


async def test_a_cut_stream_goes_back_to_the_only_instance_with_its_adapter(vllms: Builder) -> None:
    system = await vllms(prepare=having("p0", "d1"))
    system.shared.faults = {3: Fault.RESET}

    assert await system.ids(model="lora1") == EXPECTED
    assert models_of(system.servers["d1"]) == ["lora1"] * 2
    assert system.servers["d0"].bodies == []


async def test_an_unknown_name_is_refused_with_all_that_are_known(vllms: Builder) -> None:
    """Also one that only the prefill instance has: no stream of it could be decoded."""
    system = await vllms(prepare=having("p0"))

    status, body = await system.ask({"model": "lora1", "prompt": PROMPT})

    error = msgspec.json.decode(body)["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "the model 'lora1' does not exist; allowed: 'tiny', 'alias'"
    assert [*await listed(system)] == ["tiny", "alias"]
    assert not any(server.bodies for server in system.servers.values())


async def test_adapters_that_are_loaded_and_unloaded_are_seen_with_the_next_poll(
    vllms: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a new epoch: what runs there goes on."""
    caplog.set_level("INFO")
    system = await vllms(prepare=having())
    epochs = [row["epoch"] for row in (await system.state())["instances"]]

    for server in system.servers.values():
        server.adapters = {"new": "/adapters/new"}
    await until_listed(system, "tiny", "alias", "new")
    ids = await system.ids(model="new")
    for server in system.servers.values():
        server.adapters = {}
    await until_listed(system, "tiny", "alias")
    status, _ = await system.ask({"model": "new", "prompt": PROMPT})

    assert (ids, status) == (EXPECTED, 404)
    assert [row["epoch"] for row in (await system.state())["instances"]] == epochs
    assert await system.count("kvrs_worker_deaths_total") == 0
    logged = [getattr(each, "names", None) for each in caplog.records if each.message == "names"]
    assert ["tiny", "alias", "new"] in logged


async def test_adapters_of_one_name_from_two_places_are_not_mixed(vllms: Builder) -> None:
    """They are other weights: a stream stays at the instances that have its own."""

    def prepare(servers: Servers) -> None:
        everywhere(servers)
        servers["d1"].adapters = {"lora1": "/adapters/2"}

    system = await vllms(prepare=prepare)
    system.shared.faults = {3: Fault.RESET}

    found = await asyncio.gather(*(system.ids(model="lora1") for _ in range(4)))

    assert found == [EXPECTED] * 4
    assert system.servers["d1"].bodies == []
    assert (await listed(system))["lora1"]["root"] == ROOT


async def test_the_adapter_is_part_of_the_salt_and_an_alias_is_not(vllms: Builder) -> None:
    """The same in every call of the stream, so that its own prefix is found again."""
    system = await vllms(prepare=everywhere, policy={"name": "always_migrate"})
    salts: dict[str, set[str | None]] = {}
    for name in NAMES:
        system.shared.faults = {3: Fault.RESET}
        for server in system.servers.values():
            server.bodies.clear()
        await system.ids(model=name, cache_salt="own")
        calls = [body for server in system.servers.values() for body in server.bodies]
        assert len(calls) > 2
        salts[name] = {body.get("cache_salt") for body in calls}

    assert salts["tiny"] == salts["alias"] == {"own"}
    assert salts["lora1"] == {salt_of("own", f"lora1 ({ROOT})")}


async def test_tenants_get_adapters_with_salts_of_their_own(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the tenant's nor the adapter's part is lost."""
    keys = {name: {"keys": [key_hash(name.encode()).hex()]} for name in ("one", "two")}
    monkeypatch.setenv("KVRS_KEYS", json.dumps(keys))
    system = await vllms(prepare=everywhere)
    salts = set()
    for tenant in ("one", "two"):
        for name in ("tiny", "lora1"):
            headers = {"Authorization": f"Bearer {tenant}"}
            request = {"model": name, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
            status, body = await system.ask(request, headers)
            assert status == 200, body
            salts.add(system.servers["p0"].bodies[-1]["cache_salt"])

    assert len(salts) == 4


async def test_what_is_answered_whole_goes_to_an_instance_with_the_adapter(vllms: Builder) -> None:
    """Tokens and embeddings of it too."""

    def prepare(servers: Servers) -> None:
        having("p0", "d1")(servers)
        for server in servers.values():
            server.passed = ("/tokenize",)

    system = await vllms(prepare=prepare)
    for _ in range(4):
        body = {"model": "lora1", "prompt": "a"}
        async with system.http.post(f"{system.url}/tokenize", json=body) as answer:
            assert answer.status == 200
        await system.ask({"model": "lora1", "prompt": PROMPT, "echo": True, "max_tokens": 0})

    assert system.servers["d0"].bodies == []
    assert sum(len(server.bodies) for server in system.servers.values()) == 8


async def test_a_name_of_the_configuration_is_the_model(vllms: Builder) -> None:
    """The first of vLLM's names is an alias then."""
    system = await vllms(prepare=everywhere, cluster={"served_name": "alias"})

    assert [*await listed(system)] == ["alias", "tiny", "lora1"]


async def test_a_name_that_vllm_does_not_have_is_refused(vllms: Builder) -> None:
    system = await vllms(prepare=everywhere, cluster={"served_name": "other"}, wait=False)

    async def holds() -> bool:
        rows = (await system.state())["instances"]
        return all(row["health"] == "refused" for row in rows)

    await system.until(holds)
    async with system.http.get(f"{system.url}/readyz") as answer:
        assert (
            "its /v1/models names no 'other', which cluster.served_name asks for"
            in await answer.text()
        )
