"""`torch` for upstream's worker off the GPU: device memory is shared memory, and all work is
synchronous.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from distserve_patches.cpu.memory import allocate


class Stream:
    pass


class Event:
    """An event that has always happened."""

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Cuda:
    """The part of `torch.cuda` that workers call."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event
        self._current = Stream()

    def set_device(self, device: torch.device) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def current_stream(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield


class Torch:
    def __init__(self) -> None:
        self.cuda = Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(
        self, shape: Sequence[int], *, dtype: torch.dtype, device: str, pin_memory: bool = False
    ) -> Tensor:
        if device == "cuda":
            return allocate(shape, dtype)
        # Pinning is for copies to a GPU.
        return torch.zeros(shape, dtype=dtype)
