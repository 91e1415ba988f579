"""Placement of prompts at instances with cached prefixes, by the least sum of queue and computing.

A prompt costs an instance `prefill(new tokens behind cached ones)`, and each prompt queued behind
it waits for that too. So the cost of an instance is its queue plus the computing times `weight`,
which is one plus the mean number of prompts in flight per prefill instance. Among instances with
equal cached tokens the shortest queue wins, as in placement by load. So that choice is made first,
and compared only with instances that have more of the prompt.

A vLLM instance with a CPU tier loads what other instances of its node have computed; one with a
store, what any instance sharing the store has. Such tokens count as cached by the part that loading
saves over computing.

An instance of kvrs loads an agent's KV of earlier streams while it computes its queue. So an
agent's tokens count as far as loading them takes no longer than the queue plus computing them.
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

# More instances than this with equal cached tokens are not sorted, but picked from the order of
# all.
_FEW = 32

_MOST_AGENTS = 4  # Most agents weighed for a prompt: it bounds the time of a decision.
# An agent's load is awaited for this multiple of its predicted time, and at least for these
# seconds.
_PATIENCE, _LEAST_PATIENCE_S = 4.0, 0.1

_queue = attrgetter("queue_s", "id")


class StartLimits(msgspec.Struct, frozen=True):
    """Limits on a new request's waits: an instance that breaks them is chosen only if every one
    does.
    """

    queue_s: float = inf  # Longest wait in the queue.
    first_token_s: float = inf  # Longest time until the prompt is computed.


NO_LIMITS = StartLimits()


def with_prefix(
    view: ClusterView,
    stream: Stream,
    first: Member,
    allows: Callable[[Member], bool],
    limits: StartLimits = NO_LIMITS,
) -> Member:
    """The instance with the least cost of the prompt; `first` is the choice by load. Writes
    `stream.cached` (tokens of the prompt at `first` and at the chosen instance) and `stream.load`.

    `allows`: an instance may get the stream, and answers well.
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
        # Prefill tables seen: with equal tables, the first instance is the best.
        tables: set[int] = set()
        for member in members:
            if member.queue_s >= best_key[1] and not best_key[0]:
                break
            if id(member.times.table) in tables or not allows(member):
                continue
            tables.add(id(member.times.table))
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


# A number of cached tokens, and the instances with them, shortest queue first.
_Level = tuple[int, Iterable[Member]]


def _levels(view: ClusterView, stream: Stream, first: Member) -> tuple[int, list[_Level]]:
    """Cached tokens at `first`, and the instances with more, fewest tokens first."""
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
                ((each.node if each.shared.has_tier else STORE, each.shared.rows), tokens)
                for each in members
                if each.shared.rows
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
    """Add to `deeper` the instances that load the prompt from others' tiers; return the tokens that
    `first`, the best with a store, has by loading. `tiers`: most tokens that a node, or a store,
    has in rows of one kind.
    """
    for (node, rows), tokens in tiers.items():
        for member in [first] if node == STORE else view.by_node[node]:
            if member.shared.rows != rows or not member.restores:
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
    """Agents with most of the prompt, in rotation if many have it; None: no agent has any, or may
    be asked now.
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
    """Return the tokens that the instance has including an agent's, less the time of loading, and
    the load to request. An agent with equal tokens is asked too, while the prompt queues: it may
    have the answer of the last turn, or the instance may have less by now.
    """
    can_load = (
        member.abilities.pulls
        and member.abilities.caches
        and member.restores
        and not member.shared.rows
    )
    if stored is None or stored.tokens < own or not can_load:
        return own, None
    more, table = stored.tokens - own, member.times.table
    load_s, agent = min(
        ((_load_s(view, agent, member, more), agent) for agent in stored.agents),
        key=itemgetter(0),
    )
    compute_s = table.seconds_for(stored.tokens) - table.seconds_for(own)
    wait_s = max(0.0, load_s - member.queue_s)
    if wait_s > compute_s:
        return own, None
    pages = -(-stream.prompt_tokens // member.abilities.page_size_tokens)
    within_s = min(member.queue_s + compute_s, max(_LEAST_PATIENCE_S, _PATIENCE * load_s))
    load = PromptLoad(agent.id, agent.epoch, pages, own, more, within_s)
    return own + (int(more * (1 - wait_s / compute_s)) if wait_s else more), load


def _load_s(view: ClusterView, agent: Agent, member: Member, tokens: int) -> float:
    """Time for the instance to load these tokens from the agent."""
    link = view.link_from(agent, member.node)
    is_local = agent.node == member.node and not link.measured
    rate = agent.host_to_device_bytes_per_s if is_local else link.bytes_per_s
    return HANDSHAKE_S + (link.in_flight_bytes + tokens * member.abilities.bytes_per_token) / rate


def _gain_of_loading(view: ClusterView, member: Member, tokens: int) -> float:
    """Share of the computing time of these tokens that the instance saves by loading them from its
    node's tiers, or its store; below 0: loading takes longer.
    """
    agent: Agent | None = view.store
    share = member.shared.store_share
    if member.shared.has_tier:
        agent, share = view.agent_on(member.node), 1.0
    if agent is None:
        return 0.0  # The node's agent is not up.
    load_s = _load_s(view, agent, member, tokens)
    return share * (1 - load_s / member.times.table.seconds_for(tokens))


def _among_placed(view: ClusterView, mask: int) -> Iterator[Member]:
    return (member for member in view.prefill_order.least_first() if member.cache_bit & mask)


def _of_bits(view: ClusterView, mask: int) -> list[Member]:
    return sorted(view.prefixes.of_bits(mask), key=_queue)


class _Costs:
    """Cost of one prompt at each instance."""

    def __init__(self, view: ClusterView, stream: Stream, limits: StartLimits) -> None:
        self._tokens, self._limits = stream.prompt_tokens, limits
        self._weight = view.prefill_order.prompt_weight(len(view.prefillers))
        self._seconds: dict[tuple[int, int], float] = {}

    def of(self, member: Member, cached: int) -> tuple[bool, float]:
        """Return whether the instance breaks a limit, and the weighted cost in seconds."""
        table, tokens, queue_s = member.times.table, self._tokens, member.queue_s
        compute_s = self._seconds.get((id(table), cached))
        if compute_s is None:
            compute_s = table.seconds_for(tokens)
            if cached:
                compute_s = table.behind(cached, tokens, compute_s)[0]
            self._seconds[id(table), cached] = compute_s
        limits = self._limits
        is_late = queue_s > limits.queue_s or queue_s + compute_s > limits.first_token_s
        return is_late, queue_s + self._weight * compute_s
