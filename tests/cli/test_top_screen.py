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
