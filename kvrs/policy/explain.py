"""One decision, taken apart: every option, the terms of its sum, and where the answer would change.

The costs come from the very objects that decide in a proxy (`Options.weigh`, `decide`), set up for one victim: its decode
instance on another node is lost, `holder` on node n0 still retains its prompt (or, of engines that fetch no pages, has it in
its prefix cache), and `target` on node n1 can take it over with the prefill instance beside it. An agent, on the target's
node or on a third one, may have a checkpoint, and the target itself the front of the history. Only the words are made here.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf, isfinite

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.cluster_view import Agent, ClusterView, Member
from kvrs.policy.config import Handoff, PolicyName, PolicySettings
from kvrs.policy.costs import Estimate, Instance, Option, decide
from kvrs.policy.handoff import Candidate, choose, hand_off_s
from kvrs.policy.options import Options
from kvrs.policy.slots import SlotBook
from kvrs.policy.streams import Checkpoint, Holder, Stream
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, Role

_N0, _N1, _N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
_HOLDER, _AGENT = InstanceId("holder"), InstanceId("agent")


class CheckpointAt(StrEnum):
    """Whose agent has the checkpoint."""

    TARGET = "target"  # The target's node's: it comes from host memory.
    OTHER = "other"  # A third node's: it comes over a link like the holder's.


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
    checkpoint_tokens: int = 0  # Leading tokens of the history of which an agent has a checkpoint.
    checkpoint_at: CheckpointAt = CheckpointAt.TARGET
    host_to_device_bytes_per_s: float = 26e9  # From an agent's memory into an instance on its node.
    reused_tokens: int = 0  # Leading tokens of the history whose KV the target has.
    own_queue_s: float = 0.0  # Before the decode instance beside the holder, at the end of prefill: for the hand-off alone.
    prefix_cache: bool = False  # The target fetches no pages: the holder computes behind what it has cached, and hands off.
    corrections: Mapping[Option, float] = field(default_factory=dict)  # What predictions have been learned to be multiplied by.

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def wanted_pages(self) -> int:
        """Worth fetching: the last position of a history is always computed."""
        return (self.history_tokens - 1) // self.geometry.page_size_tokens

    def pages_of(self, source: InstanceId | None) -> int:
        """How many leading pages of the history this one has; None: the target."""
        tokens = {_HOLDER: self.held_tokens, _AGENT: self.checkpoint_tokens, None: self.reused_tokens}[source]
        return min(tokens // self.geometry.page_size_tokens, self.wanted_pages)

    def rate_from(self, source: InstanceId) -> float:
        """Bytes per second."""
        local = source == _AGENT and self.checkpoint_at is CheckpointAt.TARGET
        return self.host_to_device_bytes_per_s if local else self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class Weighed:
    """One option; its terms add up to `total_s`, of which the last one is the correction."""

    option: Option
    total_s: float
    raw_s: float  # Before the correction.
    terms: tuple[Term, ...]
    extrapolated: bool  # A table was asked outside its measured range.
    first_page: int  # What is fetched begins here; in a split, what is before it is computed meanwhile.


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where the cheaper of migrating and recomputing changes, everything else as asked, without checkpoint and reuse.

    None: nowhere.
    """

    # Above this bandwidth migrating is cheaper than recomputing.
    bytes_per_s: float | None
    # From this many requests ahead of the prefill instance on, migrating is cheaper; 0: it is with an empty queue.
    queue_depth: float | None
    # The seed's, for a hand-off: with more requests than this in the own queue, moving the KV to an idle node is sooner.
    hand_off_queue_depth: float


@dataclass(frozen=True, slots=True)
class WeighedHandoff:
    """Where the prompt's KV goes once prefill is done: to the decode instance beside it, or to the target on the other node."""

    how: Handoff
    own_s: float
    remote_s: float
    is_own: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    policy: PolicyName
    chosen: Option
    options: tuple[Weighed, ...]
    by_policy: dict[PolicyName, Option]  # What each policy would have answered.
    crossover: Crossover
    hand_offs: tuple[WeighedHandoff, ...]
    kv_bytes_per_token: int
    kv_bytes: int  # Of the prompt.
    fetched_bytes: int  # That migrating would move.


def explain(question: Question) -> Explanation:
    """The decision on this question, and why."""
    estimates = _weigh(question)
    return Explanation(
        policy=question.settings.name,
        chosen=_choose(question, estimates).option,
        options=tuple(_taken_apart(question, estimate) for estimate in estimates),
        by_policy={name: _choose(asked, _weigh(asked)).option for name, asked in _by_policy(question)},
        crossover=_crossover(question),
        hand_offs=tuple(_hand_off(question, how) for how in (Handoff.ROM, Handoff.AUTO)),
        kv_bytes_per_token=question.geometry.bytes_per_token,
        kv_bytes=question.prompt_tokens * question.geometry.bytes_per_token,
        fetched_bytes=_fetched_bytes(question),
    )


def _fetched_bytes(question: Question) -> int:
    if question.prefix_cache:
        return question.history_tokens * question.geometry.bytes_per_token
    return question.pages_of(_HOLDER) * question.geometry.page_bytes


def _weigh(question: Question) -> list[Estimate]:
    """The policy's own estimates."""
    settings = question.settings
    view = ClusterView(question.local_bytes_per_s)
    holder = view.add(_instance(question, _HOLDER, _N0, Role.PREFILL))
    prefill = view.add(_instance(question, InstanceId("prefill"), _N1, Role.PREFILL))
    lacks = {Capability.PULL_PAGES} if question.prefix_cache else set()
    target = view.add(_instance(question, InstanceId("target"), _N1, Role.DECODE, lacks))
    prefill.reported_queue_s, target.reported_queue_s = question.queue_s, question.target_queue_s
    for node in (_N0, _N2):
        view.link(node, _N1).bytes_per_s = question.bytes_per_s
    stream = Stream(StreamId("victim"), 0, question.prompt_tokens, 0.0, produced_tokens=question.output_tokens, prefilled=True)
    _give(question, stream, holder, target, view)
    options = Options(view, SlotBook(settings.slots_max), settings, factors=question.corrections)
    return options.weigh(stream, [target], 0.0)


def _give(question: Question, stream: Stream, holder: Member, target: Member, view: ClusterView) -> None:
    """Put the KV of the history where the question says it is."""
    page_size_tokens = question.geometry.page_size_tokens
    for member, tokens in ((holder, question.held_tokens), (target, question.reused_tokens)):
        if tokens >= page_size_tokens:
            stream.holders[member.instance.id] = Holder(member, tokens // page_size_tokens)
    if question.checkpoint_tokens >= page_size_tokens:
        node = _N1 if question.checkpoint_at is CheckpointAt.TARGET else _N2
        size = question.checkpoint_tokens * question.geometry.bytes_per_token
        agent = Agent(_AGENT, node, 1, size, question.host_to_device_bytes_per_s)
        view.agents[agent.id] = agent
        pages = question.checkpoint_tokens // page_size_tokens
        stream.checkpoints[agent.id] = Checkpoint(agent, question.geometry, size, pages)


def _instance(question: Question, name: InstanceId, node: NodeId, role: Role, lacks: Set[Capability] = frozenset()) -> Instance:
    return Instance(name, node, role, 1, question.geometry, question.prefill, frozenset(Capability) - lacks)


def _choose(question: Question, estimates: list[Estimate]) -> Estimate:
    return decide(question.settings.name, estimates, question.budget_s)


def _by_policy(question: Question) -> Iterator[tuple[PolicyName, Question]]:
    for name in PolicyName:
        yield name, replace(question, settings=question.settings.model_copy(update={"name": name}))


def _taken_apart(question: Question, estimate: Estimate) -> Weighed:
    if question.settings.name is PolicyName.ROM:
        terms = _rom_terms(question, estimate)
    elif estimate.option is Option.RECOMPUTE:
        terms = _recompute_terms(question, estimate)
    elif estimate.option is Option.SPLIT:
        terms = _split_terms(question, estimate)
    elif estimate.by_prefill:
        terms = _cached_terms(question, estimate)
    else:
        terms = _fetch_terms(question, estimate)
    all_terms = [*terms, *_correction_terms(question, estimate)]
    return Weighed(
        estimate.option, estimate.total_s, estimate.raw_s, tuple(all_terms), estimate.extrapolated, estimate.first_page
    )


def _rom_terms(question: Question, estimate: Estimate) -> Iterator[Term]:
    tokens = question.prompt_tokens
    if estimate.option is Option.MIGRATE:
        size = tokens * question.geometry.bytes_per_token
        yield Term("transfer", estimate.transfer_s, _division(f"{tokens:,} tokens", size, question.bytes_per_s))
    else:
        yield Term("prefill", estimate.compute_s, f"{tokens:,} tokens")


def _fetch_terms(question: Question, estimate: Estimate) -> Iterator[Term]:
    yield Term("queue", estimate.queue_s, "before the target")
    has = question.pages_of(estimate.source)
    rest_s = estimate.transfer_s
    if estimate.source is not None:
        transfer_s, how = _transfer(question, estimate.source, has)
        handshake_s = question.settings.handshake_s
        yield Term("handshake", handshake_s, "connect, authenticate, ask")
        yield Term("transfer", transfer_s, how)
        rest_s = max(0.0, rest_s - handshake_s - transfer_s)
    prefix = has
    if estimate.second is not None:
        prefix = question.pages_of(estimate.second)
        _, how = _transfer(question, estimate.second, prefix - has)
        yield Term("extension", rest_s, f"handshake, and {how}")
    yield Term("prefill", estimate.compute_s, _tail(question, prefix))


def _cached_terms(question: Question, estimate: Estimate) -> Iterator[Term]:
    yield Term("queue", estimate.queue_s, f"before the {estimate.source}")
    yield Term("prefill", estimate.compute_s, _tail(question, question.pages_of(estimate.source)) + ", at the holder")
    yield Term("handshake", question.settings.handshake_s, "connect, authenticate, ask")
    size = question.history_tokens * question.geometry.bytes_per_token
    how = _division("hand-off between the nodes", size, question.bytes_per_s)
    yield Term("hand-off", estimate.transfer_s - question.settings.handshake_s, how)


def _split_terms(question: Question, estimate: Estimate) -> Iterator[Term]:
    source, first_page = estimate.source, estimate.first_page
    assert source is not None, estimate
    size_tokens = question.geometry.page_size_tokens
    front_s = question.prefill.seconds_for(first_page * size_tokens)
    tail_s = estimate.compute_s - front_s
    has = question.pages_of(source)
    _, how = _transfer(question, source, has - first_page)
    prefix = has
    if estimate.second is not None:
        prefix = question.pages_of(estimate.second)
        how += f", then {_transfer(question, estimate.second, prefix - has)[1]}"
    yield Term("queue", estimate.queue_s, "before the target")
    meanwhile = (
        f"the longer of handshake and {how}: {estimate.transfer_s:.6f} s, "
        f"and of computing the first {first_page:,} pages meanwhile: {front_s:.6f} s"
    )
    yield Term("fetch and front", max(0.0, estimate.raw_s - estimate.queue_s - tail_s), meanwhile)
    yield Term("prefill", tail_s, _tail(question, prefix))


def _recompute_terms(question: Question, estimate: Estimate) -> Iterator[Term]:
    tokens = f"{question.history_tokens:,} tokens"
    if estimate.source is None:
        yield Term("queue", estimate.queue_s, "before the target, which computes it itself")
        yield Term("prefill", estimate.compute_s, tokens)
        return
    handshake_s = question.settings.handshake_s
    yield Term("queue", estimate.queue_s, "before the prefill instance beside the target")
    yield Term("prefill", estimate.compute_s, tokens)
    yield Term("handshake", handshake_s, "connect, authenticate, ask")
    size = question.history_tokens * question.geometry.bytes_per_token
    how = _division("hand-off within the node", size, question.local_bytes_per_s)
    yield Term("hand-off", estimate.transfer_s - handshake_s, how)


def _correction_terms(question: Question, estimate: Estimate) -> Iterator[Term]:
    factor = question.corrections.get(estimate.option, 1.0)
    if factor != 1.0 and question.settings.name is not PolicyName.ROM:
        yield Term("correction", estimate.total_s - estimate.raw_s, f"{estimate.raw_s:.6f} s by the tables, times {factor:.3g}")


def _transfer(question: Question, source: InstanceId, pages: int) -> tuple[float, str]:
    size, rate = pages * question.geometry.page_bytes, question.rate_from(source)
    return size / rate, _division(f"{pages:,} pages of the {source}", size, rate)


def _tail(question: Question, prefix_pages: int) -> str:
    prefix = prefix_pages * question.geometry.page_size_tokens
    return f"{question.history_tokens - prefix:,} tokens behind {prefix:,}"


def _division(what: str, size_bytes: int, bytes_per_s: float) -> str:
    return f"{what}: {size_bytes / 1e6:,.1f} MB / {bytes_per_s / 1e9:,.3g} GB/s"


def _hand_off(question: Question, how: Handoff) -> WeighedHandoff:
    own = Candidate(InstanceId("own"), question.own_queue_s, question.local_bytes_per_s)
    remote = Candidate(InstanceId("target"), question.target_queue_s, question.bytes_per_s)
    kv_bytes, handshake_s = question.prompt_tokens * question.geometry.bytes_per_token, question.settings.handshake_s
    own_s, remote_s = (hand_off_s(how, each, each is own, kv_bytes, handshake_s) for each in (own, remote))
    return WeighedHandoff(how, own_s, remote_s, choose(how, own, [remote], kv_bytes, handshake_s) is own)


def _crossover(question: Question) -> Crossover:
    plain = replace(question, checkpoint_tokens=0, reused_tokens=0)
    hand_off_s = question.prompt_tokens * question.geometry.bytes_per_token / question.bytes_per_s
    return Crossover(
        bytes_per_s=_crossover_bytes_per_s(plain),
        queue_depth=_crossover_queue_depth(plain),
        hand_off_queue_depth=hand_off_s / question.service_s,
    )


def _crossover_bytes_per_s(question: Question) -> float | None:
    """Migrating costs `fixed + bytes / bandwidth`: both are asked of the cost functions themselves, at two bandwidths."""
    fastest = _estimate(replace(question, bytes_per_s=inf), Option.MIGRATE)
    at_1_byte_per_s = _estimate(replace(question, bytes_per_s=1.0), Option.MIGRATE)
    recompute = _estimate(question, Option.RECOMPUTE)
    if fastest is None or at_1_byte_per_s is None or recompute is None or recompute.total_s <= fastest.total_s:
        return None
    size_bytes = at_1_byte_per_s.transfer_s - fastest.transfer_s
    factor = at_1_byte_per_s.total_s / at_1_byte_per_s.raw_s
    # Not what the fastest one costs: a queue at the target may outlast it.
    fixed_s = at_1_byte_per_s.queue_s + at_1_byte_per_s.compute_s + fastest.transfer_s
    bytes_per_s = size_bytes / (recompute.total_s / factor - fixed_s)
    return bytes_per_s if isfinite(bytes_per_s) else None


def _crossover_queue_depth(question: Question) -> float | None:
    """The queue before the prefill instance matters for as long as the target itself would not compute it sooner."""
    if question.settings.name is PolicyName.ROM:
        return None  # The seed's rule weighs no queue.
    migrate = _estimate(question, Option.MIGRATE)
    without_queue = _estimate(replace(question, queue_s=0.0), Option.RECOMPUTE)
    at_most = _estimate(replace(question, queue_s=inf), Option.RECOMPUTE)
    if migrate is None or without_queue is None or at_most is None or at_most.total_s <= migrate.total_s:
        return None
    if without_queue.total_s >= migrate.total_s or without_queue.source is None:
        return 0.0
    factor = question.corrections.get(Option.RECOMPUTE, 1.0)
    queue_s = migrate.total_s / factor - without_queue.compute_s - without_queue.transfer_s
    return max(0.0, queue_s / question.service_s)


def _estimate(question: Question, option: Option) -> Estimate | None:
    return next((estimate for estimate in _weigh(question) if estimate.option is option), None)
