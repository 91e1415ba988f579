"""Only a proxy of the cluster can make parameters that vLLM's tier heeds."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.protocol.rows import GOOD_S, MAX_AGENTS, params_key, seal, unseal

NOW_S = 1_800_000_000.0
SECRET, NEWER = bytes(32), b"n" * 32
KEY = params_key(SECRET, InstanceId("d0"))
AGENTS = ["agent-n0", "agent-n1"]


def made(*agents: Any, key: bytes = KEY, at_s: float = NOW_S) -> Any:
    """An object as it comes out of the body of a request."""
    return json.loads(msgspec.json.encode(seal(agents, key, at_s)))


def is_ignored(value: object, keys: tuple[bytes, ...] = (KEY,), now_s: float = NOW_S) -> str:
    with pytest.raises(RequestError) as caught:
        unseal(value, keys, now_s)
    return str(caught.value)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=16))
def test_agents_that_a_proxy_names_are_found(agents: list[str]) -> None:
    assert unseal(made(*agents), [KEY], NOW_S) == agents


def test_the_mac_is_under_a_key_of_the_server_and_of_the_cluster() -> None:
    mine = made(*AGENTS)

    for key in (params_key(SECRET, InstanceId("d1")), params_key(NEWER, InstanceId("d0")), SECRET):
        assert is_ignored(mine, (key,)) == "its mac matches no secret of this cluster"


def test_while_a_secret_is_rotated_either_is_right() -> None:
    keys = [params_key(secret, InstanceId("d0")) for secret in (NEWER, SECRET)]

    assert [unseal(made(*AGENTS, key=key), keys, NOW_S) for key in keys] == [AGENTS] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"agents": ["agent-n0"]},
        {"agents": ["agent-n1", "agent-n0"]},
        {"agents": ["agent-n0,agent-n1"]},
        {"agents": []},
        {"made_s": int(NOW_S) + 1},
        {"mac": "0" * 64},
        {"mac": "\N{LATIN SMALL LETTER E WITH ACUTE}" * 64},
    ],
)
def test_what_was_changed_on_its_way_is_ignored(change: dict[str, Any]) -> None:
    assert is_ignored(made(*AGENTS) | change) == "its mac matches no secret of this cluster"


def test_a_captured_object_is_right_for_some_minutes() -> None:
    """Clocks of proxies and servers may differ by as much."""
    mine = made(*AGENTS)

    for after_s in (-GOOD_S, GOOD_S):
        assert unseal(mine, [KEY], NOW_S + after_s) == AGENTS
        assert "clock" in is_ignored(mine, now_s=NOW_S + 1.1 * after_s)


SEALED = {name: made(*AGENTS)[name] for name in ("agents", "made_s", "mac")}
NO_AGENTS: list[Any] = [None, 7, "agent-n0", {"agent-n0": 1}, ["a"] * (MAX_AGENTS + 1)]
NO_AGENTS += [[None], [7], [["agent-n0"]], [{}], ["x" * 1000], ["\ud800"]]
NO_AGENTS += [["a"] * 1_000_000]
NO_MACS: list[Any] = [None, 7, "", "0" * 63, "0" * 65, "\udfff" * 64]
NO_TIMES: list[Any] = [None, "7", 1.5, float("nan"), -1, 10**400, True]


@pytest.mark.parametrize(
    "value",
    [
        *(7, True, "kvrs", [], [SEALED], {}, {1: 2}, {"agents": []}),
        *(SEALED | {"more": 1}, SEALED | {"\ud800": 1}),
        *(SEALED | {"agents": each} for each in NO_AGENTS),
        *(SEALED | {"mac": each} for each in NO_MACS),
        *(SEALED | {"made_s": each} for each in NO_TIMES),
    ],
    ids=lambda value: repr(value)[:60].encode("ascii", "replace").decode(),
)
def test_malformed_values_are_ignored(value: object) -> None:
    assert is_ignored(value) == "it is malformed"


@pytest.mark.parametrize("agents", [[7], [None], [["agent-n0"]], ["a"] * (MAX_AGENTS + 1)])
def test_malformed_agents_are_ignored_with_a_right_mac_too(agents: list[Any]) -> None:
    assert is_ignored(made(*agents)) == "it is malformed"
