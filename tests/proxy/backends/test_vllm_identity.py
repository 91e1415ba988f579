"""Processes of vLLM behind one port, and how they are told apart."""

import asyncio
from typing import Any

import pytest

from kvrs.proxy.backends.vllm_metrics import REPLACED_S, ProcessIdentity, engine_mark
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Builder, Servers

WALL_S = 1_800_000_000.0


class Reads:
    """Reads of `/metrics`, a second after each other."""

    def __init__(self) -> None:
        self.process = ProcessIdentity()
        self.now_s = 0.0

    def epoch(
        self, started_s: float | None, mark: str | None = None, counted: float | None = None
    ) -> int:
        self.now_s += 1
        return self.process.read(
            started_s, mark, counted, now_s=self.now_s, wall_s=WALL_S + self.now_s
        )


def ended(process: ProcessIdentity) -> None:
    process.connection_ended()


def lost(process: ProcessIdentity) -> None:
    process.connection_ended()
    process.lost()


def test_the_start_time_of_a_process_is_its_epoch() -> None:
    """So that all proxies number it alike."""
    reads = Reads()

    assert [reads.epoch(1_795_167_822.13) for _ in range(3)] == [179_516_782_213] * 3


@pytest.mark.parametrize("ends", [ended, lost])
def test_a_new_start_time_behind_an_end_of_the_watch_is_another_process(ends: Any) -> None:
    """Also behind the third one."""
    reads = Reads()
    epochs = []
    for start in (100.0, 200.0, 300.0):
        epochs.append(reads.epoch(start))
        ends(reads.process)

    assert epochs == [10_000, 20_000, 30_000]


def test_an_earlier_start_time_is_another_process_in_a_higher_epoch() -> None:
    """A clock was set back; a lower epoch would be taken for the process before."""
    reads = Reads()
    reads.epoch(200.0)
    lost(reads.process)

    assert reads.epoch(100.0) == 20_001


@pytest.mark.parametrize("ends", [ended, lost])
def test_a_start_time_that_was_seen_before_is_no_new_process(ends: Any) -> None:
    reads = Reads()
    epochs = {reads.epoch(100.0 + n % 3) for n in range(40)}
    ends(reads.process)

    assert epochs | {reads.epoch(101.0)} == {10_000}


def test_new_start_times_are_no_new_process_while_the_watch_stands() -> None:
    """Each read is answered by another process, which has a port with others in common; and one of
    these may end the connection of the watch.
    """
    reads = Reads()
    epochs = set()
    for n in range(300):
        epochs.add(reads.epoch(100.0 + n))
        if n % 60 == 59:
            ended(reads.process)

    assert epochs == {10_000}


def test_a_start_time_that_replaces_all_others_for_long_is_another_process() -> None:
    """A gateway in front keeps the connection of the watch open through a restart."""
    reads = Reads()
    for _ in range(5):
        reads.epoch(100.0)

    epochs = [reads.epoch(200.0) for _ in range(int(REPLACED_S) + 3)]

    assert epochs[: int(REPLACED_S)] == [10_000] * int(REPLACED_S)
    assert set(epochs[int(REPLACED_S) :]) == {20_000}


def test_two_processes_that_answer_in_turn_for_long_are_found_once_each() -> None:
    """The second one counts as new at most once."""
    reads = Reads()
    epochs = [reads.epoch(100.0 + n // 60 % 2) for n in range(600)]

    assert len(set(epochs)) <= 2
    assert epochs == sorted(epochs)


def test_without_a_start_time_an_end_of_the_watch_is_another_process() -> None:
    """Numbered by the time at which it was met."""
    reads = Reads()
    first = [reads.epoch(None) for _ in range(3)]
    ended(reads.process)
    second = reads.epoch(None)
    lost(reads.process)

    assert first == [round(100 * (WALL_S + 1))] * 3
    assert first[0] < second < reads.epoch(None)


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [(7.0, 7.0, True), (7.0, 9.0, True), (7.0, 6.0, False), (0.0, 3.0, False), (7.0, None, False)],
)
def test_counters_that_go_on_tell_that_an_idle_connection_was_only_closed(
    before: float, after: float | None, is_same: bool
) -> None:
    """Those of a new process begin at 0."""
    reads = Reads()
    first = reads.epoch(None, counted=before)
    ended(reads.process)

    assert (reads.epoch(None, counted=after) == first) is is_same


def test_counters_do_not_tell_that_a_server_which_was_lost_is_the_same() -> None:
    """It may have had other requests meanwhile."""
    reads = Reads()
    first = reads.epoch(None, counted=7.0)
    lost(reads.process)

    assert reads.epoch(None, counted=9.0) > first


@pytest.mark.parametrize(
    ("noted", "shown", "is_same"),
    [
        ("a_dp0", engine_mark("a_dp1"), True),
        ("a", engine_mark("b"), False),
    ],
)
def test_a_process_without_a_start_time_is_known_by_other_marks(
    noted: str, shown: str, is_same: bool
) -> None:
    reads = Reads()
    first = reads.epoch(None)
    reads.process.noted(noted)
    lost(reads.process)

    assert (reads.epoch(None, shown) == first) is is_same


def test_a_mark_that_comes_in_doubt_is_not_taken_for_that_of_the_process_before() -> None:
    """The answer of a stream may come from the next process already."""
    reads = Reads()
    first = reads.epoch(None)
    lost(reads.process)
    reads.process.noted("b")

    assert reads.epoch(None, engine_mark("b")) > first


# Servers of these kinds behind a proxy.


def without_start(servers: Servers) -> None:
    for server in servers.values():
        server.lacks.add("process_start_time_seconds")


async def epochs_of(system: Any) -> dict[str, int]:
    return {row["id"]: row["epoch"] for row in (await system.state())["instances"]}


@pytest.mark.network
async def test_several_api_servers_are_used_and_their_restart_is_noticed(vllms: Builder) -> None:
    """`--api-server-count` above 1, the default with data parallelism."""
    system = await vllms(prepare=without_start)
    before = await epochs_of(system)
    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    assert await epochs_of(system) == before

    await system.servers["d0"].kill()
    await system.until_health(d0="down")
    await system.servers["d0"].restart()
    await system.until_health(d0="up")

    after = await epochs_of(system)
    assert after["d0"] > before["d0"]
    assert {name for name in after if after[name] != before[name]} == {"d0"}
    assert await system.ids() == expected_ids(PROMPT, TOKENS)


@pytest.mark.network
async def test_a_prefill_server_that_was_lost_is_known_by_the_id_of_its_engine(
    vllms: Builder,
) -> None:
    """NIXL draws it at each start."""
    system = await vllms(prepare=without_start)
    before = await epochs_of(system)
    server = system.servers["p0"]

    server.kill_engine()
    await system.until_health(p0="down")
    system.shared.engines.add(server.engine)
    await system.until_health(p0="up")
    again = await epochs_of(system)
    await server.kill()
    await system.until_health(p0="down")
    await server.restart()
    await system.until_health(p0="up")

    assert again["p0"] == before["p0"]
    assert (await epochs_of(system))["p0"] > before["p0"]


@pytest.mark.network
@pytest.mark.parametrize("processes", [0, 3])
async def test_several_processes_with_start_times_of_their_own_cut_no_stream(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """Reads of `/metrics` alternate between them: each differs from the one before, or is new."""
    monkeypatch.setattr("kvrs.proxy.backends.vllm._METRICS_INTERVAL_S", 0.0)

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.processes = processes

    system = await vllms(prepare=prepare)
    before = await epochs_of(system)
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    task = asyncio.create_task(system.ids())
    await system.until_streams_hold(2)
    reads = system.servers["d0"].reads
    while system.servers["d0"].reads < reads + 5:
        await asyncio.sleep(0.01)
    system.shared.gate.set()

    assert await task == expected_ids(PROMPT, TOKENS)
    assert await system.causes() == []
    assert await epochs_of(system) == before
