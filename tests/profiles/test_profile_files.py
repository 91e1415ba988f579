"""Profiles in files of the user's own."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.profiles.tables import DecodeGrid

GOOD: dict[str, Any] = {
    "label": "mine",
    "model": "m",
    "dtype": "fp32",
    "gpu": None,
    "cpu": "some",
    "tp": 1,
    "engine": "kvrs",
    "version": "1",
    "kind": "measured",
    "source": "a test",
    "geometry": {
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "dtype_bytes": 4,
        "page_size_tokens": 16,
    },
    "prefill": {
        "type": "grid",
        "new_step_tokens": 64,
        "cached_step_tokens": 128,
        "rows": [[0.01, 0.02], [0.01, 0.03]],
    },
    "decode": {
        "type": "grid",
        "batches": [1, 4],
        "contexts": [100, 200],
        "rows": [[0.01, 0.02], [0.02, 0.04]],
    },
}

FIT = {"type": "fit", "large_from_batch": 64, "small_ms": [1, 0, 0.1], "large_ms": [-5, 0, 0.1]}


def write(path: Path, **changes: Any) -> str:
    path.write_bytes(msgspec.json.encode(GOOD | changes))
    return str(path)


def test_a_path_names_a_table_as_a_name_does(tmp_path: Path) -> None:
    """`profiles.prefill` takes what `kvrs profile` wrote."""
    name = write(tmp_path / "mine.json")

    table = catalog.prefill_table(name)

    assert (table.label, table.extra(128, 64), table.seconds_for(64)) == ("mine", 0.03, 0.02)
    assert catalog.kv_geometry(name).bytes_per_token == 2048


def test_a_decode_grid_answers_between_its_points(tmp_path: Path) -> None:
    """Batch by context: the mean context of the batch counts."""
    table = catalog.decode_table(write(tmp_path / "mine.json"))

    assert isinstance(table, DecodeGrid)
    assert table.seconds_for(1, 100) == 0.01
    assert table.seconds_for(4, 800) == 0.04
    assert table.seconds_for(2, 300) == pytest.approx(0.015 + (0.03 - 0.015) / 3)
    assert table.seconds_for(8, 1600) == pytest.approx(0.04 + (0.04 - 0.02) / 3 * 4)


def test_a_fit_may_begin_below_zero_where_it_is_not_asked(tmp_path: Path) -> None:
    """Large batches have a fit of their own."""
    table = catalog.decode_table(write(tmp_path / "mine.json", decode=FIT))

    assert table.seconds_for(64, 64) == pytest.approx(0.0014)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "guessed"}, "$.kind"),
        ({"tp": 0}, "$.tp"),
        ({"surprise": 1}, "surprise"),
        (
            {"prefill": {"type": "points", "seconds": {"512": 0.1}}},
            "$.prefill.seconds: got 1 points; allowed: at least 2",
        ),
        (
            {"prefill": {"type": "points", "seconds": {"512": 0.1, "1024": -0.1}}},
            "$.prefill.seconds[...]",
        ),
        (
            {"prefill": {"type": "points", "seconds": {"1": 0.1, "16777213": 0.2}}},
            "allowed: at most 131072",
        ),
        (
            {"prefill": {"type": "quadratic", "coefficients_ms": [1, 1, -1], "max_tokens": 10}},
            "$.prefill.coefficients_ms",
        ),
        ({"prefill": GOOD["prefill"] | {"rows": [[0.1, 0.2]]}}, "$.prefill.rows: got 1 rows of 2"),
        (
            {"prefill": GOOD["prefill"] | {"rows": [[0.1, 0.2], [0.1]]}},
            "$.prefill.rows[1]: got 1 numbers; allowed: 2",
        ),
        ({"decode": GOOD["decode"] | {"batches": [4, 1]}}, "$.decode.batches"),
        (
            {"decode": FIT | {"small_ms": [1, 0.1, -0.2]}},
            "$.decode.small_ms: got (1.0, 0.1, -0.2); allowed: a time that is not negative",
        ),
        ({"decode": FIT | {"large_ms": [-9, 0, 0.1]}}, "$.decode.large_ms: got (-9.0, 0.0, 0.1)"),
        (
            {"decode": GOOD["decode"] | {"rows": [[0.1, 0.2]]}},
            "$.decode.rows: got 1 rows; allowed: 2",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_place_and_reason(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """A user's error names the file, the field, and what is wrong with it."""
    name = write(tmp_path / "wrong.json", **changes)

    with pytest.raises(ConfigError) as refused:
        catalog.prefill_table(name)

    assert name in str(refused.value)
    assert said in str(refused.value)


def test_all_faults_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    """One line each."""
    name = write(
        tmp_path / "wrong.json",
        prefill=GOOD["prefill"] | {"rows": [[0.1]]},
        decode=GOOD["decode"] | {"contexts": [1]},
    )

    with pytest.raises(ConfigError) as refused:
        catalog.profile(name)

    assert len(refused.value.faults) >= 3


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"label": 1e999}'])
def test_what_is_no_profile_at_all_is_refused(tmp_path: Path, text: bytes) -> None:
    """Any bytes may be in a file."""
    path = tmp_path / "noise.json"
    path.write_bytes(text)

    with pytest.raises(ConfigError, match=r"noise\.json: not a profile"):
        catalog.profile(str(path))


@pytest.mark.parametrize("name", ["missing/file.json", "/", "a\0b/c"])
def test_a_path_that_cannot_be_read_is_refused(name: str) -> None:
    """Missing, a folder, or no path at all."""
    with pytest.raises(ConfigError, match="allowed: a profile file, or "):
        catalog.profile(name)
