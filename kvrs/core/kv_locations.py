"""The holders of each stream's KV: instances that retain or cache it, and agents that store a
checkpoint of it or serve rows of vLLM's CPU tiers.

An agent serves rows out of the memory of the engines of its node. Rows need no room and no lease at
the agent: the engine keeps them anyway, and evicts the rows of protected streams last. The last
blocks of a stream may be missing. A KV store that engines share counts as one more agent, without a
process.
"""

from collections.abc import Iterable

import msgspec

from kvrs.core import checkpoints
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.cluster_view import NO_PREFIX
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, StoredCheckpoint, Stream
from kvrs.core.state import State
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.rows import NO_ROWS, RowsReport


def kept_pages(state: State, event: ev.PagesKept) -> None:
    state.kept[event.instance] = event


def instance_up(state: State, member: Member) -> None:
    """Record the KV of open streams that the instance has kept."""
    find_rows(state, member)
    event = state.kept.pop(member.id, None)
    if event is None or event.epoch != member.epoch:
        return
    for stream_id, pages in event.pages.items():
        if (stream := state.streams.get(stream_id)) is not None:
            retain(state, stream, member, pages)


def agent_up(state: State, event: ev.HolderUp) -> None:
    agent = state.view.agents.get(event.holder)
    if agent is not None and event.epoch <= agent.epoch:
        return
    if agent is not None:
        _lose(state, agent, "replaced by a new epoch")
    agent = state.view.agents[event.holder] = state.agent_of(event).begin(event)
    state.view.stored.up(agent, keeps=False)


def agent_lost(state: State, event: ev.HolderLost) -> None:
    agent = state.view.agents.get(event.holder)
    if agent is not None and event.epoch >= agent.epoch:
        _lose(state, agent, event.cause)


def reported(state: State, event: ev.CheckpointsReported) -> None:
    agent = state.view.agents.get(event.holder)
    if agent is None:
        _replicated(state, event)
        return
    if event.epoch != agent.epoch:
        return
    agent.reported_bytes, agent.reported_checkpoints = event.reserved_bytes, event.checkpoints
    for stream_id, pages in event.pages.items():
        if (stream := state.streams.get(stream_id)) is not None:
            checkpoints.reported(state, stream, agent, pages)
    _rows_reported(state, agent, event.rows)


def _replicated(state: State, event: ev.CheckpointsReported) -> None:
    """Note an instance's report of replicas. A stream's KV that it keeps under a lease counts
    instead of a replica.
    """
    member = state.view.members.get(event.holder)
    if member is None or event.epoch != member.epoch:
        return
    for stream_id, pages in event.pages.items():
        stream = state.streams.get(stream_id)
        if stream is None:
            continue
        held = stream.holders.get(member.id)
        if held is not None and not held.is_replica:
            continue
        if pages:
            stream.holders[member.id] = Holder(member, pages, is_replica=True)
            member.held.add(stream_id)
        elif held is not None:
            forget(state, stream_id, member.id)


def retain(state: State, stream: Stream, member: Member, pages: int) -> None:
    stream.holders[member.id] = Holder(member, pages)
    member.held.add(stream.id)


def leave(state: State, stream: Stream, member: Member, pages: int) -> None:
    """Note that a stream leaves an instance, from which it may fetch its KV until it resumes."""
    held = stream.holders.get(member.id)
    kept = held.pages - held.left_pages if held is not None else 0
    stream.holders[member.id] = Holder(member, max(pages, kept), max(0, pages - kept))
    member.held.add(stream.id)


def resumed(state: State, stream: Stream) -> None:
    """Note that a stream has resumed: KV that it left elsewhere may be overwritten."""
    for instance, held in [*stream.holders.items()]:
        if held.left_pages == held.pages:
            forget(state, stream.id, instance)
        elif held.left_pages:
            retain(state, stream, held.member, held.pages - held.left_pages)


def is_left_at(state: State, instance: InstanceId) -> bool:
    """Return whether streams that left the instance have not resumed yet, and may fetch
    KV there.
    """
    member = state.view.members.get(instance)
    return member is not None and any(
        state.streams[each].holders[instance].left_pages for each in member.held
    )


def forget(state: State, stream_id: StreamId, holder: InstanceId) -> None:
    """Note that the holder has dropped the stream's KV."""
    stream = state.streams.get(stream_id)
    if stream is None:
        return
    if holder in stream.checkpoints:
        checkpoints.lose(state, stream, holder, f"{holder} keeps no KV of it any more")
    if (found := stream.holders.pop(holder, None)) is not None:
        found.member.held.discard(stream_id)


def distrust(state: State, stream: Stream) -> None:
    """Drop a stream's KV, which may spoil its logits: the next attempt loads none of it, and finds
    none in a cache, because the driver salts its pages anew.
    """
    for holder in {*stream.holders, *stream.checkpoints}:
        forget(state, stream.id, holder)
    stream.prefix = NO_PREFIX


def of(state: State, stream_id: StreamId) -> tuple[ev.Kept, ...]:
    """All locations of a stream's KV, for a proxy that may have to continue it."""
    stream = state.streams.get(stream_id)
    if stream is None:
        return ()
    held = [
        ev.Kept(holder, found.member.epoch, found.pages) for holder, found in stream.holders.items()
    ]
    # Rows are left out: the other proxy knows by its own reports whose rows agents have.
    stored = [
        ev.Kept(name, found.agent.epoch, found.pages)
        for name, found in stream.checkpoints.items()
        if not found.rows
    ]
    return (*held, *stored)


def inherit(state: State, stream: Stream, kept: Iterable[ev.Kept]) -> None:
    """Take over locations from another proxy, if their epochs are still up."""
    for each in kept:
        member, agent = state.view.members.get(each.holder), state.view.agents.get(each.holder)
        if member is not None and member.epoch == each.epoch:
            retain(state, stream, member, each.pages)
        elif agent is not None and agent.epoch == each.epoch:
            checkpoints.adopt(state, stream, agent, each.pages)


def _lose(state: State, agent: Agent, cause: str) -> None:
    del state.view.agents[agent.id]
    state.view.stored.lost(agent)
    _rows_lost(state, agent)
    for stream_id in list(agent.streams):
        checkpoints.lose(state, state.streams[stream_id], agent.id, f"{agent.id} was lost: {cause}")


def _rows_reported(state: State, agent: Agent, rows: RowsReport) -> None:
    """Replace the set of rows that the agent serves."""
    if rows == agent.rows:
        return
    _note_rows(state, agent, rows)
    for member in state.view.by_node.get(agent.node, ()):
        find_rows(state, member)
    _drop_unserved(state, agent, f"{agent.id} has given its rows back")


def _drop_unserved(state: State, agent: Agent, why: str) -> None:
    """Forget the streams' rows that the agent does not serve any more."""
    for name in [*agent.streams]:
        stream = state.streams[name]
        stored = stream.checkpoints[agent.id]
        if stored.engine is not None and not agent.rows_of(stored.engine, stored.rows):
            checkpoints.lose(state, stream, agent.id, why)


def doubt(state: State, asked: Iterable[InstanceId], engines: Iterable[InstanceId]) -> None:
    """Note that these agents did not have the rows of these instances, until they report other
    rows.
    """
    for name in asked:
        if (agent := state.view.agents.get(name)) is not None:
            agent.doubted.update(engines)
            _drop_unserved(state, agent, f"{name} did not have its rows")


def _note_rows(state: State, agent: Agent, rows: RowsReport) -> None:
    for copy in agent.rows.copied:
        state.copying[copy.node].pop(agent.id, None)
    agent.rows = rows
    agent.doubted.clear()
    for copy in rows.copied:
        state.copying[copy.node][agent.id] = agent


def _rows_lost(state: State, agent: Agent) -> None:
    _note_rows(state, agent, NO_ROWS)
    for member in state.view.by_node.get(agent.node, ()):
        # While another agent has a second copy of the rows, their namespace stays: this agent's
        # loss may be known before that of the node's instances, whose streams then use the copy.
        others = state.copying[member.node].values()
        if member.shared.has_tier and not any(
            other.rows_of(member, member.shared.rows) for other in others
        ):
            member.set_rows("")


def find_rows(state: State, member: Member) -> None:
    """Note the namespace of the instance's rows.

    The namespace of a dead engine is kept: the agent may report the death before the engine's
    streams are moved, and their recovery needs the rows.
    """
    agent = state.view.agent_on(member.node)
    if agent is None or not state.settings.keeps_checkpoints:
        return
    own = [each for each in agent.rows.regions if each.engine == member.id]
    alive = next((each.namespace for each in own if each.is_alive), "")
    member.shared = msgspec.structs.replace(
        member.shared,
        tier_tokens=sum(each.rows * each.row_tokens for each in own if each.is_alive),
        row_tokens=max((each.row_tokens for each in own), default=0),
    )
    is_gone = member.shared.has_tier and all(each.namespace != member.shared.rows for each in own)
    if alive or is_gone:
        member.set_rows(alive)


def rows_left(state: State, stream: Stream, member: Member) -> None:
    """Note the holders of a stream's rows when its attempt at the instance, which produced
    tokens, has ended: the agent of the instance's node, and those that copy its rows. Of copies
    that are not complete the stream is taken to have an average part.
    """
    tokens = stream.history_tokens - 1
    if not member.shared.in_store and member.shared.row_tokens:
        tokens -= tokens % member.shared.row_tokens  # Rows are stored and loaded whole.
    pages = tokens // member.abilities.page_size_tokens
    if not member.shared.rows or not pages:
        return
    shares = {state.view.store: 1.0}
    if not member.shared.in_store:
        own = state.view.agent_on(member.node)
        agents = (own, *state.copying[member.node].values())
        shares = {each: each.rows_of(member, member.shared.rows) for each in agents if each}
    for agent, share in shares.items():
        if share:
            stream.checkpoints[agent.id] = StoredCheckpoint(
                agent,
                member.info.geometry,
                pages=int(pages * share),
                rows=member.shared.rows,
                engine=None if member.shared.in_store else member,
            )
            agent.streams.add(stream.id)
