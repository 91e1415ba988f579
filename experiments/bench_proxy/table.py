"""The result as text: medians by subject, the bars, and what was not whole."""

from collections.abc import Iterable, Sequence

from experiments.bench_proxy.bars import BARS, Medians, Row
from experiments.bench_proxy.special import SPECIAL
from experiments.bench_proxy.steady import STEADY

_STEADY_COLUMNS = (
    ("TTFT p50", "ttft_us_p50", ",.0f"),
    ("p99 us", "ttft_us_p99", ",.0f"),
    ("transit p50", "transit_us_p50", ",.0f"),
    ("p99 us", "transit_us_p99", ",.0f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("CPU s/M", "cpu_s_per_million", ".1f"),
    ("MB", "rss_mb", ".0f"),
)
_WIDTH = 12


def shown(rows: Sequence[Row]) -> str:
    lines: list[str] = []
    for steady in STEADY:
        lines += _scenario(rows, steady.name, steady.title, _STEADY_COLUMNS)
    for special in SPECIAL:
        lines += _scenario(rows, special.name, special.title, special.columns)
    lines += _bar_lines(rows)
    for row in rows:
        where = f"{row.get('scenario', 'all scenarios')}, {row['subject']}"
        if "skipped" in row:
            lines.append(f"skipped: {where}: {row['skipped']}")
        if "failed" in row:
            lines.append(f"FAILED: {where}: {row['failed']}")
        if row.get("retries"):
            lines.append(f"RETRIED: {row['retries']} calls of healthy instances, {where}")
        if row.get("broken"):
            count = f"{row['broken']} of {row['started']} streams"
            lines.append(f"NOT WHOLE: {count}, {where}: {row['fault']}")
    return "\n".join(lines)


def is_failed(rows: Sequence[Row]) -> bool:
    """True if a bar is missed, or kvrs failed or broke a stream."""
    missed = any(row["verdict"] == "missed" and not row["is_moonshot"] for row in judged(rows))
    ours = [row for row in rows if row["subject"].startswith("kvrs")]
    return missed or any(row.get("broken") or "failed" in row for row in ours)


def judged(rows: Sequence[Row]) -> list[Row]:
    """Each bar for each kvrs."""
    medians, found = Medians(rows), []
    for subject in _subjects(rows):
        for bar in BARS if _is_judged(subject) else ():
            value, verdict = bar.judged(medians, subject)
            found.append(
                {
                    "subject": subject,
                    "what": bar.what,
                    "value": value,
                    "bound": f"{'>=' if bar.at_least else '<='} {bar.limit:g} {bar.unit}",
                    "is_moonshot": bar.is_moonshot,
                    "verdict": verdict,
                }
            )
    return found


def _is_judged(subject: str) -> bool:
    """Bars are of the main path: kvrs in front of its own engine."""
    return subject == "kvrs" or subject.startswith("kvrs of ")


def _subjects(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["subject"] for row in rows))


def _scenario(
    rows: Sequence[Row], scenario: str, title: str, columns: Iterable[tuple[str, str, str]]
) -> list[str]:
    medians = Medians(rows)
    subjects = [name for name in _subjects(rows) if medians.of(scenario, name, "started")]
    if not subjects:
        return []
    first = max(16, *(len(name) for name in subjects))
    widths = [max(_WIDTH, len(heading) + 1) for heading, _, _ in columns]
    head = "".join(
        f"{heading:>{width}}" for width, (heading, _, _) in zip(widths, columns, strict=True)
    )
    lines = [f"{scenario}: {title}", " " * first + head]
    for name in subjects:
        cells = ""
        for width, (_, column, form) in zip(widths, columns, strict=True):
            value = medians.of(scenario, name, column)
            cells += f"{'-' if value is None else format(value, form):>{width}}"
        lines.append(f"{name:<{first}}{cells}")
    return [*lines, ""]


def _bar_lines(rows: Sequence[Row]) -> list[str]:
    lines = []
    for subject in dict.fromkeys(row["subject"] for row in judged(rows)):
        lines.append(f"{subject} against the bars:")
        for row in judged(rows):
            if row["subject"] == subject:
                value = "-" if row["value"] is None else f"{row['value']:,.2f}"
                what = f"{row['what']} (moonshot)" if row["is_moonshot"] else row["what"]
                lines.append(f"  {what:<64}{value:>10} {row['bound']:<11} {row['verdict']}")
        lines.append("")
    return lines
