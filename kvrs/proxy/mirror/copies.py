"""Copies of records that no live peer has, each to a peer of its own. Pure."""

from collections.abc import Collection

from kvrs.protocol.mirror import AckStatus, Update, UpdateAck
from kvrs.proxy.mirror.book import RecordBook
from kvrs.proxy.mirror.records import Record, mirror_for
from kvrs.proxy.mirror.roles import RoleChange


class CopyQueue:
    """Assigns every record of which this proxy has the only copy to a live peer, until that peer
    has acknowledged it.
    """

    def __init__(self, book: RecordBook) -> None:
        self._book = book
        self._targets: dict[str, str] = {}  # The peer that gets a copy next, by key.
        # Refused for want of room; they are tried again once a peer comes or goes.
        self._no_room: set[str] = set()

    def plan(self, live: Collection[str], mirrors: Collection[str], now_s: float) -> set[str]:
        """Assign what is not assigned yet to one of `mirrors`; return the peers that get something
        new.
        """
        added: set[str] = set()
        for record in self._book.sole(live, now_s) if live else []:
            if record.key not in self._targets and record.key not in self._no_room:
                target = mirror_for(record.key, mirrors)
                assert target is not None
                self._targets[record.key] = target
                added.add(target)
        return added

    def records_for(self, peer: str) -> list[Record]:
        """The records to copy to this peer. One that is gone, or whose stream runs here again, is
        left out and forgotten.
        """
        records = []
        for key in [key for key, target in self._targets.items() if target == peer]:
            record = self._book.records.get(key)
            if record is None or record.role.is_owner:
                del self._targets[key]
            else:
                records.append(record)
        return records

    def take(
        self, record: Record, update: Update, peer: str, ack: UpdateAck, live: Collection[str]
    ) -> None:
        """Apply the answer of a peer to the copy of a record."""
        self._targets.pop(record.key, None)
        if self._book.records.get(record.key) is not record or record.role.is_owner:
            return
        if ack.status is AckStatus.SUPERSEDED:
            self._book.forget(record.key)
        elif ack.status is AckStatus.FULL:
            self._no_room.add(record.key)
        elif record.owner_epoch == update.owner_epoch and record.peer not in live:
            record.change_role(RoleChange.COPIED, peer)

    def peers_changed(self, lost: str | None = None) -> None:
        self._targets = {key: target for key, target in self._targets.items() if target != lost}
        self._no_room.clear()

    def expire(self) -> None:
        self._no_room &= self._book.records.keys()
