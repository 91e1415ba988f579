"""Documents as tables, on terminals of any width."""

from typing import Any

import pytest

from kvrs.tables import show

STAMP = "2026-11-27T04:32:42.209+00:00"
STREAM = "ad26a50d574e69f9b3635d3820225d70"
ROW = {
    "line": 27,
    "at_utc": STAMP,
    "stream": STREAM,
    "cause": "connection lost: Connection refused",
    "predicted_s": 0.02035,
    "others_wait_s": 0.01126,
    "regret_s": -0.00125,
}


def shown(
    document: Any, columns: int | None, patch: pytest.MonkeyPatch, out: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines that `show` prints; without `columns` into a pipe."""
    if columns is None:
        patch.delenv("COLUMNS", raising=False)
    else:
        patch.setenv("COLUMNS", str(columns))
    show(document, as_json=False)
    return out.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [40, 60, 70, 80, 90, 100, 110, 120, 160])
def test_no_key_and_no_number_is_broken(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wide table folds its values. One that is narrower than its keys and numbers is printed row
    by row.
    """
    lines = shown({"decisions": [ROW, ROW | {"line": 28}]}, columns, monkeypatch, capsys)

    words = " ".join(lines).split()
    assert all(len(line) <= columns for line in lines)
    assert {"0.02035", "0.01126", "-0.00125", "2026-11-27", "04:32:42.209"} <= {*words}
    assert {*ROW} <= {*words}
    assert words.count("27") == words.count("28") == 1
    assert STREAM[:16] in "".join(words)


def test_a_table_that_fits_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line of keys at the least width at which nothing is broken; below it one for each key."""
    rows = [{"id": 1, "predicted_s": 0.25, "cause": "d0 lost"}, {"id": 2, "cause": "d1 lost"}]

    (keys, _, first, second, *_) = shown({"all": rows}, 22, monkeypatch, capsys)[2:]
    narrow = shown({"all": rows}, 21, monkeypatch, capsys)[2:]
    piped = shown({"all": rows}, None, monkeypatch, capsys)[2:]

    assert keys.split() == ["id", "predicted_s", "cause"]
    assert first.split() == ["1", "0.25", "d0"]  # Folded.
    assert second.split() == ["lost"]
    assert [line.split() for line in narrow] == [
        ["id", "1"],
        ["predicted_s", "0.25"],
        ["cause", "d0", "lost"],
        [],
        ["id", "2"],
        ["cause", "d1", "lost"],
    ]
    assert [line.split() for line in piped[2:]] == [
        ["1", "0.25", "d0", "lost"],
        ["2", "d1", "lost"],
    ]
