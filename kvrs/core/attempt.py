"""Decisions of one attempt at a stream, from its plan to the report of its result.

Pure: no clock, no socket, no randomness. A shell performs the calls and reports their results, with
`now_s`: the proxy with sockets and tasks, the simulator in virtual time.

    begin        -> the instance to call for prefill, or straight to the decode call
    prefilled    -> whether the decode call follows, by `plan`, which may be another one now
    decode       -> the slot that is to be asked for before the call; None: it needs none
    limit_s, is_excused: how long a call may be silent; `failed_at` is to blame for what fails
    resumed      -> its first token, and the first one after a stay
    failure, denial -> the report of its end, after the fault's `delay_s`; None: it is over

A report of a finished attempt changes nothing.
"""

from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from kvrs.core.control import Control
from kvrs.core.fleet.silence import GIVEN_UP_TOGETHER_S, LOST_TOGETHER_S
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.live_stream import LiveStream
from kvrs.core.model.member import Health, Member, is_one_call
from kvrs.ids import InstanceId
from kvrs.protocol.instance import STORE, SlotRequest

S = TypeVar("S", bound=LiveStream)


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
            together = not journal.output_ids and decode.computes_prompts
            if not together and journal.prompt_ids is not None:
                return None
        there = control.instances.known[self.failed_at]
        if there.retains:
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
        if control.instances.known[instance].retains:
            control.leases.hold(instance, live.id)
        control.tell(ev.PrefillDone(live.id, self.number, history_tokens, reused_tokens), now_s)
