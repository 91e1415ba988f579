"""The KV pages of one instance: one tensor, in which a page is contiguous."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvrs.protocol.geometry import KvGeometry
from kvrs_engine.engine.staging import Staged, StagingArea

_DTYPES = {4: torch.float32, 2: torch.bfloat16}


class KvStore(Protocol):
    """The memory from and to which a model's layers read and write KV. `KvPool` implements and
    documents all members.
    """

    geometry: KvGeometry
    device: torch.device

    @property
    def zero_page(self) -> int: ...

    @property
    def head_counts(self) -> Collection[int]: ...

    def begin(self, pages: Tensor) -> None: ...

    def write(
        self, layer: int, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> None: ...

    def first_runs(self, pages: Tensor, heads: int) -> Tensor: ...

    def gather(self, layer: int, runs: Tensor) -> tuple[Tensor, Tensor]: ...


class KvPool:
    """Pages `0 .. pages - 1` as `[layers, kv_heads, 2, page_size_tokens, head_dim]`, in float32 or
    bfloat16 by their geometry.

    One more page follows: the zero page, which pads incomplete blocks of pages.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        pages: int,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> None:
        """`memory` is used in place; it has finite numbers for all pages and the zero page."""
        self.geometry = geometry
        self.pages = pages
        self.device = device
        shape = (
            pages + 1,
            geometry.layers,
            geometry.kv_heads,
            2,
            geometry.page_size_tokens,
            geometry.head_dim,
        )
        dtype = _DTYPES[geometry.dtype_bytes]
        # Masked positions are multiplied by zero, so their content must be finite.
        if memory is None:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.tensor = memory.view(dtype).view(shape)
            self.tensor[pages] = 0.0
        self._bytes = self.tensor.view(pages + 1, -1).view(torch.uint8)
        self._area = StagingArea(self._bytes) if device.type == "cuda" else None
        self._runs = self.tensor.view(-1, geometry.page_size_tokens * geometry.head_dim)

    @property
    def zero_page(self) -> int:
        return self.pages

    @property
    def head_counts(self) -> tuple[int, ...]:
        """The distinct numbers of KV heads of the layers."""
        return (self.geometry.kv_heads,)

    def stage(self, pages: Sequence[int]) -> Staged:
        """Stage pages for a socket: send them after `save`, or receive them before `restore`. The
        caller must free them.
        """
        return Staged(pages, self._bytes if self._area is None else self._area)

    def view(self, page: int) -> memoryview:
        """Return the writable bytes of a page in place; only on a CPU."""
        return self._bytes[page].numpy().data

    def begin(self, pages: Tensor) -> None:
        """Clear pages before their first position is written, because infinities and NaNs of an
        earlier owner must not reach the new one.
        """
        self.tensor.index_fill_(0, pages, 0.0)

    def write(self, layer: int, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[rows, kv_heads, head_dim]` to the (page, slot) of each row."""
        by_slot = self.tensor[:, layer].permute(0, 3, 1, 2, 4)
        by_slot[pages, slots] = torch.stack((keys, values), 2)

    def first_runs(self, pages: Tensor, heads: int) -> Tensor:
        """Return the indices for `gather` of `heads` KV heads of every page, `[..., heads]`."""
        per_page = self.geometry.layers * self.geometry.kv_heads * 2
        return pages.unsqueeze(-1) * per_page + torch.arange(heads) * 2

    def gather(self, layer: int, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values `[len(runs), page_size_tokens * head_dim]` at the
        indices of `first_runs`.
        """
        first = layer * self.geometry.kv_heads * 2
        keys = self._runs[first:].index_select(0, runs)
        return keys, self._runs[first + 1 :].index_select(0, runs)
