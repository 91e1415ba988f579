"""Peers of a proxy that come and go under numbered names: `proxy.numbered_peers`. Pure."""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from kvrs.config.proxy import PeerSettings


class NameStatus(Enum):
    FOUND = "found"
    ABSENT = "absent"  # DNS answers that there is no such name.
    NO_ANSWER = "no answer"


def followed(
    possible: Sequence[PeerSettings],
    held: Sequence[PeerSettings],
    answers: Mapping[str, NameStatus],
    live: Collection[str],
) -> list[PeerSettings]:
    """The peers after a look-up, of those that there may be; `answers` by id of the peer, `live`
    the ids of the processes that are up.

    A name without an answer stays what it was. A peer that is up stays without its name too: DNS
    may be wrong, and its records are at hand.
    """
    had = {peer.id for peer in held}

    def stays(peer: PeerSettings) -> bool:
        return peer.id in had and any(each.id in live for each in peer.each())

    kept: list[PeerSettings] = []
    for peer in possible:
        match answers[peer.id]:
            case NameStatus.FOUND:
                is_peer = True
            case NameStatus.ABSENT:
                is_peer = stays(peer)
            case NameStatus.NO_ANSWER:
                is_peer = peer.id in had
        if is_peer:
            kept.append(peer)
    return kept
