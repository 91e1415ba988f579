"""The decisions of an event log under another setting."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicyName, PolicySettings
from kvrs.core.event_log import LogEntry, read
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.together import predict
from kvrs.errors import ConfigError, LogError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs_lab.explain import replayed
from tests.core.policy_harness import instance_up
from tests.core.recorded_incident import POLICY, Recorder, Rough, incident

STREAMS = A, B = StreamId("A"), StreamId("B")
MIGRATE, RECOMPUTE = "migrate to d1 from p0 [0, 62)", "recompute to d1"


def death(off: float = 1.0, again: float = 1.0, policy: PolicySettings = POLICY) -> list[str]:
    """Two streams of 1,000 tokens decode at d0, which dies. KV of both is at p0, and a token takes
    2.5 us on the link and 1 ms to compute, so both migrate to d1. They take their prediction, times
    `off` and `again`.
    """
    recorder = Recorder(policy, backup=BackupSettings(mode=BackupMode.OFF))
    for name in ("p0", "d0"):
        recorder.handle(instance_up(name))
    recorder.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 8.192e8))
    for stream in STREAMS:
        recorder.handle(ev.StreamArrived(stream, 1000))
        recorder.handle(ev.PrefillDone(stream, 1, 1000))
        recorder.handle(ev.StreamResumed(stream, 1))
    recorder.handle(instance_up("d1"))
    recorder.handle(ev.InstanceLost(InstanceId("d0"), 1, "killed", {A: 7, B: 1}))
    decided = recorder.handle(ev.TimerFired())
    made = [each for each in decided if isinstance(each, act.Recovered)]
    assert [each.stream for each in made] == [A, B]
    waited_s = 0.0
    real_s = {A: predicted_s(recorder, A) * off, B: predicted_s(recorder, B) * again}
    for stream in sorted(STREAMS, key=real_s.__getitem__):
        recorder.handle(ev.StreamResumed(stream, 2), after_s=real_s[stream] - waited_s)
        waited_s = real_s[stream]
    for stream in STREAMS:
        recorder.handle(ev.StreamEnded(stream, 2))
    return recorder.lines


def predicted_s(recorder: Recorder, name: StreamId) -> float:
    """The predicted cost of a stream's recovery, beside the others of the last event."""
    copied = deepcopy(recorder.policy)
    predict(copied.state)
    attempt = copied.streams[name].attempt
    if attempt.predicted is None:  # The policy predicts none.
        return 0.01
    return attempt.predicted.seconds


def asked(tmp_path: Path, lines: list[str], *options: str) -> str:
    """The output of the command for a log of these lines."""
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(lines) + "\n")
    command = ["lab", "explain", "--replay", str(path), *options]
    result = CliRunner(env={"COLUMNS": None}).invoke(app, command)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def found(tmp_path: Path, lines: list[str], setting: str) -> dict[str, Any]:
    """The only incident of a log, with its decisions under a setting."""
    document = json.loads(asked(tmp_path, lines, "--set", setting, "--json"))
    (only,) = document["incidents"]
    assert isinstance(only, dict)
    return only


def test_an_incident_is_decided_under_another_setting(tmp_path: Path) -> None:
    """Each decision, as it was, what it took, and the other one, from the same state: there the
    second victim would not have waited for the first.
    """
    only = found(tmp_path, death(), "policy.name=always_recompute")

    assert only["why_not"] is None
    assert [row["decision"] for row in only["decisions"]] == [MIGRATE, MIGRATE]
    for row in only["decisions"]:
        assert row["real_s"] == pytest.approx(row["predicted_s"])
        assert row["low_s"] < row["real_s"] < row["high_s"]
    others = [(row["other_decision"], row["other_predicted_s"]) for row in only["decisions"]]
    (at_d1, first_s), (at_p0, second_s) = others
    assert (at_d1, at_p0) == (RECOMPUTE, "recompute at p0, to d1")
    assert first_s == pytest.approx(1.009)  # A millisecond per token of the history, and two calls.
    assert second_s > 1.001  # With the hand-off.


def test_intervals_are_those_of_the_log(tmp_path: Path) -> None:
    """The log has the one of each recovery; that of the other decision is as wide, because the
    policy knew as much then.
    """
    lines = death()
    settled = {
        action.stream: action
        for each in read(lines)
        if isinstance(each, LogEntry)
        for action in each.actions
        if isinstance(action, act.Settled)
    }

    only = found(tmp_path, lines, "policy.name=always_recompute")

    for row in only["decisions"]:
        recorded = settled[row["stream"]]
        for key in ("predicted_s", "low_s", "high_s", "real_s"):
            assert row[key] == getattr(recorded, key)
        width = row["other_high_s"] / row["other_low_s"]
        assert width == pytest.approx(row["high_s"] / row["low_s"])


def test_both_sides_are_predicted_for_the_whole_event(tmp_path: Path) -> None:
    """Two hand-offs share a link: each takes the time of both, though each alone would not."""
    lines = death()
    alone = {
        action.stream: action.predicted_s
        for each in read(lines)
        if isinstance(each, LogEntry)
        for action in each.actions
        if isinstance(action, act.Recovered)
    }

    only = found(tmp_path, lines, "policy.name=auto")

    other_s = {row["stream"]: row["other_predicted_s"] for row in only["decisions"]}
    assert other_s == {row["stream"]: row["predicted_s"] for row in only["decisions"]}
    assert max(other_s[each] / alone[each] for each in STREAMS) > 1.2


def test_a_policy_without_predicted_times_has_no_sum(tmp_path: Path) -> None:
    """`rom` chooses by other numbers: its decisions are shown, without times."""
    only = found(tmp_path, death(), "policy.name=rom")
    text = asked(tmp_path, death(), "--set", "policy.name=rom")

    assert None not in {row["other_decision"] for row in only["decisions"]}
    assert {row["other_predicted_s"] for row in only["decisions"]} == {None}
    assert "decisions would be others; no times would be predicted\n" in text


def test_a_log_without_intervals_shows_no_other_decision(tmp_path: Path) -> None:
    """It does not tell whether its predictions came true."""
    rom = death(policy=POLICY.model_copy(update={"name": PolicyName.ROM}))

    only = found(tmp_path, rom, "policy.name=auto")

    said = "its predictions have no intervals: those of rom and of older logs have none"
    assert only["why_not"] == said
    assert {row["other_decision"] for row in only["decisions"]} == {None}


def test_the_same_setting_decides_the_same(tmp_path: Path) -> None:
    """A copy of the policy loses nothing that the policy had learned, and changes nothing of it."""
    only = found(tmp_path, death(), "policy.name=auto")

    for row in only["decisions"]:
        assert (row["other_decision"], row["other_predicted_s"]) == (
            row["decision"],
            row["predicted_s"],
        )


def test_the_sentence_has_the_sums(tmp_path: Path) -> None:
    """For people: how many decisions would be others, and what they would take."""
    only = found(tmp_path, death(), "policy.name=always_recompute")
    other_s = sum(row["other_predicted_s"] for row in only["decisions"])

    text = asked(tmp_path, death(), "--set", "policy.name=always_recompute")

    assert "d0 died: killed; 2 streams, all back; still down\n" in text
    said = "policy.name=always_recompute: 2 of 2 decisions would be others; "
    assert said in text
    assert f"{other_s:.3g} s would be predicted" in text
    assert RECOMPUTE in text


def test_a_stream_that_would_wait_is_counted(tmp_path: Path) -> None:
    """With one slot the second victim waits for it: the sum of the first alone is no gain."""
    text = asked(tmp_path, death(), "--set", "policy.slots_max=1")

    assert "0 of 2 decisions would be others, and 1 would wait first, which is in no sum; " in text


@pytest.mark.parametrize(
    ("off", "again", "within"),
    [
        pytest.param(1.5, 1 / 1.5, 2, id="within"),
        pytest.param(1.0, 3.0, 1, id="one too long"),
        pytest.param(1 / 3, 1 / 3, 0, id="both too short"),
    ],
)
def test_nothing_is_said_where_predictions_were_wrong(
    tmp_path: Path, off: float, again: float, within: int
) -> None:
    """The costs under another setting are predictions by the same policy: they count only where the
    real costs are in the predicted intervals.
    """
    lines = death(off, again)

    only = found(tmp_path, lines, "policy.name=always_recompute")

    others = [row["other_decision"] for row in only["decisions"]]
    others += [row["other_predicted_s"] for row in only["decisions"]]
    if within == 2:
        assert None not in others
        return
    assert set(others) == {None}
    said = f"{within} of 2 real costs are in their predicted intervals, and 80% must be"
    assert only["why_not"] == said
    text = asked(tmp_path, lines, "--set", "policy.name=always_recompute")
    assert f"policy.name=always_recompute: not shown: {said}\n" in text
    assert MIGRATE in text
    assert RECOMPUTE not in text


def test_an_incident_without_measured_recoveries_shows_no_other_decision(tmp_path: Path) -> None:
    """A log that ends too early, or whose client left, tells nothing of its predictions."""
    lines = death()[:-4]  # Before the first token.

    only = found(tmp_path, lines, "policy.name=always_recompute")

    assert only["why_not"] == "no recovery was measured"
    assert {row["other_decision"] for row in only["decisions"]} == {None}


def test_a_log_of_another_policy_shows_no_other_decision(tmp_path: Path) -> None:
    """The state before its decisions is not the one in which they were made."""
    lines = death()
    lines[0] = lines[0].replace('"name": "auto"', '"name": "always_recompute"')
    number = next(n for n, line in enumerate(lines, 1) if '"kind": "Recovered"' in line)

    only = found(tmp_path, lines, "policy.name=rom")

    assert only["why_not"] == f"this version of kvrs decides otherwise from line {number} on"


@pytest.mark.parametrize("seed", [5, 6])
def test_decisions_of_random_incidents_are_the_same_under_the_same_settings(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the cluster came to its state: a copy of the policy decides as the policy does. The
    setting is the one that these logs have throughout. Their real costs are no recovery's.
    """
    monkeypatch.setattr(replayed, "LEAST_SHARE", 0.0)

    incidents = replayed.compared(
        Rough(seed).run(400), {"assumed_link_bytes_per_s": POLICY.assumed_link_bytes_per_s}
    )

    decisions = [each for one in incidents if not one.why_not for each in one.decisions]
    assert len(decisions) > 20
    predicted = 0
    for each in decisions:
        assert each.other is not None
        assert each.other.action == each.made.action
        if (settled := each.made.settled) is not None and settled.low_s is not None:
            assert each.predicted is not None
            assert each.predicted.seconds == settled.predicted_s
            predicted += 1
    assert predicted > 0


def test_a_log_without_incidents_says_so(tmp_path: Path) -> None:
    """It is no error."""
    text = asked(tmp_path, death()[:5], "--set", "policy.name=rom")

    assert text.startswith("no incident in which a stream was recovered\n")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        pytest.param("policy.name=fast", "policy.name: got 'fast'; .*'rom' or 'auto'", id="name"),
        pytest.param("policy.slots_max=0", "policy.slots_max: got 0; .*at least 1", id="range"),
        pytest.param("policy.slots_max={", "got 'policy.slots_max={'; not valid YAML", id="yaml"),
        pytest.param("policy.nam=rom", "got 'policy.nam=rom'; .*one is policy.name$", id="key"),
        pytest.param("policy.name", "got 'policy.name'; allowed: KEY=VALUE", id="no value"),
        pytest.param(
            "policy.recovery.gather_s=1",
            "got 'policy.recovery.gather_s=1'; allowed: .* policy.slots_max",
            id="before the decision",
        ),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, setting: str, said: str) -> None:
    """With its value and what is allowed; a setting that no decision reads would change nothing."""
    with pytest.raises(ConfigError, match=f"^--set: {said}"):
        asked(tmp_path, incident(), "--set", setting)


def test_options_of_the_other_question_are_refused(tmp_path: Path) -> None:
    """A log has all that they say; and without a log there is nothing to decide again."""
    with pytest.raises(ConfigError, match=r"--bandwidth: given with --replay, .* --replay, --set$"):
        asked(tmp_path, incident(), "--set", "policy.name=rom", "--bandwidth", "25Gbit/s")
    with pytest.raises(ConfigError, match=r"--set: missing; allowed: policy.KEY=VALUE"):
        asked(tmp_path, incident())
    command = ["lab", "explain", "--set", "policy.name=rom"]
    refused = CliRunner().invoke(app, command).exception
    assert isinstance(refused, ConfigError)
    assert "--set: given without --replay" in str(refused)


def test_a_log_that_begins_in_the_middle_is_refused(tmp_path: Path) -> None:
    """The policy's state depends on all earlier events."""
    lines = incident()
    lines[0] = lines[0].replace('"part": 1', '"part": 2')

    with pytest.raises(LogError, match=r"events\.jsonl: line 1: got part 2; allowed: part 1"):
        asked(tmp_path, lines, "--set", "policy.name=rom")


def test_the_incidents_are_those_of_the_log(tmp_path: Path) -> None:
    """Each decision of a death or failure has its line, so `kvrs incidents` shows more of it."""
    lines = incident()
    made = {
        each.line
        for each in read(lines)
        if isinstance(each, LogEntry)
        and any(isinstance(action, act.Recovered) for action in each.actions)
    }

    document = json.loads(asked(tmp_path, lines, "--set", "policy.name=rom", "--json"))

    assert {row["line"] for one in document["incidents"] for row in one["decisions"]} == made
