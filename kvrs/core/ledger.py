"""The ledger of streams: their stages, what their attempts take up in the cluster view (work, bytes
on links, slots, alarms, room for checkpoints), and where their KV is.
"""

from collections.abc import Callable, Iterable, Mapping

from kvrs.core.books.checkpoints import Checkpoints
from kvrs.core.books.prefill_scale import PrefillScale
from kvrs.core.books.rows import Rows
from kvrs.core.books.waiting import SlotBook, Timers
from kvrs.core.defences.outliers import Outliers
from kvrs.core.defences.poison import PoisonCounter
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Agent, ClusterView, Link, agent_of
from kvrs.core.model.estimates import Option
from kvrs.core.model.lifecycle import MOVES, Stage
from kvrs.core.model.member import Member, is_one_call
from kvrs.core.model.prefixes import NO_PREFIX
from kvrs.core.model.streams import AttemptState, Decision, Holder, StayDeadline, Stream
from kvrs.ids import InstanceId, StreamId

_IDLE = (Stage.WAITING, Stage.QUEUED)


class Ledger:
    def __init__(
        self,
        view: ClusterView,
        slots: SlotBook,
        timers: Timers,
        checkpoints: Checkpoints,
        outliers: Outliers,
        agent_of: Callable[[ev.HolderUp], Agent],
    ) -> None:
        self.view = view
        self.slots = slots
        self.timers = timers
        self.checkpoints = checkpoints
        self.outliers = outliers
        self.prefill_scale = PrefillScale()
        self.streams: dict[StreamId, Stream] = {}
        self.poison = PoisonCounter(self.streams)
        self.idle: dict[StreamId, Stream] = {}  # Those that no attempt runs for.
        self.kv_locations = KvLocations(view, checkpoints, self.streams, agent_of)

    def begin(self, stream: Stream, plan: act.Plan, decision: Decision, now_s: float) -> None:
        """The stream's next attempt. Its prefill or decode computes for `decision.chosen.compute_s`
        before anything comes of it.
        """
        if stream.stage is Stage.QUEUED:
            self.slots.leave(stream.id)
        self.timers.alarms_s.pop(stream.id, None)
        view, chosen = self.view, decision.chosen
        decode = view.members[plan.decode]
        runs_on = decode if plan.prefill is None else view.members[plan.prefill]
        for member in (runs_on, decode):
            if member.answers.until_s is not None or member.answers.busy_until_s is not None:
                self.outliers.started(stream, member)
        stream.attempt = attempt = AttemptState(
            stream.attempt.number + 1,
            plan,
            chosen.option,
            now_s,
            decision,
            decodes_on=decode,
            booked_on=runs_on,
            booked_s=chosen.compute_s,
        )
        view.work.book(runs_on, chosen.compute_s)
        is_start = chosen.option is Option.START
        if stream.prefix.hashes and (is_start or runs_on is not decode):
            view.prefixes.send(runs_on, stream.prefix, stream.prompt_tokens)
            if decode.has_tier and decode is not runs_on:
                view.prefixes.send(decode, stream.prefix, stream.prompt_tokens)
        if plan.runs:
            self._put_runs(attempt, plan, decode)
        elif (load := plan.load) is not None:
            link = view.link_from(view.agents[load.agent], runs_on.node)
            _put_on_link(attempt, link, load.tokens * runs_on.bytes_per_token)
        if decode.node != runs_on.node:
            self._put_hand_off(stream, runs_on, decode)
        view.count_stream(decode, 1)
        self._enter(stream, Stage.DECODE if runs_on is decode else Stage.PREFILL, runs_on)
        if runs_on.guess is not None:
            self.prefill_scale.began(runs_on, stream.id, now_s, is_whole=is_start)
        if runs_on is not decode and is_one_call(decode, runs_on.id):
            # The one call of both stages goes there, or one of two, and is lost with it.
            decode.running.add(stream.id)

    def hand_off(self, stream: Stream, plan: act.Plan, prefill: Member, decode: Member) -> None:
        """Prefill is done; the attempt goes on at `decode`, by this plan."""
        attempt, planned = stream.attempt, stream.attempt.decodes_on
        assert planned is not None, stream
        prefill.running.discard(stream.id)
        planned.running.discard(stream.id)
        if decode is not planned:
            self.view.count_stream(planned, -1)
            planned.answers.left(stream.id)
            self.view.count_stream(decode, 1)
        attempt.plan, attempt.decodes_on = plan, decode
        self._enter(stream, Stage.DECODE, decode)
        if decode.node != prefill.node:
            self._put_hand_off(stream, prefill, decode)

    def _put_runs(self, attempt: AttemptState, plan: act.Plan, decode: Member) -> None:
        """Book the pages that the attempt fetches on their links."""
        for run in plan.runs:
            agent = agent_of(self.view, run.holder)
            if agent is None:
                link = self.view.link(self.view.members[run.holder].node, decode.node)
            else:
                link = self.view.link_from(agent, decode.node)
            _put_on_link(attempt, link, run.pages * decode.page_bytes)

    def _put_hand_off(self, stream: Stream, prefill: Member, decode: Member) -> None:
        """Book the hand-off on its link from the start of prefill on: a fetch that is decided
        meanwhile may still be under way when the hand-off begins.
        """
        size_bytes = stream.history_tokens * decode.bytes_per_token
        link = self.view.link(prefill.node, decode.node)
        _put_on_link(stream.attempt, link, size_bytes)

    def prefilled(
        self, stream: Stream, member: Member, event: ev.PrefillDone, now_s: float
    ) -> None:
        """The instance has the KV of the attempt's history: learn from it, and note where it is."""
        tokens, reused = event.history_tokens, event.reused_tokens
        self.note_found(stream, member, event, now_s)
        if member.guess is not None and self.prefill_scale.done(
            member, stream.id, tokens, now_s, reused or 0
        ):
            for each in self.view.members.values():
                self.prefill_scale.tune(each)
        if not stream.prefilled:
            stream.note_prefill(tokens)
        for stored in stream.checkpoints.values() if stream.prefix.hashes else ():
            if not stored.rows:
                self.view.stored.send(stored.agent, stream.prefix, stream.prompt_tokens)
        # It may be an answer from before the re-forming in which cells of the pages were lost.
        has_whole = member.reforming is None or not member.has_lost_cells(stream.id)
        if has_whole and (member.retains or member.caches):
            self.kv_locations.retain(stream, member, tokens // member.page_size_tokens)

    def note_found(
        self, stream: Stream, member: Member, event: ev.PrefillDone, now_s: float
    ) -> None:
        """The instance, or the agent from which it has loaded, had so much of a new prompt."""
        tokens, found = event.history_tokens, event.reused_tokens
        if found is None or stream.attempt.option is not Option.START:
            return
        view, plan, length = self.view, stream.attempt.plan, max(1, stream.prompt_tokens)
        view.prefixes.count(member, tokens, found)
        # The length was perhaps a guess.
        if plan is None or (load := plan.load) is None:
            predicted = stream.cached.get(member.id, 0) * tokens // length
            # One that decodes has answers too, which come with the next turn, and one with a tier
            # or a store loads what others have.
            others = member.decodes or bool(member.rows)
            view.prefixes.correct(member, stream.prefix, predicted, found, finds_others=others)
        elif stream.attempt.number == 1 and (agent := view.agents.get(load.agent)) is not None:
            predicted = (load.first_token + load.tokens) * tokens // length
            view.stored.correct(agent, stream.prefix, predicted, found)
            if load.tokens:
                least = (load.first_token + load.tokens / 2) * tokens / length
                agent.note_load(stream.attempt.started_s, now_s, has_failed=found < least)

    def settle_bookings(self, stream: Stream) -> None:
        """The attempt's work has been done and its bytes have arrived, or it is over."""
        attempt = stream.attempt
        if attempt.booked_on is not None:
            self.view.work.unbook(attempt.booked_on, attempt.booked_s)
            attempt.booked_on = None
        for link, size_bytes in attempt.links:
            link.in_flight_bytes -= size_bytes
        attempt.links.clear()

    def arrived(self, stream: Stream) -> None:
        """The attempt has brought a token: what it fetched or computed first is there."""
        self.settle_bookings(stream)
        if stream.id in self.slots.held:
            self.slots.release(stream.id)

    def resume(self, stream: Stream) -> None:
        """The attempt has brought a token to the client, and nothing more is waited for."""
        attempt = stream.attempt
        if attempt.booked_on is not None or attempt.links or stream.id in self.slots.held:
            self.arrived(stream)
        self.timers.alarms_s.pop(stream.id, None)
        if stream.checkpoints:
            self.checkpoints.drop_former(stream)
        if attempt.number > 1:
            self.kv_locations.resumed(stream)
        attempt.resumed, attempt.decision, attempt.stay_deadline = True, None, None

    def stay(self, stream: Stream, decision: Decision, now_s: float) -> None:
        """The attempt goes on at its instance, which re-forms, as decided now."""
        attempt = stream.attempt
        attempt.option, attempt.decision = decision.chosen.option, decision
        attempt.started_s = now_s

    def set_stay_deadline(self, stream: Stream, deadline: StayDeadline) -> None:
        """Until when an attempt that stays is waited for."""
        stream.attempt.stay_deadline = deadline
        self.timers.set(stream.id, deadline.until_s)

    def clear_stay_deadline(self, stream: Stream) -> None:
        """The instance that the attempt stayed at has done its part."""
        self.timers.alarms_s.pop(stream.id, None)
        stream.attempt.stay_deadline = None

    def end_attempt(
        self, stream: Stream, cause: str, failed: InstanceId | None, now_s: float
    ) -> None:
        """The attempt is over; the caller has the stream placed."""
        attempt, decode = stream.attempt, stream.attempt.decodes_on
        if decode is not None and attempt.resumed:
            stream.tokens = decode.tokens or stream.tokens
            stream.note_pace(now_s)
            if decode.rows:
                self.kv_locations.rows.left(stream, decode)
        elif decode is not None and decode.joins_prefill and failed != decode.id:
            stream.exclude(decode)  # For a while it keeps the memory of what was not sent.
        stream.recovery.note_failure(cause, failed, now_s)
        self.wait(stream, now_s)

    def wait(self, stream: Stream, now_s: float) -> None:
        """From an attempt or a queue to waiting; the caller has the stream placed."""
        if stream.stage not in _IDLE:
            stream.waiting_since_s = now_s
        self._leave(stream)
        self._enter(stream, Stage.WAITING)

    def queue(self, stream: Stream, target: InstanceId) -> None:
        self.slots.enqueue(target, stream.id)
        self._enter(stream, Stage.QUEUED)

    def deny(self, stream: Stream, until_s: float) -> None:
        """No slot for the attempt before then: back to the stream's former place in the queue."""
        self.slots.deny(stream.id, until_s)
        self._leave(stream)
        self._enter(stream, Stage.QUEUED)

    def forget(self, stream: Stream) -> None:
        assert (stream.stage, None) in MOVES, stream.stage
        self._leave(stream)
        if stream.checkpoints:
            self.checkpoints.forget(stream)
        for held in stream.holders.values():
            held.member.held.discard(stream.id)
        stream.holders.clear()
        self.idle.pop(stream.id, None)
        self.poison.counted.pop(stream.id, None)
        del self.streams[stream.id]

    def _enter(self, stream: Stream, stage: Stage, member: Member | None = None) -> None:
        """The only place at which a stage changes. `member`: where the attempt is from now on, and
        is to be answered; None: no attempt runs.
        """
        assert stream.stage is stage or (stream.stage, stage) in MOVES, (stream.stage, stage)
        stream.stage = stage
        if member is None:
            self.idle[stream.id] = stream
            return
        self.idle.pop(stream.id, None)
        attempt, answers, now_s = stream.attempt, member.answers, self.view.now_s
        attempt.runs_on = member
        member.running.add(stream.id)
        if not answers.awaited:
            answers.awaited_from_s = now_s
        predicted_s = 0.0 if attempt.decision is None else attempt.decision.chosen.total_s
        answers.awaited[stream.id] = now_s, predicted_s

    def await_whole(self, stream: Stream) -> None:
        """Its answer comes in one piece: its instance is not late for it, and the time until then
        tells nothing of the prediction.
        """
        attempt = stream.attempt
        if attempt.runs_on is not None:
            attempt.runs_on.answers.await_whole(stream.id)
            if attempt.runs_on.guess is not None:
                self.prefill_scale.left(attempt.runs_on, stream.id, self.view.now_s)
        attempt.decision = None

    def _leave(self, stream: Stream) -> None:
        """Out of every book: the attempt is over, or the wait."""
        if stream.id in self.slots.held:
            self.slots.release(stream.id)
        if stream.stage is Stage.QUEUED:
            self.slots.leave(stream.id)
        attempt = stream.attempt
        if not attempt.resumed:  # Else they were settled by its first token.
            self.settle_bookings(stream)
        self.timers.alarms_s.pop(stream.id, None)
        runs_on, decode = attempt.runs_on, attempt.decodes_on
        for member in (decode,) if runs_on is decode else (runs_on, decode):
            if member is None:
                continue
            member.running.discard(stream.id)
            if member.guess is not None:
                self.prefill_scale.left(member, stream.id, self.view.now_s)
            answers = member.answers
            if not attempt.resumed and (answers.owes(stream.id) or answers.probe == stream.id):
                self.outliers.left(stream, member)
        attempt.runs_on = attempt.decodes_on = attempt.decision = attempt.stay_deadline = None
        if decode is not None:
            self.view.count_stream(decode, -1)


def _put_on_link(attempt: AttemptState, link: Link, size_bytes: int) -> None:
    link.in_flight_bytes += size_bytes
    attempt.links.append((link, size_bytes))


class KvLocations:
    """KV by stream: at instances that retain or cache it, and at agents with checkpoints of it.

    Writes the holders of `streams`, and by `Checkpoints` their checkpoints.
    """

    def __init__(
        self,
        view: ClusterView,
        checkpoints: Checkpoints,
        streams: Mapping[StreamId, Stream],
        agent_of: Callable[[ev.HolderUp], Agent],
    ) -> None:
        self._view = view
        self._checkpoints = checkpoints
        self._streams = streams
        self._agent_of = agent_of
        self.rows = Rows(view, checkpoints, streams)
        self._kept: dict[InstanceId, ev.PagesKept] = {}  # Of instances that are about to come up.

    def kept_pages(self, event: ev.PagesKept) -> None:
        self._kept[event.instance] = event

    def instance_up(self, member: Member) -> None:
        """Record the KV of open streams that the instance has kept."""
        self.rows.find(member)
        event = self._kept.pop(member.id, None)
        if event is None or event.epoch != member.epoch:
            return
        for stream_id, pages in event.pages.items():
            if (stream := self._streams.get(stream_id)) is not None:
                self.retain(stream, member, pages)

    def agent_up(self, event: ev.HolderUp) -> None:
        agent = self._view.agents.get(event.holder)
        if agent is not None and event.epoch <= agent.epoch:
            return
        if agent is not None:
            self._lose(agent, "replaced by a new epoch")
        agent = self._view.agents[event.holder] = self._agent_of(event).begin(event)
        self._view.stored.up(agent, keeps=False)

    def agent_lost(self, event: ev.HolderLost) -> None:
        agent = self._view.agents.get(event.holder)
        if agent is not None and event.epoch >= agent.epoch:
            self._lose(agent, event.cause)

    def reported(self, event: ev.CheckpointsReported) -> None:
        agent = self._view.agents.get(event.holder)
        if agent is None:
            self._replicated(event)
            return
        if event.epoch != agent.epoch:
            return
        agent.reported_bytes, agent.reported_checkpoints = event.reserved_bytes, event.checkpoints
        for stream_id, pages in event.pages.items():
            if (stream := self._streams.get(stream_id)) is not None:
                self._checkpoints.reported(stream, agent, pages)
        self.rows.reported(agent, event.rows)

    def _replicated(self, event: ev.CheckpointsReported) -> None:
        """An instance reports replicas. Of streams that it keeps under a lease it has more."""
        member = self._view.members.get(event.holder)
        if member is None or event.epoch != member.epoch:
            return
        for stream_id, pages in event.pages.items():
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            held = stream.holders.get(member.id)
            if held is not None and not held.is_replica:
                continue
            if pages:
                stream.holders[member.id] = Holder(member, pages, is_replica=True)
                member.held.add(stream_id)
            elif held is not None:
                self.forget(stream_id, member.id)

    def retain(self, stream: Stream, member: Member, pages: int) -> None:
        stream.holders[member.id] = Holder(member, pages)
        member.held.add(stream.id)

    def leave(self, stream: Stream, member: Member, pages: int) -> None:
        """The stream is moved from there, and may fetch what it has computed until it resumes."""
        held = stream.holders.get(member.id)
        kept = held.pages - held.left_pages if held is not None else 0
        stream.holders[member.id] = Holder(member, max(pages, kept), max(0, pages - kept))
        member.held.add(stream.id)

    def resumed(self, stream: Stream) -> None:
        """Elsewhere: what it has left behind may be overwritten from now on."""
        for instance, held in [*stream.holders.items()]:
            if held.left_pages == held.pages:
                self.forget(stream.id, instance)
            elif held.left_pages:
                self.retain(stream, held.member, held.pages - held.left_pages)

    def is_left_at(self, instance: InstanceId) -> bool:
        """Streams that were moved from there have not resumed yet."""
        member = self._view.members.get(instance)
        return member is not None and any(
            self._streams[each].holders[instance].left_pages for each in member.held
        )

    def forget(self, stream_id: StreamId, holder: InstanceId) -> None:
        """The holder keeps no KV of the stream any more."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if holder in stream.checkpoints:
            self._checkpoints.lose(stream, holder, f"{holder} keeps no KV of it any more")
        if (found := stream.holders.pop(holder, None)) is not None:
            found.member.held.discard(stream_id)

    def distrust(self, stream: Stream) -> None:
        """Its KV may be what spoils its logits: the next attempt loads none of it, and finds none
        in a cache either, since the driver gives its pages another salt.
        """
        for holder in {*stream.holders, *stream.checkpoints}:
            self.forget(stream.id, holder)
        stream.prefix = NO_PREFIX

    def of(self, stream_id: StreamId) -> tuple[ev.Kept, ...]:
        """All locations, for the proxy that may have to go on with the stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return ()
        held = [
            ev.Kept(holder, found.member.epoch, found.pages)
            for holder, found in stream.holders.items()
        ]
        return (
            *held,
            *(
                ev.Kept(name, found.agent.epoch, found.pages)
                for name, found in stream.checkpoints.items()
            ),
        )

    def inherit(self, stream: Stream, kept: Iterable[ev.Kept]) -> None:
        """Take over locations from another proxy, as far as those epochs are still up."""
        for each in kept:
            member, agent = self._view.members.get(each.holder), self._view.agents.get(each.holder)
            if member is not None and member.epoch == each.epoch:
                self.retain(stream, member, each.pages)
            elif agent is not None and agent.epoch == each.epoch:
                self._checkpoints.adopt(stream, agent, each.pages)

    def _lose(self, agent: Agent, cause: str) -> None:
        del self._view.agents[agent.id]
        self._view.stored.lost(agent)
        self.rows.lost(agent)
        for stream_id in list(agent.streams):
            self._checkpoints.lose(
                self._streams[stream_id], agent.id, f"{agent.id} was lost: {cause}"
            )
