"""Policy that decides where streams run, and how they survive the loss of an instance (DESIGN 4,
5).

Pure: no clock, no socket, no randomness. A proxy drives it in real time, a simulator in virtual
time. The stages of a stream, and what each event does to it, are the table of
`model/lifecycle.py`.

Invariants: a stream has one current attempt, whose number only rises; reports of older attempts are
ignored; no `Start` names an instance that is not up, nor a lost holder; a stream that is neither
started nor given up has an alarm; a stream is moved only because its instance was lost, failed it,
is about to end, has a failing GPU, or is drained by an operator.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

from kvrs.config.backup import BackupSettings
from kvrs.config.policy import Handoff, PolicySettings, Route, SloSettings
from kvrs.core import instances, kv_locations, placing, steps, together
from kvrs.core.checkpoints import protection
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.estimates import Option
from kvrs.core.model.lifecycle import AlarmDue, SlotFree, Stage
from kvrs.core.model.member import Health, Member
from kvrs.core.model.prefixes import Hits
from kvrs.core.model.streams import Stream
from kvrs.core.routing import has_others
from kvrs.core.state import CoreSettings, State, new_agent, new_member
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.mirror import MAX_HASH_BYTES, MAX_SENT, SentPrompt

NO_BACKUP = BackupSettings()


class RecoveryPolicy:
    """The policy of one proxy, with that proxy's own view of the cluster."""

    def __init__(
        self,
        policy: PolicySettings,
        slo: SloSettings,
        backup: BackupSettings = NO_BACKUP,
        *,
        member_of: Callable[[ev.InstanceUp], Member] = new_member,
        agent_of: Callable[[ev.HolderUp], Agent] = new_agent,
        stream_of: Callable[[StreamId], Stream] = Stream,
    ) -> None:
        """`member_of`, `agent_of`: make the record of an instance or agent that has come up, used
        only here or also by its watch. `stream_of`: makes the record of a stream that has arrived,
        to which the proxy adds its journal.
        """
        sections = CoreSettings(policy, slo, backup)
        self.state = state = State(sections, member_of, agent_of, stream_of)
        # Read-only views: all streams, and the instances that are up.
        self.streams: Mapping[StreamId, Stream] = state.streams
        self.members: Mapping[InstanceId, Member] = state.view.members

    def loads_rows_of(self, target: Member, holder: Member) -> bool:
        """Return whether the target can load rows that the agent of the holder's node serves."""
        if not holder.shared.has_tier or holder.shared.rows != target.shared.rows:
            return False
        if holder.node == target.node:
            return True
        agent = self.state.view.agent_on(holder.node)
        return agent is not None and agent.rows.to_other_nodes

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        """Apply one event; return the actions to perform, in order."""
        state = self.state
        state.view.now_s = now_s
        if state.begun:
            together.predict(state)
        if isinstance(event, ev.OfStream):
            stream = self.streams.get(event.stream)
            if stream is None:
                method = steps.METHODS[type(event)][None]
            elif isinstance(event, ev.OfAttempt) and event.attempt != stream.attempt.number:
                method = None  # `Ignored.LATE`: a later attempt has begun.
            else:
                method = steps.METHODS[type(event)][stream.stage]
            if method is not None:
                method(state, stream, event, now_s)
        else:
            self._apply(event, now_s)
        if state.timers.heap or state.slots.awaited or state.held_back:
            self._place_due(now_s)
        actions = state.actions.copy()
        state.actions.clear()
        return actions

    def _apply(self, event: ev.OfCluster, now_s: float) -> None:
        """Apply an event that concerns more than one stream."""
        state = self.state
        match event:
            case ev.InstanceUp():
                instances.up(state, event, now_s)
            case ev.PagesKept():
                kv_locations.kept_pages(state, event)
            case ev.InstanceLost() | ev.InstanceRemoved() | ev.InstanceExited():
                instances.ended(state, event, now_s)
            case ev.GpuJudged():
                instances.gpu_judged(state, event, now_s)
            case ev.DrainOrdered() | ev.DrainEnded():
                instances.ordered(state, event, now_s)
            case ev.SelfTested() | ev.NamesListed() | ev.TransferHung():
                instances.learned(state, event, now_s)
            case ev.LoadReported():
                instances.reported(state, event, now_s)
            case ev.LinkMeasured():
                link = state.view.link(event.source, event.target)
                link.measure(event.bytes_per_s, event.mean_bytes_per_s)
            case ev.HolderUp():
                kv_locations.agent_up(state, event)
            case ev.HolderLost():
                instances.agent_lost(state, event, now_s)
            case ev.CheckpointsReported():
                kv_locations.reported(state, event)
            case ev.RetentionLost():
                for stream in event.streams:
                    kv_locations.forget(state, stream, event.instance)
            case ev.RowsCounted():
                together.rows_counted(state, event, now_s)
            case ev.TimerFired():
                state.timers.woken(now_s)
            case ev.SettingsReloaded():
                state.reload(event.policy, event.slo)
            case _:
                assert_never(event)

    def kept(self, stream_id: StreamId) -> tuple[ev.Kept, ...]:
        """Places of a stream's KV, for a proxy that may have to continue the stream."""
        return kv_locations.of(self.state, stream_id)

    def has_others(self, instance: InstanceId, is_heard: Callable[[InstanceId], bool]) -> bool:
        """Return whether instances for which `is_heard` holds could take this
        instance's streams.
        """
        member = self.state.view.members.get(instance)
        return member is None or has_others(self.state.view, member, is_heard)

    def keeps_plan(self, stream: Stream, now_s: float) -> bool:
        """Return whether all is healthy, so that an answer of prefill, or a token, changes nothing
        for the stream.
        """
        state = self.state
        attempt = stream.attempt
        decode = attempt.decodes_on
        return (
            attempt.number == 1
            and not (stream.adopted or stream.name or state.settings.keeps_checkpoints)
            and attempt.option is Option.START
            and attempt.stay_deadline is None
            and state.settings.policy.handoff is Handoff.OWN_PAIR
            and decode is not None
            and decode.health is Health.UP
            and not decode.is_drained
            and self.members.get(decode.id) is decode
            and decode.is_clear(now_s)
        )

    @property
    def routes_by_prefix(self) -> bool:
        """Return whether streams are placed by cached prefixes: by the settings, and because some
        instance has a prefix cache.
        """
        return self.state.settings.policy.route is Route.PREFIX and bool(
            self.state.view.prefixes.caching
        )

    @property
    def prefix_hits(self) -> Mapping[InstanceId, Hits]:
        """Cached tokens of prompts, by instance that reports them."""
        return self.state.view.prefixes.hits

    def take_sent(self) -> list[SentPrompt]:
        """Take the prompts sent since the last call, for the other proxies."""
        view = self.state.view
        stored = view.stored.take_sent(MAX_HASH_BYTES // 2)
        room_bytes = MAX_HASH_BYTES - sum(len(each.hashes) for each in stored)
        return [*stored, *view.prefixes.take_sent(room_bytes)][:MAX_SENT]

    def sent_elsewhere(self, prompts: Iterable[SentPrompt]) -> None:
        """Note prompts that other proxies have sent to instances, and had agents store. Processes
        that are not up here are ignored.
        """
        state = self.state
        if not self.routes_by_prefix:
            return
        for sent in prompts:
            member = state.view.members.get(sent.instance)
            agent = state.view.agents.get(sent.instance)
            if member is not None and member.epoch == sent.epoch:
                state.view.prefixes.note_sent(member, sent)
            elif agent is not None and agent.epoch == sent.epoch:
                state.view.stored.note_sent(agent, sent)

    @property
    def has_waiting(self) -> bool:
        """Return whether some streams wait for a place or a slot."""
        return bool(self.state.idle or self.state.slots.awaited)

    def snapshot(self) -> dict[str, Any]:
        """Plain data for people: `cluster_snapshot`, and running and waiting streams."""
        state = self.state
        streams = state.streams.values()
        stages = {stage.value: 0 for stage in Stage}
        for stream in streams:
            stages[stream.stage.value] += 1
        waiting = [
            {
                "stream": stream.id,
                "stage": stream.stage.value,
                "since_s": stream.waiting_since_s,
                "attempt": stream.attempt.number,
            }
            for stream in sorted(state.idle.values(), key=lambda stream: stream.order)
        ]
        kept = streams if state.settings.keeps_checkpoints else ()
        return {
            **self.cluster_snapshot(),
            "streams": stages,
            "waiting": waiting,
            "checkpoints": {
                stream.id: protection(stream) for stream in kept if stream.attempt.number
            },
            "unprotected": {stream.id: stream.unprotected for stream in kept if stream.unprotected},
        }

    def cluster_snapshot(self) -> dict[str, Any]:
        """Plain data about the cluster and what was learned; its cost does not grow with the
        streams, so a scrape of metrics may read it on the event loop.
        """
        state = self.state
        return {
            "policy": state.settings.policy.name.value,
            **state.view.snapshot(),
            "slots": state.slots.snapshot(),
            "retries": state.retries.snapshot(len(state.streams)),
            "spread": state.spread.snapshot(),
            "prefill_guess": state.prefill_scale.snapshot(),
        }

    def _place_due(self, now_s: float) -> None:
        """Place waiting streams whose alarm, slot or instance has come."""
        state = self.state
        if state.timers.heap:
            while (due := state.timers.next_due(now_s)) is not None:
                steps.apply(state, due, AlarmDue(), now_s)
        if state.slots.awaited:
            while (served := state.slots.next_served(now_s)) is not None:
                steps.apply(state, served, SlotFree(), now_s)
        if state.held_back:
            placing.place_held_back(state, now_s)
        if state.timers.heap and (wake := state.timers.next_wake(now_s)) is not None:
            state.actions.append(wake)
