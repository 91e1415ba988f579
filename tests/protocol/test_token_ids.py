"""Packed token ids and their JSON."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.protocol.openai import requests
from kvrs.protocol.openai.requests import decode_ids, encode_with_ids, packed

ids = st.integers(0, (1 << 32) - 1)


@given(given_ids=st.lists(ids, max_size=60), indent=st.none() | st.integers(0, 3))
@settings(deadline=None)
def test_steps_of_any_size_read_the_same_ids(given_ids: list[int], indent: int | None) -> None:
    """Wherever a step ends, and however the list is written."""
    text = json.dumps(given_ids, indent=indent).encode()

    with pytest.MonkeyPatch.context() as patch:
        for step_bytes in (1, 7, 64, 1 << 20):
            patch.setattr(requests, "_STEP_BYTES", step_bytes)
            assert decode_ids(text) == packed(given_ids)
    assert decode_ids(encode_with_ids(packed(given_ids))) == packed(given_ids)


@pytest.mark.parametrize(
    "element", ['"1, 2"', "[3, 4]", "-1", "4294967296", "1.5", "null", '{"a": 1, "b": 2}']
)
def test_what_is_no_id_is_refused_wherever_it_stands(
    element: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step ends within it."""
    monkeypatch.setattr(requests, "_STEP_BYTES", 8)
    for before in range(12):
        text = f"[{'1, ' * before}{element}, 7, 8, 9, 10, 11]".encode()
        with pytest.raises(msgspec.ValidationError):
            decode_ids(text)
