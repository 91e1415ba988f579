"""Instance events: an instance comes up, is lost, or its streams are moved before it fails."""

from collections.abc import Collection, Mapping
from typing import assert_never

from kvrs.core import kv_locations, placing, staying, steps
from kvrs.core.fleet.signs import takes_requests
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import have_roles_of
from kvrs.core.model.lifecycle import InstanceLeft, Stage
from kvrs.core.model.member import TRANSFER_S, Member, pause_s
from kvrs.core.model.reforming import cause_of
from kvrs.core.model.reports import changes_ranks
from kvrs.core.model.streams import Stream
from kvrs.core.options.replay import REPLAY_S_MAX
from kvrs.core.outliers import peers
from kvrs.core.state import State
from kvrs.ids import StreamId
from kvrs.protocol.instance import GpuState

# Time after coming up within which a death is quick, and number of quick deaths in a row without
# consequence; each further process of the instance waits longer before it gets work.
_QUICK_S = 10.0
_FREE_DEATHS = 2
_FIRST_PAUSE_S = 1.0


def up(state: State, event: ev.InstanceUp, now_s: float) -> None:
    info = event.info
    member = state.view.members.get(info.id)
    if member is not None and info.epoch <= member.epoch:
        return
    if member is not None and event.lives_on:
        member.set_info(info)
        member.told = None
        state.view.set_self_tested(member, event)
        return
    # The former epoch's streams are lost, even if its loss was not reported.
    lost = [] if member is None else _lose(state, member, "replaced by a new epoch", {}, now_s)
    member = state.view.add(state.member_of(event))
    state.view.prefixes.up(member, keeps=bool(info.kept) or event.had_not_ended)
    state.prefill_scale.up(member)
    state.view.share_slowness(member)
    state.view.set_self_tested(member, event)
    member.gpu_degraded = info.id in state.gpu_degraded
    member.drain_ordered = info.id in state.drain_ordered
    state.view.update(member)
    _pause_after_deaths(state, member, now_s)
    kv_locations.instance_up(state, member)
    if event.had_not_ended:
        state.poison.had_not_ended(info.id)
    placing.gather(state, lost, now_s)
    placing.place_idle(state, now_s)


def _pause_after_deaths(state: State, member: Member, now_s: float) -> None:
    """Close a new process for a while if its predecessors died quickly."""
    deaths, _ = state.quick_deaths.get(member.id, (0, 0.0))
    member.answers.quick_deaths, member.up_s = deaths, now_s
    if deaths >= _FREE_DEATHS:
        cause = f"it died {deaths} times within {_QUICK_S:g} s of coming up"
        pause = pause_s(member.id, _FIRST_PAUSE_S, deaths - _FREE_DEATHS)
        member.answers.close(cause, now_s, pause)
        member.up_s += pause


def reported(state: State, event: ev.LoadReported, now_s: float) -> None:
    member, report = state.view.members.get(event.instance), event.report
    if member is None or report.epoch != member.epoch:
        return
    if member.is_unwell is takes_requests(report):
        member.is_unwell = not member.is_unwell
        placing.place_idle(state, now_s)
    if report.draining:
        _drain(state, member, event.produced_tokens, now_s)
    if changes_ranks(member, report, now_s):
        _re_form(state, member, event, now_s)
    member.told = report
    if member.times.note_steps(report):
        state.view.share_slowness(member)
    if not member.abilities.decodes:
        state.view.prefill_order.note_prompts(member, report.queued + report.running)
    else:
        # Other streams there belong to other proxies (LUMEN section 4.3: a target's load is
        # everything that it runs or queues).
        streams = report.queued + report.running if event.has_peers else 0
        others = max(0, streams - len(member.running))
        state.view.count_stream(member, others - member.others_reported)
        member.others_reported = others
    queue_s = report.queue_delay_s
    if (reforming := member.reforming) is not None:
        reforming.queue_s = queue_s
        # A queue is computed only after the re-forming.
        queue_s += max(0.0, reforming.ready_s - now_s)
    state.view.prefill_order.note_queue(member, queue_s)


def _drain(state: State, member: Member, produced: Mapping[StreamId, int], now_s: float) -> None:
    """Move streams from an instance that is about to end, while their KV is still there."""
    member.draining = True
    state.view.update(member)
    # Every report of the instance repeats the move, because a re-forming target may be ready by
    # then.
    if _can_move_from(state, member):
        _leave_kv(state, member, produced)
        _move(state, member, "moved: its instance is about to end", produced, now_s)


def _re_form(state: State, member: Member, event: ev.LoadReported, now_s: float) -> None:
    """Let the instance's streams stay or leave, and place its queue for slots again."""
    if event.report.reforming is None:
        staying.reformed(state, member, event, now_s)
        return
    staying.reforming(state, member, event, _running(state, member), now_s)
    queued = state.slots.waiting_for(member.id)
    if member.reforming is not None and member.is_drained and queued:
        cause = cause_of(member.id, event.report.reforming)
        left = InstanceLeft(member.id, cause, {}, is_lost=False)
        stranded = [state.streams[each] for each in queued]
        for stream in stranded:
            steps.apply(state, stream.id, left, now_s)
        placing.place_all(state, stranded, now_s)


def ended(
    state: State, event: ev.InstanceLost | ev.InstanceRemoved | ev.InstanceExited, now_s: float
) -> None:
    name, member = event.instance, state.view.members.get(event.instance)
    match event:
        case ev.InstanceLost():
            if member is not None and event.epoch >= member.epoch:
                victims = _lose(state, member, event.cause, event.produced_tokens, now_s)
                placing.gather(state, victims, now_s)
        case ev.InstanceRemoved():
            if member is not None:
                member.drain_ordered = True  # The instance's streams are not to blame for its end.
                victims = _lose(state, member, "removed", event.produced_tokens, now_s)
                placing.gather(state, victims, now_s)
            state.drain_ordered.discard(name)
            state.gpu_degraded.discard(name)
            state.quick_deaths.pop(name, None)
            state.view.prefixes.removed(name)
        case ev.InstanceExited():
            if event.is_external:
                state.poison.exited(name, event.epoch, now_s)
        case _:
            assert_never(event)


def agent_lost(state: State, event: ev.HolderLost, now_s: float) -> None:
    agent = state.view.agents.get(event.holder)
    if agent is None or event.epoch < agent.epoch:
        return
    kv_locations.agent_lost(state, event)
    state.poison.node_lost(agent.node, now_s)


def gpu_judged(state: State, event: ev.GpuJudged, now_s: float) -> None:
    is_failing = event.state is GpuState.FAILING
    if is_failing:
        state.gpu_degraded.add(event.instance)
    else:
        state.gpu_degraded.discard(event.instance)
    member = state.view.members.get(event.instance)
    if member is None:
        return
    member.gpu_degraded = is_failing
    state.view.update(member)
    if is_failing and member.is_drained:
        cause = f"moved: its GPU is {event.state.value}: {event.reason}"
        _move(state, member, cause, event.produced_tokens, now_s)


def learned(
    state: State, event: ev.SelfTested | ev.NamesListed | ev.TransferHung, now_s: float
) -> None:
    """Update what is known of a live instance (self-test, names, a transfer that may hang)."""
    member = state.view.members.get(event.instance)
    if member is None or event.epoch != member.epoch:
        return
    match event:
        case ev.SelfTested():
            was = member.tokens, member.is_doubted
            state.view.set_self_tested(member, event)
            if was != (member.tokens, member.is_doubted):  # Streams may wait for it.
                placing.place_idle(state, now_s)
        case ev.NamesListed():
            member.learn(names=event.names)
            placing.place_idle(state, now_s)
        case ev.TransferHung():
            member.hung_until_s = now_s + TRANSFER_S
        case _:
            assert_never(event)


def ordered(state: State, event: ev.DrainOrdered | ev.DrainEnded, now_s: float) -> None:
    """Apply a drain order, for all processes of the instance."""
    member = state.view.members.get(event.instance)
    if isinstance(event, ev.DrainEnded):
        state.drain_ordered.discard(event.instance)
    else:
        state.drain_ordered.add(event.instance)
    if member is None:
        return
    member.drain_ordered = isinstance(event, ev.DrainOrdered)
    state.view.update(member)
    if isinstance(event, ev.DrainEnded):
        placing.place_idle(state, now_s)
    elif event.moves and _can_move_from(state, member):
        _leave_kv(state, member, event.produced_tokens)
        _move(state, member, f"moved: {event.cause}", event.produced_tokens, now_s)


def _can_move_from(state: State, member: Member) -> bool:
    """Return whether the instance is drained and other instances can take its streams now."""
    others = [each for each in state.view.members.values() if not each.must_drain]
    return member.is_drained and have_roles_of(member, others)


def _leave_kv(state: State, member: Member, produced_tokens: Mapping[StreamId, int]) -> None:
    """Keep the KV of the instance's streams for fetching: by a lease while the process is about to
    end, else because nothing new replaces pages in its prefix cache.
    """
    for stream in _running(state, member) if member.abilities.retains else []:
        is_whole = not member.has_lost_cells(stream.id)
        if stream.stage is Stage.DECODE and stream.attempt.resumed and is_whole:
            produced = max(stream.produced_tokens, produced_tokens.get(stream.id, 0))
            pages = (stream.prompt_tokens + produced - 1) // member.abilities.page_size_tokens
            kv_locations.leave(state, stream, member, pages)


def _move(
    state: State, member: Member, cause: str, produced_tokens: Mapping[StreamId, int], now_s: float
) -> None:
    """Decide the instance's streams as if it were lost, although it runs: nothing is fenced.
    Streams that no other instance can continue stay while it runs.
    """
    kept = {
        each.id
        for each in _running(state, member)
        if not _can_leave(state, each, member, produced_tokens.get(each.id, 0))
    }
    steps.halt_all(state, [each for each in _running(state, member) if each.id not in kept])
    event = InstanceLeft(member.id, cause, produced_tokens, is_lost=False)
    placing.gather(state, _leave(state, member, event, now_s, kept), now_s)


def _can_leave(state: State, stream: Stream, member: Member, produced_tokens: int) -> bool:
    """Return whether another instance can continue the stream as it must be continued, in time."""
    if not stream.must_replay:
        return True
    stream.generates = member.generates or stream.generates
    step_s = member.times.table.step_overhead_s if stream.token_s is None else stream.token_s
    if max(stream.produced_tokens, produced_tokens) * step_s > REPLAY_S_MAX:
        return False
    others = (each for each in state.view.targets(stream.name) if each is not member)
    return any(stream.may_replay(each) and not stream.bars(each) for each in others)


def _lose(
    state: State,
    member: Member,
    cause: str,
    produced_tokens: Mapping[StreamId, int],
    now_s: float,
) -> list[Stream]:
    """Remove the instance and its streams from the books; return the streams to place again."""
    state.view.remove(member)
    _count_if_quick(state, member, now_s)
    is_last = not have_roles_of(member, [*state.view.members.values()])
    counted = state.poison.lost(member, now_s, is_last=is_last)
    waiting = [stream for stream in counted if stream.stage is Stage.WAITING]
    for stream_id in list(member.held):
        kv_locations.forget(state, stream_id, member.id)
    event = InstanceLeft(member.id, cause, produced_tokens, is_lost=True)
    victims = _leave(state, member, event, now_s)
    placing.clear_suspects(state, member.id, cause)
    return [*victims, *waiting]


def _count_if_quick(state: State, member: Member, now_s: float) -> None:
    """Count a death soon after coming up; the count begins anew unless one other instance of the
    role has outlived all of these deaths. Where all die alike, a pause saves no stream: it gathers
    them at the instances that are left, and the next death hits all of them.
    """
    if now_s - member.up_s >= _QUICK_S:
        state.quick_deaths.pop(member.id, None)
        return
    deaths, since_s = state.quick_deaths.get(member.id, (0, member.up_s))
    if not any(each.up_s <= since_s for each in peers(state, member) if each is not member):
        deaths, since_s = 0, member.up_s
    state.quick_deaths[member.id] = deaths + 1, since_s


def _leave(
    state: State,
    member: Member,
    event: InstanceLeft,
    now_s: float,
    kept: Collection[StreamId] = (),
) -> list[Stream]:
    """Apply the event to the instance's streams but for those that stay, and to its queue for
    slots; return the streams to place again.
    """
    running = (each for each in sorted(member.running) if each not in kept)
    names = [*running, *state.slots.waiting_for(member.id)]
    streams = [state.streams[each] for each in names]
    for stream in streams:
        steps.apply(state, stream.id, event, now_s)
    return streams


def _running(state: State, member: Member) -> list[Stream]:
    return [state.streams[stream_id] for stream_id in sorted(member.running)]
