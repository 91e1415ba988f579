"""Deadlines of clients, and the records that the proxy writes: costs, the event log."""

import asyncio
import contextlib
import errno
import fcntl
import gzip
import os
import secrets
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.cli.incidents import show_incidents
from kvrs.config.file import Config, parse_config
from kvrs.core.event_log import LogEntry, header_line, read, rerun
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.process.logs import old_parts
from kvrs.proxy.server import Proxy
from kvrs.proxy.streams import event_log
from kvrs.proxy.streams.event_log import EventLog
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import SECRET, Fault
from tests.proxy.conftest import ProxyClusterBuilder

REQUEST: dict[str, Any] = {"prompt": list(range(40)), "max_tokens": 8, "temperature": 0}
CONFIG = Config()


def header(part: int) -> str:
    return header_line(CONFIG.policy, CONFIG.slo, CONFIG.backup, part)


def arrivals(path: Path) -> list[ev.StreamArrived]:
    records = read(path.read_text().splitlines())
    return [
        each.event
        for each in records
        if isinstance(each, LogEntry) and isinstance(each.event, ev.StreamArrived)
    ]


# Deadlines.


@pytest.mark.parametrize("name", ["x-kvrs-ttft-s", "X-Kvrs-Recovery-Gap-S", "x-kvrs-deadline-s"])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1_0", "soon", "1e9", "5 s", "٣"])
async def test_an_invalid_deadline_is_rejected(
    build: ProxyClusterBuilder, name: str, value: str
) -> None:
    """With the range, and without its value, as every header; nothing is sent to any engine."""
    system = await build(pairs=1)

    status, body = await system.ask(REQUEST, {name: value})

    error = msgspec.json.decode(body)["error"]
    assert status == 400
    assert error["param"] == name.lower()
    assert error["message"].startswith(f"this {name.lower()} is not supported; allowed: seconds")
    assert system.instances["p0"].completions == []


async def test_deadlines_and_lengths_reach_the_policy(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """The client's headers, and the longest possible length: that of the request, and at most that
    of the instances.
    """
    path = tmp_path / "events"
    system = await build(pairs=1, proxy={"event_log": str(path)})
    promised = {"x-kvrs-ttft-s": "1.5", "X-KVRS-Recovery-Gap-S": "2", "x-kvrs-deadline-s": "3e1"}

    await system.ask(REQUEST, promised)
    await system.complete(**REQUEST | {"max_tokens": 4090})
    await system.complete(prompt="play latin.", temperature=0, max_tokens=5)
    await system.proxy.close()

    first, second, third = arrivals(path)
    assert (
        first.deadlines.ttft_s,
        first.deadlines.recovery_gap_s,
        first.deadlines.end_to_end_s,
    ) == (1.5, 2.0, 30.0)
    assert (first.prompt_tokens, first.most_tokens) == (40, 48)
    assert (second.deadlines.ttft_s, second.deadlines.end_to_end_s) == (None, None)
    assert second.most_tokens == 4130
    ups = [each.event for each in read(path.read_text().splitlines()) if isinstance(each, LogEntry)]
    assert {event.info.max_model_len for event in ups if isinstance(event, ev.InstanceUp)} == {4096}
    assert third.most_tokens == third.prompt_tokens + 5


async def test_the_choices_of_a_request_share_its_deadlines(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Each is a stream of its own."""
    path = tmp_path / "events"
    system = await build(pairs=1, proxy={"event_log": str(path)})

    await system.ask(REQUEST | {"n": 3}, {"x-kvrs-ttft-s": "7"})
    await system.proxy.close()

    assert [arrived.deadlines.ttft_s for arrived in arrivals(path)] == [7.0] * 3


async def test_a_stream_that_cannot_recover_in_time_fails_at_once(
    build: ProxyClusterBuilder,
) -> None:
    """With `slo.abort` a client's own deadline applies to its own stream only."""
    system = await build(slo={"abort": True})
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    hurried = asyncio.create_task(system.ask(REQUEST, {"x-kvrs-recovery-gap-s": "1e-6"}))
    patient = asyncio.create_task(system.complete(**REQUEST))
    await system.until_streams_hold(3, count=2)

    await asyncio.gather(*(system.instances[name].kill() for name in ("d0", "d1")))
    status, body = await hurried
    await system.instances["d1"].restart()
    system.script.gate.set()

    assert (status, msgspec.json.decode(body)["error"]["code"]) == (503, "slo")
    assert (await patient)[0] == 200


# Costs.


async def test_a_settled_recovery_reports_its_costs_and_interval(
    build: ProxyClusterBuilder,
) -> None:
    """Predicted and real cost and the interval, in the state and in metrics."""
    system = await build(policy={"name": "always_recompute"})
    system.script.faults = {3: Fault.RESET}

    await system.complete(**REQUEST)

    (row,) = (await system.state())["recoveries"]
    assert 0 < row["low_s"] < row["predicted_s"] < row["high_s"]
    metrics, inside = await system.metrics(), row["low_s"] <= row["real_s"] <= row["high_s"]
    assert f'kvrs_recovery_intervals_total{{inside="{str(inside).lower()}"}} 1.0' in metrics
    assert 'kvrs_recovery_off_ratio_count{option="recompute"} 1' in metrics
    assert "kvrs_recovery_interval_factor" in metrics


async def test_a_recovery_that_failed_settles_nothing(build: ProxyClusterBuilder) -> None:
    """Its cost is part of the next one's."""
    system = await build(pairs=3)
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = asyncio.create_task(system.complete(**REQUEST))
    await system.until_streams_hold(3)
    (row,) = (await system.state())["streams"]

    await system.instances[row["decode"]].kill()
    await system.until(lambda: _recovered(system, 1))
    (first,) = (await system.state())["recoveries"]
    await system.instances[first["to"]].kill()
    await system.until(lambda: _recovered(system, 2))
    system.script.gate.set()
    await asked

    failed, resumed = (await system.state())["recoveries"]
    assert (failed["outcome"], failed["low_s"], failed["high_s"]) == ("failed", None, None)
    assert resumed["outcome"] == "resumed"
    assert resumed["low_s"] is not None


# The event log.


async def test_an_incident_runs_again_to_the_same_actions(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Deaths of instances and agents, broken attempts, a client that leaves: the file has every
    event of the policy.
    """
    path = tmp_path / "events"
    system = await build(
        pairs=3, proxy={"event_log": str(path)}, backup={"mode": "both"}, transfer={"lease_s": 0.3}
    )
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    system.script.faults = {1: Fault.RESET, 2: Fault.ERROR}
    asked = [asyncio.create_task(system.complete(**REQUEST)) for _ in range(8)]
    await system.until_streams_hold(3, count=8)
    for row in (await system.state())["streams"]:
        for agent in row["protected"]:
            system.agents[agent].pages[row["id"]] = 2
    await system.until(lambda: _protected(system, 8))

    await asyncio.gather(system.instances["d0"].kill(), system.agents["agent-n1"].kill())
    await system.until_health(**{"d0": "down", "agent-n1": "down"})
    asked.pop().cancel()
    system.script.gate.set()
    answers = await asyncio.gather(*asked)
    await system.proxy.close()

    assert [status for status, _ in answers] == [200] * 7
    again = rerun(path.read_text().splitlines())
    assert again.difference is None
    kinds = {
        kind.__name__
        for kind in (
            act.Start,
            act.Recovered,
            act.Settled,
            ev.InstanceLost,
            ev.HolderLost,
            ev.CheckpointsReported,
            ev.AttemptFailed,
        )
    }
    assert kinds - again.counts.keys() == set()
    assert again.counts["StreamEnded"] == 8


async def test_a_long_log_continues_in_other_files(
    build: ProxyClusterBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old parts are numbered and compressed; all together can be run again."""
    monkeypatch.setattr(event_log, "_WRITE_INTERVAL_S", 0.01)
    monkeypatch.setattr("kvrs.proxy.streams.event_log.EVENT_LOG_BYTES", 65536)
    path = tmp_path / "events"
    system = await build(pairs=1, proxy={"event_log": str(path)})

    async def asked_on() -> bool:
        await asyncio.gather(*(system.complete(**REQUEST) for _ in range(5)))
        return (tmp_path / "events.3.gz").exists()

    await system.until(asked_on)
    await system.proxy.close()

    old = [files for _, files in sorted(old_parts(path).items())]
    lines = [line for each in old for line in gzip.decompress(each.read_bytes()).splitlines()]
    lines += path.read_bytes().splitlines()
    parts = [msgspec.json.decode(line)["part"] for line in lines if b"kvrs_event_log" in line]
    assert parts == [*range(1, len(old) + 2)]
    again = rerun([line.decode() for line in lines])
    assert again.difference is None
    assert again.counts["StreamArrived"] % 5 == 0
    assert show_incidents(path)


async def test_the_oldest_parts_are_removed(tmp_path: Path) -> None:
    """All files together stay within the size, of this proxy and those before it; files of others
    with similar names are left alone.
    """
    path = tmp_path / "events"
    others = [tmp_path / name for name in ("events.1", "events.0.7.gz", "events.a.gz", "events.gz")]
    for other in others:
        other.write_text("of another")
    for _ in range(3):
        opened = EventLog(path, 65536, header)
        opened.open()
        for number in range(2500):
            opened.note(float(number), 0.0, ev.DrainEnded(InstanceId(secrets.token_hex(60))), ())
        await opened.close()

    old = old_parts(path)
    sizes = [each.stat().st_size for each in (path, *old.values())]
    assert sum(sizes) <= 65536 + 4096
    assert len(old) > 8
    assert sorted(old) == [*range(min(old), max(old) + 1)]
    assert min(old) > 1
    assert all(other.read_text() == "of another" for other in others)


async def test_each_line_has_the_time_of_the_wall_clock(tmp_path: Path) -> None:
    """Without it the log meets neither other logs nor a graph."""
    path = tmp_path / "events"
    opened = EventLog(path, 1 << 20, header)
    opened.open()
    opened.note(1.0, 1_795_237_595.1234, ev.TimerFired(), ())
    await opened.close()

    (entry,) = (each for each in read(path.read_text().splitlines()) if isinstance(each, LogEntry))
    assert (entry.now_s, entry.wall_s) == (1.0, 1_795_237_595.123)


async def test_a_new_proxy_begins_a_new_log(tmp_path: Path) -> None:
    """The log of the process before is moved aside, whole, and so is that of the one before it."""
    path = tmp_path / "events"
    path.write_text("before\n")

    for _ in range(2):
        opened = EventLog(path, 1 << 20, header)
        opened.open()
        opened.note(1.0, 0.0, ev.TimerFired(), ())
        await opened.close()

    assert gzip.decompress((tmp_path / "events.1.gz").read_bytes()) == b"before\n"
    assert len(gzip.decompress((tmp_path / "events.2.gz").read_bytes()).splitlines()) == 2
    assert len(path.read_text().splitlines()) == 2


async def test_a_log_is_on_disk_before_the_proxy_ends(
    build: ProxyClusterBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an incident it has all but the last moments."""
    monkeypatch.setattr(event_log, "_WRITE_INTERVAL_S", 0.01)
    path = tmp_path / "events"
    system = await build(pairs=1, proxy={"event_log": str(path)})

    await system.complete(**REQUEST)

    await system.until(lambda: _truth("StreamEnded" in path.read_text()))


async def test_entries_of_a_cancelled_writer_are_written(tmp_path: Path) -> None:
    """The proxy may end at any moment, also between two writes."""
    path = tmp_path / "events"
    opened = EventLog(path, 1 << 20, header)
    opened.open()
    busy = threading.Event()
    opened._writer.submit(busy.wait)

    opened.note(1.0, 0.0, ev.TimerFired(), ())
    flushing = asyncio.create_task(opened.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    busy.set()
    await opened.close()

    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["missing/events", "."])
async def test_a_log_that_cannot_be_written_stops_the_start(tmp_path: Path, name: str) -> None:
    """An operator who configured a log learns at once that there will be none; nothing is left
    running.
    """
    path = tmp_path / name
    instances = [{"id": "b0", "role": "both", "port": 1}]
    document = {
        "proxy": {"port": 0, "admin_port": 0, "event_log": str(path)},
        "cluster": {"nodes": [{"id": "n0", "instances": instances}]},
    }

    with pytest.raises(
        ConfigError, match=r"proxy\.event_log: .*allowed: a file that can be written"
    ):
        await Proxy(parse_config(document), SECRET).start()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_ends_the_log_and_nothing_else(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A log with a gap could not be run again; streams go on without one."""
    path = tmp_path / "events"
    opened = EventLog(path, 1 << 20, header)
    opened.open()
    descriptor = os.open("/dev/full", os.O_WRONLY)
    assert opened._file is not None
    os.dup2(descriptor, opened._file.fileno())
    os.close(descriptor)

    for _ in range(3):
        opened.note(1.0, 0.0, ev.TimerFired(), ())
        await opened.flush()

    assert [record.message for record in caplog.records] == ["the event log ends here"]
    await opened.close()


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
async def test_a_broken_disk_ends_the_log_and_nothing_else(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Writing to address 0 of a process is an input/output error, as from a disk that fails."""
    opened = EventLog(tmp_path / "events", 65536, header)
    opened.open()
    _replace(opened, "/proc/self/mem")

    for _ in range(3):
        opened.note(1.0, 0.0, ev.TimerFired(), ())
        await opened.flush()

    (record,) = caplog.records
    assert (record.message, record.__dict__["cause"]) == (
        "the event log ends here",
        os.strerror(errno.EIO),
    )
    await opened.close()


@pytest.mark.network
async def test_a_disk_that_hangs_stops_no_stream(tmp_path: Path) -> None:
    """Events are written by a thread; the event loop notes them and goes on."""
    opened = EventLog(tmp_path / "events", 1 << 20, header)
    opened.open()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    _replace(opened, str(tmp_path / "pipe"))
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    for _ in range(1000):  # More than the pipe and the file's buffer hold.
        opened.note(1.0, 0.0, ev.TimerFired(), ())

    flushing = asyncio.create_task(opened.flush())
    for _ in range(100):
        opened.note(2.0, 0.0, ev.TimerFired(), ())
        await asyncio.sleep(0)

    assert not flushing.done()
    while not flushing.done():
        await asyncio.sleep(0)
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 1 << 16)
    os.close(reader)
    with contextlib.suppress(OSError):
        await opened.close()


def _replace(opened: EventLog, path: str) -> None:
    """Have the log's file be another one, under the same descriptor."""
    descriptor = os.open(path, os.O_WRONLY)
    assert opened._file is not None
    os.dup2(descriptor, opened._file.fileno())
    os.close(descriptor)


async def _recovered(system: ProxyCluster, count: int) -> bool:
    return len((await system.state())["recoveries"]) >= count


async def _protected(system: ProxyCluster, count: int) -> bool:
    return sum(any(row["protected"].values()) for row in (await system.state())["streams"]) == count


async def _truth(value: bool) -> bool:
    return value
