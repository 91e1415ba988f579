"""The report holds what was measured, and a self-contained page shows it."""

import json
import platform
import re
from datetime import UTC, datetime, timedelta
from html import escape
from html.parser import HTMLParser
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import kvrs
from kvrs.cli import app
from kvrs.core.model.estimates import Option
from kvrs_lab.report.html import render_html, write_html
from kvrs_lab.report.measures import ReportError
from kvrs_lab.report.report import Report, build_report, write_report
from kvrs_lab.report.style import OPTION_COLORS
from kvrs_lab.report.table import terminal_table
from kvrs_lab.traces.records import ErrorKind, StreamRecord

KILL = {"at_s": 1.0, "what": "kill", "whom": "d0", "phases": {"decode": 2, "handoff": 1}}
PROXY = {"id": "proxy-0", "policy": "rom", "version": "0.0.9", "config_digest": "1d553894a17cdcbe"}


def stream(index: int, *times_s: float, tokens: list[int] | None = None) -> StreamRecord:
    token_ids = list(range(len(times_s))) if tokens is None else tokens
    return StreamRecord(
        index,
        0.1 * index,
        5,
        9,
        0.1 * index,
        times_s[-1],
        200,
        f"s{index}",
        token_ids,
        list(times_s),
        "text",
        "length",
        4,
    )


def recovery(name: str, option: str, at_s: float = 1.01, **more: Any) -> dict[str, Any]:
    row = {
        "at_s": at_s,
        "stream": name,
        "attempt": 2,
        "option": option,
        "from": "d0",
        "to": "d1",
        "cause": "reset",
    }
    return {
        **row,
        "predicted_s": 0.1,
        "real_s": 0.2,
        "estimates": [],
        "produced_tokens": 2,
        "gap_s": 0.4,
        **more,
    }


def exact_report() -> Report:
    faulted = [
        stream(0, 0.8, 0.9, 1.3, 1.4),
        stream(1, 0.85, 0.95, 1.55, 1.6),
        stream(2, 0.9, 1.0, 1.1, 1.2),
    ]
    clean = [
        stream(0, 0.8, 0.9, 1.0, 1.1),
        stream(1, 0.85, 0.95, 1.05, 1.15),
        stream(2, 0.9, 1.0, 1.1, 1.2),
    ]
    recoveries = [
        recovery("s0", "migrate"),
        recovery("s1", "recompute"),
        recovery("gone", "abort", real_s=None, to=None),
    ]
    return build_report(faulted, clean, recoveries, [KILL], {"policy": "auto"}, proxy=PROXY)


def broken_report() -> Report:
    cut = stream(1, 0.5, 0.6, tokens=[0, 1])
    cut.finish_reason = None
    cut.fail(ErrorKind.TRUNCATED, "</script><b>&")
    faulted = [
        stream(0, 0.8, 0.9, 1.0, 1.1, 1.2, tokens=[0, 1, 1, 2, 3]),
        cut,
        stream(2, 0.1, 0.2, tokens=[0, 9]),
    ]
    clean = [stream(i, 0.1, 0.2, 0.3, 0.4) for i in range(2)] + [stream(2, 0.1, 0.2)]
    return build_report(faulted, clean, [], [], {"<name>": "<script>alert(1)</script>"})


def in_terminal(report: Report, width: int = 120) -> str:
    out = StringIO()
    Console(file=out, width=width).print(terminal_table(report))
    return out.getvalue()


def test_the_top_of_the_report_is_the_verdict() -> None:
    """The names that scripts rely on."""
    report = exact_report()

    assert (report["schema_version"], report["exact"], report["reasons"]) == (5, True, [])
    assert [report[key] for key in ("streams", "completed", "errors")] == [3, 3, 0]
    assert [report[key] for key in ("tokens_lost", "tokens_repeated", "tokens_different")] == [
        0,
        0,
        0,
    ]
    assert report["recoveries"] == {"migrate": 1, "recompute": 1, "abort": 1}


def test_a_run_that_was_not_exact_lists_the_reasons() -> None:
    """Every kind of damage is a reason of its own."""
    report = broken_report()

    assert not report["exact"]
    assert (report["completed"], report["errors"]) == (2, 1)
    assert (report["tokens_lost"], report["tokens_repeated"], report["tokens_different"]) == (
        2,
        1,
        1,
    )
    assert report["reasons"][:4] == [
        "1 streams did not complete",
        "2 tokens lost",
        "1 tokens repeated",
        "1 tokens different",
    ]
    assert report["per_stream"][1]["error"] == "truncated: </script><b>&"
    assert [row["exact"] for row in report["per_stream"]] == [False, False, False]


def test_a_report_names_policy_date_and_versions() -> None:
    """Numbers can be compared only when their origin is known: in the file, table and page alike.
    What the cluster does not publish is left out.
    """
    known, unknown = exact_report(), build_report([], [], [], [], {})

    date = datetime.fromisoformat(known["date"])
    assert date.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - date) < timedelta(minutes=1)
    assert (known["policy"], known["config_digest"]) == ("rom", "1d553894a17cdcbe")
    assert (known["kvrs_version"], known["proxy_version"]) == (kvrs.__version__, "0.0.9")
    assert known["machine"]["python"] == platform.python_version()
    line = f"policy rom, kvrs {kvrs.__version__}, proxy 0.0.9, Python {platform.python_version()}"
    for shown in (in_terminal(known), render_html(known)):
        assert f"{known['date']}: {line}" in " ".join(shown.split())
        assert "config 1d553894a17cdcbe" in shown
    assert (unknown["policy"], unknown["config_digest"]) == (None, None)
    assert "policy" not in in_terminal(unknown)


def test_no_streams_are_not_an_exact_run() -> None:
    """Nothing was shown by running nothing, and nothing divides by zero."""
    report = build_report([], [], [], [], {})

    assert not report["exact"]
    assert "no stream was run" in render_html(report)


def test_gaps_and_tfs_come_from_the_clients_side() -> None:
    """The waits of the interrupted streams, and fault to the first token after a recovery's
    decision.
    """
    report = exact_report()

    assert [row["pause_s"] for row in report["recovery_rows"]] == [
        pytest.approx(0.4),
        pytest.approx(0.6),
        None,
    ]
    assert report["gap_s"]["p50"] == pytest.approx(0.5)
    assert report["tfs_s"] == report["faults"][0]["tfs_s"] == pytest.approx(0.3)
    assert [row["recoveries"] for row in report["per_stream"]] == [["migrate"], ["recompute"], []]


def test_each_option_tells_how_far_predictions_are_off() -> None:
    """By a factor, which is as large for half as for twice of the real cost; and whether nine of
    ten were in their intervals.
    """
    real_s = [0.05, 0.1, 0.2, 0.8]
    inside = {"low_s": 0.04, "high_s": 0.25}
    rows = [
        recovery(f"s{at}", "migrate", real_s=s, gap_s=s, **inside) for at, s in enumerate(real_s)
    ]
    none = [recovery("s4", "abort", real_s=None), recovery("s5", "start", predicted_s=inf)]
    report = build_report([stream(0, 0.5, 1.3)], None, [*rows, *none], [KILL], {})

    (found,) = report["recovery_options"].values()
    assert found["off"] == {"p50": pytest.approx(2.0), "p95": pytest.approx(7.1)}
    assert found["real_over_predicted"] == pytest.approx(1.5)
    assert (found["longer"], found["shorter"]) == (2, 1)
    assert (found["inside"], found["intervals"]) == (3, 4)
    shown = " ".join(in_terminal(report).split())
    assert "off by p50 / p95 x2 / x7.1" in shown
    assert "took longer / shorter (median) 2 / 1 (x1.5) inside the interval 75% of 4" in shown


def test_a_prediction_without_an_interval_is_not_outside_of_it() -> None:
    """Rows of an older proxy have none, and `rom` predicts none."""
    rows = [
        recovery("s0", "migrate"),
        recovery("s1", "migrate", low_s=None, high_s=None),
        recovery("s2", "migrate", low_s=0.1, high_s=0.3),
    ]
    report = build_report([stream(0, 0.5, 1.3)], None, rows, [KILL], {})
    without = build_report([stream(0, 0.5, 1.3)], None, rows[:2], [KILL], {})

    assert report["recovery_options"]["migrate"]["intervals"] == 1
    assert "100% of 1" in in_terminal(report)
    assert "interval" not in in_terminal(without)


def test_a_recovery_is_listed_with_its_interval_and_the_wait_before_it() -> None:
    """A row has the predicted and the real cost, and how long the client waited besides until the
    death was known. Before a second decision it waited for the first.
    """
    more = {"low_s": 0.024, "high_s": 0.066, "predicted_s": 0.04}
    rows = [
        recovery("s0", "migrate", real_s=0.041, gap_s=0.221, **more),
        recovery("s1", "migrate", real_s=None, gap_s=None),
        recovery("s1", "recompute", 1.1, real_s=0.02, gap_s=0.9, **more),
    ]
    report = build_report([stream(0, 0.8, 0.9, 1.3)], None, rows, [KILL], {})

    assert [row["undecided_s"] for row in report["recovery_rows"]] == [0.18, None, None]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", render_html(report))
    at = cells.index("24.0 - 66.0 ms")
    assert cells[at + 1 : at + 4] == ["41.0 ms", "x1.02 longer", "180.0 ms"]
    assert "x2 shorter" in cells
    assert "until the death was known 180.0 / 180.0 ms" in " ".join(in_terminal(report).split())


def test_a_recovery_that_was_decided_twice_is_one_wait() -> None:
    """The client sees a pause, not the attempts within it."""
    faulted = [stream(0, 0.8, 0.9, 1.3), stream(1, 0.7, 0.8, 1.4)]
    recoveries = [
        recovery("s0", "migrate"),
        recovery("s0", "recompute", 1.1),
        recovery("s1", "migrate"),
    ]

    report = build_report(faulted, faulted, recoveries, [KILL], {})

    assert report["gap_s"]["p50"] == pytest.approx(0.5)


def test_a_stream_without_a_token_has_no_pause() -> None:
    """Its wait is in TTFT, as on the live page."""
    faulted = [stream(0, 0.8, 0.9, 1.3), stream(1, 1.91, 1.92)]
    recoveries = [recovery("s0", "migrate"), recovery("s1", "start", produced_tokens=0)]

    report = build_report(faulted, faulted, recoveries, [KILL], {})

    assert report["gap_s"]["max"] == pytest.approx(0.4)
    assert report["recovery_rows"][1]["real_s"] is not None


def test_times_of_another_clock_are_a_bug() -> None:
    """Wall-clock times would put every recovery after the run and its wait nowhere."""
    with pytest.raises(AssertionError, match="start of the run"):
        build_report(
            [stream(0, 1.0)], [stream(0, 1.0)], [recovery("s0", "migrate", 1.7e9)], [KILL], {}
        )


def test_only_recoveries_away_from_the_victim_after_the_fault_belong_to_it() -> None:
    """Two faults do not share their recoveries."""
    faulted = [stream(0, 0.5, 1.3, 2.5)]
    recoveries = [recovery("s0", "migrate", 0.6), recovery("s0", "migrate", 2.1, **{"from": "d1"})]

    faults = [KILL, {**KILL, "at_s": 2.0, "whom": "d1"}]
    report = build_report(faulted, faulted, recoveries, faults, {})

    assert [fault["recoveries"] for fault in report["faults"]] == [0, 1]
    assert [fault["tfs_s"] for fault in report["faults"]] == [None, pytest.approx(0.5)]


def test_recoveries_from_an_instance_belong_to_the_last_fault_that_hit_it() -> None:
    """A fault that no stream was recovered from has no TFS, though the instance is hit again."""
    faulted = [stream(0, 0.5, 1.3, 2.5, 3.6), stream(1, 2.8, 3.5)]
    recoveries = [recovery("s0", "migrate", 2.1), recovery("s1", "migrate", 3.1)]
    faults = [{**KILL, "at_s": at_s} for at_s in (1.0, 2.0, 3.0, 3.0)]

    rows = build_report(faulted, faulted, recoveries, faults, {})["faults"]

    assert [fault["recoveries"] for fault in rows] == [0, 1, 1, 1]
    near = pytest.approx
    assert [fault["tfs_s"] for fault in rows] == [None, near(0.5), near(0.5), near(0.5)]


def test_a_fault_has_the_time_until_the_last_of_its_victims_was_noticed() -> None:
    """A later fault of an instance has its later losses; a fault without a death has no time."""
    node = {**KILL, "whom": "n0", "instances": ["p0", "d0"]}
    slow, again = {**KILL, "whom": "d1"}, {**KILL, "at_s": 3.0}
    seen = (("d9", 1.01), ("d0", 1.02), ("p0", 1.05), ("d0", 2.0), ("d0", 3.5))
    losses = [{"instance": name, "at_s": at_s} for name, at_s in seen]

    report = build_report([stream(0, 4.0)], None, [], [node, slow, again], {}, losses=losses)

    assert [fault["notice_s"] for fault in report["faults"]] == [
        pytest.approx(0.05),
        None,
        pytest.approx(0.5),
    ]
    assert re.search(r"death noticed after +50\.0 ms, 500\.0 ms\n", in_terminal(report))
    assert "noticed" not in in_terminal(exact_report())


def test_the_page_begins_with_the_death_and_folds_the_measures_of_papers() -> None:
    """Recoveries may outnumber the streams that were decoding."""
    page = render_html(exact_report())

    assert "kill d0: 2 streams were decoding there, 1 on their way there; 3 needed a" in page
    assert re.search(r"<summary>Measures of papers.*TFS.*300\.0 ms", page)


def test_a_note_explains_streams_of_a_victim_that_needed_no_recovery() -> None:
    """The victim of a fault has more streams than it works on."""
    report, equal = exact_report(), exact_report()
    report["faults"][0]["phases"] = {"decode": 2, "prefill": 8}

    shown, page = " ".join(in_terminal(report).split()), render_html(report)

    words = "10 streams were bound to a victim, and 3 needed a recovery: a stream that the victim"
    assert words in shown
    assert words in page
    assert "streams that needed a recovery 3 " in shown
    assert "were bound to a victim, and" not in in_terminal(equal)


def test_each_option_that_ends_in_a_token_has_its_own_colour() -> None:
    """Bars of two options are never alike."""
    assert {*OPTION_COLORS} == {*Option} - {Option.ABORT}
    for scheme in (0, 1):
        assert len({colors[scheme] for colors in OPTION_COLORS.values()}) == len(OPTION_COLORS)


def test_costs_are_listed_where_both_are_known() -> None:
    """A recovery that never ended has no real cost."""
    assert [*exact_report()["recovery_options"]] == ["migrate", "recompute"]


@pytest.mark.parametrize("report", [exact_report(), broken_report()], ids=["exact", "broken"])
def test_the_file_is_json_and_holds_the_report(tmp_path: Path, report: Report) -> None:
    """The file has the report that was built."""
    write_report(report, tmp_path / "new" / "report.json")

    assert json.loads((tmp_path / "new" / "report.json").read_text()) == report


def test_the_terminal_table_shows_verdict_and_both_runs() -> None:
    """Data are text in it, never markup."""
    report = exact_report()
    report["faults"][0]["whom"] = "[red]d0[/]"

    shown = in_terminal(report)

    assert "Exact: 3 of 3 streams" in shown
    assert "kill [red]d0[/] at 1.00 s" in shown
    assert re.search(
        r"kill \[red\]d0\[/\] at 1.00 s.*\nbound to it: decoding / not yet +2 / 1", shown
    )
    assert re.search(r"goodput \(TTFT 2 s, TPOT 0.2 s\) +2 \([0-9.]+/s\)", shown)
    assert re.search(r"pause of a stream p50 / longest +500\.0 / 600\.0 ms", shown)
    assert "TFS" not in shown


def test_choices_are_told_in_terminal_and_page_as_text() -> None:
    """A recovery belongs to the last fault of the instance that it left."""
    costs = [{"option": "migrate", "total_s": 0.1}, {"option": "recompute", "total_s": 0.4}]
    rows = [recovery("s0", "migrate", estimates=costs, source="<p0>")]
    faulted = [stream(0, 0.8, 0.9, 1.3, 1.4)]

    report = build_report(faulted, None, rows, [KILL], {}, proxy={"policy": "auto"})
    fixed = build_report(faulted, None, rows, [KILL], {}, proxy={"policy": "always_migrate"})

    (line,) = report["choices"]
    assert fixed["choices"] == []
    assert line.startswith("kill d0: migrate for 1")
    assert line.endswith("<p0> still had KV; predicted 100 ms, recompute 400 ms.")
    assert line in " ".join(in_terminal(report).split())
    assert escape(line) in render_html(report)


def test_a_busy_machine_and_a_late_client_are_notes_and_no_warnings() -> None:
    """Neither is a failure of what was measured; a calm machine is not mentioned."""
    report = exact_report()
    calm = in_terminal(report)
    report["machine"]["cpu_pressure"] = 0.98
    report["runs"]["fault"] |= {"late": 2}

    shown, page = " ".join(in_terminal(report).split()), render_html(report)

    assert "busy" not in calm
    assert "processes waited for a CPU in 98% of the time" in shown
    assert "sent 2 of 3 requests more than 50 ms late" in shown
    assert page.count("<p class=note>") == 2
    assert "<p class=warning>" not in page


def test_the_highest_cpu_pressure_of_the_runs_counts() -> None:
    """Either run makes the comparison doubtful."""
    report = build_report([], [], [], [], {}, cpu_pressures=[0.2, None, 0.9])

    assert report["machine"]["cpu_pressure"] == 0.9


def test_the_terminal_table_fits_into_80_columns() -> None:
    """Nothing of the numbers is broken over lines, whatever was chosen how often."""
    report = exact_report()
    report["recoveries"] = {"migrate": 15, "recompute": 14}
    for run in report["runs"].values():
        run |= {"streams": 300, "slo_met": 300, "goodput_per_s": 15.45}
    for costs in report["recovery_options"].values():
        costs |= {"predicted_s": 0.9999, "real_s": 0.8888, "longer": 300, "shorter": 299}
        costs |= {"off": {"p50": 1.234, "p95": 12.34}, "intervals": 599, "inside": 599}

    lines = [line.rstrip() for line in in_terminal(report, width=80).splitlines()]

    assert max(map(len, lines)) <= 80
    assert any(
        line.startswith("recoveries ") and "15 migrate, 14 recompute" in line for line in lines
    )
    assert any(
        line.startswith("migrate: predicted / real cost") and "999.9 / 888.8 ms" in line
        for line in lines
    )


def test_many_reasons_are_a_list_under_a_short_headline() -> None:
    """A headline of ten lines is not read; and every reason is there."""
    report = broken_report()

    page = render_html(report)

    assert "<h1>Not exact.</h1>" in page
    assert page.count("<li>") == len(report["reasons"]) > 1


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key in ("href", "src", "xlink:href"):
                self.links.append(value or "")


def parsed(page: str) -> _Page:
    parser = _Page()
    parser.feed(page)
    return parser


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    """No script, no image, no font, no link away; every reference is to an id of the page, and ids
    are unique.
    """
    write_html(exact_report(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    seen = parsed(page)

    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert "@import" not in page
    assert all(link.startswith("#") and link[1:] in seen.ids for link in seen.links)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(seen.ids)
    assert "url(http" not in page
    assert len(seen.ids) == len(set(seen.ids))
    assert seen.tags.count("svg") == 1


def test_text_from_data_is_escaped_in_the_page() -> None:
    """Error messages, ids and settings come from elsewhere."""
    report = broken_report()
    report["faults"] = [{**KILL, "whom": "<b>$d_0$</b>", "recoveries": 0, "tfs_s": None}]
    report["recovery_rows"] = [{**recovery("<i>s</i>", "migrate"), "index": None, "pause_s": None}]

    page = render_html(report)

    assert "<script" not in page
    assert "<b>$d" not in page
    assert "<i>" not in page
    assert "&lt;b&gt;$d_0$&lt;/b&gt;" in page
    assert "Not exact" in page


def test_both_colour_schemes_reach_the_plots() -> None:
    """Plots are drawn with the page's variables, not with fixed colours."""
    page = render_html(exact_report())
    plots = page[page.index("<svg") :]

    assert "prefers-color-scheme: dark" in page
    assert "var(--migrate)" in plots
    assert not re.findall(r"#[0-9a-f]{6}\b(?!\))", plots.replace('href="#', ""))


@pytest.fixture
def kept(tmp_path: Path) -> list[Path]:
    """Two runs as `kvrs lab replay` keeps them; the second took twice as long."""
    paths = [tmp_path / "auto", tmp_path / "r$o$m <b>"]
    for path, report in zip(paths, (exact_report(), broken_report()), strict=True):
        write_report(report, path / "report.json")
    return paths


def test_a_report_is_shown_again(kept: list[Path]) -> None:
    """From report.json alone, the same table."""
    result = CliRunner().invoke(app, ["lab", "report", str(kept[0])])

    assert result.exit_code == 0, result.output
    assert "Exact: 3 of 3 streams" in result.output


def test_reports_in_80_columns_keep_the_names_of_their_rows(
    kept: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are told apart by them; a value that is too wide goes over several lines."""
    names = [tmp_path / f"a-directory-with-a-long-name-{number}" for number in range(2)]
    for path, name in zip(kept, names, strict=True):
        path.rename(name)
    monkeypatch.setenv("COLUMNS", "80")

    narrow = CliRunner().invoke(app, ["lab", "report", *map(str, names)]).output
    monkeypatch.delenv("COLUMNS")
    piped = CliRunner().invoke(app, ["lab", "report", *map(str, names)]).output

    assert "streams completed" in narrow
    assert "recoveries" in narrow
    assert "…" not in narrow + piped
    assert all(name.name in piped.splitlines()[0] for name in names)


def test_a_report_that_lacks_what_the_table_shows_is_named(kept: list[Path]) -> None:
    """Files come from outside: one line, no traceback."""
    report = json.loads((kept[0] / "report.json").read_text())
    del report["gap_s"]
    write_report(report, kept[0] / "report.json")

    result = CliRunner().invoke(app, ["lab", "report", str(kept[0])])

    assert isinstance(result.exception, ReportError)
    assert "lacks what a table shows: 'gap_s'" in str(result.exception)
