"""Copies of many pieces between host memory and a GPU's KV blocks, each given by its addresses.

CUDA's own batch (`cuMemcpyBatchAsync`, as vLLM's `swap_blocks_batch` uses it), a Triton kernel that
reads pinned memory itself, and without a GPU `memmove`, so that the addresses are checked anywhere.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]
# Copies pieces of one size: to, from, bytes of each.
Copy = Callable[[Addresses, Addresses, int], None]

_CUDA_12_8 = 12080
_IN_STREAM_ORDER, _ANY_ORDER = 1, 3  # CU_MEMCPY_SRC_ACCESS_ORDER_*


class Blocks:
    """KV of a model in a GPU's blocks, as vLLM has it: a tensor for each layer. A row of host
    memory has a block of all layers, one after the other.
    """

    def __init__(self, layers: int, block_bytes: int, rows: int, device: str) -> None:
        self.layers, self.block_bytes, self.rows = layers, block_bytes, rows
        self.row_bytes = layers * block_bytes
        count = 2 * rows
        shape = (count, block_bytes)
        self.tensors = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layers)]
        # Blocks of a request lie anywhere.
        self.of_rows = np.random.default_rng(0).permutation(count)[:rows]

    def addresses(self, rows: npt.NDArray[np.int64]) -> Addresses:
        """Addresses of the blocks of all layers, for each row; shape: rows, layers."""
        bases = np.array([each.data_ptr() for each in self.tensors], np.uint64)
        blocks = self.of_rows[rows].astype(np.uint64) * np.uint64(self.block_bytes)
        return bases[None, :] + blocks[:, None]

    def bytes_of(self, row: int) -> bytes:
        block = int(self.of_rows[row])
        return b"".join(each[block].cpu().numpy().tobytes() for each in self.tensors)


def pieces(address: int, rows: npt.NDArray[np.int64], row_bytes: int, layers: int) -> Addresses:
    """Addresses of the pieces of all layers, for each row in host memory; shape: rows, layers."""
    starts = np.uint64(address) + rows.astype(np.uint64) * np.uint64(row_bytes)
    offsets = np.arange(layers, dtype=np.uint64) * np.uint64(row_bytes // layers)
    return starts[:, None] + offsets[None, :]


def by_memmove(to: Addresses, source: Addresses, size_bytes: int) -> None:
    for one, other in zip(to.ravel().tolist(), source.ravel().tolist(), strict=True):
        ctypes.memmove(one, other, size_bytes)


class _Place(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_uint),
        ("source", _Place),
        ("target", _Place),
        ("flags", ctypes.c_uint),
    )


def by_batch(stream: Any, *, any_order: bool) -> Copy:
    """CUDA's batch on a stream. `any_order`: nothing before it on the stream writes what is read.

    Raises:
        RuntimeError: this driver has none (CUDA 12.8).
    """
    driver = ctypes.CDLL("libcuda.so.1")
    found, status = ctypes.c_void_p(), ctypes.c_int()
    error = driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync",
        ctypes.byref(found),
        _CUDA_12_8,
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if error or not found.value:
        raise RuntimeError(f"the driver has no cuMemcpyBatchAsync ({error}, {status.value})")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call = ctypes.CFUNCTYPE(
        ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )(found.value)

    def copy(to: Addresses, source: Addresses, size_bytes: int) -> None:
        to, source = np.ascontiguousarray(to.ravel()), np.ascontiguousarray(source.ravel())
        sizes = np.full(len(to), size_bytes, np.uint64)
        attributes = _Attributes(order=_ANY_ORDER if any_order else _IN_STREAM_ORDER)
        index, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        error = call(
            to.ctypes.data,
            source.ctypes.data,
            sizes.ctypes.data,
            len(to),
            ctypes.addressof(attributes),
            ctypes.addressof(index),
            1,
            ctypes.addressof(failed),
            stream.cuda_stream,
        )
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {error} at copy {failed.value}")

    return copy


def by_kernel(stream: Any, programs: int) -> Copy:
    """A Triton kernel whose programs copy piece after piece, words of 8 bytes. Without a stream it
    is for Triton's interpreter (TRITON_INTERPRET=1).

    Raises:
        ImportError: there is no Triton.
    """
    device = "cpu" if stream is None else "cuda"
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # Triton has no types.
    def swap(to: Any, source: Any, count: Any, WORDS: tl.constexpr, CHUNK: tl.constexpr) -> None:  # noqa: N803  # Triton's way.
        piece = tl.program_id(0)
        while piece < count:
            reads = tl.load(source + piece).to(tl.pointer_type(tl.int64))
            writes = tl.load(to + piece).to(tl.pointer_type(tl.int64))
            for first in range(0, WORDS, CHUNK):
                words = first + tl.arange(0, CHUNK)
                tl.store(writes + words, tl.load(reads + words))
            piece += tl.num_programs(0)

    def copy(to: Addresses, source: Addresses, size_bytes: int) -> None:
        words = size_bytes // 8
        with torch.cuda.stream(stream):
            targets, sources = (
                torch.from_numpy(each.ravel().astype(np.int64)).to(device) for each in (to, source)
            )
            swap[(programs,)](targets, sources, len(targets), words, min(1024, words))

    return copy


def register(address: int, size_bytes: int) -> None:
    """Have the GPU read and write this memory without a copy in between."""
    cuda: Any = torch.cuda
    cuda.check_error(cuda.cudart().cudaHostRegister(address, size_bytes, 0))
