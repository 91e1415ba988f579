"""Reads the health of a node's GPUs from NVML, and classifies it.

A node without the library, the driver or a GPU is normal, and logged once; unsupported values are
normal too. XIDs come as events; where events are not supported, the driver's recovery action and
the counters have to suffice.

NVML can block for long when a GPU dies, so it is opened and read in a thread of its own, and a
blocked call counts as a symptom (of no GPU while NVML is being opened). The thread is a daemon, and
not joined at the end. While NVML is open here, the driver cannot be reloaded.
"""

import asyncio
import contextlib
import importlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrs.agent.gpu_health import GpuClassifier, Reading
from kvrs.errors import KvrsError
from kvrs.protocol.instance import GpuHealth, GpuState

log = logging.getLogger(__name__)

_POLL_S = 1.0
# Time limit of reading all GPUs, which usually takes milliseconds; NVML counts as stuck beyond it.
_NVML_TIMEOUT_S = 2.0
_LONGEST_NAME = 64  # Characters of a GPU's name, of which gossip has no room for many.
_EVENT_PAUSE_S = 0.1  # Pause after an event, so that a flood of events does not keep a core busy.
_MAX_EVENTS = 1000  # Most events that are taken per reading; the rest waits for the next reading.

_RESETS = {
    "GPU_RESET": "a reset",
    "NODE_REBOOT": "a reboot",
    "BUS_RESET": "a bus reset",
    "SYSTEM_REBOOT": "a reboot",
}
_DRAINS = {
    "DRAIN_P2P": "draining peer-to-peer traffic",
    "DRAIN_AND_RESET": "draining and a reset",
    "RECOVER_IMEX_DOMAIN": "recovering the IMEX domain",
}
# Names of NVML's errors for calls that the GPU or its driver does not support, or for which this
# process lacks permission.
_UNSUPPORTED = (
    "NOT_SUPPORTED",
    "FUNCTION_NOT_FOUND",
    "NO_PERMISSION",
    "INVALID_ARGUMENT",
    "ARGUMENT_VERSION_MISMATCH",
    "DEPRECATED",
)
_GONE = ("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND")


class NoGpusError(KvrsError):
    """There is no GPU to read; the message has the reason."""


def open_sensor(
    load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
) -> "GpuSensor | None":
    """Open a sensor of this node's GPUs; return None, and log the reason, if there are none."""
    try:
        return GpuSensor(load())
    except ImportError:
        cause = "nvidia-ml-py is not installed"
    except NoGpusError as error:
        cause = str(error)
    log.info("no GPU health on this node", extra={"cause": cause})
    return None


@dataclass(slots=True)
class _Gpu:
    index: int
    uuid: str
    handle: Any
    name: str = ""


class GpuSensor:
    """Blocking NVML calls, all from one thread. `nvml` is the module `pynvml`."""

    def __init__(self, nvml: Any) -> None:
        """Open NVML. Raises NoGpusError: there is no driver, or no GPU."""
        self._nvml = nvml
        self._unsupported = {getattr(nvml, f"NVML_ERROR_{name}") for name in _UNSUPPORTED}
        self._gone = {getattr(nvml, f"NVML_ERROR_{name}") for name in _GONE}
        self._resets, self._drains = _actions(nvml, _RESETS), _actions(nvml, _DRAINS)
        self._xids: defaultdict[str, list[int]] = defaultdict(list)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise NoGpusError(f"NVML: {error}") from None
        try:
            self._gpus = [self._find(index) for index in range(nvml.nvmlDeviceGetCount())]
            self._events = self._register()
        except nvml.NVMLError as error:
            nvml.nvmlShutdown()
            raise NoGpusError(f"NVML: {error}") from None
        if not self._gpus:
            nvml.nvmlShutdown()
            raise NoGpusError("NVML finds no GPU")

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    def wait(self, timeout_s: float) -> bool:
        """Wait for an event of a GPU, at most `timeout_s`; return False, at once, if events are not
        supported or the wait fails.
        """
        return self._take_event(timeout_s) is not None

    def read(self) -> list[Reading]:
        """Read every GPU that was present at the start."""
        for _ in range(_MAX_EVENTS):
            if not self._take_event(0.0):
                break
        return [self._read(gpu) for gpu in self._gpus]

    def _find(self, index: int) -> _Gpu:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = _Gpu(index, self._nvml.nvmlDeviceGetUUID(handle), handle)
        except self._nvml.NVMLError:
            # The GPU does not answer already at the start; its readings will report it as lost.
            return _Gpu(index, f"index {index}", None)
        with contextlib.suppress(self._nvml.NVMLError):
            gpu.name = str(self._nvml.nvmlDeviceGetName(handle))[:_LONGEST_NAME]
        return gpu

    def _register(self) -> Any | None:
        """Return an event set for all GPUs that support events; None: no GPU does."""
        nvml, wanted, registered = self._nvml, self._nvml.nvmlEventTypeXidCriticalError, False
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        for gpu in self._gpus:
            with contextlib.suppress(nvml.NVMLError):
                if (
                    gpu.handle is not None
                    and nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & wanted
                ):
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, wanted, events)
                    registered = True
        if not registered:
            nvml.nvmlEventSetFree(events)
            return None
        return events

    def _take_event(self, timeout_s: float) -> bool | None:
        """Wait for an event and keep its XID for the next reading. Returns False if none came in
        time, and None if the wait failed or events are not supported.
        """
        if self._events is None:
            return None
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, int(timeout_s * 1000))
        except nvml.NVMLError as error:
            return False if error.value == nvml.NVML_ERROR_TIMEOUT else None
        # A GPU whose uuid cannot be read is reported by the next reading.
        with contextlib.suppress(nvml.NVMLError):
            if event.eventType & nvml.nvmlEventTypeXidCriticalError:
                self._xids[nvml.nvmlDeviceGetUUID(event.device)].append(int(event.eventData))
        return True

    def _read(self, gpu: _Gpu) -> Reading:
        xids = tuple(self._xids.pop(gpu.uuid, ()))
        try:
            return self._read_values(gpu, xids)
        except self._nvml.NVMLError as error:
            if error.value in self._gone:
                return Reading(
                    uuid=gpu.uuid, index=gpu.index, name=gpu.name, xids=xids, lost=str(error)
                )
            return Reading(
                uuid=gpu.uuid, index=gpu.index, name=gpu.name, xids=xids, silent=str(error)
            )

    def _read_values(self, gpu: _Gpu, xids: tuple[int, ...]) -> Reading:
        nvml = self._nvml
        handle = (
            gpu.handle if gpu.handle is not None else nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        )
        rows = self._ask("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
        action = self._field(handle, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        return Reading(
            uuid=gpu.uuid,
            index=gpu.index,
            name=gpu.name,
            xids=xids,
            ecc_uncorrected=self._ask(
                "nvmlDeviceGetTotalEccErrors",
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remap_pending=bool(rows[2]),
            remap_failed=bool(rows[3]),
            reset_due=self._resets.get(action),
            drain_due=self._drains.get(action),
        )

    def _field(self, handle: Any, field: int) -> int | None:
        values = self._ask("nvmlDeviceGetFieldValues", handle, [(field, 0)])
        return (
            int(values[0].value.ullVal)
            if values is not None and values[0].nvmlReturn == self._nvml.NVML_SUCCESS
            else None
        )

    def _ask(self, function: str, *arguments: Any) -> Any | None:
        """Return the result of one of NVML's functions; None: the function is not supported.

        Raises:
            NVMLError: any other failure.
        """
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._unsupported:
                return None
            raise


def _actions(nvml: Any, names: Mapping[str, str]) -> dict[int | None, str]:
    """Return the texts of these recovery actions by NVML's number. Releases of nvidia-ml-py before
    13.615 lack the newest actions.
    """
    known = {f"NVML_GPU_RECOVERY_ACTION_{name}": what for name, what in names.items()}
    return {getattr(nvml, name): what for name, what in known.items() if hasattr(nvml, name)}


class GpuMonitor:
    """Reads the GPUs every second, and on each XID; `changed` is called with every change of
    health.
    """

    def __init__(
        self,
        find: Callable[[], GpuSensor | None],
        changed: Callable[[GpuHealth], None],
        clock: Callable[[], float],
    ) -> None:
        """`find` opens the sensor, as `open_sensor` does; it is called in the thread of NVML."""
        self._find, self._changed, self._clock = find, changed, clock
        self._classifier = GpuClassifier()
        self._readings: asyncio.Queue[list[Reading] | Exception | None] = asyncio.Queue()
        self._is_stuck = False
        self._stop = threading.Event()

    @property
    def health(self) -> list[GpuHealth]:
        return self._classifier.health

    async def run(self) -> None:
        """Watch until cancelled, or until no GPU is found; the sensor is closed then, or when the
        blocked NVML call returns.
        """
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._poll, args=(loop,), name="gpu-sensor", daemon=True).start()
        try:
            while (changed := await self._next_health()) is not None:
                self._report(changed)
        finally:
            self._stop.set()

    async def _next_health(self) -> list[GpuHealth] | None:
        try:
            async with asyncio.timeout(_POLL_S + _NVML_TIMEOUT_S):
                readings = await self._readings.get()
        except TimeoutError:
            if not self._is_stuck:
                log.warning("NVML is stuck")
            self._is_stuck = True
            return self._classifier.no_answer("NVML is stuck", self._clock())
        if isinstance(readings, Exception):
            raise readings
        self._is_stuck = False
        return None if readings is None else self._classifier.update(readings, self._clock())

    def _report(self, changed: list[GpuHealth]) -> None:
        for health in changed:
            log.log(
                logging.INFO if health.state is GpuState.HEALTHY else logging.WARNING,
                "gpu health",
                extra={
                    "gpu": health.uuid,
                    "index": health.index,
                    "state": health.state,
                    "reason": health.reason,
                },
            )
            self._changed(health)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        sensor: GpuSensor | None = None
        while not self._stop.is_set():
            readings: list[Reading] | Exception | None
            try:
                sensor = sensor or self._find()
                readings = None if sensor is None else sensor.read()
            except Exception as error:  # The error is a bug, which `run` raises.
                readings = error
                self._stop.set()
            # The event loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._readings.put_nowait, readings)
            if sensor is None:
                return
            self._stop.wait(_EVENT_PAUSE_S if sensor.wait(_POLL_S) else _POLL_S)
        if sensor is not None:
            sensor.close()
