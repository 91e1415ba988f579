"""`kvrs lab explain` at the command line."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.cli.incidents import incidents, show_incidents
from kvrs.core.event_log import LogEntry, event_line, read
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.errors import ConfigError, LogError
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles import catalog
from kvrs.profiles.guess import guessed_table
from kvrs.protocol.instance import ReformingReport
from kvrs_lab.explain.questions import parse_bandwidth
from tests.core.policy_harness import TABLE, instance_up, load
from tests.core.recorded_incident import A, Recorder, incident

SEED = (
    *("--profile", "opt-13b-a100-kvrs-seed", "--prompt-tokens", "1477"),
    *("--bandwidth", "25Gbit/s"),
)


def explained(*options: str) -> str:
    """The output of `kvrs lab explain` with these options."""
    result = CliRunner(env={"COLUMNS": None}).invoke(app, ["lab", "explain", *options])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def as_json(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(explained(*options, "--json"))
    return found


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25Gbit/s", 3.125e9),
        ("3.1GB/s", 3.1e9),
        ("800 Mbps", 1e8),
        ("1e3kB/s", 1e6),
        ("1GiB/s", 2.0**30),
        ("5B/s", 5.0),
        ("h100-dgx-inter-node", 34.4e9),
    ],
)
def test_bandwidths_have_units_or_are_links(text: str, bytes_per_s: float) -> None:
    """Bits and bytes are distinguished; a bare number is refused."""
    assert parse_bandwidth(text, "--bandwidth") == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "25", "25G", "0Gbit/s", "-1GB/s", "fastGB/s", "1e999GB/s", "25Gbit"]
)
def test_a_bandwidth_without_a_unit_is_refused(text: str) -> None:
    """Option, value, what is allowed."""
    with pytest.raises(ConfigError, match=r"--bandwidth: got .*; allowed: .*25Gbit/s"):
        parse_bandwidth(text, "--bandwidth")


def test_tables_show_the_choice_and_where_it_would_change() -> None:
    """The seed's example, in plain text."""
    text = explained(*SEED)

    assert text.startswith("auto chooses split: next token after 0.0715 s; by others: migrate")
    assert "92 pages of the holder: 1,205.9 MB / 3.12 GB/s" in text
    assert "14.31 GB/s (114.5 Gbit/s)" in text
    (depth,) = (line for line in text.splitlines() if "hand_off_queue_depth" in line)
    assert depth.split()[1].startswith("4.47")  # 1.21 GB at 25 Gbit/s, 87 ms a request.


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        pytest.param(
            (), "recompute at target 0.0865 s, recompute at prefill instance 0.353 s", id="other"
        ),
        pytest.param(
            ("--prefix-cache",),
            "auto chooses recompute at target: next token after 0.0865",
            id="chosen",
        ),
    ],
)
def test_the_two_ways_to_recompute_have_names(more: tuple[str, ...], sentence: str) -> None:
    """The target and the prefill instance beside it can both compute the history."""
    options = as_json(*SEED, "--queue-depth", "3", *more)["answer"]["options"]

    assert sentence in explained(*SEED, "--queue-depth", "3", *more)
    places = [each["at"] for each in options if each["option"] == "recompute"]
    assert places == ["target", "prefill instance"]
    assert len([each for each in options if each["is_chosen"]]) == 1


def test_tables_and_json_have_the_same_facts() -> None:
    """People see every number that programs get."""
    text, found = explained(*SEED), as_json(*SEED)

    for option in found["answer"]["options"]:
        assert f"{option['total_s']:.4g}" in text
        assert all(term["how"] in text for term in option["terms"])
    for name in (*found["profile"], *found["question"], *found["answer"]):
        assert name in text
    assert found["profile"]["source"] in text


def test_json_holds_question_and_answer() -> None:
    """For programs: a version, the profile's labels, the question and the answer."""
    profile = ("--profile", "llama-3.1-70b-h100-vllm-tp4")

    found = as_json(*profile, "--prompt-tokens", "8000", "--queue-depth", "2")

    assert (found["version"], found["profile"]["kind"], found["question"]["prompt_tokens"]) == (
        1,
        "estimated",
        8000,
    )
    assert found["question"]["queue_s"] == pytest.approx(2 * found["question"]["service_s"])
    assert {option["option"] for option in found["answer"]["options"]} == {"migrate", "recompute"}


@pytest.mark.parametrize(
    ("profile", "more", "options"),
    [
        pytest.param("llama-3.1-8b-h100-vllm-tp1", (), {"migrate", "recompute"}, id="vLLM"),
        pytest.param(
            "llama-3.1-8b-h100-vllm-tp1",
            ("--checkpoint-tokens", "4000"),
            {"migrate", "recompute", "restore"},
            id="vLLM with rows of agents",
        ),
        pytest.param(
            "llama-3.1-8b-h100-vllm-tp1",
            ("--fetches-pages",),
            {"migrate", "recompute", "split"},
            id="vLLM with more abilities",
        ),
        pytest.param(
            "opt-13b-a100-kvrs-seed", (), {"migrate", "recompute", "split"}, id="another engine"
        ),
        pytest.param(
            "opt-13b-a100-kvrs-seed",
            ("--prefix-cache",),
            {"migrate", "recompute"},
            id="another engine as vLLM",
        ),
    ],
)
def test_a_profiles_engine_has_the_abilities_of_its_backend(
    profile: str, more: tuple[str, ...], options: set[str]
) -> None:
    """Nothing is recommended that the engine cannot do: vLLM splits nothing, and fetches nothing
    but rows. Its migrations compute in a prefix cache and hand the whole history off.
    """
    asked = ("--profile", profile, "--prompt-tokens", "8000", "--bandwidth", "25Gbit/s", *more)

    answer = as_json(*asked)["answer"]

    assert {each["option"] for each in answer["options"]} == options
    assert {*answer["by_policy"].values()} <= options
    (migrated,) = (each for each in answer["options"] if each["option"] == "migrate")
    assert (migrated["at"] == "holder") is ("split" not in options)


def test_every_profile_of_vllm_has_the_abilities_of_vllm() -> None:
    """Those that come with kvrs, and those that `kvrs profile --url` measures, have its name."""
    for name in catalog.names():
        question = as_json("--profile", name, "--prompt-tokens", "800")["question"]
        assert question["prefix_cache"] is ("vllm" in name)


def test_the_source_of_a_profile_makes_no_table_wide() -> None:
    """It is a text of several sentences, which stands above the tables."""
    text = explained("--profile", "llama-3.1-8b-h100-vllm-tp1", "--prompt-tokens", "8000")

    table = text[text.index("\nprofile\n") : text.index("\nquestion\n")]
    assert max(map(len, table.splitlines())) < 100
    assert "\nsource of the profile: scaled by kvrs from Qwen3-14B" in text


def test_without_a_profile_every_model_has_its_break_even() -> None:
    """The rate at which KV is loaded in the time in which it is computed; the same model needs more
    of a faster GPU.
    """
    asked = as_json("--prompt-tokens", "8000")
    rows = {row["profile"]: row for row in asked["break_even"]}

    assert {*rows} == {*catalog.names()}
    for row in rows.values():
        loaded_s = row["kv_bytes"] / row["even_bytes_per_s"]
        assert loaded_s == pytest.approx(row["prefill_s"])
        assert row["load_s at 100Gbit/s"] == pytest.approx(row["kv_bytes"] / 12.5e9)
    a100, h100 = (f"llama-3.1-8b-{gpu}-vllm-tp1" for gpu in ("a100", "h100"))
    assert rows[a100]["kv_bytes"] == rows[h100]["kv_bytes"] == 8000 * 131_072
    assert rows[a100]["even_bytes_per_s"] < rows[h100]["even_bytes_per_s"]
    text = explained("--prompt-tokens", "8000")
    assert text.startswith("loading the KV of 8,000 tokens is faster than computing it above ")
    assert h100 in text
    with pytest.raises(ConfigError, match="--queue-depth: given without --profile, which does not"):
        explained("--prompt-tokens", "8000", "--queue-depth", "2")


def test_a_profile_that_is_none_is_named_by_its_option() -> None:
    """And the links and profiles that there are."""
    with pytest.raises(
        ConfigError, match=r"^--profile: got 'nope'; allowed: a path to a profile, or llama"
    ):
        explained("--profile", "nope", "--prompt-tokens", "1477")


def test_a_link_that_carries_nothing_has_no_crossover() -> None:
    """Infinity is no number of requests."""
    found = as_json(*SEED, "--bandwidth", "1e-320bit/s")

    assert found["answer"]["crossover"]["hand_off_queue_depth"] is None


def test_wrong_options_are_named_all_at_once() -> None:
    """One line each, with what is allowed."""
    with pytest.raises(ConfigError) as refused:
        explained(
            *SEED,
            *("--prompt-tokens", "1", "--checkpoint-tokens", "2"),
            *("--bandwidth", "quick", "--queue-depth", "-1"),
        )

    assert len(refused.value.faults) == 3


def test_a_checkpoint_is_an_option_of_the_command() -> None:
    """It adds the restore; an answer has both rules of hand-offs."""
    answer = as_json(*SEED, "--checkpoint-tokens", "1400")["answer"]

    found = {each["option"] for each in answer["options"]}
    assert found == {"migrate", "restore", "split", "recompute"}
    assert {each["how"] for each in answer["hand_offs"]} == {"rom", "auto"}


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def shown_log(path: Path, *arguments: str) -> tuple[bool, str]:
    result = CliRunner(env={"COLUMNS": None}).invoke(app, ["incidents", str(path), *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code == 0, result.stdout


def test_a_log_is_listed_and_run_again(tmp_path: Path) -> None:
    """Losses and decisions, with predicted and real cost."""
    same, text = shown_log(written(tmp_path / "events.jsonl", incident()))

    assert same
    assert re.search(r"^ *same +yes *$", text, re.MULTILINE)
    for words in (
        "d0",
        "killed",
        "to d1 from agent-n1 [",
        "reset [by peer]",
        "agent-n1",
        "recompute 0.",
    ):
        assert words in text


def test_a_log_shows_what_a_choice_was_charged_for_other_victims(tmp_path: Path) -> None:
    """Two victims with one target wait for each other's compute time there."""
    path = written(tmp_path / "events.jsonl", incident())
    records = list(read(path.read_text().splitlines()))
    happened = incidents(record for record in records if isinstance(record, LogEntry))

    _, text = shown_log(path)

    (first, *_) = happened[0].victims[A].decisions
    assert isinstance(first.action, act.Recovered)
    assert first.chosen is not None
    assert first.action.others == 1.0
    assert f"(+{first.chosen.at_target_s:.3g} for others)" in text


def test_a_log_shows_streams_that_stay(tmp_path: Path) -> None:
    """Where, and by which prediction."""
    recorder = Recorder()
    table = catalog.prefill_table("opt-13b-a100-kvrs-seed")
    for name in ("p0", "d0"):
        recorder.handle(instance_up(name, prefill=table))
    for event in (ev.StreamArrived(A, 1000), ev.PrefillDone(A, 1, 1000), ev.StreamResumed(A, 1)):
        recorder.handle(event)
    lost = ReformingReport(1, "reshard", 0.02, 1, [1], 0)
    recorder.handle(
        load("d0", reforming=lost, degree=1, full_degree=2, token_s=0.03, produced_tokens={A: 7})
    )
    recorder.handle(load("d0", degree=2, full_degree=2, token_s=0.03))
    recorder.handle(ev.StreamResumed(A, 1))

    _, text = shown_log(written(tmp_path / "events.jsonl", recorder.lines))

    assert "in_place at d0" in text
    assert "0.05 " in text
    assert "rank 1 of d0 lost: reshard; 1 stream, back" in text


def test_the_first_difference_of_a_log_is_named(tmp_path: Path) -> None:
    """Recorded by another policy, or tampered with."""
    lines = incident()
    number = next(n for n, line in enumerate(lines, 1) if '"kind": "Recovered"' in line)
    lines[0] = lines[0].replace('"name": "auto"', '"name": "always_recompute"')

    same, text = shown_log(written(tmp_path / "events.jsonl", lines))

    assert not same
    assert re.search(r"^ *same +no *$", text, re.MULTILINE)
    assert re.search(rf"^difference *\nline +{number} *$", text, re.MULTILINE)


def test_a_log_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: the same, with every estimate."""
    assert show_incidents(written(tmp_path / "events.jsonl", incident()), as_json=True)

    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["same"], found["difference"]) == (2, True, None)
    assert [each["subject"] for each in found["incidents"]] == ["d0", "d1", "p1", "agent-n1"]
    first = found["incidents"][0]["streams"][0]["decisions"][0]
    settled = first["settled"]
    assert settled["real_s"] > 0
    assert first["off"] == pytest.approx(settled["real_s"] / settled["predicted_s"])
    factor = settled["high_s"] / settled["predicted_s"]
    for each in first["options"]:
        assert each["high_s"] == pytest.approx(each["predicted_s"] * factor)
        assert each["low_s"] == pytest.approx(each["predicted_s"] / factor)
    assert {"step_s", "total_s", "first_page"} <= set(first["action"]["estimates"][0])


def test_a_log_begins_with_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One for each incident, in UTC where the log has it; a log without incidents says so, and for
    which time.
    """
    quiet = [incident()[0], *(event_line(at_s, ev.TimerFired(), []) for at_s in (3.0, 100.0))]
    lost = ev.InstanceLost(InstanceId("d0"), 1, "killed", {})
    timed = [*quiet, event_line(100.5, lost, [], wall_s=1_795_237_595.25)]

    _, text = shown_log(written(tmp_path / "events.jsonl", incident()))
    _, none = shown_log(written(tmp_path / "quiet.jsonl", quiet))
    _, utc = shown_log(written(tmp_path / "timed.jsonl", timed))

    first = "d0 died: killed; 2 streams, all back; still down"
    assert text.startswith(f"at 1.700 s  {first}\nat 2.200 s  d1 failed 1 attempt")
    assert none.startswith("no incidents in 97 s\n")
    assert utc.startswith("2026-11-21 05:06:35 UTC  d0 died: killed; no streams affected")


def test_incidents_of_an_instance_are_listed_alone(tmp_path: Path) -> None:
    """With their decisions and failures; the whole log is run again."""
    log = written(tmp_path / "events.jsonl", incident())

    same, text = shown_log(log, "d1")

    assert same
    assert text.startswith("at 2.200 s  d1 failed 1 attempt")
    assert "killed" not in text
    assert re.search(r"^ *same +yes *$", text, re.MULTILINE)
    allowed = r"got 'd9'; allowed: agent-n1, d0, d1, p1 \(those with an incident\)"
    with pytest.raises(ConfigError, match=allowed):
        shown_log(log, "d9")


@pytest.mark.parametrize(
    ("since", "first"),
    [
        ("2026-11-21", "2026-11-21 05:06:35 UTC  d0 died"),
        ("2026-11-21 05:06:35 UTC", "2026-11-21 05:06:35 UTC  d0 died"),
        ("2026-11-21 05:07", "2026-11-21 05:08:15 UTC  d1 died"),
        ("2026-11-21T06:07+01:00", "2026-11-21 05:08:15 UTC  d1 died"),
        ("2026-11-21 05:09", "no incidents since 2026-11-21 05:09:00 UTC\n"),
    ],
)
def test_incidents_since_a_time_are_listed_alone(tmp_path: Path, since: str, first: str) -> None:
    """In the form in which the sentences have it, or that of ISO 8601; UTC where it has no zone."""
    lines = incident()[:1]
    for at_s, name in ((0.25, "d0"), (100.25, "d1")):
        lost = ev.InstanceLost(InstanceId(name), 1, "killed", {})
        lines.append(event_line(at_s, lost, [], wall_s=1_795_237_595.0 + at_s))

    _, text = shown_log(written(tmp_path / "events.jsonl", lines), "--since", since)

    assert text.startswith(first)


@pytest.mark.parametrize(
    ("since", "said"),
    [
        ("10m", r"--since: got '10m'; allowed: a time in UTC, as '2026-11-30 03:57'"),
        ("2026-11-21", "--since: the log has no times of day; allowed: no --since"),
    ],
)
def test_a_time_that_selects_nothing_is_refused(tmp_path: Path, since: str, said: str) -> None:
    """The log of a simulator has no times of day."""
    with pytest.raises(ConfigError, match=said):
        shown_log(written(tmp_path / "events.jsonl", incident()), "--since", since)


def test_prompts_placed_by_prefix_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts that went past the shortest queue, with what both instances had of them."""
    p0, p1, b, c = InstanceId("p0"), InstanceId("p1"), StreamId("B"), StreamId("C")
    plan = act.Plan(InstanceId("d0"), p1)
    lines = [
        incident()[0],
        event_line(0.0, ev.StreamArrived(A, 1000), [act.Start(A, 1, plan, {p0: 0, p1: 900})]),
        event_line(1.0, ev.StreamArrived(b, 1000), [act.Start(b, 1, plan, {p1: 512})]),
        event_line(2.0, ev.StreamArrived(c, 9), [act.Start(c, 1, plan)]),
    ]

    show_incidents(written(tmp_path / "events.jsonl", lines), as_json=True)

    shown = json.loads(capsys.readouterr().out)
    assert shown["began_cached"] == 2
    assert shown["placed_by_prefix"] == [
        {
            "line": 2,
            "stream": A,
            "instance": p1,
            "cached_tokens": 900,
            "shortest_queue": p0,
            "cached_there": 0,
        }
    ]


@pytest.mark.parametrize(
    ("instance", "since", "streams"),
    [
        (None, None, [A, "B"]),
        ("d0", None, []),
        ("p0", None, [A]),
        ("p1", None, [A, "B"]),
        ("p2", None, ["B"]),
        (None, "2026-11-21 05:07", ["B"]),
        ("p0", "2026-11-21 05:07", []),
    ],
)
def test_placements_are_those_of_the_instance_and_since_the_time(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    instance: str | None,
    since: str | None,
    streams: list[str],
) -> None:
    """Either column may name the instance; the facts of the whole log stay."""
    p0, p1, p2 = map(InstanceId, ("p0", "p1", "p2"))
    plan = act.Plan(InstanceId("d0"), p1)
    lines = incident()[:1]
    for at_s, stream, other in ((0.25, A, p0), (100.25, StreamId("B"), p2)):
        start = act.Start(stream, 1, plan, {other: 0, p1: 900})
        arrived = ev.StreamArrived(stream, 1000)
        lines.append(event_line(at_s, arrived, [start], wall_s=1_795_237_595.0 + at_s))
    for name in ("d0", "p0", "p1", "p2"):
        lost = ev.InstanceLost(InstanceId(name), 1, "killed", {})
        lines.append(event_line(101.0, lost, [], wall_s=1_795_237_696.0))

    show_incidents(written(tmp_path / "events.jsonl", lines), instance, since, as_json=True)

    shown = json.loads(capsys.readouterr().out)
    assert [each["stream"] for each in shown["placed_by_prefix"]] == streams
    assert shown["began_cached"] == 2


def test_a_log_says_whose_prefill_times_were_guessed(tmp_path: Path) -> None:
    """Predictions of such a log rest on the size of the model; those of others on measurements."""
    guess = guessed_table(None)
    recorder = Recorder()
    for name in ("p0", "d0"):
        recorder.handle(instance_up(name, prefill=guess if name == "p0" else TABLE), 0.0)

    same, text = shown_log(written(tmp_path / "events.jsonl", recorder.lines))

    assert same
    assert "prefill times of p0 are a guess by the size of the model" in text
    assert "guess" not in shown_log(written(tmp_path / "others.jsonl", incident()))[1]


def test_a_log_that_goes_on_is_read_with_the_file_before_it(tmp_path: Path) -> None:
    """And without that one it is listed all the same, but cannot be run again."""
    lines = incident()
    second = [lines[0].replace('"part": 1', '"part": 2'), *lines[12:]]
    path = written(tmp_path / "events.jsonl", second)

    alone = shown_log(path)
    older = tmp_path / "events.jsonl.7.gz"
    older.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines[:12]).encode()))
    both = shown_log(path)

    assert alone[0]
    assert "not run again: the log begins in the middle" in alone[1]
    assert "killed" in alone[1]
    assert both[0]
    assert f"begins with {older.name}, 12 lines" in both[1]
    assert "not run again" not in both[1]


def test_many_older_files_are_named_in_one_line(tmp_path: Path) -> None:
    """A log may have hundreds."""
    lines = incident()
    headers = [lines[0].replace('"part": 1', f'"part": {part}') for part in (1, 2, 3)]
    path = written(tmp_path / "events.jsonl", [headers[2], *lines[12:]])
    for number, part in ((1, [headers[0], *lines[1:8]]), (2, [headers[1], *lines[8:12]])):
        text = "".join(f"{line}\n" for line in part)
        (tmp_path / f"events.jsonl.{number}.gz").write_bytes(gzip.compress(text.encode()))

    ok, text = shown_log(path)

    assert ok
    assert "begins with events.jsonl.1.gz to events.jsonl.2.gz, 13 lines" in text
    assert re.search(r"^ *same +yes *$", text, re.MULTILINE)


def test_what_a_killed_proxy_left_of_its_last_line_is_left_out(tmp_path: Path) -> None:
    """It was writing when it died."""
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(incident())[:-30])

    same, text = shown_log(path)

    assert same
    assert "events.jsonl ends within line 26, which is left out" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"\xff\n", "not text"),
        (b"", "line 1: no header"),
        (b"{}\n", "line 1: no header"),
        (b"{\n", "line 1: not JSON: .*; allowed: a proxy's event log"),
        (b"proxy:\n  port: 8000\n", r"allowed: a proxy's event log \(proxy.event_log names"),
    ],
)
def test_a_file_that_is_no_log_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    """With what is wrong, in one line."""
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(LogError, match=rf"events\.jsonl: .*{said}") as refused:
        show_incidents(path)

    assert "\n" not in str(refused.value)


def test_an_option_of_another_question_is_refused() -> None:
    """It would change nothing, as if the answer did not depend on it."""
    arguments = ["--prompt-tokens", "8000", "--queue-depth", "2"]
    result = CliRunner().invoke(app, ["lab", "explain", *arguments])

    assert isinstance(result.exception, ConfigError)
    unused = "--queue-depth: given without --profile, which does not use it; allowed: --json,"
    assert unused in str(result.exception)
