"""Servers of other weights under the same path: until they are known, and behind it."""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs.ids import InstanceId
from kvrs.protocol.rows import RegionReport
from kvrs.proxy.watch.self_test import GLIMPSED, TOKENS
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import Arithmetic, expected_ids
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import PROMPT, Builder, Servers, Vllms

RIGHT, WRONG = Arithmetic(), Arithmetic(1)
TESTED: dict[str, Any] = {"proxy": {"self_test": True}}


def of_one_model(servers: Servers) -> None:
    for name in ("p0", "d0", "d1"):
        servers[name].arithmetic = RIGHT


async def until_tested(system: Vllms, *names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def holds() -> bool:
        rows = (await system.state())["instances"]
        found.update({row["id"]: row["self_test"] for row in rows})
        return all(found[name] is not None and found[name]["done"] for name in names)

    await system.until(holds)
    return found


async def replace(system: Vllms, name: str, arithmetic: Arithmetic, *, is_held: bool) -> None:
    """End a server and start one of these weights, whose self-test fails if `is_held`."""
    server = system.servers[name]
    await server.kill()
    await system.until_health(**{name: "down"})
    server.arithmetic, server.denies = arithmetic, 500 if is_held else None
    server.denies_beyond_tokens = 8  # Tests have longer prompts.
    server.bodies.clear()
    await server.start()
    await system.until_health(**{name: "up"})


async def begun(system: Vllms) -> tuple[str | None, str | None, list[int]]:
    """The marks in the head of a new greedy stream, and its ids."""
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True}
    asked = body | {"return_token_ids": True}
    async with system.http.post(system.url + "/v1/completions", json=asked) as response:
        raw = await response.read()
    chunks = [msgspec.json.decode(event[6:]) for event in events_of(raw) if b"choices" in event]
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice["token_ids"]]
    head = response.headers
    return head.get("X-Kvrs-Exact"), head.get("X-Kvrs-Inexact"), ids


async def test_an_untested_process_gets_no_new_stream_beside_a_tested_one(vllms: Builder) -> None:
    system = await vllms(prepare=of_one_model, **TESTED)
    await until_tested(system, "d0", "d1")
    await replace(system, "d1", WRONG, is_held=True)

    found = [await begun(system) for _ in range(6)]

    assert found == [(None, None, expected_ids(PROMPT, 6))] * 6


async def test_an_untested_process_that_alone_serves_marks_what_it_begins(vllms: Builder) -> None:
    system = await vllms(prepare=of_one_model, **TESTED)
    await until_tested(system, "d0", "d1")
    await replace(system, "d1", RIGHT, is_held=True)
    await system.servers["d0"].kill()
    await system.until_health(d0="down")

    assert await begun(system) == ("no", "weights", expected_ids(PROMPT, 6))


async def test_a_promised_stream_waits_for_a_tested_process(vllms: Builder) -> None:
    """Rather than goes on at one whose weights may be others; then it goes on exactly."""
    system = await vllms(prepare=of_one_model, **TESTED)
    await until_tested(system, "d0", "d1")
    await replace(system, "d1", WRONG, is_held=True)
    system.shared.pause_s = 0.05
    asking = asyncio.create_task(system.ids(PROMPT, max_tokens=30))
    await system.until_streams_hold(3)

    await system.servers["d0"].kill()
    await system.until_health(d0="down")
    await asyncio.sleep(0.5)
    await system.servers["d0"].start()

    assert await asking == expected_ids(PROMPT, 30)


async def test_deaths_of_right_servers_do_not_make_a_wrong_one_right(vllms: Builder) -> None:
    """It serves where nothing else does, and says so."""
    system = await vllms(prepare=of_one_model, **TESTED)
    await until_tested(system, "d0", "d1")
    await replace(system, "d1", WRONG, is_held=False)
    found = await until_tested(system, "d1")
    beside = [await begun(system) for _ in range(6)]
    await system.servers["d0"].kill()
    await system.until_health(d0="down")

    alone = await begun(system)

    assert found["d1"]["weights"] == "other"
    assert beside == [(None, None, expected_ids(PROMPT, 6))] * 6
    assert alone[:2] == ("no", "weights")


def region(engine: str, weights: str, *, is_alive: bool = True) -> RegionReport:
    return RegionReport(InstanceId(engine), "0" * 16, is_alive, 8, 64, 16, weights)


async def test_a_digest_tells_before_the_first_token(vllms: Builder) -> None:
    """The agent that serves the server's rows reports it."""
    system = await vllms(prepare=of_one_model, backup={"mode": "local"}, **TESTED)
    d0, d1 = system.agents["agent-n0"], system.agents["agent-n1"]
    d0.regions, d1.regions = [region("d0", "right")], [region("d1", "right")]
    await until_tested(system, "d0", "d1")
    d1.regions = [region("d1", "right", is_alive=False)]
    replacing = asyncio.create_task(replace(system, "d1", RIGHT, is_held=True))
    await system.until_health(d1="down")
    d1.regions = [region("d1", "other")]
    await replacing

    found = dict[str, Any]()

    async def is_known() -> bool:
        found.update((await system.state())["instances"][2]["self_test"])
        return bool(found["weights"] == "other")

    await system.until(is_known)
    assert (found["continues"], found["differs_from"]) == (None, ["d0"])


async def test_a_stream_with_tokens_of_two_models_ends_once_that_is_known(vllms: Builder) -> None:
    """Which nothing showed when it went from one to the other."""

    def prepare(servers: Servers) -> None:
        for name, arithmetic in (("d0", RIGHT), ("d1", WRONG)):
            servers[name].arithmetic, servers[name].denies = arithmetic, 500
            servers[name].denies_beyond_tokens = 8

    system = await vllms(prepare=prepare, **TESTED)
    system.shared.pause_s = 0.05
    system.shared.faults[3] = Fault.RESET
    request = {"prompt": PROMPT, "max_tokens": 1000, "temperature": 0, "stream": True}
    asking = asyncio.create_task(system.ask(request))
    await system.until_streams_hold(8)
    ((row,),) = [(await system.state())["recoveries"]]

    for name in ("d0", "d1"):
        system.servers[name].denies = None
    _, body = await asking

    assert row["to"] != row["from"]
    (error,) = (event[6:] for event in events_of(body) if b'"error"' in event)
    assert msgspec.json.decode(error)["error"]["code"] == "inexact"
    assert b"data: [DONE]" not in body


async def test_new_weights_are_accepted_by_one_order(vllms: Builder) -> None:
    """They get new streams at once, unmarked, and the old ones none, whatever the majority."""
    system = await vllms(prepare=of_one_model, **TESTED)
    await until_tested(system, "d0", "d1")
    for name in ("p0", "d1"):
        await replace(system, name, WRONG, is_held=False)
        await until_tested(system, name)

    async with system.http.post(f"{system.admin_url}/kvrs/v1/accept/d1") as answer:
        status = answer.status
    found = [await begun(system) for _ in range(6)]

    assert status == 200
    assert {mark for mark, _, _ in found} == {None}
    assert expected_ids(PROMPT, 6) not in [ids for _, _, ids in found]
    rows = (await system.state())["instances"]
    assert [row["self_test"]["weights"] for row in rows] == ["right", "other", "right"]


@pytest.mark.parametrize(("name", "allowed"), [("d0", "up, or refused"), ("x", "no instance")])
async def test_only_an_instance_that_answers_can_be_accepted(
    vllms: Builder, name: str, allowed: str
) -> None:
    system = await vllms(prepare=of_one_model, **TESTED)
    await system.servers["d0"].kill()
    await system.until_health(d0="down")

    async with system.http.post(f"{system.admin_url}/kvrs/v1/accept/{name}") as answer:
        said = await answer.text()

    assert answer.status in (404, 409)
    assert allowed in said


@pytest.mark.parametrize("digest", ["", "right"])
async def test_an_engine_is_updated_one_server_at_a_time(vllms: Builder, digest: str) -> None:
    """Streams go on between equal versions. One that answers otherwise is another model, unless an
    agent has the digest of its weights; no stream goes there from the other version.
    """
    system = await vllms(prepare=of_one_model, backup={"mode": "local"}, **TESTED)
    agents = {"d0": system.agents["agent-n0"], "d1": system.agents["agent-n1"]}
    for name, agent in agents.items():
        agent.regions = [region(name, digest)] if digest else []
    await until_tested(system, "d0", "d1")
    system.servers["d1"].version = "0.33.0"
    await replace(system, "d1", RIGHT, is_held=False)
    await until_tested(system, "d1")
    system.shared.faults[3] = Fault.RESET

    ids = await system.ids(PROMPT)
    ((row,),) = [(await system.state())["recoveries"]]
    system.servers["d0"].version = "0.33.1"
    await replace(system, "d0", WRONG, is_held=False)
    found = await until_tested(system, "d0")
    state = {row["id"]: row for row in (await system.state())["instances"]}

    assert ids == expected_ids(PROMPT, 6)
    assert row["to"] != row["from"]
    assert (found["d0"]["differs_from"], found["d0"]["weights"]) == (
        ["d1", "p0"],
        "right" if digest else "other",
    )
    assert state["d0"]["differs"] is (not digest)


async def test_digests_that_differ_keep_a_stream_from_going_on(vllms: Builder) -> None:
    """Before any test has ended."""

    def prepare(servers: Servers) -> None:
        for name, arithmetic in (("d0", RIGHT), ("d1", WRONG)):
            servers[name].arithmetic, servers[name].denies = arithmetic, 500
            servers[name].denies_beyond_tokens = 8

    system = await vllms(prepare=prepare, backup={"mode": "local"}, **TESTED)
    system.agents["agent-n0"].regions = [region("d0", "right")]
    system.agents["agent-n1"].regions = [region("d1", "other")]

    async def are_known() -> bool:
        rows = (await system.state())["instances"]
        return [row["self_test"]["weights_digest"] for row in rows[1:]] == ["right", "other"]

    await system.until(are_known)
    system.shared.faults[3] = Fault.RESET
    request = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True}
    async with system.http.post(system.url + "/v1/completions", json=request) as response:
        body = await response.read()

    assert "X-Kvrs-Exact" not in response.headers
    assert b"data: [DONE]" not in body
    assert b'"code":"inexact"' in body


async def test_a_name_that_only_a_doubted_instance_has_is_served_there(vllms: Builder) -> None:
    def prepare(servers: Servers) -> None:
        of_one_model(servers)
        for name in ("p0", "d1"):
            servers[name].adapters = {"lora1": "/adapters/1"}

    system = await vllms(prepare=prepare, **TESTED)
    await until_tested(system, "d0", "d1")
    await replace(system, "d1", RIGHT, is_held=True)

    status, _ = await system.ask({"model": "lora1", "prompt": PROMPT, "max_tokens": 6})

    assert status == 200


async def test_a_process_whose_test_failed_is_tested_again_later(vllms: Builder) -> None:
    """Or it would be doubted for as long as it runs."""
    system = await vllms(prepare=of_one_model, **TESTED)
    await until_tested(system, "d0", "d1")
    await replace(system, "d1", RIGHT, is_held=True)
    await asyncio.sleep(120.0)

    system.servers["d1"].denies = None
    await asyncio.sleep(700.0)

    rows = (await system.state())["instances"]
    assert rows[2]["self_test"]["weights"] == "right"


async def test_a_strict_proxy_waits_for_weights_that_are_known(vllms: Builder) -> None:
    """Where nothing else serves; in the end the client is told to come again."""
    system = await vllms(
        prepare=of_one_model,
        proxy={"self_test": True, "inexact": "refuse"},
        policy={"recovery": {"wait_s": 3.0}},
    )
    await until_tested(system, "d0", "d1")
    await replace(system, "d1", RIGHT, is_held=True)
    await system.servers["d0"].kill()
    await system.until_health(d0="down")

    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True}
    async with system.http.post(system.url + "/v1/completions", json=body) as refused:
        await refused.read()
    system.servers["d1"].denies = None
    await until_tested(system, "d1")

    assert (refused.status, "Retry-After" in refused.headers) == (503, True)
    assert await begun(system) == (None, None, expected_ids(PROMPT, 6))


async def test_a_prefill_server_shows_its_weights_by_a_few_tokens(vllms: Builder) -> None:
    """Those of a decode server are known that early, too, before its test has ended."""
    system = await vllms(prepare=of_one_model, **TESTED)
    await until_tested(system, "p0", "d0", "d1")
    before = (await begun(system))[:2]
    await replace(system, "p0", WRONG, is_held=False)
    found = (await until_tested(system, "p0"))["p0"]

    assert (before, (await begun(system))[:2]) == ((None, None), ("no", "weights"))
    assert (found["weights"], found["differs_from"]) == ("other", ["d0", "d1"])
    await replace(system, "d1", RIGHT, is_held=False)
    await until_tested(system, "d1")
    asked = [body["max_tokens"] for body in system.servers["d1"].bodies if "prompt" in body]
    assert asked.index(GLIMPSED) < asked.index(TOKENS)


async def test_a_prefill_server_with_other_weights_marks_what_it_begins(vllms: Builder) -> None:
    """By its digest, where no other one serves: its KV decides the tokens, too."""
    system = await vllms(prepare=of_one_model, backup={"mode": "local"}, **TESTED)
    system.agents["agent-n0"].regions = [region("p0", "other"), region("d0", "right")]
    system.agents["agent-n1"].regions = [region("d1", "right")]
    await until_tested(system, "p0", "d0", "d1")

    async def is_known() -> bool:
        rows = (await system.state())["instances"]
        return [row["self_test"]["weights"] for row in rows] == ["other", "right", "right"]

    await system.until(is_known)
    mark, reason, _ = await begun(system)

    assert (mark, reason) == ("no", "weights")


async def test_a_promised_stream_does_not_go_on_from_kv_of_other_weights(vllms: Builder) -> None:
    """A prefill server, which has the prompt in its cache, turns out to differ while it runs."""
    system = await vllms(
        prepare=of_one_model,
        backup={"mode": "local"},
        policy={"name": "always_migrate"},
        **TESTED,
    )
    right = {"agent-n0": region("d0", "right"), "agent-n1": region("d1", "right")}
    for name, its in right.items():
        system.agents[name].regions = [its]
    await until_tested(system, "p0", "d0", "d1")
    prompt = list(range(5, 45))
    system.shared.prompt_tokens, system.shared.gate_at = len(prompt), 3
    system.shared.gate = asyncio.Event()
    request = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "stream": True}
    asking = asyncio.create_task(system.ask(request))
    await system.until_streams_hold(3)

    system.agents["agent-n0"].regions = [region("p0", "other"), right["agent-n0"]]

    async def is_known() -> bool:
        return bool((await system.state())["instances"][0]["self_test"]["weights"] == "other")

    await system.until(is_known)
    system.shared.faults[4] = Fault.RESET
    system.shared.gate.set()
    _, body = await asking

    (error,) = (event[6:] for event in events_of(body) if b'"error"' in event)
    assert msgspec.json.decode(error)["error"]["code"] == "inexact"
