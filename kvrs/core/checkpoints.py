"""Checkpoints of streams: the policy chooses their agents when an attempt starts (`choose_agent`)
and counts the pages that the agents report.

A checkpoint that gets no more pages stays a source until its stream produces a token again; then
the driver releases the reservation.

The choice of the agent for a stream's checkpoint: the agent of another node that would restore
the stream soonest (LUMEN section 4.2, Eq. 1).

Restore pressure is a mean over an agent's checkpoints, and does not grow with their number. So that
one node need not restore all streams of a lost node, the agents within `_NEAR_S` of the best one
share the checkpoints of each serving node.

The ring is the order of the node ids: it is the same at every proxy without a membership protocol.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, assert_never

import msgspec

from kvrs.config.backup import BackupMode, Placement
from kvrs.core.model import actions as act
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Member
from kvrs.core.model.streams import StoredCheckpoint, Stream
from kvrs.core.state import State
from kvrs.ids import InstanceId, NodeId, along_ring

T = TypeVar("T")


class PlacementCandidate(msgspec.Struct, frozen=True, gc=False):
    """An agent that is up: one row of the load table of LUMEN section 4.2."""

    holder: InstanceId
    node: NodeId
    queueing_delay_s: float  # Wait of new work at the agent's node.
    reserved_bytes: int
    checkpoints: int  # Number of checkpoints in `reserved_bytes`.
    capacity_bytes: int
    host_to_device_bytes_per_s: float
    of_serving_bytes: int = 0  # The part of `reserved_bytes` for streams of the serving node.


# The largest number of agents that are considered for one stream: it bounds the time of a decision.
CANDIDATES_MAX = 64

# Agents whose loads differ by less (in seconds), about one decode step, count as equal.
_NEAR_S = 0.02


def choose_agent(
    how: Placement,
    candidates: Sequence[PlacementCandidate],
    serving: NodeId,
    need_bytes: int,
    alpha: float,
    draw: int,
) -> PlacementCandidate | None:
    """Choose the agent for a checkpoint of `need_bytes` of a stream that `serving` decodes.

    Agents on the serving node, whose loss would take both copies, and agents without room are left
    out. `alpha` weighs restore pressure against queueing delay; `draw` is the stream's number, so
    that the choice is deterministic.
    """
    others = [candidate for candidate in candidates if candidate.node != serving]
    if not others:
        return None

    def steps(candidate: PlacementCandidate) -> tuple[bool, NodeId]:
        return along_ring(serving, candidate.node)

    match how:
        case Placement.LOAD:
            roomy = [other for other in others if _candidate_has_room(other, need_bytes)]
            loads_s = [load_s(other, need_bytes, alpha) for other in roomy]
            limit_s = min(loads_s, default=0.0) + _NEAR_S
            return min(
                (other for other, own_s in zip(roomy, loads_s, strict=True) if own_s <= limit_s),
                key=lambda other: (other.of_serving_bytes, other.reserved_bytes, steps(other)),
                default=None,
            )
        case Placement.FIXED:
            following = min(others, key=steps)
            return following if _candidate_has_room(following, need_bytes) else None
        case Placement.RANDOM:
            roomy = sorted(
                (other for other in others if _candidate_has_room(other, need_bytes)), key=steps
            )
            return roomy[_mixed(draw) % len(roomy)] if roomy else None
        case _:
            assert_never(how)


def weighed(agents: Sequence[T], draw: int) -> Sequence[T]:
    """Return at most `CANDIDATES_MAX` agents for the stream with number `draw`; over many streams
    every agent is returned equally often.
    """
    step = -(-len(agents) // CANDIDATES_MAX)
    return agents[_mixed(draw) % step :: step] if step > 1 else agents


def load_s(candidate: PlacementCandidate, need_bytes: int, alpha: float) -> float:
    """Return the load by LUMEN Eq. 1: queueing delay + alpha * restore pressure.

    Restore pressure is the time to copy the agent's mean checkpoint, the new one included, from
    host memory to the device.
    """
    mean_bytes = (candidate.reserved_bytes + need_bytes) / (candidate.checkpoints + 1)
    return candidate.queueing_delay_s + alpha * mean_bytes / candidate.host_to_device_bytes_per_s


def _candidate_has_room(candidate: PlacementCandidate, need_bytes: int) -> bool:
    return candidate.reserved_bytes + need_bytes <= candidate.capacity_bytes


def _mixed(number: int) -> int:
    """Hash a stream number with SplitMix64's finalizer, so that consecutive numbers do not choose
    agents in turn.
    """
    mask = (1 << 64) - 1
    number = (number + 0x9E3779B97F4A7C15) & mask
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return number ^ (number >> 31)


def place(
    state: State, stream: Stream, decode: Member, prefill: Member | None
) -> tuple[act.Place, ...]:
    """Choose and book the agents for the pages of an attempt that decodes at `decode`. Agents
    that already have pages of the stream are preferred.
    """
    mode = state.settings.backup.mode
    node, need_bytes = decode.node, _need_bytes(stream, decode)
    chosen: list[Agent] = []
    if decode.shared.rows:
        stream.unprotected, mode = "", BackupMode.OFF
    elif not (
        decode.abilities.checkpoints or (prefill is not None and prefill.abilities.checkpoints)
    ):
        # Neither instance sends pages: a reservation that is never filled would take room from
        # other streams.
        stream.unprotected = f"no agent keeps KV of {decode.id}"
        mode = BackupMode.OFF
    if mode is BackupMode.PEER:
        return _at_peer(state, stream, decode, need_bytes)
    if mode is BackupMode.LOCAL or mode is BackupMode.BOTH:
        local = state.view.agent_on(node)
        stream.unprotected = (
            f"no agent is up on {node}" if local is None else f"no room at {local.id}"
        )
        if local is not None and _has_room(stream, local, need_bytes):
            chosen.append(local)
    if mode is BackupMode.REMOTE or mode is BackupMode.BOTH:
        remote = _remote(state, stream, node, need_bytes)
        stream.unprotected = "no agent of another node is up and has room"
        if remote is not None:
            chosen.append(remote)
    if chosen:
        stream.unprotected = ""
    for checkpoint in stream.checkpoints.values():
        if checkpoint.agent not in chosen:
            _rebook(checkpoint, 0)
    for agent in chosen:
        _keep(state, stream, agent, decode, need_bytes)
    return tuple(act.Place(agent.id, need_bytes) for agent in chosen)


def _at_peer(
    state: State, stream: Stream, decode: Member, need_bytes: int
) -> tuple[act.Place, ...]:
    """Choose the peer that has the most pages of the stream, else the next decode instance
    along the ring, on another node if possible.
    """
    others = [
        each
        for each in state.view.members.values()
        if each is not decode
        and each.abilities.decodes
        and each.abilities.checkpoints
        and not each.must_drain
        and each.info.fingerprint == decode.info.fingerprint
    ]
    others = [each for each in others if each.node != decode.node] or others
    stream.unprotected = "" if others else "no other decode instance is up"
    if not others:
        return ()
    held = [each for each in others if each.id in stream.holders]
    chosen = (
        max(held, key=lambda each: stream.holders[each.id].pages)
        if held
        else min(
            others,
            key=lambda each: along_ring((decode.node, decode.id), (each.node, each.id)),
        )
    )
    return (act.Place(chosen.id, need_bytes),)


def reported(state: State, stream: Stream, agent: Agent, pages: int) -> None:
    """Note the number of leading pages that the agent stores, if the plan names the agent."""
    checkpoint = stream.checkpoints.get(agent.id)
    plan, decode = stream.attempt.plan, stream.attempt.decodes_on
    if checkpoint is None and pages and plan is not None and decode is not None:
        # The checkpoint was lost or denied, and the instances have sent pages again.
        asked = next((place for place in plan.places if place.holder == agent.id), None)
        if asked is not None:
            checkpoint = _keep(state, stream, agent, decode, asked.reserved_bytes)
            stream.unprotected = ""
    if checkpoint is not None:
        checkpoint.pages = pages


def adopt(state: State, stream: Stream, agent: Agent, pages: int) -> None:
    """Note pages of the stream that the agent stores by another proxy's reservation."""
    geometries = [member.info.geometry for member in state.view.members.values()]
    if pages and geometries:
        stream.checkpoints[agent.id] = StoredCheckpoint(agent, geometries[0], pages=pages)
        agent.streams.add(stream.id)


def lose(state: State, stream: Stream, holder: InstanceId, why: str) -> None:
    """Forget the stream's checkpoint at `holder`; if no other agent gets pages, note `why`."""
    checkpoint = stream.checkpoints.pop(holder, None)
    if checkpoint is None:
        return
    was_placed = checkpoint.booked_bytes > 0
    _rebook(checkpoint, 0)
    checkpoint.agent.streams.discard(stream.id)
    if was_placed and not any(other.booked_bytes for other in stream.checkpoints.values()):
        stream.unprotected = why


def drop_former(state: State, stream: Stream) -> None:
    """Forget the checkpoints that get no more pages."""
    for holder in [
        holder for holder, checkpoint in stream.checkpoints.items() if not checkpoint.booked_bytes
    ]:
        lose(state, stream, holder, "")


def forget(state: State, stream: Stream) -> None:
    for holder in list(stream.checkpoints):
        lose(state, stream, holder, "")


def _remote(state: State, stream: Stream, serving: NodeId, need_bytes: int) -> Agent | None:
    kept = [
        checkpoint
        for checkpoint in stream.checkpoints.values()
        if checkpoint.agent.node != serving and _has_room(stream, checkpoint.agent, need_bytes)
    ]
    if kept:
        return max(kept, key=lambda checkpoint: checkpoint.pages).agent
    agents, found = list(state.view.agents.values()), None
    if state.settings.backup.placement is Placement.LOAD:
        found = _placed(state, stream, serving, need_bytes, weighed(agents, stream.order))
    return found or _placed(state, stream, serving, need_bytes, agents)


def _placed(
    state: State, stream: Stream, serving: NodeId, need_bytes: int, agents: Sequence[Agent]
) -> Agent | None:
    candidates = [
        PlacementCandidate(
            holder=agent.id,
            node=agent.node,
            queueing_delay_s=state.view.queueing_delay_s(agent.node),
            reserved_bytes=agent.reserved_bytes,
            checkpoints=agent.checkpoints,
            capacity_bytes=agent.capacity_bytes,
            host_to_device_bytes_per_s=state.view.restore_bytes_per_s(agent),
            of_serving_bytes=agent.booked_of[serving],
        )
        for agent in agents
    ]
    settings = state.settings.backup
    found = choose_agent(
        settings.placement, candidates, serving, need_bytes, settings.alpha, stream.order
    )
    return None if found is None else state.view.agents[found.holder]


def _keep(
    state: State, stream: Stream, agent: Agent, decode: Member, need_bytes: int
) -> StoredCheckpoint:
    agent.bytes_per_token = decode.abilities.bytes_per_token
    checkpoint = stream.checkpoints.get(agent.id)
    if checkpoint is None or not checkpoint.is_of(decode):
        if checkpoint is not None:
            _rebook(checkpoint, 0)
        checkpoint = StoredCheckpoint(agent, decode.info.geometry)
        stream.checkpoints[agent.id] = checkpoint
        agent.streams.add(stream.id)
    _rebook(checkpoint, need_bytes, decode.node)
    return checkpoint


def protection(stream: Stream) -> dict[str, Any]:
    """Return the pages by agent or peer, and the reason if there are none."""
    stored = {
        holder: kept.pages for holder, kept in stream.checkpoints.items() if kept.booked_bytes
    }
    return {
        "pages": stored | stream.replicas,
        "unprotected": stream.unprotected,
    }


def _need_bytes(stream: Stream, decode: Member) -> int:
    """Return the bytes of the stream's longest possible history, or of the present history if no
    limit is known.
    """
    ends = (stream.most_tokens, decode.info.max_model_len or None)
    longest = min((most for most in ends if most is not None), default=0)
    tokens = max(longest, stream.history_tokens)
    return max(1, tokens // decode.abilities.page_size_tokens) * decode.abilities.page_bytes


def _has_room(stream: Stream, agent: Agent, need_bytes: int) -> bool:
    """Return whether the agent has room; the stream's own reservation there counts as room."""
    own = stream.checkpoints.get(agent.id)
    return agent.has_room(need_bytes - (own.booked_bytes if own is not None else 0))


def _rebook(checkpoint: StoredCheckpoint, booked_bytes: int, serving: NodeId | None = None) -> None:
    agent = checkpoint.agent
    agent.booked_bytes += booked_bytes - checkpoint.booked_bytes
    if checkpoint.booked_for is not None:
        agent.booked_of[checkpoint.booked_for] -= checkpoint.booked_bytes
    if serving is not None:
        agent.booked_of[serving] += booked_bytes
    checkpoint.booked_bytes, checkpoint.booked_for = booked_bytes, serving
