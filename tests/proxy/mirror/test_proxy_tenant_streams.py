"""A tenant can do nothing to the streams of another one, at any proxy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.config.security import key_hash
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, Reader, open_proxy_group

pytestmark = pytest.mark.network

OWN, FOREIGN = "Bearer key-of-a", "Bearer key-of-b"


@asynccontextmanager
async def open_tenants(
    tmp_path: Path, *, with_keys: bool, **limits: int
) -> AsyncIterator[MultiProxyCluster]:
    settings: dict[str, Any] = {}
    if with_keys:
        path = tmp_path / "keys"
        path.write_bytes(
            msgspec.json.encode(
                {
                    name: {"keys": [key_hash(f"key-of-{name}".encode()).hex()], **limits}
                    for name in "ab"
                }
            )
        )
        path.chmod(0o600)
        settings = {"security": {"key_file": str(path)}}
    async with open_proxy_group(2, **settings) as group:
        yield group


async def answer_to(group: MultiProxyCluster, proxy: int, fields: Any, **headers: str) -> Any:
    """Status and error of a request that was tried with a foreign key or id."""
    async with group.http.post(
        group.url(proxy) + "/v1/completions",
        json=fields,
        headers={"Authorization": FOREIGN} | headers,
    ) as response:
        body = await response.read()
        return response.status, body if response.status != 200 else None


async def stop_halfway(group: MultiProxyCluster, reader: Reader) -> None:
    """Read four tokens, of which the mirror knows, and leave."""
    group.system.script.pause_s = 0.01
    await reader.read(0, 4, Authorization=OWN)
    while not any(
        record.state.released and len(record.events) >= 4
        for record in group.book(1).records.values()
    ):
        await asyncio.sleep(0.005)
    group.system.script.pause_s = 0.0


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("proxy", [0, 1])
async def test_a_foreign_id_looks_like_an_unknown_one(
    tmp_path: Path, proxy: int, with_keys: bool
) -> None:
    """Same status and body, whether the key, the stream or neither is known to the proxies; and its
    tenant gets the rest of the stream afterwards.
    """
    async with open_tenants(tmp_path, with_keys=with_keys) as group:
        mine = group.reader("order-1", max_tokens=40)
        await stop_halfway(group, mine)
        assert mine.last is not None
        fields = mine.fields | {"stream": True}

        foreign = await answer_to(
            group, proxy, fields, **{"Idempotency-Key": "order-1", "Last-Event-ID": mine.last}
        )
        unknown = await answer_to(
            group, proxy, fields, **{"Idempotency-Key": "order-2", "Last-Event-ID": "ab:1"}
        )
        await mine.read(1, Authorization=OWN)

    assert foreign == unknown
    assert foreign[0] == 404
    assert mine.done
    assert mine.errors == []
    assert len(mine.events) == 40


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("prompt", [[1, 2, 3], [7, 8]])
async def test_a_foreign_key_reads_ends_and_probes_nothing(
    tmp_path: Path, prompt: list[int], with_keys: bool
) -> None:
    """Another tenant's request under the same key begins a stream of its own, with the same body
    and with another one, at the proxy of the first and at its mirror.
    """
    async with open_tenants(tmp_path, with_keys=with_keys) as group:
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 2
        mine, foreign = group.reader("order-1"), group.reader("order-1", prompt=prompt)
        reading = asyncio.create_task(mine.read(0, Authorization=OWN))
        while len(mine.events) < 2:
            await asyncio.sleep(0.005)
        gate.set()
        statuses = [await foreign.read(proxy, Authorization=FOREIGN) for proxy in (0, 1)]
        await reading

    assert statuses == [200, 200]
    assert (mine.errors, foreign.errors) == ([], [])
    assert mine.done
    assert foreign.done
    assert mine.last is not None
    assert foreign.last is not None
    assert mine.last.partition(":")[0] != foreign.last.partition(":")[0]


async def test_between_proxies_neither_tenants_nor_keys_are_sent(tmp_path: Path) -> None:
    """A record is known by what is derived from the secret."""
    async with open_tenants(tmp_path, with_keys=True) as group:
        mine = group.reader("order-1", max_tokens=40)
        await stop_halfway(group, mine)

        sent = [record.update(0.0) for record in group.book(1).records.values()]

    assert len(sent) == 1
    raw = msgspec.msgpack.encode(sent[0])
    for private in (b"order-1", b"key-of-a", key_hash(b"key-of-a")):
        assert private not in raw


async def test_a_response_that_is_taken_over_again_and_again_counts_on(tmp_path: Path) -> None:
    """Two clients take the stream to the other proxy at once; the later one ends the first's claim,
    and the stream keeps its place in the limit there.
    """
    async with open_tenants(tmp_path, with_keys=True, streams=1) as group:
        group.system.script.gate, group.system.script.gate_at = asyncio.Event(), 4
        instances = group.system.instances.values()
        asked = {"model": "scripted", "input": "play all/tokens.", "background": True}
        responses, owner = group.url(0) + "/v1/responses", {"Authorization": OWN}
        async with group.http.post(responses, json=asked, headers=owner) as response:
            name = (await response.json())["id"]

        async def take_over() -> int:
            url = f"{group.url(1)}/v1/responses/{name}?stream=true"
            async with group.http.get(url, headers=owner) as response:
                await response.content.readany()
                await asyncio.sleep(2.0)  # Longer than a claim keeps others from the stream.
                return response.status

        (meter,) = (
            tenant.meter
            for name, tenant in group.proxy(1).parts.tenants._by_name.items()
            if name == "a"
        )
        assert meter is not None
        taking = [asyncio.create_task(take_over()) for _ in range(2)]
        await group.until(lambda: meter.open_streams == 1)
        statuses = await asyncio.gather(*taking)
        running, opened = sum(each.running for each in instances), meter.open_streams
        other = group.reader("other")
        await other.read(1, Authorization=OWN)

        assert statuses == [200, 200]
        assert (running, opened) == (1, 1)
        assert other.errors == ["rate_limit_exceeded"]
        async with group.http.delete(
            f"{group.url(1)}/v1/responses/{name}", headers=owner
        ) as response:
            assert response.status == 200
        await group.until(lambda: meter.open_streams == sum(each.running for each in instances))
        assert meter.open_streams == 0
