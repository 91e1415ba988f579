"""API keys and limits of tenants, over real HTTP and with the openai package."""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from kvrs.config.security import key_hash
from kvrs.errors import ConfigError
from kvrs.proxy.api.tenants import Tenants
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
KEYS = {"a": "key-of-a", "b": "key-of-b", "off": "key-of-off"}

Save = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write the key file: limits by tenant, and keys that are not `KEYS`."""

    def write(keys: dict[str, str] | None = None, **limits: dict[str, Any]) -> str:
        tenants = {
            name: {"keys": [key_hash(key.encode()).hex()]} | limits.get(name, {})
            for name, key in (KEYS if keys is None else keys).items()
        }
        path = tmp_path / "keys"
        path.write_bytes(msgspec.json.encode(tenants))
        path.chmod(0o600)
        return str(path)

    return write


@pytest.fixture
async def system(build: ProxyClusterBuilder, save: Save) -> ProxyCluster:
    return await build(security={"key_file": save(off={"enabled": False})})


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = msgspec.json.decode(body)["error"]
    return error


def tenants_of(system: ProxyCluster) -> Tenants:
    return system.proxy.parts.tenants


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, None),
        ({"Authorization": "Basic abc"}, 401, None),
        ({"Authorization": "Bearer "}, 401, None),
        ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"Authorization": f"Bearer {'x' * 4000}"}, 401, None),
        (bearer("off"), 403, "tenant_disabled"),
        (bearer("a"), 200, None),
        ({"Authorization": f"bearer  {KEYS['a']}"}, 200, None),
        ({"X-Api-Key": "wrong"}, 401, "invalid_api_key"),
        ({"X-Api-Key": KEYS["a"]}, 200, None),
    ],
)
async def test_only_a_key_of_a_tenant_is_served(
    system: ProxyCluster, headers: dict[str, str], status: int, code: str | None
) -> None:
    answered, body = await system.ask(REQUEST, headers)

    assert answered == status
    if status != 200:
        assert error_of(body)["code"] == code
        assert not any(instance.bodies for instance in system.instances.values())


async def test_health_needs_no_key_and_all_else_does(system: ProxyCluster) -> None:
    statuses = {}
    for path in (
        *("/healthz", "/readyz", "/health", "/version", "/load"),
        *("/v1/models", "/v1/models/scripted", "/nope"),
    ):
        async with system.http.get(system.url + path) as response:
            statuses[path] = response.status

    assert statuses == {
        "/healthz": 200,
        "/readyz": 200,
        "/health": 200,
        "/version": 401,
        "/load": 401,
        "/v1/models": 401,
        "/v1/models/scripted": 401,
        "/nope": 401,
    }


async def test_streams_are_limited_while_they_are_open(
    build: ProxyClusterBuilder, save: Save
) -> None:
    """One tenant's limit is nothing to another one."""
    system = await build(security={"key_file": save(a={"streams": 2})})
    system.script.gate = asyncio.Event()

    async def ask(tenant: str, **fields: Any) -> int:
        return (await system.ask(REQUEST | fields, bearer(tenant)))[0]

    opened = [asyncio.create_task(ask("a", n=2)), asyncio.create_task(ask("b"))]
    await system.until_streams_hold(0, 3)
    async with system.http.post(
        system.url + "/v1/completions", json=REQUEST, headers=bearer("a")
    ) as response:
        refused, error = response, error_of(await response.read())
    system.script.gate.set()

    assert refused.status == 429
    assert refused.headers["Retry-After"] in {"1", "2", "3"}  # `retry_after` spreads clients.
    assert (error["type"], error["code"]) == ("streams", "rate_limit_exceeded")
    assert [await each for each in opened] == [200, 200]
    assert await ask("a", n=2) == 200
    assert await ask("a", n=3) == 429
    assert (await system.state())["proxies"][0]["tenants"][0] == {
        "tenant": "a",
        "enabled": True,
        "open_streams": 0,
        "refused": 2,
    }


class Clients:
    """Clients of tenant a, whose keyed streams flow slowly until `end`."""

    def __init__(self, system: ProxyCluster) -> None:
        self.system = system
        self.open: list[asyncio.Task[int]] = []
        self.last: dict[str, str] = {}  # Last event's id of a stream, by key.

    def begin(self, key: str, api_key: str = KEYS["a"], *, resumes: bool = False) -> None:
        headers = {"Authorization": f"Bearer {api_key}", "Idempotency-Key": key}
        if resumes and key in self.last:
            headers["Last-Event-ID"] = self.last[key]
        self.open.append(asyncio.create_task(self._read(key, headers)))

    async def _read(self, key: str, headers: dict[str, str]) -> int:
        fields = REQUEST | {"max_tokens": 400, "stream": True}
        async with self.system.http.post(
            self.system.url + "/v1/completions", json=fields, headers=headers
        ) as response:
            try:
                async for line in response.content:
                    if line.startswith(b"id: "):
                        self.last[key] = line[4:].strip().decode()
            except aiohttp.ClientError:
                pass
            return response.status

    async def end(self) -> None:
        for each in self.open:
            each.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)


def at_engines(system: ProxyCluster) -> int:
    return sum(each.running for each in system.instances.values())


def opened_by(system: ProxyCluster, tenant: str) -> int:
    rows = tenants_of(system).describe()
    return next(int(row["open_streams"]) for row in rows if row["tenant"] == tenant)


async def test_streams_that_are_sent_again_count_once_and_count_on(
    build: ProxyClusterBuilder, save: Save
) -> None:
    """However often, and by several requests at once: the place belongs to the stream."""
    system = await build(security={"key_file": save(a={"streams": 2})})
    system.script.pause_s, clients = 0.05, Clients(system)

    async def holds(count: int) -> bool:
        return at_engines(system) == opened_by(system, "a") == count

    for number in (0, 1):
        clients.begin(f"k{number}")
        await system.until(partial(holds, number + 1))
        for count in (1, 3, 1):
            for _ in range(count):
                clients.begin(f"k{number}")
            await asyncio.sleep(0.2)
        await system.until(partial(holds, number + 1))
    refused, _ = await system.ask(REQUEST, bearer("a"))
    clients.begin("k2")

    assert await clients.open[-1] == 429
    assert refused == 429
    assert at_engines(system) == 2
    await clients.end()
    await system.until(partial(holds, 0))


@pytest.mark.parametrize("seed", range(4))
async def test_no_order_of_requests_runs_more_than_the_limit(
    build: ProxyClusterBuilder, save: Save, seed: int
) -> None:
    """Streams are opened, sent again at once and later, resumed and left, under two keys of the
    tenant, while the limits and the tenant's presence in the file change.
    """
    rng, most = random.Random(seed), 3
    keys = [key_hash(key.encode()).hex() for key in ("key-of-a", "second-key-of-a")]
    system = await build(security={"key_file": save(a={"streams": most, "keys": keys})})
    system.script.pause_s, clients, seen = 0.02, Clients(system), list[int]()
    tenant = tenants_of(system)._by_name["a"]
    for _ in range(60):
        match rng.choice(["open", "again", "again", "resume", "leave", "reload"]):
            case "reload":
                path = save({"b": "key-of-b"}) if rng.random() < 0.5 else ""
                if path:
                    await system.proxy.reloads.reload()
                limit = rng.randint(1, most)
                save(a={"streams": limit, "keys": keys})
                await system.proxy.reloads.reload()
            case "leave" if clients.open:
                clients.open[rng.randrange(len(clients.open))].cancel()
            case what:
                key = f"k{rng.randrange(6)}"
                for _ in range(rng.randint(1, 3) if what == "again" else 1):
                    api_key = rng.choice(["key-of-a", "second-key-of-a"])
                    clients.begin(key, api_key, resumes=what == "resume")
        await asyncio.sleep(rng.choice([0, 0, 0.01, 0.1]))
        seen.append(at_engines(system))
        assert opened_by(system, "a") <= most

    assert max(seen) <= most
    await system.until(lambda: _truth(at_engines(system) <= opened_by(system, "a")))
    await clients.end()
    await system.until(lambda: _truth(at_engines(system) == opened_by(system, "a") == 0))
    assert tenant.meter is not None
    assert tenant.meter._keyed == {}


async def _truth(value: bool) -> bool:
    return value


async def test_keys_are_replaced_while_streams_run(build: ProxyClusterBuilder, save: Save) -> None:
    """The file is read again when it changes; the stream of a key that is gone flows on."""
    system = await build(security={"key_file": save()})
    system.script.gate = asyncio.Event()
    opened = asyncio.create_task(system.ask(REQUEST, bearer("a")))
    await system.until_streams_hold(0)

    save({"a": "a new key"})

    async def is_read() -> bool:
        return [each["tenant"] for each in tenants_of(system).describe()] == ["a"]

    await system.until(is_read)
    new, _ = await system.ask(REQUEST | {"max_tokens": 0}, {"Authorization": "Bearer a new key"})
    assert new == 400  # Accepted, and looked at.
    assert (await system.ask(REQUEST, bearer("a")))[0] == 401
    system.script.gate.set()
    assert (await opened)[0] == 200


async def test_a_reload_names_the_keys(system: ProxyCluster, save: Save) -> None:
    """At once, where it is asked for."""
    save({"b": "new-key"})

    result = await system.proxy.reloads.reload()

    assert result.applied == ["keys"]
    assert (await system.ask(REQUEST, {"Authorization": "Bearer new-key"}))[0] == 200
    assert (await system.ask(REQUEST, bearer("a")))[0] == 401
    assert (await system.proxy.reloads.reload()).applied == []


async def test_a_bad_key_file_changes_nothing(system: ProxyCluster, save: Save) -> None:
    path = Path(save())
    path.write_text("a: {keys: [nonsense]}")

    with pytest.raises(ConfigError) as raised:
        await system.proxy.reloads.reload()

    assert "a.keys.0" in str(raised.value)
    assert (await system.ask(REQUEST, bearer("a")))[0] == 200


async def test_a_flood_of_guesses_is_limited_and_right_keys_are_served(
    system: ProxyCluster,
) -> None:
    """Also from the same address: others may be behind it."""
    statuses = []
    for guess in range(40):
        status, _ = await system.ask(REQUEST, {"Authorization": f"Bearer guess-{guess}"})
        statuses.append(status)

    assert statuses.count(401) < 20
    assert statuses[-1] == 429
    assert (await system.ask(REQUEST, bearer("a")))[0] == 200


async def test_the_openai_package_knows_the_errors(build: ProxyClusterBuilder, save: Save) -> None:
    system = await build(security={"key_file": save(off={"enabled": False}, b={"streams": 1})})

    def client(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key=key, max_retries=0)

    async with client("wrong") as wrong, client(KEYS["off"]) as off:
        with pytest.raises(openai.AuthenticationError, match="incorrect API key"):
            await wrong.completions.create(model="scripted", prompt=[1, 2], max_tokens=2)
        with pytest.raises(openai.PermissionDeniedError):
            await off.completions.create(model="scripted", prompt=[1, 2], max_tokens=2)
    async with client(KEYS["b"]) as limited:
        with pytest.raises(openai.RateLimitError) as raised:
            await limited.completions.create(model="scripted", prompt=[1, 2], max_tokens=2, n=2)
        assert raised.value.code == "rate_limit_exceeded"
    async with client(KEYS["a"]) as right:
        answered = await right.completions.create(model="scripted", prompt=[1, 2], max_tokens=2)
        assert answered.usage is not None
        assert answered.usage.completion_tokens == 2


async def test_pages_of_two_tenants_have_different_salts(
    build: ProxyClusterBuilder, save: Save
) -> None:
    """A salt that a client sets divides its own pages further, and never reaches those of another
    tenant.
    """
    system = await build(pairs=1, security={"key_file": save()})
    for tenant, given in (("a", {}), ("a", {}), ("b", {}), ("a", {"cache_salt": "x"})):
        assert (await system.ask(REQUEST | given, bearer(tenant)))[0] == 200
    (*_, of_b, _) = salts_in(system)

    assert (await system.ask(REQUEST | {"cache_salt": of_b}, bearer("a")))[0] == 200

    salts = salts_in(system)
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert not {"", "x"} & set(salts)


def salts_in(system: ProxyCluster) -> list[str]:
    return [body.get("cache_salt", "") for body in system.instances["p0"].bodies]


async def test_without_keys_nothing_is_asked_for_and_no_salt_is_set(
    build: ProxyClusterBuilder,
) -> None:
    system = await build(pairs=1)

    assert (await system.ask(REQUEST))[0] == 200
    assert (await system.ask(REQUEST, {"Authorization": "Bearer anything"}))[0] == 200

    assert salts_in(system) == ["", ""]
