"""What the proxy is promised by clients, and what it writes down: deadlines, costs and regret, the event log."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.config import Config, parse_config
from kvrs.errors import ConfigError
from kvrs.policy.actions import Recovered, Settled, Start
from kvrs.policy.event_log import Entry, header_line, read, rerun
from kvrs.policy.events import AttemptFailed, CheckpointsReported, HolderLost, InstanceLost, InstanceUp, StreamArrived, TimerFired
from kvrs.proxy import event_log
from kvrs.proxy.event_log import EventLog
from kvrs.proxy.server import Proxy
from tests.proxy.conftest import HouseBuilder
from tests.proxy.house import House
from tests.proxy.scripted import SECRET, Fault

ASKED: dict[str, Any] = {"prompt": list(range(40)), "max_tokens": 8, "temperature": 0}
CONFIG = Config()


def header(part: int) -> str:
    return header_line(CONFIG.policy, CONFIG.slo, CONFIG.backup, part)


def arrivals(path: Path) -> list[StreamArrived]:
    records = read(path.read_text().splitlines())
    return [each.event for each in records if isinstance(each, Entry) and isinstance(each.event, StreamArrived)]


# Deadlines.


@pytest.mark.parametrize("name", ["x-kvrs-ttft-s", "X-Kvrs-Recovery-Gap-S", "x-kvrs-deadline-s"])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1_0", "soon", "1e9", "5 s", "٣"])
async def test_a_deadline_that_is_none_is_refused(build: HouseBuilder, name: str, value: str) -> None:
    """With its value and the range; nothing is sent to any engine."""
    house = await build(pairs=1)

    status, body = await house.ask(ASKED, {name: value})

    error = msgspec.json.decode(body)["error"]
    assert status == 400
    assert error["param"] == name.lower()
    assert repr(value)[1:-1] in error["message"]
    assert "allowed: seconds above 0, up to" in error["message"]
    assert house.instances["p0"].completions == []


async def test_deadlines_and_lengths_reach_the_policy(build: HouseBuilder, tmp_path: Path) -> None:
    """The client's headers, and what the stream may come to: what it asks for, and at most what the instances can."""
    path = tmp_path / "events"
    house = await build(pairs=1, proxy={"event_log": str(path)})
    promised = {"x-kvrs-ttft-s": "1.5", "X-KVRS-Recovery-Gap-S": "2", "x-kvrs-deadline-s": "3e1"}

    await house.ask(ASKED, promised)
    await house.complete(**ASKED | {"max_tokens": 4090})
    await house.complete(prompt="play latin.", temperature=0, max_tokens=5)
    await house.proxy.close()

    first, second, third = arrivals(path)
    assert (first.deadlines.ttft_s, first.deadlines.recovery_gap_s, first.deadlines.end_to_end_s) == (1.5, 2.0, 30.0)
    assert (first.prompt_tokens, first.most_tokens) == (40, 48)
    assert (second.deadlines.ttft_s, second.deadlines.end_to_end_s) == (None, None)
    assert second.most_tokens == 4130
    ups = [each.event for each in read(path.read_text().splitlines()) if isinstance(each, Entry)]
    assert {event.instance.max_model_len for event in ups if isinstance(event, InstanceUp)} == {4096}
    assert third.most_tokens == third.prompt_tokens + 5


async def test_the_choices_of_a_request_share_its_deadlines(build: HouseBuilder, tmp_path: Path) -> None:
    """Each is a stream of its own."""
    path = tmp_path / "events"
    house = await build(pairs=1, proxy={"event_log": str(path)})

    await house.ask(ASKED | {"n": 3}, {"x-kvrs-ttft-s": "7"})
    await house.proxy.close()

    assert [arrived.deadlines.ttft_s for arrived in arrivals(path)] == [7.0] * 3


async def test_what_cannot_be_brought_back_in_time_is_told_at_once(build: HouseBuilder) -> None:
    """With `slo.abort` a client's own deadline decides over its own stream only."""
    house = await build(slo={"abort": True})
    house.script.gate, house.script.gate_at = asyncio.Event(), 3
    hurried = asyncio.create_task(house.ask(ASKED, {"x-kvrs-recovery-gap-s": "1e-6"}))
    patient = asyncio.create_task(house.complete(**ASKED))
    await house.until_streams_hold(3, count=2)

    await asyncio.gather(*(house.instances[name].kill() for name in ("d0", "d1")))
    status, body = await hurried
    await house.instances["d1"].restart()
    house.script.gate.set()

    assert (status, msgspec.json.decode(body)["error"]["code"]) == (503, "slo")
    assert (await patient)[0] == 200


# Costs.


async def test_a_settled_recovery_says_what_it_cost_and_what_it_would_have(build: HouseBuilder) -> None:
    """Raw, predicted, real, regret: in the state and in the metrics."""
    house = await build(policy={"name": "always_recompute"})
    house.script.faults = {3: Fault.RESET}

    await house.complete(**ASKED)

    (row,) = (await house.state())["recoveries"]
    others = [each["total_s"] for each in row["estimates"] if each["option"] != row["option"]]
    assert row["raw_s"] > 0
    assert row["regret_s"] >= row["real_s"] - min(others) - 0.1
    metrics = await house.metrics()
    assert 'kvrs_recovery_regret_seconds_count{option="recompute"} 1.0' in metrics
    assert 'kvrs_recovery_regret_seconds_bucket{le="-0.001",option="recompute"}' in metrics
    assert 'kvrs_recovery_correction{option="recompute"}' in metrics


async def test_a_recovery_that_failed_settles_nothing(build: HouseBuilder) -> None:
    """Its cost is that of the one after it."""
    house = await build(pairs=3)
    house.script.gate, house.script.gate_at = asyncio.Event(), 3
    asked = asyncio.create_task(house.complete(**ASKED))
    await house.until_streams_hold(3)
    (row,) = (await house.state())["streams"]

    await house.instances[row["decode"]].kill()
    await house.until(lambda: _recovered(house, 1))
    (first,) = (await house.state())["recoveries"]
    await house.instances[first["to"]].kill()
    await house.until(lambda: _recovered(house, 2))
    house.script.gate.set()
    await asked

    failed, resumed = (await house.state())["recoveries"]
    assert (failed["outcome"], failed["raw_s"], failed["regret_s"]) == ("failed", None, None)
    assert resumed["outcome"] == "resumed"
    assert resumed["regret_s"] is not None


# The event log.


async def test_an_incident_runs_again_to_the_same_actions(build: HouseBuilder, tmp_path: Path) -> None:
    """Deaths of instances and agents, broken attempts, a client that leaves: the file holds all that the policy was told."""
    path = tmp_path / "events"
    house = await build(pairs=3, proxy={"event_log": str(path)}, backup={"mode": "both"}, transfer={"lease_s": 0.3})
    house.script.gate, house.script.gate_at = asyncio.Event(), 3
    house.script.faults = {1: Fault.RESET, 2: Fault.ERROR}
    asked = [asyncio.create_task(house.complete(**ASKED)) for _ in range(8)]
    await house.until_streams_hold(3, count=8)
    for row in (await house.state())["streams"]:
        for agent in row["protected"]:
            house.agents[agent].pages[row["id"]] = 2
    await house.until(lambda: _protected(house, 8))

    await asyncio.gather(house.instances["d0"].kill(), house.agents["agent-n1"].kill())
    await house.until_health(**{"d0": "down", "agent-n1": "down"})
    asked.pop().cancel()
    house.script.gate.set()
    answers = await asyncio.gather(*asked)
    await house.proxy.close()

    assert [status for status, _ in answers] == [200] * 7
    again = rerun(path.read_text().splitlines())
    assert again.difference is None
    kinds = {kind.__name__ for kind in (Start, Recovered, Settled, InstanceLost, HolderLost, CheckpointsReported, AttemptFailed)}
    assert kinds - again.counts.keys() == set()
    assert again.counts["StreamEnded"] == 8


async def test_a_long_log_goes_on_in_another_file(build: HouseBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One old part is kept; both together run again, and each says which part it is."""
    monkeypatch.setattr(event_log, "_WRITE_INTERVAL_S", 0.01)
    path, old = tmp_path / "events", tmp_path / "events.1"
    house = await build(pairs=1, proxy={"event_log": str(path), "event_log_bytes": 40_000})

    async def asked_on() -> bool:
        await asyncio.gather(*(house.complete(**ASKED) for _ in range(5)))
        return old.exists()

    await house.until(asked_on)
    await house.proxy.close()

    lines = [*old.read_text().splitlines(), *path.read_text().splitlines()]
    assert [msgspec.json.decode(line)["part"] for line in lines if "kvrs_event_log" in line] == [1, 2]
    assert old.stat().st_size >= 40_000
    again = rerun(lines)
    assert again.difference is None
    assert again.counts["StreamArrived"] % 5 == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["events", "events.1"]


async def test_a_new_proxy_begins_a_new_log(tmp_path: Path) -> None:
    """What the one before has written is put aside, whole."""
    path = tmp_path / "events"
    path.write_text("before\n")

    opened = EventLog(path, 1 << 20, header)
    opened.open()
    opened.note(1.0, TimerFired(), ())
    await opened.close()

    assert path.with_name("events.1").read_text() == "before\n"
    assert len(path.read_text().splitlines()) == 2


async def test_a_log_is_on_disk_before_the_proxy_ends(
    build: HouseBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks at it during an incident sees all but the last moments."""
    monkeypatch.setattr(event_log, "_WRITE_INTERVAL_S", 0.01)
    path = tmp_path / "events"
    house = await build(pairs=1, proxy={"event_log": str(path)})

    await house.complete(**ASKED)

    await house.until(lambda: _truth("StreamEnded" in path.read_text()))


async def test_what_a_cancelled_writer_had_taken_is_written(tmp_path: Path) -> None:
    """The proxy's end comes at any moment, also between two writes."""
    path = tmp_path / "events"
    opened = EventLog(path, 1 << 20, header)
    opened.open()
    busy = threading.Event()
    opened._writer.submit(busy.wait)

    opened.note(1.0, TimerFired(), ())
    flushing = asyncio.create_task(opened.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    busy.set()
    await opened.close()

    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["missing/events", "."])
async def test_a_log_that_cannot_be_written_stops_the_start(tmp_path: Path, name: str) -> None:
    """An operator who asked for a log learns at once that there will be none; nothing is left running."""
    path = tmp_path / name
    instances = [{"id": "b0", "role": "both", "port": 1}]
    document = {
        "proxy": {"port": 0, "admin_port": 0, "event_log": str(path)},
        "cluster": {"nodes": [{"id": "n0", "instances": instances}]},
    }

    with pytest.raises(ConfigError, match=r"proxy\.event_log: .*allowed: a file that can be written"):
        await Proxy(parse_config(document), SECRET).start()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A log with a hole could not be run again; streams go on without one."""
    path = tmp_path / "events"
    opened = EventLog(path, 4096, header)
    opened.open()
    descriptor = os.open("/dev/full", os.O_WRONLY)
    assert opened._file is not None
    os.dup2(descriptor, opened._file.fileno())
    os.close(descriptor)

    for _ in range(3):
        opened.note(1.0, TimerFired(), ())
        await opened.flush()

    assert [record.message for record in caplog.records] == ["the event log ends here"]
    await opened.close()


async def _recovered(house: House, count: int) -> bool:
    return len((await house.state())["recoveries"]) >= count


async def _protected(house: House, count: int) -> bool:
    return sum(any(row["protected"].values()) for row in (await house.state())["streams"]) == count


async def _truth(value: bool) -> bool:
    return value
