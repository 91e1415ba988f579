"""Sentinels: exact figures in virtual time, whose kept values tell what moved since a result."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.record import ROOT
from experiments.sentinels import check, history
from experiments.sentinels.history import Value, note_for
from experiments.sentinels.table import ALL

pytestmark = pytest.mark.nightly

OLD, NEW = "a" * 40, "b" * 40
HERE = "c" * 40 + "-dirty"


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree that a check is of."""
    monkeypatch.setattr(check, "commit_of", lambda root: HERE)


def kept(path: Path, *values: Value) -> Path:
    history.save({"pauses": list(values)}, path / "kept.json")
    return path / "kept.json"


FIRST = Value("2026-03-01T00:00:00Z", OLD, {"p99_ms": 100.0, "way": "migrate"})


@pytest.mark.parametrize(
    ("figures", "note"),
    [
        pytest.param({"p99_ms": 110.0, "way": "migrate"}, "", id="a tenth"),
        pytest.param(
            {"p99_ms": 111.0, "way": "migrate"},
            "p99_ms 100 to 111 (+11.0%)",
            id="more than a tenth",
        ),
        pytest.param({"p99_ms": 89.0, "way": "migrate"}, "p99_ms 100 to 89 (-11.0%)", id="less"),
        pytest.param({"p99_ms": 100.0, "way": "reuse"}, "way migrate to reuse", id="another word"),
        pytest.param(
            {"p99_ms": 150.0}, "way migrate to nothing and 1 more", id="the furthest is shown"
        ),
    ],
)
def test_a_page_names_a_sentinel_that_moved_by_more_than_a_tenth(
    tmp_path: Path, figures: history.Figures, note: str
) -> None:
    """Since the result; text moves by any change."""
    path = kept(tmp_path, FIRST, Value("2026-03-05T00:00:00Z", f"{OLD}-dirty", figures))

    found = note_for(("pauses",), NEW, "2026-03-04T10:00:00Z", path)

    assert found == (f"since 2026-03-04 the sentinel `pauses` has moved: {note}" if note else "")


def test_a_result_is_compared_with_the_value_of_its_own_time(tmp_path: Path) -> None:
    """That of its commit whatever the date; one that changes on its commit brought is later."""
    moved = Value("2026-03-05T00:00:00Z", f"{OLD}-dirty", {"p99_ms": 200.0})
    path = kept(tmp_path, FIRST, moved)

    def note(commit: str, date: str) -> str:
        return note_for(("pauses",), commit, date, path)

    assert note(NEW, "2026-03-06T00:00:00Z") == ""
    assert "has moved" in note(NEW, "2026-03-04T00:00:00Z")
    assert "has moved" in note(OLD, "2026-03-06T00:00:00Z")
    assert "has moved" in note(OLD, "2026-02-01T00:00:00Z")
    assert note(NEW, "2026-02-01T00:00:00Z") == (
        "measured on 2026-02-01, before sentinels were kept: `pauses`"
    )


def test_a_row_without_a_sentinel_has_the_day_of_its_result() -> None:
    assert note_for((), OLD, "2026-03-04T10:00:00Z") == "measured on 2026-03-04"
    assert note_for((), "unknown", "") == "measured on an unknown day"


def test_a_row_cannot_name_a_sentinel_that_is_not_kept(tmp_path: Path) -> None:
    path = kept(tmp_path, FIRST)

    with pytest.raises(ValueError, match=r"sentinel: got pause; allowed: pauses"):
        note_for(("pause",), OLD, "", path)


def test_kept_values_are_read_as_they_were_written(tmp_path: Path) -> None:
    """One a line: branches that move different sentinels merge."""
    path = kept(tmp_path, FIRST, Value("2026-03-05T00:00:00Z", NEW, {"p99_ms": 1 / 3}))

    assert history.load(path)["pauses"][1].figures == {"p99_ms": 1 / 3}
    assert len(path.read_text().splitlines()) == 2 + 2 + 2


def fake(**figures: float | str) -> dict[str, Callable[[], history.Figures]]:
    """A table of one sentinel."""
    return {"pauses": lambda: figures}


def checked(path: Path, table: check.Table, *, update: bool = False) -> tuple[int, str]:
    """The exit status of a check of all of the table, and what was printed."""
    lines: list[str] = []
    status = check.check([*table], path=path, table=table, update=update, tell=lines.append)
    return status, "\n".join(lines)


def test_a_sentinel_that_has_moved_is_printed_old_and_new(tmp_path: Path) -> None:
    """By any amount that its six digits show; the status is 1, and nothing is kept unasked."""
    path = kept(tmp_path, FIRST)
    before = path.read_text()

    status, lines = checked(path, fake(p99_ms=100.001, way="migrate"))

    assert status == 1
    assert "p99_ms 100 to 100.001 (+0.0%)" in lines
    assert "moved: pauses" in lines
    assert path.read_text() == before


def test_a_sentinel_as_kept_passes(tmp_path: Path) -> None:
    """The last bit of a figure is that of the mathematical library."""
    status, lines = checked(kept(tmp_path, FIRST), fake(p99_ms=100.00000000000003, way="migrate"))

    assert status == 0
    assert "[1/1] pauses" in lines
    assert lines.endswith("as kept")


def test_update_keeps_the_new_value_behind_the_old_one(tmp_path: Path) -> None:
    """Old and new are printed; one more change of the same uncommitted tree replaces its value."""
    path, old = kept(tmp_path, FIRST), FIRST

    status, lines = checked(path, fake(p99_ms=120.0, way="migrate"), update=True)
    again, _ = checked(path, fake(p99_ms=130.0, way="migrate"), update=True)

    values = history.load(path)["pauses"]
    assert (status, again) == (0, 0)
    assert "p99_ms 100 to 120 (+20.0%)" in lines
    assert [value.figures["p99_ms"] for value in values] == [100.0, 130.0]
    assert values[0] == old
    assert values[1].commit == HERE
    assert checked(path, fake(p99_ms=130.0, way="migrate"))[0] == 0


def test_a_sentinel_that_was_never_kept_fails_until_it_is(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"

    status, lines = checked(path, fake(p99_ms=1.0))

    assert status == 1
    assert "no value is kept" in lines
    assert checked(path, fake(p99_ms=1.0), update=True)[0] == 0
    assert checked(path, fake(p99_ms=1.0))[0] == 0


def test_a_sentinel_that_fails_is_named_and_not_kept(tmp_path: Path) -> None:
    """The others are computed and kept nevertheless."""

    def broken() -> history.Figures:
        raise AssertionError("a stream was lost")

    path = kept(tmp_path, FIRST)

    status, lines = checked(path, {"outage": broken} | fake(p99_ms=120.0), update=True)

    assert status == 1
    assert "FAILED: AssertionError: a stream was lost" in lines
    assert lines.endswith("failed: outage")
    assert [len(values) for values in history.load(path).values()] == [2]


def test_every_sentinel_has_a_kept_value_and_every_value_a_sentinel() -> None:
    values = history.load()

    assert {*values} == {*ALL}
    assert [name for name, found in values.items() if not found] == []
    for name, found in values.items():
        assert [each.at for each in found] == sorted(each.at for each in found), name


def test_a_name_that_is_none_is_an_error_that_lists_the_sentinels() -> None:
    assert check.chosen(["page", "link"]) == ["page", "link"]
    assert check.chosen([]) == [*ALL]
    with pytest.raises(ValueError, match=r"--only: got pages; allowed: auto_costs, .*, throughput"):
        check.chosen(["pages"])


@pytest.mark.process
def test_figures_do_not_depend_on_the_order_of_hashes() -> None:
    """Those that are computed within seconds, in processes with other seeds of hashes."""
    quick = ["page", "auto_costs", "rom_costs", "hand_off", "throughput", "gossip", "poison"]
    code = f"""if True:
        import json
        from experiments.sentinels.check import compute
        print(json.dumps([compute(name).figures for name in {quick}]))
    """
    found = []
    for seed in ("1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        words = [sys.executable, "-c", code]

        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )

        found.append(json.loads(done.stdout))

    assert found[0] == found[1]
    assert all(found[0])
