"""The report as a self-contained HTML page with an inline SVG plot, without any other file.

The import of this module loads matplotlib, which takes a second: import it where it is used.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvrs.core.incidents import off_words
from kvrs_lab.report import plots
from kvrs_lab.report.report import Report
from kvrs_lab.report.style import CSS
from kvrs_lab.report.table import (
    bound_streams,
    errors_by_kind,
    fault_label,
    interrupted_streams,
    interval_words,
    milliseconds,
    never_due_lines,
    note_lines,
    origin_sentence,
    papers_measures,
    quantities,
    recoveries_by_option,
    text_rows,
    verdict_sentence,
)

_SHOWN_OF_AN_ID = 8  # Enough to find the stream in report.json.
_LONG_CELL = 24  # Longer texts are broken over lines, but never numbers and names.
_ROWS_OPEN = 24  # Longer tables are folded, below the key numbers.


def write_html(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(report), encoding="utf-8")


def render_html(report: Report) -> str:
    """Render the page. Every text from data is escaped."""
    body = "".join(
        (
            _headline(report),
            _errors(report),
            _timeline(report),
            _numbers(report),
            _recoveries(report),
            _papers(report),
            _made_with(report),
        )
    )
    return _page(f"kvrs lab report: {_VERDICTS[report['exact']]}", body)


def _page(title: str, body: str) -> str:
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        "<meta name=color-scheme content='light dark'>"
        f"<title>{escape(title)}</title>"
        f"<style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


_VERDICTS = {True: "exact", False: "not exact", None: "not compared"}
_TIMELINE_WORDS = (
    "One line per stream, from its arrival to its end; a tick is a token at the client. "
    "A vertical line is a fault; a thick bar is the pause of a stream from the last token before "
    "its recovery to the first one after it, in the colour of what the recovery did."
)


_RECOVERIES_WORDS = (
    "Predicted: nine of ten real costs should lie in this interval. Real: from the decision to the "
    "next token. Off by: the factor between the real cost and the predicted one, the middle of the "
    "interval. Until known: how much more the client waited, from its last token until the death "
    "was known and the recovery decided. Pause: its whole wait."
)


def _headline(report: Report) -> str:
    kind = "bad" if report["reasons"] else "good"
    faults = ", ".join(map(fault_label, report["faults"]))
    decoding, others = bound_streams(report)
    story = (
        f"{faults}: {decoding} streams were decoding there, {others} on their way there; "
        f"{interrupted_streams(report)} needed a recovery; recoveries: "
        f"{recoveries_by_option(report)}."
        if faults
        else "No fault was carried out."
    )
    notes = {"warning": never_due_lines(report), "note": note_lines(report)}
    lines = [(kind, line) for kind, of_kind in notes.items() for line in of_kind]
    warning = "".join(f"<p class={kind}>{escape(line)}</p>" for kind, line in lines)
    # Several reasons become a list below a short headline.
    reasons = report["reasons"] if len(report["reasons"]) > 1 else []
    verdict = (
        f"{verdict_sentence(report).partition(':')[0]}." if reasons else verdict_sentence(report)
    )
    listed = (
        f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>" if reasons else ""
    )
    return (
        f"<header class={kind}><p class=kicker>kvrs recovery "
        f"report</p><h1>{escape(verdict)}</h1>{listed}"
        f"<p>{escape(story)}</p><p class=words>{escape(origin_sentence(report))}</p>"
        f"{warning}</header>"
    )


def _errors(report: Report) -> str:
    rows = errors_by_kind(report)
    if not rows:
        return ""
    table = _table(("kind", "streams", "first number", "message"), rows, "words-in-cells")
    words = "Streams that did not complete, by what ended them at the client."
    return _section("Errors", words, table)


def _timeline(report: Report) -> str:
    if not any(stream["token_times_s"] for stream in report["per_stream"]):
        return ""
    plot = f"<div class=plot>{plots.timeline_svg(report)}</div>"
    return _section("Every stream over time", _TIMELINE_WORDS, plot)


def _section(title: str, words: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p class=words>{escape(words)}</p>{content}</section>"


def _numbers(report: Report) -> str:
    """The terminal's table as a section."""
    header, *rows = text_rows(quantities(report))
    return _section("The run in numbers", _words(report["slo"]), _table(header, rows))


def _words(slo: Mapping[str, float]) -> str:
    return (
        f"TTFT counts from the time at which a request was due, so it contains the time by which "
        f"the client of this measurement sent it late. Goodput: complete streams with TTFT within "
        f"{slo['ttft_s']:g} s and TPOT within {slo['tpot_s']:g} s, and as many per second."
    )


def _recoveries(report: Report) -> str:
    if not report["faults"] and not report["recovery_rows"]:
        return ""
    columns = (
        "decided at",
        "stream",
        "attempt",
        "option",
        "from",
        "to",
        "predicted",
        "real",
        "off by",
        "until known",
        "pause",
        "tokens before",
        "cause",
    )
    rows = [
        (
            f"{row['at_s']:.3f} s",
            row["stream"][:_SHOWN_OF_AN_ID],
            row.get("attempt"),
            row["option"],
            row["from"],
            row.get("to"),
            interval_words(row),
            milliseconds(row.get("real_s")),
            off_words(row.get("real_over_predicted")),
            milliseconds(row.get("undecided_s")),
            milliseconds(row["pause_s"]),
            row.get("produced_tokens"),
            row.get("cause"),
        )
        for row in report["recovery_rows"]
    ]
    if not rows:
        return _section("Recoveries", "None.", "")
    opened = " open" if len(rows) <= _ROWS_OPEN else ""
    table = _table(columns, rows, "words-in-cells")
    choices = "".join(f"<p class=words>{escape(line)}</p>" for line in report.get("choices", ()))
    return (
        f"<section>{choices}<details{opened}><summary>Recoveries "
        f"({len(rows)})</summary><p class=words>{escape(_RECOVERIES_WORDS)}</p>{table}"
        f"</details></section>"
    )


def _papers(report: Report) -> str:
    if not report["faults"]:
        return ""
    table = _table(("", "with the fault"), papers_measures(report))
    return f"<section><details><summary>Measures of papers</summary>{table}</details></section>"


def _made_with(report: Report) -> str:
    keys = ("date", "policy", "config_digest", "kvrs_version", "proxy_version", "machine")
    shown = {key: report[key] for key in (*keys, "settings")}
    text = escape(json.dumps(shown, indent=2, default=str))
    return f"<section><details><summary>Made with</summary><pre>{text}</pre></details></section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "numbers") -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f"<div class=scroll><table "
        f"class={kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    text = "-" if value is None else str(value)
    return f"<td{' class=long' if len(text) > _LONG_CELL else ''}>{escape(text)}</td>"
