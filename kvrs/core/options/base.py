"""The common part of the recovery options: the case that is weighed, and its sources of KV.

One file beside this one per option: its estimate (predicted seconds), its plan (how an attempt
carries it out) and its terms (how `kvrs lab explain` shows the estimate). Costs follow DESIGN
section 5, which generalises `MIGRATE_COST` and `RECOMPUTE_COST` of seed KVRS: each is a sum of
queue, hand-shake, bytes / bandwidth and prefill time. Every option takes a fixed number of
operations, whatever the length of the history.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvrs.config.policy import LOOKAHEAD_TOKENS, PolicySettings
from kvrs.core.books.waiting import SlotBook
from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.ids import InstanceId

# How many sources are looked at per target: a bound on the time of one decision.
SOURCES_MAX = 3


class KvSource(msgspec.Struct, frozen=True, gc=False):
    """An instance or agent that has leading pages of a history, as seen from a target."""

    id: InstanceId
    pages: int  # How many of them are worth fetching.
    page_s: float  # What one takes on the link.
    drain_s: float  # Until what is on the link already has arrived.
    is_agent: bool


class Books(msgspec.Struct, frozen=True):
    """The policy's records that estimates are made from."""

    view: ClusterView
    slots: SlotBook
    settings: PolicySettings
    # Learned factors of predictions. Nearly always empty, which is tested first, because to hash an
    # enum's member is a call.
    factors: Mapping[Option, float] = msgspec.field(default_factory=dict)


class Case(msgspec.Struct, gc=False):
    """One stream at one target, with everything that more than one option needs.

    A struct, because one is made in a fraction of the time that a dataclass takes.
    """

    books: Books
    stream: Stream
    target: Member
    history_tokens: int
    history_s: float  # What the target would take to compute the whole history.
    extrapolated: bool  # That is outside what was measured.
    # Worth fetching if there is room for them; 0 also where no KV of the history is left.
    wanted_pages: int
    held_pages: int  # Of these, what the target has itself.
    sources: Sequence[KvSource]
    slot_wait_s: float  # Expected until the target has a slot for a fetch.
    best_fetch: Estimate | None = None  # Of migrate and restore, as far as they have been weighed,
    best_source: KvSource | None = None  # and where it begins to fetch.

    def factor(self, option: Option) -> float:
        """Factor by which a prediction for this option is multiplied."""
        factors = self.books.factors
        return factors.get(option, 1.0) if factors else 1.0

    def pages_of(self, source: InstanceId | None) -> int:
        """Leading pages of the history that this source (None: the target) has and are wanted."""
        if source is None:
            return self.held_pages
        return next(each.pages for each in self.sources if each.id == source)


class Term(msgspec.Struct, frozen=True):
    """One summand of an estimate, for people."""

    name: str
    seconds: float
    how: str


class RecoveryOption(msgspec.Struct, frozen=True):
    """One way to bring a stream back."""

    option: Option
    estimate: Callable[[Case, list[Estimate]], None]  # Appends as many estimates as there are ways.
    plan: Callable[[Books, Stream, Estimate], act.Plan]  # Of an estimate that was just made.
    terms: Callable[[Case, Estimate], Iterable[Term]]  # Their sum is `raw_s`.
    # Its plan fetches pages, if an estimate names a source; such a transfer takes a slot.
    fetches: bool = True
    # It is weighed only for a case for which this is true; None: for all.
    needs: Callable[[Case], object] | None = None


def usable_pages(stream: Stream, target: Member) -> int:
    """Pages worth fetching: the last position of a history is always computed, because its logits
    are what is needed.
    """
    return (stream.prompt_tokens + stream.produced_tokens - 1) // target.page_size_tokens


def lookahead_s(stream: Stream, target: Member) -> float:
    """Extra time that the next tokens of the stream take there, compared with all its ranks."""
    tokens = LOOKAHEAD_TOKENS
    if stream.most_tokens is not None:
        tokens = min(tokens, max(0, stream.most_tokens - stream.history_tokens))
    return tokens * target.slower_token_s


# Terms.


def handshake_term(case: Case) -> Term:
    return Term("handshake", HANDSHAKE_S, "connect, authenticate, ask")


def transfer(case: Case, source: InstanceId, pages: int) -> tuple[float, str]:
    """Seconds on the link, and how they come about."""
    page_s = next(each.page_s for each in case.sources if each.id == source)
    page_bytes = case.target.page_bytes
    what = f"{pages:,} pages of the {source}"
    return pages * page_s, division(what, pages * page_bytes, page_bytes / page_s)


def hand_off_terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    """The whole history, from the estimate's source to the target."""
    assert estimate.source is not None, estimate
    view, target = case.books.view, case.target
    source = view.members[estimate.source]
    where = "within the node" if source.node == target.node else "between the nodes"
    size_bytes = case.history_tokens * source.bytes_per_token
    how = division(f"hand-off {where}", size_bytes, view.bytes_per_s(source.node, target.node))
    yield handshake_term(case)
    yield Term("hand-off", estimate.transfer_s - HANDSHAKE_S, how)


def tail(case: Case, prefix_pages: int) -> str:
    prefix = prefix_pages * case.target.page_size_tokens
    return f"{case.history_tokens - prefix:,} tokens behind {prefix:,}"


def division(what: str, size_bytes: int, bytes_per_s: float) -> str:
    return f"{what}: {size_bytes / 1e6:,.1f} MB / {bytes_per_s / 1e9:,.3g} GB/s"
