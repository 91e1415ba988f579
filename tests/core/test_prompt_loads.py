"""New prompts that an instance loads from what agents store of earlier streams."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.core.event_log import rerun
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Capability
from tests.core.policy_harness import GEOMETRY, instance_up, load
from tests.core.test_prefix_routing import BLOCKS, P0, P1, PROMPT, TOKENS, Prompts, S, T, U

V = StreamId("v")
AGENT = InstanceId("agent-n0")
PAGES = -(-BLOCKS * TOKENS // GEOMETRY.page_size_tokens)


def cluster(bytes_per_s: float = 26e9, capacity_bytes: int = 1 << 30, **up: Any) -> Prompts:
    """Two prefill instances on the node of an agent, which has the first prompt's pages; P0 was the
    one that computed it, and is busy.
    """
    core = Prompts(backup=BackupSettings(mode=BackupMode.LOCAL))
    for name in ("p0", "p1", "d0"):
        core.handle(instance_up(name, node=NodeId("n0"), **up))
    core.handle(ev.HolderUp(AGENT, NodeId("n0"), 1, capacity_bytes, bytes_per_s))
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 0))
    core.handle(load("p0", 0.9))
    return core


def terms(start: act.Start) -> tuple[Any, ...]:
    assert start.plan.load is not None
    return msgspec.structs.astuple(start.plan.load)


def test_what_an_agent_stores_is_loaded_where_no_queue_is() -> None:
    """All of the prompt is asked for, since the agent may have an answer behind it, for a time; the
    bytes count on the link until a token comes.
    """
    core = cluster()

    start = core.arrive(T, *range(BLOCKS))

    assert start.plan.prefill == P1
    assert terms(start) == (AGENT, 1, PAGES, 0, 999, 0.1)
    assert start.cached == {P1: 996}
    link = core.policy.state.view.link(NodeId("n0"), NodeId("n0"))
    assert link.in_flight_bytes == 999 * GEOMETRY.bytes_per_token
    assert rerun(core.lines).difference is None


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity_bytes": 1 << 16},  # There is no room for the first one.
        {"capabilities": [Capability.PREFIX_CACHE, Capability.CHECKPOINT]},
    ],
)
def test_what_cannot_be_loaded_is_computed(changes: dict[str, Any]) -> None:
    """By the instance that has it."""
    start = cluster(**changes).arrive(T, *range(BLOCKS))

    assert (start.plan.prefill, start.plan.load) == (P0, None)


def test_a_prompt_that_many_agents_have_is_loaded_from_all_of_them() -> None:
    """Few of them are weighed for each stream."""
    core = cluster()
    for number in range(1, 20):
        name = InstanceId(f"agent-n{number}")
        core.handle(ev.HolderUp(name, NodeId(f"n{number}"), 1, 1 << 30, 26e9))
        core.policy.state.view.stored.note(
            core.policy.state.view.agents[name], PROMPT, BLOCKS * TOKENS
        )

    starts = [core.arrive(StreamId(f"s{number}"), *range(BLOCKS)) for number in range(40)]

    asked = Counter(each.plan.load.agent for each in starts if each.plan.load is not None)
    assert len(asked) > 8
    assert max(asked.values()) <= 8


def test_loading_takes_no_time_of_a_prompt_that_queues() -> None:
    """All of it counts as found then."""
    core = cluster(bytes_per_s=4e6)
    assert core.arrive(T, *range(BLOCKS)).cached == {P1: 485}
    core = cluster(bytes_per_s=4e6)
    core.handle(load("p1", 0.6))

    assert core.arrive(T, *range(BLOCKS)).cached == {P1: 999}


def test_an_agent_is_asked_for_what_an_instance_is_taken_to_have() -> None:
    """While the prompt queues there: the instance may have less by now, and the agent more, which
    is the answer. Here loading all takes twice as long as to compute it.
    """
    core = cluster(bytes_per_s=1e6)
    start = core.arrive(T, *range(BLOCKS))
    core.handle(load("p0", 0.0))
    core.handle(load("p1", 0.5))
    idle = core.arrive(U, *range(BLOCKS))

    assert (start.plan.prefill, idle.plan.prefill) == (P0, P0)
    assert terms(start) == (AGENT, 1, PAGES, 999, 0, 0.1)
    assert idle.plan.load is None


def test_nothing_is_loaded_of_an_agent_that_is_lost() -> None:
    """Nor of its next process, until that has been sent something."""
    core = cluster()
    core.handle(ev.HolderLost(AGENT, 1, "killed"))
    core.handle(ev.HolderUp(AGENT, NodeId("n0"), 2, 1 << 30, 26e9))

    assert core.arrive(T, *range(BLOCKS)).plan.load is None


def test_a_prompt_is_stored_once_it_is_computed() -> None:
    """One that comes while the first is computed waits for that where it is."""
    core = Prompts("p0", "p1", "d0", backup=BackupSettings(mode=BackupMode.LOCAL))
    core.handle(ev.HolderUp(AGENT, NodeId("n0"), 1, 1 << 30, 26e9))
    core.arrive(S, *range(BLOCKS))

    assert core.arrive(T, *range(BLOCKS)).plan.load is None


def test_other_proxies_load_what_one_has_had_stored() -> None:
    """Only the same process of the agent has it."""
    theirs, ours = cluster(), cluster()
    ours.handle(ev.HolderLost(AGENT, 1, "killed"))
    ours.handle(ev.HolderUp(AGENT, NodeId("n0"), 2, 1 << 30, 26e9))
    sent = [each for each in theirs.policy.take_sent() if each.instance == AGENT]
    assert len(sent) == 1
    ours.policy.sent_elsewhere(sent)
    assert not ours.policy.state.view.stored.levels(PROMPT)

    ours.policy.sent_elsewhere([msgspec.structs.replace(sent[0], epoch=2)])

    assert ours.arrive(T, *range(BLOCKS)).plan.load is not None


def test_a_load_that_brings_less_corrects_the_agent() -> None:
    """And not the instance, which was not taken to have it."""
    core = cluster()
    core.arrive(T, *range(BLOCKS))
    view = core.policy.state.view
    before = view.stored._caches[AGENT].trusted, view.prefixes._caches[P1].trusted

    core.handle(ev.PrefillDone(T, 1, BLOCKS * TOKENS, 0))

    assert view.stored._caches[AGENT].trusted < before[0]
    assert view.prefixes._caches[P1].trusted == before[1]


def test_an_agent_that_brings_nothing_is_not_asked_for_a_while() -> None:
    """For longer each time, until it has brought something again. Loads that had begun before the
    first failure was known count no more.
    """
    core = cluster()
    core.arrive(T, *range(BLOCKS))
    record = core.policy.state.view.agents[AGENT]

    core.handle(ev.PrefillDone(T, 1, BLOCKS * TOKENS, 0), 1.0)
    record.note_load(0.5, 1.1, has_failed=True)
    assert record.no_loads_until_s == 1.5
    core.handle(load("p1", 0.5), 1.2)
    core.prefixes |= {U: PROMPT, V: PROMPT}
    starts = core.handle(ev.StreamArrived(U, BLOCKS * TOKENS), 1.4)
    starts += core.handle(ev.StreamArrived(V, BLOCKS * TOKENS), 1.6)
    assert [each.plan.load is None for each in starts if isinstance(each, act.Start)] == [
        True,
        False,
    ]
    record.note_load(1.6, 2.0, has_failed=True)
    assert record.no_loads_until_s == 3.0
    record.note_load(3.1, 3.5, has_failed=False)
    record.note_load(3.6, 4.0, has_failed=True)
    assert record.no_loads_until_s == 4.5


def test_a_later_attempt_says_nothing_of_what_an_agent_stores() -> None:
    """Its pages come as those of a recovery, and the instance reports none as found."""
    core = cluster()
    core.handle(instance_up("p2", node=NodeId("n0")))
    start = core.arrive(T, *range(BLOCKS))
    agent = core.policy.state.view.agents[AGENT]
    for name in ("p0", "p1"):
        core.handle(ev.InstanceLost(InstanceId(name), 1, "killed", {T: 0, S: 0}), 0.1)
    core.handle(ev.TimerFired(), 0.3)

    assert start.plan.load is not None
    assert core.policy.streams[T].attempt.number == 2
    core.handle(ev.PrefillDone(T, 2, BLOCKS * TOKENS, 0), 0.4)

    assert agent.failed_loads == 0
