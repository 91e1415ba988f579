"""What a simulated proxy keeps of each stream, and the connections on which its attempts are answered."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Plan
from kvrs.policy.costs import Option
from kvrs.protocol.instance import SlotAsked
from kvrs.sim.engine import SimEngine
from kvrs.sim.process import Step

if TYPE_CHECKING:
    from kvrs.sim.proxy import SimProxy


class At(StrEnum):
    """Where a stream is; the words are those of `kvrs.replay.faults.phase_of`."""

    NOWHERE = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a client asks, and when."""

    at_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int
    is_text: bool = False  # The proxy has its ids only when prefill has answered.


@dataclass(slots=True, eq=False)
class Live:
    """One stream. `output` is the journal, so it is the truth."""

    id: StreamId
    asked: Arrival
    arrived_s: float
    knows_prompt: bool
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    plan: Plan | None = None
    at: At = At.NOWHERE
    runs_on: InstanceId | None = None
    line: "Line | None" = None
    broken: bool = True  # Its attempt is over for whatever reason, or there was none.
    resumed: bool = False  # The attempt has brought a token.
    fetching_since_s: float | None = None  # The attempt holds a slot.
    slot: SlotAsked | None = None  # What the target's agent may have granted for it.
    slot_token: int = 0
    outcome: str = ""
    heard_s: float = 0.0
    usual_s: float | None = None  # Between two tokens of an attempt, on average.
    prefilled_at: InstanceId | None = None  # Who keeps its prompt's pages under a lease.
    leased: dict[InstanceId, None] = field(default_factory=dict)
    copies: dict[InstanceId, int] = field(default_factory=dict)  # Pages that each of its agents has, as last reported.
    failed_at_s: float | None = None  # Since when the client has been waiting for another attempt.
    option: Option = Option.START
    recoveries: int = 0

    @property
    def history_ids(self) -> list[int]:
        return [*self.asked.prompt_ids, *self.output]

    @property
    def history_tokens(self) -> int:
        return len(self.asked.prompt_ids) + len(self.output)

    @property
    def recovers(self) -> bool:
        return self.failed_at_s is not None


class Line:
    """The connection of one attempt's call. What the engine says on it arrives later, and in order."""

    def __init__(self, proxy: "SimProxy", live: Live, engine: SimEngine, delay_s: float) -> None:
        self._proxy = proxy
        self._live = live
        self._engine = engine
        self._attempt = live.attempt
        self._delay_s = delay_s
        self._is_open = True

    def prefilled(self, history_tokens: int) -> None:
        self._later(lambda: self._proxy.prefilled(self._live, self._attempt, self._engine.id, history_tokens))

    def token(self, position: int, token: int, *, is_last: bool) -> None:
        # Also when the proxy has closed it: the engine does not know yet, and what it sends must not count.
        step = self._proxy.token
        self._later(lambda: step(self._live, self._attempt, self._engine.id, position, token, is_last=is_last))

    def broke(self, cause: str) -> None:
        self._later(lambda: self._proxy.broke(self._live, self._attempt, self._engine.id, cause))

    def close(self) -> None:
        """The engine hears of it a moment later, or when it wakes."""
        if self._is_open:
            self._is_open = False
            engine, live, attempt, proxy = self._engine, self._live, self._attempt, self._proxy
            engine.call(self._delay_s, lambda: engine.abort(live.id, attempt))
            if (late_s := proxy.late_news_s()) is not None:
                proxy.clock.after(late_s, lambda: proxy.broke(live, attempt, engine.id, "closed"))

    def _later(self, step: Step) -> None:
        self._proxy.clock.after(self._delay_s, step)
