"""State of one proxy between its policy and its connections, and of one attempt at a stream.

Pure: no clock, no socket, no randomness. A shell reports events of attempts and processes, with
`now_s`; `Control` keeps the books, asks the policy, and lets the shell perform the policy's actions
in order: the proxy's shell with sockets and tasks, the simulator's in virtual time. A stream has
one record (`LiveStream`), in which the policy writes its place and stage.

`Attempt` decides one attempt at a stream, from its plan to the report of its result; a shell
performs the calls and reports their results:

    begin        -> the instance to call for prefill, or straight to the decode call
    prefilled    -> whether the decode call follows, by `plan`, which may be another one now
    decode       -> the slot that is to be asked for before the call; None: it needs none
    limit_s, is_excused: how long a call may be silent; `failed_at` is to blame for what fails
    resumed      -> its first token, and the first one after a stay
    failure, denial -> the report of its end, after the fault's `delay_s`; None: it is over

A report of a finished attempt changes nothing.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, assert_never, get_args

import msgspec

from kvrs.core.books.at_agents import AgentSlots, CheckpointHolds, SlotOutcome
from kvrs.core.books.learning import LinkBounds
from kvrs.core.books.leases import FenceTable, Leases
from kvrs.core.books.prefills import PromptLengths
from kvrs.core.configured import Configured
from kvrs.core.fleet.drains import Drains, Gpus
from kvrs.core.fleet.known import Agents, Instances, Replays
from kvrs.core.fleet.self_tests import RightWeights, SelfTests
from kvrs.core.fleet.silence import GIVEN_UP_TOGETHER_S, LOST_TOGETHER_S, InstanceProgress
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Health, Member, is_one_call
from kvrs.core.model.reports import changes_decision, changes_ranks, has_figures, is_repeated
from kvrs.core.model.streams import CannotContinue, Complete, LiveStream, Outcome, StreamJournal
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.guess import on_gpu
from kvrs.protocol.instance import (
    STORE,
    FetchReport,
    GpuHealth,
    InstanceInfo,
    LoadReport,
    SlotRequest,
)
from kvrs.protocol.rows import RowsReport
from kvrs.sums import sum_in_order
from kvrs.transfer.meter import Measurement

# Callback with an event, its time, and the policy's actions.
Trace = Callable[[float, ev.Event, list[act.Action]], None]
S = TypeVar("S", bound=LiveStream)
_S = TypeVar("_S", bound=LiveStream, contravariant=True)

# A request that nothing befalls has no event and no action of these.
_SHOWN: frozenset[type[Any]] = frozenset({*get_args(ev.Shown), *get_args(act.Shown)})


class Shell(Protocol[_S]):
    """Performs the decisions of `Control` in the order of the calls. It decides nothing."""

    def begin_attempt(self, live: _S, plan: act.Plan) -> None:
        """Run attempt `live.journal.attempt` by this plan. The attempt before has been ended."""

    def end_attempt(self, live: _S) -> None:
        """Close the connection of the stream's current attempt, if any; it writes nothing more."""

    def catch_up_soon(self) -> None:
        """Call `Control.catch_up` when the present work is done, or now."""

    def expect_token(self, live: _S) -> None:
        """Report the attempt's next token as its resumption: the attempt stays at a re-forming
        instance.
        """

    def can_give_end(self) -> bool:
        """Return whether `give_end` is supported: the shell ends a stream without an engine."""

    def give_end(self, live: _S, plan: act.Plan) -> None:
        """Send the end of a stream that has all its ids: no engine is needed for it."""

    def end_stream(self, live: _S, outcome: Outcome) -> None:
        """Tell the client how its stream ended."""

    def stream_closed(self, live: _S) -> bool:
        """Note that the stream has left all books, and return whether it was being recovered.
        Called once per stream.
        """

    def note(self, event: ev.Event, actions: Sequence[act.Action], now_s: float) -> None:
        """Show operators an event and the policy's answer, before any of it is performed. Called
        if either is one of `Shown`, and for the end of a stream that was being recovered.
        """

    def wake_at(self, at_s: float) -> None:
        """Report `TimerFired` to `Control` at `at_s`."""

    def weights_known(self) -> None:
        """End streams that turn out to have tokens of different weights."""

    def post_slots(self, agent: InstanceId) -> None:
        """Send the agent's message of slots when the present work is done."""

    def count_slot(self, outcome: SlotOutcome) -> None: ...

    def leases_begun(self) -> None:
        """Begin to renew leases: there is one again at an instance or an agent."""

    def tests_due(self) -> None:
        """Look for due self-tests."""


NO_IDS = "its engine has sent no token ids, without which no other can go on with it"


class Control(Generic[S]):
    """A proxy's policy, its open streams, and every book about them."""

    def __init__(
        self,
        configured: Configured,
        *,
        run_id: str,
        shell: Shell[S],
        runs_self_tests: bool = False,
        trace: Trace | None = None,
    ) -> None:
        """`run_id` names this run of the proxy. With `runs_self_tests` the shell carries out tests.
        `trace` gets every event with the policy's answer, before any of it is performed.
        """
        self.instances = Instances(configured)
        self.streams: dict[StreamId, S] = {}
        self.policy = RecoveryPolicy(
            configured.policy,
            configured.slo,
            configured.backup,
            member_of=lambda up: self.instances.known[up.info.id],
            agent_of=lambda up: self.agents.known[up.holder],
            stream_of=self.streams.__getitem__,
        )
        self.self_tests = SelfTests(
            self.instances.known,
            enabled=runs_self_tests,
            tests_kv=configured.tests_kv,
            prefill_generates=configured.prefill_generates,
            loads_rows_of=self.policy.loads_rows_of,
            due=shell.tests_due,
        )
        self.agents = Agents(configured.agents)
        self.leases = Leases(configured.lease_s, shell.leases_begun)
        self.lengths = PromptLengths()
        self.checkpoints = CheckpointHolds(
            configured, self.agents, self.instances, self.streams, self.tell, shell.leases_begun
        )
        self.slots = AgentSlots(
            run_id,
            self.policy.state.slots,
            self.agents,
            self.instances,
            configured.lease_s,
            configured.slot_share,
            shell,
        )
        self.progress = InstanceProgress(self.instances, configured.token_gap_s, self.policy)
        self.fences = FenceTable()
        self.drains = Drains(self.instances, self.produced_on, self.tell)
        self._links = LinkBounds()
        self._has_peers = configured.has_peers
        self.gpus = Gpus(self.instances.known)
        self._shell = shell
        self._trace = trace
        self._events: deque[tuple[ev.Event, float, bool]] = deque()
        self._telling = False
        self._postponed: deque[tuple[Callable[[float], None], float]] = deque()

    def open(self, live: S, now_s: float) -> None:
        """Begin a stream that has arrived here, or earlier at another proxy."""
        self.streams[live.id] = live
        for kept in live.journal.kept:
            known = self.instances.known.get(kept.holder)
            if known is not None and known.was_up and known.epoch == kept.epoch:
                live.prefilled_at[kept.holder] = None
                self.leases.hold(kept.holder, live.id)
            self.checkpoints.adopt(live, kept)
        journal = live.journal
        if self.policy.routes_by_prefix:
            live.prefix = journal.prefix
        prompt_tokens = len(journal.prompt_ids or ())
        if not prompt_tokens:
            guessed_tokens = journal.prompt_tokens_guess
            prompt_tokens = self.lengths.expected(journal.name, guessed_tokens)
            live.guessed_tokens = guessed_tokens if journal.is_predictable else 0
        max_tokens = journal.max_tokens
        most_tokens = None if max_tokens is None else prompt_tokens + max_tokens
        arrival: ev.StreamArrived | ev.StreamAdopted
        is_begun = journal.prompt_ids is not None or journal.produced_tokens > 0
        if not journal.owner_epoch or not is_begun:
            arrival = ev.StreamArrived(
                journal.stream,
                prompt_tokens,
                most_tokens,
                journal.deadlines,
                journal.tenant,
                journal.name,
                live.picked,
                journal.promise,
            )
        else:
            arrival = ev.StreamAdopted(
                journal.stream,
                prompt_tokens,
                journal.produced_tokens,
                most_tokens,
                journal.deadlines,
                now_s - journal.arrived_s,
                journal.kept,
                journal.tenant,
                journal.name,
                journal.needs_replay,
                journal.only_replay,
                journal.is_sampled,
                journal.is_repeatable,
            )
        self.tell(arrival, now_s)

    def end(self, live: S, outcome: Outcome, now_s: float) -> None:
        self.catch_up()
        if self.streams.get(live.id) is live:
            self._shell.end_stream(live, outcome)
            self.close(live, now_s, outcome.cause if isinstance(outcome, CannotContinue) else "")

    def close(self, live: S, now_s: float, cause: str = "") -> None:
        """Take the stream out of all books, however it ended; safe to call again. `cause`: as in
        `StreamEnded`.
        """
        self.catch_up()
        if self.streams.get(live.id) is not live:
            # The stream was closed before; its client may have resumed it under a new record.
            return
        self._shell.end_attempt(live)
        del self.streams[live.id]
        was_recovering = self._shell.stream_closed(live)
        # A stream resumed elsewhere needs its kept KV; leases that are not renewed expire.
        let_go = self.leases.drop if live.journal.resumable else self.leases.release
        for instance in live.prefilled_at:
            let_go(instance, live.id)
        if live.copies:
            self.checkpoints.ended(live)
        if self.fences.noted:
            self.fences.ended(live.id, self.instances.known)
        there = live.attempt.runs_on if cause else None
        at = None if there is None else there.id
        ended = ev.StreamEnded(live.id, live.journal.attempt, cause, at)
        self.tell(ended, now_s, is_shown=was_recovering or bool(cause))

    def tell(self, event: ev.Event, now_s: float, *, is_shown: bool = False) -> None:
        """Pass an event to the policy, and perform its actions; events caused by these follow.
        `is_shown`: operators are shown the event, whatever its kind.
        """
        if self._telling:
            self._events.append((event, now_s, is_shown))
            return
        if self._postponed:
            self.catch_up()
        self._events.append((event, now_s, is_shown))
        self._telling = True
        try:
            while self._events:
                event, now_s, is_shown = self._events.popleft()
                actions = self.policy.handle(event, now_s)
                if self._trace is not None:
                    self._trace(now_s, event, actions)
                if self.policy.state.slots.released:
                    self.slots.release()
                if is_shown or type(event) in _SHOWN or not _SHOWN.isdisjoint(map(type, actions)):
                    self._shell.note(event, actions, now_s)
                for action in actions:
                    if isinstance(action, act.Start):
                        self._start(action, now_s)
                    else:
                        self._carry_out(action, now_s)
        finally:
            self._telling = False

    def postpone(self, report: Callable[[float], None], now_s: float) -> None:
        """Put off an attempt's report that decides nothing; it is made with this `now_s`, before
        any other report.
        """
        self._postponed.append((report, now_s))
        if len(self._postponed) == 1:
            self._shell.catch_up_soon()

    def catch_up(self) -> None:
        """Make the postponed reports in order."""
        postponed, self._postponed = self._postponed, deque()
        try:
            while postponed:
                report, now_s = postponed.popleft()
                report(now_s)
        finally:
            self._postponed.extendleft(reversed(postponed))

    def _carry_out(self, action: act.AfterStart, now_s: float) -> None:
        match action:
            case act.Redirect():
                self._redirect(action)
            case act.Halt():
                if (live := self._current(action.stream, action.attempt)) is not None:
                    self.halt(live)
                    self._goes_on(live, now_s)
            case act.Stay():
                if (live := self._current(action.stream, action.attempt)) is not None:
                    self._shell.expect_token(live)
            case act.GiveUp():
                if (given_up := self.streams.get(action.stream)) is not None:
                    self.end(given_up, action, now_s)
            case (
                act.Settled()
                | act.RowsLoaded()
                | act.Recovered()
                | act.Ejected()
                | act.Readmitted()
            ):
                pass  # Records, which `note` has shown.
            case act.WakeAt():
                self._shell.wake_at(action.at_s)
            case _:
                assert_never(action)

    def _current(self, stream: StreamId, attempt: int) -> S | None:
        live = self.streams.get(stream)
        return live if live is not None and live.journal.attempt == attempt else None

    def _start(self, action: act.Start, now_s: float) -> None:
        live = self.streams.get(action.stream)
        if live is None:
            # An earlier action ended the stream. `close` named the attempt before this one, so the
            # policy ignores that StreamEnded as late.
            self.tell(ev.StreamEnded(action.stream, action.attempt), now_s)
            return
        journal = live.journal
        if journal.attempt:
            self.halt(live)
        journal.attempt, live.plan = action.attempt, action.plan
        if action.plan.places:
            self.checkpoints.planned(live, action.plan)
        self._shell.begin_attempt(live, action.plan)

    def _redirect(self, action: act.Redirect) -> None:
        """Replace the plan of an attempt whose prefill has just reported."""
        live = self._current(action.stream, action.attempt)
        if live is None:
            return
        live.plan = action.plan
        if action.plan.places:
            self.checkpoints.planned(live, action.plan)

    def _goes_on(self, live: S, now_s: float) -> bool:
        """Return whether the stream, whose attempt is over, needs and may have another attempt;
        otherwise end the stream.
        """
        journal = live.journal
        if journal.finished:
            self.end(live, Complete(), now_s)
            return False
        if self._shell.can_give_end() and not journal.needs_replay and live.remaining_tokens == 0:
            assert live.attempt.plan is not None
            self._shell.give_end(live, live.attempt.plan)
            return False
        if (cause := self.why_lost(journal)) is not None:
            self.end(live, CannotContinue(cause), now_s)
            return False
        return True

    def why_lost(self, journal: StreamJournal) -> str | None:
        """Return why the begun stream cannot be continued as it must be; None: it can, as far as is
        known.
        """
        if not journal.is_recoverable:
            return NO_IDS
        # Parsed output, for example, continues exactly only by a replay; the head of the response,
        # which promises exact tokens, was sent before this was known.
        unkept = journal.unkept
        is_unkept = journal.promise is not ev.Promise.NONE and unkept
        is_lost = journal.only_replay and not (journal.may_come_again and self._may_repeat())
        if (is_unkept or is_lost) and journal.produced_tokens:
            return f"cannot be continued exactly: {', '.join(unkept or journal.inexact)}"
        return None

    def _may_repeat(self) -> bool:
        """Return whether some instance may be found to generate another one's output again, by its
        processor or because its self-test is equal.
        """
        return self.self_tests.enabled or self.instances.replays(0) is not Replays.NOWHERE

    def halt(self, live: S) -> None:
        """End an attempt that the policy has dropped; the stream continues without it."""
        self._shell.end_attempt(live)
        if live.plan is not None:
            self.fences.halted(live.plan, live.id, (live.journal.owner_epoch, live.journal.attempt))
            live.plan = None

    def attempt_over(self, live: S, event: ev.AttemptFailed | ev.SlotDenied, now_s: float) -> None:
        """Report an attempt's end: the stream needs another attempt, unless it is complete."""
        if self._current(live.id, event.attempt) is not live:
            return
        self.halt(live)
        if self._goes_on(live, now_s):
            self.tell(event, now_s)

    def retention_lost(
        self, instance: InstanceId, streams: Sequence[StreamId], now_s: float
    ) -> None:
        """Note that an instance keeps nothing of these streams, by its answer to a lease."""
        if lost := self.leases.unknown(instance, streams):
            self.tell(ev.RetentionLost(instance, lost), now_s)

    def instance_up(self, known: Member, info: InstanceInfo, now_s: float) -> Member:
        """Note that an instance is usable in a new epoch; return its record from now on. Attempts
        of a process that lives on continue: another proxy has fenced it.
        """
        if info.prefill.is_guess and (gpu := self.gpus.name_of(known.node)):
            info = msgspec.structs.replace(info, prefill=on_gpu(info.prefill, gpu))
        lives_on = known.is_same_process(info)
        if not lives_on:
            self.fences.fenced(known.id)
            self.progress.restarted(known.id)
        had_not_ended = known.had_not_ended(info)
        up = self.instances.accept(known, info)
        self.self_tests.up(info, now_s)
        seen = self.self_tests.seen(known.id)
        # Open streams' pages in memory taken over from the former process, under leases here.
        kept = {stream: pages for stream, pages in info.kept.items() if stream in self.streams}
        if kept and not lives_on:
            for stream in kept:
                self.streams[stream].prefilled_at[known.id] = None
                self.leases.hold(known.id, stream)
            self.tell(ev.PagesKept(known.id, info.epoch, kept), now_s)
        event = ev.InstanceUp(
            up.info,
            up.prefill,
            seen.moves_kv,
            seen.tokens,
            lives_on,
            had_not_ended,
            seen.restores,
            self.self_tests.standing(known.id).is_doubted,
            seen.store,
            seen.generates,
        )
        self.tell(event, now_s)
        return self.instances.known[known.id]

    def accept(self, instance: InstanceId, ordered_s: float, now_s: float) -> None:
        """Let the model and the weights of an instance's present process be the right ones, by an
        operator's order at this time of the wall clock. Raises RequestError, like
        `Instances.expect`.
        """
        epoch = self.instances.expect(self.instances.known[instance])
        self.self_tests.choose(instance, epoch, ordered_s)
        self.weights_known((), now_s)

    def heard(self, fingerprint: str, choice: RightWeights, now_s: float) -> None:
        """Take the model and weights that are right at another proxy, if they were chosen by a
        later order than here, or if nothing is known here.
        """
        is_later = choice.ordered_s > self.self_tests.choice.ordered_s
        if fingerprint and (is_later or not self.instances.fingerprint):
            self.instances.fingerprint = fingerprint
        if self.self_tests.heard(choice):
            self.weights_known((), now_s)

    def rows_reported(self, rows: RowsReport, now_s: float) -> None:
        """Note the digests of weights in an agent's report."""
        if self.self_tests.rows_reported(rows.regions):
            self.weights_known((), now_s)

    def weights_known(self, instances: Container[InstanceId], now_s: float) -> None:
        """Tell the policy what self-tests or digests have shown of these instances, and what of
        others follows from it.
        """
        for news in self.self_tests.news(instances):
            self.tell(news, now_s)
        self._shell.weights_known()

    def load_reported(self, known: Member, report: LoadReport, now_s: float) -> None:
        self.catch_up()
        self.drains.reported(known.id, now_s)
        if is_repeated(report, known.load) and not self.policy.has_waiting:
            known.reported_s = now_s  # The report shows only that the process lives.
            return
        is_new_store = report.store != ("" if known.load is None else known.load.store)
        known.load = report
        known.reported_s = now_s
        progress = (report.progress, report.free_pages) if has_figures(report) else None
        self.progress.delivered[known.id].reported(progress, now_s)
        member, waiting = self.policy.members.get(known.id), self.policy.has_waiting
        has_peers = self._has_peers
        if member is None or changes_decision(
            member, report, now_s, has_peers=has_peers, waiting=waiting
        ):
            of_ranks = member is not None and changes_ranks(member, report, now_s)
            concerned = self._running_on(known.id) if of_ranks or report.draining else []
            token_s = _token_s(concerned) if of_ranks else 0.0
            produced = {live.id: live.journal.produced_tokens for live in concerned}
            # Links and replicas have events of their own.
            told = msgspec.structs.replace(report, links=[], replicas={})
            self.tell(ev.LoadReported(known.id, told, has_peers, token_s, produced), now_s)
            if of_ranks and report.reforming is None:
                # The next token ends the wait for the re-forming: earlier ones may be of the layout
                # before.
                for live in concerned:
                    if live.stays_until_s is not None:
                        self._shell.expect_token(live)
        self._replicated(known, report, now_s)
        for link in report.links:
            measured = Measurement(link.bytes_per_s, link.spread, link.age_s)
            self.link_measured(link.source, known.node, measured, now_s)
        for fetch in report.fetches:
            if self._counts(fetch):
                counted = ev.RowsCounted(fetch.stream, fetch.attempt, fetch.loaded_tokens)
                self.tell(counted, now_s)
        has_other_share = self.self_tests.stores.fetched(known.id, report.fetches)
        if has_other_share:
            for news in self.self_tests.news((known.id,)):
                self.tell(news, now_s)
        if is_new_store or has_other_share:
            self._shell.tests_due()

    def _counts(self, fetch: FetchReport) -> bool:
        """Return whether the policy awaits this report of loaded rows; each is repeated."""
        live = self.streams.get(fetch.stream)
        is_own = live is None or live.journal.owner_epoch == fetch.owner_epoch
        return is_own and (fetch.stream, fetch.attempt) in self.policy.state.restored

    def _replicated(self, known: Member, report: LoadReport, now_s: float) -> None:
        """Note the changed replicas of open streams at the instance."""
        pages = {}
        for stream, count in report.replicas.items():
            if (state := self.policy.streams.get(stream)) is None:
                continue
            held = state.holders.get(known.id)
            is_leased = held is not None and not held.is_replica
            if not is_leased and count != (0 if held is None else held.pages):
                pages[stream] = count
        if pages:
            self.tell(ev.CheckpointsReported(known.id, report.epoch, 0, 0, pages), now_s)

    def link_measured(
        self, source: NodeId, target: NodeId, measured: Measurement, now_s: float
    ) -> None:
        event = self._links.measured(source, target, measured, now_s)
        if event is not None:
            self.tell(event, now_s)

    def gpus_seen(self, node: NodeId, gpus: Sequence[GpuHealth], now_s: float) -> None:
        """Note the health of a node's GPUs, as published by its agent."""
        for instance, state, reason in self.gpus.seen(node, gpus):
            self.tell(ev.GpuJudged(instance, state, reason, self.produced_on(instance)), now_s)

    def instance_lost(self, known: Member, cause: str, now_s: float) -> None:
        """Report an instance's loss, with all victims in one event, so that the policy can spread
        them.
        """
        self.catch_up()
        known.lose(cause)
        self.self_tests.lost(known.id)
        self.leases.forget(known.id)
        produced = {}
        for live in self._running_on(known.id):
            self.halt(live)
            if self._goes_on(live, now_s):
                produced[live.id] = live.journal.produced_tokens
        self.tell(ev.InstanceLost(known.id, known.epoch, cause, produced), now_s)

    def reload(self, after: Configured, now_s: float) -> None:
        """Apply sections `policy` and `slo` of `after`; open streams and learned values stay."""
        self.slots.reload(after.slot_share)
        self.tell(ev.SettingsReloaded(after.policy, after.slo), now_s)

    def produced_on(self, instance: InstanceId) -> dict[StreamId, int]:
        return {live.id: live.journal.produced_tokens for live in self._running_on(instance)}

    def _running_on(self, instance: InstanceId) -> list[S]:
        """Streams whose current attempt is lost with the instance."""
        self.catch_up()
        member = self.policy.members.get(instance)
        return [] if member is None else [*map(self.streams.__getitem__, sorted(member.running))]


def _token_s(running: Sequence[LiveStream]) -> float:
    """Mean time between two tokens of a stream; 0: unknown."""
    intervals = [live.journal.token_interval_s for live in running]
    measured = [interval_s for interval_s in intervals if interval_s is not None]
    return sum_in_order(measured) / len(measured) if measured else 0.0


# The time limit of a request's first token is multiplied by `_SLOWER` for each time that a second
# instance missed it too, and once more if no other instance could take the request; at most
# `_MOST_SLOW` times.
_SLOWER = 4.0
_MOST_SLOW = 4


class CallFault(Enum):
    """Early end of a call: what it says about the instance (`kind`), and whether the connection
    ended without an error message (`abrupt`), so that the whole instance may be lost.
    """

    REFUSED = ev.FailureKind.REFUSED, False
    DENIED = ev.FailureKind.DENIED, False
    BUSY = ev.FailureKind.BUSY, False
    NOT_A_NUMBER = ev.FailureKind.NOT_A_NUMBER, False
    NOT_CONNECTED = ev.FailureKind.BUSY, True
    ERROR = ev.FailureKind.ERROR, False  # The engine answered with an error before any token.
    WRONG = ev.FailureKind.BROKEN, False  # The engine sent an error event, or no valid answer.
    DIFFERS = ev.FailureKind.DIFFERS, False  # The output is not the one that the client has.
    SILENT = ev.FailureKind.SILENT, True
    LOST = ev.FailureKind.BROKEN, True

    def __init__(self, kind: ev.FailureKind, abrupt: bool) -> None:
        self.kind = kind
        self.abrupt = abrupt

    def delay_s(self, *, is_given_up: bool = False, has_waited: bool = False) -> float:
        """Return how many seconds to delay the failure's report, in case news of the whole
        instance's loss follows. `is_given_up`: the instance is being given up as lost, which ends
        the attempt; `has_waited`: the delay is over, so 0.
        """
        is_of_request = self in (CallFault.NOT_A_NUMBER, CallFault.DIFFERS)
        if has_waited or self.kind.is_refusal or is_of_request:
            return 0.0
        return GIVEN_UP_TOGETHER_S if is_given_up else LOST_TOGETHER_S


class Attempt(Generic[S]):
    __slots__ = (
        *("_chosen", "_computes_at", "_control", "_is_reported", "_produced_before"),
        *("_reused_tokens", "_waits_for", "computes", "failed_at", "has_resumed", "is_whole"),
        *("live", "number", "plan"),
    )

    def __init__(self, control: Control[S], live: S, plan: act.Plan) -> None:
        self.live = live
        self.plan = plan
        self.failed_at = plan.prefill or plan.decode  # Instance to which a failure is attributed.
        self.has_resumed = False
        self.is_whole = False  # True: the engine sends its answer in one piece, at its end.
        self._control = control
        self.number = live.journal.attempt
        self._is_reported = False
        # For a single call of both stages: the instance that computes the history (None: two
        # calls), and the number of output tokens in that history.
        self.computes: InstanceId | None = None
        self._produced_before = 0
        self._reused_tokens: int | None = None  # Cached tokens of the history; None: not reported.
        # Of the present call: instances whose silence counts, those of them that compute its
        # prompt, and the estimate that predicts its time (None: no prediction).
        self._waits_for: tuple[Member, ...] = ()
        self._computes_at: tuple[Member, ...] = ()
        self._chosen: Estimate | None = None

    @property
    def is_current(self) -> bool:
        live = self.live
        is_open = self._control.streams.get(live.id) is live
        return is_open and live.journal.attempt == self.number and not self._is_reported

    def begin(self) -> InstanceId | None:
        """Return the instance for a separate prefill call; None: the decode call is next.

        If one instance does both stages, its prefix cache is the hand-off, and the call is needed
        only for the ids of a text prompt.
        """
        control, plan, journal = self._control, self.plan, self.live.journal
        decode = control.instances.known[plan.decode]
        if plan.prefill is not None:
            together = is_one_call(decode, plan.prefill)
        else:
            together = not journal.output_ids and decode.abilities.computes_prompts
            if not together and journal.prompt_ids is not None:
                return None
        there = control.instances.known[self.failed_at]
        if there.abilities.retains:
            self.live.prefilled_at[self.failed_at] = None
        self._waits_for = self._computes_at = (there,)
        if (decision := self.live.attempt.decision) is not None:
            self._chosen = decision.chosen
        if not together:
            return self.failed_at
        self.computes, self._produced_before = self.failed_at, len(journal.output_ids)
        return None

    def prefilled(self, now_s: float, reused_tokens: int | None = None) -> bool:
        """Note prefill's answer, with `reused_tokens` from its prefix cache (None: not reported);
        return True if the decode call follows, by `plan`, which the policy may just have changed.
        """
        control, live = self._control, self.live
        if not self.is_current:
            return False
        journal = live.journal
        computed = len(journal.prompt_ids or ())
        if not self.plan.replays:
            computed += len(journal.output_ids)
        report = partial(self._computed, self.failed_at, computed, reused_tokens)
        if control.policy.keeps_plan(live, now_s):
            control.postpone(report, now_s)
            return True
        report(now_s)
        if journal.attempt != self.number:
            return False
        plan = live.attempt.plan
        assert plan is not None
        if control.instances.known[plan.decode].health is not Health.UP:
            # The policy knows that the decode instance is down, and has the stream wait.
            control.halt(live)
            return False
        self.plan = plan
        return True

    def decode(self) -> SlotRequest | None:
        """Begin the decode call; return the slot to request before it (None: it needs none). The
        policy's book releases the slot at the first token, or at the attempt's end.
        """
        control, decode = self._control, self.plan.decode
        self.failed_at, there = decode, control.instances.known[decode]
        if self.computes is not None:  # `begin` has noted the prediction of a single call.
            self._waits_for = (there, *self._computes_at)
        else:
            self._waits_for = (there,)
            self._computes_at = (there,) if self.plan.prefill is None else ()
            decision = self.live.attempt.decision
            self._chosen = None if decision is None else decision.chosen
        if not self.plan.runs:  # Only an attempt that fetches pages needs a slot.
            return None
        return SlotRequest(decode, self.live.id, self.number, self.live.journal.owner_epoch)

    def asks_whole(self, now_s: float) -> None:
        """Note that the engine answers in one piece, so that no first token is expected in time."""
        self.is_whole = True
        if self.is_current:
            self._control.tell(ev.WholeAsked(self.live.id, self.number), now_s)

    def limit_s(self, heard_s: float, now_s: float) -> float:
        """Return how long after `heard_s`, its last sign of life, the call may be silent."""
        progress, live = self._control.progress, self.live
        if self.has_resumed:
            return progress.token_gap_s(live, self.plan.decode, heard_s, now_s)
        there = (self._control.instances.known[self.plan.decode],)
        counts = not self.is_whole or progress.counts(self.plan.decode)
        if not live.journal.is_predictable or not counts:
            return min(progress.answer_s(each.id, heard_s) for each in self._waits_for)
        predicted_s = 0.0
        if self._chosen is not None:
            predicted_s = self._chosen.work_s
            if not self._computes_at:  # The prompt is computed: transfer and replay remain.
                predicted_s -= self._chosen.compute_s
        limit_s = max(progress.first_token_s(each, predicted_s) for each in self._waits_for)
        # The limit is longer if no other instance could begin the stream: its next attempt would
        # return to this one.
        is_alone = any(progress.is_alone(each.id, now_s) for each in self._waits_for)
        limit_s *= _SLOWER ** min(live.recovery.slow_attempts + is_alone, _MOST_SLOW)
        # The limit counts from the last progress of the instance, which may compute other prompts
        # first.
        computes_at = there if self.is_whole else self._computes_at
        moved_s = (progress.moved_for_s(each.id, heard_s) for each in computes_at)
        return limit_s + max(moved_s, default=0.0)

    def is_excused(self, now_s: float) -> bool:
        """Return whether silence is no fault: the stream waits for its instance's re-forming, or
        the instance delivers tokens to other streams.
        """
        progress, until_s = self._control.progress, self.live.stays_until_s
        return (until_s is not None and until_s > now_s) or any(
            progress.is_making_progress(each.id, now_s) for each in self._waits_for
        )

    def fell_silent(self, now_s: float) -> None:
        """Note that the call was silent for too long, and so its instance stands still; except for
        a request that was slow at several instances and has no token, because it may be the cause.
        """
        if self.has_resumed or not self.live.recovery.is_slow:
            self._control.progress.delivered[self.failed_at].stood_still_s = now_s

    def resumed(self, now_s: float) -> None:
        """Note that the client has a token: the first, or the first after a stay."""
        control, live = self._control, self.live
        if not self.is_current:
            return
        if not self.has_resumed:
            there = control.instances.known[self.plan.decode]
            self.has_resumed, self._waits_for = True, (there,)
        live.journal.commit_head()
        # The report of a plain first attempt may be postponed; that of a recovery writes records
        # which are read at once.
        is_plain = self.number == 1 and live.attempt.option is Option.START
        if is_plain and (self.computes is None or control.policy.keeps_plan(live, now_s)):
            control.postpone(self._report_resumed, now_s)
        else:
            self._report_resumed(now_s)

    def _report_resumed(self, now_s: float) -> None:
        control, live, computes = self._control, self.live, self.computes
        if computes is not None:
            self.computes = None
            self._computed(computes, self._history_tokens, self._reused_tokens, now_s)
        journal = live.journal
        recovers = self.number > 1 or live.attempt.option.stays
        last_s = journal.last_write_s if recovers else None
        resumed = ev.StreamResumed(
            live.id,
            self.number,
            journal.needs_replay,
            journal.promise,
            journal.only_replay,
            journal.is_sampled,
            journal.is_repeatable,
            None if last_s is None else now_s - last_s,
        )
        control.tell(resumed, now_s)
        if live.copies:
            control.checkpoints.resumed(live, now_s)

    def found(self, reused_tokens: int, now_s: float) -> None:
        """Note the end of the prefill that was called together with decode, with `reused_tokens` of
        its prompt from the prefix cache. The report may come before or after the first token.
        """
        self._reused_tokens = reused_tokens
        if self.computes is None and self.is_current:
            event = ev.PrefillDone(self.live.id, self.number, self._history_tokens, reused_tokens)
            self._control.tell(event, now_s)

    @property
    def _history_tokens(self) -> int:
        return len(self.live.journal.prompt_ids or ()) + self._produced_before

    def blame_hand_off(self) -> None:
        """Blame the hand-off, and so the prefill instance, for the decode instance's error."""
        if self.computes is None and not self.has_resumed:
            self.failed_at = self.plan.prefill or self.failed_at

    def blame_prefill(self) -> None:
        """Blame the prefill call that went together with the decode call."""
        self.failed_at = self.plan.prefill or self.failed_at

    def blame_store(self) -> None:
        """Blame the decode instance's store, from which it could not load."""
        if not self.has_resumed:
            self.failed_at = InstanceId(STORE)

    def failure(
        self,
        fault: CallFault,
        cause: str,
        *,
        retry_after_s: float | None = None,
        final: bool = False,
        same_tokens: int = 0,
    ) -> ev.AttemptFailed | None:
        """Return the report of the attempt's failure; None: the attempt is over."""
        if not self.is_current:
            return None
        self._is_reported = True
        kind, produced = fault.kind, self.live.journal.produced_tokens
        is_late = self.has_resumed if fault is CallFault.SILENT else produced > 0
        if kind.is_doubtful and is_late:  # An instance has served the request.
            kind = ev.FailureKind.BROKEN
        return ev.AttemptFailed(
            self.live.id,
            self.number,
            self.failed_at,
            cause,
            produced,
            fault.abrupt,
            kind,
            retry_after_s,
            final,
            same_tokens,
        )

    def denial(self, wait_s: float) -> ev.SlotDenied | None:
        """Return the report that no slot is free for the attempt; None: the attempt is over."""
        if not self.is_current:
            return None
        self._is_reported = True
        return ev.SlotDenied(self.live.id, self.number, self.plan.decode, wait_s)

    def _computed(
        self,
        instance: InstanceId,
        history_tokens: int,
        reused_tokens: int | None,
        now_s: float,
    ) -> None:
        """Note that the instance has computed the history's KV."""
        control, live = self._control, self.live
        if live.guessed_tokens:
            tokens = len(live.journal.prompt_ids or ())
            control.lengths.observe(live.journal.name, live.guessed_tokens, tokens)
            live.guessed_tokens = 0
        delivered = control.progress.delivered[instance]
        delivered.last_s = max(delivered.last_s, now_s)
        if control.instances.known[instance].abilities.retains:
            control.leases.hold(instance, live.id)
        control.tell(ev.PrefillDone(live.id, self.number, history_tokens, reused_tokens), now_s)
