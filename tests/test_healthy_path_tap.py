"""The tap of `experiments/healthy_path` counts requests on plain connections and within a trunk."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from experiments.healthy_path.tap import Connections, Tap, _Caller
from kvrs.trunk import PREFACE

PROOF = b"proof of a connection\r\n\r\n"
REQUEST = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\n[1,2]"
LEASES = b"POST /kvrs/v1/leases HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"


def entry(number: int, data: bytes) -> bytes:
    return number.to_bytes(4) + len(data).to_bytes(4) + data


def close(number: int) -> bytes:
    return number.to_bytes(4) + (3 << 24).to_bytes(4)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@given(st.lists(st.integers(0, 60), max_size=20))
def test_data_of_connections_within_a_trunk_is_told_apart_however_it_is_cut(
    sizes: list[int],
) -> None:
    sent = PROOF + PREFACE + entry(1, b"first") + entry(2, b"second") + close(1) + entry(2, b", on")
    connections, found = Connections(), Counter[int]()
    whole: dict[int, bytes] = {}
    for piece in cut(sent, sizes):
        for number, data in connections.feed(piece):
            whole[number] = whole.get(number, b"") + data
            found[number] += 1

    assert whole == {0: PROOF + PREFACE, 1: b"first", 2: b"second, on"}


@given(st.lists(st.integers(0, 120), max_size=20), st.booleans())
def test_requests_are_counted_with_and_without_a_trunk(sizes: list[int], is_trunk: bool) -> None:
    tap = Tap(1)
    caller = _Caller(tap)
    sent = PROOF + LEASES + REQUEST
    if is_trunk:
        sent = PROOF + PREFACE + entry(1, LEASES) + entry(3, REQUEST[:9]) + entry(2, REQUEST)
        sent += entry(3, REQUEST[9:])
    for piece in cut(sent, sizes):
        caller.data_received(piece)

    completions = 1 + is_trunk
    assert tap.requests == {"POST /kvrs/v1/leases": 1, "POST /v1/completions": completions}
