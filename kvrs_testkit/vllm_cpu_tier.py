"""vLLM's TieringOffloadingSpec on a machine without a GPU, where upstream has no copies.

Upstream's worker stays whole (descriptors, groups, canonical layout, shared region, order of jobs)
but for three names of its module: streams, events, and the copy of bytes. A stream is a thread with
a queue: copies run beside the model, complete in order, and are seen only by their event, as on a
GPU. KVRS_COPY_DELAY_MS makes each copy later, as a busy bus does.

vLLM loads it by `spec_name: CpuTieringSpec`, `spec_module_path: kvrs_testkit.vllm_cpu_tier`.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

_DELAY_S = float(os.environ.get("KVRS_COPY_DELAY_MS", "0")) / 1e3


class _Stream:
    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def wait_stream(self, other: Any) -> None:
        """A model on a CPU runs in the calling thread: what it wrote is written."""

    def wait_event(self, event: "_Event") -> None:
        self.thread.submit(event.synchronize)


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._done: Future[float] = Future()

    def record(self, stream: _Stream) -> None:
        self._done = stream.thread.submit(time.perf_counter)

    def query(self) -> bool:
        return self._done.done()

    def synchronize(self) -> None:
        self._done.result()

    def elapsed_time(self, other: "_Event") -> float:
        return (other._done.result() - self._done.result()) * 1e3


class _Platform:
    Stream = _Stream
    current: _Stream

    def current_stream(self) -> None:
        return None

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self.current = stream
        yield

    def is_xpu(self) -> bool:
        return False

    def is_rocm(self) -> bool:
        return False


class _Torch:
    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _OnDevice(torch.Tensor):
    """Upstream asserts that the KV cache is on a GPU."""

    is_cuda = property(lambda self: True)


_platform = _Platform()


def _copy(sources: Any, targets: Any, sizes: Any) -> None:
    time.sleep(_DELAY_S)
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, size)


def _swap(sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
    _platform.current.thread.submit(_copy, sources, targets, sizes)


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not checked.
    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if not self._worker:  # type: ignore[has-type]
            gpu_worker.current_platform, gpu_worker.torch = _platform, _Torch()
            gpu_worker.PIN_MEMORY = False
            gpu_worker._select_swap_blocks_fn = lambda *_, **__: _swap
            tensors = [
                CanonicalKVCacheTensor(each.tensor.as_subclass(_OnDevice), each.page_size_bytes)
                for each in kv_caches.tensors
            ]
            self._worker = self.create_worker(CanonicalKVCaches(tensors, kv_caches.group_data_refs))
        return self._worker
