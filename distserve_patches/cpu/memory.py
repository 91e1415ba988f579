"""Memory of a logical GPU: tensors that other processes on this machine can open by a handle.

The tensors are anonymous files, which are freed at any end of the last process that has them open.
"""

import json
import mmap
import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Handle = list[int]  # Characters of a small JSON text, in upstream's type.

_files: dict[int, int] = {}  # Descriptor of a tensor's file by its address.


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate zeros of that shape, with another row of zeros behind the first dimension; see
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
    """The same memory including the row of zeros."""
    return tensor.as_strided((tensor.shape[0] + 1, *tensor.shape[1:]), tensor.stride())


def handle_of(tensor: Tensor) -> Handle:
    """A handle for `open_handle`, in any process of the same user while this process runs."""
    path = f"/proc/{os.getpid()}/fd/{_files[tensor.data_ptr()]}"
    fields = {
        "path": path,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    return list(json.dumps(fields).encode())


def open_handle(handle: Handle) -> Tensor:
    """Open another process's tensor, without the row of zeros.

    Raises:
        OSError: the process is gone.
    """
    fields = json.loads(bytes(handle))
    descriptor = os.open(fields["path"], os.O_RDWR)
    try:
        rows, *rest = fields["shape"]
        return _map(descriptor, (rows + 1, *rest), getattr(torch, fields["dtype"]))[:-1]
    finally:
        os.close(descriptor)


def is_gone(handle: Handle) -> bool:
    """Return whether the handle's process has ended, in which case a GPU's memory is lost."""
    return not os.path.exists(json.loads(bytes(handle))["path"])


def _map(descriptor: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=dtype, count=prod(shape)).view(shape)
