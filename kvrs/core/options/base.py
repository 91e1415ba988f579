"""The common part of the recovery options: one stream at one target, and its sources of KV.

Each option has its own file: its estimate (predicted seconds), its plan (how an attempt carries it
out) and its terms (how `kvrs lab explain` shows the estimate). Costs follow DESIGN section 5, which
generalises `MIGRATE_COST` and `RECOMPUTE_COST` of seed KVRS: each is a sum of queue, hand-shake,
bytes / bandwidth and prefill time. An estimate takes O(1) time in the length of the history.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvrs.config.policy import LOOKAHEAD_TOKENS
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.state import State
from kvrs.ids import InstanceId

# The largest number of sources per target: it bounds the time of one decision.
SOURCES_MAX = 3


class KvSource(msgspec.Struct, frozen=True, gc=False):
    """An instance or agent from which a target can fetch leading pages of a history."""

    id: InstanceId
    pages: int  # Number of pages worth fetching.
    page_s: float  # Transfer time of one page.
    drain_s: float  # Time until the transfers already on the link have ended.
    is_agent: bool


class Case(msgspec.Struct, gc=False):
    """One stream at one target, with the values that several options need.

    A msgspec struct takes a fraction of the time of a dataclass to create.
    """

    state: State
    stream: Stream
    target: Member
    history_tokens: int
    history_s: float  # Time in which the target would compute the whole history.
    extrapolated: bool  # `history_s` is outside the measured range of the prefill table.
    wanted_pages: int  # Pages worth fetching; 0 if no KV of the history is left anywhere.
    held_pages: int  # The part of `wanted_pages` that the target has itself.
    sources: Sequence[KvSource]
    slot_wait_s: float  # Expected time until the target has a slot for a fetch.
    # Rest of the target's running decode step, and what the step of the next token takes longer
    # than computing alone; the same for a token that comes without computing at the target.
    step_s: float = 0.0
    hand_off_step_s: float = 0.0
    # Streams at the target that have no token since they came. 0 where nothing waits for the
    # target's computing: hand-offs bring what others compute, and where rows are loaded, streams go
    # on between the chunks of later prompts.
    waiting: int = 0
    best_fetch: Estimate | None = None  # The cheapest estimate of migrate and restore so far.
    best_source: KvSource | None = None  # The first source of `best_fetch`.

    def pages_of(self, source: InstanceId | None) -> int:
        """Return the number of wanted pages at this source (None: at the target)."""
        if source is None:
            return self.held_pages
        return next(each.pages for each in self.sources if each.id == source)


class Term(msgspec.Struct, frozen=True):
    """One summand of an estimate, as `kvrs lab explain` shows it."""

    name: str
    seconds: float
    how: str


class RecoveryOption(msgspec.Struct, frozen=True):
    """One way to recover a stream."""

    option: Option
    # Appends the estimates of the option in this case, zero or more.
    estimate: Callable[[Case, list[Estimate]], None]
    plan: Callable[[State, Stream, Estimate], act.Plan]  # Makes the plan of a fresh estimate.
    # Yields the summands of an estimate's `next_token_s`.
    terms: Callable[[Case, Estimate], Iterable[Term]]
    # A plan whose estimate names a source fetches pages, and so takes a transfer slot.
    fetches: bool = True
    # The condition for estimating the option; None: always.
    needs: Callable[[Case], object] | None = None


def usable_pages(stream: Stream, target: Member) -> int:
    """Return the number of pages worth fetching: the last position of a history is always
    computed, for its logits.
    """
    return (stream.prompt_tokens + stream.produced_tokens - 1) // target.abilities.page_size_tokens


def lookahead_s(stream: Stream, target: Member) -> float:
    """Return the extra time of the next tokens at a target that has lost ranks, compared with the
    same target with all its ranks.
    """
    tokens = LOOKAHEAD_TOKENS
    if stream.most_tokens is not None:
        tokens = min(tokens, max(0, stream.most_tokens - stream.history_tokens))
    return tokens * target.times.slower_token_s


def step_term(estimate: Estimate) -> Iterable[Term]:
    if estimate.step_s:
        how = f"the rest of the running step of the {estimate.target}, and the step of the token"
        yield Term("step", estimate.step_s, how)


def handshake_term(case: Case) -> Term:
    return Term("handshake", HANDSHAKE_S, "connect, authenticate, ask")


def transfer(case: Case, source: InstanceId, pages: int) -> tuple[float, str]:
    """Return the transfer time of the pages, and its calculation as text."""
    page_s = next(each.page_s for each in case.sources if each.id == source)
    page_bytes = case.target.abilities.page_bytes
    what = f"{pages:,} pages of the {source}"
    return pages * page_s, division(what, pages * page_bytes, page_bytes / page_s)


def hand_off_terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    """Yield the terms of handing off the whole history from the estimate's source to the target."""
    assert estimate.source is not None, estimate
    view, target = case.state.view, case.target
    source = view.members[estimate.source]
    where = "within the node" if source.node == target.node else "between the nodes"
    size_bytes = source.info.geometry.sent_bytes(case.history_tokens)
    how = division(f"hand-off {where}", size_bytes, view.bytes_per_s(source.node, target.node))
    yield handshake_term(case)
    yield Term("hand-off", estimate.transfer_s - HANDSHAKE_S, how)
    yield from step_term(estimate)


def tail(case: Case, prefix_pages: int) -> str:
    prefix = prefix_pages * case.target.abilities.page_size_tokens
    return f"{case.history_tokens - prefix:,} tokens behind {prefix:,}"


def division(what: str, size_bytes: int, bytes_per_s: float) -> str:
    return f"{what}: {size_bytes / 1e6:,.1f} MB / {bytes_per_s / 1e9:,.3g} GB/s"
