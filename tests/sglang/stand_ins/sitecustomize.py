"""Stands in for the CUDA calls that SGLang 0.5.23 makes where prefill and decode are apart, and for
its storage of pages, on a machine without a GPU: there a copy is done when it returns, so nothing
is ever pending.

A child process finds this file on PYTHONPATH as its parent does. It waits for `import torch`, so
that processes without torch stay small.
"""

import builtins
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Done:
    """An event or a stream on which nothing is pending."""

    cuda_stream = 0
    device = None

    def __init__(self, *_: object, **__: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Done()

    def _nothing(self, *_: object, **__: object) -> None: ...

    record = wait = synchronize = wait_event = wait_stream = _nothing

    def __enter__(self) -> "_Done":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Runtime:
    """CUDA's runtime library, which pins host memory."""

    def cudaHostRegister(self, *_: object) -> int:
        return 0

    def cudaHostUnregister(self, *_: object) -> int:
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return str(code)


def _patch(torch: Any) -> None:
    if torch.cuda.is_available():
        return
    for device in (torch.cuda, torch.cpu):
        device.Event = device.Stream = _Done
        device.current_stream = lambda *_, **__: _Done()
        device.stream = lambda _: contextlib.nullcontext()
    torch.cuda.ExternalStream = _Done
    torch.cuda.default_stream = torch.cuda.current_stream
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.cudart = _Runtime
    torch.empty, torch.zeros = map(_unpinned, (torch.empty, torch.zeros))
    torch.Tensor.pin_memory = lambda self, *_: self
    # Its pools of pages look these up as globals: it imports them with a GPU only.
    for copy in (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    ):
        setattr(builtins, copy.__name__, copy)


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def transfer_kv_direct(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Any,
    dst_ptrs: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy pages of one layer, of all layers page by page, to where each layer lies by itself."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy pages of all layers the other way."""
    pages, layers = dst_indices[::page_size] // page_size, len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        rows = source[src_indices]
        dst_ptrs[number // layers][pages, number % layers] = rows.unflatten(0, (-1, page_size))


def _small_reserve(pools: Any) -> None:
    """A machine for tests has less than the 10 GB that are left free beside a pool of pages."""
    pools.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


class _After(MetaPathFinder, Loader):
    """Patches a module once it has been imported."""

    real: Any  # The loader that imports it.

    def __init__(self, name: str, patch: Callable[[Any], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        self.real, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.real
        self.real.exec_module(module)
        self._patch(module)


sys.meta_path[:0] = [
    _After("torch", _patch),
    _After("sglang.srt.mem_cache.pool_host.base", _small_reserve),
]
