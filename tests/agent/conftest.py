"""Fixtures of the tests of rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrs_testkit.row_agent import RowAgent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RowAgent]:
    agent = RowAgent(tmp_path / "rows")
    yield agent
    agent.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[RowAgent]]:
    """Two agents, of two nodes."""
    agents = [RowAgent(tmp_path / f"rows {number}") for number in range(2)]
    yield agents
    for agent in agents:
        agent.close()
