"""The report as a table in the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrs.replay.metrics import LATE_S
from kvrs.replay.report import Report

_SHARE_OFF = 0.01  # Beyond it the client did not offer what it was asked for.


def terminal_table(report: Report) -> RenderableType:
    """Verdict, then one row per quantity with and without the fault. Data are shown as text, never as markup."""
    late = late_sentence(report)
    return Group(_verdict(report), *([Text(late, style="yellow")] if late else []), _quantities(report))


def verdict_sentence(report: Report) -> str:
    runs = f", in each of {len(report['repeats'])} runs" if len(report["repeats"]) > 1 else ""
    if report["exact"]:
        what = "token" if report["compared"] == "tokens" else "character of text (the endpoint does not return token ids)"
        return f"Exact: {report['completed']} of {report['streams']} streams got every {what} exactly once{runs}."
    if report["exact"] is None:
        whole = "; ".join(report["reasons"]) or f"{report['completed']} of {report['streams']} streams completed{runs}"
        return f"{'Not whole' if report['reasons'] else 'Whole'}: {whole}. Nothing was compared."
    return f"Not exact: {'; '.join(report['reasons'])}."


def late_sentence(report: Report) -> str | None:
    """Says so where the client itself did not keep to the trace; then its numbers are partly its own."""
    run = report["runs"]["fault"]
    asked, offered = run["asked_per_s"], run["offered_per_s"]
    off = asked is not None and abs(offered / asked - 1) > _SHARE_OFF
    if not run["late"] and not off:
        return None
    rates = "" if asked is None else f"; it offered {offered:.2f} of {asked:.2f} requests/s"
    return (
        f"The client was late: {run['late']} of {run['streams']} requests were sent more than {LATE_S * 1000:.0f} ms "
        f"after they were due (worst {milliseconds(run['lag_s']['max'])}){rates}."
    )


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1 else f"{seconds:,.2f} s"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def recoveries_by_option(report: Report) -> str:
    return ", ".join(f"{count} {option}" for option, count in sorted(report["recoveries"].items())) or "none"


def with_intervals(report: Report, names: Sequence[str], shown: str) -> str:
    """Numbers with their 95 % intervals, where runs were repeated: mean ± half width."""
    found = [report["intervals"].get(name) for name in names]
    if any(interval is None or interval["half_width"] is None for interval in found):
        return shown
    return " / ".join(f"{milliseconds(one['mean'])} ± {milliseconds(one['half_width'])}" for one in found)


def window_words(report: Report) -> str:
    impact = report["impact"]
    if impact is None:
        return "-"
    if impact["from_s"] is None:
        return "not felt"
    to = f"{impact['to_s']:.2f} s" if impact["closed"] else "the end"
    return f"{impact['recovery_time_s']:.2f} s, from {impact['from_s']:.2f} s to {to}"


def _verdict(report: Report) -> Text:
    good = not report["reasons"]
    return Text(verdict_sentence(report), style="bold green" if good else "bold red")


def _quantities(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    fault, clean = report["runs"]["fault"], report["runs"]["clean"]
    table.add_column("", no_wrap=True)
    table.add_column("with the fault" if report["faults"] else "measured", justify="right")
    if clean is not None:
        table.add_column("without" if report["faults"] else "again", justify="right")

    def row(title: str, measured: str | Text, again: str = "-") -> None:
        table.add_row(title, measured, *([] if clean is None else [again]))

    for key in ("streams", "completed", "errors", "tokens"):
        row(key, str(fault[key]), "" if clean is None else str(clean[key]))
    if clean is not None:
        lost = (report["tokens_lost"], report["tokens_repeated"], report["tokens_different"])
        row("tokens lost / repeated / different", " / ".join(map(str, lost)), "the oracle")
    if report["faults"]:
        _add_fault_rows(report, row)
    names = (
        ("TTFT from arrival", "arrival_ttft_s"),
        ("TPOT", "tpot_s"),
        ("TBT", "tbt_s"),
        ("maximum TBT of a stream", "max_gap_s"),
        ("send lag", "lag_s"),
    )
    for name, key in names:
        row(f"{name} p50 / p99", _pair(fault[key]), "" if clean is None else _pair(clean[key]))
    row("goodput", _goodput(fault), "" if clean is None else _goodput(clean))
    row("requests offered / asked", _rates(fault), "" if clean is None else _rates(clean))
    for option, costs in report["recovery_options"].items():
        words = f"{milliseconds(costs['predicted_s'])} / {milliseconds(costs['real_s'])}"
        row(f"{option}: predicted / real cost", Text(f"{words}, off by {share(costs['absolute_error_share'])}"))
    return table


def _add_fault_rows(report: Report, row: Any) -> None:
    groups = report["groups"]
    row("faults", Text(_faults(report)))
    row("recoveries", Text(recoveries_by_option(report)))
    row("client-visible gap p50 / p99", with_intervals(report, ("gap_p50_s", "gap_p99_s"), _pair(report["gap_s"])))
    row("TFS (fault to first token)", with_intervals(report, ("tfs_s",), milliseconds(report["tfs_s"])))
    row("TTP (then to stable peak)", with_intervals(report, ("ttp_s",), milliseconds(report["ttp_s"])))
    row("failure-impact window", window_words(report))
    for name in ("interrupted", "uninterrupted"):
        group = groups[name]
        words = f"{milliseconds(group['arrival_ttft_s']['mean'])} / {milliseconds(group['tpot_s']['mean'])}"
        row(f"{name} ({group['streams']}): mean TTFT / TPOT", words)
    row("replay TTFT from arrival p50 / p99", _pair(groups["interrupted"]["replay_ttft_s"]))


def costs_by_option(report: Report) -> dict[str, list[tuple[float, float]]]:
    """(predicted, real) seconds of every recovery, by option."""
    costs: dict[str, list[tuple[float, float]]] = {}
    for row in report["recovery_costs"]:
        costs.setdefault(row["option"], []).append((row["predicted_s"], row["real_s"]))
    return costs


def fault_label(fault: Mapping[str, Any]) -> str:
    return f"{fault['what'].replace('_', ' ')} {fault['whom']}"


def _faults(report: Report) -> str:
    return ", ".join(f"{fault_label(fault)} at {fault['at_s']:.2f} s" for fault in report["faults"]) or "none"


def _goodput(run: Mapping[str, Any]) -> str:
    return f"{run['goodput_per_s']:.2f}/s ({run['slo_met']} of {run['streams']})"


def _rates(run: Mapping[str, Any]) -> str:
    return "-" if run["asked_per_s"] is None else f"{run['offered_per_s']:.2f} / {run['asked_per_s']:.2f} per s"


def _pair(spread: Mapping[str, float | None]) -> str:
    p50, p99 = milliseconds(spread["p50"]), milliseconds(spread["p99"])
    return f"{p50.removesuffix(' ms')} / {p99}" if p50.endswith("ms") and p99.endswith("ms") else f"{p50} / {p99}"
