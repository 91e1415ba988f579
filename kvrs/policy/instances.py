"""Instance events: an instance comes up, is lost, or its streams are moved before it fails."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import assert_never

from kvrs.config.policy import Degraded, Failing, GpuSettings, PolicySettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy import quarantine
from kvrs.policy.ledger import Ledger
from kvrs.policy.model.cluster_view import Member, have_roles_of
from kvrs.policy.model.events import (
    DrainEnded,
    DrainOrdered,
    DrainReported,
    GpuJudged,
    HolderLost,
    InstanceExited,
    InstanceLost,
    InstanceReformed,
    InstanceReforming,
    InstanceRemoved,
    InstanceUp,
    LoadReported,
    NamesListed,
    OthersBooked,
    SelfTested,
)
from kvrs.policy.model.lifecycle import InstanceLeft, Stage
from kvrs.policy.model.streams import Stream
from kvrs.policy.restarts import Restarts
from kvrs.policy.starter import Starter
from kvrs.policy.staying import Staying
from kvrs.policy.steps import Steps
from kvrs.protocol.gpus import GpuState

# An instance and the agent of its node that are lost within this time are lost with the node.
_LOST_WITH_ITS_NODE_S = 2.0


class InstanceEvents:
    def __init__(
        self,
        ledger: Ledger,
        starter: Starter,
        staying: Staying,
        steps: Steps,
        settings: PolicySettings,
    ) -> None:
        self._ledger = ledger
        self._view = ledger.view
        self._starter = starter
        self._staying = staying
        self._steps = steps
        self._settings = settings
        self._restarts = Restarts()
        # Instances with an unhealthy GPU that are to be left; a new process is on the same GPU.
        self._gpu_degraded: set[InstanceId] = set()
        self._drain_ordered: set[InstanceId] = set()
        self._agents_lost_s: dict[NodeId, float] = {}
        self._ended_from_outside: set[tuple[InstanceId, int]] = set()

    def reload(self, settings: PolicySettings) -> None:
        self._settings = settings

    def up(self, event: InstanceUp, now_s: float) -> None:
        instance = event.instance
        member = self._view.members.get(instance.id)
        if member is not None and instance.epoch <= member.instance.epoch:
            return
        if member is not None and event.lives_on:
            member.set_instance(instance)
            self._view.set_self_tested(member, moves_kv=instance.moves_kv, tokens=instance.tokens)
            return
        # What ran in the former epoch is gone, also when its loss was not reported.
        lost = [] if member is None else self._lose(member, "replaced by a new epoch", {}, now_s)
        member = self._view.add(instance)
        member.gpu_degraded = instance.id in self._gpu_degraded
        member.drain_ordered = instance.id in self._drain_ordered
        self._view.update()
        self._restarts.up(self._view.members[instance.id], now_s)
        self._ledger.kv_locations.instance_up(self._view.members[instance.id])
        if sum(m.instance.role is instance.role for m in self._view.members.values()) == 1:
            # The wait to run apart begins when there is anywhere to run.
            wait_s = quarantine.first_wait_s(self._settings.recovery.wait_s)
            for stream in self._ledger.idle.values():
                stream.recovery.wait_apart(now_s + wait_s)
        for stream in self._ledger.streams.values():
            stream.recovery.note_fate(instance.id, had_not_ended=event.had_not_ended)
        self._starter.gather(lost, now_s)
        self._starter.place_idle(now_s)

    def reported(self, event: LoadReported, now_s: float) -> None:
        member = self._view.members.get(event.instance)
        if member is None:
            return
        member.reported_queue_s = event.queue_delay_s
        if member.decodes:
            # What it runs or queues, and this proxy and its workers have not sent there, is of
            # other proxies (LUMEN section 4.3: the load of a target is all of that).
            others = max(0, event.streams - len(member.running) - member.others_streams)
            self._view.count_stream(member, others - member.others_reported)
            member.others_reported = others
        if (reforming := member.reforming) is not None:
            reforming.queue_s = event.queue_delay_s
            member.reported_queue_s = max(event.queue_delay_s, reforming.ready_s - now_s)
        idle = self._ledger.idle
        broken = [stream for stream in idle.values() if stream.recovery.broken]
        freed = [each for each in broken if each.recovery.note_alive(member.instance, now_s)]
        for stream in freed:
            if stream.id in idle:  # Else it was gathered, and placed with one before it.
                self._starter.place_again(stream, now_s)

    def others_booked(self, event: OthersBooked) -> None:
        if (member := self._view.members.get(event.instance)) is not None:
            self._view.count_stream(member, event.streams - member.others_streams)
            member.others_streams, member.others_work_s = event.streams, event.work_s

    def ended(self, event: InstanceLost | InstanceRemoved | InstanceExited, now_s: float) -> None:
        match event:
            case InstanceLost():
                self._lost(event, now_s)
            case InstanceRemoved():
                self._removed(event, now_s)
            case InstanceExited():
                self._exited(event)
            case _:
                assert_never(event)

    def _lost(self, event: InstanceLost, now_s: float) -> None:
        member = self._view.members.get(event.instance)
        if member is not None and event.epoch >= member.instance.epoch:
            victims = self._lose(
                member, event.cause, event.produced_tokens, now_s, may_live=event.may_live
            )
            self._starter.gather(victims, now_s)

    def _removed(self, event: InstanceRemoved, now_s: float) -> None:
        member, victims = self._view.members.get(event.instance), []
        if member is not None:
            member.drain_ordered = True  # What runs there is not to blame.
            victims = self._lose(member, "removed", event.produced_tokens, now_s)
        self._drain_ordered.discard(event.instance)
        self._gpu_degraded.discard(event.instance)
        self._restarts.forget(event.instance)
        self._starter.gather(victims, now_s)

    def _exited(self, event: InstanceExited) -> None:
        """No request ends a process from outside; how it ended otherwise changes nothing: its death
        was evidence, and stays it.
        """
        if event.is_external:
            self._ended_from_outside.add((event.instance, event.epoch))
            for stream in self._ledger.streams.values():
                stream.recovery.note_ended_from_outside(event.instance, event.epoch)

    def agent_lost(self, event: HolderLost, now_s: float) -> None:
        """No request ends an agent: what dies with it on its node dies with the node."""
        agent = self._view.agents.get(event.holder)
        if agent is None or event.epoch < agent.epoch:
            return
        self._agents_lost_s[agent.node] = now_s
        for stream in self._ledger.streams.values():
            stream.recovery.note_node_lost(agent.node, now_s - _LOST_WITH_ITS_NODE_S)
        self._ledger.kv_locations.agent_lost(event)

    def gpu_judged(self, event: GpuJudged, now_s: float) -> None:
        treatment = treatment_of(self._settings.gpu, event.state)
        if treatment is None:
            self._gpu_degraded.discard(event.instance)
        else:
            self._gpu_degraded.add(event.instance)
        member = self._view.members.get(event.instance)
        if member is None:
            return
        member.gpu_degraded = treatment is not None
        self._view.update()
        if treatment is Failing.MOVE and member.is_drained:
            cause = f"moved: its GPU is {event.state.value}: {event.reason}"
            self._move(member, cause, event.produced_tokens, now_s)

    def learned(self, event: SelfTested | NamesListed, now_s: float) -> None:
        """Other facts of an instance that runs on."""
        member = self._view.members.get(event.instance)
        if member is None or event.epoch != member.instance.epoch:
            return
        match event:
            case SelfTested():
                self._view.set_self_tested(member, moves_kv=event.moves_kv, tokens=event.tokens)
            case NamesListed():
                # With the table of all its ranks, from which the other one is made.
                member.set_instance(replace(member.unscaled, names=event.names))
                self._starter.place_idle(now_s)
            case _:
                assert_never(event)

    def drain_reported(self, event: DrainReported, now_s: float) -> None:
        """Streams on an instance that is about to end are moved while their KV is still there."""
        member = self._view.members.get(event.instance)
        if member is None or event.epoch != member.instance.epoch:
            return
        member.draining = True
        self._view.update()
        # With every report, so that one which re-forms is waited for.
        if not self._can_move_from(member):
            return
        self._leave_kv(member, event.produced_tokens)
        self._move(member, "moved: its instance is about to end", event.produced_tokens, now_s)

    def ordered(self, event: DrainOrdered | DrainEnded, now_s: float) -> None:
        """By an operator, for all processes of the instance."""
        member = self._view.members.get(event.instance)
        if isinstance(event, DrainEnded):
            self._drain_ordered.discard(event.instance)
        else:
            self._drain_ordered.add(event.instance)
        if member is None:
            return
        member.drain_ordered = isinstance(event, DrainOrdered)
        self._view.update()
        if isinstance(event, DrainEnded):
            self._starter.place_idle(now_s)
        elif event.moves and self._can_move_from(member):
            self._leave_kv(member, event.produced_tokens)
            self._move(member, "moved: its instance is drained", event.produced_tokens, now_s)

    def reforming(self, event: InstanceReforming | InstanceReformed, now_s: float) -> None:
        """Its streams stay, or leave; what queues for a slot there is placed again."""
        member = self._view.members.get(event.instance)
        if member is None:
            return
        if isinstance(event, InstanceReformed):
            self._staying.reformed(event, now_s)
            return
        self._staying.reforming(event, self._running(member), now_s)
        queued = self._ledger.slots.waiting_for(event.instance)
        if member.reforming is not None and member.is_drained and queued:
            left = InstanceLeft(event.instance, event.cause, {}, is_lost=False)
            stranded = [self._ledger.streams[each] for each in queued]
            for stream in stranded:
                self._steps.apply(stream.id, left, now_s)
            self._starter.place_all(stranded, now_s)

    def _can_move_from(self, member: Member) -> bool:
        """Whether it is drained, and others compute now that can have what runs there."""
        others = [each for each in self._view.members.values() if not each.must_drain]
        return member.is_drained and have_roles_of(member, others)

    def _leave_kv(self, member: Member, produced_tokens: Mapping[StreamId, int]) -> None:
        """What its streams have computed can be fetched there: by a lease while the process is
        about to end, else because nothing new takes the place of pages in its prefix cache.
        """
        for stream in self._running(member) if member.retains else []:
            if stream.stage is Stage.DECODE and stream.attempt.resumed:
                produced = max(stream.produced_tokens, produced_tokens.get(stream.id, 0))
                pages = (stream.prompt_tokens + produced - 1) // member.page_size_tokens
                self._ledger.kv_locations.leave(stream, member, pages)

    def _move(
        self, member: Member, cause: str, produced_tokens: Mapping[StreamId, int], now_s: float
    ) -> None:
        """Decide what runs there as if it were lost, though it still runs: nothing is fenced."""
        self._steps.halt_all(self._running(member))
        event = InstanceLeft(member.instance.id, cause, produced_tokens, is_lost=False)
        self._starter.gather(self._leave(member, event, now_s), now_s)

    def _lose(
        self,
        member: Member,
        cause: str,
        produced_tokens: Mapping[StreamId, int],
        now_s: float,
        *,
        may_live: bool = False,
    ) -> list[Stream]:
        """Take it and its streams out of the books; return those that are to be placed again."""
        self._view.remove(member)
        self._restarts.died(member, now_s)
        wait_s = self._settings.recovery.wait_s
        streams = self._ledger.streams.values()
        suspects = []
        if not self._has_own_cause(member, now_s):
            suspects = quarantine.note_death(self._view, streams, member, wait_s, may_live=may_live)
        waiting = [stream for stream in suspects if stream.stage is Stage.WAITING]
        for stream_id in list(member.held):
            self._ledger.kv_locations.forget(stream_id, member.instance.id)
        event = InstanceLeft(member.instance.id, cause, produced_tokens, is_lost=True)
        victims = self._leave(member, event, now_s)
        self._starter.clear_suspects(member.instance.id, cause)
        return [*victims, *waiting]

    def _has_own_cause(self, member: Member, now_s: float) -> bool:
        """Whether its death says nothing of its streams: it was about to end, is drained by an
        operator, its GPU fails, its process was ended from outside, or its node is lost.
        """
        if (member.instance.id, member.instance.epoch) in self._ended_from_outside:
            return True
        agent_lost_s = self._agents_lost_s.get(member.instance.node, -inf)
        return member.must_drain or now_s - agent_lost_s < _LOST_WITH_ITS_NODE_S

    def _leave(self, member: Member, event: InstanceLeft, now_s: float) -> list[Stream]:
        """What runs there, and what queues for a slot there, is to be placed again."""
        queued = self._ledger.slots.waiting_for(member.instance.id)
        streams = [*self._running(member), *(self._ledger.streams[each] for each in queued)]
        for stream in streams:
            self._steps.apply(stream.id, event, now_s)
        return streams

    def _running(self, member: Member) -> list[Stream]:
        return [self._ledger.streams[stream_id] for stream_id in sorted(member.running)]


def treatment_of(settings: GpuSettings, state: GpuState) -> Failing | None:
    """How to treat an instance with an unhealthy GPU; None: like any other."""
    match state:
        case GpuState.HEALTHY:
            return None
        case GpuState.DEGRADED:
            return Failing.DRAIN if settings.degraded is Degraded.DRAIN else None
        case GpuState.FAILING:
            return settings.failing
        case _:
            assert_never(state)
