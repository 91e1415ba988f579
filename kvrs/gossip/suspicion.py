"""Length of a suspicion, and the local health score (Lifeguard, arXiv 1707.00788)."""

from math import log, log10

from kvrs.config.gossip import GossipSettings


class Suspicion:
    """Suspicion of one incarnation of one member (SWIM, section 4.2).

    Each further suspector shortens it: probes of a dead node fail from everywhere, while a lost
    packet, or a suspector that does not receive, is confirmed by no other node. A node declares a
    member dead only if a probe of its own failed during this suspicion (`own_probe_failed`).
    """

    __slots__ = ("confirmations", "least_s", "most_s", "own_probe_failed", "probing", "since_s")

    def __init__(self, settings: GossipSettings, members: int, since_s: float) -> None:
        """`members`: number of reachable members, with this node and the suspect."""
        self.since_s = since_s
        self.least_s = (
            settings.suspicion_mult * max(1.0, log10(members)) * settings.probe_interval_s
        )
        self.most_s = self.least_s * settings.suspicion_max_mult
        # All but the suspect and the first suspector may confirm.
        self.confirmations = max(0, min(settings.confirmations, members - 2))
        self.own_probe_failed = False
        self.probing = False  # Its time is over, and a probe of this node is in progress.

    def ends_s(self, suspectors: int) -> float:
        """The end, after `most - (most - least) * log(c + 1) / log(k + 1)` with c of k
        confirmations (Lifeguard, LHA-Suspicion).
        """
        if self.confirmations == 0:
            return self.since_s + self.least_s
        share = min(1.0, log(max(1, suspectors)) / log(self.confirmations + 1))
        return self.since_s + self.most_s - (self.most_s - self.least_s) * share


class LocalHealth:
    """Lifeguard's local health score: 0 is healthy. A node whose own probes fail where those of
    others do not, or that has to refute, gives other members more time.
    """

    __slots__ = ("_max", "score")

    def __init__(self, most: int) -> None:
        self.score = 0
        self._max = most

    def worsen(self, by: int) -> None:
        self.score = min(self._max, self.score + by)

    def improve(self) -> None:
        if self.score:
            self.score -= 1
