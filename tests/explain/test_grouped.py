"""`kvrs incidents`: groups of losses and decisions, and what another policy would have decided."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.cli.incidents import grouped, what_if
from kvrs.config.policy import PolicyName
from kvrs.core.event_log import LogEntry, read
from kvrs.errors import LogError
from tests.core.recorded_incident import A, B, Rough, incident


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(incident()) + "\n")
    return path


def test_what_happens_together_is_one_incident() -> None:
    """Every loss and every decision is in exactly one, in the order of the log."""
    entries = [record for record in read(incident()) if isinstance(record, LogEntry)]

    found = grouped(entries)

    assert [each.number for each in found] == [*range(1, len(found) + 1)]
    assert found[0].cause.startswith("d0 lost")
    assert {each.action.stream for each in found[0].decisions} >= {A, B}
    assert sum(len(each.decisions) for each in found) == 3


def test_the_policy_of_the_log_decides_the_same_again() -> None:
    """So a difference is one of the policies, not of what they knew."""
    records = [*read(incident())]
    decisions = [
        each
        for group in grouped(record for record in records if isinstance(record, LogEntry))
        for each in group.decisions
    ]

    same = what_if(records, PolicyName.AUTO, {each.line for each in decisions})
    other = what_if(records, PolicyName.ALWAYS_RECOMPUTE, {each.line for each in decisions})

    chosen = {(each.line, each.action.stream) for each in decisions}
    assert {(line, stream) for line, found in same.items() for stream in found} == chosen
    for each in decisions:
        again = same[each.line][each.action.stream]
        assert again["option"] == getattr(each.action, "option", None)
    options = {one["option"] for found in other.values() for one in found.values()}
    assert options <= {"recompute", None}


@pytest.mark.parametrize("seed", range(4))
def test_any_log_can_be_asked_what_if(seed: int) -> None:
    """Whatever happens, another policy has an answer, and the log's own history goes on."""
    records = [*read(Rough(seed).run(300))]
    found = grouped(record for record in records if isinstance(record, LogEntry))
    lines = {each.line for group in found for each in group.decisions}

    assert what_if(records, PolicyName.ROM, lines).keys() == lines


def test_the_list_and_one_in_detail_as_json(log: Path) -> None:
    """For scripts: cause, victims, options, prediction, outcome, regret, and the other policy."""
    asked = ["--what-if", "always_recompute", "--json"]
    listed = CliRunner().invoke(app, ["incidents", str(log), *asked])
    one = CliRunner().invoke(app, ["incidents", str(log), "1", *asked])

    found = json.loads(listed.stdout)["incidents"]
    (first,) = json.loads(one.stdout)["incidents"]
    assert found[0] == first
    assert first["decided_otherwise"] >= 1
    decision = first["decisions"][0]
    assert decision["instead"]["option"] == "recompute"
    assert decision["options"][decision["option"]] > 0
    assert {"predicted_s", "real_s", "regret_s", "outcome", "way"} <= decision.keys()


@pytest.mark.parametrize("arguments", [[], ["1"], ["--what-if", "rom"]])
def test_it_is_shown_in_a_terminal(log: Path, arguments: list[str]) -> None:
    """The victims are named in the detail, the cause everywhere."""
    shown = CliRunner().invoke(app, ["incidents", str(log), *arguments])

    assert shown.exit_code == 0
    assert "d0" in shown.stdout


def test_incidents_have_date_and_time(tmp_path: Path) -> None:
    """They are laid beside the records of others, which know nothing of the proxy's clock."""
    header, *lines = incident()
    entries = [json.loads(line) for line in lines]
    path = tmp_path / "events.jsonl"
    wall_s = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC).timestamp()
    for each in entries:
        each["wall_s"] = wall_s + each["at_s"] - entries[0]["at_s"]
    path.write_text("\n".join([header, *map(json.dumps, entries)]) + "\n")

    wide = CliRunner(env={"COLUMNS": "200"})
    shown = wide.invoke(app, ["incidents", str(path)]).output
    one = wide.invoke(app, ["incidents", str(path), "1", "--what-if", "rom"]).output
    found = json.loads(CliRunner().invoke(app, ["incidents", str(path), "--json"]).output)

    (first, *_) = found["incidents"]
    assert first["at_utc"].startswith("2026-03-04T05:06:")
    stamp = first["at_utc"].replace("T", " ").removesuffix("+00:00")  # In a table.
    assert stamp in shown
    assert stamp in one


def test_an_incident_that_is_not_there_is_named_with_what_is(log: Path) -> None:
    """An error says what is allowed."""
    shown = CliRunner().invoke(app, ["incidents", str(log), "9"])

    assert isinstance(shown.exception, LogError)
    assert "incident 9: there is none; allowed: 1 to" in str(shown.exception)
