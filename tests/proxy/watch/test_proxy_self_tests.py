"""Self-tests of instances with the instance protocol: what is seen, what it costs, and whom."""

import asyncio
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.config.file import load_config
from kvrs.core.fleet import self_tests as book
from kvrs.net.admin import AdminClient, AdminError
from kvrs.protocol.instance import Capability
from kvrs_lab.load.admin_port import AdminPort
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Fault, Scripted
from kvrs_testkit.scripted_model import Arithmetic, Sampler, expected_ids, text_of
from tests.proxy.conftest import ProxyClusterBuilder

PROMPT = list(range(40))
ON = {"self_test": True}
PATIENCE_S = 30.0  # Only ends what hangs.


async def self_tests(system: ProxyCluster) -> dict[str, Any]:
    """The self-tests in the state, when all have ended."""
    found: dict[str, Any] = {}

    async def holds() -> bool:
        found.update({row["id"]: row["self_test"] for row in (await system.state())["instances"]})
        return all(row is not None and row["done"] for row in found.values())

    await system.until(holds)
    return found


async def test_what_works_is_seen(build: ProxyClusterBuilder) -> None:
    """The list has what was declared and seen, and how exactly a stream is continued."""
    system = await build(proxy=ON)

    found = await self_tests(system)

    assert {name: row["moves_kv"] for name, row in found.items()} == dict.fromkeys(found, True)
    declared = [capability.value for capability in Capability]
    assert found["d0"]["capabilities"] == [*declared, "exact seeded"]
    assert found["p0"]["capabilities"] == declared
    assert [row["differs_from"] for row in found.values()] == [[]] * 4


async def test_self_tests_are_no_streams_of_clients(build: ProxyClusterBuilder) -> None:
    """No metric, state or record of answers counts them; what they kept is given back."""
    system = await build(proxy=ON)
    await self_tests(system)

    state = await system.state()
    released = [
        stream
        for instance in system.instances.values()
        for update in instance.lease_updates
        for stream in update.release
    ]

    assert (state["streams"], state["recoveries"]) == ([], [])
    for series in (
        "kvrs_streams_active",
        "kvrs_tokens_relayed_total",
        "kvrs_attempts_failed_total",
    ):
        assert await system.count(series) == 0, series
    assert all(stream.startswith("selftest-") for stream in released)
    assert len(released) >= 2


async def test_self_tests_cost_a_few_tokens(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per process of an instance."""
    monkeypatch.setattr(book, "_LATER_S", 0.1)
    system = await build(proxy=ON)
    await self_tests(system)
    calls = {name: len(each.completions) for name, each in system.instances.items()}

    system.instances["d0"].cut_watch()
    await system.until(lambda: _fenced(system, "d0"))  # It is down for a moment only.
    await system.until_health(d0="up")
    await self_tests(system)
    cut = len(system.instances["d0"].completions)
    await system.instances["d0"].kill()
    await system.until_health(d0="down")
    await system.instances["d0"].restart()
    await system.until_health(d0="up")
    await self_tests(system)

    assert max(calls.values()) <= 8
    assert cut == calls["d0"]
    assert len(system.instances["d0"].completions) > cut


async def test_engines_put_self_tests_before_new_requests(build: ProxyClusterBuilder) -> None:
    """No test waits behind the prompts of a loaded instance: its calls are later attempts, by which
    an engine knows recoveries.
    """
    system = await build(proxy=ON)

    await self_tests(system)

    attempts = [
        call.kvrs.attempt if call.kvrs else 1
        for each in system.instances.values()
        for call in each.completions
    ]
    assert len(attempts) >= 4
    assert min(attempts) > 1


async def _fenced(system: ProxyCluster, name: str) -> bool:
    return bool(system.instances[name].fences)


@pytest.mark.network
async def test_a_wait_for_all_can_be_for_their_tests_too(build: ProxyClusterBuilder) -> None:
    """An experiment that counts KV must not begin while a test moves some."""

    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d1"].hangs_on = "selftest-"

    system = await build(proxy=ON, prepare=prepare)
    url = f"http://127.0.0.1:{system.proxy.admin_port}"
    async with AdminPort(AdminClient(url)) as port:
        await port.wait_all_up(PATIENCE_S, 0.01)
        with pytest.raises(AdminError, match=r"not up and tested after 0 s: .*d1"):
            await port.wait_all_up(0.3, 0.01, tested=True)

        system.instances["d1"].hangs_on = ""
        await system.instances["d1"].kill()
        await system.until_health(d1="down")
        await system.instances["d1"].restart()
        await port.wait_all_up(PATIENCE_S, 0.01, tested=True)
        found = {row["id"]: row["self_test"] for row in (await system.state())["instances"]}

    assert all(row["done"] for row in found.values())


async def test_an_instance_serves_while_it_is_tested(build: ProxyClusterBuilder) -> None:
    """A test that hangs delays no stream; nothing is fetched to or from what it has not seen."""

    def prepare(instances: dict[str, Scripted]) -> None:
        for instance in instances.values():
            instance.hangs_on = "selftest-"

    system = await build(proxy=ON, prepare=prepare)
    system.script.faults[3] = Fault.RESET

    status, body = await system.complete(prompt=PROMPT, max_tokens=6, temperature=0)
    (recovery,) = (await system.state())["recoveries"]

    assert status == 200
    assert "".join(map(text_of, expected_ids(PROMPT, 6))).encode()[:3] in body
    assert recovery["option"] == "recompute"


async def test_an_instance_that_is_removed_within_its_test_ends_that_alone(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Services come and go; a bug of tests would end the proxy at the third time."""

    def prepare(instances: dict[str, Scripted]) -> None:
        script = instances["d1"].script
        script.gate, script.gate_at = asyncio.Event(), 2

    async def is_tested() -> bool:
        return bool(system.instances["d1"].completions)

    async def is_gone() -> bool:
        return "d1" not in await system.health()

    async def is_over() -> bool:
        processes = system.proxy.parts.driver.control.self_tests.processes
        return all(life.test is None for life in processes.values())

    path = tmp_path / "kvrs.yaml"
    read = partial(load_config, path)
    system = await build(proxy=ON, prepare=prepare, cluster_drain_s=0.0, read=read)
    await system.until(is_tested)
    document = system.proxy.reloads.config.model_dump(mode="json")
    for node in document["cluster"]["nodes"]:
        node["instances"] = [each for each in node["instances"] if each["id"] != "d1"]
    path.write_bytes(msgspec.json.encode(document))
    await system.proxy.reload()
    await system.until(is_gone)
    assert system.script.gate is not None
    system.script.gate.set()
    found = await self_tests(system)
    await system.until(is_over)

    assert "d1" not in found
    assert await system.count("kvrs_task_failures_total", task="self_tests") == 0


async def test_engines_that_do_not_count_are_believed(build: ProxyClusterBuilder) -> None:
    """Third-party engines with the instance protocol may lack the counter."""

    def prepare(instances: dict[str, Scripted]) -> None:
        for instance in instances.values():
            instance.fetched_pages = None

    found = await self_tests(await build(proxy=ON, prepare=prepare))

    assert {row["moves_kv"] for row in found.values()} == {True}


async def test_an_engine_that_only_says_that_it_is_exact_is_not(
    build: ProxyClusterBuilder,
) -> None:
    """Sampling that starts anew at a cut is seen, whatever is declared."""

    def prepare(instances: dict[str, Scripted]) -> None:
        for instance in instances.values():
            instance.arithmetic = Arithmetic(sampler=Sampler.GENERATOR)

    system = await build(proxy=ON | {"inexact": "refuse"}, prepare=prepare)
    found = await self_tests(system)

    sampled, _ = await system.complete(prompt=PROMPT, temperature=1)
    greedy, _ = await system.complete(prompt=PROMPT, temperature=0)

    assert found["d0"]["continues"] == "exact greedy"
    assert (sampled, greedy) == (400, 200)


async def test_an_engine_that_refuses_to_draw_is_tested_with_what_it_takes(
    build: ProxyClusterBuilder,
) -> None:
    """The test ends, and the engine continues all that it takes exactly."""

    def prepare(instances: dict[str, Scripted]) -> None:
        for instance in instances.values():
            instance.draws = False

    system = await build(proxy=ON | {"inexact": "refuse"}, prepare=prepare)
    found = await self_tests(system)

    status, _ = await system.complete(prompt=PROMPT, max_tokens=6)

    assert (found["d0"]["continues"], found["d0"]["failures"]) == ("exact seeded", 0)
    assert (found["d0"]["differs_from"], status) == ([], 200)


# Fault 67: an abort by prefix.


async def test_no_stream_s_name_begins_with_another_one_s(build: ProxyClusterBuilder) -> None:
    """Some engines end all requests whose names begin with the one that is to be ended."""
    system = await build(proxy=ON)
    await self_tests(system)

    for _ in range(3):
        await system.complete(prompt=PROMPT, n=4, max_tokens=2, temperature=1)
    names = {body["kvrs"]["stream"] for each in system.instances.values() for body in each.bodies}

    assert len(names) >= 3 * 4 + 6
    for one, other in itertools.permutations(names, 2):
        assert not one.startswith(other)
