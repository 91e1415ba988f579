"""Placement of prompts where their prefix is cached: least queue and computing together.

A prompt costs an instance `prefill(new tokens behind cached ones)`, and each prompt that queues
behind it waits for that too. So an instance is charged for its queue and for the computing times
`weight`, which is one and the mean number of prompts in flight per prefill instance. Of instances
with the same cached tokens that with the shortest queue wins, which is what placement by load
alone chooses. So that choice is taken first, and only instances with more of the prompt than it
has are compared with it.

An instance of vLLM with a CPU tier loads by itself what other instances of its node have computed,
one with a store what any has that shares it. Such tokens count as cached in the part by which
loading them is quicker than computing them.

An instance of kvrs loads from an agent what that stores of earlier streams, while it computes what
queues before the prompt. So of an agent's tokens the part counts whose loading takes no longer than
the queue and the computing of them.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from math import inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

import msgspec

from kvrs.core.model.actions import PromptLoad
from kvrs.core.model.agent import Agent
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import HANDSHAKE_S
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.ids import NodeId
from kvrs.protocol.instance import STORE

# More instances that have as much are not sorted: they are picked out of the order of all.
_FEW = 32

_MOST_AGENTS = 4  # Are weighed for a prompt.
# An agent is waited for so many times as long as predicted, and at least so long.
_PATIENCE, _LEAST_PATIENCE_S = 4.0, 0.1

_queue = attrgetter("queue_s", "id")


class StartLimits(msgspec.Struct, frozen=True):
    """Waits that a new request must keep: where an instance keeps them, none is chosen that does
    not.
    """

    queue_s: float = inf  # Longest wait in the queue.
    first_token_s: float = inf  # Until the prompt is computed.


NO_LIMITS = StartLimits()


def with_prefix(
    view: ClusterView,
    stream: Stream,
    first: Member,
    allows: Callable[[Member], bool],
    limits: StartLimits = NO_LIMITS,
) -> Member:
    """The instance at which the prompt costs least; `first` is the choice by load. Writes
    `stream.cached`: tokens of the prompt at `first` and at the chosen one, and `stream.load`.

    `allows`: the instance may get the stream, and answers well.
    """
    if not stream.prefix.hashes and stream.recalled is None:
        return first
    own, deeper = _levels(view, stream, first)
    stored = _stored(view, stream)
    if not own and not deeper and stored is None:
        return first
    costs = _Costs(view, stream, limits)
    first_tokens, load = _with_load(view, stream, first, own, stored)
    best, best_key, best_tokens = first, costs.of(first, first_tokens), first_tokens
    for tokens, members in reversed(deeper):
        tables: set[int] = set()  # The first instance of a table is the best one of it.
        for member in members:
            if member.queue_s >= best_key[1] and not best_key[0]:
                break
            if id(member.prefill) in tables or not allows(member):
                continue
            tables.add(id(member.prefill))
            key = costs.of(member, tokens)
            if key < best_key:
                best, best_key, best_tokens = member, key, tokens
    if best is not first:
        best_tokens, load = _with_load(view, stream, best, best_tokens, stored)
    if first_tokens or best is not first:
        stream.cached[first.id] = first_tokens
    if best_tokens:
        stream.cached[best.id] = best_tokens
    stream.load = load if stream.recalled is None else stream.recalled.load
    return best


# Tokens of the prompt that instances have, and these, the shortest queue first.
_Level = tuple[int, Iterable[Member]]


def _levels(view: ClusterView, stream: Stream, first: Member) -> tuple[int, list[_Level]]:
    """The cached tokens at `first`, and the instances that have more, fewest tokens first."""
    if stream.recalled is not None:
        recalled = stream.recalled.cached
        own = recalled.get(first.id, 0)
        known = sorted((tokens, name) for name, tokens in recalled.items() if tokens > own)
        return own, [
            (tokens, [view.members[name]]) for tokens, name in known if name in view.members
        ]
    own, deeper = 0, list[_Level]()
    tiers: dict[tuple[NodeId, str], int] = {}
    for blocks, mask in view.prefixes.levels(stream.prefix):
        tokens = stream.prefix.tokens(blocks, stream.prompt_tokens)
        if mask & first.cache_bit:
            own = tokens
            deeper.clear()
            tiers.clear()
        elif first.is_placed and mask.bit_count() > _FEW:
            deeper.append((tokens, _among_placed(view, mask)))
        elif tokens > own:
            members = _of_bits(view, mask)
            deeper.append((tokens, members))
            tiers.update(
                ((each.node if each.has_tier else STORE, each.rows), tokens)
                for each in members
                if each.rows
            )
    if tiers:
        own = _add_loaded(view, first, tiers, own, deeper)
    return own, deeper


def _add_loaded(
    view: ClusterView,
    first: Member,
    tiers: dict[tuple[NodeId, str], int],
    own: int,
    deeper: list[_Level],
) -> int:
    """Add to `deeper` the instances that load the prompt out of the tiers of others; return what
    `first` has with that, which is the best one of those with a store. `tiers`: the most tokens
    that a node, or a store, has in rows of one kind.
    """
    for (node, rows), tokens in tiers.items():
        for member in [first] if node == STORE else view.by_node[node]:
            if member.rows != rows or not member.restores:
                continue
            found = int(tokens * _gain_of_loading(view, member, tokens))
            if member is first:
                own = max(own, found)
            elif found > own:
                deeper.append((found, [member]))
    return own


class _Stored(NamedTuple):
    agents: list[Agent]
    tokens: int


def _stored(view: ClusterView, stream: Stream) -> _Stored | None:
    """Agents with most of the prompt, others for the next stream where many have it; None: none has
    any, or is asked now.
    """
    if stream.recalled is not None or not (levels := view.stored.levels(stream.prefix)):
        return None
    blocks, mask = levels[-1]
    tokens = stream.prefix.tokens(blocks, stream.prompt_tokens)
    low = mask & ((1 << stream.order % mask.bit_length()) - 1)
    found = islice(chain(view.stored.of_bits(mask ^ low), view.stored.of_bits(low)), _MOST_AGENTS)
    agents = [each for each in found if each.no_loads_until_s <= view.now_s]
    return _Stored(agents, tokens) if agents else None


def _with_load(
    view: ClusterView, stream: Stream, member: Member, own: int, stored: _Stored | None
) -> tuple[int, PromptLoad | None]:
    """Return the tokens that the instance has with those that an agent brings, less the time of
    loading, and the load that it asks for. An agent with as much is asked too, as long as the
    prompt queues: it may have the answer behind that, or the instance less by now.
    """
    can_load = member.pulls and member.caches and member.restores and not member.rows
    if stored is None or stored.tokens < own or not can_load:
        return own, None
    more, table = stored.tokens - own, member.prefill
    load_s, agent = min(
        ((_load_s(view, agent, member, more), agent) for agent in stored.agents),
        key=itemgetter(0),
    )
    compute_s = table.seconds_for(stored.tokens) - table.seconds_for(own)
    wait_s = max(0.0, load_s - member.queue_s)
    if wait_s > compute_s:
        return own, None
    pages = -(-stream.prompt_tokens // member.page_size_tokens)
    within_s = min(member.queue_s + compute_s, max(_LEAST_PATIENCE_S, _PATIENCE * load_s))
    load = PromptLoad(agent.id, agent.epoch, pages, own, more, within_s)
    return own + (int(more * (1 - wait_s / compute_s)) if wait_s else more), load


def _load_s(view: ClusterView, agent: Agent, member: Member, tokens: int) -> float:
    """How long the instance takes to load so many tokens from the agent."""
    link = view.link_from(agent, member.node)
    is_local = agent.node == member.node and not link.measured
    rate = agent.host_to_device_bytes_per_s if is_local else link.bytes_per_s
    return HANDSHAKE_S + (link.in_flight_bytes + tokens * member.bytes_per_token) / rate


def _gain_of_loading(view: ClusterView, member: Member, tokens: int) -> float:
    """The part of the time to compute so many tokens that the instance saves by loading them out of
    its node's tiers, or its store; below 0: it takes longer.
    """
    agent: Agent | None = view.store
    share = member.store_share
    if member.has_tier:
        agent, share = view.agent_on(member.node), 1.0
    if agent is None:
        return 0.0  # It is lost.
    load_s = _load_s(view, agent, member, tokens)
    return share * (1 - load_s / member.prefill.seconds_for(tokens))


def _among_placed(view: ClusterView, mask: int) -> Iterator[Member]:
    return (member for member in view.prefill_order.least_first() if member.cache_bit & mask)


def _of_bits(view: ClusterView, mask: int) -> list[Member]:
    return sorted(view.prefixes.of_bits(mask), key=_queue)


class _Costs:
    """The cost of one prompt at each instance."""

    def __init__(self, view: ClusterView, stream: Stream, limits: StartLimits) -> None:
        self._tokens, self._limits = stream.prompt_tokens, limits
        self._weight = view.prefill_order.prompt_weight(len(view.prefillers))
        self._seconds: dict[tuple[int, int], float] = {}

    def of(self, member: Member, cached: int) -> tuple[bool, float]:
        """Return whether it breaks a limit, and the weighted cost in seconds."""
        table, tokens, queue_s = member.prefill, self._tokens, member.queue_s
        compute_s = self._seconds.get((id(table), cached))
        if compute_s is None:
            compute_s = table.seconds_for(tokens)
            if cached:
                compute_s = table.behind(cached, tokens, compute_s)[0]
            self._seconds[id(table), cached] = compute_s
        limits = self._limits
        is_late = queue_s > limits.queue_s or queue_s + compute_s > limits.first_token_s
        return is_late, queue_s + self._weight * compute_s
