"""Bytes of a KV cache that a transfer sends."""

import pytest

from kvrs.protocol.geometry import KvGeometry


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_a_transfer_sends_whole_pages(tokens: int, pages: int) -> None:
    geometry = KvGeometry(layers=2, kv_heads=2, head_dim=8, dtype_bytes=4, page_size_tokens=16)

    assert geometry.sent_bytes(tokens) == pages * geometry.page_bytes
