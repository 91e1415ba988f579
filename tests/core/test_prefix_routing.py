"""Placement by prefix: the least cost over all instances, within what clients were promised."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicySettings, Route, SloSettings
from kvrs.core import prefix_routing
from kvrs.core.event_log import event_line, header_line, rerun
from kvrs.core.model import actions as act
from kvrs.core.model import cluster_view
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import BLOCK_BYTES, ClusterView, Prefix, chain
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.prefix_routing import NO_LIMITS, StartLimits, with_prefix
from kvrs.core.recovery import NO_BACKUP, RecoveryPolicy
from kvrs.core.routing import least_work
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Capability
from kvrs.protocol.rows import CopyReport, RegionReport, RowsReport
from tests.core.policy_harness import TABLE, instance_up, load, only
from tests.core.test_rows import OTHER, SPACE
from tests.core.test_staying import reforming

TOKENS, BLOCKS = 100, 10  # Of a block, and of a prompt.
SLOW = TABLE.scaled(3.0)
S, T, U = StreamId("s"), StreamId("t"), StreamId("u")
P0, P1, P2 = InstanceId("p0"), InstanceId("p1"), InstanceId("p2")


def prefix(*words: int) -> Prefix:
    text = b"".join(bytes([word]) * BLOCK_BYTES for word in words)
    return Prefix(chain(0, text), len(text))


PROMPT = prefix(*range(BLOCKS))


def clusters(
    tables: list[PrefillTable],
) -> st.SearchStrategy[list[tuple[float, int, PrefillTable]]]:
    """The queue of each prefill instance, its blocks of the prompt, and its table."""
    queues_s = st.one_of(st.just(0.0), st.floats(0.0, 2.0), st.sampled_from([0.25, 0.5]))
    each = st.tuples(queues_s, st.integers(0, BLOCKS), st.sampled_from(tables))
    return st.lists(each, min_size=1, max_size=12)


def view_of(cluster: list[tuple[float, int, PrefillTable]]) -> ClusterView:
    view = ClusterView(1e9)
    for number, (queue_s, blocks, table) in enumerate(cluster):
        event = instance_up(f"p{number}", prefill=table)
        member = view.add(Member.of(event.info, table))
        view.prefill_order.note_queue(member, queue_s)
        if blocks:
            words = [*range(blocks), *range(100, 100 + BLOCKS - blocks)]
            view.prefixes.note(member, prefix(*words), BLOCKS * TOKENS)
    return view


def cost_of(view: ClusterView, member: Member, cached: int) -> float:
    tokens = BLOCKS * TOKENS
    cached = min(cached, tokens - 1)
    seconds = member.times.table.extra(cached, tokens - cached) if cached else 0.0
    seconds = seconds or member.times.table.seconds_for(tokens)
    return member.queue_s + view.prefill_order.prompt_weight(len(view.prefillers)) * seconds


@settings(max_examples=300)
@given(clusters([TABLE]), st.integers(0, 40), st.sets(st.integers(0, 11)), st.sampled_from([1, 32]))
def test_the_choice_has_the_least_cost_of_all(
    cluster: list[tuple[float, int, PrefillTable]], prompts: int, refusing: set[int], few: int
) -> None:
    """Though only instances with more of the prompt than the choice by load are looked at, and of
    many with as much only the first by queue.
    """
    view, stream = view_of(cluster), Stream(S, prompt_tokens=BLOCKS * TOKENS, prefix=PROMPT)
    members = [*view.members.values()]
    view.prefill_order.note_prompts(members[0], prompts)
    first = least_work(view, stream, is_free=True, barred_too=False)
    assert first is not None
    allowed = [each for n, each in enumerate(members) if n not in refusing or each is first]
    allowed = [each for each in allowed if each.queue_s >= first.queue_s]
    blocks = {member: cluster[number][1] for number, member in enumerate(members)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_routing, "_FEW", few)
        chosen = with_prefix(view, stream, first, lambda member: member in allowed)

    costs = {member: cost_of(view, member, blocks[member] * TOKENS) for member in allowed}
    assert costs[chosen] == pytest.approx(min(costs.values()), abs=1e-9)
    assert stream.cached.get(chosen.id, 0) == min(blocks[chosen] * TOKENS, BLOCKS * TOKENS - 1)
    if not any(blocks.values()):
        assert chosen is first


@settings(max_examples=200)
@given(clusters([TABLE, SLOW]), st.sampled_from([1, 32]))
def test_each_instance_counts_with_its_own_table(
    cluster: list[tuple[float, int, PrefillTable]], few: int
) -> None:
    """The choice by load and those that have more of the prompt are compared."""
    view, stream = view_of(cluster), Stream(S, prompt_tokens=BLOCKS * TOKENS, prefix=PROMPT)
    first = least_work(view, stream, is_free=True, barred_too=False)
    assert first is not None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_routing, "_FEW", few)
        chosen = with_prefix(view, stream, first, lambda member: True)

    blocks = {member: cluster[number][1] for number, member in enumerate(view.members.values())}
    weighed = [each for each in blocks if each is first or blocks[each] > blocks[first]]
    costs = {member: cost_of(view, member, blocks[member] * TOKENS) for member in weighed}
    assert costs[chosen] == pytest.approx(min(costs.values()), abs=1e-9)


def test_computing_counts_more_the_more_prompts_are_in_flight() -> None:
    """A prompt that is computed anew keeps those behind it waiting: with many of them a longer
    queue at the instance that has it is worth while.
    """
    view = view_of([(0.0, 0, TABLE), (1.2, BLOCKS, TABLE)])
    idle, hot = view.members.values()
    chosen = []
    for prompts in (0, 2, 100):
        view.prefill_order.note_prompts(idle, prompts)
        stream = Stream(S, prompt_tokens=BLOCKS * TOKENS, prefix=PROMPT)
        chosen.append(
            (view.prefill_order.prompt_weight(2), with_prefix(view, stream, idle, lambda _: True))
        )

    assert chosen == [(1.0, idle), (2.0, hot), (8.0, hot)]


@pytest.mark.parametrize(
    ("limits", "chosen"),
    [
        (NO_LIMITS, 1),
        (StartLimits(queue_s=0.5), 0),
        (StartLimits(first_token_s=0.7), 0),
        (StartLimits(first_token_s=0.55), 1),  # Neither keeps it: the cheaper one.
    ],
)
def test_a_prompt_goes_where_it_keeps_its_limits(limits: StartLimits, chosen: int) -> None:
    """A hit behind a long queue is no reason to refuse a request that an idle instance could
    answer in time.
    """
    view = view_of([(0.0, 4, TABLE), (0.7, BLOCKS, TABLE)])
    view.prefill_order.note_prompts(view.members[P0], 6)
    stream = Stream(S, prompt_tokens=BLOCKS * TOKENS, prefix=PROMPT)

    found = with_prefix(view, stream, view.members[P0], lambda _: True, limits)

    assert found.id == f"p{chosen}"


class Prompts:
    """A policy whose streams have prefixes."""

    def __init__(self, *names: str, backup: BackupSettings = NO_BACKUP, **policy: Any) -> None:
        self.settings = PolicySettings(**policy)
        self.prefixes: dict[StreamId, Prefix] = {}
        self.policy = RecoveryPolicy(
            self.settings,
            SloSettings(),
            backup,
            stream_of=lambda name: Stream(name, prefix=self.prefixes.get(name, Prefix())),
        )
        self.lines = [header_line(self.settings, SloSettings(), backup)]
        for name in names:
            self.handle(instance_up(name))

    def handle(self, event: ev.Event, at_s: float = 0.0) -> list[act.Action]:
        actions = self.policy.handle(event, at_s)
        self.lines.append(event_line(at_s, event, actions))
        return actions

    def arrive(self, name: StreamId, *words: int, **arrival: Any) -> act.Start:
        self.prefixes[name] = prefix(*words)
        event = ev.StreamArrived(name, len(words) * TOKENS, **arrival)
        return only(self.handle(event), act.Start)


def test_a_prompt_goes_where_it_was_sent_before() -> None:
    """Its booking is the time behind what is cached there, and so is its prediction."""
    core = Prompts("p0", "p1", "d0")
    first = core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 0))

    again = core.arrive(T, *range(BLOCKS - 2), 90, 91)

    assert again.plan.prefill == first.plan.prefill == P0
    assert again.cached == {P1: 0, P0: 800}
    assert core.policy.members[P0].work_s == pytest.approx(0.2)


def test_prompts_of_a_burst_are_behind_each_other() -> None:
    """A prompt that is sent and not yet computed counts as cached, since it will be."""
    core = Prompts("p0", "p1", "d0")

    starts = [core.arrive(name, *range(BLOCKS - 1), 90 + n) for n, name in enumerate((S, T, U))]

    # The second one waits for a second, and computes a tenth of one.
    assert [each.plan.prefill for each in starts] == [P0, P0, P0]
    assert core.policy.members[P0].work_s == pytest.approx(1.2)


def test_victims_of_a_death_are_placed_by_their_prefixes() -> None:
    """One after the other, each behind the one before it; the dead instance's cache is gone."""
    core = Prompts("p0", "p1", "p2", "d0")
    core.arrive(S, *range(BLOCKS))
    core.arrive(T, *range(BLOCKS - 1), 90)
    core.handle(load("p1", 0.3))

    actions = core.handle(ev.InstanceLost(P0, 1, "killed", {S: 0, T: 0}))
    actions += core.handle(ev.TimerFired(), 0.02)

    starts = [each for each in actions if isinstance(each, act.Start)]
    assert [(each.stream, each.plan.prefill, each.cached) for each in starts] == [
        (S, P2, {}),
        (T, P2, {P1: 0, P2: 900}),
    ]


def test_a_log_is_run_again_without_the_prompts() -> None:
    """It has what the instances had of a prompt between which it was placed, so that the policy
    decides alike.
    """
    core = Prompts("p0", "p1", "p2", "d0")
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 0))
    core.handle(load("p0", 0.3))
    core.arrive(T, *range(BLOCKS - 1), 90)
    core.handle(ev.InstanceLost(P0, 1, "killed", {T: 0}))
    core.handle(ev.TimerFired(), 0.02)
    assert '"cached": {"p1": 0, "p0": 900}' in core.lines[-3]

    assert rerun(core.lines).difference is None


def test_prompts_go_where_other_proxies_have_sent_their_prefix() -> None:
    """Unless that was another process of the instance, or one that is not up here."""
    ours, theirs = Prompts("p0", "p1", "d0"), Prompts("p0", "p1", "d0")
    theirs.handle(load("p0", 0.3))
    assert theirs.arrive(S, *range(BLOCKS)).plan.prefill == P1
    (told,) = theirs.policy.take_sent()

    ours.policy.sent_elsewhere(
        [
            msgspec.structs.replace(told, instance=P0, epoch=2),
            msgspec.structs.replace(told, instance=P2),
        ]
    )
    assert len(ours.policy.state.view.prefixes) == 0
    ours.policy.sent_elsewhere([told])

    assert ours.arrive(T, *range(BLOCKS - 1), 90).plan.prefill == P1


def test_nothing_is_kept_of_an_instance_that_is_removed() -> None:
    """One of its name that comes later begins empty, whatever memory it says it has."""
    core = Prompts("p0", "p1", "d0")
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 300))
    had = [*core.policy.prefix_hits]

    core.handle(ev.InstanceRemoved(P0, {}))
    core.handle(instance_up("p0", epoch=2, had_not_ended=True))
    core.handle(load("p0", 0.1, epoch=2))

    assert (had, [*core.policy.prefix_hits]) == ([P0], [])
    assert core.arrive(T, *range(BLOCKS)).plan.prefill == P1


def with_tiers(*names: str, bytes_per_s: float = 26e9, **namespaces: str) -> Prompts:
    """Servers of one node with rows that its agent serves; `namespaces` where they differ."""
    core = Prompts(backup=BackupSettings(mode=BackupMode.LOCAL))
    node, agent = NodeId("n0"), InstanceId("agent-n0")
    for name in names:
        core.handle(instance_up(name, node=node))
    core.handle(ev.HolderUp(agent, node, 1, 1 << 30, bytes_per_s))
    regions = tuple(
        RegionReport(InstanceId(name), namespaces.get(name, SPACE), True, 100, 1 << 16, 64)
        for name in names
    )
    rows = RowsReport(regions, to_other_nodes=True)
    core.handle(ev.CheckpointsReported(agent, 1, 0, 0, {}, rows))
    return core


def check_second(core: Prompts, place: tuple[InstanceId, dict[InstanceId, int]]) -> None:
    """Where the second of two equal prompts goes, and by which cached tokens; a log of both is run
    again alike.
    """
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 0))
    core.handle(load("p0", 0.9))

    start = core.arrive(T, *range(BLOCKS))

    assert (start.plan.prefill, start.cached) == place
    assert rerun(core.lines).difference is None


@pytest.mark.parametrize(
    ("tiers", "place"),
    [
        ({}, (P1, {P1: 996})),
        ({"bytes_per_s": 4e6}, (P1, {P1: 485})),  # Loading 2 MB takes half as long as computing.
        ({"bytes_per_s": 2e6}, (P0, {P1: 0, P0: 999})),
        ({"p0": OTHER}, (P0, {P1: 0, P0: 999})),
    ],
)
def test_what_an_instance_loads_from_its_neighbours_counts(
    tiers: dict[str, Any], place: tuple[InstanceId, dict[InstanceId, int]]
) -> None:
    """In the part by which that is quicker than computing; a log is run again with that."""
    check_second(with_tiers("p0", "p1", "d0", **tiers, d0=OTHER), place)


@pytest.mark.parametrize(
    ("seen", "place"),
    [
        ({}, (P1, {P1: 995})),
        ({"share": 0.5}, (P1, {P1: 497})),
        ({"namespace": OTHER}, (P0, {P1: 0, P0: 999})),
        ({"restores": False}, (P0, {P1: 0, P0: 999})),
    ],
)
def test_what_a_store_has_counts_where_it_is_loaded(
    seen: dict[str, Any], place: tuple[InstanceId, dict[InstanceId, int]]
) -> None:
    """On any node, in the part that the store has had of what was asked for."""
    core = Prompts("p0", "p1", "d0")
    store = ev.StoreSeen(SPACE, restores=True, share=1.0)
    core.handle(ev.SelfTested(P0, 1, True, store=store))
    core.handle(ev.SelfTested(P1, 1, True, store=msgspec.structs.replace(store, **seen)))
    check_second(core, place)


def test_nothing_is_loaded_of_a_node_whose_agent_is_lost() -> None:
    """Though its instances keep their rows, of which another agent has copies."""
    core, other = with_tiers("p0", "p1", "d0"), InstanceId("agent-n1")
    core.handle(ev.HolderUp(other, NodeId("n1"), 1, 1 << 30, 26e9))
    copies = RowsReport(to_other_nodes=True, copied=(CopyReport(NodeId("n0"), SPACE, 1.0),))
    core.handle(ev.CheckpointsReported(other, 1, 0, 0, {}, copies))
    core.handle(ev.HolderLost(InstanceId("agent-n0"), 1, "killed"))
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 0))
    core.handle(load("p0", 0.9))

    assert core.arrive(T, *range(BLOCKS)).cached == {P1: 0, P0: 999}


def test_a_prompt_is_loaded_from_where_it_was_decoded() -> None:
    """The tier of its decode instance has it, too, and longer than the pages of the other one."""
    core = with_tiers("p0", "p1", "d0")
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 0))
    core.handle(ev.InstanceLost(P0, 1, "killed", {}))

    assert core.arrive(T, *range(BLOCKS)).cached == {P1: 996}


def without_prefill() -> Prompts:
    """Two decode instances, of which one has computed a prompt."""
    core = Prompts()
    for name in ("d0", "d1"):
        core.handle(instance_up(name, computes_prompts=True))
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 0))
    core.handle(ev.StreamResumed(S, 1))
    return core


@pytest.mark.parametrize("core", [without_prefill, lambda: with_tiers("p0", "d0")])
def test_what_others_have_made_does_not_raise_a_capacity(core: Callable[[], Prompts]) -> None:
    """One that decodes has the answers of turns before, and one with a tier what it loads, beyond
    what was predicted; neither has more room for that.
    """
    there = core()
    start = there.arrive(T, *range(90, 100))
    caches = there.policy.state.view.prefixes._caches
    name = start.plan.prefill or start.plan.decode

    there.handle(ev.PrefillDone(T, 1, BLOCKS * TOKENS, 900))
    there.handle(ev.StreamResumed(T, 1))
    same = caches[name].trusted
    there.arrive(U, *range(90, 100))
    there.handle(ev.PrefillDone(U, 1, BLOCKS * TOKENS, 0))

    assert same == cluster_view._TRUSTED > caches[name].trusted


def test_decode_instances_that_compute_prompts_are_chosen_alike() -> None:
    """Where no prefill instance is up."""
    core = without_prefill()

    again = core.arrive(T, *range(BLOCKS))
    other = core.arrive(U, *range(40, 50))

    assert (again.plan.decode, other.plan.decode) == ("d0", "d1")


@pytest.mark.parametrize(
    ("comes_back", "keeps"),
    [
        ({}, False),
        ({"kept": {StreamId("other"): 3}}, True),  # In memory that outlives its processes.
        ({"had_not_ended": True}, True),  # It was only cut off.
    ],
)
def test_an_instance_that_comes_back_has_what_it_kept(
    comes_back: dict[str, Any], keeps: bool
) -> None:
    """Its next process is empty, unless it has taken over the memory, or is the one before."""
    core = Prompts("p0", "p1", "d0")
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.StreamEnded(S, 1))
    core.handle(ev.InstanceLost(P0, 1, "killed", {}))
    core.handle(instance_up("p0", epoch=2, **comes_back))
    core.handle(load("p0", 0.1, epoch=2))

    again = core.arrive(T, *range(BLOCKS))

    assert again.plan.prefill == (P0 if keeps else P1)


@pytest.mark.parametrize(
    ("policy", "capabilities", "routes"),
    [
        ({}, [Capability.PREFIX_CACHE], True),
        ({}, [], False),
        ({"route": Route.LOAD}, [Capability.PREFIX_CACHE], False),
    ],
)
def test_prompts_are_looked_at_where_that_is_of_use(
    policy: dict[str, Any], capabilities: list[Capability], routes: bool
) -> None:
    """Not while no instance has a prefix cache, nor where the setting says so."""
    core = Prompts(**policy)

    core.handle(instance_up("p0", capabilities=capabilities))
    found = core.policy.routes_by_prefix
    core.handle(ev.InstanceLost(P0, 1, "killed", {}))

    assert (found, core.policy.routes_by_prefix) == (routes, False)


def test_no_decode_instance_is_chosen_for_prefill_where_there_are_others() -> None:
    """It has computed a prompt while no prefill instance was up."""
    core = without_prefill()
    core.handle(ev.StreamEnded(S, 1))
    core.handle(instance_up("p2"))
    assert core.arrive(T, *range(BLOCKS)).plan.prefill == P2


def test_a_request_that_is_refused_where_its_prefix_is_goes_by_load() -> None:
    """The log has the choice that was made in the end."""
    core = Prompts("p0", "p1", "d0", admission={"wait_s": 4.0})
    core.arrive(S, *range(BLOCKS))
    for number in range(6):
        core.arrive(StreamId(f"o{number}"), 60 + number)
    core.handle(load("p0", 4.2))
    core.handle(load("p1", 4.1))
    core.prefixes[T] = prefix(*range(BLOCKS - 1), 90)
    refused = only(core.handle(ev.StreamArrived(T, BLOCKS * TOKENS)), act.GiveUp)
    core.handle(load("p1", 2.2))
    start = core.arrive(U, *range(BLOCKS - 1), 91)

    assert (refused.reason, refused.cached) == (act.Reason.OVERLOADED, {P1: 0, P0: 900})
    assert (start.plan.prefill, start.cached) == (P1, {})
    assert rerun(core.lines).difference is None


def test_what_was_predicted_is_compared_in_tokens_that_were_counted() -> None:
    """The length of a text is a guess; an index that is right by it loses no trust."""
    core = Prompts("p0", "d0")
    for name, tokens in ((S, 0), (T, 600), (U, 600)):
        core.arrive(name, *range(BLOCKS))
        core.handle(ev.PrefillDone(name, 1, 700, tokens))
    index = core.policy.state.view.prefixes
    assert index._caches[P0].trusted == cluster_view._TRUSTED


def test_a_log_of_a_fresh_stream_that_stays_is_run_again_alike() -> None:
    """It was compared with a start, by what was cached where that would have been."""
    core = Prompts("p0", "p1", "d0")
    core.handle(load("p0", 0.5))
    core.arrive(S, *range(BLOCKS))
    core.handle(ev.PrefillDone(S, 1, BLOCKS * TOKENS, 0))
    core.handle(load("p0", 0.0))
    core.handle(load("p1", 5.0))
    start = core.arrive(T, *range(BLOCKS - 3), 90, 91, 92)
    assert start.plan.prefill is not None
    core.handle(load("p1", 2.0))
    core.handle(reforming(start.plan.prefill, 0.2, produced_tokens={}))
    assert rerun(core.lines).difference is None
