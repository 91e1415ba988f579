"""Readings of GPUs from NVML, and the monitor."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from kvrs.agent import gpu as module
from kvrs.agent.gpu import GpuMonitor, GpuSensor, NoGpusError, open_sensor
from kvrs.agent.gpu_health import Reading
from kvrs.protocol.instance import GpuHealth, GpuState
from tests.agent.fake_nvml import FakeGpu, FakeNvml, error

WAIT_S = 60.0


def one_gpu(**settings: Any) -> tuple[FakeNvml, FakeGpu, GpuSensor]:
    gpu = FakeGpu("GPU-a", **settings)
    nvml = FakeNvml(gpu)
    return nvml, gpu, GpuSensor(nvml)


def missing() -> Any:
    raise ModuleNotFoundError("No module named 'pynvml'")


def without_driver() -> FakeNvml:
    nvml = FakeNvml()
    nvml.init_fails = error("LIBRARY_NOT_FOUND")
    return nvml


@pytest.mark.parametrize(
    ("load", "cause"),
    [
        (missing, "not installed"),
        (without_driver, "NVML Shared Library Not Found"),
        (FakeNvml, "no GPU"),
    ],
)
def test_a_node_without_gpus_is_normal(
    load: Callable[[], Any], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged in one line, not as a warning."""
    caplog.set_level(logging.INFO)

    assert open_sensor(load) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert cause in str(vars(record)["cause"])


def test_the_real_library_is_read_without_an_exception() -> None:
    """On a machine with GPUs or without."""
    sensor = open_sensor()
    if sensor is None:
        return

    readings = sensor.read()
    sensor.close()

    assert all(reading.lost is None and reading.silent is None for reading in readings)


def test_the_library_is_closed_without_a_gpu() -> None:
    """Or the driver could not be reloaded."""
    nvml = FakeNvml()

    with pytest.raises(NoGpusError):
        GpuSensor(nvml)
    assert nvml.opened == 0


def test_a_healthy_gpu_has_no_symptoms() -> None:
    """In its reading."""
    nvml, _, sensor = one_gpu()

    assert sensor.read() == [
        Reading(uuid="GPU-a", index=0, ecc_uncorrected=0),
    ]
    sensor.close()
    assert nvml.opened == 0


def test_unsupported_values_are_empty() -> None:
    """For a board without ECC memory, events and new fields."""
    _, _, sensor = one_gpu(ecc_uncorrected=None, rows=None, recovery_action=None, has_events=False)

    assert sensor.read() == [Reading(uuid="GPU-a", index=0)]
    assert not sensor.wait(0.0)


def test_xids_are_read_once_per_gpu() -> None:
    """By the uuid in the event."""
    a, b = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    nvml = FakeNvml(a, b)
    sensor = GpuSensor(nvml)
    nvml.xid(b, 79)
    nvml.xid(a, 31)
    nvml.xid(b, 63)

    assert [reading.xids for reading in sensor.read()] == [(31,), (79, 63)]
    assert [reading.xids for reading in sensor.read()] == [(), ()]


def test_waiting_ends_with_an_xid() -> None:
    """Which the next reading has."""
    nvml, gpu, sensor = one_gpu()
    nvml.xid(gpu, 48)

    assert sensor.wait(1.0)
    assert sensor.read()[0].xids == (48,)


@pytest.mark.parametrize("name", ["GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"])
def test_a_lost_gpu_is_read_as_lost(name: str) -> None:
    """The others are read as before; an XID of a board without a readable uuid ends nothing."""
    a, b = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    nvml = FakeNvml(a, b)
    sensor = GpuSensor(nvml)
    a.fails = error(name)
    nvml.xid(a, 79)

    lost, sound = sensor.read()

    assert (lost.uuid, lost.lost, lost.silent) == ("GPU-a", str(a.fails), None)
    assert sound == Reading(uuid="GPU-b", index=1, ecc_uncorrected=0)


def test_a_gpu_that_was_lost_at_the_start_is_reported() -> None:
    """Under its index."""
    nvml = FakeNvml(FakeGpu("GPU-a", fails=error("GPU_IS_LOST")), FakeGpu("GPU-b"))

    assert [reading.lost for reading in GpuSensor(nvml).read()] == ["GPU is lost", None]


def test_other_failures_count_as_no_answer() -> None:
    """NVML returns `Unknown Error` for dying boards, and for healthy ones now and then."""
    _, gpu, sensor = one_gpu()
    gpu.fails = error("UNKNOWN")

    assert sensor.read() == [Reading(uuid="GPU-a", index=0, silent="Unknown Error")]


def test_rows_and_recovery_actions_are_read() -> None:
    """Remapped rows, resets and drains."""
    _, gpu, sensor = one_gpu()
    gpu.rows, gpu.recovery_action = (0, 1, 1, 0), pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
    (first,) = sensor.read()
    gpu.rows, gpu.recovery_action = (0, 1, 0, 1), pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    (second,) = sensor.read()

    assert (first.remap_pending, first.remap_failed, first.reset_due, first.drain_due) == (
        True,
        False,
        None,
        "draining and a reset",
    )
    assert (second.remap_pending, second.remap_failed, second.reset_due, second.drain_due) == (
        False,
        True,
        "a reset",
        None,
    )


def test_failed_waiting_does_not_busy_loop() -> None:
    """NVML refuses to wait for a lost GPU; an immediate retry would keep a core busy."""
    nvml, _, sensor = one_gpu()
    nvml.waiting_fails = error("GPU_IS_LOST")

    assert not sensor.wait(1.0)
    assert sensor.read()[0].lost is None


async def reported(
    nvml: FakeNvml,
    act: Callable[[list[GpuHealth]], bool],
    clock: Callable[[], float] = time.monotonic,
) -> list[GpuHealth]:
    """The reports of a monitor until `act` returns true."""
    reports: list[GpuHealth] = []
    monitor = GpuMonitor(lambda: GpuSensor(nvml), reports.append, clock)
    task = asyncio.create_task(monitor.run())
    try:
        async with asyncio.timeout(WAIT_S):
            while not act(reports) and not task.done():
                await asyncio.sleep(0.005)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        task.result()
    return reports


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.02)
    monkeypatch.setattr(module, "_EVENT_PAUSE_S", 0.01)


async def test_a_monitor_reports_changes() -> None:
    """And nothing else."""
    gpu = FakeGpu("GPU-a")
    nvml = FakeNvml(gpu)

    def act(reports: list[GpuHealth]) -> bool:
        if len(reports) == 1 and not nvml.events:
            nvml.xid(gpu, 79)
        return len(reports) > 1

    reports = await reported(nvml, act)

    assert [(health.state, health.reason) for health in reports] == [
        (GpuState.HEALTHY, ""),
        (GpuState.FAILING, "xid 79"),
    ]
    await ended()
    assert nvml.opened == 0


async def test_a_blocked_library_is_a_symptom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on, the GPUs count as failing, and the thread is not joined."""
    monkeypatch.setattr(module, "_NVML_TIMEOUT_S", 1.0)
    looks = itertools.count(0, 2)
    nvml = FakeNvml(FakeGpu("GPU-a"))
    let_go = threading.Event()

    def act(reports: list[GpuHealth]) -> bool:
        if reports:
            nvml.stuck = let_go
        return len(reports) > 1

    try:
        reports = await reported(nvml, act, lambda: float(next(looks)))
    finally:
        let_go.set()

    assert (reports[-1].state, reports[-1].reason) == (GpuState.FAILING, "no answer: NVML is stuck")
    await ended()


async def test_the_monitor_ends_without_a_gpu() -> None:
    """The agent goes on."""
    monitor = GpuMonitor(lambda: open_sensor(without_driver), lambda _: None, time.monotonic)

    async with asyncio.timeout(WAIT_S):
        await monitor.run()

    assert monitor.health == []


async def test_an_internal_error_ends_the_monitor() -> None:
    """It must not look like a GPU that does not answer."""
    nvml = FakeNvml(FakeGpu("GPU-a", rows="x"))  # type: ignore[arg-type]

    with pytest.raises(IndexError):
        await reported(nvml, lambda reports: False)
    await ended()


async def ended() -> None:
    async with asyncio.timeout(WAIT_S):
        while any(thread.name == "gpu-sensor" for thread in threading.enumerate()):
            await asyncio.sleep(0.005)


def test_the_name_of_a_gpu_is_read_once() -> None:
    """For the guess of its prefill times; one that has none works all the same."""
    named, nameless = FakeGpu("GPU-a", name="NVIDIA H200"), FakeGpu("GPU-b", name=None)
    sensor = GpuSensor(FakeNvml(named, nameless))
    named.name = "another"

    readings = sensor.read()

    assert [each.name for each in readings] == ["NVIDIA H200", ""]
    assert all(each.lost is None and each.silent is None for each in readings)
