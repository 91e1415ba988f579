"""Sentinels: exact figures in virtual time, whose kept values tell what moved since a result."""

from pathlib import Path

import pytest

from experiments.sentinels import history
from experiments.sentinels.history import Value, note_for

OLD, NEW = "a" * 40, "b" * 40


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
