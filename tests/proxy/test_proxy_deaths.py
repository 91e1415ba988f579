"""Deaths of every kind, at every moment: the client gets its tokens, once each, or an explicit error."""

import asyncio
import time
from functools import partial
from typing import Any

import msgspec
import pytest

from kvrs.proxy import watchdog, watcher
from tests.proxy.conftest import HouseBuilder
from tests.proxy.house import House
from tests.proxy.scripted import Fault, Scripted
from tests.proxy.scripted_model import expected_ids, text_of

PROMPT = list(range(40))
TOKENS = 8
ASKED = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "play latin."}], "temperature": 0, "max_tokens": 12}


def start(house: House, count: int = 1, **fields: Any) -> list[asyncio.Task[tuple[int, bytes]]]:
    return [asyncio.create_task(house.complete(**ASKED, **fields)) for _ in range(count)]


async def held_open(house: House, count: int = 1, at: int = 3) -> list[asyncio.Task[tuple[int, bytes]]]:
    """Streams that wait after some tokens."""
    house.script.gate, house.script.gate_at = asyncio.Event(), at
    asked = start(house, count)
    await house.until_streams_hold(at, count=count)
    return asked


async def all_exact(asked: list[asyncio.Task[tuple[int, bytes]]]) -> bool:
    wanted = "".join(map(text_of, expected_ids(PROMPT, TOKENS)))
    answers = await asyncio.gather(*asked)
    return all(status == 200 and msgspec.json.decode(body)["choices"][0]["text"] == wanted for status, body in answers)


def release(house: House) -> None:
    assert house.script.gate is not None
    house.script.gate.set()


async def recoveries(house: House) -> list[Any]:
    rows: list[Any] = (await house.state())["recoveries"]
    return rows


# The prefill instance.


async def test_a_prefill_instance_that_is_dead_already_is_not_asked(build: HouseBuilder) -> None:
    """Before the hand-off: nothing goes there, nothing is recovered."""
    house = await build()
    await house.instances["p0"].kill()
    await house.until_health(p0="down")

    assert await all_exact(start(house, 4))

    assert await recoveries(house) == []
    assert len(house.instances["p1"].completions) == 4


async def test_a_prefill_instance_that_dies_at_work_is_replaced(build: HouseBuilder) -> None:
    """During prefill: the client, which has nothing yet, only waits a little longer."""
    house = await build()
    house.script.prefill_gate = asyncio.Event()
    asked = start(house, 4)
    await house.until(lambda: _truth(len(house.instances["p0"].completions) == 2))

    await house.instances["p0"].kill()
    await house.until_health(p0="down")
    house.script.prefill_gate.set()

    assert await all_exact(asked)
    assert {row["from"] for row in await recoveries(house)} == {"p0"}


async def test_a_prefill_instance_that_dies_after_the_hand_off_is_not_missed(build: HouseBuilder) -> None:
    """After it: the stream goes on untouched. What it retained is no source any more when decode dies as well."""
    house = await build(policy={"name": "always_migrate"})
    asked = await held_open(house)
    (row,) = (await house.state())["streams"]

    await house.instances[row["prefill"]].kill()
    await house.until_health(**{row["prefill"]: "down"})
    untouched = await recoveries(house)
    await house.instances[row["decode"]].kill()
    await house.until(lambda: _recovered(house, 1))
    release(house)

    assert untouched == []
    assert await all_exact(asked)
    assert [each["option"] for each in await recoveries(house)] == ["recompute"]


# Decode instances.


async def test_a_target_that_dies_during_a_recovery_is_replaced(build: HouseBuilder) -> None:
    """The recovery is decided again, and one token is not sent twice."""
    house = await build(pairs=3)
    asked = await held_open(house)
    (row,) = (await house.state())["streams"]

    await house.instances[row["decode"]].kill()
    await house.until(lambda: _recovered(house, 1))
    (first,) = await recoveries(house)
    await house.instances[first["to"]].kill()
    await house.until(lambda: _recovered(house, 2))
    release(house)

    assert await all_exact(asked)
    assert [each["outcome"] for each in await recoveries(house)] == ["failed", "resumed"]
    assert {each["to"] for each in await recoveries(house)} | {row["decode"]} == {"d0", "d1", "d2"}


async def test_several_instances_at_once_lose_no_stream(build: HouseBuilder) -> None:
    """Half the cluster, prefill and decode, in the same instant."""
    house = await build(pairs=4)
    asked = await held_open(house, count=16)
    on_them = {s["id"] for s in (await house.state())["streams"] if s["decode"] in ("d0", "d1")}

    await asyncio.gather(*(house.instances[name].kill() for name in ("d0", "p0", "d1", "p1")))
    await house.until_health(d0="down", d1="down", p0="down", p1="down")
    await house.until(lambda: _recovered(house, len(on_them)))
    release(house)

    assert await all_exact(asked)
    rows = await recoveries(house)
    assert {row["stream"] for row in rows} == on_them
    assert {row["to"] for row in rows} == {"d2", "d3"}


async def test_streams_that_break_before_their_instance_are_its_victims(build: HouseBuilder) -> None:
    """Under load their connections are read long before the watch's: still one event, of which none has used up two attempts."""
    house = await build(pairs=3, policy={"recovery": {"gather_s": 1.0}})
    asked = await held_open(house, count=9)
    on_it = {s["id"] for s in (await house.state())["streams"] if s["decode"] == "d0"}

    house.instances["d0"].cut_streams()
    await house.until(lambda: _fail_alone(house, "d0", len(on_it)))
    early = await recoveries(house)
    await house.instances["d0"].kill()
    await house.until(lambda: _recovered(house, len(on_it)))
    release(house)

    assert await all_exact(asked)
    rows = await recoveries(house)
    assert early == []
    assert {row["stream"] for row in rows} == on_it
    assert {(row["attempt"], row["from"]) for row in rows} == {(2, "d0")}


async def test_a_whole_node_with_its_agent_loses_no_stream(build: HouseBuilder) -> None:
    """What it held is gone with it."""
    house = await build(pairs=3, backup={"mode": "both"})
    asked = await held_open(house, count=6)

    await asyncio.gather(
        *(process.kill() for process in (house.instances["p0"], house.instances["d0"], house.agents["agent-n0"]))
    )
    await house.until_health(**{"d0": "down", "p0": "down", "agent-n0": "down"})
    release(house)

    assert await all_exact(asked)
    assert {row["from"] for row in await recoveries(house)} == {"d0"}


async def test_without_any_decode_instance_streams_wait_and_are_told(build: HouseBuilder) -> None:
    """All of them die; after `wait_s` each stream ends with an error event, and never looks complete."""
    house = await build(policy={"recovery": {"wait_s": 0.3}})
    house.script.gate, house.script.gate_at = asyncio.Event(), 3
    asked = start(house, 4, stream=True)
    await house.until_streams_hold(3, count=4)

    await asyncio.gather(*(house.instances[name].kill() for name in ("d0", "d1")))
    answers = await asyncio.gather(*asked)

    for status, body in answers:
        assert status == 200
        assert b"[DONE]" not in body
        *_, last, end = body.split(b"\n\n")
        assert end == b""
        assert msgspec.json.decode(last[6:])["error"]["code"] == "no_instance"
    assert (await house.state())["streams"] == []


async def test_streams_that_wait_go_on_with_the_first_decode_instance_that_returns(build: HouseBuilder) -> None:
    """The wait is worth it."""
    house = await build()
    asked = await held_open(house, count=4)

    await asyncio.gather(*(house.instances[name].kill() for name in ("d0", "d1")))
    await house.until_health(d0="down", d1="down")
    await house.instances["d1"].restart()
    release(house)

    assert await all_exact(asked)


async def test_a_client_that_leaves_in_the_moment_of_the_decision_leaves_nothing_behind(build: HouseBuilder) -> None:
    """The policy has just counted another attempt: the end of the stream is that of this one."""
    house = await build(policy={"recovery": {"gather_s": 0.0}})
    (asked,) = await held_open(house)
    driver = house.proxy._driver
    assert driver is not None
    (live,) = driver.streams.values()
    assert live.plan is not None

    live.outcome.cancel()  # What the end of its connection does to the handler; it runs on in the loop's next turn.
    driver.instance_lost(driver.instances.known[live.plan.decode], "killed")
    await asyncio.gather(asked, return_exceptions=True)

    await house.until(lambda: _has_no_stream(house))
    state = (await house.state())["policy"]
    assert set(state["streams"].values()) == {0}
    assert [(row["work_s"], row["decode_streams"]) for row in state["instances"] if row["running"]] == []


# Engines that say something else than tokens.


@pytest.mark.parametrize("asked", [ASKED, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.EMPTY, Fault.EOF, Fault.DONE_ONLY])
@pytest.mark.parametrize("position", [0, 3])
async def test_an_answer_that_only_looks_complete_is_a_failure(
    build: HouseBuilder, fault: Fault, position: int, asked: dict[str, Any]
) -> None:
    """An error event and then [DONE]; status 200 with nothing in it: both end well as HTTP goes."""
    house = await build()
    undisturbed = await house.complete(**asked)
    house.script.faults = {position: fault}

    disturbed = await house.complete(**asked)

    assert _choices(disturbed[1]) == _choices(undisturbed[1])
    assert not house.script.faults
    assert len(await recoveries(house)) == 1


async def test_a_prefill_that_answers_nothing_is_done_again(build: HouseBuilder) -> None:
    """Status 200 and an empty body is no hand-off."""
    house = await build()
    house.script.prefill_faults = [Fault.EMPTY]

    assert await all_exact(start(house))

    assert len(await recoveries(house)) == 1


# Silence.


async def test_a_hang_is_noticed_by_the_stream_s_own_pace_and_fenced_when_it_wakes(
    build: HouseBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process closes nothing: all its streams move together, long before `token_gap_s`; what it ran is dropped."""
    monkeypatch.setattr(watcher, "silent_after_s", lambda *_: 3600.0)
    house = await build(proxy={"token_gap_s": 3600.0})
    hung = house.instances["d0"]
    asked = await held_open(house, count=6)
    # The last that they say: they have a line. That is no excuse for one that says no more.
    hung.queued = house.instances["d1"].queued = 1
    await house.until(partial(_have_a_line, house, 2))
    on_it = {s["id"]: s["attempt"] + 1 for s in (await house.state())["streams"] if s["decode"] == "d0"}

    hung.freeze()
    await house.until_health(d0="down")
    release(house)

    assert await all_exact(asked)
    rows = await recoveries(house)
    assert {row["stream"] for row in rows} == set(on_it)
    assert "kvrs_attempts_failed_total{" not in await house.metrics(), "one event, not one per stream"
    hung.thaw()
    await house.until_health(d0="up")
    assert hung.fences == [on_it]


async def test_an_idle_instance_that_hangs_is_noticed_too(build: HouseBuilder) -> None:
    """By its reports, which come at a pace of their own: nothing must be sent there to find out."""
    house = await build(proxy={"token_gap_s": 3600.0})

    house.instances["d1"].freeze()
    await house.until_health(d1="down")
    house.instances["d1"].thaw()
    await house.until_health(d1="up")

    assert house.instances["d1"].fences == [{}]


async def test_a_stream_that_hangs_alone_fails_alone(build: HouseBuilder) -> None:
    """The instance reports on: it is not taken for dead."""
    house = await build(proxy={"token_gap_s": 3600.0})
    house.script.faults = {4: Fault.HANG}

    assert await all_exact(start(house))

    (row,) = await recoveries(house)
    assert "silent" in row["cause"]
    assert set((await house.health()).values()) == {"up"}


async def test_a_slow_instance_is_not_moved(build: HouseBuilder) -> None:
    """Ten times as slow is alive: a stream that crawls is left where it is."""
    house = await build(proxy={"token_gap_s": 3600.0})
    house.script.pause_s = 0.01
    asked = await held_open(house, at=4)

    house.script.pause_s = 0.1
    release(house)

    assert await all_exact(asked)
    assert await recoveries(house) == []


@pytest.mark.parametrize(
    ("usual_s", "longest_s", "limit_s"), [(0.001, 10.0, 2.0), (0.2, 10.0, 4.0), (1.0, 10.0, 10.0), (0.001, 0.5, 0.5)]
)
def test_silence_is_twenty_of_the_usual_intervals_within_bounds(usual_s: float, longest_s: float, limit_s: float) -> None:
    """At least 2 s, at most what the configuration allows."""
    assert watchdog.silent_after_s(usual_s, longest_s) == limit_s


async def test_a_proxy_that_was_stopped_itself_blames_nobody(build: HouseBuilder) -> None:
    """Who did not listen cannot say that nothing was said."""
    heard = asyncio.Event()

    async with watchdog.silence_limit(lambda: 0.2):
        time.sleep(0.5)  # Nothing runs meanwhile: that is the point.
        await asyncio.sleep(0.05)
        heard.set()

    assert heard.is_set()


# Hand-offs that go elsewhere.


async def redirected(house: House, prefill: str, slow: str) -> None:
    """While prefill works, the decode instance that was planned with gets a long queue."""
    gate = house.script.prefill_gate
    assert gate is not None
    await house.until(lambda: _truth(bool(house.instances[prefill].completions)))
    house.instances[slow].queue_delay_s = 100.0
    await house.until(lambda: _has_queue(house, slow, 100.0))
    gate.set()


async def test_a_redirected_hand_off_goes_by_the_new_plan(build: HouseBuilder) -> None:
    """The decode call goes there, that instance's death is the stream's, and a fence of the other one does not name it."""
    house = await build(policy={"handoff": "auto", "assumed_link_bytes_per_s": 1e9})
    house.script.prefill_gate = asyncio.Event()
    house.script.gate, house.script.gate_at = asyncio.Event(), 3
    asked = start(house)

    await redirected(house, "p0", "d0")
    await house.until_streams_hold(3)
    (row,) = (await house.state())["streams"]
    house.instances["d0"].cut_watch()
    await house.until(lambda: _truth(house.instances["d0"].epoch == 2))
    await house.instances["d1"].kill()
    await house.until(lambda: _recovered(house, 1))
    release(house)

    assert await all_exact(asked)
    assert (row["prefill"], row["decode"], row["attempt"]) == ("p0", "d1", 1)
    assert house.instances["d0"].fences == [{}]
    assert [len(house.instances[name].completions) for name in ("d0", "d1")] == [1, 1]
    (recovery,) = await recoveries(house)
    assert (recovery["from"], recovery["to"]) == ("d1", "d0")


async def test_a_redirected_recovery_finds_the_text_that_its_engine_needs(build: HouseBuilder, model: str) -> None:
    """An exact engine was planned with, and a plain one gets the hand-off: the proxy makes the text from there on."""

    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d2"].capabilities = []

    house = await build(
        pairs=3, model=model, prepare=prepare, policy={"name": "always_recompute", "handoff": "auto", "dispatch": "holders"}
    )
    asked = await held_open(house)
    (row,) = (await house.state())["streams"]
    house.script.prefill_gate = asyncio.Event()
    for instance in house.instances.values():
        instance.completions.clear()
    for name in ("d1", "d2"):
        house.instances[name].queue_delay_s = 10.0  # So that prefill instances compute.
        await house.until(partial(_has_queue, house, name, 10.0))

    await house.instances[row["decode"]].kill()
    await house.until(lambda: _recovered(house, 1))
    (recovery,) = await recoveries(house)
    planned = recovery["to"]
    await redirected(house, f"p{planned[1]}", planned)
    await house.until(lambda: _truth(bool(house.instances["d2"].completions)))
    release(house)

    assert await all_exact(asked)
    assert (row["decode"], planned, (await recoveries(house))[0]["to"]) == ("d0", "d1", "d2")


async def _has_no_stream(house: House) -> bool:
    return not (await house.state())["streams"]


async def _has_queue(house: House, name: str, seconds: float) -> bool:
    rows = (await house.state())["policy"]["instances"]
    return any(row["id"] == name and row["queue_s"] >= seconds for row in rows)


def _choices(body: bytes) -> Any:
    return msgspec.json.decode(body)["choices"]


async def _have_a_line(house: House, count: int) -> bool:
    return sum(bool(row["load"]["queued"]) for row in (await house.state())["instances"]) == count


async def _recovered(house: House, count: int) -> bool:
    return len(await recoveries(house)) >= count


async def _fail_alone(house: House, name: str, count: int) -> bool:
    return f'kvrs_attempts_failed_total{{instance="{name}"}} {float(count)}' in await house.metrics()


async def _truth(value: bool) -> bool:
    return value
