"""Instances of the simulated cluster that make drafts while they are started again."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import Config, parse_config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.case import SimulateOptions, make_world
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.recovering import SimDraftModel, draft_model_of
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World

DRAFT = SimDraftModel(Pace("llama-3.1-8b-a100-vllm-tp1"), load_s=1.0, acceptance=0.6)


def config(source: str = "draft", roles: Sequence[str] = ("both",) * 3, **backup: Any) -> Config:
    nodes = [
        {"id": f"n{n}", "instances": [{"id": f"w{n}", "role": role}]}
        for n, role in enumerate(roles)
    ]
    speculation = {"source": source, "draft": "of no files", "depth": 4}
    return parse_config(
        {
            "cluster": {
                "engine": {"pace": "llama-3.1-70b-a100-vllm-tp4", "pages": 400},
                "nodes": nodes,
            },
            "backup": backup or {"mode": "off"},
            "speculation": speculation,
        }
    )


def arrivals(count: int = 40) -> list[Arrival]:
    return [Arrival(0.15 * n, tuple(range(n, n + 40 + n % 7)), 60 + n % 5) for n in range(count)]


def run(
    settings: Config,
    draft: SimDraftModel | None,
    *kills: tuple[float, str],
    seed: int = 0,
    asked: Sequence[Arrival] | None = None,
) -> tuple[Outcome, World]:
    world = world_of(settings, draft, *kills, seed=seed, asked=asked)
    return world.run(), world


def world_of(
    settings: Config,
    draft: SimDraftModel | None,
    *kills: tuple[float, str],
    seed: int = 0,
    asked: Sequence[Arrival] | None = None,
) -> World:
    rows = [{"when": {"at_s": at}, "what": "kill", "whom": {"id": name}} for at, name in kills]
    return World(
        settings,
        arrivals() if asked is None else asked,
        named_deaths(parse_faults(rows)),
        seed=seed,
        reload_s=8.0,
        draft_model=draft,
    )


def accepted(world: World) -> dict[str, int]:
    return {
        name: engine.drafts.counts.accepted
        for name, engine in world.cluster.engines.items()
        if engine.drafts is not None
    }


def test_one_survivor_is_helped_and_everything_is_right() -> None:
    """The invariants of the world hold: tokens, pages, checkpoints, leases."""
    outcome, world = run(config(), DRAFT, (2.0, "w2"))

    assert outcome.ended == {"complete": 40}
    found = accepted(world)
    assert found["w2"] == 0
    assert sum(count > 0 for count in found.values()) == 1, "one helper, one partner"
    assert all(
        engine.drafts is not None and engine.drafts.helper is None
        for engine in world.cluster.engines.values()
    ), "it ended with the start"


def test_checkpoints_and_recoveries_go_on_beside_drafts() -> None:
    backed = config(mode="remote", capacity_bytes=1 << 40)
    outcome, world = run(backed, DRAFT, (2.0, "w2"), (4.0, "w1"))

    assert outcome.ended == {"complete": 40}
    assert outcome.recoveries["restore"] > 0
    assert accepted(world)["w0"] > 0


def test_drafts_make_streams_shorter() -> None:
    always = replace(DRAFT, acceptance=1.0)
    moments_s = (1.5, 1.8, 2.0, 2.2, 2.5)
    slow = [run(config("off"), None, (at_s, "w2"))[0] for at_s in moments_s]
    quick = [run(config(), always, (at_s, "w2"))[0] for at_s in moments_s]

    assert [each.tokens for each in quick] == [each.tokens for each in slow]
    assert sum(each.span_s for each in quick) < sum(each.span_s for each in slow)


def test_a_helper_learns_each_token_also_beside_prompts() -> None:
    """Its streams are never behind its partner, also where a step with prompts verifies none."""
    world = world_of(config(), DRAFT, (2.0, "w2"))
    behind: list[int] = []
    for tick in range(120):
        world.run_before(3.2 + 0.04 * tick)
        for engine in world.cluster.engines.values():
            if engine.drafts is not None and engine.drafts.helper is not None:
                streams = engine.drafts.assisted._streams.values()
                behind += [len(one.sequence.token_ids) - one.told for one in streams]

    assert behind
    assert max(behind) == 0


@pytest.mark.parametrize(
    ("keeps", "with_node", "back_s"),
    [
        pytest.param(True, False, 8.0, id="the agent keeps the draft"),
        pytest.param(False, False, 8.5, id="the draft is read first"),
        pytest.param(True, True, 8.5, id="the agent's memory is gone too"),
    ],
)
def test_a_draft_that_the_agent_keeps_delays_no_load(
    keeps: bool, with_node: bool, back_s: float
) -> None:
    """An instance serves 8 s after the disk is free for its own model."""
    settings = config()
    state_plane = settings.state_plane.model_copy(update={"enabled": keeps})
    settings = settings.model_copy(update={"state_plane": state_plane})
    draft = replace(DRAFT, load_s=0.5 + DRAFT.pace.load_s)
    world = world_of(settings, draft, (60.0, "w0"), asked=arrivals(80))
    world.run_before(2.0)
    killed, due_s = world.cluster.engines[InstanceId("w2")], world.cluster.clock.now_s + back_s
    world.cluster.kill(killed, with_node=with_node)

    world.run_before(due_s - 0.01)
    assert not killed.alive
    world.run_before(due_s + 0.01)
    assert killed.alive


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_drafts_are_right_as_often_as_was_asked_for(acceptance: float) -> None:
    _, world = run(config(), replace(DRAFT, acceptance=acceptance), (2.0, "w2"))
    counts = [each.drafts.counts for each in world.cluster.engines.values() if each.drafts]
    accepted_, proposed = (
        sum(getattr(each, name) for each in counts) for name in ("accepted", "proposed")
    )

    if acceptance in (0.0, 1.0):  # Wrong ones are stale before they are proposed.
        assert accepted_ == acceptance * proposed
    else:
        assert 0 < accepted_ < proposed


def test_a_run_is_the_same_every_time() -> None:
    outcomes = [run(config(), DRAFT, (2.0, "w2"))[0] for _ in range(2)]
    assert outcomes[0].steps == outcomes[1].steps
    assert outcomes[0].span_s == outcomes[1].span_s


def test_a_simulation_needs_the_pace_of_the_draft_model() -> None:
    """Else it would run without drafts, and say nothing of it."""
    with pytest.raises(ConfigError, match=r"speculation.pace: null with source 'draft'"):
        draft_model_of(config())
    assert draft_model_of(config("off")) is None


def test_the_command_simulates_drafts(tmp_path: Path) -> None:
    paced = config().model_dump(mode="json")
    paced["speculation"]["pace"] = "llama-3.1-8b-a100-vllm-tp1"
    paced["cluster"]["engine"]["disk_bytes_per_s"] = 1e11
    file = tmp_path / "kvrs.yaml"
    file.write_text(json.dumps(paced))
    given = parse_config(paced)
    options = SimulateOptions(config=file, requests=60, deaths=3)
    world = make_world(options, given, [], seed=4)

    assert world.run().ended == {"complete": 60}
    assert sum(accepted(world).values()) > 0


@pytest.mark.parametrize(("acceptance", "depth"), [(0.6, 4), (0.72, 2), (0.9, 4)])
def test_drafts_are_there_as_often_as_the_helper_can_know(acceptance: float, depth: int) -> None:
    """Drafting and verifying overlap, so the step behind a wrong draft has none: of steps whose
    last one had drafts a^(k+1) have some again, of the others a. That is the most that a helper of
    any speed can do.
    """
    settings = config()
    speculation = settings.speculation.model_copy(update={"depth": depth})
    settings = settings.model_copy(update={"speculation": speculation})
    quick = replace(DRAFT, pace=Instant("llama-3.1-8b-a100-vllm-tp1"), acceptance=acceptance)
    asked = [Arrival(0.05 * n, tuple(range(n, n + 40)), 200) for n in range(30)]

    _, world = run(settings, replace(quick, load_s=0.1), (2.0, "w2"), asked=asked)

    found = [each.drafts for each in world.cluster.engines.values() if each.drafts]
    presence = sum(each.given for each in found) / sum(each.asked for each in found)
    expected = acceptance / (1 + acceptance - acceptance ** (depth + 1))
    assert presence == pytest.approx(expected, abs=0.04)


class Instant(Pace):
    def batch_s(
        self, chunks: Sequence[Chunk], decode_batch: int = 0, context_tokens: int = 0
    ) -> float:
        return 1e-5
