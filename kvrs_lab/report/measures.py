"""The measures of a comparison, as a flat list per run, and the loader of reports."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvrs.errors import KvrsError

# Name, title, path in a report, and whether a higher value is better.
MEASURES: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("goodput_per_s", "goodput", ("runs", "fault", "goodput_per_s"), True),
    ("tokens_per_s", "tokens per second", ("runs", "fault", "tokens_per_s"), True),
    ("ttft_mean_s", "TTFT mean", ("runs", "fault", "arrival_ttft_s", "mean"), False),
    ("ttft_p50_s", "TTFT p50", ("runs", "fault", "arrival_ttft_s", "p50"), False),
    ("ttft_p99_s", "TTFT p99", ("runs", "fault", "arrival_ttft_s", "p99"), False),
    ("tpot_mean_s", "TPOT mean", ("runs", "fault", "tpot_s", "mean"), False),
    ("tpot_p99_s", "TPOT p99", ("runs", "fault", "tpot_s", "p99"), False),
    ("tbt_p99_s", "TBT p99", ("runs", "fault", "tbt_s", "p99"), False),
    ("max_tbt_p50_s", "maximum TBT p50", ("runs", "fault", "max_gap_s", "p50"), False),
    ("max_tbt_p99_s", "maximum TBT p99", ("runs", "fault", "max_gap_s", "p99"), False),
    ("gap_p50_s", "pause p50", ("gap_s", "p50"), False),
    ("gap_p99_s", "pause p99", ("gap_s", "p99"), False),
    ("tfs_s", "TFS", ("tfs_s",), False),
    ("ttp_s", "TTP", ("ttp_s",), False),
    (
        "recovery_time_s",
        "recovery time (failure-impact window)",
        ("impact", "recovery_time_s"),
        False,
    ),
    (
        "replay_ttft_mean_s",
        "replay TTFT, interrupted, mean",
        ("groups", "interrupted", "replay_ttft_s", "mean"),
        False,
    ),
    (
        "interrupted_tpot_mean_s",
        "TPOT, interrupted, mean",
        ("groups", "interrupted", "tpot_s", "mean"),
        False,
    ),
    (
        "uninterrupted_ttft_mean_s",
        "TTFT, uninterrupted, mean",
        ("groups", "uninterrupted", "arrival_ttft_s", "mean"),
        False,
    ),
    (
        "uninterrupted_tpot_mean_s",
        "TPOT, uninterrupted, mean",
        ("groups", "uninterrupted", "tpot_s", "mean"),
        False,
    ),
    (
        "clean_ttft_mean_s",
        "TTFT mean, without the fault",
        ("runs", "clean", "arrival_ttft_s", "mean"),
        False,
    ),
    (
        "clean_tpot_mean_s",
        "TPOT mean, without the fault",
        ("runs", "clean", "tpot_s", "mean"),
        False,
    ),
    ("lag_p99_s", "send lag p99", ("runs", "fault", "lag_s", "p99"), False),
)
Report = dict[str, Any]


# The fields of a comparison, whose shape is checked: a file may be of any origin.
_Measures = msgspec.defstruct("_Measures", [(name, float | None) for name, *_ in MEASURES])


class _Compared(msgspec.Struct):
    exact: bool | None
    streams: int
    completed: int
    recoveries: dict[str, int]
    settings: dict[str, Any]
    measures: _Measures  # type: ignore[valid-type]  # Its fields are MEASURES.


class ReportError(KvrsError):
    """A file is not a report of kvrs. The message names file and reason."""


def measures_of(report: Mapping[str, Any]) -> dict[str, float | None]:
    """Every measure of a run; None: meaningless, such as TFS without a fault."""
    return {name: _at(report, path) for name, _, path, _ in MEASURES}


def _at(report: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = report
    for key in path:
        value = None if value is None else value.get(key)
    return None if value is None else float(value)


def load_report(path: Path, schema_version: int) -> Report:
    """Read a `report.json`, or the one in a directory.

    Raises:
        ReportError: no report, or a report of another version.
    """
    file = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_bytes())
    except OSError as error:
        raise ReportError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{file}: not JSON: {error}") from None
    found = report.get("schema_version") if isinstance(report, dict) else None
    if found != schema_version:
        raise ReportError(f"{file}: schema_version {found!r}; allowed: {schema_version}")
    try:
        msgspec.convert(report, _Compared)
    except msgspec.ValidationError as error:
        raise ReportError(
            f"{file}: {error}; it was not written by `kvrs lab replay` or `kvrs lab demo`"
        ) from None
    return dict(report)
