"""The report as one self-contained HTML page: plots are inline SVG, nothing is loaded from anywhere.

Importing this module loads matplotlib, which takes a second: import it where it is used.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvrs.replay import plots
from kvrs.replay.report import Report
from kvrs.replay.style import CSS
from kvrs.replay.table import costs_by_option, fault_label, milliseconds, recoveries_by_option, verdict_sentence

_ROWS_OPEN = 24  # More rows than this are folded away, with the key numbers above them.


def write_html(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(report), encoding="utf-8")


def render_html(report: Report) -> str:
    """The whole page. Every text that comes from data is escaped."""
    body = "".join(
        (
            _headline(report),
            _cards(report),
            _figure("Every stream over time", _TIMELINE_WORDS, plots.timeline_svg(report)),
            "<div class=pair>",
            _figure("Time to first token", "Share of streams at or below", plots.cdf_svg(report, "ttft_s")),
            _figure("Longest gap of a stream", "Share of streams at or below", plots.cdf_svg(report, "max_gap_s")),
            "</div>",
            _costs(report),
            _runs(report),
            _recoveries(report),
            _made_with(report),
        )
    )
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        "<meta name=color-scheme content='light dark'>"
        f"<title>kvrs report: {'exact' if report['exact'] else 'not exact'}</title>"
        f"<style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


_TIMELINE_WORDS = (
    "One line per stream, from its arrival to its end; a tick is a token at the client. "
    "The vertical line is the fault, the thick bars are the waits of the interrupted streams."
)


def _headline(report: Report) -> str:
    kind = "good" if report["exact"] else "bad"
    faults = ", ".join(f"{fault_label(fault)} with {fault['inflight']} streams in flight" for fault in report["faults"])
    return (
        f"<header class={kind}><p class=kicker>kvrs recovery report</p><h1>{escape(verdict_sentence(report))}</h1>"
        f"<p>{escape(faults or 'No fault was carried out')}; recovered by {escape(recoveries_by_option(report))}.</p></header>"
    )


def _cards(report: Report) -> str:
    tokens = (report["tokens_lost"], report["tokens_repeated"], report["tokens_different"])
    cards = (
        ("streams completed", f"{report['completed']} / {report['streams']}"),
        ("lost / repeated / different tokens", " / ".join(map(str, tokens))),
        ("fault to first token (TFS)", milliseconds(report["tfs_s"])),
        ("client-visible gap p50", milliseconds(report["gap_s"]["p50"])),
        ("client-visible gap p99", milliseconds(report["gap_s"]["p99"])),
        ("recoveries", str(sum(report["recoveries"].values()))),
    )
    return "<div class=cards>" + "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in cards) + "</div>"


def _figure(title: str, words: str, svg: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p class=words>{escape(words)}</p><div class=plot>{svg}</div></section>"


def _costs(report: Report) -> str:
    if not report["recovery_costs"]:
        return ""
    words = "Each recovery: what the policy expected and what it took. On the diagonal the prediction was right."
    figure = _figure("Predicted and real cost", words, plots.costs_svg(report))
    rows = [
        (option, len(costs), milliseconds(_mean(costs, 0)), milliseconds(_mean(costs, 1)))
        for option, costs in sorted(costs_by_option(report).items())
    ]
    table = _table(("option", "recoveries", "predicted, mean", "real, mean"), rows)
    return f"<div class=pair>{figure}<section><h2>By option</h2>{table}</section></div>"


def _mean(costs: Sequence[tuple[float, float]], column: int) -> float:
    return sum(cost[column] for cost in costs) / len(costs)


def _runs(report: Report) -> str:
    fault, clean = report["runs"]["fault"], report["runs"]["clean"]
    rows: list[tuple[Any, ...]] = [(key, fault[key], clean[key]) for key in ("streams", "completed", "errors", "tokens")]
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("longest gap", "max_gap_s"), ("send lag", "lag_s")):
        rows += [(f"{name} {q}", milliseconds(fault[key][q]), milliseconds(clean[key][q])) for q in ("p50", "p99")]
    rows.append(("goodput", f"{fault['goodput_per_s']:.2f}/s", f"{clean['goodput_per_s']:.2f}/s"))
    slo = report["slo"]
    words = f"Goodput counts complete streams with TTFT within {slo['ttft_s']} s and TPOT within {slo['tpot_s']} s."
    table = _table(("", "with the fault", "without"), rows)
    return f"<section><h2>With and without the fault</h2><p class=words>{escape(words)}</p>{table}</section>"


def _recoveries(report: Report) -> str:
    columns = ("at", "stream", "attempt", "option", "from", "to", "cause", "had tokens", "predicted", "real", "client waited")
    rows = [
        (
            f"{row['at_s']:.3f} s",
            row["stream"],
            row.get("attempt"),
            row["option"],
            row["from"],
            row.get("to"),
            row.get("cause"),
            row.get("produced_tokens"),
            milliseconds(row.get("predicted_s")),
            milliseconds(row.get("real_s")),
            milliseconds(row["pause_s"]),
        )
        for row in report["recovery_rows"]
    ]
    if not rows:
        return "<section><h2>Recoveries</h2><p class=words>None.</p></section>"
    opened = " open" if len(rows) <= _ROWS_OPEN else ""
    return f"<section><details{opened}><summary>Recoveries ({len(rows)})</summary>{_table(columns, rows)}</details></section>"


def _made_with(report: Report) -> str:
    shown = {"kvrs": report["kvrs_version"], "machine": report["machine"], "settings": report["settings"]}
    text = escape(json.dumps(shown, indent=2, default=str))
    return f"<section><details><summary>Made with</summary><pre>{text}</pre></details></section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(value: Any) -> str:
    return "-" if value is None else escape(str(value))
