"""The report as a table in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrs.replay.report import Report


def terminal_table(report: Report) -> RenderableType:
    """Verdict, then one row per quantity with and without the fault. Data are shown as text, never as markup."""
    return Group(_verdict(report), _quantities(report))


def verdict_sentence(report: Report) -> str:
    if report["exact"]:
        return f"Exact: {report['streams']} of {report['streams']} streams got every token exactly once."
    return f"Not exact: {'; '.join(report['reasons'])}."


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def recoveries_by_option(report: Report) -> str:
    return ", ".join(f"{count} {option}" for option, count in sorted(report["recoveries"].items())) or "none"


def _verdict(report: Report) -> Text:
    return Text(verdict_sentence(report), style="bold green" if report["exact"] else "bold red")


def _quantities(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("with the fault", justify="right")
    table.add_column("without", justify="right")
    fault, clean = report["runs"]["fault"], report["runs"]["clean"]
    for key in ("streams", "completed", "errors", "tokens"):
        table.add_row(key, str(fault[key]), str(clean[key]))
    lost = (report["tokens_lost"], report["tokens_repeated"], report["tokens_different"])
    table.add_row("tokens lost / repeated / different", " / ".join(map(str, lost)), "the oracle")
    table.add_row("faults", Text(_faults(report)), "-")
    table.add_row("recoveries", Text(recoveries_by_option(report)), "-")
    table.add_row("client-visible gap p50 / p99", _pair(report["gap_s"]), "-")
    table.add_row("TFS (fault to first token)", milliseconds(report["tfs_s"]), "-")
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("longest gap of a stream", "max_gap_s"), ("send lag", "lag_s")):
        table.add_row(f"{name} p50 / p99", _pair(fault[key]), _pair(clean[key]))
    table.add_row("goodput", f"{fault['goodput_per_s']:.2f}/s", f"{clean['goodput_per_s']:.2f}/s")
    for option, costs in sorted(costs_by_option(report).items()):
        predicted, real = (milliseconds(sum(column) / len(column)) for column in zip(*costs, strict=True))
        table.add_row(Text(f"{option}: mean cost"), f"predicted {predicted}, real {real}", "-")
    return table


def costs_by_option(report: Report) -> dict[str, list[tuple[float, float]]]:
    """(predicted, real) seconds of every recovery, by option."""
    costs: dict[str, list[tuple[float, float]]] = {}
    for row in report["recovery_costs"]:
        costs.setdefault(row["option"], []).append((row["predicted_s"], row["real_s"]))
    return costs


def fault_label(fault: Mapping[str, Any]) -> str:
    return f"{fault['what']} {fault['whom']}"


def _faults(report: Report) -> str:
    return ", ".join(f"{fault_label(fault)} at {fault['at_s']:.2f} s" for fault in report["faults"]) or "none"


def _pair(spread: Mapping[str, float | None]) -> str:
    return f"{milliseconds(spread['p50'])} / {milliseconds(spread['p99'])}"
