"""A replacement of `pynvml` with its real constants and errors, and with GPUs that can be
broken.
"""

import threading
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml


def error(name: str) -> Exception:
    failure: Exception = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
    return failure


@dataclass(eq=False)
class FakeGpu:
    uuid: str
    fails: Exception | None = None  # Raised by every call that needs the board.
    ecc_uncorrected: int | None = 0  # None: not supported, as of all below.
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    recovery_action: int | None = 0
    has_events: bool = True
    name: str | None = ""

    def ask(self, value: Any) -> Any:
        if self.fails is not None:
            raise self.fails
        if value is None:
            raise error("NOT_SUPPORTED")
        return value


class FakeNvml:
    """Everything that is not defined here is as in `pynvml`."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.events: deque[SimpleNamespace] = deque()
        self.opened = 0
        self.init_fails: Exception | None = None
        self.waiting_fails: Exception | None = None
        self.stuck: threading.Event | None = None  # Calls wait for it.

    def __getattr__(self, name: str) -> Any:
        value = getattr(pynvml, name)
        assert not callable(value) or isinstance(value, type), f"{name} would ask the real library"
        return value

    def xid(self, gpu: FakeGpu, xid: int) -> None:
        self.events.append(
            SimpleNamespace(
                device=gpu, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid
            )
        )

    def nvmlInit(self) -> None:
        if self.init_fails is not None:
            raise self.init_fails
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self.gpus[index].ask(0)
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        gpu.ask(0)
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return str(gpu.ask(gpu.name))

    def nvmlEventSetCreate(self) -> list[FakeGpu]:
        return []

    def nvmlEventSetFree(self, events: list[FakeGpu]) -> None:
        pass

    def nvmlDeviceGetSupportedEventTypes(self, gpu: FakeGpu) -> int:
        return pynvml.nvmlEventTypeXidCriticalError if gpu.has_events else 0

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, types: int, events: list[FakeGpu]) -> None:
        assert types == pynvml.nvmlEventTypeXidCriticalError
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[FakeGpu], timeout_ms: int) -> SimpleNamespace:
        assert events, "a set without a GPU"
        if self.waiting_fails is not None:
            raise self.waiting_fails
        if not self.events:
            raise error("TIMEOUT")
        return self.events.popleft()

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        assert (kind, counter) == (
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )
        if self.stuck is not None:
            self.stuck.wait()
        return int(gpu.ask(gpu.ecc_uncorrected))

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:
        rows: tuple[int, int, int, int] = gpu.ask(gpu.rows)
        return rows

    def nvmlDeviceGetFieldValues(
        self, gpu: FakeGpu, fields: list[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        assert fields == [(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0)]
        gpu.ask(0)
        value = gpu.recovery_action
        code = pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else pynvml.NVML_SUCCESS
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(ullVal=value))]
