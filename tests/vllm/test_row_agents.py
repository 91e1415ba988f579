"""A request names agents by id, and nothing that it says does harm."""

import time
from typing import Any

import msgspec
import pytest

from kvrs.protocol.rows import Space, seal
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.tags import RowTags
from kvrs.vllm.agents import KnownAgents

SECRET, KEY = bytes(32), b"k" * 32


def client(name: str) -> RowClient:
    def dial(timeout_s: float) -> Any:
        raise AssertionError("no connection is asked for")

    key = scoped_key(SECRET, Scope.ROWS, name)
    return RowClient(name, dial, key, Space(bytes(32), 4096), RowTags([SECRET]))


@pytest.fixture
def agents() -> KnownAgents:
    return KnownAgents(client("own"), {name: client(name) for name in ("b", "c")}, [KEY])


def named(agents: KnownAgents, *names: str) -> list[str]:
    found = agents.named(msgspec.to_builtins(seal(names, KEY, time.time())))
    assert found is not None
    return [agent.name for agent in found]


def test_the_own_agent_comes_first_and_each_once(agents: KnownAgents) -> None:
    assert named(agents, "c", "b", "own", "c") == ["own", "c", "b"]


def test_params_that_no_proxy_made_name_none_and_are_told_once(
    agents: KnownAgents, caplog: pytest.LogCaptureFixture
) -> None:
    """However many a client sends."""
    wrong = msgspec.to_builtins(seal(["b"], b"x" * 32, time.time()))
    old = msgspec.to_builtins(seal(["b"], KEY, time.time() - 3600))
    given: list[Any] = [None, {}, 7, {"agents": ["b"]}, wrong, wrong | {"agents": ["\ud800"]}, old]

    assert [agents.named(each) for each in given * 20] == [None] * 140

    said = "kv_transfer_params.kvrs of a request is ignored: "
    assert [each.getMessage() for each in caplog.records] == [
        said + "it is malformed",
        said + "its mac matches no secret of this cluster",
        said + "it was made more than 900 s before or after this clock",
    ]


def test_unknown_ids_are_passed_over_and_told_once_each_within_a_bound(
    agents: KnownAgents, caplog: pytest.LogCaptureFixture
) -> None:
    assert named(agents, "x", "b") == ["own", "b"]
    assert named(agents, "x" * 9, "x") == ["own"]
    assert [each.getMessage() for each in caplog.records] == [
        "a request names the agent 'x'; allowed: b, c",
        "a request names the agent 'xxxxxxxxx'; allowed: b, c",
    ]
    for number in range(100):
        named(agents, f"{number}" * 60)
    assert len(caplog.records) == 16
    assert max(len(each.getMessage()) for each in caplog.records) < 130
