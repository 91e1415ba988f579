"""The report as a table in the terminal."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrs.tables import folded
from kvrs_lab.report.metrics import LATE_S
from kvrs_lab.report.pace import pace_sentence
from kvrs_lab.report.report import Report

_SHARE_OFF = 0.01  # A larger deviation of the client's rate is reported.
_BUSY_SHARE = 0.9  # A higher CPU pressure is reported.


def terminal_table(report: Report) -> RenderableType:
    """Verdict and origin, then a row per quantity with and without the fault. Data is text, never
    markup.
    """
    faults = (*error_lines(report), *never_due_lines(report))
    return Group(
        _verdict(report),
        Text(origin_sentence(report), style="dim"),
        *(Text(line, style="red") for line in faults),
        *(Text(line) for line in note_lines(report)),
        quantities(report),
        *(Text(line) for line in report.get("choices", ())),
    )


def origin_sentence(report: Report) -> str:
    """Known policy, date and versions of the run."""
    machine, proxy = report["machine"], report["proxy_version"]
    parts = {
        "policy": report["policy"],
        "kvrs": report["kvrs_version"],
        "proxy": None if proxy == report["kvrs_version"] else proxy,
        "Python": machine["python"],
        "torch": machine["torch"],
        "config": report["config_digest"],
    }
    known = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    return f"{report['date']}: {known}"


def run_names(report: Report) -> tuple[str, str]:
    """Names of the run and of the clean run, which is a repetition if there is no fault."""
    return ("with the fault", "without") if report["faults"] else ("measured", "again")


def verdict_sentence(report: Report) -> str:
    if report["exact"]:
        what = (
            "token"
            if report["compared"] == "tokens"
            else "character of text (the endpoint does not return token ids)"
        )
        return (
            f"Exact: {report['completed']} of {report['streams']} streams got every {what} "
            f"exactly once."
        )
    if report["exact"] is None:
        whole = (
            "; ".join(report["reasons"])
            or f"{report['completed']} of {report['streams']} streams completed"
        )
        return f"{'Not whole' if report['reasons'] else 'Whole'}: {whole}. Nothing was compared."
    return f"Not exact: {'; '.join(report['reasons'])}."


def note_lines(report: Report) -> list[str]:
    """Sentences on figures that are less reliable than they look, or do not seem to agree."""
    warm = None
    if (
        report["exact"] is not None
        and report["settings"].get("caches_at_the_start") == "as they were found"
    ):
        warm = (
            "The second run found the prefix caches as the first had left them, so that its TTFT "
            "and goodput differ by more than the faults; with the cluster's secret both begin with "
            "empty ones."
        )
    kept = pace_sentence(report["machine"])
    lines = (kept, busy_sentence(report), late_sentence(report), warm, spared_sentence(report))
    return [line for line in lines if line]


def busy_sentence(report: Report) -> str | None:
    """A sentence on a machine whose CPUs were too few for its processes."""
    pressure = report["machine"]["cpu_pressure"]
    if pressure is None or pressure < _BUSY_SHARE:
        return None
    return (
        f"This machine was busy: processes waited for a CPU in {pressure:.0%} of the time, so the "
        f"times below may be the machine's. Exactness does not depend on them."
    )


def late_sentence(report: Report) -> str | None:
    """A sentence on a client that did not keep to the trace, which distorts its numbers."""
    run = report["runs"]["fault"]
    asked, offered = run["asked_per_s"], run["offered_per_s"]
    off = asked is not None and abs(offered / asked - 1) > _SHARE_OFF
    if not run["late"]:
        return (
            f"The client of this measurement sent {offered:.2f} of {asked:.2f} requests/s."
            if off
            else None
        )
    rates = f", {offered:.2f} of {asked:.2f} requests/s" if asked is not None and off else ""
    return (
        f"The client of this measurement sent {run['late']} of {run['streams']} requests more than "
        f"{LATE_S * 1000:.0f} ms late (at most {milliseconds(run['lag_s']['max'])}{rates}), which "
        f"is no delay of kvrs; TTFT contains it."
    )


def spared_sentence(report: Report) -> str | None:
    """A sentence on streams of the victims that needed no recovery."""
    bound, interrupted = sum(bound_streams(report)), interrupted_streams(report)
    if interrupted >= bound:
        return None
    return (
        f"{bound} streams were bound to a victim, and {interrupted} needed a recovery: a stream "
        f"that the victim did not work on yet, or no longer worked on, needs none."
    )


def errors_by_kind(report: Report) -> list[tuple[str, int, int, str]]:
    """For each kind of error: name, count of streams, index and message of the first."""
    found: dict[str, tuple[int, int, str]] = {}
    for key, run in (("error", ""), ("clean_error", "in the clean run, ")):
        for stream in report["per_stream"]:
            if stream[key] is not None:
                kind, _, message = stream[key].partition(": ")
                count, first, text = found.get(run + kind, (0, stream["index"], message))
                found[run + kind] = (count + 1, first, text)
    return [(kind, *rest) for kind, rest in found.items()]


def error_lines(report: Report) -> list[str]:
    return [
        f"{kind}: {count} streams, first number {index}: {message}"
        for kind, count, index, message in errors_by_kind(report)
    ]


def never_due_lines(report: Report) -> list[str]:
    """Warnings of faults that were never due and of partial runs, which look too good."""
    lines = [f"A fault never came due: {label}" for label in report["faults_never_due"]]
    part = report["settings"].get("interrupted")
    return [f"Interrupted: {part}", *lines] if part else lines


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1 else f"{seconds:,.2f} s"


def interval_words(row: Mapping[str, Any]) -> str:
    """Return the predicted interval of a recovery; without one, the predicted cost."""
    if row.get("low_s") is None or row.get("high_s") is None:
        return milliseconds(row.get("predicted_s"))
    return _both(row["low_s"], row["high_s"], " - ")


def recoveries_by_option(report: Report) -> str:
    return (
        ", ".join(f"{count} {option}" for option, count in sorted(report["recoveries"].items()))
        or "none"
    )


def bound_streams(report: Report) -> tuple[int, int]:
    """Count the streams that were bound to the victims of all faults: those that were decoding, and
    those without a token of their present attempt.
    """
    phases: Counter[str] = Counter()
    for fault in report["faults"]:
        phases.update(fault["phases"])
    decoding = phases["decode"] + phases["near_end"]
    return decoding, phases.total() - decoding


def interrupted_streams(report: Report) -> int:
    return sum(fault["recoveries"] for fault in report["faults"])


def window_words(report: Report) -> str:
    impact = report["impact"]
    if impact is None:
        return "-"
    if impact["from_s"] is None:
        return "not felt"
    to = f"{impact['to_s']:.2f} s" if impact["closed"] else "end"
    return f"{impact['recovery_time_s']:.2f} s, {impact['from_s']:.2f} s to {to}"


def _verdict(report: Report) -> Text:
    good = not report["reasons"]
    return Text(verdict_sentence(report), style="bold green" if good else "bold red")


def quantities(report: Report) -> Table:
    """A row per quantity, with and without the fault."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    fault, clean, slo = report["runs"]["fault"], report["runs"]["clean"], report["slo"]
    table.add_column("", no_wrap=True)
    measured, again = run_names(report)
    table.add_column(measured, justify="right")
    if clean is not None:
        table.add_column(again, justify="right")

    def row(title: str, measured: str | Text, again: str = "-") -> None:
        table.add_row(title, measured, *([] if clean is None else [again]))

    for key in ("streams", "completed", "errors", "tokens"):
        row(key, str(fault[key]), "" if clean is None else str(clean[key]))
    if clean is not None:
        lost = (report["tokens_lost"], report["tokens_repeated"], report["tokens_different"])
        row("tokens lost / repeated / different", " / ".join(map(str, lost)), "reference")
    if report["faults"]:
        _add_fault_rows(report, row)
    names = (
        ("first token (TTFT)", "arrival_ttft_s"),
        ("per token (TPOT)", "tpot_s"),
        ("between tokens (TBT)", "tbt_s"),
        ("  longest of a stream", "max_gap_s"),
        ("requests sent late by", "lag_s"),
    )
    for name, key in names:
        row(f"{name} p50 / p99", _pair(fault[key]), "" if clean is None else _pair(clean[key]))
    row(
        f"goodput (TTFT {slo['ttft_s']:g} s, TPOT {slo['tpot_s']:g} s)",
        _goodput(fault),
        "" if clean is None else _goodput(clean),
    )
    row(
        "requests/s sent / planned",
        _rates_words(fault),
        "" if clean is None else _rates_words(clean),
    )
    for option, costs in report["recovery_options"].items():
        words = _both(costs["predicted_s"], costs["real_s"])
        row(f"{option}: predicted / real cost", Text(words))
        off, ratio = costs["off"], costs["real_over_predicted"]
        row("  off by p50 / p95", f"x{off['p50']:.3g} / x{off['p95']:.3g}")
        sign = f"{costs['longer']} / {costs['shorter']} (x{ratio:.3g})"
        row("  took longer / shorter (median)", sign)
        if costs["intervals"]:
            share = f"{costs['inside'] / costs['intervals']:.0%} of {costs['intervals']}"
            row("  inside the interval", share)
    return folded(table)


def _add_fault_rows(report: Report, row: Any) -> None:
    row("faults", Text(_faults(report)))
    notices_s = [s for fault in report["faults"] if (s := fault.get("notice_s")) is not None]
    if notices_s:
        row("death noticed after", Text(", ".join(map(milliseconds, notices_s))))
    row("bound to it: decoding / not yet", " / ".join(map(str, bound_streams(report))))
    row("streams that needed a recovery", str(interrupted_streams(report)))
    row("recoveries", Text(recoveries_by_option(report)))
    row("pause of a stream p50 / longest", _pair(report["gap_s"], "max"))
    if report["undecided_s"]["p50"] is not None:
        row("  until the death was known", _pair(report["undecided_s"], "max"))


def papers_measures(report: Report) -> list[tuple[str, str]]:
    """The measures of a fault in papers, whose reports the exhibits compare."""
    groups = report["groups"]
    rows = [
        ("TFS (fault to first token)", milliseconds(report["tfs_s"])),
        ("TTP (then to stable peak)", milliseconds(report["ttp_s"])),
        ("failure-impact window", window_words(report)),
        ("replay TTFT p50 / p99", _pair(groups["interrupted"]["replay_ttft_s"])),
    ]
    for name in ("interrupted", "uninterrupted"):
        group = groups[name]
        words = _both(group["arrival_ttft_s"]["mean"], group["tpot_s"]["mean"])
        rows.append((f"{name} ({group['streams']}): mean TTFT / TPOT", words))
    return rows


def text_rows(table: Table) -> list[list[str]]:
    """The cells of a table as text, with the header first."""
    headers = [str(column.header) for column in table.columns]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [headers, *map(list, zip(*columns, strict=True))]


def fault_label(fault: Mapping[str, Any]) -> str:
    return f"{fault['what'].replace('_', ' ')} {fault['whom']}"


def _faults(report: Report) -> str:
    found = []
    for fault in report["faults"]:
        gone = f" ({', '.join(fault['gone'])} had died)" if fault.get("gone") else ""
        found.append(f"{fault_label(fault)} at {fault['at_s']:.2f} s{gone}")
    return ", ".join(found) or "none"


def _goodput(run: Mapping[str, Any]) -> str:
    return f"{run['slo_met']} ({run['goodput_per_s']:.2f}/s)"


def _rates_words(run: Mapping[str, Any]) -> str:
    return (
        "-"
        if run["asked_per_s"] is None
        else f"{run['offered_per_s']:.2f} / {run['asked_per_s']:.2f}"
    )


def _pair(spread: Mapping[str, float | None], upper: str = "p99") -> str:
    return _both(spread["p50"], spread[upper])


def _both(one_s: float | None, other_s: float | None, between: str = " / ") -> str:
    """Two times, with one unit if it is the same."""
    one, other = milliseconds(one_s), milliseconds(other_s)
    return (
        f"{one.removesuffix(' ms')}{between}{other}"
        if one.endswith("ms") and other.endswith("ms")
        else f"{one}{between}{other}"
    )
