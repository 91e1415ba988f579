"""An analysis of one decision: every option, the terms of its sum, and the crossovers.

Estimates and their terms come from the objects that decide in a proxy (`kvrs.core.rules`,
`kvrs.core.options`), set up for one victim. The victim's decode instance on another node is lost.
`holder` on node n0 retains its prompt, or has it in its prefix cache for engines that fetch no
pages. `target` on node n1 can take the victim over with the prefill instance beside it. An agent,
on the target's node or on a third one, may have a checkpoint, and the target the front of the
history.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isfinite

from kvrs.config.policy import Handoff, PolicyName, PolicySettings
from kvrs.core.model.agent import Agent
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, StoredCheckpoint, Stream
from kvrs.core.options.base import Case, Term
from kvrs.core.routing import HandoffCandidate, choose_hand_off, hand_off_s
from kvrs.core.rules import ALL, BY_NAME
from kvrs.core.rules.base import Rule, cases_of
from kvrs.core.state import CoreSettings, State
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, Role, assumed_instance

_N0, _N1, _N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
_AGENT = InstanceId("agent")


class CheckpointAt(StrEnum):
    """The node of the agent that has the checkpoint."""

    TARGET = "target"  # Node of the target: loaded from host memory.
    OTHER = "other"  # A third node: loaded over a link like the holder's.


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The situation to decide. Lengths and rates are those of a real decision: at least one prompt
    token, rates above zero.
    """

    geometry: KvGeometry
    prefill: PrefillTable
    settings: PolicySettings
    prompt_tokens: int
    output_tokens: int  # Already sent to the client; their KV is lost.
    held_tokens: int  # Leading tokens of the prompt whose KV the holder retains.
    bytes_per_s: float  # Bandwidth from the holder's node to the target's.
    local_bytes_per_s: float  # Within the target's node, after recomputing.
    service_s: float  # Time of one queued request.
    queue_s: float = 0.0  # Queue of the prefill instance beside the target.
    target_queue_s: float = 0.0  # Queue of the target.
    budget_s: float | None = None  # Limit of an option's time.
    others: float = 0.0  # Other victims of the event per target.
    checkpoint_tokens: int = 0  # Leading tokens of the history in an agent's checkpoint.
    checkpoint_at: CheckpointAt = CheckpointAt.TARGET
    host_to_device_bytes_per_s: float = 26e9  # From an agent to an instance on its node.
    reused_tokens: int = 0  # Leading tokens of the history whose KV the target has.
    # Queue of the decode instance beside the holder at the end of prefill, for the hand-off alone.
    own_queue_s: float = 0.0
    # The target fetches no pages of instances: the holder computes the rest of its cached prompt,
    # and hands off.
    prefix_cache: bool = False

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Weighed:
    """One option, whose terms add up to `total_s`."""

    option: Option
    at: InstanceId  # The instance that computes the history, or the rest of it.
    is_chosen: bool
    total_s: float  # With the waits of other victims, if the policy counts them.
    terms: tuple[Term, ...]
    extrapolated: bool  # A table was used outside its measured range.
    # First fetched page; a split computes the earlier pages meanwhile.
    first_page: int


@dataclass(frozen=True, slots=True)
class Crossover:
    """The points where the cheaper of migrating and recomputing changes for a single victim, all
    else equal, without checkpoint and reuse.

    None: no such point.
    """

    # Above this bandwidth migrating is cheaper than recomputing.
    bytes_per_s: float | None
    # Migrating is cheaper with more requests than this at the prefill instance; 0: also with an
    # empty queue.
    queue_depth: float | None
    # For a hand-off (seed KVRS): with more requests than this in the own queue, a move of the KV to
    # an idle node is faster.
    hand_off_queue_depth: float


@dataclass(frozen=True, slots=True)
class WeighedHandoff:
    """The destination of the prompt's KV after prefill: the decode instance beside it, or the
    target on the other node.
    """

    how: Handoff
    own_s: float
    remote_s: float
    is_own: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    policy: PolicyName
    chosen: Option
    options: tuple[Weighed, ...]
    by_policy: dict[PolicyName, Option]  # The choice of each policy.
    crossover: Crossover
    hand_offs: tuple[WeighedHandoff, ...]
    kv_bytes_per_token: int
    kv_bytes: int  # KV of the prompt.
    fetched_bytes: int  # Bytes that migrating would move.


def explain(question: Question) -> Explanation:
    """Decide the question, with all estimates and their terms."""
    rule, case = BY_NAME[question.settings.name], _case(question)
    estimates = _weigh(case, rule)
    chosen = rule.decide(estimates, question.budget_s, question.others)
    return Explanation(
        policy=rule.name,
        chosen=chosen.option,
        options=tuple(
            _taken_apart(case, rule, each, question.others, is_chosen=each is chosen)
            for each in estimates
        ),
        by_policy={
            each.name: each.decide(_weigh(case, each), question.budget_s, question.others).option
            for each in ALL
        },
        crossover=_crossover(question),
        hand_offs=tuple(_hand_off(question, how) for how in (Handoff.ROM, Handoff.AUTO)),
        kv_bytes_per_token=question.geometry.bytes_per_token,
        kv_bytes=question.prompt_tokens * question.geometry.bytes_per_token,
        fetched_bytes=_fetched_bytes(question),
    )


def _fetched_bytes(question: Question) -> int:
    if question.prefix_cache:
        return question.geometry.sent_bytes(question.history_tokens)
    fetched_tokens = min(question.held_tokens, question.history_tokens - 1)
    return fetched_tokens // question.geometry.page_size_tokens * question.geometry.page_bytes


def _weigh(case: Case, rule: Rule) -> list[Estimate]:
    return rule.weigh(case.state, case.stream, [case.target], 0.0)


def _case(question: Question) -> Case:
    """Build the victim at its target, with a policy's records of the situation."""
    settings = question.settings
    state = State(CoreSettings(settings))
    view = state.view
    view.assume(question.local_bytes_per_s)
    # The queue that is asked about comes before the victim, whatever is in it.
    at_holder = at_target = frozenset(Capability) - {Capability.FAIR_QUEUE}
    if question.prefix_cache:  # Like vLLM, which loads rows of agents.
        at_holder = at_target = at_holder - {Capability.RETAIN, Capability.SPLIT}
        if not question.checkpoint_tokens:
            at_target -= {Capability.PULL_PAGES}
    holder, prefill, target = (
        view.add(
            Member.of(
                assumed_instance(InstanceId(name), node, role, question.geometry, can),
                question.prefill,
            )
        )
        for name, node, role, can in (
            ("holder", _N0, Role.PREFILL, at_holder),
            ("prefill instance", _N1, Role.PREFILL, at_holder),
            ("target", _N1, Role.DECODE, at_target),
        )
    )
    prefill.note_queue(question.queue_s)
    target.note_queue(question.target_queue_s)
    view.look_ahead()
    for node in (_N0, _N2):
        view.link(node, _N1).bytes_per_s = question.bytes_per_s
    stream = Stream(
        StreamId("victim"),
        0,
        question.prompt_tokens,
        0.0,
        produced_tokens=question.output_tokens,
        prefilled=True,
    )
    _give(question, stream, holder, target, view)
    return cases_of(state, stream, [target], 0.0)[0]


def _give(
    question: Question, stream: Stream, holder: Member, target: Member, view: ClusterView
) -> None:
    """Place the KV of the history as the question states."""
    page_size_tokens = question.geometry.page_size_tokens
    for member, tokens in ((holder, question.held_tokens), (target, question.reused_tokens)):
        if tokens >= page_size_tokens:
            stream.holders[member.id] = Holder(member, tokens // page_size_tokens)
    if question.checkpoint_tokens >= page_size_tokens:
        node = _N1 if question.checkpoint_at is CheckpointAt.TARGET else _N2
        size = question.checkpoint_tokens * question.geometry.bytes_per_token
        agent = Agent(_AGENT, node, 1, size, question.host_to_device_bytes_per_s)
        view.agents[agent.id] = agent
        pages = question.checkpoint_tokens // page_size_tokens
        stream.checkpoints[agent.id] = StoredCheckpoint(agent, question.geometry, size, pages)


def _taken_apart(
    case: Case, rule: Rule, estimate: Estimate, others: float, *, is_chosen: bool
) -> Weighed:
    terms = [*rule.terms(case, estimate)]
    if estimate.lookahead_s:
        terms.append(Term("look-ahead", estimate.lookahead_s, "of the tokens after the next one"))
    waited_s = estimate.wait_of_others_s(others) if rule.spares_others else 0.0
    if waited_s:
        how = f"{others:.3g} victims, for {estimate.at_target_s:.6f} s of computing at the target"
        terms.append(Term("others wait", waited_s, how))
    is_handed_off = estimate.option is Option.RECOMPUTE or estimate.by_prefill
    return Weighed(
        estimate.option,
        estimate.source if is_handed_off and estimate.source else estimate.target,
        is_chosen,
        estimate.total_s + waited_s,
        tuple(terms),
        estimate.extrapolated,
        estimate.first_page,
    )


def _hand_off(question: Question, how: Handoff) -> WeighedHandoff:
    own = HandoffCandidate(
        InstanceId("own"), question.own_queue_s, question.local_bytes_per_s, is_near=True
    )
    remote = HandoffCandidate(InstanceId("target"), question.target_queue_s, question.bytes_per_s)
    costs = question.geometry.sent_bytes(question.prompt_tokens), HANDSHAKE_S
    own_s, remote_s = (hand_off_s(how, each, *costs) for each in (own, remote))
    return WeighedHandoff(how, own_s, remote_s, choose_hand_off(how, own, [remote], *costs) is own)


def _crossover(question: Question) -> Crossover:
    plain = replace(question, checkpoint_tokens=0, reused_tokens=0)
    hand_off_s = question.prompt_tokens * question.geometry.bytes_per_token / question.bytes_per_s
    return Crossover(
        bytes_per_s=_crossover_bytes_per_s(plain),
        queue_depth=_crossover_queue_depth(plain),
        hand_off_queue_depth=hand_off_s / question.service_s,
    )


def _crossover_bytes_per_s(question: Question) -> float | None:
    """Migrating costs `fixed + bytes / bandwidth`: estimates at two bandwidths give both."""
    fastest, at_1_byte_per_s = (
        _estimates(replace(question, bytes_per_s=rate)).get(Option.MIGRATE) for rate in (inf, 1.0)
    )
    recompute = _estimates(question).get(Option.RECOMPUTE)
    if not (fastest and at_1_byte_per_s and recompute) or recompute.total_s <= fastest.total_s:
        return None
    size_bytes = at_1_byte_per_s.transfer_s - fastest.transfer_s
    # A queue at the target may outlast the fastest transfer: its total is no fixed cost.
    fixed_s = at_1_byte_per_s.queue_s + at_1_byte_per_s.compute_s + fastest.transfer_s
    bytes_per_s = size_bytes / (recompute.total_s - fixed_s)
    return bytes_per_s if isfinite(bytes_per_s) else None


def _crossover_queue_depth(question: Question) -> float | None:
    """The prefill queue matters only until the target itself would compute faster."""
    if question.settings.name is PolicyName.ROM:
        return None  # `ROM_DECIDE` weighs no queue.
    migrate = _estimates(question).get(Option.MIGRATE)
    without_queue, at_most = (
        _estimates(replace(question, queue_s=queue_s)).get(Option.RECOMPUTE)
        for queue_s in (0.0, inf)
    )
    if not (migrate and without_queue and at_most) or at_most.total_s <= migrate.total_s:
        return None
    if without_queue.total_s >= migrate.total_s or without_queue.source is None:
        return 0.0
    queue_s = migrate.total_s - without_queue.compute_s - without_queue.transfer_s
    return max(0.0, queue_s / question.service_s)


def _estimates(question: Question) -> dict[Option, Estimate]:
    """The first estimate of each option."""
    estimates = _weigh(_case(question), BY_NAME[question.settings.name])
    return {estimate.option: estimate for estimate in reversed(estimates)}
