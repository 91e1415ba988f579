"""Predicts when the victims of one event get their next tokens, all together, and learns from when
they do.

The estimate by which an option is chosen is that of one stream, behind the work that was there
before. The victims of an event share links, prefill instances and the steps of their targets:

    link    each of its n transfers gets 1 / n of the mean rate
    step    max(d, h) + the computing of its tokens, at most `step_tokens` of them;
            d: a decode step of the streams there, h: the overhead of a step with prompts
    token   at the end of the step that takes the last tokens of the history, or the hand-off
    call    a hand-shake for each exchange of the proxy: a slot, each call and its answer

Here the chosen plans are played through once, in steps: prompts at prefill instances, then links,
then the targets. It follows the decisions and changes none. O(victims * steps).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf
from operator import attrgetter

from kvrs.core import kv_locations, ledger
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Link, agent_of
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Decision, Predicted, RestoredRows, Stream
from kvrs.core.rules import BY_NAME
from kvrs.core.state import State
from kvrs.ids import InstanceId

_PLAYED = (Option.MIGRATE, Option.RESTORE, Option.REUSE, Option.SPLIT, Option.RECOMPUTE)
# Rows of the last steps of an engine, which may not be in its tier, or copied, when it dies.
_LATE_ROWS = 3
_MOST_RESTORED = 1000  # Restores whose count is awaited; the count of an older one is ignored.
_MOST_STEPS = 4000  # Steps of an instance that are played; later work counts as done with the last.


@dataclass(slots=True, eq=False)
class Work:
    """One stream's tokens in the steps of an instance. Times are from the decision."""

    tokens: int
    seconds: float  # Computing, without the overhead of a step.
    ready_s: float = 0.0
    ends_s: float = inf


@dataclass(slots=True, eq=False)
class Steps:
    """The steps of an instance."""

    decode_s: float  # Time of a decode step; 0.0: no stream decodes there.
    overhead_s: float
    step_tokens: int
    ahead_s: float  # Time until the work that was there before is done.
    work: list[Work] = field(default_factory=list)

    def play(self) -> None:
        """Set the end of all work, in the order in which it is ready."""
        now_s = self.ahead_s + self.decode_s / 2  # On average half of the running step is left.
        left = sorted(self.work, key=attrgetter("ready_s"))
        tokens_left = {id(each): each.tokens for each in left}
        for _ in range(_MOST_STEPS):
            if not left or (first_s := left[0].ready_s) == inf:
                return
            if first_s > now_s:  # Streams decode, or the instance idles.
                steps = ceil((first_s - now_s) / self.decode_s) if self.decode_s > 1e-9 else 0
                now_s = now_s + steps * self.decode_s if steps else first_s
            room, seconds, done = self.step_tokens, 0.0, 0
            for each in left:
                if each.ready_s > now_s or not room:
                    break
                taken = min(room, tokens_left[id(each)])
                room -= taken
                tokens_left[id(each)] -= taken
                seconds += each.seconds * taken / each.tokens
                done += not tokens_left[id(each)]
            now_s += max(self.decode_s, self.overhead_s) + seconds
            for each in left[:done]:
                each.ends_s = now_s
            del left[:done]
        for each in left:
            each.ends_s = now_s


@dataclass(slots=True, eq=False)
class Sending:
    """One transfer. Times are from the decision."""

    seconds: float  # With the link for itself.
    begins_s: float = 0.0
    ends_s: float = inf


def share_link(sendings: Sequence[Sending], before_s: float, before: int = 1) -> None:
    """Set the ends of the transfers of one link, which share it equally with each other, and with
    `before` transfers that began before and take `before_s` together, but with none without end.
    """
    now_s = each_s = 0.0  # `each_s`: what each transfer since the first has got.
    moving: list[tuple[float, int]] = []
    if before_s > 0:
        moving = [(before_s / before, -1)] * before
    ending = (i for i, each in enumerate(sendings) if each.begins_s + each.seconds < inf)
    waiting = sorted(ending, key=lambda index: sendings[index].begins_s)
    waiting.reverse()
    while waiting or moving:
        begins_s = sendings[waiting[-1]].begins_s if waiting else inf
        ends_s = now_s + (moving[0][0] - each_s) * len(moving) if moving else inf
        if ends_s <= begins_s:
            now_s, (each_s, index) = ends_s, heappop(moving)
            if index >= 0:
                sendings[index].ends_s = now_s
            continue
        if moving:
            each_s += (begins_s - now_s) / len(moving)
        now_s, index = begins_s, waiting.pop()
        heappush(moving, (each_s + sendings[index].seconds, index))


class _Event:
    """The victims of one event, at the instances and links that they use."""

    def __init__(self, state: State, victims: Sequence[Stream]) -> None:
        self._state, self._view = state, state.view
        self._begun_s = victims[0].attempt.started_s
        self._steps: dict[InstanceId, Steps] = {}
        self._links: dict[int, tuple[Link, list[Sending]]] = {}
        self._agents = {agent.node for agent in self._view.agents.values()}
        # Bookings of the victims themselves.
        self._booked_s: dict[InstanceId, float] = {}
        self._streams: dict[InstanceId, int] = {}
        self._booked: dict[int, tuple[int, int]] = {}  # Bytes and number of transfers, by link.
        for stream in victims:
            attempt = stream.attempt
            if (there := attempt.booked_on) is not None:
                self._booked_s[there.id] = self._booked_s.get(there.id, 0.0) + attempt.booked_s
            assert attempt.decodes_on is not None
            target = attempt.decodes_on.id
            self._streams[target] = self._streams.get(target, 0) + 1
            for link, size_bytes in attempt.links:
                before_bytes, before = self._booked.get(id(link), (0, 0))
                self._booked[id(link)] = before_bytes + size_bytes, before + 1

    def ends_s(self, chosen: Sequence[tuple[Stream, Estimate]]) -> list[float]:
        """Return the time of each stream's next token."""
        handed: list[tuple[Work, Sending, Work]] = []
        fetched: list[tuple[Sending, Work]] = []
        lasts: list[Work] = []
        prompts: dict[InstanceId, None] = {}
        for stream, estimate in chosen:
            target = self._view.members[estimate.target]
            if estimate.source is not None and (
                estimate.by_prefill or estimate.option is Option.RECOMPUTE
            ):
                prefill, last = self._view.members[estimate.source], Work(1, 0.0)
                prompts[prefill.id] = None
                last.ready_s = inf
                prompt = self._at(prefill, _computed(prefill, stream, estimate.compute_s))
                prompt.ready_s = HANDSHAKE_S / 2
                sending = self._send(self._view.link(prefill.node, target.node), estimate)
                handed.append((prompt, sending, last))
            else:
                link, last = self._fetch(target, stream, estimate)
                last.ready_s = HANDSHAKE_S / 2
                if link is not None:
                    sending = self._send(link, estimate)
                    sending.begins_s += HANDSHAKE_S / 2
                    last.ready_s = inf
                    if target.node in self._agents:  # The agent there grants the slot.
                        sending.begins_s += HANDSHAKE_S
                    fetched.append((sending, last))
            lasts.append(self._at(target, last))
        for name in prompts:
            self._steps[name].play()
        for prompt, sending, _ in handed:
            sending.begins_s += prompt.ends_s
        for link, sendings in self._links.values():
            rate = link.bytes_per_s / link.counted_share
            own_bytes, own = self._booked.get(id(link), (0, 0))
            before_bytes, before = link.in_flight_bytes - own_bytes, link.in_flight - own
            share_link(sendings, max(0, before_bytes) / rate, max(1, before))
        for sending, last in (*fetched, *((sending, last) for _, sending, last in handed)):
            last.ready_s = sending.ends_s
        # An instance that does both stages is played again, with what has come to it.
        for name in dict.fromkeys(estimate.target for _, estimate in chosen):
            self._steps[name].play()
        return [last.ends_s + HANDSHAKE_S / 2 for last in lasts]

    def _fetch(
        self, target: Member, stream: Stream, estimate: Estimate
    ) -> tuple[Link | None, Work]:
        """Return the link from which the target fetches, and what it computes behind that."""
        here_s = estimate.at_target_s
        if estimate.option is Option.SPLIT:
            front = estimate.first_page * target.abilities.page_size_tokens
            table = target.times.table
            front_s = min(here_s, max(0.0, table.seconds_for(front) - table.step_overhead_s))
            self._at(target, Work(front, front_s))
            here_s -= front_s
        last = _computed(target, stream, here_s + target.times.table.step_overhead_s)
        holder = estimate.source or estimate.second
        if holder is None or estimate.transfer_s <= 0:
            return None, last
        agent = agent_of(self._view, holder)
        if agent is None:
            return self._view.link(self._view.members[holder].node, target.node), last
        return self._view.link_from(agent, target.node), last

    def _at(self, member: Member, work: Work) -> Work:
        steps = self._steps.get(member.id)
        if steps is None:
            streams = member.streams - self._streams.get(member.id, 0)
            steps = self._steps[member.id] = Steps(
                member.times.step_s if member.abilities.decodes and streams > 0 else 0.0,
                member.times.table.step_overhead_s,
                member.abilities.step_tokens,
                member.wait_of_history_s(self._begun_s, self._booked_s.get(member.id, 0.0)),
            )
        steps.work.append(work)
        return work

    def _send(self, link: Link, estimate: Estimate) -> Sending:
        seconds = max(0.0, estimate.transfer_s - HANDSHAKE_S) * link.counted_share
        sending = Sending(seconds, HANDSHAKE_S)
        self._links.setdefault(id(link), (link, []))[1].append(sending)
        return sending


def _computed(member: Member, stream: Stream, compute_s: float) -> Work:
    """Return about as many tokens of the history as the instance computes in this time."""
    table, history = member.times.table, stream.history_tokens
    seconds = max(0.0, compute_s - table.step_overhead_s)
    whole_s = table.seconds_for(history) - table.step_overhead_s
    share = min(1.0, seconds / whole_s) if whole_s > 0 else 1.0
    return Work(max(1, int(history * share)), seconds)


def predict(state: State) -> None:
    """Predict the recoveries that the last event has begun: those that share links and steps
    together, others by their own estimates. A start's cost rests on a guessed length, and is not
    predicted.
    """
    begun, state.begun = state.begun, []
    if not BY_NAME[state.settings.policy.name].predicts:
        return
    victims = [
        (stream, decision.chosen)
        for stream, number in begun
        if stream.attempt.number == number
        and (decision := stream.attempt.decision) is not None
        and decision.chosen.option is not Option.START
    ]
    played = [(stream, chosen) for stream, chosen in victims if chosen.option in _PLAYED]
    seconds = {stream.id: chosen.next_token_s for stream, chosen in victims}
    if played:
        ends_s = _Event(state, [stream for stream, _ in played]).ends_s(played)
        seconds |= {stream.id: end_s for (stream, _), end_s in zip(played, ends_s, strict=True)}
    for stream, _ in victims:
        its_s = seconds[stream.id]
        low_s, high_s = state.spread.interval(its_s)
        ledger.foretell(stream, Predicted(its_s, low_s, high_s, len(victims)))


def settle(state: State, stream: Stream, decision: Decision, now_s: float) -> act.Settled:
    """Learn from a recovery that has brought a token; return its record."""
    attempt, chosen, plan = stream.attempt, decision.chosen, stream.attempt.plan
    real_s, predicted = now_s - attempt.started_s, attempt.predicted
    if predicted is None:
        return act.Settled(stream.id, attempt.number, chosen.option, chosen.next_token_s, real_s)
    # The prediction of a redirected hand-off is for another target: it is not learned from.
    if plan is not None and plan.decode == chosen.target:
        if plan.asked and chosen.option is Option.RESTORE:
            _await_count(state, stream, decision, plan, predicted, real_s)
        else:
            state.spread.observe(predicted.seconds, real_s, predicted.victims)
    return act.Settled(
        stream.id,
        attempt.number,
        chosen.option,
        predicted.seconds,
        real_s,
        predicted.low_s,
        predicted.high_s,
    )


def _await_count(
    state: State,
    stream: Stream,
    decision: Decision,
    plan: act.Plan,
    predicted: Predicted,
    real_s: float,
) -> None:
    """Learn from a restore of rows only when its target has counted what it has loaded."""
    target, restored = state.view.members.get(plan.decode), state.restored
    if target is None:
        return
    stored = [found for name, found in stream.checkpoints.items() if name in plan.asked]
    wanted = max(run.first_page + run.pages for run in plan.runs)
    pages = max((found.pages for found in stored), default=wanted)
    computed = [
        each.next_token_s
        for each in decision.estimates
        if each.option is Option.RECOMPUTE and each.target == plan.decode
    ]
    restored[stream.id, stream.attempt.number] = RestoredRows(
        plan.asked,
        frozenset(found.engine.id for found in stored if found.engine is not None),
        pages * target.abilities.page_size_tokens,
        _LATE_ROWS * target.shared.row_tokens,
        predicted,
        min(computed, default=None),
        real_s,
    )
    if len(restored) > _MOST_RESTORED:
        del restored[next(iter(restored))]


def rows_counted(state: State, event: ev.RowsCounted, now_s: float) -> None:
    """Book a restore of rows as what it was: a recompute if it has loaded less than half of what
    was expected. The agents that were asked are then believed to have no rows of those engines
    until they report others.
    """
    found = state.restored.pop((event.stream, event.attempt), None)
    if found is None:
        return
    is_restore = 2 * event.loaded_tokens >= found.expected_tokens
    option = Option.RESTORE
    predicted_s: float | None = found.predicted.seconds
    if not is_restore:
        option, predicted_s = Option.RECOMPUTE, found.recompute_s
        if found.expected_tokens > found.least_tokens:
            kv_locations.doubt(state, found.asked, found.engines)
    if predicted_s is not None:
        state.spread.observe(predicted_s, found.real_s, found.predicted.victims)
    state.actions.append(
        act.RowsLoaded(
            event.stream,
            event.attempt,
            option,
            event.loaded_tokens,
            found.expected_tokens,
            found.asked,
        )
    )
