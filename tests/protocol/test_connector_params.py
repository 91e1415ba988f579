"""Parameters for the connector in vLLM: what is sealed comes back, anything else is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import RequestError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.connector import connector_key, seal, unseal
from kvrs.protocol.instance import CheckpointTarget, KvrsParams, SourceRange

KEY = connector_key(b"s" * 32, InstanceId("d0"))
PARAMS = KvrsParams(
    StreamId("a" * 32),
    2,
    17,
    sources=[SourceRange(InstanceId("n0-agent"), 0, 5, 3)],
    checkpoints=[CheckpointTarget(InstanceId("n1-agent"), 1 << 20)],
)
SEALED = msgspec.to_builtins(seal(PARAMS, KEY))


def test_what_is_sealed_comes_back_under_any_of_the_keys() -> None:
    other = connector_key(b"o" * 32, InstanceId("d0"))
    assert unseal(SEALED, [other, KEY]) == PARAMS


def test_a_key_is_of_one_instance() -> None:
    with pytest.raises(RequestError, match="its mac is wrong"):
        unseal(SEALED, [connector_key(b"s" * 32, InstanceId("d1"))])


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "x",
        {},
        {"params": "{}"},
        SEALED | {"mac": "0" * 64},
        SEALED | {"mac": "\ud800" * 64},
        SEALED | {"params": SEALED["params"] + " "},
        SEALED | {"params": "\ud800"},
        SEALED | {"params": "x" * (1 << 17)},
        SEALED | {"more": 1},
    ],
)
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(RequestError, match=r"kv_transfer_params\.kvrs"):
        unseal(value, [KEY])


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_random_values_are_refused(value: object) -> None:
    with pytest.raises(RequestError):
        unseal(value, [KEY])
    with pytest.raises(RequestError):
        unseal({"params": value, "mac": SEALED["mac"]}, [KEY])
