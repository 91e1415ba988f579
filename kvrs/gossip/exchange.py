"""Anti-entropy: two nodes compare digests of all members, and each sends the deltas that the other
lacks (scuttlebutt; van Renesse et al., LADIS 2008).

Member updates are exchanged as well as records, so that updates which piggybacking missed arrive in
the end, also after a partition.
"""

from collections import deque

from kvrs.gossip.detector import Detector
from kvrs.gossip.facts import FactRecord, RecordChanged, start_for
from kvrs.gossip.members import Member, Random
from kvrs.gossip.sender import FANOUT, ROOM_BYTES
from kvrs.gossip.wire import (
    Delta,
    Digest,
    KnownMember,
    MemberUpdate,
    RecordDelta,
    Status,
    encoded_bytes,
    text_bytes,
)
from kvrs.ids import NodeId

# Probe intervals between two exchanges with a random peer, and between two attempts to reach a dead
# member or a lost seed.
_SYNC_INTERVALS = 2.0
RECONNECT_INTERVALS = 10.0
FORGET_S = 3600.0  # Time for which a member that is dead or has left stays in the table.
_DELTAS = 16  # Most packets that answer a digest; the next exchange brings the rest.
_WANTS_SHARE = 0.5  # Largest share of a delta's bytes that `wants` may take.
# Share of the interval at which exchanges repeat for `_BUSY_INTERVALS` after one that has brought
# records, since more may be missing and packets may be lost.
_BUSY_SHARE = 0.2
_BUSY_INTERVALS = 2.0


class Exchange:
    def __init__(
        self,
        detector: Detector,
        interval_s: float,
        seeds: dict[NodeId, str],
        random: Random,
        now_s: float,
    ) -> None:
        self._detector = detector
        self._members = detector.members
        self._interval_s = _SYNC_INTERVALS * interval_s
        self._reconnect_interval_s = RECONNECT_INTERVALS * interval_s
        self._seeds = seeds
        self._random = random
        # Last node id of the last digest, behind which the next digest begins; "": at the table's
        # start.
        self._after = ""
        self._sync_at_s = self._synced_s = self._busy_until_s = now_s
        self._reconnect_at_s = now_s + self._reconnect_interval_s
        self._first = True

    @property
    def due_s(self) -> float:
        return min(self._sync_at_s, self._reconnect_at_s)

    def tick(self, now_s: float) -> None:
        """Begin the exchanges that are due; `now_s` is the node's own time."""
        if now_s >= self._sync_at_s:
            self._synced_s = now_s
            share = _BUSY_SHARE if now_s < self._busy_until_s else 1.0
            self._sync_at_s = now_s + share * self._interval_s * (0.9 + 0.2 * self._random())
            self._sync(now_s)
        if now_s >= self._reconnect_at_s:
            self._reconnect_at_s = now_s + self._reconnect_interval_s
            self._reconnect()

    def sync_now(self, now_s: float) -> None:
        self._sync_at_s = self._reconnect_at_s = now_s

    def _sync(self, now_s: float) -> None:
        if self._first:
            self._first = False
            seeds = list(self._seeds)
            for _ in range(min(FANOUT, len(seeds))):
                self._send_digest(seeds.pop(int(self._random() * len(seeds))))
            return
        peers = self._members.random_peers(1)
        if peers:
            self._send_digest(peers[0].id)
        elif self._seeds:
            self._reconnect()
        self._forget(now_s)

    def _reconnect(self) -> None:
        """Send a digest to a node that is not among the peers: a dead one may be alive behind a
        partition that has healed, and a seed that has left may be back without knowing this node.
        """
        table = self._members.table
        lost = [node for node in self._seeds if node not in table]
        lost += [
            member.id
            for member in table.values()
            if member.status is Status.DEAD
            or (member.status is Status.LEFT and member.id in self._seeds)
        ]
        if lost:
            self._send_digest(lost[int(self._random() * len(lost))])

    def _forget(self, now_s: float) -> None:
        """Forget the members that have been unreachable for `FORGET_S`."""
        table, before_s = self._members.table, now_s - FORGET_S
        if len(self._members.peers) + 1 < len(table):
            for member in list(table.values()):
                if not member.reachable and member.since_s < before_s:
                    self._detector.forget(member)

    # The methods below make digests.

    def _send_digest(self, node: NodeId) -> None:
        me = self._detector.me
        known, until = self._digest_part(ROOM_BYTES - me.update_bytes)
        after, self._after = self._after, until
        # This node's own update is included, because its address is needed for the answer.
        digest = Digest(me.epoch, me.incarnation, after, until, known, (me.update,))
        self._detector.sender.send(node, digest)

    def _digest_part(self, room: int) -> tuple[tuple[KnownMember, ...], str]:
        """Return the digest entries behind the last digest's, as many as fit into `room` bytes, and
        the last id among them; "": they reach the end of the table.
        """
        table, found = self._members.table, list[KnownMember]()
        room -= text_bytes(self._after)
        for node in self._members.between(self._after, "") if self._after else self._members.ids:
            known, size = table[node].known()
            room -= size
            if room < 0:
                break
            found.append(known)
        else:
            return tuple(found), ""
        # The last id is sent as the digest's upper bound, and needs room as well.
        room += size
        while room < text_bytes(found[-1].id):
            room += table[found.pop().id].known()[1]
        return tuple(found), found[-1].id

    # The methods below answer digests and apply deltas.

    def on_digest(self, sender: NodeId, digest: Digest, now_s: float, clock_s: float) -> None:
        """Answer a digest with the deltas that its sender lacks; the ages of entries are computed
        by `clock_s`, the caller's clock, and not by the node's own time `now_s`.
        """
        lacking, wants, matched = self._compare(digest.known, now_s)
        ids = self._members.between(digest.after, digest.until)
        if matched < len(ids):
            named = {known.id for known in digest.known}
            table = self._members.table
            lacking += [
                (table[node], None)
                for node in ids
                if node not in named and self._is_worth_sending(table[node], now_s)
            ]
        self._send_deltas(sender, lacking, wants, clock_s)

    def on_delta(self, sender: NodeId, delta: Delta, now_s: float, clock_s: float) -> None:
        for record in delta.records:
            self._apply_record(record, clock_s)
        if delta.records:
            interval_s = self._interval_s
            self._busy_until_s = now_s + _BUSY_INTERVALS * interval_s
            self._sync_at_s = min(self._sync_at_s, self._synced_s + _BUSY_SHARE * interval_s)
        if delta.wants:
            lacking, _, _ = self._compare(delta.wants, now_s)
            self._send_deltas(sender, lacking, [], clock_s)

    def _compare(
        self, theirs: tuple[KnownMember, ...], now_s: float
    ) -> tuple[list[tuple[Member, KnownMember | None]], list[KnownMember], int]:
        """Compare a digest's entries with the table. Returns the members of which the sender lacks
        the state or record entries, this node's entries of members to request from it, and the
        number of entries whose members are known here.
        """
        table, me = self._members.table, self._detector.me
        lacking, wants, matched = list[tuple[Member, KnownMember | None]](), list[KnownMember](), 0
        for known in theirs:
            member = table.get(known.id)
            if member is None:
                if known.status <= Status.SUSPECT:
                    wants.append(KnownMember(known.id, 0, 0, Status.ALIVE, 0, 0))
                continue
            matched += 1
            mine = member.known()[0]
            if known == mine:
                continue
            if member is me:
                self._check_own_record(known, now_s)
                lacking.append((member, known))
                continue
            same, theirs_s, mine_s = known.epoch == mine.epoch, known.state, mine.state
            if theirs_s > mine_s or (
                same
                and member.reachable
                and start_for(mine.version, mine.floor, known.version, known.floor) is not None
            ):
                wants.append(mine)
            if theirs_s < mine_s or (
                same and start_for(known.version, known.floor, mine.version, mine.floor) is not None
            ):
                lacking.append((member, known))
        return lacking, wants, matched

    def _check_own_record(self, known: KnownMember, now_s: float) -> None:
        self._detector.on_update_about_self(known.state, now_s)
        me = self._detector.me
        if known.epoch == me.epoch and me.record is not None and known.version > me.record.version:
            # Another node has edits of this epoch that this process did not make, so an earlier
            # process had the epoch.
            newer = known.epoch, me.incarnation + 1, Status.ALIVE
            self._detector.on_update_about_self(newer, now_s)

    def _send_deltas(
        self,
        to: NodeId,
        lacking: list[tuple[Member, KnownMember | None]],
        wants: list[KnownMember],
        clock_s: float,
    ) -> None:
        """Send the other node what it lacks, and request `wants` from it, in at most `_DELTAS`
        packets.
        """
        me = self._detector.me
        # The first member is a random one, so that every member gets its turn if not all fit.
        first = int(self._random() * len(lacking)) if lacking else 0
        left = deque(lacking[first:] + lacking[:first])
        for _ in range(_DELTAS):
            if not left and not wants:
                return
            asked, room = _as_fits(wants, ROOM_BYTES)
            wants = wants[len(asked) :]
            updates, records = self._fill(left, room, clock_s)
            if asked or updates or records:
                packet = Delta(me.epoch, me.incarnation, tuple(updates), tuple(records), asked)
                self._detector.sender.send(to, packet)
            elif left:
                left.popleft()  # The next entry of this record fits into no packet.

    def _fill(
        self, left: deque[tuple[Member, KnownMember | None]], room: int, clock_s: float
    ) -> tuple[list[MemberUpdate], list[RecordDelta]]:
        """Remove the members from the front of `left` whose updates and entries fit into a packet,
        and return these. A member whose record fits only in part stays, with the rest.
        """
        updates, records = list[MemberUpdate](), list[RecordDelta]()
        while left:
            member, known = left[0]
            version, floor = 0, 0
            if known is not None and known.epoch == member.epoch:
                version, floor = known.version, known.floor
            if known is None or member.state > known.state:
                if member.update_bytes > room:
                    break
                updates.append(member.update)
                room -= member.update_bytes
                left[0] = member, KnownMember(member.id, *member.state, version, floor)
            record = member.record if member.reachable else None
            if record is not None:
                start = start_for(version, floor, record.version, record.floor)
                if start is not None:
                    delta = record.delta(member.id, member.epoch, start, room, clock_s)
                    if delta is None:
                        break
                    records.append(delta)
                    room -= encoded_bytes(delta)
                    if delta.end < record.version:
                        left[0] = (
                            member,
                            KnownMember(member.id, *member.state, delta.end, delta.floor),
                        )
                        break
            left.popleft()
        return updates, records

    def _apply_record(self, delta: RecordDelta, clock_s: float) -> None:
        member = self._members.table.get(delta.id)
        # Only the node itself writes its record, and each epoch has a record of its own.
        if member is None or member is self._detector.me or member.epoch != delta.epoch:
            return
        if member.record is None:
            member.record = FactRecord()
        changed = member.record.apply(delta, clock_s)
        member.record_changed()
        if member.reachable:
            for kind, name in changed:
                held = member.record.entries.get((kind, name))
                if held is not None and held.value is not None and held.fact is None:
                    self._detector.facts.unread += 1
                self._detector.events.append(RecordChanged(member.id, kind, name))

    def _is_worth_sending(self, member: Member, now_s: float) -> bool:
        """Return whether to send a member: not if it has been unreachable for half of `FORGET_S`,
        because nodes that have forgotten it would get it again and again.
        """
        return member.reachable or now_s - member.since_s < FORGET_S / 2


def _as_fits(wants: list[KnownMember], room: int) -> tuple[tuple[KnownMember, ...], int]:
    kept, most = list[KnownMember](), int(room * _WANTS_SHARE)
    for want in wants:
        size = encoded_bytes(want)
        if size > most:
            break
        kept.append(want)
        most -= size
        room -= size
    return tuple(kept), room
