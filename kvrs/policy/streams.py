"""What the policy remembers of one stream. Tokens are never part of it."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Plan
from kvrs.policy.cluster_view import Link, Member
from kvrs.policy.costs import Option


class Stage(StrEnum):
    WAITING = "waiting"  # No attempt runs: for an instance to come up, or for a pause before the same one is tried again.
    QUEUED = "queued"  # No attempt runs: for a slot at the chosen target.
    PREFILL = "prefill"  # The attempt's prefill call runs.
    DECODE = "decode"  # The attempt's decode call runs: fetching, computing or producing.


@dataclass(frozen=True, slots=True)
class Holder:
    """An instance that retains the first `pages` full pages of the stream's history."""

    member: Member
    pages: int


@dataclass(slots=True, eq=False)
class Stream:
    id: StreamId
    number: int  # Order of arrival.
    prompt_tokens: int
    waiting_since_s: float
    stage: Stage = Stage.WAITING
    attempt: int = 0
    produced_tokens: int = 0  # As told at the last failure.
    prefilled: bool = False  # Prefill has answered once: the prompt's length is known, its KV was made.
    holders: dict[InstanceId, Holder] = field(default_factory=dict)

    # The attempt under way, and what it takes up in the books.
    plan: Plan | None = None
    option: Option = Option.START
    resumed: bool = False  # It has brought a token to the client.
    runs_on: Member | None = None
    decodes_on: Member | None = None
    booked_on: Member | None = None
    booked_s: float = 0.0
    link: Link | None = None
    link_bytes: int = 0

    # The recovery under way, from the first failure until a token reaches the client again.
    failed_at_s: float | None = None
    cause: str = ""
    failed: InstanceId | None = None
    failures: int = 0
    retry_at_s: float = 0.0  # Not before this is an instance tried again that has just failed this stream.
    removed: set[Option] = field(default_factory=set)
    barred: dict[InstanceId, int] = field(default_factory=dict)  # Epochs that failed this stream.

    @property
    def is_fresh(self) -> bool:
        """Nothing was produced and no KV was made: starting is all that can be done."""
        return not self.prefilled and self.produced_tokens == 0

    def bars(self, member: Member) -> bool:
        return self.barred.get(member.instance.id) == member.instance.epoch
