"""Decode steps of steady sequences are counted, and nothing is different by it: each world here is
run twice, the second time with each step of each sequence worked out by itself. Worlds that are
drawn at random are compared where their first runs are.
"""

from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import StreamId
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.calls import VOCABULARY, token_at, tokens_at
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.flows import TokenFlow
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from tests.sim.stepwise import all_of, step_by_step


def _long(**engine: Any) -> World:
    """Two instances with agents, one of which is killed while all of its streams are steady."""
    names = ("a", "b")
    config = parse_config(
        {
            "cluster": {
                "engine": {"max_model_len": 1024, "pages": 600, "max_running": 32} | engine,
                "nodes": [
                    {"id": name, "instances": [{"id": f"w-{name}", "role": "both"}]}
                    for name in names
                ],
            },
            "backup": {"mode": "remote", "capacity_bytes": 8 << 30},
        }
    )
    arrivals = [
        Arrival(1.0 + 0.13 * n, [(n * 31 + at) % 50_000 for at in range(70)], 230 + n % 16)
        for n in range(24)  # Some end as they fill a page.
    ]
    kill = {"when": {"at_s": 4.0}, "what": "kill", "whom": {"id": "w-a"}}
    return World(config, arrivals, named_deaths(parse_faults([kill])), seed=3, keep_log=True)


@pytest.mark.parametrize(
    "engine",
    [{}, {"pages": 90}, {"max_running": 5}, {"max_batch_tokens": 16}, {"page_size_tokens": 1}],
)
def test_long_outputs_are_the_same_step_by_step(
    engine: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pages for all, for a few, and pages of one token, in each of which something happens."""
    counted = all_of(_long(**engine))
    step_by_step(monkeypatch)

    assert all_of(_long(**engine)) == counted


def test_most_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: there is something to compare."""
    counted = 0
    came = TokenFlow.came

    def noted(flow: TokenFlow, calls: int, now_s: float) -> None:
        nonlocal counted
        counted += calls
        came(flow, calls, now_s)

    monkeypatch.setattr(TokenFlow, "came", noted)
    outcome = _long().run()

    assert counted > outcome.tokens * 0.7


@pytest.mark.parametrize("first", [0, 1, VOCABULARY - 3, 2 * VOCABULARY - 1])
def test_tokens_of_several_steps_are_those_of_each(first: int) -> None:
    """Also where the cycle of all tokens begins anew."""
    stream = StreamId("s")

    assert [*tokens_at(stream, first, 50)] == [token_at(stream, first + n) for n in range(50)]
