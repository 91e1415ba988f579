"""A request names agents by id, and nothing that it says does harm."""

from typing import Any

import pytest

from kvrs.protocol.rows import RowTags, Space
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.client import RowClient
from kvrs.vllm.agents import MAX_NAMED, KnownAgents

SECRET = bytes(32)


def client(name: str) -> RowClient:
    def dial(timeout_s: float) -> Any:
        raise AssertionError("no connection is asked for")

    key = scoped_key(SECRET, Scope.ROWS, name)
    return RowClient(name, dial, key, Space(bytes(32), 4096), RowTags([SECRET]))


@pytest.fixture
def agents() -> KnownAgents:
    return KnownAgents(client("own"), {name: client(name) for name in ("b", "c")})


def named(agents: KnownAgents, given: Any) -> list[str]:
    return [agent.name for agent in agents.named(given)]


def test_the_own_agent_comes_first_and_each_once(agents: KnownAgents) -> None:
    assert named(agents, {"agents": ["c", "b", "own", "c"]}) == ["own", "c", "b"]


@pytest.mark.parametrize(
    "given",
    [
        *(None, 7, [], "b", {}, {"agents": None}, {"agents": "b"}, {"agents": {"b": 1}}),
        *({"agents": [["b"], None, 7, {}]}, {"agents": ["b"] * (MAX_NAMED + 1)}),
        {"agents": ["b"] * 10_000},
    ],
)
def test_malformed_params_name_the_own_agent_alone(agents: KnownAgents, given: Any) -> None:
    assert named(agents, given) == ["own"]


def test_unknown_ids_are_passed_over_and_told_once_each_within_a_bound(
    agents: KnownAgents, caplog: pytest.LogCaptureFixture
) -> None:
    assert named(agents, {"agents": ["x", "b"]}) == ["own", "b"]
    assert named(agents, {"agents": ["x" * 9, "x"]}) == ["own"]
    assert [each.getMessage() for each in caplog.records] == [
        "a request names the agent 'x'; allowed: b, c",
        "a request names the agent 'xxxxxxxxx'; allowed: b, c",
    ]
    for number in range(100):
        named(agents, {"agents": [f"{number}" * 1000]})
    assert len(caplog.records) == 16
    assert max(len(each.getMessage()) for each in caplog.records) < 130
