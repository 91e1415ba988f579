"""The report of a run, usually compared with the same run without faults: `report.json`, the source
of table and page.
"""

import json
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvrs import __version__
from kvrs.config.policy import PolicyName
from kvrs.core.model.estimates import real_over_predicted
from kvrs_lab.report import impact, metrics, oracle
from kvrs_lab.report.measures import measures_of
from kvrs_lab.report.metrics import Slo
from kvrs_lab.report.oracle import Difference, StreamVerdict
from kvrs_lab.report.reasons import reason_lines
from kvrs_lab.traces.records import StreamRecord

SCHEMA_VERSION = 5
_TIME_DIGITS = 6  # Microseconds: the resolution of a client's clock.
_RUN_MAX_S = 1e6  # A later time is of another clock.
_BINS = 200
_SHORTEST_BIN_S = 0.25
# A larger file is hard to open; the throughput counts all tokens.
_KEPT_TOKEN_TIMES = 200_000

Report = dict[str, Any]


def build_report(
    faulted: Sequence[StreamRecord],
    clean: Sequence[StreamRecord] | None,
    recoveries: Sequence[Mapping[str, Any]],
    faults: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    slo: Slo | None = None,
    never_due: Sequence[str] = (),
    proxy: Mapping[str, Any] | None = None,
    cpu_pressures: Iterable[float | None] = (),
    losses: Sequence[Mapping[str, Any]] = (),
) -> Report:
    """Describe a run, and compare it with the clean run of the same requests.

    Args:
        faulted: the records of the run.
        clean: the same requests without faults, matched by index; None: no comparison.
        recoveries: rows of the proxy's state: at_s, stream, attempt, option, from, to, cause,
            predicted_s, low_s, high_s, real_s, estimates, produced_tokens, gap_s. `at_s` counts
            from the start of the faulted run, as do the records' times.
        faults: faults that were carried out: at_s, what, whom, instances, pid, inflight.
        settings: settings of the run, kept unchanged.
        slo: the limits for goodput.
        never_due: labels of the faults that were not carried out.
        proxy: the proxy's row in its state (version, policy, config_digest), where known.
        cpu_pressures: share of each run in which a process of this machine waited for a CPU.
        losses: losses of instances and agents that the proxy noticed, oldest first: at_s, instance.
    """
    slo = slo or Slo()
    assert all(abs(row["at_s"]) < _RUN_MAX_S for row in (*recoveries, *faults)), (
        "at_s must count from the start of the run"
    )
    verdicts = None if clean is None else oracle.judge(faulted, clean)
    by_stream = {record.stream: record for record in faulted if record.stream}
    rows = [*map(_recovery_row, recoveries, _undecided_s(recoveries), repeat(by_stream))]
    fault_rows = _fault_rows(faults, rows, losses, by_stream)
    run = metrics.summary(faulted, slo)
    report = {
        **_origin(proxy or {}, cpu_pressures),
        "exact": None,
        "compared": _compared(faulted, clean),
        "reasons": [],
        **{key: run[key] for key in ("streams", "completed", "errors")},
        **_differences(verdicts or []),
        "recoveries": dict(Counter(row["option"] for row in rows)),
        "gap_s": metrics.spread(_pauses_s(rows)),
        "undecided_s": metrics.spread(row["undecided_s"] for row in rows),
        "tfs_s": min(
            (row["tfs_s"] for row in fault_rows if row["tfs_s"] is not None), default=None
        ),
        "ttp_s": None,
        "runs": {"fault": run, "clean": None if clean is None else metrics.summary(clean, slo)},
        "groups": _groups(faulted, rows),
        "impact": _impact(faulted, clean, rows, fault_rows),
        "throughput": _throughput(faulted, clean),
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "faults": fault_rows,
        "faults_never_due": list(never_due),
        "recovery_rows": rows,
        "recovery_options": _options(rows),
        "choices": _choices(proxy, rows, faults, faulted),
        "settings": dict(settings),
        "measures": {},
        "per_stream": _stream_rows(faulted, clean, verdicts, rows),
    }
    report["ttp_s"] = _ttp_s(report)
    report["reasons"] = _reasons(report)
    report["exact"] = None if clean is None else not report["reasons"]
    report["measures"] = measures_of(report)
    return report


def _origin(proxy: Mapping[str, Any], cpu_pressures: Iterable[float | None]) -> dict[str, Any]:
    """The origin of the run: time, machine, versions, policy and configuration."""
    system = os.uname()
    return {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "policy": proxy.get("policy"),
        "config_digest": proxy.get("config_digest"),
        "kvrs_version": __version__,
        "proxy_version": proxy.get("version"),
        "machine": {
            "cpus": os.cpu_count(),
            "cpu_pressure": max((each for each in cpu_pressures if each is not None), default=None),
            "python": platform.python_version(),
            "torch": _installed("torch"),
            # platform.platform() has the same facts, but starts a process.
            "platform": f"{system.sysname}-{system.release}-{system.machine}",
        },
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _differences(verdicts: Sequence[StreamVerdict]) -> dict[str, int]:
    difference = oracle.total(verdicts)
    verified = [verdict for verdict in verdicts if verdict.verified]
    return {
        "tokens_lost": difference.lost,
        "tokens_repeated": difference.repeated,
        "tokens_different": difference.different,
        "text_different": sum(not verdict.text_equal for verdict in verified),
        "finish_different": sum(not verdict.finish_equal for verdict in verified),
        "unverified": len(verdicts) - len(verified),
    }


def write_report(report: Report, path: Path) -> None:
    """Write JSON with one line per stream and recovery, the rest indented."""
    parts = []
    for key, value in report.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n    ".join(_json(row) for row in value)
            parts.append(f"  {_json(key)}: [\n    {lines}\n  ]")
        else:
            parts.append(
                f"  {_json(key)}: " + json.dumps(value, indent=2, default=str).replace("\n", "\n  ")
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _compared(faulted: Sequence[StreamRecord], clean: Sequence[StreamRecord] | None) -> str:
    """The comparable data: tokens if the endpoint returns token ids, else text."""
    if clean is None:
        return "nothing"
    seen = [record for record in (*faulted, *clean) if record.token_times_s]
    return "tokens" if all(record.token_ids for record in seen) else "text"


def _reasons(report: Report) -> list[str]:
    """Reasons why the run was not exact or not complete; empty: exact."""
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


def _recovery_row(
    recovery: Mapping[str, Any],
    undecided_s: float | None,
    by_stream: Mapping[str, StreamRecord],
) -> dict[str, Any]:
    """The proxy's row with the wait before its decision, and two measures of the client: the
    recovery's pause and the replay TTFT.
    """
    record = by_stream.get(recovery["stream"])
    pause = (
        metrics.pause_of(record, recovery["at_s"], recovery["produced_tokens"]) if record else None
    )
    return {
        **recovery,
        "undecided_s": undecided_s,
        "real_over_predicted": _ratio(recovery.get("predicted_s"), recovery.get("real_s")),
        "index": record.index if record else None,
        "pause_from_s": _rounded(pause.from_s) if pause else None,
        "pause_to_s": _rounded(pause.to_s) if pause else None,
        "pause_s": _rounded(pause.length_s) if pause else None,
        "replay_ttft_s": _rounded(metrics.replay_ttft_s(record, recovery["at_s"]))
        if record
        else None,
    }


def _ratio(predicted_s: float | None, real_s: float | None) -> float | None:
    if predicted_s is None or real_s is None or not isfinite(predicted_s):
        return None
    return real_over_predicted(predicted_s, real_s)


def _undecided_s(recoveries: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """For each recovery, how long the client had waited when it was decided: from its last token
    until the failure was known. None: no token before or after, or it replaced a recovery that had
    brought none.
    """
    found: list[float | None] = []
    decided: set[tuple[str, int]] = set()
    for row in recoveries:
        key = row["stream"], row["produced_tokens"]
        gap_s, real_s = row.get("gap_s"), row.get("real_s")
        if gap_s is None or real_s is None or key in decided:
            found.append(None)
        else:
            found.append(_rounded(max(0.0, gap_s - real_s)))
        decided.add(key)
    return found


def _pauses_s(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The pauses of clients. A recovery that failed and was decided again is one pause."""
    pauses_s = {
        (row["stream"], row["pause_to_s"]): row["pause_s"]
        for row in reversed(rows)
        if row["pause_s"] is not None
    }
    return list(pauses_s.values())


def _fault_rows(
    faults: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    losses: Sequence[Mapping[str, Any]],
    by_stream: Mapping[str, StreamRecord],
) -> list[dict[str, Any]]:
    """Faults with their TFS, and the time until the deaths of their victims were noticed."""
    victims: list[list[Mapping[str, Any]]] = [[] for _ in faults]
    noticed_s: list[dict[str, float]] = [{} for _ in faults]
    for row in rows:
        for at in _blamed(faults, row["from"], row["at_s"]):
            victims[at].append(row)
    for loss in losses:
        for at in _blamed(faults, loss["instance"], loss["at_s"]):
            noticed_s[at].setdefault(loss["instance"], loss["at_s"])
    return [_fault_row(*each, by_stream) for each in zip(faults, victims, noticed_s, strict=True)]


def _blamed(
    faults: Sequence[Mapping[str, Any]], instance: str | None, at_s: float
) -> Iterator[int]:
    """Yield the positions of the last earlier fault of an instance, or of all such faults of that
    moment.
    """
    blamed = [
        at
        for at, fault in enumerate(faults)
        if fault["at_s"] <= at_s and instance in fault.get("instances", [fault["whom"]])
    ]
    last_s = max((faults[at]["at_s"] for at in blamed), default=None)
    return (at for at in blamed if faults[at]["at_s"] == last_s)


def _choices(
    proxy: Mapping[str, Any] | None,
    rows: Sequence[Mapping[str, Any]],
    faults: Sequence[Mapping[str, Any]],
    records: Sequence[StreamRecord],
) -> list[str]:
    """Sentences on the choice of options; none where another policy than `auto` chose them."""
    if (proxy or {}).get("policy") != PolicyName.AUTO:
        return []
    blamed = [max(_blamed(faults, row["from"], row["at_s"]), default=None) for row in rows]
    prompt_tokens = {record.index: record.prompt_tokens for record in records}
    return reason_lines(rows, blamed, faults, prompt_tokens)


def _fault_row(
    fault: Mapping[str, Any],
    victims: Sequence[Mapping[str, Any]],
    noticed_s: Mapping[str, float],
    by_stream: Mapping[str, StreamRecord],
) -> dict[str, Any]:
    own = [
        (by_stream[row["stream"]], float(row["at_s"]))
        for row in victims
        if row["stream"] in by_stream
    ]
    last_s = max(noticed_s.values(), default=None)
    return {
        **fault,
        "recoveries": len({row["stream"] for row in victims}),
        "tfs_s": _rounded(metrics.fault_to_first_token_s(own, fault["at_s"])),
        # Until the last of its victims was noticed; None: no death, or unknown.
        "notice_s": None if last_s is None else _rounded(last_s - fault["at_s"]),
    }


def _replay_ttft_s(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Replay TTFT by request; the last recovery counts."""
    return {
        row["index"]: row["replay_ttft_s"]
        for row in rows
        if row["index"] is not None and row["replay_ttft_s"] is not None
    }


def _groups(records: Sequence[StreamRecord], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Measures of interrupted and uninterrupted requests, separately: common means would hide the
    few interrupted requests.
    """
    hit = {row["index"] for row in rows}
    replayed = _replay_ttft_s(rows)
    groups = {
        "interrupted": [r for r in records if r.index in hit],
        "uninterrupted": [r for r in records if r.index not in hit],
    }
    return {
        name: {
            "streams": len(group),
            "arrival_ttft_s": metrics.spread(map(metrics.arrival_ttft_s, group)),
            "replay_ttft_s": metrics.spread(replayed.get(record.index) for record in group),
            "tpot_s": metrics.spread(map(metrics.tpot_s, group)),
            "max_gap_s": metrics.spread(map(metrics.max_gap_s, group)),
        }
        for name, group in groups.items()
    }


def _impact(
    faulted: Sequence[StreamRecord],
    clean: Sequence[StreamRecord] | None,
    rows: Sequence[Mapping[str, Any]],
    faults: Sequence[Mapping[str, Any]],
) -> dict[str, Any] | None:
    """The failure-impact window; None without a fault, or without a clean run."""
    if clean is None or not faults or not faulted:
        return None
    found = impact.impact_window(
        faulted, clean, _replay_ttft_s(rows), min(fault["at_s"] for fault in faults)
    )
    first, end = found.first_bucket, found.end_bucket
    return {
        "bucket_requests": found.bucket_requests,
        "recovery_time_s": _rounded(found.recovery_time_s),
        "from_s": None if first is None else _rounded(found.from_s),
        "to_s": None if first is None else _rounded(found.from_s + found.recovery_time_s),
        "closed": first is None or end is not None,
        "buckets": [
            {
                "first": bucket.first,
                "from_s": _rounded(bucket.from_s),
                "ttft_s": _rounded(bucket.ttft_s),
                "clean_ttft_s": _rounded(bucket.clean_ttft_s),
                "tpot_s": _rounded(bucket.tpot_s),
                "clean_tpot_s": _rounded(bucket.clean_tpot_s),
                "in_window": first is not None
                and first <= number < (len(found.buckets) if end is None else end),
            }
            for number, bucket in enumerate(found.buckets)
        ],
    }


def _throughput(
    faulted: Sequence[StreamRecord], clean: Sequence[StreamRecord] | None
) -> dict[str, Any]:
    ends_s = max((record.ended_s for record in (*faulted, *(clean or ()))), default=0.0)
    bin_s = max(_SHORTEST_BIN_S, round(ends_s / _BINS, 2))
    return {
        "bin_s": bin_s,
        "tokens_per_s": impact.throughput(faulted, bin_s),
        "clean_tokens_per_s": None if clean is None else impact.throughput(clean, bin_s),
    }


def _ttp_s(report: Report) -> float | None:
    """TTP after the last fault, since the cluster may not reach its peak between faults."""
    done = [fault for fault in report["faults"] if fault["tfs_s"] is not None]
    if not done:
        return None
    last = max(done, key=lambda fault: fault["at_s"])
    rates = report["throughput"]
    return _rounded(
        impact.time_to_peak_s(rates["tokens_per_s"], rates["bin_s"], last["at_s"] + last["tfs_s"])
    )


def _options(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each option: count, mean predicted and real cost, and how far predictions are off."""
    by_option: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["real_over_predicted"] is not None:
            by_option[row["option"]].append(row)
    return {option: _costs(by_option[option]) for option in sorted(by_option)}


def _costs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [row["real_over_predicted"] for row in rows]
    off = [max(ratio, 1 / ratio) for ratio in ratios]
    known = [row for row in rows if row.get("low_s") is not None and row.get("high_s") is not None]
    return {
        "count": len(rows),
        "predicted_s": fmean(row["predicted_s"] for row in rows),
        "real_s": fmean(row["real_s"] for row in rows),
        # By this factor the longer of predicted and real cost is longer.
        "off": {"p50": metrics.percentile(off, 50), "p95": metrics.percentile(off, 95)},
        "real_over_predicted": median(ratios),
        "longer": sum(ratio > 1 for ratio in ratios),
        "shorter": sum(ratio < 1 for ratio in ratios),
        "intervals": len(known),  # Recoveries whose predictions had an interval.
        "inside": sum(row["low_s"] <= row["real_s"] <= row["high_s"] for row in known),
    }


def _stream_rows(
    faulted: Sequence[StreamRecord],
    clean: Sequence[StreamRecord] | None,
    verdicts: Sequence[StreamVerdict] | None,
    recoveries: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    options: dict[str, list[str]] = defaultdict(list)
    for recovery in recoveries:
        options[recovery["stream"]].append(recovery["option"])
    twins = {record.index: record for record in clean or ()}
    judged = {verdict.index: verdict for verdict in verdicts or ()}
    small = sum(len(record.token_times_s) for record in faulted) <= _KEPT_TOKEN_TIMES
    return [
        {
            "index": record.index,
            "stream": record.stream,
            "due_s": _rounded(record.due_s),
            "sent_s": _rounded(record.sent_s),
            "ended_s": _rounded(record.ended_s),
            "prompt_tokens": record.prompt_tokens,
            "tokens": record.tokens,
            "finish_reason": record.finish_reason,
            "status": record.status,
            "error": _error(record),
            "clean_error": _error(twins.get(record.index)),
            **_judged(record, judged.get(record.index)),
            "recoveries": options[record.stream],
            **_felt("", record),
            **_felt("clean_", twins.get(record.index)),
            "token_times_s": [_rounded(at_s) for at_s in record.token_times_s] if small else [],
        }
        for record in faulted
    ]


def _error(record: StreamRecord | None) -> str | None:
    return (
        None
        if record is None or record.error is None
        else f"{record.error.kind}: {record.error.message}"
    )


def _judged(record: StreamRecord, verdict: StreamVerdict | None) -> dict[str, Any]:
    difference = verdict.tokens if verdict else Difference()
    counts = {
        "lost": difference.lost,
        "repeated": difference.repeated,
        "different": difference.different,
    }
    return {**counts, "exact": verdict.exact and record.completed if verdict else None}


def _felt(prefix: str, record: StreamRecord | None) -> dict[str, float | None]:
    measures = {
        "ttft_s": metrics.ttft_s,
        "arrival_ttft_s": metrics.arrival_ttft_s,
        "tpot_s": metrics.tpot_s,
        "max_gap_s": metrics.max_gap_s,
    }
    return {
        f"{prefix}{name}": _rounded(measure(record)) if record else None
        for name, measure in measures.items()
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _TIME_DIGITS)
