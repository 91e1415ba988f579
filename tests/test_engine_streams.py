"""Streams recorded from the engines' own code: each file has its command and says what it must."""

import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from kvrs_testkit import engine_streams
from kvrs_testkit.engine_streams import DIRECTORY, Recording, read, recordings
from kvrs_testkit.engine_streams.scripts import DIFFERS, LEFT_OUT, SCRIPTS, Script
from kvrs_testkit.engine_streams.vocabulary import end_id, tokenizer
from kvrs_testkit.engine_streams.writing import INTO, spelled

ROOT = Path(__file__).parents[1]
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
SMALL_BYTES, ALL_BYTES = 40_000, 1_500_000
COMMAND = re.compile(
    r"(?:PYTHONPATH=(?P<path>\S+) )?\.venv-(?P<engine>\w+)/bin/python"
    r" -m (?P<module>\S+) (?P<name>\S+)"
)
BY_NAME = {script.name: script for script in SCRIPTS}
ALL = sorted(recordings())
Engine = Literal["vllm", "sglang"]


def test_each_script_has_a_recording_and_each_recording_a_script() -> None:
    assert sorted(BY_NAME) == ALL
    assert DIFFERS.keys() <= BY_NAME.keys()


def test_recordings_stay_small() -> None:
    sizes = {path.name: path.stat().st_size for path in DIRECTORY.iterdir()}

    assert not {name: size for name, size in sizes.items() if size > SMALL_BYTES}
    assert sum(sizes.values()) < ALL_BYTES


def test_a_file_without_its_command_is_refused(tmp_path: Path) -> None:
    """A file that no command makes cannot be made again for the next version of the engine."""
    fields = msgspec.json.decode((DIRECTORY / f"{ALL[0]}.json").read_bytes())
    del fields["command"]
    (tmp_path / "x.json").write_bytes(msgspec.json.encode(fields))

    with pytest.raises(msgspec.ValidationError, match="command"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize("name", ALL)
def test_the_command_of_a_file_makes_that_file(name: str) -> None:
    """The command names the recorder of the engine and the script of the file."""
    recording, script = recordings()[name], BY_NAME[name]
    found = COMMAND.fullmatch(recording.command)

    assert found is not None, recording.command
    assert found["path"] is None or (ROOT / found["path"]).is_dir()
    # Without an import, since that needs the engine.
    assert find_spec(found["module"]) is not None
    assert found["module"].endswith(f"record_{recording.engine}")
    assert (found["engine"], found["name"]) == (recording.engine, name)
    assert recording.version == VERSIONS[recording.engine]
    assert (recording.tool_parser, recording.reasoning_parser, recording.tool_choice) == (
        script.tool_parser,
        script.reasoning_parser,
        script.tool_choice,
    )
    parsers = {recording.tool_parser, recording.reasoning_parser} - {None}
    assert all(str(parser) in name for parser in parsers)


@pytest.mark.parametrize("name", ALL)
def test_the_ids_of_a_file_are_those_of_its_script(name: str) -> None:
    recording, written = recordings()[name], spelled(BY_NAME[name])

    assert recording.prompt_ids == written.prompt_ids
    assert recording.ids == written.ids
    assert recording.texts == written.texts
    assert "".join(recording.texts) == tokenizer().decode(recording.ids)
    assert recording.ids.index(end_id()) == len(recording.ids) - 1


@pytest.mark.parametrize("name", ALL)
def test_the_events_of_a_file_carry_all_ids_once(name: str) -> None:
    """Events are in the order of their tokens, and there are few of them."""
    recording = recordings()[name]
    events = [json.loads(event) for event in recording.data]
    outputs = -(-len(recording.ids) // recording.tokens_per_event)

    assert recording.covered == sorted(recording.covered)
    assert (recording.covered[0], recording.covered[-1]) == (0, len(recording.ids))
    if recording.engine == "vllm":
        assert recording.answer.ids == recording.ids
        assert len(events) == outputs + 1
        assert events[0]["prompt_token_ids"] == recording.prompt_ids
    else:
        assert "token_ids" not in "".join(recording.data)
        assert len(events) <= 4 * outputs + 2
    assert [event["choices"][0]["finish_reason"] is None for event in events] == [
        *[True] * (len(events) - 1),
        False,
    ]


def said_otherwise(recording: Recording, script: Script) -> list[str]:
    return [
        what
        for what, said, meant in (
            ("content", recording.content.strip(), script.content.strip()),
            ("reasoning", recording.reasoning.strip(), script.reasoning.strip()),
            ("calls", recording.calls, list(script.calls)),
        )
        if said != meant
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_stream_says_what_the_model_wrote_or_is_listed(name: str) -> None:
    """A fault of an engine's parser is recorded, but never without being listed."""
    recording, script = recordings()[name], BY_NAME[name]

    assert bool(said_otherwise(recording, script)) == (name in DIFFERS)
    assert len({call.id for call in recording.answer.calls}) == len(recording.calls)
    assert all(call.id for call in recording.answer.calls)


@pytest.mark.parametrize("name", ALL)
def test_a_whole_answer_ends_as_its_stream(name: str) -> None:
    whole = json.loads(bytes(recordings()[name].whole))

    assert whole["finish_reason"] == recordings()[name].finish_reason


@pytest.mark.parametrize(
    ("engine", "choice", "finish"),
    [
        ("vllm", "required", "tool_calls"),
        ("vllm", "named", "stop"),
        ("sglang", "required", "tool_calls"),
        ("sglang", "named", "tool_calls"),
    ],
)
def test_forced_calls_end_as_the_engine_ends_them(engine: str, choice: str, finish: str) -> None:
    """A named function ends with "stop" at vLLM."""
    forced = [
        one for one in recordings().values() if (one.engine, one.tool_choice) == (engine, choice)
    ]

    assert len(forced) >= 5
    assert {one.finish_reason for one in forced} == {finish}


def calls_of(name: str) -> list[list[dict[str, Any]]]:
    """The pieces of calls in each event that has some."""
    deltas = [json.loads(event)["choices"][0]["delta"] for event in recordings()[name].data]
    return [delta["tool_calls"] for delta in deltas if delta.get("tool_calls")]


@pytest.mark.parametrize(
    ("name", "ids", "names"),
    [
        ("vllm-tools-hermes", "absent", "absent"),
        ("vllm-tools-pythonic", "null", "absent"),
        ("vllm-tools-pythonic-required", "absent", "null"),
        ("vllm-tools-pythonic-named", "absent", "absent"),
        ("sglang-tools-qwen25", "null", "null"),
        ("sglang-tools-pythonic-required", "null", "null"),
    ],
)
def test_later_pieces_of_a_call_have_nulls_as_the_engine_has_them(
    name: str, ids: str, names: str
) -> None:
    """A reader that takes a null for a name, or a second id for a second call, is wrong."""
    later = [piece for pieces in calls_of(name) for piece in pieces if not piece.get("id")]

    assert later
    for found, meant in (
        ([piece.get("id", "absent") for piece in later], ids),
        ([piece["function"].get("name", "absent") for piece in later], names),
    ):
        assert set(found) == {None if meant == "null" else meant}


def test_one_event_may_begin_two_calls_or_end_the_text_too() -> None:
    both = recordings()["vllm-tools-glm47-by4"]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in both.data]

    assert [len(pieces) for pieces in calls_of("vllm-tools-pythonic-by4") if len(pieces) > 1] == [2]
    assert [delta for delta in deltas if delta.get("content") and delta.get("tool_calls")]


def test_vllm_sends_ids_of_which_a_client_gets_nothing() -> None:
    """Events without a delta carry the ids of markers, and of a call that is not complete."""
    silent = [event for event in recordings()["vllm-tools-hermes"].data if '"delta":{}' in event]

    assert len(silent) > 10
    assert all(json.loads(event)["choices"][0]["token_ids"] for event in silent)


def test_readme_lists_what_is_left_out_and_what_differs() -> None:
    text = (Path(engine_streams.__file__).parent / "README.md").read_text()

    for (engine, kind), parsers in LEFT_OUT.items():
        for parser, why in parsers.items():
            reason = f"`{why}`" if why.startswith("=") else why
            assert f"| {engine} | {kind} | `{parser}` | {reason} |" in text
    for name, why in DIFFERS.items():
        assert f"| `{name}` | {why} |" in text
    for command in ("record_vllm", "record_sglang"):
        assert command in text


# In the environments of the engines.


def run(engine: Engine, *arguments: str, into: Path | None = None) -> str:
    python = os.environ.get(f"KVRS_{engine.upper()}_PYTHON")
    if not python:
        pytest.skip(f"KVRS_{engine.upper()}_PYTHON names no interpreter")
    found = COMMAND.fullmatch(next(iter(recordings(engine).values())).command)
    assert found is not None
    paths = [str(ROOT / found["path"])] if found["path"] else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}
    if into is not None:
        environment[INTO] = str(into)
    command = [python, "-m", found["module"], *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


ENGINES = [
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.process, pytest.mark.nightly]),
    pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.process, pytest.mark.nightly]),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_says_today_what_is_kept(engine: Engine, tmp_path: Path) -> None:
    run(engine, into=tmp_path)

    kept = {name: (DIRECTORY / f"{name}.json").read_text() for name in recordings(engine)}
    assert {path.stem: path.read_text() for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("engine", ENGINES)
def test_each_parser_of_the_engine_is_recorded_or_left_out_with_a_reason(engine: Engine) -> None:
    registered = json.loads(run(engine, "--parsers").splitlines()[-1])
    found = recordings(engine).values()
    recorded = {
        "tools": {one.tool_parser for one in found} - {None},
        "thought": {one.reasoning_parser for one in found} - {None},
    }

    for kind in ("tools", "thought"):
        left_out = set(LEFT_OUT[engine, kind])
        assert recorded[kind].isdisjoint(left_out)
        assert recorded[kind] | left_out == set(registered[kind])
