"""The KV pages of one instance: one tensor, in which a page is one run of bytes."""

import torch
from torch import Tensor

from kvrs.protocol.geometry import KvGeometry


class KvPool:
    """Pages `0 .. pages - 1` as `[layers, 2, kv_heads, page_size_tokens, head_dim]` in float32.

    One more page lies behind them: it is always zero and fills up blocks of pages that a sequence has only begun.
    """

    def __init__(self, geometry: KvGeometry, pages: int, device: torch.device) -> None:
        assert geometry.dtype_bytes == 4, "KV is kept in float32"
        self.geometry = geometry
        self.pages = pages
        shape = (pages + 1, geometry.layers, 2, geometry.kv_heads, geometry.page_size_tokens, geometry.head_dim)
        # Masked positions are multiplied by zero, so whatever lies there must be finite from the start.
        self.tensor = torch.zeros(shape, dtype=torch.float32, device=device)
        self._staging: dict[int, Tensor] = {}
        on_host = device.type == "cpu"
        self._bytes = self.tensor.view(pages + 1, -1).view(torch.uint8) if on_host else None
        self._runs = self.tensor.view(-1, geometry.page_size_tokens * geometry.head_dim)

    @property
    def zero_page(self) -> int:
        return self.pages

    def view(self, page: int) -> memoryview:
        """The writable bytes of a page: in place on a CPU, else a pinned buffer (see `load` and `store`)."""
        assert 0 <= page < self.pages, page
        buffer = self._staged(page) if self._bytes is None else self._bytes[page]
        return buffer.numpy().data

    def load(self, page: int) -> None:
        """Bring the device's page into its buffer, before it is sent."""
        if self._bytes is None:
            self._staged(page).copy_(self.tensor[page].reshape(-1).view(torch.uint8))

    def store(self, page: int) -> None:
        """Bring a page's buffer to the device, after it was received."""
        if self._bytes is None:
            self.tensor[page].view(-1).view(torch.uint8).copy_(self._staged(page))

    def begin(self, pages: Tensor) -> None:
        """Clear pages that get their first position: an older owner's overflow (inf, nan) must not reach the new one."""
        self.tensor.index_fill_(0, pages, 0.0)

    def write(self, layer: int, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `[rows, kv_heads, head_dim]` at (page, slot) of each row."""
        by_slot = self.tensor[:, layer].permute(0, 3, 1, 2, 4)
        by_slot[pages, slots] = torch.stack((keys, values), 1)

    def first_runs(self, pages: Tensor) -> Tensor:
        """Indices for `gather` of every KV head of every page, `[..., kv_heads]`."""
        per_page = self.geometry.layers * 2 * self.geometry.kv_heads
        return pages.unsqueeze(-1) * per_page + torch.arange(self.geometry.kv_heads)

    def gather(self, layer: int, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[len(runs), page_size_tokens * head_dim]` of one layer at indices from `first_runs`."""
        first = layer * 2 * self.geometry.kv_heads
        keys = self._runs[first:].index_select(0, runs)
        return keys, self._runs[first + self.geometry.kv_heads :].index_select(0, runs)

    def _staged(self, page: int) -> Tensor:
        # Only pages that ever travel need a buffer; pinning the whole pool would double a GPU's memory on the host.
        buffer = self._staging.get(page)
        if buffer is None:
            buffer = torch.empty(self.geometry.page_bytes, dtype=torch.uint8, pin_memory=True)
            self._staging[page] = buffer
        return buffer
