"""The agents of experiments/agent_tasks, and Anthropic's tool runner in three tasks of them."""

import json
from collections import Counter
from typing import Any

import pytest

from experiments.agent_tasks.model import (
    OF_THE_LAST_TURN,
    TURNS,
    Phase,
    calls_of,
    played,
    question,
    turn_of,
)
from experiments.agent_tasks.run import TASKS, Done, kill_of, measure
from kvrs_testkit.engine_streams.reading import Answer

CALLS = [("f", {"x": 1}), ("g", {"x": 2})]


@pytest.mark.parametrize("task", [0, 7])
def test_the_events_of_a_turn_say_what_the_model_wrote(task: int) -> None:
    """In the form of the recordings: nulls, empty deltas, and characters of several bytes."""
    said: list[dict[str, Any]] = [{"role": "user", "content": question(task)}]
    for number, call in enumerate([*calls_of(task), None]):
        found, turn = turn_of(said)
        streamed = played(said, "id")
        answer = Answer.of(streamed.recording.data)
        wanted = [] if call is None else [(call.name, call.arguments)]

        assert found == number
        assert (answer.reasoning, answer.content.strip()) == (turn.thought, turn.text)
        assert answer.parsed_calls() == wanted
        assert answer.ids == streamed.recording.ids
        assert set(streamed.dies_at) == set(OF_THE_LAST_TURN if call is None else Phase)

        calls = [
            {"function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in wanted
        ]
        said.append({"role": "assistant", "content": answer.content, "tool_calls": calls})
        said.append({"role": "tool", "content": "ran"})


def test_the_deaths_come_in_each_turn_and_in_each_part_of_one() -> None:
    kills = [kill_of(task) for task in range(TASKS)]

    assert {kill.turn for kill in kills} == set(range(TURNS))
    assert min(Counter(kill.phase for kill in kills).values()) >= 2
    assert {kill.phase for kill in kills} == set(Phase)


@pytest.mark.parametrize(
    ("calls", "final", "error", "verdict"),
    [
        (CALLS, "done", None, "whole"),
        (CALLS, "don", None, "silent"),
        (CALLS[:1], "done", None, "silent"),
        (CALLS[:1], None, "APIError", "error"),
        (CALLS[1:], None, "APIError", "wrong"),
        ([*CALLS, CALLS[1]], "done", None, "twice"),
        ([CALLS[0], ("g", {"x": 20})], "done", None, "wrong"),
        ([CALLS[0], ("g", {})], None, "APIError", "wrong"),
    ],
)
def test_a_task_is_judged_by_the_calls_that_ran(
    calls: list[tuple[str, dict[str, int]]], final: str | None, error: str | None, verdict: str
) -> None:
    """An error excuses what did not run, and nothing that ran."""
    calm = Done(CALLS, "done", None, "", 1.0)

    assert Done(calls, final, error, "", 1.0).against(calm) == verdict


@pytest.mark.process
@pytest.mark.network
async def test_the_tool_runner_ends_its_tasks_whole_through_deaths() -> None:
    """In the text, behind the arguments and before the finish; nothing runs twice."""
    series = await measure("anthropic", "equal", [2, 8, 10])

    assert [task["verdict"] for task in series.tasks] == ["whole"] * 3, series.tasks
    assert series.missed == []
