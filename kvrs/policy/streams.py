"""What the policy remembers of one stream. Tokens are never part of it."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Plan
from kvrs.policy.cluster_view import Agent, Link, Member
from kvrs.policy.costs import Estimate, Option
from kvrs.policy.events import Deadlines
from kvrs.protocol.geometry import KvGeometry


class Stage(StrEnum):
    WAITING = "waiting"  # No attempt runs: for an instance to come up, or for a pause before the same one is tried again.
    QUEUED = "queued"  # No attempt runs: for a slot at the chosen target.
    PREFILL = "prefill"  # The attempt's prefill call runs.
    DECODE = "decode"  # The attempt's decode call runs: fetching, computing or producing.


@dataclass(frozen=True, slots=True)
class Holder:
    """An instance that retains the first `pages` full pages of the stream's history, or has them in its prefix cache."""

    member: Member
    pages: int


@dataclass(slots=True)
class Checkpoint:
    """An agent that has the first `pages` full pages of the stream's history, as far as it has said, or is to get them."""

    agent: Agent
    geometry: KvGeometry
    booked_bytes: int = 0  # 0: nothing is sent there any more, but what it has may still be fetched.
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a stream that has no attempt does next, and what was weighed for it."""

    chosen: Estimate
    estimates: tuple[Estimate, ...]
    plan: Plan | None  # None: give up, no option meets the budget.


@dataclass(slots=True, eq=False)
class Stream:
    id: StreamId
    number: int  # Order of arrival.
    prompt_tokens: int
    waiting_since_s: float
    most_tokens: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    arrived_s: float = 0.0
    stage: Stage = Stage.WAITING
    attempt: int = 0
    excused: int = 0  # Attempts that failed nowhere: others had the slots, or what they ran on was left in time.
    produced_tokens: int = 0  # As told at the last failure.
    prefilled: bool = False  # Prefill has answered once: the prompt's length is known, its KV was made.
    adopted: bool = False  # Another proxy had it: already its first attempt here is a recovery.
    flowed: bool = False  # The client has had a token.
    holders: dict[InstanceId, Holder] = field(default_factory=dict)
    checkpoints: dict[InstanceId, Checkpoint] = field(default_factory=dict)
    unprotected: str = ""  # Why nobody keeps a checkpoint of it.

    # The attempt under way, and what it takes up in the books.
    plan: Plan | None = None
    option: Option = Option.START
    resumed: bool = False  # It has brought a token to the client.
    runs_on: Member | None = None
    decodes_on: Member | None = None
    booked_on: Member | None = None
    booked_s: float = 0.0
    links: list[tuple[Link, int]] = field(default_factory=list)  # With the bytes that it has put on each.

    # The recovery under way, from the first failure until a token reaches the client again.
    failed_at_s: float | None = None
    cause: str = ""
    failed: InstanceId | None = None
    blames: InstanceId | None = None  # Whose attempt broke, until it is decided what comes next.
    failures: int = 0
    retry_at_s: float = 0.0  # Not before this is an instance tried again that has just failed this stream.
    removed: set[Option] = field(default_factory=set)
    slot_expired: bool = False  # What the attempt before fetches may still be under way.
    barred: dict[InstanceId, int] = field(default_factory=dict)  # Epochs that failed this stream.
    decision: Decision | None = None  # That led to the attempt, until it is known what came of it.
    decided_s: float = 0.0

    @property
    def is_fresh(self) -> bool:
        """Nothing was produced and no KV was made: starting is all that can be done."""
        return not self.prefilled and self.produced_tokens == 0

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + self.produced_tokens

    def bars(self, member: Member) -> bool:
        return self.barred.get(member.instance.id) == member.instance.epoch
