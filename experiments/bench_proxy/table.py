"""The result as text: medians by subject, the bars, and what was not whole."""

from collections.abc import Sequence

from experiments.bench_proxy.bars import BARS, Medians, Row
from experiments.bench_proxy.steady import STEADY

_COLUMNS = (
    ("TTFT p50", "ttft_us_p50", ",.0f"),
    ("p99 us", "ttft_us_p99", ",.0f"),
    ("transit p50", "transit_us_p50", ",.0f"),
    ("p99 us", "transit_us_p99", ",.0f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("CPU s/M", "cpu_s_per_million", ".1f"),
    ("MB", "rss_mb", ".0f"),
)


def shown(rows: Sequence[Row]) -> str:
    lines = [*_steady_lines(rows), *_bar_lines(rows)]
    for row in rows:
        if "skipped" in row:
            lines.append(f"skipped: {row['skipped']}: {row['reason']}")
        if row.get("broken"):
            lines.append(
                f"NOT WHOLE: {row['broken']} of {row['started']} streams, {row['scenario']}, "
                f"{row['subject']}: {row['fault']}"
            )
    return "\n".join(lines)


def is_failed(rows: Sequence[Row]) -> bool:
    """Whether a bar is missed, or a stream of kvrs was not whole."""
    medians = Medians(rows)
    missed = any(
        bar.judged(medians, subject)[1] == "missed"
        for bar in BARS
        for subject in _kvrs(rows)
        if not bar.is_moonshot
    )
    return missed or any(row.get("broken") for row in rows if "kvrs" in row.get("subject", ""))


def _kvrs(rows: Sequence[Row]) -> list[str]:
    return [name for name in _subjects(rows) if name.startswith("kvrs")]


def _subjects(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["subject"] for row in rows if "subject" in row))


def _steady_lines(rows: Sequence[Row]) -> list[str]:
    medians, lines = Medians(rows), []
    for steady in STEADY:
        subjects = [
            name for name in _subjects(rows) if medians.of(steady.name, name, "started") is not None
        ]
        if not subjects:
            continue
        head = "".join(f"{title:>13}" for title, _, _ in _COLUMNS)
        lines += [f"{steady.name}: {steady.title}", f"{'':<18}{head}"]
        for name in subjects:
            cells = ""
            for _, column, form in _COLUMNS:
                value = medians.of(steady.name, name, column)
                cells += f"{'-' if value is None else format(value, form):>13}"
            lines.append(f"{name:<18}{cells}")
        lines.append("")
    return lines


def _bar_lines(rows: Sequence[Row]) -> list[str]:
    medians, lines = Medians(rows), []
    for subject in _kvrs(rows):
        lines.append(f"{subject} against the bars:")
        unmeasured = 0
        for bar in BARS:
            value, verdict = bar.judged(medians, subject)
            if value is None:
                unmeasured += 1
                continue
            sign = ">=" if bar.at_least else "<="
            what = f"{bar.what} (moonshot)" if bar.is_moonshot else bar.what
            lines.append(f"  {what:<62}{value:>9.2f} {sign} {bar.limit:g} {bar.unit:<4} {verdict}")
        lines += [f"  not measured: {unmeasured} bars", ""]
    return lines
