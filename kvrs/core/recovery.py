"""Decide where streams run, and how they survive the loss of what they run on (DESIGN 4, 5).

Pure: no clock, no socket, no randomness. A proxy drives it in real time, a simulator in virtual
time. The stages of a stream, and what each event does to it, are the table of
`model/lifecycle.py`.

Invariants: a stream has one current attempt and its number only rises; what an older attempt
reports is ignored; no `Start` names an instance that is not up, nor a holder that is lost; a stream
that is neither started nor given up on has an alarm set; a stream is moved only because what it ran
on was lost or failed it, or is about to end or runs on a GPU that is, or an operator drains it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import Handoff, PolicySettings, Route, SloSettings
from kvrs.core.books.checkpoints import Checkpoints, protection
from kvrs.core.books.waiting import SlotBook, Timers
from kvrs.core.decisions import Decisions
from kvrs.core.defences.outliers import Outliers
from kvrs.core.instances import InstanceEvents
from kvrs.core.ledger import Ledger
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Agent, ClusterView
from kvrs.core.model.estimates import Option
from kvrs.core.model.lifecycle import AlarmDue, SlotFree, Stage
from kvrs.core.model.member import Health, Member
from kvrs.core.model.prefixes import Hits
from kvrs.core.model.streams import Stream
from kvrs.core.routing import has_others
from kvrs.core.starter import Starter
from kvrs.core.staying import Staying
from kvrs.core.steps import Steps
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.mirror import MAX_HASH_BYTES, MAX_SENT, SentPrompt

NO_BACKUP = BackupSettings()


class RecoveryPolicy:
    """One per proxy, with that proxy's own view of the cluster."""

    def __init__(
        self,
        policy: PolicySettings,
        slo: SloSettings,
        backup: BackupSettings = NO_BACKUP,
        *,
        member_of: Callable[[ev.InstanceUp], Member] = lambda up: Member.of(up.info, up.prefill),
        agent_of: Callable[[ev.HolderUp], Agent] = lambda up: Agent(up.holder, up.node),
        stream_of: Callable[[StreamId], Stream] = Stream,
    ) -> None:
        """`member_of`, `agent_of`: the record of an instance or agent that has come up, which is to
        be used nowhere else or by its watch alone; `stream_of`: that of a stream that has arrived,
        to which the proxy adds its journal.
        """
        self._settings = policy
        self._backup = backup
        self._actions: list[act.Action] = []
        self._view = ClusterView(policy.assumed_link_bytes_per_s)
        self.slot_book = SlotBook(policy.slots_max)
        self._timers = Timers()
        checkpoints = Checkpoints(self._view, backup)
        outliers = Outliers(self._view, policy.recovery, self._actions)
        self._ledger = Ledger(
            self._view, self.slot_book, self._timers, checkpoints, outliers, agent_of
        )
        # To be read only; the instances are those that are up.
        self.streams: Mapping[StreamId, Stream] = self._ledger.streams
        self.members: Mapping[InstanceId, Member] = self._view.members
        self._kv_locations = self._ledger.kv_locations
        self._decisions = Decisions(self._view, self.slot_book, policy, slo)
        self._starter = Starter(self._ledger, self._decisions, policy, self._actions)
        self._staying = Staying(self._ledger, self._starter, self._decisions, policy, self._actions)
        self._steps = Steps(
            self._ledger,
            self._starter,
            self._staying,
            self._decisions,
            policy,
            slo,
            self._actions,
            stream_of,
        )
        self._instances = InstanceEvents(
            self._ledger, self._starter, self._staying, self._steps, policy, member_of
        )

    def loads_rows_of(self, target: Member, holder: Member) -> bool:
        """The instance can load rows that the agent of the other one's node serves."""
        if not holder.has_tier or holder.rows != target.rows:
            return False
        if holder.node == target.node:
            return True
        agent = self._view.agent_on(holder.node)
        return agent is not None and agent.rows.to_other_nodes

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        """Apply one event; return the actions it calls for, in the order in which they are to be
        carried out.
        """
        self._view.now_s = now_s
        if isinstance(event, ev.OfStream):
            stream = self.streams.get(event.stream)
            if stream is None:
                method = self._steps.table[type(event)][None]
            elif isinstance(event, ev.OfAttempt) and event.attempt != stream.attempt.number:
                method = None  # `Ignored.LATE`, in any stage: an attempt that has a successor.
            else:
                method = self._steps.table[type(event)][stream.stage]
            if method is not None:
                method(stream, event, now_s)
        else:
            self._apply(event, now_s)
        if self._timers.heap or self.slot_book.awaited or self._starter.held_back:
            self._place_due(now_s)
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    def _apply(self, event: ev.OfCluster, now_s: float) -> None:
        """Apply an event that is of no single stream."""
        match event:
            case ev.InstanceUp():
                self._instances.up(event, now_s)
            case ev.PagesKept():
                self._kv_locations.kept_pages(event)
            case ev.InstanceLost() | ev.InstanceRemoved() | ev.InstanceExited():
                self._instances.ended(event, now_s)
            case ev.GpuJudged():
                self._instances.gpu_judged(event, now_s)
            case ev.DrainOrdered() | ev.DrainEnded():
                self._instances.ordered(event, now_s)
            case ev.SelfTested() | ev.NamesListed():
                self._instances.learned(event, now_s)
            case ev.LoadReported():
                self._instances.reported(event, now_s)
            case ev.LinkMeasured():
                self._view.link(event.source, event.target).measure(event.bytes_per_s)
            case ev.HolderUp():
                self._kv_locations.agent_up(event)
            case ev.HolderLost():
                self._instances.agent_lost(event, now_s)
            case ev.CheckpointsReported():
                self._kv_locations.reported(event)
            case ev.RetentionLost():
                for stream in event.streams:
                    self._kv_locations.forget(stream, event.instance)
            case ev.TimerFired():
                self._timers.woken(now_s)
            case ev.SettingsReloaded():
                self._reload(event.policy, event.slo)
            case _:
                assert_never(event)

    def kept(self, stream_id: StreamId) -> tuple[ev.Kept, ...]:
        """Where KV of a stream is kept, for the proxy that may have to go on with it."""
        return self._kv_locations.of(stream_id)

    def is_left_at(self, instance: InstanceId) -> bool:
        """Streams that were moved from there may still fetch their KV there."""
        return self._kv_locations.is_left_at(instance)

    def has_others(self, instance: InstanceId, is_heard: Callable[[InstanceId], bool]) -> bool:
        """Instances that are heard could take the streams of this one."""
        member = self._view.members.get(instance)
        return member is None or has_others(self._view, member, is_heard)

    def keeps_plan(self, stream: Stream, now_s: float) -> bool:
        """All is healthy: that prefill has answered, or a token has come, changes nothing about the
        stream.
        """
        attempt = stream.attempt
        decode = attempt.decodes_on
        return (
            attempt.number == 1
            and not (stream.adopted or stream.name or self._ledger.checkpoints.are_kept)
            and attempt.option is Option.START
            and attempt.stay_deadline is None
            and self._settings.handoff is Handoff.OWN_PAIR
            and decode is not None
            and decode.health is Health.UP
            and not decode.is_drained
            and self.members.get(decode.id) is decode
            and decode.is_clear(now_s)
        )

    @property
    def routes_by_prefix(self) -> bool:
        """Streams are placed by their prefixes: some instance caches these."""
        return self._settings.route is Route.PREFIX and bool(self._view.prefixes.caching)

    @property
    def prefix_hits(self) -> Mapping[InstanceId, Hits]:
        """The cached tokens of prompts by instance, of instances that report them."""
        return self._view.prefixes.hits

    def take_sent(self) -> list[SentPrompt]:
        """Prompts that this proxy has sent since the last call, for the other proxies."""
        view = self._view
        stored = view.stored.take_sent(MAX_HASH_BYTES // 2)
        room_bytes = MAX_HASH_BYTES - sum(len(each.hashes) for each in stored)
        return [*stored, *view.prefixes.take_sent(room_bytes)][:MAX_SENT]

    def sent_elsewhere(self, prompts: Iterable[SentPrompt]) -> None:
        """Other proxies have sent prompts to instances, and have agents store them. Those of
        processes that are not up here count nowhere.
        """
        if not self.routes_by_prefix:
            return
        for sent in prompts:
            member = self._view.members.get(sent.instance)
            agent = self._view.agents.get(sent.instance)
            if member is not None and member.epoch == sent.epoch:
                self._view.prefixes.note_sent(member, sent)
            elif agent is not None and agent.epoch == sent.epoch:
                self._view.stored.note_sent(agent, sent)

    @property
    def has_waiting(self) -> bool:
        """Streams wait for a place or a slot."""
        return bool(self._ledger.idle or self.slot_book.awaited)

    def snapshot(self) -> dict[str, Any]:
        """Plain data for people: the view of the cluster, slots, and the streams that run or
        wait.
        """
        streams = self._ledger.streams.values()
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
            for stream in sorted(self._ledger.idle.values(), key=lambda stream: stream.order)
        ]
        kept = streams if self._backup.mode is not BackupMode.OFF else ()
        return {
            "policy": self._settings.name.value,
            **self._view.snapshot(),
            "slots": self.slots(),
            "streams": stages,
            "waiting": waiting,
            "checkpoints": {
                stream.id: protection(stream) for stream in kept if stream.attempt.number
            },
            "unprotected": {stream.id: stream.unprotected for stream in kept if stream.unprotected},
            "retries": self._starter.retries.snapshot(len(streams)),
            "corrections": self._decisions.corrections.snapshot(),
            "prefill_guess": self._ledger.prefill_scale.snapshot(),
        }

    def slots(self) -> dict[str, dict[str, int]]:
        """By target: slots that are held, streams that wait for one, and the limit."""
        return self.slot_book.snapshot()

    def _reload(self, policy: PolicySettings, slo: SloSettings) -> None:
        self._settings = policy
        self._view.reload(policy.assumed_link_bytes_per_s)
        self.slot_book.reload(policy.slots_max)
        self._ledger.outliers.reload(policy.recovery)
        self._decisions.reload(policy, slo)
        self._starter.reload(policy)
        self._staying.reload(policy)
        self._steps.reload(policy, slo)
        self._instances.reload(policy)

    def _place_due(self, now_s: float) -> None:
        """Place streams that wait, and whose alarm, slot or instance is there now."""
        if self._timers.heap:
            while (due := self._timers.next_due(now_s)) is not None:
                self._steps.apply(due, AlarmDue(), now_s)
        if self.slot_book.awaited:
            while (served := self.slot_book.next_served(now_s)) is not None:
                self._steps.apply(served, SlotFree(), now_s)
        if self._starter.held_back:
            self._starter.place_held_back(now_s)
        if self._timers.heap and (wake := self._timers.next_wake(now_s)) is not None:
            self._actions.append(wake)
