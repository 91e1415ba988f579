"""All prefill instances are lost while decode instances like vLLM's live, in virtual time."""

import json
from typing import Any

import pytest

from kvrs.core import routing, starter
from kvrs.sim.scenarios import no_prefill
from kvrs.sim.world import World

STREAMS = 120
AWAY_S, BACK_S = (4.5, 12.0), 14.0  # Of the prefill instances.


def first_starts(world: World) -> list[tuple[float, dict[str, Any]]]:
    """When new streams began, and by which plan."""
    (proxy,) = world.cluster.proxies
    return [
        (entry["at_s"], action["plan"])
        for entry in map(json.loads, (proxy.log or [])[1:])
        for action in entry["actions"]
        if action["kind"] == "Start" and action["attempt"] == 1
    ]


@pytest.mark.parametrize("seed", range(6))
def test_new_streams_begin_at_decode_instances_until_a_prefill_instance_is_back(seed: int) -> None:
    """Every stream completes; from then on prefill instances have the prompts again."""
    world = no_prefill(seed, keep_log=True)

    outcome = world.run()

    starts = first_starts(world)
    away = [plan for at_s, plan in starts if AWAY_S[0] < at_s < AWAY_S[1]]
    back = [plan for at_s, plan in starts if at_s > BACK_S]
    assert outcome.ended == {"complete": STREAMS}
    assert len(away) > 20
    assert {plan["prefill"] for plan in away} == {None}
    assert len(back) > 20
    assert None not in {plan["prefill"] for plan in back}


def test_simulator_notices_a_policy_that_does_not_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim above can be broken: requests are refused then."""
    monkeypatch.setattr(routing, "computing_prompts", lambda view: [])
    monkeypatch.setattr(starter, "computing_prompts", lambda view: [])

    outcome = no_prefill(0).run()

    assert outcome.ended["no_instance"] > 0
