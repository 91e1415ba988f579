"""Proxies that come and go while others serve, by a reload of `proxy.peers`."""

import asyncio
from typing import Any

import pytest

from kvrs.config.file import Config, parse_config
from kvrs.errors import ConfigError
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group


async def test_proxies_come_and_go_at_a_reload() -> None:
    """A stream whose mirror leaves gets another one, and one that joins takes part at once."""
    async with open_proxy_group(3) as group:
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 3
        reader = group.reader()
        reading = asyncio.create_task(reader.read(0))
        await group.until(lambda: len(reader.events) == 3 and group.mirror_of_stream() is not None)
        leaves = group.mirror_of_stream()
        (stays,) = {"proxy-1", "proxy-2"} - {leaves}
        whole, of_the_removed = group.configs[0], group.mirror(0).peers._tasks[leaves or ""]

        await _reload(group, _with_peers(whole, [stays]))
        await group.until(lambda: group.mirror_of_stream() == stays)
        known = [*group.mirror(0).peers.known]
        share = group.proxy(0).parts.driver.control.slots._share
        await group.until(lambda: all(task.cancelled() for task in of_the_removed))
        await _reload(group, whole)
        await group.until(lambda: group.mirror(0).peers.live_ids == {leaves, stays})
        await group.kill(int(stays[-1]))
        await group.until(lambda: group.mirror_of_stream() == leaves)
        gate.set()
        await reading

    assert known == [stays]
    assert share == whole.policy.slots_max // 2
    assert reader.done
    assert reader.errors == []


async def test_a_peer_keeps_its_address() -> None:
    """Else its streams would be taken for those of another proxy; nothing has changed then."""
    async with open_proxy_group(2) as group:
        moved = _with_peers(group.configs[0], ["proxy-1"], peer_port=9)

        with pytest.raises(ConfigError) as caught:
            await _reload(group, moved)

        assert group.mirror(0).peers.live_ids == {"proxy-1"}
    assert caught.value.faults == [
        "proxy.peers: 'proxy-1' has another address; allowed: as it was, or another id"
    ]


async def test_a_peer_that_is_not_reached_is_counted() -> None:
    """Until it is back, so that an alert can fire."""
    async with open_proxy_group(3) as group:
        before = _unreached(group)
        await group.kill(1)
        await group.until(lambda: _unreached(group) == 1)
        await group.start(1)
        await group.until(lambda: _unreached(group) == 0)

    assert before == 0


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ({"id": "a"}, "does the entry of 'a' in proxy.peers lack its `workers: N`?"),
        ({"id": "a.0"}, "is `workers` of 'a' in proxy.peers its proxy.workers?"),
    ],
)
async def test_a_peer_with_another_number_of_workers_is_named_as_the_cause(
    entry: dict[str, Any], hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that answers there under another name is most likely that proxy, with workers or
    without, and not one with another secret.
    """
    async with open_proxy_group(2) as group:
        await _reload(group, _with_peers(group.configs[0], ["proxy-1"], **entry))

        await group.until(lambda: any(hint in cause for cause in _causes_of(caplog, entry["id"])))
        unreached = _unreached(group)

    assert unreached == 1


def _unreached(group: MultiProxyCluster) -> float | None:
    """Peers that proxy-0 does not reach, as Prometheus sees it."""
    registry = group.proxy(0).parts.metrics.registry
    return registry.get_sample_value("kvrs_peers_unreached")


def _causes_of(caplog: pytest.LogCaptureFixture, proxy: str) -> list[str]:
    """Why a proxy was not reached, as logged."""
    return [
        record.__dict__["cause"]
        for record in caplog.records
        if record.message == "proxy not reached" and record.__dict__["proxy"] == proxy
    ]


def _with_peers(config: Config, names: list[str], **changes: Any) -> Config:
    document = config.model_dump(mode="json")
    peers = [peer | changes for peer in document["proxy"]["peers"] if peer["id"] in names]
    return parse_config(document | {"proxy": document["proxy"] | {"peers": peers}})


async def _reload(group: MultiProxyCluster, config: Config) -> None:
    """Reload proxy-0, whose file has become another one."""
    group.proxy(0).reloads._read = lambda: config
    result = await group.proxy(0).reload()
    assert (result.applied, result.restart_needed) == (["proxy.peers"], [])
