"""The tap of `experiments/healthy_path` counts requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.healthy_path.tap import Tap, _Caller

pytestmark = pytest.mark.nightly

PROOF = b"proof of a connection\r\n\r\n"
REQUEST = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\n[1,2]"
LEASES = b"POST /kvrs/v1/leases HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"


@given(st.lists(st.integers(0, 120), max_size=20))
def test_requests_are_counted_however_their_bytes_are_cut(sizes: list[int]) -> None:
    tap = Tap(1)
    caller = _Caller(tap)
    rest = PROOF + LEASES + REQUEST
    for size in sizes:
        caller.data_received(rest[:size])
        rest = rest[size:]
    caller.data_received(rest)

    assert tap.requests == {"POST /kvrs/v1/leases": 1, "POST /v1/completions": 1}
