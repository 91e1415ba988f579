"""Comparison of the files of several proxies."""

from collections.abc import Iterator, Mapping
from itertools import permutations

from kvrs.config.proxy import ProxySettings


def faults_between(proxies: Mapping[str, ProxySettings]) -> Iterator[tuple[str, str]]:
    """Differences of each proxy from its entry in another one's `peers`; `proxies` by file. Yields
    the file that has the fault, and the fault.
    """
    for (file, one), (of_other, other) in permutations(proxies.items(), 2):
        if one.id == other.id:
            yield file, f"proxy.id: got {one.id!r}, as in {of_other}; allowed: an id of its own"
        else:
            yield from ((file, fault) for fault in _faults_of_entry(one, other, of_other))


def _faults_of_entry(one: ProxySettings, other: ProxySettings, of_other: str) -> Iterator[str]:
    found = [(index, peer) for index, peer in enumerate(one.peers) if peer.id == other.id]
    if not found:
        yield f"proxy.peers: lacks {other.id!r}, the proxy of {of_other}; allowed: all others"
    for index, peer in found:
        for key in ("peer_port", "workers"):
            got, wanted = getattr(peer, key), getattr(other, key)
            if got != wanted:
                yield (
                    f"proxy.peers.{index}.{key}: got {got}; allowed: {wanted}, proxy.{key} in "
                    f"{of_other}"
                )
