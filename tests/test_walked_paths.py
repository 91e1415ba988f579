"""The ratchet of the paths that a request and a death walk through."""

import json
import sys
from pathlib import Path

import pytest

from experiments.request_path import gauge

EACH = {"files": 30, "changes_of_file": 100, "functions": 150, "lines_of_files": 9000}
FOUND = {name: {count: EACH[count] for count in counted} for name, counted in gauge.COUNTED.items()}


@pytest.fixture
def ratchet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ratchet of its own for traces that found `FOUND`."""
    path = tmp_path / "most.json"
    path.write_text(json.dumps(FOUND))
    monkeypatch.setattr(gauge, "RATCHET", path)
    monkeypatch.setattr(gauge, "PYTHON", sys.version_info[:2])
    monkeypatch.setattr(gauge, "longest", lambda: FOUND)
    return path


def allow(ratchet: Path, name: str = "death", **counts: int) -> None:
    ratchet.write_text(json.dumps(FOUND | {name: FOUND[name] | counts}))


@pytest.mark.parametrize(
    ("name", "count"), [(name, count) for name in gauge.COUNTED for count in gauge.COUNTED[name]]
)
def test_a_path_that_has_become_longer_fails(
    ratchet: Path, capsys: pytest.CaptureFixture[str], name: str, count: str
) -> None:
    """Each count by itself, also where another one has fallen."""
    most = FOUND[name][count] - 1
    allow(ratchet, name, **({"files": 99} | {count: most}))

    assert gauge.check() == 1
    said = capsys.readouterr().out
    assert f"{name}: {count.replace('_', ' ')} {most + 1}, at most {most}" in said


def test_a_path_as_long_as_before_or_shorter_passes(
    ratchet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gauge.check() == 0
    assert capsys.readouterr().out == ""
    allow(ratchet, files=31)

    assert gauge.check() == 0
    assert "death: files 30, at most 31" in capsys.readouterr().out


def test_the_ratchet_is_only_written_lower(ratchet: Path) -> None:
    allow(ratchet, files=31, functions=149)

    gauge.keep_less()

    assert json.loads(ratchet.read_text())["death"] == FOUND["death"] | {"functions": 149}


def test_another_python_is_not_compared(
    ratchet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It calls other functions of generators, so that its counts are others."""
    allow(ratchet, files=1)
    monkeypatch.setattr(gauge, "PYTHON", (3, 8))

    assert gauge.check() == 0
    assert "not compared" in capsys.readouterr().out
