"""Shape and size of the KV cache of a model."""

from typing import Annotated

import msgspec

# Version of the order of bytes in a page; engines with another version share no pages.
PAGE_LAYOUT = 2

Positive = Annotated[int, msgspec.Meta(ge=1)]


class KvGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one model's KV cache.

    A page holds `page_size_tokens` tokens as `[layers, kv_heads, 2 (key, value), page_size_tokens,
    head_dim]`. A cell, one KV head of one layer, is one run of bytes, so the share of a page that a
    process holds is whole cells. The names of the fields are part of an engine's fingerprint.
    """

    layers: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype_bytes: Positive
    page_size_tokens: Positive

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values: `2 * layers * kv_heads * head_dim * dtype_bytes`."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def page_cells(self) -> int:
        return self.layers * self.kv_heads

    @property
    def page_bytes(self) -> int:
        return self.bytes_per_token * self.page_size_tokens

    def sent_bytes(self, tokens: int) -> int:
        """Bytes that a transfer of these tokens' KV sends: the last page is sent whole, too."""
        return -(-tokens // self.page_size_tokens) * self.page_bytes
