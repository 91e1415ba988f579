"""Several models at one port of clients, before scripted instances."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from kvrs.config.tenants import key_hash
from kvrs.protocol.instance import ModelNames
from kvrs.proxy.api.bodies import BODY
from kvrs.proxy.wire.requests import ByteBudget, RequestUsage
from kvrs_testkit.models_cluster import ModelsCluster, open_models_cluster
from kvrs_testkit.scripted import Fault, Scripted

pytestmark = pytest.mark.network

LARGE = "x" * 100_000  # The body is one for aiohttp's server.
BOTH = "'a', 'b'"
QUICK = {"recovery": {"wait_s": 0.05, "role_wait_s": 0.05}}  # Requests wait for no instance.


@pytest.fixture
async def system() -> AsyncIterator[ModelsCluster]:
    async with open_models_cluster("a", "b", policy=QUICK) as made:
        yield made


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(0.01)


async def test_each_request_goes_to_its_model(system: ModelsCluster) -> None:
    """Also those that aiohttp's server takes: a body of more than 64 kB, and one in chunks."""
    status, answer = await system.complete("a")
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert system.prompts("b") == 0
    before = system.prompts("a")

    assert before > 0
    assert (await system.complete("b", user=LARGE))[0] == 200
    parts = b'{"prompt":[1,2],"temperature":0,"max_tokens":4,', b'"model":"b"}'
    async with system.http.post(f"{system.url}/v1/completions", data=chunks(*parts)) as response:
        assert response.status == 200
    chat = {"model": "b", "messages": [{"role": "user", "content": "play emoji."}], "max_tokens": 9}
    assert (await system.ask("/v1/chat/completions", chat))[0] == 200
    assert system.prompts("a") == before
    assert system.prompts("b") > 0


@pytest.mark.parametrize("user", ["short", LARGE])
@pytest.mark.parametrize(
    ("model", "status", "code", "message"),
    [
        ("c", 404, "model_not_found", f"the model 'c' does not exist; allowed: {BOTH}"),
        (None, 400, None, f"model is missing, and several are served; allowed: {BOTH}"),
        (7, 400, None, "Expected `str | null`, got `int`"),
    ],
)
async def test_a_request_for_no_model_is_refused_with_all_names(
    system: ModelsCluster, user: str, model: Any, status: int, code: str | None, message: str
) -> None:
    found, answer = await system.complete(model, user=user)

    assert (found, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"].startswith(message)
    assert system.prompts("a") == system.prompts("b") == 0


async def test_a_body_that_is_no_json_is_refused_as_ever(system: ModelsCluster) -> None:
    async with system.http.post(f"{system.url}/v1/completions", data=b'{"model":') as response:
        assert response.status == 400
        assert "not valid JSON" in (await response.text())
    status, answer = await system.ask("/generate", {"prompt": "x"})
    assert (status, answer["error"]["message"].partition(";")[0]) == (
        404,
        "a request to /generate names no model, and several are served",
    )


async def test_models_are_listed_together(system: ModelsCluster) -> None:
    status, text = await system.get("/v1/models")
    listed = msgspec.json.decode(text)["data"]

    assert (status, [model["id"] for model in listed]) == (200, ["a", "b"])
    status, text = await system.get("/v1/models/b")
    assert (status, msgspec.json.decode(text)["id"]) == (200, "b")
    status, text = await system.get("/v1/models/c")
    assert (status, msgspec.json.decode(text)["error"]["code"]) == (404, "model_not_found")
    assert (await system.get("/version"))[0] == 200
    assert await system.get("/load") == (200, '{"server_load":0}')
    assert (await system.get("/v1/completions"))[0] == 405
    assert (await system.get("/nothing"))[0] == 404


async def test_a_model_that_is_down_leaves_the_other_as_it_is(system: ModelsCluster) -> None:
    """Its requests get 503, and go to no instance of the other; the proxy is ready."""
    for instance in system.instances["a"]:
        await instance.kill()
    await system.until_up("a", 0)

    status, answer = await system.complete("a")
    assert (status, answer["error"]["type"]) == (503, "server_error")
    assert system.prompts("b") == 0
    assert (await system.complete("b"))[0] == 200
    assert await system.get("/readyz") == (200, "a: no instance is up\nb: ready\n")
    assert (await system.get("/health"))[0] == 200
    listed = msgspec.json.decode((await system.get("/v1/models"))[1])["data"]
    assert [model["id"] for model in listed] == ["a", "b"]

    for instance in system.instances["b"]:
        await instance.kill()
    await system.until_up("b", 0)
    assert await system.get("/readyz") == (503, "a: no instance is up\nb: no instance is up\n")
    assert (await system.get("/health"))[0] == 503


async def test_a_model_that_was_never_up_has_its_name() -> None:
    """It is asked for by it, and is not listed before it is up, as with one model."""
    async with open_models_cluster("a", "b", pairs=1, down=["b"], policy=QUICK) as system:
        for user in ("", LARGE):
            status, answer = await system.complete("b", user=user)
            assert (status, answer["error"]["type"]) == (503, "server_error")
        assert (await system.complete("a"))[0] == 200
        assert await system.get("/readyz") == (200, "a: ready\nb: no instance is up\n")
        listed = msgspec.json.decode((await system.get("/v1/models"))[1])["data"]
        assert [model["id"] for model in listed] == ["a"]
        assert (await system.get("/v1/models/b"))[0] == 503


async def test_an_alias_leads_to_the_model_that_has_it() -> None:
    """One that both have leads to the first; names of models come before all aliases."""
    aliases = {"a": ("of-a", "of-both", "b"), "b": ("of-b", "of-both")}

    def prepare(instance: Scripted) -> None:
        instance.names = ModelNames(aliases[instance.model], ())

    async with open_models_cluster("a", "b", pairs=1, prepare=prepare) as system:
        for name, model, other in (
            ("of-a", "a", "b"),
            ("of-b", "b", "a"),
            ("of-both", "a", "b"),
            ("b", "b", "a"),
        ):
            before = {each: system.prompts(each) for each in "ab"}
            assert (await system.complete(name))[0] == 200
            assert system.prompts(model) > before[model]
            assert system.prompts(other) == before[other]
        _, answer = await system.complete("c")
        assert answer["error"]["message"].endswith("'a', 'b', 'of-a', 'of-both', 'of-b'")


async def test_an_instance_of_another_name_is_refused() -> None:
    """Its requests would be answered under a name that clients did not ask for."""

    def prepare(instance: Scripted) -> None:
        if instance.id == "db0":
            instance.model = "c"

    async with open_models_cluster("a", "b", prepare=prepare, up={"b": 3}) as system:
        health = {row["id"]: row.get("reason") for row in (await system.state("b"))["instances"]}
        assert health["db0"] == "model is 'c', cluster.served_name says 'b'"


async def test_a_stream_stays_at_its_model_through_a_death(system: ModelsCluster) -> None:
    """The death is in the books of its own model only."""
    _, quiet = await system.complete("a", max_tokens=20)
    system.scripts["a"].faults[6] = Fault.RESET

    status, answer = await system.complete("a", max_tokens=20)

    assert (status, answer["choices"]) == (200, quiet["choices"])
    assert not system.scripts["a"].faults
    assert system.prompts("b") == 0
    recoveries = {name: len((await system.state(name))["recoveries"]) for name in system.instances}
    assert recoveries == {"a": 1, "b": 0}


async def test_a_response_is_found_by_its_id(system: ModelsCluster) -> None:
    """The id alone says at which model, whichever that is."""
    for model in ("a", "b"):
        asked = {"model": model, "input": "play emoji.", "max_output_tokens": 9, "temperature": 0}
        status, made = await system.ask("/v1/responses", asked)
        assert (status, made["model"]) == (200, model)
        status, text = await system.get(f"/v1/responses/{made['id']}")
        assert (status, msgspec.json.decode(text)) == (200, made)
        async with system.http.delete(f"{system.url}/v1/responses/{made['id']}") as response:
            assert response.status == 200
    for name in ("resp_" + "0" * 48, "resp_x", "x"):
        assert (await system.get(f"/v1/responses/{name}"))[0] == 404
    asked = {"model": "c", "input": "play emoji."}
    assert (await system.ask("/v1/responses", asked))[0] == 404


async def test_a_request_is_counted_at_its_model(system: ModelsCluster) -> None:
    """Once, with its id in the header; the first model counts what no model was found for."""
    await system.complete("b")
    await system.complete("b", user=LARGE)
    await system.complete("c")
    asked = {"model": "b", "prompt": [1], "max_tokens": 1}
    async with system.http.post(
        f"{system.url}/v1/completions", json=asked, headers={"X-Request-Id": "mine"}
    ) as response:
        assert response.headers["X-Request-Id"] == "mine"
        assert response.headers["Server"] == "kvrs"

    async with system.http.post(
        f"{system.url}/v1/completions", json=asked | {"stream": True, "user": LARGE}
    ) as response:
        assert response.headers["Server"] == "kvrs"
        assert "X-Request-Id" in response.headers

    counted = {name: await system.responses(name) for name in system.instances}
    assert counted == {"a": {"404": 1.0}, "b": {"200": 4.0}}
    assert (await system.state("b"))["proxies"][0]["id"] == "proxy-0-b"
    assert (await system.state("b"))["proxies"][0]["url"] == system.url


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/models/a", "/v1/models", "/v1/responses/resp_x"]
)
async def test_keys_come_before_all_else(tmp_path: Path, path: str) -> None:
    """A name that is unknown is told to those with a key only."""
    keys = tmp_path / "keys"
    keys.write_bytes(msgspec.json.encode({"t": {"keys": [key_hash(b"key").hex()]}}))
    keys.chmod(0o600)
    bearer = {"Authorization": "Bearer key"}
    async with open_models_cluster("a", "b", pairs=1, security={"key_file": str(keys)}) as system:
        if path == "/v1/completions":
            for user in ("", LARGE):
                asked = {"model": "c", "prompt": [1], "user": user}
                assert (await system.ask(path, asked))[0] == 401
                assert (await system.ask(path, asked, bearer))[0] == 404
                asked["model"] = "b"
                assert (await system.ask(path, asked))[0] == 401
                assert (await system.ask(path, asked, bearer))[0] == 200
        else:
            assert (await system.get(path))[0] == 401
            assert (await system.get(path, bearer))[0] in (200, 404)
        assert (await system.get("/readyz"))[0] == 200


async def test_pages_may_read_what_is_refused(system: ModelsCluster) -> None:
    async with open_models_cluster(
        "a", pairs=1, proxy={"allowed_origins": ["https://chat.example.org"]}
    ) as allowing:
        for user in ("", LARGE):
            for model, status in (("a", 200), ("c", 404)):
                asked = {"model": model, "prompt": [1], "max_tokens": 1, "user": user}
                async with allowing.http.post(
                    f"{allowing.url}/v1/completions",
                    json=asked,
                    headers={"Origin": "https://chat.example.org"},
                ) as response:
                    allowed = response.headers["Access-Control-Allow-Origin"]
                    assert (response.status, allowed) == (status, "https://chat.example.org")


async def test_a_body_is_read_and_held_once(system: ModelsCluster) -> None:
    """By the port for the time of the choice, and by the model that it is for."""
    script, gate = system.scripts["b"], asyncio.Event()
    script.gate = gate
    running = asyncio.create_task(system.complete("b", user=LARGE))
    await system.until_streams("b", 1)
    held = [(await system.samples(name, "kvrs_request_bytes"))[0].value for name in "ab"]
    assert held[0] == 0
    assert held[1] > len(LARGE)
    gate.set()
    assert (await running)[0] == 200


async def test_a_body_that_was_read_is_given_once(system: ModelsCluster) -> None:
    """The request, which lasts as long as its stream, does not keep it."""
    parts = system.proxy.by_name["a"].parts
    request = make_mocked_request("POST", "/v1/completions")
    request[BODY] = b"{}"
    with RequestUsage(ByteBudget(1000, 100), "") as held:
        assert await parts.api.admissions.bodies.read(request, held) == b"{}"
        assert held.size_bytes == 2
    assert BODY not in request


async def test_a_body_that_is_too_long_is_refused_by_size(system: ModelsCluster) -> None:
    """Before a model is looked for."""
    async with open_models_cluster("a", pairs=1, proxy={"max_body_bytes": 70_000}) as small:
        assert (await small.complete("a", user=LARGE))[0] == 413
        assert (await small.complete("c", user=LARGE))[0] == 413


async def test_a_model_that_is_full_leaves_the_other_its_room() -> None:
    models = {"a": {"proxy": {"max_streams": 1}}}
    async with open_models_cluster("a", "b", pairs=1, models=models, policy=QUICK) as system:
        gate = asyncio.Event()
        for script in system.scripts.values():
            script.gate = gate
        running = [asyncio.create_task(system.complete(model)) for model in ("a", "b")]
        await system.until_streams("a", 1)
        status, answer = await system.complete("a")
        assert (status, answer["error"]["message"]) == (503, "1 of 1 streams are open")
        running.append(asyncio.create_task(system.complete("b")))
        await system.until_streams("b", 2)
        gate.set()
        assert [(await each)[0] for each in running] == [200, 200, 200]


async def test_all_models_drain_together(system: ModelsCluster) -> None:
    """A stream of either runs to its end; new requests are refused."""
    script, gate = system.scripts["b"], asyncio.Event()
    script.gate, script.gate_at = gate, 2
    running = asyncio.create_task(system.complete("b"))
    await system.until_streams("b", 1)

    draining = asyncio.create_task(system.proxy.drain())
    while (await system.get("/readyz"))[0] == 200:
        await asyncio.sleep(0.005)
    assert await system.get("/readyz") == (503, "shutting down\n")
    for model in ("a", "b"):
        status, answer = await system.complete(model)
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
    assert not draining.done()
    gate.set()

    assert (await running)[0] == 200
    await draining
