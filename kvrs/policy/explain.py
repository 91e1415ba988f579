"""One decision, taken apart: every option, the terms of its sum, and where the answer would change.

The costs come from the very objects that decide in a proxy (`Options.weigh`, `decide`), set up for one victim: its decode
instance on another node is lost, `holder` on node n0 still retains its prompt, and `target` on node n1 can take it over
with the prefill instance beside it. Only the words are made here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.cluster_view import ClusterView
from kvrs.policy.config import PolicyName, PolicySettings
from kvrs.policy.costs import Estimate, Instance, Option, decide
from kvrs.policy.options import Options, usable_pages
from kvrs.policy.slots import SlotBook
from kvrs.policy.streams import Holder, Stream
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, Role

_N0, _N1 = NodeId("n0"), NodeId("n1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be decided. All lengths at least what a real decision has: one prompt token, a rate above zero."""

    geometry: KvGeometry
    prefill: PrefillTable
    settings: PolicySettings
    prompt_tokens: int
    output_tokens: int  # Sent to the client already; their KV died with the decode instance.
    held_tokens: int  # Leading tokens of the prompt whose KV the holder retains.
    bytes_per_s: float  # From the holder's node to the target's.
    local_bytes_per_s: float  # Within the target's node, for the hand-off after recomputing.
    service_s: float  # What one request ahead in a queue takes.
    queue_s: float = 0.0  # Before the prefill instance beside the target.
    target_queue_s: float = 0.0  # Before the target itself.
    budget_s: float | None = None  # No option may take longer.


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class Weighed:
    """One option; its terms add up to `total_s`."""

    option: Option
    total_s: float
    terms: tuple[Term, ...]
    extrapolated: bool  # A table was asked outside its measured range.


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where the cheaper side changes, everything else as asked. None: nowhere."""

    # Above this bandwidth migrating is cheaper than recomputing.
    bytes_per_s: float | None
    # From this many requests ahead of the recomputation on, migrating is cheaper; 0: it is with an empty queue.
    queue_depth: float | None
    # The seed's, for a hand-off: with more requests than this in the own queue, moving the KV to an idle node is sooner.
    hand_off_queue_depth: float


@dataclass(frozen=True, slots=True)
class Explanation:
    policy: PolicyName
    chosen: Option
    options: tuple[Weighed, ...]
    by_policy: dict[PolicyName, Option]  # What each policy would have answered.
    crossover: Crossover
    kv_bytes_per_token: int
    kv_bytes: int  # Of the prompt.
    fetched_bytes: int  # Of the pages that migrating would move.


def explain(question: Question) -> Explanation:
    """The decision on this question, and why."""
    estimates, pages = _weigh(question)
    return Explanation(
        policy=question.settings.name,
        chosen=_choose(question, estimates).option,
        options=tuple(_taken_apart(question, estimate, pages) for estimate in estimates),
        by_policy={name: _choose(asked, _weigh(asked)[0]).option for name, asked in _by_policy(question)},
        crossover=_crossover(question),
        kv_bytes_per_token=question.geometry.bytes_per_token,
        kv_bytes=question.prompt_tokens * question.geometry.bytes_per_token,
        fetched_bytes=pages * question.geometry.page_bytes,
    )


def _weigh(question: Question) -> tuple[list[Estimate], int]:
    """The policy's own estimates, and how many pages it would fetch."""
    settings = question.settings
    view = ClusterView(question.local_bytes_per_s)
    holder = view.add(_instance(question, "holder", _N0, Role.PREFILL))
    prefill = view.add(_instance(question, "prefill", _N1, Role.PREFILL))
    target = view.add(_instance(question, "target", _N1, Role.DECODE))
    prefill.reported_queue_s, target.reported_queue_s = question.queue_s, question.target_queue_s
    view.link(_N0, _N1).bytes_per_s = question.bytes_per_s
    stream = Stream(StreamId("victim"), 0, question.prompt_tokens, 0.0, produced_tokens=question.output_tokens, prefilled=True)
    held = Holder(holder, question.held_tokens // question.geometry.page_size_tokens)
    stream.holders[holder.instance.id] = held
    estimates = Options(view, SlotBook(settings.slots_max), settings).weigh(stream, [target], 0.0)
    return estimates, usable_pages(stream, held)


def _instance(question: Question, name: str, node: NodeId, role: Role) -> Instance:
    return Instance(InstanceId(name), node, role, 1, question.geometry, question.prefill, frozenset(Capability))


def _choose(question: Question, estimates: list[Estimate]) -> Estimate:
    return decide(question.settings.name, estimates, question.budget_s)


def _by_policy(question: Question) -> Iterator[tuple[PolicyName, Question]]:
    for name in PolicyName:
        yield name, replace(question, settings=question.settings.model_copy(update={"name": name}))


def _taken_apart(question: Question, estimate: Estimate, pages: int) -> Weighed:
    if question.settings.name is PolicyName.ROM:
        terms = _rom_terms(question, estimate)
    elif estimate.option is Option.MIGRATE:
        terms = _migrate_terms(question, estimate, pages)
    else:
        terms = _recompute_terms(question, estimate)
    return Weighed(estimate.option, estimate.total_s, tuple(terms), estimate.extrapolated)


def _rom_terms(question: Question, estimate: Estimate) -> Iterator[Term]:
    tokens = question.prompt_tokens
    if estimate.option is Option.MIGRATE:
        size = tokens * question.geometry.bytes_per_token
        yield Term("transfer", estimate.transfer_s, _division(f"{tokens:,} tokens", size, question.bytes_per_s))
    else:
        yield Term("prefill", estimate.compute_s, f"{tokens:,} tokens")


def _migrate_terms(question: Question, estimate: Estimate, pages: int) -> Iterator[Term]:
    handshake_s = question.settings.handshake_s
    prefix = pages * question.geometry.page_size_tokens
    tail = question.prompt_tokens + question.output_tokens - prefix
    yield Term("queue", estimate.queue_s, "before the target")
    yield Term("handshake", handshake_s, "connect, authenticate, ask")
    size = pages * question.geometry.page_bytes
    yield Term("transfer", estimate.transfer_s - handshake_s, _division(f"{pages:,} pages", size, question.bytes_per_s))
    yield Term("prefill", estimate.compute_s, f"{tail:,} tokens behind {prefix:,}")


def _recompute_terms(question: Question, estimate: Estimate) -> Iterator[Term]:
    handshake_s = question.settings.handshake_s
    tokens = question.prompt_tokens + question.output_tokens
    yield Term("queue", estimate.queue_s, "before the prefill instance beside the target")
    yield Term("prefill", estimate.compute_s, f"{tokens:,} tokens")
    yield Term("handshake", handshake_s, "connect, authenticate, ask")
    size = tokens * question.geometry.bytes_per_token
    how = _division("hand-off within the node", size, question.local_bytes_per_s)
    yield Term("hand-off", estimate.transfer_s - handshake_s, how)


def _division(what: str, size_bytes: int, bytes_per_s: float) -> str:
    return f"{what}: {size_bytes / 1e6:,.1f} MB / {bytes_per_s / 1e9:,.3g} GB/s"


def _crossover(question: Question) -> Crossover:
    hand_off_s = question.prompt_tokens * question.geometry.bytes_per_token / question.bytes_per_s
    return Crossover(
        bytes_per_s=_crossover_bytes_per_s(question),
        queue_depth=_crossover_queue_depth(question),
        hand_off_queue_depth=hand_off_s / question.service_s,
    )


def _crossover_bytes_per_s(question: Question) -> float | None:
    """Migrating costs `fixed + bytes / bandwidth`: both are asked of the cost functions themselves, at two bandwidths."""
    fixed_s = _total_s(replace(question, bytes_per_s=inf), Option.MIGRATE)
    at_1_byte_per_s = _total_s(replace(question, bytes_per_s=1.0), Option.MIGRATE)
    recompute_s = _total_s(question, Option.RECOMPUTE)
    if fixed_s is None or at_1_byte_per_s is None or recompute_s is None or recompute_s <= fixed_s:
        return None
    bytes_per_s = (at_1_byte_per_s - fixed_s) / (recompute_s - fixed_s)
    return bytes_per_s if isfinite(bytes_per_s) else None


def _crossover_queue_depth(question: Question) -> float | None:
    if question.settings.name is PolicyName.ROM:
        return None  # The seed's rule weighs no queue.
    migrate_s = _total_s(question, Option.MIGRATE)
    recompute_s = _total_s(replace(question, queue_s=0.0), Option.RECOMPUTE)
    if migrate_s is None or recompute_s is None:
        return None
    return max(0.0, (migrate_s - recompute_s) / question.service_s)


def _total_s(question: Question, option: Option) -> float | None:
    return next((estimate.total_s for estimate in _weigh(question)[0] if estimate.option is option), None)
