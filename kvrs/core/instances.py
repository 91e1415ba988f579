"""Instance events: an instance comes up, is lost, or its streams are moved before it fails."""

from collections.abc import Callable, Mapping
from typing import assert_never

from kvrs.config.policy import PolicySettings
from kvrs.core.ledger import Ledger
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import have_roles_of
from kvrs.core.model.lifecycle import InstanceLeft, Stage
from kvrs.core.model.member import Member, pause_s
from kvrs.core.model.reforming import cause_of
from kvrs.core.model.reports import changes_ranks
from kvrs.core.model.streams import Stream
from kvrs.core.starter import Starter
from kvrs.core.staying import Staying
from kvrs.core.steps import Steps
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.gpus import GpuState

# A death within this time of coming up is a quick one. So many of them in a row are no loop yet;
# each further process of the instance waits longer before it gets work.
_QUICK_S = 10.0
_FREE_DEATHS = 2
_FIRST_PAUSE_S = 1.0


class InstanceEvents:
    def __init__(
        self,
        ledger: Ledger,
        starter: Starter,
        staying: Staying,
        steps: Steps,
        settings: PolicySettings,
        member_of: Callable[[ev.InstanceUp], Member],
    ) -> None:
        self._ledger = ledger
        self._view = ledger.view
        self._poison = ledger.poison
        self._starter = starter
        self._staying = staying
        self._steps = steps
        self._settings = settings
        self._member_of = member_of
        self._quick_deaths: dict[InstanceId, int] = {}  # In a row.
        # Instances with an unhealthy GPU that are to be left; a new process is on the same GPU.
        self._gpu_degraded: set[InstanceId] = set()
        self._drain_ordered: set[InstanceId] = set()

    def reload(self, settings: PolicySettings) -> None:
        self._settings = settings

    def up(self, event: ev.InstanceUp, now_s: float) -> None:
        info = event.info
        member = self._view.members.get(info.id)
        if member is not None and info.epoch <= member.epoch:
            return
        if member is not None and event.lives_on:
            member.set_info(info)
            member.told = None
            self._view.set_self_tested(member, event)
            return
        # What ran in the former epoch is gone, also when its loss was not reported.
        lost = [] if member is None else self._lose(member, "replaced by a new epoch", {}, now_s)
        member = self._view.add(self._member_of(event))
        self._view.prefixes.up(member, keeps=bool(info.kept) or event.had_not_ended)
        self._ledger.prefill_scale.up(member)
        self._view.set_self_tested(member, event)
        member.gpu_degraded = info.id in self._gpu_degraded
        member.drain_ordered = info.id in self._drain_ordered
        self._view.update(member)
        self._pause_after_deaths(member, now_s)
        self._ledger.kv_locations.instance_up(member)
        if event.had_not_ended:
            self._poison.had_not_ended(info.id)
        self._starter.gather(lost, now_s)
        self._starter.place_idle(now_s)

    def _pause_after_deaths(self, member: Member, now_s: float) -> None:
        """A process has come up; it is closed for a while if those before it died quickly."""
        deaths = member.answers.quick_deaths = self._quick_deaths.get(member.id, 0)
        member.up_s = now_s
        if deaths >= _FREE_DEATHS:
            cause = f"it died {deaths} times within {_QUICK_S:g} s of coming up"
            pause = pause_s(member.id, _FIRST_PAUSE_S, deaths - _FREE_DEATHS)
            member.answers.close(cause, now_s, pause)
            member.up_s += pause

    def reported(self, event: ev.LoadReported, now_s: float) -> None:
        member, report = self._view.members.get(event.instance), event.report
        if member is None or report.epoch != member.epoch:
            return
        if report.draining:
            self._drain(member, event.produced_tokens, now_s)
        if changes_ranks(member, report, now_s):
            self._re_form(member, event, now_s)
        member.told = report
        if not member.decodes:
            self._view.work.note_prompts(member, report.queued + report.running)
        else:
            # Streams that this proxy has not sent there belong to other proxies (LUMEN section 4.3:
            # the load of a target is all that it runs or queues).
            streams = report.queued + report.running if event.has_peers else 0
            others = max(0, streams - len(member.running))
            self._view.count_stream(member, others - member.others_reported)
            member.others_reported = others
        queue_s = report.queue_delay_s
        if (reforming := member.reforming) is not None:
            reforming.queue_s = queue_s
            # Nothing of the queue is computed before.
            queue_s += max(0.0, reforming.ready_s - now_s)
        self._view.prefill_order.note_queue(member, queue_s)

    def _drain(self, member: Member, produced: Mapping[StreamId, int], now_s: float) -> None:
        """Streams on an instance that is about to end are moved while their KV is still there."""
        member.draining = True
        self._view.update(member)
        # With every report, so that one which re-forms is waited for.
        if self._can_move_from(member):
            self._leave_kv(member, produced)
            self._move(member, "moved: its instance is about to end", produced, now_s)

    def _re_form(self, member: Member, event: ev.LoadReported, now_s: float) -> None:
        """Its streams stay, or leave; what queues for a slot there is placed again."""
        if event.report.reforming is None:
            self._staying.reformed(member, event, now_s)
            return
        self._staying.reforming(member, event, self._running(member), now_s)
        queued = self._ledger.slots.waiting_for(member.id)
        if member.reforming is not None and member.is_drained and queued:
            cause = cause_of(member.id, event.report.reforming)
            left = InstanceLeft(member.id, cause, {}, is_lost=False)
            stranded = [self._ledger.streams[each] for each in queued]
            for stream in stranded:
                self._steps.apply(stream.id, left, now_s)
            self._starter.place_all(stranded, now_s)

    def ended(
        self, event: ev.InstanceLost | ev.InstanceRemoved | ev.InstanceExited, now_s: float
    ) -> None:
        name, member = event.instance, self._view.members.get(event.instance)
        match event:
            case ev.InstanceLost():
                if member is not None and event.epoch >= member.epoch:
                    victims = self._lose(member, event.cause, event.produced_tokens, now_s)
                    self._starter.gather(victims, now_s)
            case ev.InstanceRemoved():
                if member is not None:
                    member.drain_ordered = True  # What runs there is not to blame.
                    victims = self._lose(member, "removed", event.produced_tokens, now_s)
                    self._starter.gather(victims, now_s)
                self._drain_ordered.discard(name)
                self._gpu_degraded.discard(name)
                self._quick_deaths.pop(name, None)
                self._view.prefixes.removed(name)
            case ev.InstanceExited():
                if event.is_external:
                    self._poison.exited(name, event.epoch, now_s)
            case _:
                assert_never(event)

    def agent_lost(self, event: ev.HolderLost, now_s: float) -> None:
        agent = self._view.agents.get(event.holder)
        if agent is None or event.epoch < agent.epoch:
            return
        self._ledger.kv_locations.agent_lost(event)
        self._poison.node_lost(agent.node, now_s)

    def gpu_judged(self, event: ev.GpuJudged, now_s: float) -> None:
        is_failing = event.state is GpuState.FAILING
        if is_failing:
            self._gpu_degraded.add(event.instance)
        else:
            self._gpu_degraded.discard(event.instance)
        member = self._view.members.get(event.instance)
        if member is None:
            return
        member.gpu_degraded = is_failing
        self._view.update(member)
        if is_failing and member.is_drained:
            cause = f"moved: its GPU is {event.state.value}: {event.reason}"
            self._move(member, cause, event.produced_tokens, now_s)

    def learned(self, event: ev.SelfTested | ev.NamesListed, now_s: float) -> None:
        """Other facts of an instance that runs on."""
        member = self._view.members.get(event.instance)
        if member is None or event.epoch != member.epoch:
            return
        match event:
            case ev.SelfTested():
                self._view.set_self_tested(member, event)
            case ev.NamesListed():
                member.learn(names=event.names)
                self._starter.place_idle(now_s)
            case _:
                assert_never(event)

    def ordered(self, event: ev.DrainOrdered | ev.DrainEnded, now_s: float) -> None:
        """By an operator, for all processes of the instance."""
        member = self._view.members.get(event.instance)
        if isinstance(event, ev.DrainEnded):
            self._drain_ordered.discard(event.instance)
        else:
            self._drain_ordered.add(event.instance)
        if member is None:
            return
        member.drain_ordered = isinstance(event, ev.DrainOrdered)
        self._view.update(member)
        if isinstance(event, ev.DrainEnded):
            self._starter.place_idle(now_s)
        elif event.moves and self._can_move_from(member):
            self._leave_kv(member, event.produced_tokens)
            self._move(member, "moved: its instance is drained", event.produced_tokens, now_s)

    def _can_move_from(self, member: Member) -> bool:
        """The instance is drained, and others that compute now can take its streams."""
        others = [each for each in self._view.members.values() if not each.must_drain]
        return member.is_drained and have_roles_of(member, others)

    def _leave_kv(self, member: Member, produced_tokens: Mapping[StreamId, int]) -> None:
        """Keep the KV of its streams for fetching: by a lease while the process is about to end,
        else because nothing new takes the place of pages in its prefix cache.
        """
        for stream in self._running(member) if member.retains else []:
            is_whole = not member.has_lost_cells(stream.id)
            if stream.stage is Stage.DECODE and stream.attempt.resumed and is_whole:
                produced = max(stream.produced_tokens, produced_tokens.get(stream.id, 0))
                pages = (stream.prompt_tokens + produced - 1) // member.page_size_tokens
                self._ledger.kv_locations.leave(stream, member, pages)

    def _move(
        self, member: Member, cause: str, produced_tokens: Mapping[StreamId, int], now_s: float
    ) -> None:
        """Decide what runs there as if it were lost, though it still runs: nothing is fenced."""
        self._steps.halt_all(self._running(member))
        event = InstanceLeft(member.id, cause, produced_tokens, is_lost=False)
        self._starter.gather(self._leave(member, event, now_s), now_s)

    def _lose(
        self,
        member: Member,
        cause: str,
        produced_tokens: Mapping[StreamId, int],
        now_s: float,
    ) -> list[Stream]:
        """Take it and its streams out of the books; return those that are to be placed again."""
        self._view.remove(member)
        if now_s - member.up_s < _QUICK_S:
            self._quick_deaths[member.id] = self._quick_deaths.get(member.id, 0) + 1
        else:
            self._quick_deaths.pop(member.id, None)
        counted = self._poison.lost(member, now_s)
        waiting = [stream for stream in counted if stream.stage is Stage.WAITING]
        for stream_id in list(member.held):
            self._ledger.kv_locations.forget(stream_id, member.id)
        event = InstanceLeft(member.id, cause, produced_tokens, is_lost=True)
        victims = self._leave(member, event, now_s)
        self._starter.clear_suspects(member.id, cause)
        return [*victims, *waiting]

    def _leave(self, member: Member, event: InstanceLeft, now_s: float) -> list[Stream]:
        """Apply the event to the streams that run there or queue for a slot there: they are to be
        placed again.
        """
        names = [*sorted(member.running), *self._ledger.slots.waiting_for(member.id)]
        streams = [self._ledger.streams[each] for each in names]
        for stream in streams:
            self._steps.apply(stream.id, event, now_s)
        return streams

    def _running(self, member: Member) -> list[Stream]:
        return [self._ledger.streams[stream_id] for stream_id in sorted(member.running)]
