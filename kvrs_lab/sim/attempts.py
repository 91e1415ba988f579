"""The calls of one attempt at a stream of a simulated proxy. `kvrs.core.control` decides them."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from kvrs.core.control import Attempt, CallFault, Control
from kvrs.core.fleet.silence import SilenceTimer
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.streams import Complete
from kvrs.ids import InstanceId
from kvrs.protocol.instance import SlotRequest
from kvrs.protocol.pages import TrafficClass
from kvrs.proxy.fleet.leases import SlotDeniedError, SlotSender
from kvrs_engine.scheduling.sources import PullSource
from kvrs_lab.sim.calls import TOKEN_STRIDE, VOCABULARY, Asker, SimCall, first_token, token_at
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.fleet import SimFleet
from kvrs_lab.sim.flows import FlowPart, TokenFlow
from kvrs_lab.sim.process import IN_ORDER_S, OwnTime, Step, require
from kvrs_lab.sim.streams import SimStream

_NOT_CONNECTED = "refused"
_SILENT = "silent"
# The meaning of a call's error, as in `kvrs/proxy/backends/pd.py`. Every other error is a lost
# connection.
_FAULTS = {
    "HTTP 404": CallFault.REFUSED,
    "HTTP 500": CallFault.WRONG,
    "HTTP 503": CallFault.BUSY,
    "error event": CallFault.WRONG,
    "fenced": CallFault.WRONG,
    "too long": CallFault.WRONG,
    _NOT_CONNECTED: CallFault.NOT_CONNECTED,
    _SILENT: CallFault.SILENT,
}


class AttemptHost(Asker, Protocol):
    """The proxy of an attempt."""

    control: Control[SimStream]
    slots: SlotSender
    fleet: SimFleet
    time: OwnTime
    dropped_tokens: int
    page_size_tokens: int
    first_token: FirstToken

    @property
    def now_s(self) -> float: ...
    def after(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        """Run the step after a delay, unless the proxy has died by then."""

    def engine(self, name: InstanceId) -> SimEngine: ...
    def late_news_s(self) -> float | None:
        """Draw the delay of a second notice that a connection is closed; None: no second notice."""

    def resumed(self, live: SimStream) -> None: ...


class Connection:
    """One call of an attempt. Messages of the engine arrive late, and in order."""

    def __init__(self, attempt: "SimAttempt", engine: SimEngine) -> None:
        self.attempt = attempt
        self.asker: Asker = attempt.host
        self._engine = engine
        self.arrival_s = self._sent_s = 0.0  # Last message to the proxy, to the engine.
        self._joined_at = 0  # First step of the flow.
        self._is_open = True
        self._part: FlowPart | None = None

    def new_flow(self) -> TokenFlow:
        return TokenFlow(self.attempt.host.control.progress.delivered[self._engine.id])

    def join(self, flow: TokenFlow) -> bool:
        attempt = self.attempt
        if not attempt.takes_from(self) or not attempt.live.journal.takes_flows:
            return False
        flow.calls += 1
        flow.latest_s = max(flow.latest_s, self.arrival_s)
        self._part = attempt.live.journal.part = FlowPart(flow, attempt, flow.sent)
        self._joined_at = flow.sent
        return True

    def leave(self) -> None:
        part, self._part = self._part, None
        assert part is not None
        flow = part.flow
        flow.calls -= 1
        part.end = flow.sent
        if flow.sent > self._joined_at:
            self.arrival_s = flow.latest_s

    def prefilled(self, history_tokens: int, cached_tokens: int) -> None:
        name = self._engine.id
        self._later(lambda: self.attempt.prefilled(name, history_tokens, cached_tokens))

    def broke(self, cause: str) -> None:
        self._later(lambda: self.attempt.broke(self._engine.id, cause))

    def close(self) -> None:
        """Close the connection; the engine notices a moment later, or when it wakes."""
        if not self._is_open:
            return
        self._is_open = False
        engine, attempt, host = self._engine, self.attempt, self.attempt.host
        self.send(lambda: engine.abort(attempt.live.id, attempt.number))
        if (late_s := host.late_news_s()) is not None:
            host.after(late_s, lambda: attempt.broke(engine.id, "closed"))

    def send(self, step: Step, refused: Step | None = None) -> None:
        """Send a message to the engine; messages arrive in order."""
        host, engine = self.attempt.host, self._engine
        self._sent_s = max(self._sent_s + IN_ORDER_S, host.arrives_s(engine.id))
        engine.call(self._sent_s - host.now_s, step, refused)

    def _later(self, step: Step) -> None:
        host = self.attempt.host
        host.after(self._arrives_s() - host.now_s, step)

    def _arrives_s(self) -> float:
        """Time when the next message reaches the proxy."""
        return self.in_order_s(self.attempt.host.arrives_s(self._engine.id))

    def in_order_s(self, at_s: float) -> float:
        """Delay an arrival at `at_s` until after the earlier messages; return its time."""
        if at_s <= (next_s := self.arrival_s + IN_ORDER_S):
            at_s = next_s
        self.arrival_s = at_s
        return at_s


class SimAttempt:
    """One attempt. Its late news goes to the policy on purpose: the policy must ignore it."""

    def __init__(self, host: AttemptHost, live: SimStream, plan: act.Plan) -> None:
        self.host = host
        self.live = live
        self.number = (live.journal.owner_epoch, live.journal.attempt)
        self._control = host.control
        self._attempt = Attempt(host.control, live, plan)
        self._connection: Connection | None = None
        self._asking: asyncio.Task[None] | None = None  # Request for a slot.
        self._is_open = True
        self._is_decoding = False
        self._is_expected = False
        self._silence = SilenceTimer(host.now_s)
        # First token of the output.
        prompt_tokens = len(live.arrival.prompt_ids)
        self._first_token = first_token(live.id) + TOKEN_STRIDE * prompt_tokens
        self._max_tokens = live.arrival.max_tokens
        # Progress of the instance of the last call.
        self._delivered = host.control.progress.delivered[plan.decode]

    def begin(self) -> None:
        if (prefill := self._attempt.begin()) is None:
            self._decode(())
        else:
            self._call(prefill, self._loads(), prefill_only=True)

    def expect_token(self) -> None:
        """Report the next token as that with which the attempt resumes."""
        require(self.live.journal.part is None, "instances with ranks have no flows")
        self._is_expected = True

    def takes_from(self, connection: Connection) -> bool:
        """Return whether the tokens of the connection count."""
        return self._is_open and self._is_decoding and self._connection is connection

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.live.journal.close_part()
        if self._asking is not None:
            self._asking.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Calls.

    def _decode(self, handed_over: tuple[PullSource, ...]) -> None:
        attempt, plan = self._attempt, self._attempt.plan
        self._is_decoding = True
        if (asked := attempt.decode()) is None:
            self._call(plan.decode, handed_over if plan.prefill is not None else self._loads())
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

        self._asking = self.host.time.loop.create_task(self._acquire(asked, runs))

    async def _acquire(self, asked: SlotRequest, runs: tuple[PullSource, ...]) -> None:
        try:
            token = await self.host.slots.acquire(asked)
        except SlotDeniedError as denied:
            if (denial := self._attempt.denial(denied.wait_s)) is not None:
                self._control.attempt_over(self.live, denial, self.host.now_s)
        else:
            self._call(self._attempt.plan.decode, runs, slot_token=token)

    def _loads(self) -> tuple[PullSource, ...]:
        """Sources of the pages that the prompt's instance loads from an agent."""
        if (load := self._attempt.plan.load) is None:
            return ()
        pages = range(load.pages)
        handoff = TrafficClass.HANDOFF
        return (PullSource(load.agent, load.generation, pages, handoff, within_s=load.within_s),)

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
        self._delivered = self._control.progress.delivered[name]
        known = self._control.instances.known[name]
        call = SimCall(
            live.id,
            self.number,
            live.history_ids,
            len(live.journal.prompt_ids or ()) or live.true_history_tokens,
            live.arrival.max_tokens,
            prefill_only,
            sources,
            self._attempt.plan.places if known.abilities.checkpoints else (),
            connection,
            slot_token,
            live.arrival.is_poison,
        )
        connection.send(lambda: engine.submit(call), lambda: connection.broke(_NOT_CONNECTED))
        self._silence = SilenceTimer(self.host.now_s)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Fail the attempt when its call has been silent for too long."""
        if not self._is_open or self._connection is not connection:
            return
        attempt, silence, now_s = self._attempt, self._silence, self.host.now_s
        if (last_s := self.live.journal.last_token_s) is not None and last_s > silence.heard_s:
            silence.heard_s = last_s
        limit_s = attempt.limit_s(silence.heard_s, now_s)
        next_s = silence.look(now_s, limit_s, lambda: attempt.is_excused(now_s))
        if next_s is not None:
            self.host.after(next_s - now_s, self._watch, connection)
            return
        attempt.fell_silent(now_s)
        self.host.fleet.suspect(attempt.failed_at)
        self._fail(_SILENT)

    # Replies.

    def prefilled(self, name: InstanceId, history_tokens: int, cached_tokens: int) -> None:
        attempt, live, now_s = self._attempt, self.live, self.host.now_s
        if not self._is_open or self._connection is None or attempt.has_resumed:
            self._late(ev.PrefillDone(live.id, attempt.number, history_tokens))
            return
        self._know_prompt()
        has_own_prefill = attempt.plan.prefill is not None
        if not attempt.prefilled(now_s, cached_tokens) or not self._is_open:
            return
        if (
            has_own_prefill
            and not live.output
            and self.host.first_token is FirstToken.PREFILL
            and self._first_token_came(name)
        ):
            return
        self._connection = None
        pages = range(history_tokens // self.host.page_size_tokens)
        handed_over = (PullSource(name, None, pages, TrafficClass.HANDOFF, live.id),)
        self._decode(handed_over if has_own_prefill else ())

    def _first_token_came(self, name: InstanceId) -> bool:
        """Take the first token from the prefill instance; return whether the output is complete."""
        live, now_s = self.live, self.host.now_s
        live.journal.append(token_at(live.id, len(live.arrival.prompt_ids)), now_s)
        self._delivered.last_s = now_s
        if live.journal.finished and not live.outcome:
            self._control.end(live, Complete(), now_s)
        return live.journal.finished

    def token(self, position: int, token: int, is_last: bool, now_s: float) -> None:
        """Append a token; positions come once, in order, and only from the current attempt."""
        live = self.live
        if not self._is_open or not self._is_decoding:
            self.host.dropped_tokens += 1
            late = ev.StreamEnded if is_last else ev.StreamResumed
            self._late(late(live.id, self._attempt.number))
            return
        journal = live.journal
        # Messages are formatted only for errors: every token passes here.
        if position != (have := len(journal.output_ids)):
            require(False, f"{live.id}: token {position} comes after {have} others")
        if token != (self._first_token + TOKEN_STRIDE * position) % VOCABULARY:
            require(False, f"{live.id}: token {position} is another one")
        journal.append(token, now_s)
        self._silence.heard_s = now_s
        if not self._attempt.has_resumed or self._is_expected:
            self._is_expected = False
            self._know_prompt()
            self._attempt.resumed(now_s)
            self.host.resumed(live)
        self._delivered.last_s = now_s
        if is_last != (position + 1 >= self._max_tokens):
            require(False, f"{live.id} ends after {len(live.output)} tokens")
        if is_last and not live.outcome:
            self._control.end(live, Complete(), now_s)

    def token_of_flow(self, now_s: float) -> None:
        position = len(self.live.journal.output_ids)
        token = (self._first_token + TOKEN_STRIDE * position) % VOCABULARY
        self.token(position, token, False, now_s)

    def broke(self, name: InstanceId, cause: str) -> None:
        if self._is_open:
            self._fail(cause)
            return
        live = self.live
        self._late(
            ev.AttemptFailed(
                live.id, self._attempt.number, name, cause, len(live.journal.output_ids)
            )
        )

    def _late(self, event: ev.Event) -> None:
        """Report an event that a real proxy leaves out, if a later attempt has begun."""
        if self._attempt.number < self.live.journal.attempt and not self.live.outcome:
            self._control.tell(event, self.host.now_s)

    def _know_prompt(self) -> None:
        """Set the prompt's ids, which the answer to a text prompt contains."""
        journal = self.live.journal
        if journal.prompt_ids is None:
            journal.prompt_ids = journal.arrival.prompt_ids

    def _fail(self, cause: str) -> None:
        """Report the failure a moment later, when the loss of the whole instance may be known."""
        self.close()
        fault = _FAULTS.get(cause, CallFault.LOST)

        def report() -> None:
            if (failed := self._attempt.failure(fault, cause)) is not None:
                self._control.attempt_over(self.live, failed, self.host.now_s)

        self.host.after(fault.delay_s(), report)
