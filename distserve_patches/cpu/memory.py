"""Memory of a logical GPU: tensors that other processes on this machine can open by a handle.

They are anonymous files, so nothing is left of them when the last process that has them open is
gone, however it went.
"""

import json
import mmap
import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Handle = list[int]  # What upstream passes around: here the characters of a small JSON text.

_files: dict[int, int] = {}  # Where a tensor begins, and the descriptor of its file.


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of that shape. One more row of zeros lies behind its first dimension, see
    `with_zero_row`.
    """
    whole = (shape[0] + 1, *shape[1:])
    size = prod(whole) * dtype.itemsize
    descriptor = os.memfd_create("kvrs-logical-gpu")
    os.ftruncate(descriptor, size)
    tensor = _map(descriptor, whole, dtype)
    _files[tensor.data_ptr()] = descriptor
    return tensor[:-1]


def with_zero_row(tensor: Tensor) -> Tensor:
    """The same memory with the row behind it."""
    return tensor.as_strided((tensor.shape[0] + 1, *tensor.shape[1:]), tensor.stride())


def handle_of(tensor: Tensor) -> Handle:
    """A handle for `open_handle`, in any process of the same user while this one runs."""
    path = f"/proc/{os.getpid()}/fd/{_files[tensor.data_ptr()]}"
    fields = {
        "path": path,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    return list(json.dumps(fields).encode())


def open_handle(handle: Handle) -> Tensor:
    """The other process's tensor, without the row of zeros.

    Raises:
        OSError: that process is gone.
    """
    fields = json.loads(bytes(handle))
    descriptor = os.open(fields["path"], os.O_RDWR)
    try:
        rows, *rest = fields["shape"]
        return _map(descriptor, (rows + 1, *rest), getattr(torch, fields["dtype"]))[:-1]
    finally:
        os.close(descriptor)


def is_gone(handle: Handle) -> bool:
    """The process that made the handle has ended: its memory can still be read, but on a GPU it
    could not.
    """
    return not os.path.exists(json.loads(bytes(handle))["path"])


def _map(descriptor: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=dtype, count=prod(shape)).view(shape)
