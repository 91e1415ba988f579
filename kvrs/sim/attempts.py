"""One attempt at a stream of a simulated proxy: its calls to instances, and what comes back."""

from typing import Protocol

from kvrs.core.control import Control
from kvrs.core.fleet.silence import LOST_TOGETHER_S, SilenceTimer
from kvrs.core.live import Complete
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId
from kvrs.protocol.instance import SlotRequest
from kvrs.protocol.page_messages import TrafficClass
from kvrs.scheduling.sources import PullSource
from kvrs.sim.calls import SimCall, token_at
from kvrs.sim.engine import SimEngine
from kvrs.sim.process import Step, require
from kvrs.sim.slots import SlotMessages
from kvrs.sim.streams import SimStream
from kvrs.sim.watches import IN_ORDER_S

_NOT_CONNECTED = "refused"
# What the answer of a sick instance says of it, as `kvrs/proxy/backends/pd.py` reads it.
_FAILURES = {
    "HTTP 404": ev.FailureKind.REFUSED,
    "HTTP 500": ev.FailureKind.BROKEN,
    "HTTP 503": ev.FailureKind.BUSY,
    _NOT_CONNECTED: ev.FailureKind.BUSY,
}


class AttemptHost(Protocol):
    """The proxy of an attempt."""

    control: Control[SimStream]
    slots: SlotMessages
    dropped_tokens: int
    page_size_tokens: int

    @property
    def now_s(self) -> float: ...
    def after(self, delay_s: float, step: Step) -> None:
        """Do this later, unless the proxy has died by then."""

    def engine(self, name: InstanceId) -> SimEngine: ...
    def delay_s(self, name: InstanceId) -> float:
        """How late a message to or from the process is."""

    def late_news_s(self) -> float | None:
        """How much later it is noticed once more that a connection is closed; None: it is not."""

    def suspect(self, name: InstanceId) -> None: ...
    def resumed(self, live: SimStream) -> None: ...


class Connection:
    """One call of an attempt. What the engine sends on it arrives later, and in order."""

    def __init__(self, attempt: "SimAttempt", engine: SimEngine) -> None:
        self._attempt = attempt
        self._engine = engine
        self._arrival_s = self._sent_s = 0.0  # Of the last message each way.
        self._is_open = True

    def prefilled(self, history_tokens: int) -> None:
        self._later(lambda: self._attempt.prefilled(self._engine.id, history_tokens))

    def token(self, position: int, token: int, *, is_last: bool) -> None:
        # Also when the proxy has closed the connection: the engine does not know yet, and what it
        # sends must not count.
        self._later(lambda: self._attempt.token(self._engine.id, position, token, is_last=is_last))

    def broke(self, cause: str) -> None:
        self._later(lambda: self._attempt.broke(self._engine.id, cause))

    def close(self) -> None:
        """The engine notices a moment later, or when it wakes."""
        if not self._is_open:
            return
        self._is_open = False
        engine, attempt, host = self._engine, self._attempt, self._attempt.host
        self.send(lambda: engine.abort(attempt.live.id, attempt.number))
        if (late_s := host.late_news_s()) is not None:
            host.after(late_s, lambda: attempt.broke(engine.id, "closed"))

    def send(self, step: Step, refused: Step | None = None) -> None:
        """To the engine, in order."""
        now_s, delay_s = self._times_s()
        self._sent_s = max(self._sent_s + IN_ORDER_S, now_s + delay_s)
        self._engine.call(self._sent_s - now_s, step, refused)

    def _later(self, step: Step) -> None:
        now_s, delay_s = self._times_s()
        self._arrival_s = max(self._arrival_s + IN_ORDER_S, now_s + delay_s)
        self._attempt.host.after(self._arrival_s - now_s, step)

    def _times_s(self) -> tuple[float, float]:
        host = self._attempt.host
        return host.now_s, host.delay_s(self._engine.id)


class SimAttempt:
    """It passes late news of itself on to the policy, on purpose: the policy must ignore it."""

    def __init__(self, host: AttemptHost, live: SimStream, plan: act.Plan) -> None:
        self.host = host
        self.live = live
        self.number = (live.journal.owner_epoch, live.journal.attempt)
        self._control = host.control
        self._attempt = live.journal.attempt
        self._plan = plan
        self._connection: Connection | None = None
        self._slot: SlotRequest | None = None
        self._is_open = True
        self._is_decoding = False
        self._has_resumed = False
        self._is_expected = False
        self._silence = SilenceTimer(host.now_s)

    def begin(self) -> None:
        prefill = self.live.prefills_at(self._plan)
        if prefill is None:
            self._decode(())
            return
        self._control.calls_prefill(self.live, prefill)
        self._call(prefill, (), prefill_only=True)

    def expect_token(self) -> None:
        """Report the next token as that with which the attempt resumes."""
        self._is_expected = True

    def close(self) -> None:
        self._is_open = False
        self._release_slot()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Calls.

    def _decode(self, handed_over: tuple[PullSource, ...]) -> None:
        plan, live = self._plan, self.live
        self._is_decoding = True
        if not plan.runs:
            self._call(plan.decode, handed_over)
            return
        runs = tuple(
            PullSource(
                run.holder,
                run.generation,
                range(run.first_page, run.first_page + run.pages),
                TrafficClass.RECOVERY,
            )
            for run in plan.runs
        )

        def granted(token: int) -> None:
            if self._is_open:
                self._call(plan.decode, runs, slot_token=token)

        def denied(wait_s: float) -> None:
            if self._is_open:
                now_s = self.host.now_s
                self._control.slot_denied(live, self._attempt, plan.decode, wait_s, now_s)

        self._slot = SlotRequest(plan.decode, live.id, self._attempt, live.journal.owner_epoch)
        self.host.slots.acquire(self._slot, granted, denied)

    def _call(
        self,
        name: InstanceId,
        sources: tuple[PullSource, ...],
        *,
        prefill_only: bool = False,
        slot_token: int = 0,
    ) -> None:
        live, engine = self.live, self.host.engine(name)
        self._connection = connection = Connection(self, engine)
        call = SimCall(
            live.id,
            self.number,
            live.history_ids,
            live.prompt_tokens or live.true_history_tokens,
            live.arrival.max_tokens,
            prefill_only,
            sources,
            self._control.instances.places(name, self._plan),
            connection,
            slot_token,
            live.arrival.is_poison,
        )
        connection.send(lambda: engine.submit(call), lambda: connection.broke(_NOT_CONNECTED))
        timeout_s = self._control.progress.first_token_timeout_s(name)
        self._silence = SilenceTimer(self.host.now_s)
        self._watch(connection, name, timeout_s)

    def _watch(self, connection: Connection, name: InstanceId, first_timeout_s: float) -> None:
        """Fail the attempt when its call has been silent for too long."""
        if not self._is_open or self._connection is not connection:
            return
        progress, now_s = self._control.progress, self.host.now_s
        limit_s = first_timeout_s
        if self._has_resumed:
            limit_s = progress.token_gap_s(self.live, name, self._silence.heard_s, now_s)
        next_s = self._silence.look(
            now_s,
            limit_s,
            lambda: self.live.stays_until_s > now_s or progress.is_making_progress(name, now_s),
        )
        if next_s is not None:
            self.host.after(next_s - now_s, lambda: self._watch(connection, name, first_timeout_s))
            return
        self.host.suspect(name)
        self._fail(name, "silent", abrupt=True)

    # Replies.

    def prefilled(self, name: InstanceId, history_tokens: int) -> None:
        control, live, now_s = self._control, self.live, self.host.now_s
        if not self._is_open or self._connection is None or self._has_resumed:
            if self._attempt < live.journal.attempt and not live.outcome:
                control.tell(ev.PrefillDone(live.id, self._attempt, history_tokens), now_s)
            return
        if live.journal.prompt_ids is None:
            live.journal.prompt_ids = list(live.arrival.prompt_ids)
        has_own_prefill = self._plan.prefill is not None
        if not control.prefill_done(live, self._attempt, name, now_s) or not self._is_open:
            return
        assert live.plan is not None
        self._plan = live.plan  # Perhaps redirected.
        self._connection = None
        pages = range(history_tokens // self.host.page_size_tokens)
        handed_over = (PullSource(name, None, pages, TrafficClass.HANDOFF, live.id),)
        self._decode(handed_over if has_own_prefill else ())

    def token(self, name: InstanceId, position: int, token: int, *, is_last: bool) -> None:
        """Every position comes once, in order, and only from the current attempt."""
        live, now_s = self.live, self.host.now_s
        if not self._is_open or not self._is_decoding:
            self.host.dropped_tokens += 1
            if self._attempt < live.journal.attempt and not live.outcome:
                late = ev.StreamEnded if is_last else ev.StreamResumed
                self._control.tell(late(live.id, self._attempt), now_s)
            return
        have = len(live.output)
        require(position == have, f"{live.id}: token {position} comes after {have} others")
        right = token_at(live.id, len(live.arrival.prompt_ids) + position)
        require(token == right, f"{live.id}: token {position} is another one")
        live.journal.append(token, now_s)
        self._silence.heard_s = now_s
        if not self._has_resumed or self._is_expected:
            self._has_resumed, self._is_expected = True, False
            self._release_slot()
            self._control.resumed(live, self._attempt, now_s)
            self.host.resumed(live)
        self._control.progress.delivered(name, now_s)
        require(is_last == live.journal.finished, f"{live.id} ends after {len(live.output)} tokens")
        if is_last and not live.outcome:
            self._control.end(live, Complete(), now_s)

    def broke(self, name: InstanceId, cause: str) -> None:
        if self._is_open:
            is_answer = cause in ("error event", "fenced", "too long") or cause.startswith("HTTP")
            self._fail(name, cause, abrupt=not is_answer)
        elif not self.live.outcome:
            produced = self.live.produced_tokens
            late = ev.AttemptFailed(self.live.id, self._attempt, name, cause, produced)
            if self._attempt < self.live.journal.attempt:
                self._control.tell(late, self.host.now_s)

    def _fail(self, name: InstanceId, cause: str, *, abrupt: bool) -> None:
        """Report it a moment later, when the loss of the whole instance may be known."""
        self.close()

        def report() -> None:
            self._control.attempt_failed(
                self.live,
                self._attempt,
                name,
                cause,
                abrupt=abrupt,
                failure=_FAILURES.get(cause, ev.FailureKind.BROKEN),
                now_s=self.host.now_s,
            )

        self.host.after(LOST_TOGETHER_S, report)

    def _release_slot(self) -> None:
        if self._slot is not None:
            self.host.slots.release(self._slot)
            self._slot = None
