"""Experiments that are measured in parts."""

import time
from pathlib import Path

import pytest

from experiments import cells as cells_module
from experiments.cells import Cells
from experiments.record import Record
from experiments.results import is_whole, run_of

pytestmark = pytest.mark.nightly


class Quiet(Record):
    """Circumstances that a test chooses."""

    def __init__(self, void: str = "") -> None:
        self.why = void

    def _circumstances(self) -> dict[str, object]:
        run: dict[str, object] = {"commit": "unknown", "machine": "", "at": ""}
        return run | ({"void": self.why} if self.why else {})


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A switch: under `same`, the code counts as that of the kept result."""
    of = {"same": True}
    monkeypatch.setattr(cells_module, "is_of_this_code", lambda path: of["same"] and path.exists())
    return of


def open_at(out: Path, size: int = 1) -> Cells:
    return Cells(out, "result", {"size": size})


def measured(out: Path, *names: str, void: str = "", size: int = 1) -> list[str]:
    """The cells that a run measured."""
    cells, done = open_at(out, size), list[str]()

    def measure(name: str) -> str:
        done.append(name)
        return name.upper()

    cells.measure(names, 100.0, measure, lambda line: None)
    cells.keep(Quiet(void), {}, "text")
    return done


def test_a_run_goes_on_from_the_cells_that_are_kept(tmp_path: Path, code: dict[str, bool]) -> None:
    """And says which runs there were."""
    assert measured(tmp_path, "a", "b") == ["a", "b"]
    assert measured(tmp_path, "a", "b", "c") == ["c"]
    assert open_at(tmp_path).found == {"a": "A", "b": "B", "c": "C"}


def test_cells_of_other_code_or_settings_do_not_count(
    tmp_path: Path, code: dict[str, bool]
) -> None:
    """They are measured again."""
    measured(tmp_path, "a")
    assert measured(tmp_path, "a", size=2) == ["a"]
    code["same"] = False
    assert measured(tmp_path, "a", size=2) == ["a"]


def test_a_void_run_leaves_what_is_kept(tmp_path: Path, code: dict[str, bool]) -> None:
    """Its own cells are lost."""
    measured(tmp_path, "a")
    assert measured(tmp_path, "b", void="the machine was busy") == ["b"]
    assert open_at(tmp_path).found == {"a": "A"}


def test_a_void_run_is_kept_where_there_is_no_other(tmp_path: Path, code: dict[str, bool]) -> None:
    """It says that it is void; the next run of any kind replaces it."""
    measured(tmp_path, "a", void="the machine was busy")
    assert run_of(tmp_path / "result.json")["void"] == "the machine was busy"

    measured(tmp_path, "b", void="the machine was busy again")
    assert run_of(tmp_path / "result.json")["void"] == "the machine was busy again"


def test_no_cell_is_begun_that_would_go_beyond_the_limit(
    tmp_path: Path, code: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it takes as long as the longest one before it. One is always measured."""
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    cells = open_at(tmp_path)

    def measure(name: str) -> str:
        nonlocal now_s
        now_s += 4.0
        return name

    cells.measure("abcd", 10.0, measure, lambda line: None)

    assert [*cells.found] == ["a", "b"]


def test_a_cell_that_could_not_be_measured_is_left_to_another_run(
    tmp_path: Path, code: dict[str, bool]
) -> None:
    """Those behind it are measured and kept."""
    cells = open_at(tmp_path)

    cells.measure("abc", 100.0, lambda name: None if name == "b" else name, lambda line: None)
    cells.keep(Quiet(), {}, "text")

    assert open_at(tmp_path).found == {"a": "a", "c": "c"}
    assert not is_whole(tmp_path / "result.json")
    measured(tmp_path, "a", "b", "c")
    assert is_whole(tmp_path / "result.json")
