"""The report of a run with faults beside the same run without: `report.json`, from which everything else is drawn."""

import json
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvrs.replay import metrics, oracle
from kvrs.replay.metrics import Slo
from kvrs.replay.oracle import StreamVerdict
from kvrs.replay.records import StreamRecord

SCHEMA_VERSION = 1
_TIME_DIGITS = 6  # Microseconds: below that a client's clock says nothing.
_RUN_MAX_S = 1e6  # A time beyond it was read from another clock.

Report = dict[str, Any]


def build_report(
    faulted: Sequence[StreamRecord],
    clean: Sequence[StreamRecord],
    recoveries: Sequence[Mapping[str, Any]],
    faults: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    slo: Slo | None = None,
) -> Report:
    """Compare a faulted run with its clean twin.

    Args:
        faulted: the records of the run with faults.
        clean: the records of the same requests without, matched by index.
        recoveries: as the proxy's state lists them: at_s, stream, attempt, option, from, to, cause, predicted_s, real_s,
            estimates, produced_tokens, gap_s. `at_s` counts from the start of the faulted run, as do the records' times.
        faults: what was really carried out: at_s, what, whom, pid, inflight.
        settings: what the run was made with; kept as it is.
        slo: what counts for goodput.
    """
    slo = slo or Slo()
    assert all(abs(row["at_s"]) < _RUN_MAX_S for row in (*recoveries, *faults)), "at_s must count from the start of the run"
    verdicts = oracle.judge(faulted, clean)
    difference = oracle.total(verdicts)
    by_stream = {record.stream: record for record in faulted if record.stream}
    rows = [_recovery_row(recovery, by_stream.get(recovery["stream"])) for recovery in recoveries]
    victims = [(by_stream[row["stream"]], float(row["at_s"])) for row in rows if row["stream"] in by_stream]
    fault_rows = [_fault_row(fault, rows, victims) for fault in faults]
    run = metrics.summary(faulted, slo)
    report = {
        "schema_version": SCHEMA_VERSION,
        "kvrs_version": version("kvrs"),
        "exact": False,
        "reasons": [],
        "streams": run["streams"],
        "completed": run["completed"],
        "errors": run["errors"],
        "tokens_lost": difference.lost,
        "tokens_repeated": difference.repeated,
        "tokens_different": difference.different,
        "text_different": sum(verdict.verified and not verdict.text_equal for verdict in verdicts),
        "finish_different": sum(verdict.verified and not verdict.finish_equal for verdict in verdicts),
        "unverified": sum(not verdict.verified for verdict in verdicts),
        "recoveries": dict(Counter(row["option"] for row in rows)),
        "gap_s": metrics.spread(_waits_s(rows)),
        "tfs_s": min((row["tfs_s"] for row in fault_rows if row["tfs_s"] is not None), default=None),
        "runs": {"fault": run, "clean": metrics.summary(clean, slo)},
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "faults": fault_rows,
        "recovery_rows": rows,
        "recovery_costs": _costs(rows),
        "settings": dict(settings),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "platform": platform.platform()},
        "per_stream": _stream_rows(faulted, clean, verdicts, rows),
    }
    report["reasons"] = _reasons(report)
    report["exact"] = not report["reasons"]
    return report


def write_report(report: Report, path: Path) -> None:
    """Readable by people, too: one line per stream and recovery, the rest indented."""
    parts = []
    for key, value in report.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n    ".join(_json(row) for row in value)
            parts.append(f"  {_json(key)}: [\n    {lines}\n  ]")
        else:
            parts.append(f"  {_json(key)}: " + json.dumps(value, indent=2, default=str).replace("\n", "\n  "))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _reasons(report: Report) -> list[str]:
    """Why the faulted run was not exact, in words; empty when it was."""
    counted = {
        "errors": "streams did not complete",
        "tokens_lost": "tokens lost",
        "tokens_repeated": "tokens repeated",
        "tokens_different": "tokens different",
        "text_different": "streams with different text",
        "finish_different": "streams with a different finish reason or usage",
        "unverified": "streams without a complete clean run to compare with",
    }
    reasons = [f"{report[key]} {words}" for key, words in counted.items() if report[key]]
    if not report["streams"]:
        reasons.append("no stream was run")
    return reasons


def _recovery_row(recovery: Mapping[str, Any], record: StreamRecord | None) -> dict[str, Any]:
    """The proxy's row with what the client saw of it: its longest wait from the recovery on."""
    pause = metrics.pause_after(record, recovery["at_s"]) if record else None
    return {
        **recovery,
        "index": record.index if record else None,
        "pause_from_s": _rounded(pause.from_s) if pause else None,
        "pause_to_s": _rounded(pause.to_s) if pause else None,
        "pause_s": _rounded(pause.length_s) if pause else None,
    }


def _waits_s(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Each wait once: a recovery that failed and was decided again is still one wait for the client."""
    waits = {(row["stream"], row["pause_from_s"]): row["pause_s"] for row in rows if row["pause_s"] is not None}
    return list(waits.values())


def _fault_row(
    fault: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], victims: Sequence[tuple[StreamRecord, float]]
) -> dict[str, Any]:
    """A fault with its TFS; its victims are the recoveries away from the instance it hit, from its moment on."""
    hit = {row["stream"] for row in rows if row["from"] == fault["whom"] and row["at_s"] >= fault["at_s"]}
    own = [(record, at_s) for record, at_s in victims if record.stream in hit and at_s >= fault["at_s"]]
    return {**fault, "recoveries": len(hit), "tfs_s": _rounded(metrics.fault_to_first_token_s(own, fault["at_s"]))}


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Predicted beside real cost of every recovery that has both."""
    keys = ("stream", "attempt", "option", "predicted_s", "real_s")
    return [
        {key: row.get(key) for key in keys}
        for row in rows
        if row.get("predicted_s") is not None and row.get("real_s") is not None
    ]


def _stream_rows(
    faulted: Sequence[StreamRecord],
    clean: Sequence[StreamRecord],
    verdicts: Sequence[StreamVerdict],
    recoveries: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    options: dict[str, list[str]] = defaultdict(list)
    for recovery in recoveries:
        options[recovery["stream"]].append(recovery["option"])
    twins = {record.index: record for record in clean}
    return [
        {
            "index": record.index,
            "stream": record.stream,
            "due_s": _rounded(record.due_s),
            "sent_s": _rounded(record.sent_s),
            "ended_s": _rounded(record.ended_s),
            "prompt_tokens": record.prompt_tokens,
            "tokens": len(record.token_ids),
            "finish_reason": record.finish_reason,
            "status": record.status,
            "error": f"{record.error.kind}: {record.error.message}" if record.error else None,
            "lost": verdict.tokens.lost,
            "repeated": verdict.tokens.repeated,
            "different": verdict.tokens.different,
            "exact": verdict.exact and record.completed,
            "recoveries": options[record.stream],
            **_felt("", record),
            **_felt("clean_", twins.get(record.index)),
            "token_times_s": [_rounded(at_s) for at_s in record.token_times_s],
        }
        for record, verdict in zip(faulted, verdicts, strict=True)
    ]


def _felt(prefix: str, record: StreamRecord | None) -> dict[str, float | None]:
    measures = {"ttft_s": metrics.ttft_s, "tpot_s": metrics.tpot_s, "max_gap_s": metrics.max_gap_s}
    return {f"{prefix}{name}": _rounded(measure(record)) if record else None for name, measure in measures.items()}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _TIME_DIGITS)
