"""`kvrs top`: what its screen shows of an overview."""

from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.net.admin import AdminClient

SENTENCE = "d0 was killed: 12 streams, all back, " + "each of them at another instance " * 5


def process(name: str, role: str, *, is_up: bool = True, **facts: str) -> dict[str, Any]:
    return {
        "id": name,
        "role": role,
        "node": "n0",
        "health": "up" if is_up else "down",
        "is_up": is_up,
        "reason": None if is_up else "it does not answer",
        "facts": facts,
        "notes": [],
    }


def overview(*agents: dict[str, Any]) -> dict[str, Any]:
    return {
        "proxies": [{"id": "proxy-0"}],
        "policy": {"policy": "auto", "backup": "local"},
        "instances": [process("d0", "decode", running="3")],
        "agents": [*agents],
        "streams": {"open": 0, "by_stage": {}, "restorable": {"streams": 0}},
        "fates": {"back": 12, "lost": 0},
        "incidents": [{"time": "12:00:00", "sentence": SENTENCE}],
    }


def shown(monkeypatch: pytest.MonkeyPatch, *agents: dict[str, Any]) -> str:
    """The output of `kvrs top --once` into a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(AdminClient, "overview", lambda self: overview(*agents))
    ran = CliRunner().invoke(app, ["top", "--once"])
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def test_events_are_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts read them; only a terminal has a width."""
    assert f"12:00:00  {SENTENCE.strip()}" in shown(monkeypatch)


def test_agents_are_shown_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an agent, nothing can be restored; a cluster without agents does not name them."""
    lines = shown(
        monkeypatch,
        process("agent-n0", "agent", checkpoints="2"),
        process("agent-n1", "agent", is_up=False),
    ).splitlines()

    assert "1 of 1 instances up, 1 of 2 agents up, policy auto, backup local" in lines
    rows = [line.split() for line in lines if line.startswith("agent-")]
    assert rows[0] == ["agent-n0", "agent", "n0", "up", "2"]
    assert rows[1] == ["agent-n1", "agent", "n0", "down"]
    assert "agent-n1: it does not answer" in lines
    assert "agents" not in shown(monkeypatch)
