"""Deaths of every kind, at every moment: the client gets its tokens, once each, or an explicit
error.
"""

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import msgspec
import pytest

from kvrs.core.fleet import silence
from kvrs.core.watch import WatchLimits
from kvrs.ids import InstanceId
from kvrs.proxy.streams.driver import CALLS_IN_TURN
from kvrs.proxy.streams.open_stream import Failed
from kvrs.proxy.wire.upstream import Pool, Upstream
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Fault, Scripted
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.proxy.conftest import ProxyClusterBuilder

PROMPT = list(range(40))
TOKENS = 8
REQUEST = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
CHAT = {
    "messages": [{"role": "user", "content": "play latin."}],
    "temperature": 0,
    "max_tokens": 12,
}


def start(
    system: ProxyCluster, count: int = 1, **fields: Any
) -> list[asyncio.Task[tuple[int, bytes]]]:
    return [asyncio.create_task(system.complete(**REQUEST, **fields)) for _ in range(count)]


async def held_open(
    system: ProxyCluster, count: int = 1, at: int = 3
) -> list[asyncio.Task[tuple[int, bytes]]]:
    """Streams that wait after some tokens."""
    system.script.gate, system.script.gate_at = asyncio.Event(), at
    asked = start(system, count)
    await system.until_streams_hold(at, count=count)
    return asked


async def all_exact(asked: list[asyncio.Task[tuple[int, bytes]]]) -> bool:
    wanted = "".join(map(text_of, expected_ids(PROMPT, TOKENS)))
    answers = await asyncio.gather(*asked)
    return all(
        status == 200 and msgspec.json.decode(body)["choices"][0]["text"] == wanted
        for status, body in answers
    )


def release(system: ProxyCluster) -> None:
    assert system.script.gate is not None
    system.script.gate.set()


async def recoveries(system: ProxyCluster) -> list[Any]:
    rows: list[Any] = (await system.state())["recoveries"]
    return rows


# Decode instances.


async def test_a_recovery_has_one_record(build: ProxyClusterBuilder) -> None:
    """The state and the incident on the page show the same one; a request that nothing befalls has
    neither.
    """
    system = await build()
    await asyncio.gather(*start(system, 3))
    driver = system.proxy.parts.driver
    assert len(driver.recoveries.entries) + len(driver.recoveries.latest) == 0
    asked = await held_open(system, count=3)

    await system.instances["d0"].kill()
    release(system)

    assert await all_exact(asked)
    (incident,) = driver.recoveries.entries
    made = {id(each) for victim in incident.victims.values() for each in victim.decisions}
    assert made == {*map(id, driver.recoveries.latest)}
    assert len(made) > 0
    rows = await recoveries(system)
    assert [row["real_s"] for row in rows] == [each.real_s for each in driver.recoveries.latest]
    assert driver.recoveries.hit == {}


async def test_victims_of_one_death_call_a_few_in_each_turn_of_the_loop(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, tokens of other streams are read between these few and the next. One
    that ends while it waits for its turn keeps no other from calling.
    """
    system = await build(pairs=2)
    asked = await held_open(system, count=24)
    driver = system.proxy.parts.driver
    d0 = driver.control.instances.known[InstanceId("d0")]
    victims = [live for live in driver.streams.values() if live.attempt.decodes_on is d0]
    turn, called, take = 0, dict[object, int](), Pool.take

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def noted_take(pool: Pool) -> Upstream:
        is_first = not called
        called.setdefault(asyncio.current_task(), turn)  # An attempt may call prefill, then decode.
        if is_first:
            driver.end_early(victims[-1].id, Failed(503, b"{}"))
        return await take(pool)

    monkeypatch.setattr(Pool, "take", noted_take)
    counting = asyncio.create_task(count_turns())
    driver.control.instance_lost(d0, "killed", driver.clock())
    await system.until(lambda: _truth(len(called) >= len(victims) - 1))
    counting.cancel()
    release(system)
    statuses = [status for status, _ in await asyncio.gather(*asked)]

    in_turn = Counter(called.values())
    assert len(victims) > CALLS_IN_TURN
    assert max(in_turn.values()) <= CALLS_IN_TURN
    assert 1 < len(in_turn) < len(called)
    assert sorted(statuses) == [200] * 23 + [503]


async def test_a_client_that_leaves_in_the_moment_of_the_decision_leaves_nothing_behind(
    build: ProxyClusterBuilder,
) -> None:
    """The policy has just counted another attempt: the end of the stream is that of this one."""
    system = await build(policy={"recovery": {"gather_s": 0.0}})
    (asked,) = await held_open(system)
    driver = system.proxy.parts.driver
    (live,) = driver.streams.values()
    assert live.attempt.plan is not None

    # What the end of its connection does to the handler; it runs on in the loop's next turn.
    live.outcome.cancel()
    known = driver.control.instances.known[live.attempt.plan.decode]
    driver.control.instance_lost(known, "killed", driver.clock())
    await asyncio.gather(asked, return_exceptions=True)

    await system.until(lambda: _has_no_stream(system))
    state = (await system.state())["policy"]
    assert set(state["streams"].values()) == {0}
    assert [
        (row["work_s"], row["decode_streams"]) for row in state["instances"] if row["running"]
    ] == []


# Engines that send something other than tokens.


@pytest.mark.parametrize("asked", [REQUEST, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.EMPTY, Fault.EOF, Fault.DONE_ONLY])
@pytest.mark.parametrize("position", [0, 3])
async def test_an_answer_that_only_looks_complete_is_a_failure(
    build: ProxyClusterBuilder, fault: Fault, position: int, asked: dict[str, Any]
) -> None:
    """An error event and then [DONE]; status 200 without content: both are complete HTTP
    responses.
    """
    system = await build()
    undisturbed = await system.complete(**asked)
    system.script.faults = {position: fault}

    disturbed = await system.complete(**asked)

    assert _choices(disturbed[1]) == _choices(undisturbed[1])
    assert not system.script.faults
    assert len(await recoveries(system)) == 1


@pytest.mark.parametrize("fault", [Fault.EMPTY, Fault.RESET, Fault.UNAVAILABLE, Fault.HANG])
async def test_a_prefill_that_fails_is_done_again(build: ProxyClusterBuilder, fault: Fault) -> None:
    """The client only waits a little longer. Status 200 and an empty body is no hand-off."""
    system = await build(proxy={"token_gap_s": 0.5})
    system.script.prefill_faults = [fault]

    assert await all_exact(start(system))

    assert len(await recoveries(system)) == 1


# Silence.


@pytest.mark.usefixtures("quick_suspicion")
async def test_a_hang_is_noticed_by_the_stream_s_own_pace_and_fenced_when_it_wakes(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process closes nothing: all its streams move together, long before `token_gap_s`;
    what it ran is dropped.
    """
    monkeypatch.setattr(WatchLimits, "silence_s", lambda *_, **__: 3600.0)
    system = await build(proxy={"token_gap_s": 3600.0})
    hung = system.instances["d0"]
    asked = await held_open(system, count=6)
    # Their last reports have a queue, which does not excuse an instance that reports no more.
    hung.queued = system.instances["d1"].queued = 1
    await system.until(partial(_have_a_line, system, 2))
    on_it = {
        s["id"]: s["attempt"] + 1 for s in (await system.state())["streams"] if s["decode"] == "d0"
    }

    hung.freeze()
    await system.until_health(d0="down")
    release(system)

    assert await all_exact(asked)
    rows = await recoveries(system)
    assert {row["stream"] for row in rows} == set(on_it)
    assert await system.count("kvrs_attempts_failed_total") == 0, "one event, not one per stream"
    hung.thaw()
    await system.until_health(d0="up")
    assert hung.fences == [on_it]


@pytest.mark.usefixtures("quick_suspicion")
async def test_a_stream_that_hangs_alone_fails_alone(build: ProxyClusterBuilder) -> None:
    """The instance reports on: it is not taken for dead."""
    system = await build(proxy={"token_gap_s": 3600.0})
    system.script.faults = {4: Fault.HANG}

    assert await all_exact(start(system))

    (row,) = await recoveries(system)
    assert "silent" in row["cause"]
    assert set((await system.health()).values()) == {"up"}


@pytest.mark.usefixtures("quick_suspicion")
@pytest.mark.parametrize(
    ("usual_s", "longest_s", "limit_s"),
    [(0.001, 10.0, 2.0), (0.2, 10.0, 4.0), (1.0, 10.0, 10.0), (0.001, 0.5, 0.5)],
)
def test_silence_is_twenty_of_the_usual_intervals_within_bounds(
    usual_s: float, longest_s: float, limit_s: float
) -> None:
    """At least 2 s, at most what the configuration allows."""
    assert silence.silent_after_s(usual_s, longest_s) == limit_s


# Hand-offs that go elsewhere.


async def redirected(system: ProxyCluster, prefill: str, slow: str) -> None:
    """While prefill works, the decode instance that was planned with gets a long queue."""
    gate = system.script.prefill_gate
    assert gate is not None
    await system.until(lambda: _truth(bool(system.instances[prefill].completions)))
    system.instances[slow].queue_delay_s = 100.0
    await system.until(lambda: _has_queue(system, slow, 100.0))
    gate.set()


async def test_a_redirected_hand_off_goes_by_the_new_plan(build: ProxyClusterBuilder) -> None:
    """The decode call goes there, that instance's death is the stream's, and a fence of the other
    one does not name it.
    """
    system = await build(policy={"handoff": "auto", "assumed_link_bytes_per_s": 1e9})
    system.script.prefill_gate = asyncio.Event()
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = start(system)

    await redirected(system, "p0", "d0")
    await system.until_streams_hold(3)
    (row,) = (await system.state())["streams"]
    system.instances["d0"].cut_watch()
    await system.until(lambda: _truth(system.instances["d0"].epoch == 2))
    await system.instances["d1"].kill()
    await system.until(lambda: _recovered(system, 1))
    release(system)

    assert await all_exact(asked)
    assert (row["prefill"], row["decode"], row["attempt"]) == ("p0", "d1", 1)
    assert system.instances["d0"].fences == [{}]
    assert [len(system.instances[name].completions) for name in ("d0", "d1")] == [1, 1]
    (recovery,) = await recoveries(system)
    assert (recovery["from"], recovery["to"]) == ("d1", "d0")


async def test_a_redirected_recovery_finds_the_text_that_its_engine_needs(
    build: ProxyClusterBuilder, model: str
) -> None:
    """An exact engine was planned with, and a plain one gets the hand-off: the proxy makes the text
    from there on.
    """

    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d2"].capabilities = []

    system = await build(
        pairs=3,
        model=model,
        prepare=prepare,
        policy={"name": "always_recompute", "handoff": "auto", "dispatch": "holders"},
    )
    asked = await held_open(system)
    (row,) = (await system.state())["streams"]
    system.script.prefill_gate = asyncio.Event()
    for instance in system.instances.values():
        instance.completions.clear()
    for name in ("d1", "d2"):
        system.instances[name].queue_delay_s = 10.0  # So that prefill instances compute.
        await system.until(partial(_has_queue, system, name, 10.0))

    await system.instances[row["decode"]].kill()
    await system.until(lambda: _recovered(system, 1))
    (recovery,) = await recoveries(system)
    planned = recovery["to"]
    await redirected(system, f"p{planned[1]}", planned)
    await system.until(lambda: _truth(bool(system.instances["d2"].completions)))
    release(system)

    assert await all_exact(asked)
    assert (row["decode"], planned, (await recoveries(system))[0]["to"]) == ("d0", "d1", "d2")


async def _has_no_stream(system: ProxyCluster) -> bool:
    return not (await system.state())["streams"]


async def _has_queue(system: ProxyCluster, name: str, seconds: float) -> bool:
    rows = (await system.state())["policy"]["instances"]
    return any(row["id"] == name and row["queue_s"] >= seconds for row in rows)


def _choices(body: bytes) -> Any:
    return msgspec.json.decode(body)["choices"]


async def _have_a_line(system: ProxyCluster, count: int) -> bool:
    return sum(bool(row["load"]["queued"]) for row in (await system.state())["instances"]) == count


async def _recovered(system: ProxyCluster, count: int) -> bool:
    return len(await recoveries(system)) >= count


async def _truth(value: bool) -> bool:
    return value
