"""Functions that read and delete records at all proxies, without taking over the streams."""

import asyncio
from collections.abc import Sequence

import msgspec

from kvrs.protocol.mirror import LookupAnswer, ReadAnswer, RecordVersion
from kvrs.proxy.mirror.peers import ProxyPeer
from kvrs.proxy.mirror.records import Record, record_from
from kvrs.proxy.mirror.replication import Mirror


class StoredRecord(msgspec.Struct, frozen=True):
    record: Record
    runs: bool  # The stream runs at the proxy from which the record was read.


def own_record(mirror: Mirror, key: str) -> ReadAnswer:
    """Return the record that this proxy has under a key, if any."""
    if (record := mirror.book.records.get(key)) is None:
        return ReadAnswer(None, runs=False)
    if (keyed := mirror.streams.get(key)) is not None:
        keyed.note_state()
    return ReadAnswer(record.update(record.header_s), runs=record.role.is_owner)


def drop_own(mirror: Mirror, key: str) -> LookupAnswer:
    """Forget the record here, and end its stream if it runs here; return the record's version."""
    found = LookupAnswer(mirror.book.version(key))
    mirror.supersede(key)
    mirror.book.forget(key, dropped_s=mirror.clock())
    return found


async def read_record(mirror: Mirror, keys: Sequence[str], now_s: float) -> StoredRecord | None:
    """Return the record under one of the keys, from the stream's owner or else from its mirror;
    None: no proxy has it.
    """
    for key in keys:
        found = (await mirror.peers.lookup(key, live_only=True)).versions
        answers = [(version, mirror.peers.known[name]) for name, version in found.items()]
        own = mirror.book.version(key)
        ranked: list[tuple[RecordVersion, ProxyPeer | None]] = [*answers]
        if own is not None:
            ranked.append((own, None))
        for _, peer in sorted(ranked, key=lambda each: _rank(each[0]), reverse=True):
            answer = (
                own_record(mirror, key)
                if peer is None
                else await mirror.peers.answer(peer, peer.read(key))
            )
            if answer is not None and answer.record is not None and answer.record.header:
                return StoredRecord(record_from(answer.record, now_s), answer.runs)
    return None


def _rank(version: RecordVersion) -> tuple[int, int, bool, bool]:
    """Return the sort key of a version: the latest owner comes first, even though it does not grant
    claims while it has a mirror.
    """
    is_first = version.copy_hops == 0
    return version.owner_epoch, version.mirror_no, is_first, not version.grants


async def drop_record(mirror: Mirror, keys: Sequence[str]) -> bool:
    """Forget the record at all live proxies; return whether there was one."""
    answers: list[LookupAnswer | None] = [drop_own(mirror, key) for key in keys]
    peers = mirror.peers
    asked = [peers.answer(peer, peer.drop(key)) for key in keys for peer in peers.live]
    answers += await asyncio.gather(*asked)
    return any(answer is not None and answer.version is not None for answer in answers)
